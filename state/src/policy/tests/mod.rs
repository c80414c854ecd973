//! Properties of all policies, and the purpose of each.

mod baselines;
mod cases;
mod cost;
mod herd;
mod pairs;
mod position;
mod seeds;

use proptest::prelude::*;

use super::*;

const REQUEST: PolicyRequest = PolicyRequest {
    jitter: 1,
    blocks: 100,
    tokens: 1600,
    tokens_per_block: 16,
    prefix_key: 0,
    session: None,
    home: None,
    continued_tokens: 0,
    turn: 0,
    user: UserTokens {
        own_milli: 0,
        least_milli: None,
        most_milli: None,
    },
};

/// Returns every policy with its defaults, and those with many settings also with random ones.
fn policies() -> impl Strategy<Value = PolicyConfig> {
    let any_cost = any::<[u32; 3]>().prop_map(|prices| {
        PolicyConfig::Cost(CostSettings {
            prefill_ns_per_token: prices[0],
            decode_ns_per_request: prices[1],
            waiting_ns_per_request: prices[2],
        })
    });
    let any_prefix_cache = any::<[u32; 3]>().prop_map(|settings| {
        PolicyConfig::PrefixCache(PrefixCacheSettings {
            imbalance_abs_count: settings[0],
            standard_deviation_factor_milli: settings[1],
            min_match_blocks: settings[2],
        })
    });
    let any_vtc = any::<[u32; 6]>().prop_map(|settings| {
        PolicyConfig::VtcBasic(VtcBasicSettings {
            token_tracker_min_tokens: settings[0],
            token_tracker_max_tokens: settings[1],
            max_pod_load: settings[2],
            fairness_weight_milli: settings[3],
            utilization_weight_milli: settings[4],
            ..VtcBasicSettings::default()
        })
    });
    let any_preble = any::<[u32; 5]>().prop_map(|settings| {
        PolicyConfig::PrebleE2(PrebleE2Settings {
            exploit_above_permille: settings[0],
            imbalance_milli: settings[1],
            evicted_reuse_permille: settings[2],
            prefill_ns_per_token: settings[3],
            decode_ns_per_request: settings[4],
        })
    });
    let any_epp = any::<[u32; 4]>().prop_map(|settings| {
        PolicyConfig::Epp(EppSettings {
            prefix_weight: settings[0],
            queue_weight: settings[1],
            kv_weight: settings[2],
            min_match_tokens: settings[3],
        })
    });
    prop_oneof![
        8 => prop::sample::select(PolicyConfig::defaults()),
        1 => any_cost,
        1 => any_prefix_cache,
        1 => any_vtc,
        1 => any_preble,
        1 => any_epp,
        1 => any::<[u32; 3]>().prop_map(|settings| PolicyConfig::Chwbl(ChwblSettings {
            prefix_blocks: settings[0],
            virtual_nodes: settings[1],
            load_factor_milli: settings[2],
        })),
    ]
}

prop_compose! {
    fn requests()(
        jitter: u64, blocks in 0_u32..10_000, tokens: u32, tokens_per_block in 0_u32..1024,
        prefix_key: u64, session: Option<u64>, home in prop::option::of(0_u16..8),
        continued_tokens: u64, turn: u64,
        own_milli: u64, least_milli: Option<u64>, most_milli: Option<u64>,
    ) -> PolicyRequest {
        let user = UserTokens { own_milli, least_milli, most_milli };
        PolicyRequest {
            jitter, blocks, tokens, tokens_per_block, prefix_key, session, home: home.map(Slot),
            continued_tokens, turn, user,
        }
    }
}

prop_compose! {
    fn candidate()(
        matched in edge(), running in edge(), pending in edge(), waiting in edge(),
        free_blocks in edge(), loaded in prop::array::uniform3(edge()),
        evicts_to in prop::option::of(prop::sample::select(LowerTier::ALL.to_vec())),
        pending_prefill_tokens in prop_oneof![0_u64..100_000, Just(u64::MAX)],
        kv_usage_permille in 0_u32..=1000, is_model_listed: bool,
        prices: Option<([u32; 2], [Option<(u32, u32)>; 2])>,
    ) -> Candidate {
        Candidate {
            slot: Slot(0), matched, running, pending, waiting, pending_prefill_tokens, kv_usage_permille,
            free_blocks, is_model_listed, loaded: LowerTierBlocks::from(loaded),
            evicts_to,
            prices: prices.map(|(prices, ranges)| Prices {
                prefill_ns_per_token: prices[0], decode_ns_per_request: prices[1],
                prefill_range_ns: ordered(ranges[0]), decode_range_ns: ordered(ranges[1]),
                load: LoadPrices::ASSUMED,
            }),
        }
    }
}

