//! Compares the table with a naive model; examples for the lift and the bound.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::caches::CacheScope;
use crate::charge::Charge;
use crate::ids::ReplicaId;
use crate::prefix::user_key;
use crate::settings::UserLimits;

const NO_LIMITS: UserLimits = UserLimits {
    requests: None,
    tokens: None,
    concurrent: None,
    concurrent_per_tree: None,
    tokens_per_tree: None,
    window_ms: None,
};

/// Returns terms with the price one for input and two for output.
fn terms() -> ChargeTerms {
    ChargeTerms::default()
}

fn charge(user: u64, input: u64, output: u64, started: u32, ended: u32) -> Charge {
    Charge {
        user: UserKey(user),
        input_uncached: input,
        input_cached: 0,
        output,
        started,
        ended,
        ..Charge::default()
    }
}

/// Applies `charge` of replica 1 and returns the user's counter in whole tokens.
fn settle(users: &mut Users, charge: &Charge) -> u64 {
    assert!(users.charge(ReplicaId(1), charge, &terms(), 1));
    assert_eq!(users.check(), Ok(()));
    users.get(charge.user, 1).unwrap().counter_milli_tokens / 1000
}

#[test]
fn output_tokens_cost_twice_and_weight_divides() {
    let mut users = Users::new();
    assert_eq!(settle(&mut users, &charge(1, 100, 50, 1, 0)), 200);
    assert!(users.configure(UserKey(1), "a", UserSettings::of_weight(2000)));
    assert_eq!(settle(&mut users, &charge(1, 100, 50, 0, 1)), 300);
    let view = users.get(UserKey(1), 1).unwrap();
    assert_eq!(
        (view.in_flight, view.total.requests, view.total.output),
        (0, 1, 100)
    );
    assert_eq!(view.window, view.total);
}

#[test]
fn idling_earns_no_credit() {
    let mut users = Users::new();
    assert_eq!(settle(&mut users, &charge(1, 1000, 0, 1, 0)), 1000);
    // A newcomer starts at the backlogged user with the lowest counter.
    assert_eq!(settle(&mut users, &charge(2, 10, 0, 1, 0)), 1010);
    assert_eq!(settle(&mut users, &charge(1, 500, 0, 0, 0)), 1500);
    assert_eq!(settle(&mut users, &charge(3, 0, 0, 1, 0)), 1010);
    // A backlogged user is not lifted.
    assert_eq!(settle(&mut users, &charge(2, 5, 0, 1, 0)), 1015);
    // No user is in flight: the last user to leave sets the level.
    assert_eq!(settle(&mut users, &charge(3, 0, 0, 0, 1)), 1010);
    assert_eq!(settle(&mut users, &charge(2, 0, 0, 0, 2)), 1015);
    assert_eq!(settle(&mut users, &charge(1, 0, 0, 0, 1)), 1500);
    assert_eq!(users.virtual_time(), 1_500_000);
    assert_eq!(settle(&mut users, &charge(4, 1, 0, 1, 1)), 1501);
    // A user above the level keeps its counter.
    assert_eq!(settle(&mut users, &charge(2, 0, 0, 1, 0)), 1501);
    assert_eq!(settle(&mut users, &charge(1, 0, 0, 1, 0)), 1501);
}

/// Returns a charge for requests of `user` that start and stop waiting.
fn queue(user: u64, queued: u32, dequeued: u32) -> Charge {
    Charge {
        user: UserKey(user),
        queued,
        dequeued,
        ..Charge::default()
    }
}

#[test]
fn an_arriving_user_is_lifted_to_the_least_waiting_counter() {
    let mut users = Users::new();
    // Both have a request in flight all the time; user 2 requests little.
    settle(&mut users, &charge(1, 0, 0, 1, 0));
    settle(&mut users, &charge(2, 0, 0, 1, 0));
    settle(&mut users, &charge(1, 900, 0, 0, 0));
    settle(&mut users, &charge(2, 10, 0, 0, 0));
    // Measured by requests in flight, user 2 would have saved up 890.
    assert_eq!(settle(&mut users, &queue(1, 1, 0)), 900);
    assert_eq!(settle(&mut users, &queue(2, 1, 0)), 900);
    assert_eq!(users.virtual_time(), 900_000);
    // A waiting user is not lifted again, and neither is one whose request moves from waiting to
    // running.
    settle(&mut users, &charge(1, 50, 0, 0, 0));
    assert_eq!(settle(&mut users, &charge(2, 0, 0, 1, 0)), 900);
    assert_eq!(settle(&mut users, &queue(2, 3, 1)), 900);
    // A request that does not wait arrives like any other.
    settle(&mut users, &queue(2, 0, 3));
    assert_eq!(settle(&mut users, &charge(3, 5, 0, 1, 0)), 955);
    assert_eq!(settle(&mut users, &charge(2, 0, 0, 1, 0)), 950);
    assert_eq!((users.waiting_len(), users.backlogged_len()), (1, 3));
}

