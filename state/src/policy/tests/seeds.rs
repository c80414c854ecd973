//! The policies against the documents they come from: the pseudo-code written down as it stands
//! (floating point, lists, loops), beside the cases in which what is built differs on purpose.

use super::*;

/// `(slot, matched, running)` each.
fn fleet(backends: &[(u16, u32, u32)]) -> Vec<Candidate> {
    let candidate = |&(slot, matched, running): &(u16, u32, u32)| Candidate {
        slot: Slot(slot),
        matched,
        running,
        ..Candidate::default()
    };
    backends.iter().map(candidate).collect()
}

fn decide(policy: &PolicyConfig, candidates: &[Candidate]) -> (u16, Reason) {
    let choice = choose(policy, &REQUEST, candidates).unwrap();
    (choice.slot.0, choice.reason)
}

/// AIBrix's `prefix_cache_routing`, step by step, with its README's `<=` in the last comparison.
/// Answers every slot it may choose: its order among equals is arbitrary.
fn aibrix_prefix_cache(
    pods: &[Candidate],
    imbalance: u32,
    factor: f64,
    min_match: u32,
) -> Vec<Slot> {
    let running = |pod: &Candidate| f64::from(pod.running);
    let fewest = pods.iter().map(|pod| pod.running).min().unwrap();
    let most = pods.iter().map(|pod| pod.running).max().unwrap();
    let least_running = || {
        let pods = pods.iter().filter(|pod| pod.running == fewest);
        pods.map(|pod| pod.slot).collect()
    };
    // check_load_imbalance
    if most - fewest > imbalance {
        return least_running();
    }
    // match_prefix
    let mut matched: Vec<&Candidate> = pods.iter().filter(|pod| pod.matched >= min_match).collect();
    // select_least_loaded_match_pod
    let count = pods.len() as f64;
    let mean = pods.iter().map(running).sum::<f64>() / count;
    let variance = pods
        .iter()
        .map(|pod| (running(pod) - mean).powi(2))
        .sum::<f64>()
        / count;
    let limit = mean + factor * variance.sqrt();
    matched.sort_by_key(|pod| (u32::MAX - pod.matched, pod.running));
    let selected = matched.iter().find(|pod| running(pod) <= limit + 1e-9);
    match selected {
        Some(selected) => matched
            .iter()
            .filter(|pod| (pod.matched, pod.running) == (selected.matched, selected.running))
            .map(|pod| pod.slot)
            .collect(),
        None => least_running(),
    }
}

/// The design's `select_worker` as written, with `load < average * load_factor`.
fn gateway_cache_aware(workers: &[Candidate], threshold: f64, load_factor: f64) -> Vec<Slot> {
    let least = workers.iter().map(|worker| worker.running).min().unwrap();
    let total: f64 = workers.iter().map(|worker| f64::from(worker.running)).sum();
    let average = total / workers.len() as f64;
    // find_best_backend: one backend, the first with the longest match.
    let longest = workers.iter().map(|worker| worker.matched).max().unwrap();
    let best = workers
        .iter()
        .find(|worker| worker.matched == longest && longest > 0);
    if let Some(best) = best {
        let hit_ratio = f64::from(best.matched) / f64::from(REQUEST.blocks);
        if hit_ratio > threshold && f64::from(best.running) < average * load_factor {
            return vec![best.slot];
        }
    }
    let idle = workers.iter().filter(|worker| worker.running == least);
    idle.map(|worker| worker.slot).collect()
}