fn ordered(range: Option<(u32, u32)>) -> Option<(u32, u32)> {
    range.map(|(one, other)| (one.min(other), one.max(other)))
}

fn edge() -> impl Strategy<Value = u32> {
    prop_oneof![0_u32..50, Just(u32::MAX)]
}

/// Generates candidates in slots with gaps, in ascending order.
fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    prop::collection::vec((candidate(), 1_u16..5), 0..12).prop_map(|candidates| {
        let mut slot = 0;
        let placed = candidates.into_iter().map(|(candidate, gap)| {
            slot += gap;
            Candidate {
                slot: Slot(slot),
                ..candidate
            }
        });
        placed.collect()
    })
}

fn chosen(candidates: &[Candidate], choice: Choice) -> Candidate {
    let found = candidates.iter().find(|it| it.slot == choice.slot);
    *found.expect("a policy chooses among the candidates")
}

proptest! {
    #[test]
    fn choices_are_first_tier_candidates_within_the_window(
        policy in policies(), request in requests(), candidates in candidates(),
    ) {
        let Some(choice) = choose(&policy, &request, &candidates) else {
            prop_assert!(candidates.is_empty());
            return Ok(());
        };
        prop_assert_eq!(choice.matched, chosen(&candidates, choice).matched);
        let scores = scores(&policy, &request, &candidates);
        let best = scores.iter().min_by_key(|it| (it.tier, it.score, it.then)).unwrap();
        let own = scores.iter().find(|it| it.slot == choice.slot).unwrap();
        let limit = match &policy {
            PolicyConfig::Cost(_) | PolicyConfig::Lmetric(_) | PolicyConfig::PrebleE2(_) => {
                rank::Tolerance::Near.limit(best.score)
            }
            PolicyConfig::Epp(_) | PolicyConfig::LeastKv => u64::MAX,
            _ => best.score,
        };
        prop_assert_eq!(own.tier, best.tier);
        prop_assert!(own.score <= limit, "{:?} above {}, the best is {:?}", own, limit, best);
        prop_assert_eq!(own.then, best.then);
        let of_tie = match request.home == Some(choice.slot) {
            true => Reason::Home,
            false => Reason::Jitter,
        };
        let reasons = [Reason::OnlyCandidate, of_tie, best.reason];
        prop_assert!(reasons.contains(&choice.reason), "{:?}", choice);
    }

    #[test]
    fn a_choice_does_not_depend_on_the_order_of_candidates(
        policy in policies(), request in requests(), candidates in candidates(), turn in 0_usize..12,
    ) {
        let sorted = scores(&policy, &request, &candidates);
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
        let mut again = scores(&policy, &request, &turned);
        again.sort_by_key(|score| score.slot);
        prop_assert_eq!(sorted, again);
    }

    #[test]
    fn a_dominated_candidate_is_never_chosen(
        request in requests(), candidates in candidates(),
    ) {
        let policy = PolicyConfig::Cost(CostSettings::default());
        let Some(choice) = choose(&policy, &request, &candidates) else { return Ok(()) };
        let chosen = chosen(&candidates, choice);
        let scores = scores(&policy, &request, &candidates);
        let own = scores.iter().find(|it| it.slot == choice.slot).unwrap();
        for (other, score) in candidates.iter().zip(&scores) {
            let is_better = score.score < own.score;
            prop_assert!(!(is_better && other.matched > chosen.matched));
        }
    }
}