#[test]
fn arrivals_are_lifted_to_the_user_served_last() {
    let mut users = Users::new();
    settle(&mut users, &charge(1, 700, 0, 1, 0));
    settle(&mut users, &queue(1, 1, 0));
    settle(&mut users, &queue(1, 0, 1));
    assert_eq!(users.virtual_time(), 700_000);
    // The queue is empty: the next arrival is level with the previous one.
    assert_eq!(settle(&mut users, &charge(2, 20, 0, 1, 0)), 720);
    assert_eq!(settle(&mut users, &charge(3, 1, 0, 1, 1)), 721);
    assert_eq!(settle(&mut users, &charge(1, 0, 0, 1, 0)), 721);
    // A user who waited and left within one flush interval also counts as the last to leave.
    assert_eq!(settle(&mut users, &queue(4, 2, 2)), 721);
    let mut both = charge(4, 9, 0, 1, 0);
    (both.queued, both.dequeued) = (1, 1);
    assert_eq!(settle(&mut users, &both), 730);
    assert_eq!((users.virtual_time(), users.waiting_len()), (730_000, 0));
}

#[test]
fn a_closed_replica_has_no_waiting_requests() {
    let mut users = Users::new();
    users.charge(ReplicaId(1), &queue(1, 2, 0), &terms(), 1);
    users.charge(ReplicaId(2), &queue(1, 1, 0), &terms(), 1);
    users.charge(ReplicaId(1), &queue(2, 1, 0), &terms(), 1);
    assert_eq!(users.get(UserKey(1), 1).unwrap().waiting, 3);
    users.close_replica(ReplicaId(1));
    assert_eq!(users.get(UserKey(1), 1).unwrap().waiting, 1);
    assert_eq!((users.waiting_len(), users.check()), (1, Ok(())));
    users.close_replica(ReplicaId(2));
    assert_eq!(users.waiting_len(), 0);
}

#[test]
fn an_advance_is_not_charged_twice() {
    let mut users = Users::new();
    let ahead = Charge {
        advance: 100,
        ..charge(1, 0, 0, 1, 0)
    };
    assert_eq!(settle(&mut users, &ahead), 100);
    let real = Charge {
        settled: 100,
        ..charge(1, 80, 20, 0, 1)
    };
    assert_eq!(settle(&mut users, &real), 120);
    let total = users.get(UserKey(1), 1).unwrap().total;
    assert_eq!((total.input_uncached, total.output), (80, 20));
}

#[test]
fn a_users_own_limits_override_the_default() {
    let mut users = Users::new();
    let of_all = UserLimits {
        requests: Some(10),
        ..NO_LIMITS
    };
    users.set_defaults(UserDefaults {
        limits: of_all,
        ..UserDefaults::default()
    });
    assert!(users.charge(ReplicaId(1), &charge(1, 0, 0, 4, 4), &terms(), 1));
    assert!(users.charge(ReplicaId(1), &charge(2, 70, 3, 4, 4), &terms(), 1));
    let limited = |limits| UserSettings {
        limits: Some(limits),
        ..UserSettings::default()
    };
    let own = UserLimits {
        tokens: Some(100),
        ..NO_LIMITS
    };
    assert!(users.configure(UserKey(2), "b", limited(own)));
    assert!(users.charge(ReplicaId(1), &charge(2, 20, 1, 1, 1), &terms(), 1));
    let left = |users: &Users, user| users.get(UserKey(user), 1).unwrap().left;
    assert_eq!(left(&users, 1).requests, Some(6));
    assert_eq!(
        (left(&users, 2).requests, left(&users, 2).tokens),
        (None, Some(79))
    );
    // Limits without a bound are none, so the default ones apply again.
    assert!(users.configure(UserKey(2), "b", limited(NO_LIMITS)));
    assert_eq!(left(&users, 2).tokens, None);
    assert!(users.configure(UserKey(3), "c", UserSettings::default()));
    assert_eq!((users.len(), users.check()), (2, Ok(())));
    let published = users.publish(1).unwrap();
    assert_eq!(published.quota(UserKey(1)).limits, of_all);
    assert_eq!(published.quota(UserKey(9)).limits, of_all);
    assert!(users.publish(1).is_none(), "nothing changed");
}

