//! Examples for the buckets. `tests/admission` tests rates across replicas.

use super::*;
use crate::ids::UserKey;
use crate::trees::TurnUsage;

fn limits(requests: Option<u32>, tokens: Option<u64>, window_ms: u32) -> UserLimits {
    UserLimits {
        requests,
        tokens,
        concurrent: None,
        window_ms: Some(window_ms),
        ..UserLimits::default()
    }
}

fn quota(limits: UserLimits, spent: Consumed) -> Quota {
    Quota {
        limits,
        consumed: spent,
        ..Quota::default()
    }
}

fn spent(limits: &UserLimits, uses: &[(u64, u64, u64)]) -> Consumed {
    let mut spent = Consumed::default();
    for (now_ms, requests, tokens) in uses {
        spent.spend(limits, *now_ms, *requests, *tokens);
        assert!(spent.is_valid());
    }
    spent
}

fn requests(requests: u64) -> PendingUse {
    PendingUse {
        requests,
        ..PendingUse::default()
    }
}

fn over(limit: LimitKind, retry_after_ms: u64) -> Result<(), LimitRejection> {
    Err(LimitRejection {
        limit,
        retry_after_ms,
    })
}

#[test]
fn a_token_bucket_holds_one_window_and_refills_evenly() {
    let limits = limits(Some(20), None, 1000);
    let full = quota(limits, Consumed::default());
    assert_eq!(full.check(0, &requests(19)), Ok(()));
    assert_eq!(full.check(0, &requests(20)), over(LimitKind::Requests, 50));
    let empty = quota(limits, spent(&limits, &[(10_000, 20, 0)]));
    assert_eq!(
        empty.check(10_000, &requests(0)),
        over(LimitKind::Requests, 50)
    );
    assert_eq!(
        empty.check(10_049, &requests(0)),
        over(LimitKind::Requests, 1)
    );
    assert_eq!(empty.check(10_050, &requests(0)), Ok(()));
    assert_eq!(
        empty.check(10_050, &requests(3)),
        over(LimitKind::Requests, 150)
    );
    let left = |now_ms| empty.left(now_ms).requests;
    assert_eq!(
        [10_000, 10_500, 11_000, 99_000].map(left),
        [0, 10, 20, 20].map(Some)
    );
    // A reader whose clock is behind sees the state unchanged.
    assert_eq!(empty.check(0, &requests(0)), over(LimitKind::Requests, 50));
}

#[test]
fn usage_beyond_the_bucket_becomes_debt() {
    let limits = limits(None, Some(1000), 60_000);
    let spent = spent(&limits, &[(0, 1, 900), (0, 1, 2100)]);
    let quota = quota(limits, spent);
    assert_eq!(quota.left(0).tokens, Some(0));
    // 2000 in debt at 1000 a minute, plus one token to continue.
    assert_eq!(
        quota.check(0, &PendingUse::default()),
        over(LimitKind::Tokens, 120_001)
    );
    assert_eq!(
        quota.check(120_000, &PendingUse::default()),
        over(LimitKind::Tokens, 1)
    );
    assert_eq!(quota.check(120_001, &PendingUse::default()), Ok(()));
    let pending = PendingUse {
        tokens: 1000,
        ..PendingUse::default()
    };
    assert_eq!(
        quota.check(180_000, &pending),
        over(LimitKind::Tokens, 1),
        "what is on its way counts"
    );
}

#[test]
fn in_flight_and_waiting_requests_share_one_bound() {
    let limits = UserLimits {
        concurrent: Some(4),
        ..UserLimits::default()
    };
    let quota = Quota {
        limits,
        in_flight: 2,
        waiting: 1,
        ..Quota::default()
    };
    let full = over(LimitKind::Concurrent, CONCURRENT_RETRY_MS);
    assert_eq!(quota.check(0, &requests(0)), Ok(()));
    assert_eq!(quota.check(0, &requests(1)), full);
    assert_eq!(quota.left(0).concurrent, Some(1));
    // One of those in the state has ended or stopped waiting, so its place is free.
    let over = PendingUse {
        ended: 1,
        ..requests(1)
    };
    let left = PendingUse {
        dequeued: 1,
        ..requests(1)
    };
    assert_eq!(
        (quota.check(0, &over), quota.check(0, &left)),
        (Ok(()), Ok(()))
    );
    // The waiting request starts: it is no longer queued, but in flight.
    let went = PendingUse {
        dequeued: 1,
        ..requests(2)
    };
    assert_eq!(quota.check(0, &went), full);
}