#[test]
fn prefix_cache_case_by_case() {
    let policy = PolicyConfig::PrefixCache(PrefixCacheSettings::default());
    for (what, backends, expected) in [
        (
            "the README's example of an imbalance: p1: 1, p2: 2, p3: 20",
            &[(1, 0, 1), (2, 0, 2), (3, 100, 20)][..],
            (1, Reason::Imbalanced),
        ),
        (
            "a difference of exactly 16 is none",
            &[(1, 0, 0), (2, 50, 16)],
            (2, Reason::LongestPrefix),
        ),
        (
            "of 17 it is",
            &[(1, 0, 0), (2, 50, 17)],
            (1, Reason::Imbalanced),
        ),
        (
            "the longer match first, though busier",
            &[(1, 40, 0), (2, 50, 9)],
            (2, Reason::LongestPrefix),
        ),
        (
            "of equal matches the less busy",
            &[(1, 50, 3), (2, 50, 2), (3, 0, 0)],
            (2, Reason::LongestPrefix),
        ),
        (
            "nobody holds anything",
            &[(1, 0, 3), (2, 0, 2)],
            (2, Reason::LeastRequests),
        ),
        (
            "a holder beyond two deviations is passed over for the next one",
            &[
                (1, 90, 14),
                (2, 0, 0),
                (3, 20, 1),
                (4, 0, 0),
                (5, 0, 0),
                (6, 0, 0),
                (7, 0, 1),
            ],
            (3, Reason::LongestPrefix),
        ),
        (
            "all are equally busy: the limit is the mean, and `<=` lets the holder in",
            &[(1, 0, 4), (2, 50, 4), (3, 0, 4)],
            (2, Reason::LongestPrefix),
        ),
        (
            "an idle fleet: with the pseudo-code's `<` no holder would ever do",
            &[(1, 0, 0), (2, 50, 0), (3, 0, 0)],
            (2, Reason::LongestPrefix),
        ),
        (
            "block 0 alone is shared by all prompts and is no match",
            &[(1, 1, 2), (2, 0, 1)],
            (2, Reason::LeastRequests),
        ),
    ] {
        let candidates = fleet(backends);
        assert_eq!(decide(&policy, &candidates), expected, "{what}");
        let literal = aibrix_prefix_cache(&candidates, 16, 2.0, 2);
        assert!(literal.contains(&Slot(expected.0)), "{what}: {literal:?}");
    }
    // As written any match wins, however short: every prompt that begins alike goes to one place.
    let short = fleet(&[(1, 1, 2), (2, 0, 1)]);
    assert_eq!(aibrix_prefix_cache(&short, 16, 2.0, 1), [Slot(1)]);
    let any_match = PolicyConfig::PrefixCache(PrefixCacheSettings {
        min_match_blocks: 1,
        ..PrefixCacheSettings::default()
    });
    assert_eq!(decide(&any_match, &short), (1, Reason::LongestPrefix));
    // A prompt of a single block can match no more than that.
    let tiny = Request {
        blocks: 1,
        ..REQUEST
    };
    assert_eq!(choose(&policy, &tiny, &short).unwrap().slot, Slot(1));
}

#[test]
fn vllm_cache_aware_case_by_case() {
    let policy = PolicyConfig::VllmCacheAware(VllmCacheAwareSettings::default());
    let least = Reason::LeastRequests;
    let longest = Reason::LongestPrefix;
    for (what, backends, expected, as_written) in [
        (
            "a hit with bounded load",
            &[(1, 40, 4), (2, 0, 4), (3, 0, 4)][..],
            (1, longest),
            1,
        ),
        (
            "30 of 100 blocks is not above the threshold",
            &[(1, 30, 4), (2, 0, 3), (3, 0, 4)],
            (2, least),
            2,
        ),
        (
            "31 is",
            &[(1, 31, 4), (2, 0, 3), (3, 0, 4)],
            (1, longest),
            1,
        ),
        (
            "the holder is full",
            &[(1, 90, 10), (2, 0, 1), (3, 0, 3)],
            (2, least),
            2,
        ),
        (
            "idle: as written `0 < 0 * 1.25` turns the holder away",
            &[(1, 90, 0), (2, 0, 0)],
            (1, longest),
            0,
        ),
        (
            "almost idle: as written one request on the holder closes it to its next turn",
            &[(1, 90, 1), (2, 0, 0), (3, 0, 0), (4, 0, 1)],
            (1, longest),
            0,
        ),
        (
            "the first holder is full: as written the second is not asked",
            &[(1, 90, 10), (2, 80, 3), (3, 0, 2), (4, 0, 4)],
            (2, longest),
            3,
        ),
    ] {
        let candidates = fleet(backends);
        assert_eq!(decide(&policy, &candidates), expected, "{what}");
        let literal = gateway_cache_aware(&candidates, 0.3, 1.25);
        match as_written {
            0 => assert_ne!(literal, [Slot(expected.0)], "{what}"),
            slot => assert_eq!(literal, [Slot(slot)], "{what}"),
        }
    }
}

/// The endpoint picker's scores: 0 to 1 each, higher is better.
fn endpoint_picker(pods: &[Candidate], weights: [f64; 3]) -> Vec<f64> {
    let shortest = f64::from(pods.iter().map(|pod| pod.waiting).min().unwrap());
    let longest = f64::from(pods.iter().map(|pod| pod.waiting).max().unwrap());
    let score = |pod: &Candidate| {
        let prefix = f64::from(pod.matched) / f64::from(REQUEST.blocks);
        let queue = if shortest == longest {
            1.0
        } else {
            (longest - f64::from(pod.waiting)) / (longest - shortest)
        };
        let kv = 1.0 - f64::from(pod.kv_usage_permille) / 1000.0;
        weights[0] * prefix + weights[1] * queue + weights[2] * kv
    };
    pods.iter().map(score).collect()
}

