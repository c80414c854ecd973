//! Compares the policies with their source documents: the pseudo-code written out literally
//! (floating point, lists, loops), and the cases in which the implementation differs on purpose.

use super::*;

/// Returns candidates from `(slot, matched, running)`.
pub(super) fn fleet(backends: &[(u16, u32, u32)]) -> Vec<Candidate> {
    let candidate = |&(slot, matched, running): &(u16, u32, u32)| Candidate {
        slot: Slot(slot),
        matched,
        running,
        ..Candidate::default()
    };
    backends.iter().map(candidate).collect()
}

pub(super) fn decide(policy: &PolicyConfig, candidates: &[Candidate]) -> (u16, Reason) {
    let choice = choose(policy, &REQUEST, candidates).unwrap();
    (choice.slot.0, choice.reason)
}

/// AIBrix's `prefix_cache_routing`, step by step, with its README's `<=` in the last comparison.
/// Returns every slot it may choose, because its order among equals is arbitrary.
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

/// Returns the choices of the design's `select_worker`, literally, with `load < average *
/// load_factor`.
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

/// Description, `(slot, matched, running)` of each backend, and the expected choice and reason.
type Case = (&'static str, &'static [(u16, u32, u32)], (u16, Reason));

const PREFIX_CACHE: &[Case] = &[
    (
        "the README's example of an imbalance: p1: 1, p2: 2, p3: 20",
        &[(1, 0, 1), (2, 0, 2), (3, 100, 20)],
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
];

#[test]
fn prefix_cache_cases() {
    let policy = PolicyConfig::PrefixCache(PrefixCacheSettings::default());
    for &(what, backends, expected) in PREFIX_CACHE {
        let candidates = fleet(backends);
        assert_eq!(decide(&policy, &candidates), expected, "{what}");
        let literal = aibrix_prefix_cache(&candidates, 16, 2.0, 2);
        assert!(literal.contains(&Slot(expected.0)), "{what}: {literal:?}");
    }
    // Literally, any match wins, however short: all prompts with the same beginning go to one
    // backend.
    let short = fleet(&[(1, 1, 2), (2, 0, 1)]);
    assert_eq!(aibrix_prefix_cache(&short, 16, 2.0, 1), [Slot(1)]);
    let any_match = PolicyConfig::PrefixCache(PrefixCacheSettings {
        min_match_blocks: 1,
        ..PrefixCacheSettings::default()
    });
    assert_eq!(decide(&any_match, &short), (1, Reason::LongestPrefix));
    // A prompt of a single block cannot match more than that.
    let tiny = PolicyRequest {
        blocks: 1,
        ..REQUEST
    };
    assert_eq!(choose(&policy, &tiny, &short).unwrap().slot, Slot(1));
}

#[test]
fn vllm_cache_aware_cases() {
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

/// Returns the endpoint picker's scores: weighted sums of scores from 0 to 1, where higher is
/// better.
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
fn epp_cases() {
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
    // A gain below the threshold does not count.
    let short = [pod(1, 3, 0, 100), pod(2, 0, 0, 50)];
    assert_eq!(decide(&policy, &short), (2, Reason::BestScore));
    // A backend with the adapter is preferred unless its queue is too long.
    let adapter = |waiting| {
        let loaded = Candidate {
            is_model_listed: true,
            ..pod(1, 0, waiting, 900)
        };
        decide(&policy, &[loaded, pod(2, 100, 0, 0)]).0
    };
    assert_eq!((adapter(50), adapter(51)), (1, 2));
}

proptest! {
    /// Checks that the comparison without root and fraction agrees with the one that has them.
    #[test]
    fn prefix_cache_follows_its_published_pseudo_code(
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