#[test]
fn waiting_requests_count_as_admitted() {
    let limits = limits(Some(2), None, 1000);
    let quota = Quota {
        limits,
        waiting: 1,
        ..Quota::default()
    };
    assert_eq!(quota.check(0, &requests(0)), Ok(()));
    assert_eq!(quota.check(0, &requests(1)), over(LimitKind::Requests, 500));
    assert_eq!(quota.left(0).requests, Some(1));
    let left = PendingUse {
        dequeued: 1,
        ..requests(1)
    };
    assert_eq!(quota.check(0, &left), Ok(()));
}

#[test]
fn a_changed_limit_keeps_the_usage() {
    let second = limits(Some(10), Some(10), 1000);
    let used = spent(&second, &[(0, 10, 10)]);
    let minute = limits(Some(600), Some(600), 60_000);
    assert_eq!(quota(minute, used).left(0).requests, Some(590));
    let mut both = used;
    both.spend(&minute, 0, 1, 1);
    assert_eq!(quota(minute, both).left(0).tokens, Some(589));
    // Usage without a limit is dropped.
    both.spend(&limits(Some(1), None, 60_000), 0, 0, 0);
    assert_eq!(quota(minute, both).left(0).tokens, Some(600));
}

#[test]
fn a_full_bucket_equals_the_default() {
    let limits = limits(Some(10), Some(10), 1000);
    let spent = spent(&limits, &[(0, 5, 5), (500, 0, 0)]);
    assert_eq!(spent, Consumed::default());
}

#[test]
fn forged_usage_is_bounded() {
    let most = limits(Some(u32::MAX), Some(TOKENS_MAX), WINDOW_MS_MAX);
    assert_eq!(most.validate(), Ok(()));
    let forged = (u64::MAX, u64::MAX, u64::MAX);
    let used = spent(&most, &[forged, forged, forged]);
    let least = limits(Some(1), Some(1), 1);
    for now_ms in [0, u64::MAX] {
        assert!(quota(least, used).left(now_ms).requests <= Some(1));
        let _ = quota(least, used).check(now_ms, &requests(u64::MAX));
    }
    // At most 600 windows of debt.
    let second = limits(Some(1), None, 1000);
    let debt = quota(second, spent(&second, &[(0, u64::MAX, 0)]));
    assert_eq!(
        debt.check(600_000, &requests(0)),
        over(LimitKind::Requests, 1000)
    );
}

#[test]
fn out_of_bounds_limits_are_named() {
    let faults = [
        limits(Some(0), None, 1),
        limits(None, Some(0), 1),
        limits(None, Some(TOKENS_MAX + 1), 1),
        limits(None, None, 0),
        limits(None, None, WINDOW_MS_MAX + 1),
        UserLimits {
            concurrent: Some(0),
            ..UserLimits::default()
        },
    ]
    .map(|limits| limits.validate().unwrap_err().to_string())
    .join("\n");
    expect_test::expect![[r#"
        limits.requests: at least 1
        limits.tokens: 1 to 2^53
        limits.tokens: 1 to 2^53
        limits.window: at least 1
        limits.window: at most 86400000
        limits.concurrent: at least 1"#]]
    .assert_eq(&faults);
}

#[test]
fn limits_reset_when_their_usage_has_drained() {
    let limits = limits(Some(20), Some(100), 1000);
    let used = quota(limits, spent(&limits, &[(10_000, 10, 150)]));
    assert_eq!(used.resets_ms(10_000), [500, 1500]);
    assert_eq!(used.resets_ms(10_600), [0, 900]);
    assert_eq!(used.left(10_600).tokens, Some(10));
    let unlimited = quota(UserLimits::default(), Consumed::default());
    assert_eq!(unlimited.resets_ms(10_000), [0, 0]);
}

#[test]
fn a_tree_may_use_its_tokens_until_they_are_used_up() {
    let of_tree = |tokens_per_tree| {
        let limits = UserLimits {
            tokens_per_tree,
            ..UserLimits::default()
        };
        quota(limits, Consumed::default())
    };
    let tree = |input_cached, output| SessionTree {
        user: UserKey(1),
        sessions: 1,
        begun_ms: 0,
        turns: 1,
        usage: TurnUsage {
            input_uncached: 100,
            input_cached,
            output,
        },
    };
    assert_eq!(of_tree(Some(1000)).check_tree(None), Ok(()));
    assert_eq!(of_tree(Some(1000)).check_tree(Some(&tree(800, 99))), Ok(()));
    assert_eq!(
        of_tree(Some(1000)).check_tree(Some(&tree(800, 100))),
        over(LimitKind::TokensPerTree, SESSION_IDLE_MS)
    );
    assert_eq!(of_tree(None).check_tree(Some(&tree(u64::MAX, 1))), Ok(()));
    assert!(!of_tree(Some(1000)).is_unbounded());
}