#[test]
fn epp_case_by_case() {
    let policy = PolicyConfig::Epp(EppSettings::default());
    let pod = |slot, matched, waiting, kv_usage_permille| Candidate {
        slot: Slot(slot),
        matched,
        waiting,
        kv_usage_permille,
        ..Candidate::default()
    };
    for (what, pods, expected) in [
        ("a whole match", [pod(1, 100, 0, 100), pod(2, 0, 0, 100)], 1),
        (
            "a queue alone does not outweigh it",
            [pod(1, 100, 9, 100), pod(2, 0, 0, 100)],
            1,
        ),
        (
            "a queue and a full cache do",
            [pod(1, 100, 9, 900), pod(2, 0, 0, 100)],
            2,
        ),
        (
            "half a match and a queue",
            [pod(1, 50, 9, 100), pod(2, 0, 0, 100)],
            2,
        ),
        (
            "no match: the free cache",
            [pod(1, 0, 3, 800), pod(2, 0, 3, 100)],
            2,
        ),
    ] {
        assert_eq!(
            decide(&policy, &pods),
            (expected, Reason::BestScore),
            "{what}"
        );
        let literal = endpoint_picker(&pods, [3.0, 2.0, 2.0]);
        let scores = scores(&policy, &REQUEST, &pods);
        for (literal, own) in literal.iter().zip(&scores) {
            let own = 7.0 - own.score as f64 / 1e6;
            assert!((literal - own).abs() < 1e-5, "{what}: {literal} {own}");
        }
    }
    // A gain below the threshold is none.
    let short = [pod(1, 3, 0, 100), pod(2, 0, 0, 50)];
    assert_eq!(decide(&policy, &short), (2, Reason::BestScore));
    // Who has the adapter goes first, unless its queue is too long.
    let adapter = |waiting| {
        let loaded = Candidate {
            is_model_listed: true,
            ..pod(1, 0, waiting, 900)
        };
        decide(&policy, &[loaded, pod(2, 100, 0, 0)]).0
    };
    assert_eq!((adapter(50), adapter(51)), (1, 2));
}

#[test]
fn chwbl_moves_only_what_it_must_and_bounds_the_load() {
    let policy = PolicyConfig::Chwbl(ChwblSettings::default());
    let request = |prefix_key| Request {
        prefix_key,
        ..REQUEST
    };
    let all: Vec<Candidate> = fleet(&[(0, 0, 9), (1, 0, 9), (2, 0, 9), (5, 0, 9), (9, 0, 9)]);
    let mut shares = [0_u32; 10];
    for key in 0..10_000_u64 {
        let choice = choose(&policy, &request(rank::mix(key)), &all).unwrap();
        assert_eq!(choice.reason, Reason::Ring);
        shares[usize::from(choice.slot.0)] += 1;
        for gone in [Slot(0), Slot(5)] {
            let rest: Vec<_> = all.iter().copied().filter(|it| it.slot != gone).collect();
            let moved = choose(&policy, &request(rank::mix(key)), &rest).unwrap();
            assert!(choice.slot == gone || moved.slot == choice.slot);
        }
    }
    let used = all.iter().map(|it| shares[usize::from(it.slot.0)]);
    assert!(
        used.clone().all(|it| (1600..2400).contains(&it)),
        "{shares:?}"
    );
    // 46 requests with this one, 1.25 of the average is 11.5: room for a twelfth, not a thirteenth.
    let mut crowded = all.clone();
    let home = choose(&policy, &request(7), &all).unwrap().slot;
    let at = all.iter().position(|it| it.slot == home).unwrap();
    for (running, stays) in [(11, true), (12, true), (13, false)] {
        crowded[at].running = running;
        let next = choose(&policy, &request(7), &crowded).unwrap();
        assert_eq!(
            (next.slot == home, next.reason),
            (stays, Reason::Ring),
            "{running}"
        );
    }
}

/// AIBrix's adaptive `vtc_basic` without its noise.
fn aibrix_vtc(settings: &VtcBasicSettings, user: &UserTokens, pods: &[Candidate]) -> Vec<f64> {
    let tokens = |milli: u64| milli as f64 / 1000.0;
    let min_tokens = f64::from(settings.token_tracker_min_tokens);
    let max_tokens = f64::from(settings.token_tracker_max_tokens);
    let least = user.least_milli.map_or(min_tokens, tokens);
    let most = user.most_milli.map_or(max_tokens, tokens);
    let bucket = min_tokens.max((least + most) / 2.0);
    let normalized = (tokens(user.own_milli) / bucket).min((pods.len() - 1) as f64);
    let score = |(index, pod): (usize, &Candidate)| {
        let fairness = (index as f64 - normalized).abs();
        let utilization = (f64::from(pod.running) / f64::from(settings.max_pod_load)).min(1.0);
        f64::from(settings.fairness_weight_milli) / 1000.0 * fairness
            + f64::from(settings.utilization_weight_milli) / 1000.0 * utilization
    };
    pods.iter().enumerate().map(score).collect()
}