#[test]
fn own_cache_scope_replaces_the_default_one() {
    let mut users = Users::new();
    let scoped = |cache| UserSettings {
        cache,
        ..UserSettings::default()
    };
    let team = CacheScope::Group("team".to_owned());
    assert!(users.published(1).all_share());
    assert!(users.configure(UserKey(1), "a", scoped(Some(team.clone()))));
    let view = users.published(1);
    assert_eq!((view.scope(UserKey(1)), view.scoped()), (&team, 1));
    assert_eq!(view.scope(UserKey(2)), &CacheScope::Shared);
    assert!(!view.all_share());
    users.set_defaults(UserDefaults {
        cache: CacheScope::Own,
        ..UserDefaults::default()
    });
    assert!(users.configure(UserKey(1), "a", scoped(Some(CacheScope::Shared))));
    let view = users.published(1);
    assert_eq!(view.scope(UserKey(1)), &CacheScope::Shared);
    assert_eq!(view.scope(UserKey(2)), &CacheScope::Own);
    assert!(users.configure(UserKey(1), "a", scoped(None)));
    let view = users.published(1);
    assert_eq!(view.scope(UserKey(1)), &CacheScope::Own);
    assert_eq!((view.scoped(), view.all_share()), (0, false));
    assert_eq!(users.check(), Ok(()));
}

#[test]
fn requests_of_the_last_minute_are_counted_by_the_second() {
    let mut users = Users::new();
    let at = |users: &mut Users, now_ms: u64, requests: u32| {
        users.charge(
            ReplicaId(1),
            &charge(1, 0, 0, requests, requests),
            &terms(),
            now_ms,
        );
    };
    at(&mut users, 60_000, 6);
    at(&mut users, 120_000, 3);
    let within = |now_ms| {
        users
            .published(now_ms)
            .figures(UserKey(1))
            .requests_last_minute
    };
    // At 130 s, five sixths of the bucket from 60 to 120 s lie within the minute.
    assert_eq!(
        [120_000, 130_000, 179_999, 180_000, 210_000, 400_000].map(within),
        [9, 8, 3, 3, 1, 0]
    );
}

#[test]
fn a_closed_replica_has_nothing_in_flight() {
    let mut users = Users::new();
    for user in 1..=3 {
        for replica in 1..=2 {
            users.charge(
                ReplicaId(replica),
                &charge(user, user, 0, 2, 0),
                &terms(),
                1,
            );
        }
    }
    users.close_replica(ReplicaId(1));
    assert_eq!(users.get(UserKey(1), 1).unwrap().in_flight, 2);
    assert!(users.replicas_open().all(|replica| replica == ReplicaId(2)));
    users.close_replica(ReplicaId(2));
    assert_eq!(users.backlogged_len(), 0);
    assert_eq!(users.check(), Ok(()));
}

#[test]
fn a_full_user_table_forgets_the_least_counter_of_idle_users() {
    let mut users = Users::with_max(4);
    settle(&mut users, &charge(1, 9, 0, 1, 0));
    settle(&mut users, &charge(2, 3, 0, 1, 1));
    settle(&mut users, &charge(3, 0, 0, 1, 1));
    assert!(users.configure(UserKey(4), "configured", UserSettings::of_weight(500)));
    settle(&mut users, &charge(5, 0, 0, 1, 0));
    assert!(users.get(UserKey(3), 1).is_none(), "the least counter went");
    settle(&mut users, &charge(6, 0, 0, 1, 0));
    assert!(users.get(UserKey(2), 1).is_none());
    let refused = charge(7, 1, 0, 1, 0);
    assert!(
        !users.charge(ReplicaId(1), &refused, &terms(), 1),
        "nobody can be forgotten"
    );
    assert_eq!((users.len(), users.check()), (4, Ok(())));
}

