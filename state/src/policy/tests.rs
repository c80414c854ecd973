//! What holds for every policy, and what each one is for.

use proptest::prelude::*;

use super::*;

const REQUEST: Request = Request {
    jitter: 1,
    blocks: 100,
    tokens: 1600,
    tokens_per_block: 16,
};

fn policies() -> impl Strategy<Value = PolicyConfig> {
    prop_oneof![
        Just(PolicyConfig::LeastRequest),
        Just(PolicyConfig::Cost(CostSettings::default())),
        (any::<[u32; 5]>(), 0_u32..=1000).prop_map(|(prices, near_permille)| {
            PolicyConfig::Cost(CostSettings {
                prefill_ns_per_token: prices[0],
                decode_ns_per_request: prices[1],
                waiting_ns_per_request: prices[2],
                kv_pressure_from_permille: prices[3],
                kv_pressure_ns_per_permille: prices[4],
                eviction_permille: near_permille,
                near_permille,
            })
        }),
    ]
}

fn requests() -> impl Strategy<Value = Request> {
    (any::<u64>(), 0_u32..10_000, any::<u32>(), 0_u32..1024).prop_map(
        |(jitter, blocks, tokens, tokens_per_block)| Request {
            jitter,
            blocks,
            tokens,
            tokens_per_block,
        },
    )
}

fn candidate() -> impl Strategy<Value = Candidate> {
    let edge = || prop_oneof![0_u32..50, Just(u32::MAX)];
    (
        edge(),
        edge(),
        edge(),
        prop_oneof![0_u64..100_000, Just(u64::MAX)],
        0_u32..=1000,
        (edge(), prop_oneof![Just(None), edge().prop_map(Some)]),
    )
        .prop_map(
            |(matched, running, waiting, pending_prefill_tokens, kv_usage_permille, cache)| {
                Candidate {
                    slot: Slot(0),
                    matched,
                    owned_blocks: cache.0,
                    capacity_blocks: cache.1,
                    running,
                    waiting,
                    pending_prefill_tokens,
                    kv_usage_permille,
                }
            },
        )
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    prop::collection::vec(candidate(), 0..12).prop_map(|mut candidates| {
        for (slot, candidate) in candidates.iter_mut().enumerate() {
            candidate.slot = Slot(slot as u16);
        }
        candidates
    })
}

proptest! {
    #[test]
    fn a_choice_is_a_candidate_within_the_window(
        policy in policies(), request in requests(), candidates in candidates(),
    ) {
        let Some(choice) = choose(&policy, &request, &candidates) else {
            prop_assert!(candidates.is_empty());
            return Ok(());
        };
        let chosen = candidates.iter().find(|candidate| candidate.slot == choice.slot).unwrap();
        prop_assert_eq!(choice.matched, chosen.matched);
        let scores = scores(&policy, &request, &candidates);
        let least = scores.iter().map(|score| score.score).min().unwrap();
        let own = scores[usize::from(choice.slot.0)].score;
        let near_permille = match policy {
            PolicyConfig::Cost(settings) => settings.near_permille,
            PolicyConfig::LeastRequest => 0,
        };
        prop_assert!(own <= near_limit(least, near_permille));
    }

    #[test]
    fn a_choice_does_not_depend_on_the_order_of_candidates(
        policy in policies(), request in requests(), candidates in candidates(), turn in 0_usize..12,
    ) {
        let first = choose(&policy, &request, &candidates);
        prop_assert_eq!(first, choose(&policy, &request, &candidates));
        let mut turned = candidates.clone();
        if !turned.is_empty() {
            let by = turn % turned.len();
            turned.rotate_left(by);
        }
        prop_assert_eq!(first, choose(&policy, &request, &turned));
        turned.reverse();
        prop_assert_eq!(first, choose(&policy, &request, &turned));
    }

    #[test]
    fn a_better_candidate_in_every_respect_is_never_passed_over_for_a_colder_one(
        request in requests(), candidates in candidates(), near_permille in 0_u32..=1000,
    ) {
        let settings = CostSettings { near_permille, ..CostSettings::default() };
        let policy = PolicyConfig::Cost(settings);
        let Some(choice) = choose(&policy, &request, &candidates) else { return Ok(()) };
        let chosen = candidates[usize::from(choice.slot.0)];
        for other in &candidates {
            let is_better = cost::score(&settings, &request, other)
                < cost::score(&settings, &request, &chosen);
            prop_assert!(!(is_better && other.matched > chosen.matched));
        }
    }
}