#[test]
fn vtc_basic_case_by_case() {
    let default = VtcBasicSettings::default();
    let user = |own: u64, least: u64, most: u64| UserTokens {
        own_milli: own * 1000,
        least_milli: Some(least * 1000),
        most_milli: Some(most * 1000),
    };
    let nobody = UserTokens::default();
    let idle = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)];
    let busy = [(0, 0, 100), (1, 0, 0), (2, 0, 0), (3, 0, 0)];
    for (what, settings, tokens, backends, expected) in [
        (
            "nobody used anything: bucket 4500",
            default,
            nobody,
            idle,
            0,
        ),
        ("a new user", default, user(0, 2000, 2000), idle, 0),
        ("one bucket", default, user(2000, 2000, 2000), idle, 1),
        (
            "the heaviest of two",
            default,
            user(9000, 1000, 9000),
            idle,
            2,
        ),
        (
            "beyond the line's end",
            default,
            user(90_000, 1000, 1000),
            idle,
            3,
        ),
        (
            "a bucket is never below the minimum",
            default,
            user(1000, 10, 10),
            idle,
            1,
        ),
        (
            "full utilisation moves a user by one place",
            VtcBasicSettings {
                utilization_weight_milli: 1200,
                ..default
            },
            user(0, 2000, 2000),
            busy,
            1,
        ),
        (
            "without fairness the least loaded",
            VtcBasicSettings {
                fairness_weight_milli: 0,
                max_pod_load: 10,
                ..default
            },
            user(0, 2000, 2000),
            [(0, 0, 9), (1, 0, 8), (2, 0, 2), (3, 0, 9)],
            2,
        ),
    ] {
        let policy = PolicyConfig::VtcBasic(settings);
        let request = Request {
            user: tokens,
            ..REQUEST
        };
        let pods = fleet(&backends);
        let choice = choose(&policy, &request, &pods).unwrap();
        assert_eq!(
            (choice.slot.0, choice.reason),
            (expected, Reason::UserShare),
            "{what}"
        );
        let literal = aibrix_vtc(&settings, &tokens, &pods);
        for (literal, own) in literal.iter().zip(scores(&policy, &request, &pods)) {
            let noise = own.score as f64 / 1e9 - literal;
            assert!((-1e-5..0.1).contains(&noise), "{what}: {literal} {own:?}");
        }
    }
}

#[test]
fn preble_e2_case_by_case() {
    let policy = PolicyConfig::PrebleE2(PrebleE2Settings::default());
    let backend = |slot, matched, pending_prefill_tokens| Candidate {
        slot: Slot(slot),
        matched,
        pending_prefill_tokens,
        free_blocks: u32::MAX,
        ..Candidate::default()
    };
    let (exploit, explore) = (Reason::Exploit, Reason::Explore);
    for (what, backends, expected) in [
        (
            "more is held than not",
            [backend(1, 51, 100), backend(2, 0, 0)],
            (1, exploit),
        ),
        (
            "half is not more: the cost decides, load 700 and prefill 800 against 1600",
            [backend(1, 50, 700), backend(2, 0, 0)],
            (1, explore),
        ),
        (
            "load 900 and prefill 800 against 1600",
            [backend(1, 50, 900), backend(2, 0, 0)],
            (2, explore),
        ),
        (
            "of two with the longest match the less loaded",
            [backend(1, 90, 300), backend(2, 90, 200)],
            (2, exploit),
        ),
        (
            "only the longest match is exploited",
            [backend(1, 90, 300), backend(2, 80, 0)],
            (1, exploit),
        ),
        (
            "a load as large as the request's own prefill is in proportion",
            [backend(1, 90, 1600), backend(2, 0, 0)],
            (1, exploit),
        ),
        (
            "a larger one is not",
            [backend(1, 90, 1601), backend(2, 0, 0)],
            (2, explore),
        ),
        (
            "nothing is held",
            [backend(1, 0, 100), backend(2, 0, 0)],
            (2, explore),
        ),
        (
            "what must be evicted costs",
            [
                Candidate {
                    free_blocks: 0,
                    ..backend(1, 0, 0)
                },
                backend(2, 0, 100),
            ],
            (2, explore),
        ),
    ] {
        assert_eq!(decide(&policy, &backends), expected, "{what}");
    }
}