#[test]
fn users_without_charges_do_not_displace_users_who_paid() {
    let mut users = Users::with_max(3);
    settle(&mut users, &charge(1, 9, 0, 1, 1));
    settle(&mut users, &charge(2, 500, 0, 1, 0));
    // They waited, so their counters are lifted above the first user's, and left without a charge.
    for made_up in 3..40 {
        settle(&mut users, &waits(made_up, 1, 0));
        settle(&mut users, &waits(made_up, 0, 1));
    }
    let keys: Vec<u64> = users.map.iter().map(|(key, _)| key.0).collect();
    assert_eq!(keys, [1, 2, 39]);
}

fn waits(user: u64, queued: u32, dequeued: u32) -> Charge {
    Charge {
        queued,
        dequeued,
        ..charge(user, 0, 0, 0, 0)
    }
}

#[test]
fn forged_counts_saturate() {
    let mut users = Users::new();
    let forged = Charge {
        user: UserKey(1),
        input_uncached: u64::MAX,
        input_cached: u64::MAX,
        output: u64::MAX,
        started: u32::MAX,
        ended: 0,
        ..Charge::default()
    };
    for _ in 0..3 {
        settle(&mut users, &forged);
    }
    users.configure(UserKey(1), "a", UserSettings::of_weight(1));
    for _ in 0..3 {
        settle(&mut users, &forged);
    }
    settle(&mut users, &charge(1, 0, 0, 0, u32::MAX));
    settle(&mut users, &charge(2, 0, 0, 1, u32::MAX));
    assert_eq!(users.backlogged_len(), 0);
}

#[test]
fn user_pages_are_consecutive() {
    let mut users = Users::new();
    let mut keys: Vec<UserKey> = (0..50)
        .map(|number| user_key(7, &format!("user-{number}")))
        .collect();
    for key in &keys {
        users.define(*key, "x");
    }
    keys.sort_unstable();
    let mut paged = Vec::new();
    let mut after = None;
    loop {
        let page: Vec<UserKey> = users.views(after, 0).take(7).map(|view| view.key).collect();
        let Some(last) = page.last() else { break };
        after = Some(*last);
        paged.extend(page);
    }
    assert_eq!(paged, keys);
}

/// A charge, a new weight, or the end of all requests of a replica.
#[derive(Debug, Clone)]
enum Step {
    Charge(u8, Charge),
    Weight(u64, u32),
    Close(u8),
}

/// Generates charges and waiting requests of more users than a table of [`FEW`] holds.
fn crowd() -> impl Strategy<Value = Vec<Charge>> {
    let paid = (0_u64..9, 0_u64..50, 0_u32..2, 0_u32..3)
        .prop_map(|(user, input, started, ended)| charge(user << 60, input, 0, started, ended));
    let waited = (0_u64..9, 0_u32..2, 0_u32..3)
        .prop_map(|(user, queued, dequeued)| waits(user << 60, queued, dequeued));
    prop::collection::vec(prop_oneof![paid, waited], 0..120)
}

const FEW: usize = 4;

/// Returns the user that a full table forgets, by scanning all users and what they paid; `None` if
/// all must be kept.
fn least(users: &Users, paid: &BTreeMap<UserKey, u64>) -> Option<UserKey> {
    let all = paid
        .iter()
        .map(|(key, paid)| (users.get(*key, 1).unwrap(), *paid));
    let idle = all.filter(|(user, _)| {
        (user.in_flight, user.waiting) == (0, 0) && user.own == UserSettings::default()
    });
    idle.min_by_key(|(user, paid)| (*paid > 0, user.counter_milli_tokens, user.key))
        .map(|(user, _)| user.key)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let charges = (
        1_u8..4,
        0_u64..6,
        0_u64..5000,
        0_u64..500,
        0_u32..3,
        0_u32..3,
    )
        .prop_map(|(replica, user, input, output, started, ended)| {
            Step::Charge(replica, charge(user << 60, input, output, started, ended))
        });
    let weights =
        (0_u64..6, 1_u32..4000).prop_map(|(user, weight)| Step::Weight(user << 60, weight));
    let step = prop_oneof![12 => charges, 1 => weights, 1 => (1_u8..4).prop_map(Step::Close)];
    prop::collection::vec(step, 0..120)
}

