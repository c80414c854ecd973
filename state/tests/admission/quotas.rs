//! A user's limits hold for the cluster, not for each replica.

use state::command::{Charge, Command, Item, Rejection, Reply};
use state::ids::UserKey;
use state::quotas::UserLimits;

use super::cluster::Cluster;
use crate::common;

const USER: &str = "alice";

fn cluster(lags_ms: &[u64], limits: UserLimits) -> Cluster {
    Cluster::new(lags_ms, vec![common::init(), common::limit(USER, limits)])
}

fn user() -> UserKey {
    state::prefix::user_key(common::HASH_SEED, USER)
}

/// Offers `replica` a request of `tokens` and returns whether it was admitted.
fn offer(cluster: &mut Cluster, replica: usize, tokens: u64) -> bool {
    let (now_ms, pricing) = (cluster.now_ms, cluster.pricing);
    let replica = &mut cluster.replicas[replica];
    let quota = replica.view.quota(user());
    let is_admitted = quota.check(now_ms, &replica.pending().used(user())).is_ok();
    if is_admitted {
        let charge = Charge {
            user: user(),
            input_uncached: tokens,
            started: 1,
            ended: 1,
            ..Charge::default()
        };
        replica.charge(&charge, &pricing);
    }
    is_admitted
}

/// Offers the replicas one request per millisecond in total. Returns how many each second admits.
fn admitted_per_s(cluster: &mut Cluster, seconds: usize) -> Vec<u64> {
    let replicas = cluster.replicas.len();
    let mut per_s = vec![0; seconds];
    for second in &mut per_s {
        for ms in 0..1000 {
            cluster.tick();
            *second += u64::from(offer(cluster, ms % replicas, 0));
        }
    }
    per_s
}

#[test]
fn a_request_limit_holds_through_one_or_three_replicas() {
    let limits = UserLimits {
        requests: Some(20),
        ..UserLimits::default()
    };
    for lags_ms in [&[5][..], &[20, 35, 50]] {
        let mut cluster = cluster(lags_ms, limits);
        let per_s = admitted_per_s(&mut cluster, 60);
        // The first second contains the bucket that each replica believes to be full, in addition
        // to its own twenty.
        let (first, rest) = (per_s[0], per_s[1..].iter().sum::<u64>());
        let overshoot = 20 * (lags_ms.len() as u64 - 1);
        assert!(
            (39..=40 + overshoot).contains(&first),
            "{lags_ms:?}: {first}"
        );
        assert!((59 * 18..=59 * 22).contains(&rest), "{lags_ms:?}: {rest}");
        let total = first + rest;
        assert!((1200 - 120..=1200 + 120).contains(&total), "{total}");
        // Debt makes the rate exact: what one second exceeds, the following ones lack.
        assert!(rest.abs_diff(59 * 20) <= overshoot + 2, "{rest}");
    }
}

#[test]
fn a_burst_after_idling_is_one_window_at_most() {
    let limits = UserLimits {
        requests: Some(50),
        ..UserLimits::default()
    };
    let mut cluster = cluster(&[20, 35, 50], limits);
    for _ in 0..5000 {
        cluster.tick();
    }
    // All at once, before any replica hears of the others' requests.
    let burst: u64 = (0..300)
        .map(|at| u64::from(offer(&mut cluster, at % 3, 0)))
        .sum();
    assert_eq!(burst, 3 * 50, "each admits a bucket it believes full");
    // Two of the three were too many; nothing is admitted until that is compensated.
    let per_s = admitted_per_s(&mut cluster, 6);
    assert_eq!(per_s[0], 0, "{per_s:?}");
    let total = burst + per_s.iter().sum::<u64>();
    assert!((49 + 6 * 50..=50 + 6 * 50 + 9).contains(&total), "{total}");
}

#[test]
fn token_limits_hold_despite_late_usage() {
    let limits = UserLimits {
        tokens: Some(10_000),
        ..UserLimits::default()
    };
    let mut cluster = cluster(&[20, 35, 50], limits);
    let mut tokens = 0;
    for ms in 0..20_000 {
        cluster.tick();
        if offer(&mut cluster, ms % 3, 700) {
            tokens += 700;
        }
    }
    let expected = 10_000 + 20 * 10_000;
    assert!(
        (expected - 10_000..=expected + 10_000).contains(&tokens),
        "{tokens}"
    );
}

#[test]
fn concurrent_requests_are_bounded_up_to_the_lag() {
    let limits = UserLimits {
        concurrent: Some(6),
        ..UserLimits::default()
    };
    let mut cluster = cluster(&[20, 35, 50], limits);
    let mut open = 0;
    for ms in 0..2000 {
        cluster.tick();
        let (now_ms, pricing) = (cluster.now_ms, cluster.pricing);
        let replica = &mut cluster.replicas[ms % 3];
        let quota = replica.view.quota(user());
        if quota.check(now_ms, &replica.pending().used(user())).is_ok() {
            open += 1;
            let started = Charge {
                user: user(),
                started: 1,
                ..Charge::default()
            };
            replica.charge(&started, &pricing);
        }
    }
    // Once, each replica admits what it believes is left.
    assert!((6..=18).contains(&open), "{open}");
}

#[test]
fn a_forgiven_user_is_served_again_and_keeps_what_was_charged() {
    let mut driver = common::Driver::new();
    let name = USER.to_owned();
    let limits = UserLimits {
        tokens: Some(10),
        ..UserLimits::default()
    };
    let forgive = Command::ForgiveUser { name };
    let unknown = driver.apply(1, forgive.clone());
    assert!(
        matches!(unknown, Reply::Rejected(Rejection::Invalid { .. })),
        "{unknown:?}"
    );
    driver.apply(1, common::limit(USER, limits));
    let absurd = Charge {
        user: user(),
        output: 1 << 40,
        started: 1,
        ended: 1,
        ..Charge::default()
    };
    driver.apply(1, common::batch(vec![Item::Charge(absurd)]));
    let seen = |driver: &common::Driver| driver.state.user_named(USER).unwrap();
    let before = seen(&driver);
    assert_eq!(before.left.tokens, Some(0));
    assert_eq!(driver.apply(1, forgive), Reply::Applied);
    let after = seen(&driver);
    assert_eq!(after.left.tokens, Some(10));
    assert_eq!(
        (after.counter_milli_tokens, after.total),
        (before.counter_milli_tokens, before.total)
    );
    assert_eq!(driver.state.check(), Ok(()));
}