#[test]
fn the_baselines_do_what_they_are_called() {
    let lmetric = PolicyConfig::Lmetric(LmetricSettings::default());
    // (0 + 1600 + 256) * 1 against (0 + 160 + 256) * (4 + 1).
    assert_eq!(
        decide(&lmetric, &fleet(&[(1, 0, 0), (2, 90, 4)])),
        (1, Reason::LeastCost)
    );
    assert_eq!(
        decide(&lmetric, &fleet(&[(1, 0, 0), (2, 90, 3)])),
        (2, Reason::LeastCost)
    );

    let kv = |slot, kv_usage_permille| Candidate {
        slot: Slot(slot),
        kv_usage_permille,
        ..Candidate::default()
    };
    let least_kv = PolicyConfig::LeastKv(LeastKvSettings::default());
    assert_eq!(
        decide(&least_kv, &[kv(1, 500), kv(2, 479)]),
        (2, Reason::LeastKv)
    );
    assert_eq!(
        decide(&least_kv, &[kv(1, 500), kv(2, 480)]).1,
        Reason::Jitter
    );

    let candidates = fleet(&[(7, 0, 0), (2, 0, 9), (4, 0, 0)]);
    let turns = (0..7_u64).map(|turn| {
        let request = Request { turn, ..REQUEST };
        let choice = choose(&PolicyConfig::RoundRobin, &request, &candidates).unwrap();
        assert_eq!(choice.reason, Reason::Turn);
        choice.slot.0
    });
    assert_eq!(turns.collect::<Vec<_>>(), [2, 4, 7, 2, 4, 7, 2]);

    // Of ten backends with a different load each, the n-th is chosen when both draws are not below.
    let loads: Vec<_> = (0..10).map(|slot| (slot, 0, u32::from(slot))).collect();
    let loads = fleet(&loads);
    let mut shares = [0_u32; 10];
    for jitter in 0..9000 {
        let request = Request {
            jitter: rank::mix(jitter),
            ..REQUEST
        };
        let choice = choose(&PolicyConfig::PowerOfTwo, &request, &loads).unwrap();
        shares[usize::from(choice.slot.0)] += 1;
    }
    for (slot, share) in shares.iter().enumerate() {
        let expected = 200 * (9 - slot as u32);
        assert!(share.abs_diff(expected) < 150, "{shares:?}");
    }

    let session = PolicyConfig::Session(SessionSettings::default());
    let mut seen = [false; 3];
    for name in 0..64 {
        let request = |jitter| Request {
            session: Some(rank::mix(name)),
            jitter,
            ..REQUEST
        };
        let idle = fleet(&[(0, 0, 0), (1, 0, 0), (2, 0, 0)]);
        let busy = fleet(&[(0, 0, 90), (1, 50, 0), (2, 0, 0)]);
        let home = choose(&session, &request(1), &idle).unwrap();
        assert_eq!(home.reason, Reason::Session);
        assert_eq!(
            choose(&session, &request(2), &busy).unwrap().slot,
            home.slot
        );
        seen[usize::from(home.slot.0)] = true;
    }
    assert_eq!(seen, [true; 3]);
    let sessionless = fleet(&[(0, 0, 1), (1, 50, 2)]);
    assert_eq!(decide(&session, &sessionless), (0, Reason::LeastRequests));
}

proptest! {
    /// Without a root and a fraction the comparison is the one with them.
    #[test]
    fn prefix_cache_agrees_with_its_pseudo_code(
        backends in prop::collection::vec((0_u32..4, 0_u32..30), 1..9),
        imbalance in 0_u32..20, factor_milli in 0_u32..3000, min_match in 1_u32..3,
    ) {
        let backends: Vec<_> = (0..)
            .zip(backends)
            .map(|(slot, (matched, running))| (slot, matched, running))
            .collect();
        let candidates = fleet(&backends);
        let policy = PolicyConfig::PrefixCache(PrefixCacheSettings {
            imbalance_abs_count: imbalance,
            standard_deviation_factor_milli: factor_milli,
            min_match_blocks: min_match,
        });
        let choice = choose(&policy, &REQUEST, &candidates).unwrap();
        let literal =
            aibrix_prefix_cache(&candidates, imbalance, f64::from(factor_milli) / 1000.0, min_match);
        prop_assert!(literal.contains(&choice.slot), "{:?} of {:?}", choice, literal);
    }
}