proptest! {
    #[test]
    fn user_counters_are_the_sum_of_their_charges(steps in steps()) {
        let mut users = Users::new();
        let mut priced: BTreeMap<u64, u64> = BTreeMap::new();
        let mut in_flight: BTreeMap<(u64, u8), u32> = BTreeMap::new();
        let mut counters: BTreeMap<u64, u64> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Charge(replica, charge) => {
                    let user = charge.user.0;
                    prop_assert!(users.charge(ReplicaId(replica), &charge, &terms(), 1));
                    *priced.entry(user).or_default() += charge.input_uncached + 2 * charge.output;
                    let open = in_flight.entry((user, replica)).or_default();
                    *open = (*open + charge.started).saturating_sub(charge.ended);
                }
                Step::Weight(user, weight) => {
                    prop_assert!(users.configure(UserKey(user), "name", UserSettings::of_weight(weight)));
                }
                Step::Close(replica) => {
                    users.close_replica(ReplicaId(replica));
                    in_flight.retain(|(_, other), _| *other != replica);
                }
            }
            prop_assert_eq!(users.check(), Ok(()));
            for view in users.views(None, 1) {
                let key = view.key.0;
                let used = view.total.input_uncached + 2 * view.total.output;
                prop_assert_eq!(used, priced.get(&key).copied().unwrap_or(0));
                let open = in_flight.range((key, 0)..=(key, u8::MAX));
                prop_assert_eq!(view.in_flight, open.map(|(_, open)| u64::from(*open)).sum::<u64>());
                let before = counters.insert(key, view.counter_milli_tokens).unwrap_or(0);
                prop_assert!(view.counter_milli_tokens >= before, "a counter fell");
            }
        }
    }

    #[test]
    fn a_full_user_table_forgets_as_a_full_scan_would(
        charges in crowd(), kept in 0_u64..9,
    ) {
        let mut users = Users::with_max(FEW);
        prop_assert!(users.configure(UserKey(kept << 60), "kept", UserSettings::of_weight(2000)));
        // Payments of the kept users.
        let mut paid = BTreeMap::from([(UserKey(kept << 60), 0)]);
        for charge in charges {
            let is_pressed = !paid.contains_key(&charge.user) && paid.len() == FEW;
            let forgotten = is_pressed.then(|| least(&users, &paid)).flatten();
            let has_room = !is_pressed || forgotten.is_some();
            prop_assert_eq!(users.charge(ReplicaId(1), &charge, &terms(), 1), has_room);
            if let Some(forgotten) = forgotten {
                paid.remove(&forgotten);
            }
            if has_room {
                *paid.entry(charge.user).or_default() += charge.input_uncached;
            }
            for key in (0..9).map(|user| UserKey(user << 60)) {
                prop_assert_eq!(users.map.get(&key).is_some(), paid.contains_key(&key));
            }
        }
        prop_assert_eq!(users.check(), Ok(()));
    }

    #[test]
    fn counters_do_not_depend_on_how_charges_are_split(
        amounts in prop::collection::vec(0_u64..1000, 1..30), weight in 1_u32..5000,
    ) {
        let mut piecewise = Users::new();
        let mut at_once = Users::new();
        for users in [&mut piecewise, &mut at_once] {
            users.configure(UserKey(1), "name", UserSettings::of_weight(weight));
        }
        for amount in &amounts {
            piecewise.charge(ReplicaId(1), &charge(1, *amount, 0, 0, 0), &terms(), 1);
        }
        at_once.charge(ReplicaId(1), &charge(1, amounts.iter().sum(), 0, 0, 0), &terms(), 1);
        let counter = |users: &Users| users.get(UserKey(1), 1).unwrap().counter_milli_tokens;
        prop_assert_eq!(counter(&piecewise), counter(&at_once));
        let exact = amounts.iter().sum::<u64>() * 1_000_000 / u64::from(weight);
        prop_assert_eq!(counter(&at_once), exact);
    }
}
