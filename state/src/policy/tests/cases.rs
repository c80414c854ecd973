//! Examples for the policies whose sources are papers and programs rather than pseudo-code.

use super::seeds::{decide, fleet};
use super::*;

#[test]
fn chwbl_moves_few_keys_and_bounds_the_load() {
    let policy = PolicyConfig::Chwbl(ChwblSettings::default());
    let request = |prefix_key| PolicyRequest {
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
    // 46 requests including this one; 1.25 times the average is 11.5, which leaves room for a
    // twelfth but not for a thirteenth.
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

/// Returns the scores of AIBrix's adaptive `vtc_basic` without its noise.
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

/// Description, settings, recent usage, `(slot, matched, running)` of each backend, and the chosen
/// slot.
type VtcCase = (
    &'static str,
    VtcBasicSettings,
    UserTokens,
    [(u16, u32, u32); 4],
    u16,
);

fn vtc_cases() -> [VtcCase; 8] {
    let default = VtcBasicSettings::default();
    let user = |own: u64, least: u64, most: u64| UserTokens {
        own_milli: own * 1000,
        least_milli: Some(least * 1000),
        most_milli: Some(most * 1000),
    };
    let nobody = UserTokens::default();
    let idle = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)];
    let busy = [(0, 0, 100), (1, 0, 0), (2, 0, 0), (3, 0, 0)];
    [
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
    ]
}

#[test]
fn vtc_basic_cases() {
    for (what, settings, tokens, backends, expected) in vtc_cases() {
        let policy = PolicyConfig::VtcBasic(settings);
        let request = PolicyRequest {
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
fn preble_e2_cases() {
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
fn baseline_policies_choose_as_named() {
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
    let least_kv = PolicyConfig::LeastKv;
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
        let request = PolicyRequest { turn, ..REQUEST };
        let choice = choose(&PolicyConfig::RoundRobin, &request, &candidates).unwrap();
        assert_eq!(choice.reason, Reason::Turn);
        choice.slot.0
    });
    assert_eq!(turns.collect::<Vec<_>>(), [2, 4, 7, 2, 4, 7, 2]);

    // Of ten backends with different loads, the n-th is chosen when both draws are at or above it.
    let loads: Vec<_> = (0..10).map(|slot| (slot, 0, u32::from(slot))).collect();
    let loads = fleet(&loads);
    let mut shares = [0_u32; 10];
    for jitter in 0..9000 {
        let request = PolicyRequest {
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
        let request = |jitter| PolicyRequest {
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

#[test]
fn cost_prefers_an_empty_cache_over_evicting_from_a_full_one() {
    let cost = PolicyConfig::Cost(CostSettings::default());
    let full = |matched| Candidate {
        slot: Slot(1),
        matched,
        ..Candidate::default()
    };
    let empty = Candidate {
        slot: Slot(2),
        free_blocks: 1000,
        ..Candidate::default()
    };
    let chosen = |first: Candidate| decide(&cost, &[first, empty]).0;
    assert_eq!(
        chosen(full(1)),
        2,
        "one shared block is not worth what it evicts"
    );
    assert_eq!(chosen(full(50)), 1, "half the prompt is");
    let has_room = Candidate {
        free_blocks: 99,
        ..full(1)
    };
    assert_eq!(chosen(has_room), 1, "while there is room nothing is lost");
}