#[test]
fn cost_follows_the_prefix_until_load_outweighs_it() {
    let policy = PolicyConfig::Cost(CostSettings::default());
    let cold = Candidate {
        slot: Slot(0),
        free_blocks: 1000,
        ..Candidate::default()
    };
    let warm = Candidate {
        slot: Slot(1),
        matched: 90,
        free_blocks: 1000,
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
fn the_window_keeps_requests_at_their_prefix_under_load() {
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
        let request = PolicyRequest { jitter, ..REQUEST };
        assert_eq!(
            choose(&policy, &request, &[cold, warm]).unwrap().slot,
            Slot(1)
        );
    }
}

#[test]
fn the_home_of_a_session_wins_among_near_equal_candidates_only() {
    let at = |slot, running| Candidate {
        slot: Slot(slot),
        running,
        ..Candidate::default()
    };
    let policy = PolicyConfig::LeastRequest;
    for jitter in 0..32 {
        let request = PolicyRequest {
            jitter,
            home: Some(Slot(1)),
            ..REQUEST
        };
        let choice = choose(&policy, &request, &[at(0, 3), at(1, 3), at(2, 3)]).unwrap();
        assert_eq!((choice.slot, choice.reason), (Slot(1), Reason::Home));
        let choice = choose(&policy, &request, &[at(0, 3), at(1, 4), at(2, 9)]).unwrap();
        assert_eq!(
            (choice.slot, choice.reason),
            (Slot(0), Reason::LeastRequests)
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
            let request = PolicyRequest {
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
fn a_single_candidate_is_chosen_and_none_gives_none() {
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
fn policy_settings_parse_as_documented() {
    let read = |json: &str| serde_json::from_str::<PolicyConfig>(json);
    assert_eq!(
        read(r#"{"policy":"lmetric","base_tokens":5}"#).unwrap(),
        PolicyConfig::Lmetric(LmetricSettings { base_tokens: 5 })
    );
    assert_eq!(
        read(r#"{"policy":"least-request"}"#).unwrap().name(),
        "least-request"
    );
    assert!(read(r#"{"policy":"magic"}"#).is_err());
    let by_position = read(r#"{"policy":"vllm-cache-aware","hashing":"position"}"#);
    assert_eq!(by_position.unwrap().needs().match_by, MatchBy::Position);
    let sampled = read(r#"{"policy":"vllm-cache-aware","touch":"sampled"}"#);
    assert_eq!(sampled.unwrap().needs().touch, Touch::Sampled);
    assert!(read(r#"{"policy":"vllm-cache-aware","touch":"never"}"#).is_err());
    for policy in PolicyConfig::defaults() {
        let name = policy.name();
        assert_eq!(read(&format!(r#"{{"policy":"{name}"}}"#)).unwrap(), policy);
        let unknown = read(&format!(r#"{{"policy":"{name}","nearness":5}}"#));
        assert!(unknown.is_err(), "{name} takes any setting");
        let written = serde_json::to_string(&policy).unwrap();
        assert_eq!(read(&written).unwrap(), policy);
        assert_eq!(policy.validate(), Ok(()));
    }
    let names: Vec<_> = PolicyConfig::defaults()
        .iter()
        .map(PolicyConfig::name)
        .collect();
    assert_eq!(names, POLICY_NAMES);
}

#[test]
fn an_out_of_bounds_setting_is_named() {
    let refusals = [
        r#"{"policy":"prefix-cache","min_match_blocks":0}"#,
        r#"{"policy":"prefix-cache","standard_deviation_factor_milli":1000001}"#,
        r#"{"policy":"vllm-cache-aware","cache_threshold_permille":1001}"#,
        r#"{"policy":"vllm-cache-aware","load_factor_milli":999}"#,
        r#"{"policy":"epp","prefix_weight":0,"queue_weight":0,"kv_weight":0}"#,
        r#"{"policy":"epp","kv_weight":1001}"#,
        r#"{"policy":"chwbl","virtual_nodes":0}"#,
        r#"{"policy":"chwbl","prefix_blocks":0}"#,
        r#"{"policy":"session","header":"a b"}"#,
        r#"{"policy":"session","cookie":""}"#,
        r#"{"policy":"vtc-basic","token_tracker_window_size":0}"#,
        r#"{"policy":"vtc-basic","token_tracker_max_tokens":999}"#,
        r#"{"policy":"vtc-basic","max_pod_load":0}"#,
        r#"{"policy":"vtc-basic","fairness_weight_milli":1000001}"#,
        r#"{"policy":"preble-e2","imbalance_milli":999}"#,
        r#"{"policy":"preble-e2","exploit_above_permille":1001}"#,
    ]
    .map(|json| serde_json::from_str::<PolicyConfig>(json).unwrap())
    .map(|policy| format!("{}: {}", policy.name(), policy.validate().unwrap_err()));
    expect_test::expect![[r#"
        prefix-cache: min_match_blocks: at least 1
        prefix-cache: standard_deviation_factor_milli: at most 1000000
        vllm-cache-aware: cache_threshold_permille: at most 1000
        vllm-cache-aware: load_factor_milli: at least 1000
        epp: prefix_weight: at least one of prefix_weight, queue_weight and kv_weight above 0
        epp: kv_weight: at most 1000
        chwbl: virtual_nodes: at least 1
        chwbl: prefix_blocks: at least 1
        session: header: a header's name of at most 256 bytes
        session: cookie: a cookie's name of at most 256 bytes
        vtc-basic: token_tracker_window_size: at least 1
        vtc-basic: token_tracker_max_tokens: at least token_tracker_min_tokens
        vtc-basic: max_pod_load: at least 1
        vtc-basic: fairness_weight_milli: at most 1000000
        preble-e2: imbalance_milli: at least 1000
        preble-e2: exploit_above_permille: at most 1000"#]]
    .assert_eq(&refusals.join("\n"));
}

#[test]
fn policies_declare_their_inputs() {
    let needs: Vec<_> = PolicyConfig::defaults()
        .iter()
        .filter(|policy| policy.needs() != PolicyInputs::default())
        .map(PolicyConfig::name)
        .collect();
    let declared = [
        "cost",
        "least-request",
        "chwbl",
        "session",
        "power-of-two",
        "round-robin",
        "random",
        "least-kv",
        "vtc-basic",
    ];
    assert_eq!(needs, declared);
}

#[test]
fn cost_uses_learned_prices_or_their_mean() {
    let policy = PolicyConfig::Cost(CostSettings::default());
    let candidate = |slot, prefill_ns_per_token: Option<u32>| Candidate {
        slot: Slot(slot),
        free_blocks: 1000,
        prices: prefill_ns_per_token.map(|prefill_ns_per_token| Prices {
            prefill_ns_per_token,
            decode_ns_per_request: 0,
            prefill_range_ns: Some((prefill_ns_per_token, prefill_ns_per_token)),
            decode_range_ns: None,
            load: LoadPrices::ASSUMED,
        }),
        ..Candidate::default()
    };
    let slow_and_fast = [candidate(0, Some(90_000)), candidate(1, Some(30_000))];
    assert_eq!(decided(&policy, &slow_and_fast), [0, 64]);
    // The settings assume 100 microseconds; compared with that, the newcomer would never get a
    // request.
    let fast_and_new = [candidate(0, Some(30_000)), candidate(1, None)];
    let shares = decided(&policy, &fast_and_new);
    assert!(shares.iter().all(|share| *share > 16), "{shares:?}");
    // Loaded for as long as the slow one would take.
    let busy = Candidate {
        pending_prefill_tokens: 3300,
        ..slow_and_fast[1]
    };
    assert_eq!(decided(&policy, &[slow_and_fast[0], busy]), [64, 0]);
}

/// Returns how often 64 requests choose each of two candidates.
fn decided(policy: &PolicyConfig, candidates: &[Candidate; 2]) -> [u32; 2] {
    let mut shares = [0; 2];
    for number in 0..64 {
        let jitter = rank::mix(number);
        let choice = choose(policy, &PolicyRequest { jitter, ..REQUEST }, candidates).unwrap();
        shares[usize::from(choice.slot.0)] += 1;
    }
    shares
}

#[test]
fn sampled_touches_apply_to_one_request_in_eight() {
    use crate::ids::{AttemptId, SessionId};
    let due = |touch: Touch| {
        let attempts = (0..80_000).map(AttemptId);
        attempts
            .filter(|attempt| touch.is_due(SessionId(9), *attempt))
            .count()
    };
    assert_eq!(due(Touch::Always), 80_000);
    assert!((9_600..10_400).contains(&due(Touch::Sampled)));
}