#[test]
fn cost_sends_a_request_to_its_prefix_until_load_outweighs_it() {
    let policy = PolicyConfig::Cost(CostSettings::default());
    let cold = Candidate {
        slot: Slot(0),
        ..Candidate::default()
    };
    let warm = Candidate {
        slot: Slot(1),
        matched: 90,
        ..Candidate::default()
    };
    let choice = choose(&policy, &REQUEST, &[cold, warm]).unwrap();
    assert_eq!(
        (choice.slot, choice.matched, choice.reason),
        (Slot(1), 90, Reason::LeastCost)
    );

    let busy = Candidate {
        pending_prefill_tokens: 1500,
        ..warm
    };
    let choice = choose(&policy, &REQUEST, &[cold, busy]).unwrap();
    assert_eq!((choice.slot, choice.reason), (Slot(0), Reason::LeastCost));
}

#[test]
fn under_load_the_window_does_not_send_a_request_away_from_its_prefix() {
    let policy = PolicyConfig::Cost(CostSettings::default());
    let loaded = Candidate {
        pending_prefill_tokens: 1_000_000,
        ..Candidate::default()
    };
    let cold = Candidate {
        slot: Slot(0),
        ..loaded
    };
    let warm = Candidate {
        slot: Slot(1),
        matched: 90,
        ..loaded
    };
    for jitter in 0..64 {
        let request = Request { jitter, ..REQUEST };
        assert_eq!(
            choose(&policy, &request, &[cold, warm]).unwrap().slot,
            Slot(1)
        );
    }
}

#[test]
fn equal_candidates_share_simultaneous_arrivals() {
    let equal: Vec<Candidate> = (0..4)
        .map(|slot| Candidate {
            slot: Slot(slot),
            ..Candidate::default()
        })
        .collect();
    for policy in [
        PolicyConfig::Cost(CostSettings::default()),
        PolicyConfig::LeastRequest,
    ] {
        let mut shares = [0_u32; 4];
        for request in 0..4000_u64 {
            let request = Request {
                jitter: request.wrapping_mul(0x2545_f491_4f6c_dd1d),
                ..REQUEST
            };
            let choice = choose(&policy, &request, &equal).unwrap();
            assert_eq!(choice.reason, Reason::Jitter);
            shares[usize::from(choice.slot.0)] += 1;
        }
        assert!(
            shares.iter().all(|share| (850..1150).contains(share)),
            "{shares:?}"
        );
    }
}

#[test]
fn an_empty_cache_is_filled_before_a_full_one_loses_blocks() {
    let shares_a_block = Candidate {
        slot: Slot(0),
        matched: 1,
        owned_blocks: 950,
        capacity_blocks: Some(1000),
        ..Candidate::default()
    };
    let empty = Candidate {
        slot: Slot(1),
        capacity_blocks: Some(1000),
        ..Candidate::default()
    };
    let cost = |eviction_permille| {
        PolicyConfig::Cost(CostSettings {
            eviction_permille,
            ..CostSettings::default()
        })
    };
    let chosen = |policy: &PolicyConfig, candidates: &[Candidate]| {
        choose(policy, &REQUEST, candidates).map(|choice| choice.slot)
    };
    let both = [shares_a_block, empty];
    assert_eq!(chosen(&cost(0), &both), Some(Slot(0)));
    assert_eq!(chosen(&cost(300), &both), Some(Slot(1)));
    // Half the prompt is worth more than what half a prompt evicts.
    let holds_half = Candidate {
        matched: 50,
        owned_blocks: 1000,
        ..shares_a_block
    };
    assert_eq!(chosen(&cost(300), &[holds_half, empty]), Some(Slot(0)));
    // While there is room, and where the capacity is not known, nothing is lost.
    let has_room = Candidate {
        owned_blocks: 901,
        ..shares_a_block
    };
    let unknown = Candidate {
        capacity_blocks: None,
        ..shares_a_block
    };
    assert_eq!(chosen(&cost(1000), &[has_room, empty]), Some(Slot(0)));
    assert_eq!(chosen(&cost(1000), &[unknown, empty]), Some(Slot(0)));
}

#[test]
fn one_candidate_is_no_choice_and_none_is_none() {
    let only = Candidate {
        slot: Slot(7),
        ..Candidate::default()
    };
    let choice = choose(&PolicyConfig::LeastRequest, &REQUEST, &[only]).unwrap();
    assert_eq!(
        (choice.slot, choice.reason),
        (Slot(7), Reason::OnlyCandidate)
    );
    assert_eq!(choose(&PolicyConfig::LeastRequest, &REQUEST, &[]), None);
}

#[test]
fn settings_read_as_documented() {
    let read = |json| serde_json::from_str::<PolicyConfig>(json);
    assert_eq!(
        read(r#"{"policy":"cost","near_permille":5}"#).unwrap(),
        PolicyConfig::Cost(CostSettings {
            near_permille: 5,
            ..CostSettings::default()
        })
    );
    assert_eq!(
        read(r#"{"policy":"least-request"}"#).unwrap().name(),
        "least-request"
    );
    assert!(read(r#"{"policy":"cost","nearness":5}"#).is_err());
    assert!(read(r#"{"policy":"magic"}"#).is_err());
}
