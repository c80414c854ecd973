//! The table against a naive model, the lift by example, and the bound.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::command::Charge;
use crate::prefix::user_key;

const PRICES: FairnessSettings = FairnessSettings {
    input_price: 1,
    output_price: 2,
};

fn charge(user: u64, input: u64, output: u64, started: u32, ended: u32) -> Charge {
    Charge {
        user: UserKey(user),
        input_uncached: input,
        input_cached: 0,
        output,
        started,
        ended,
    }
}

/// Applies charges of replica 1 and answers the user's counter, in whole tokens.
fn settle(users: &mut Users, charge: &Charge) -> u64 {
    assert!(users.charge(ReplicaId(1), charge, &PRICES, 1));
    assert_eq!(users.check(), Ok(()));
    users.get(charge.user, 1).unwrap().counter_milli_tokens / 1000
}

#[test]
fn output_costs_twice_and_weight_divides() {
    let mut users = Users::new();
    assert_eq!(settle(&mut users, &charge(1, 100, 50, 1, 0)), 200);
    assert!(users.configure(UserKey(1), "a", 2000));
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
    // A newcomer starts where the least backlogged user is.
    assert_eq!(settle(&mut users, &charge(2, 10, 0, 1, 0)), 1010);
    assert_eq!(settle(&mut users, &charge(1, 500, 0, 0, 0)), 1500);
    assert_eq!(settle(&mut users, &charge(3, 0, 0, 1, 0)), 1010);
    // A backlogged user is not lifted.
    assert_eq!(settle(&mut users, &charge(2, 5, 0, 1, 0)), 1015);
    // Nobody in flight: the last to leave sets the level.
    assert_eq!(settle(&mut users, &charge(3, 0, 0, 0, 1)), 1010);
    assert_eq!(settle(&mut users, &charge(2, 0, 0, 0, 2)), 1015);
    assert_eq!(settle(&mut users, &charge(1, 0, 0, 0, 1)), 1500);
    assert_eq!(users.virtual_time(), 1_500_000);
    assert_eq!(settle(&mut users, &charge(4, 1, 0, 1, 1)), 1501);
    // Who is above the level keeps what they have.
    assert_eq!(settle(&mut users, &charge(2, 0, 0, 1, 0)), 1501);
    assert_eq!(settle(&mut users, &charge(1, 0, 0, 1, 0)), 1501);
}

#[test]
fn a_closed_replica_has_nothing_in_flight() {
    let mut users = Users::new();
    for user in 1..=3 {
        for replica in 1..=2 {
            users.charge(ReplicaId(replica), &charge(user, user, 0, 2, 0), &PRICES, 1);
        }
    }
    users.close_replica(ReplicaId(1));
    assert_eq!(users.get(UserKey(1), 1).unwrap().in_flight, 2);
    assert!(
        users
            .replicas_in_flight()
            .all(|replica| replica == ReplicaId(2))
    );
    users.close_replica(ReplicaId(2));
    assert_eq!(users.backlogged_len(), 0);
    assert_eq!(users.check(), Ok(()));
}

#[test]
fn a_full_table_forgets_who_loses_least_and_never_who_is_needed() {
    let mut users = Users::with_max(4);
    settle(&mut users, &charge(1, 9, 0, 1, 0));
    settle(&mut users, &charge(2, 3, 0, 1, 1));
    settle(&mut users, &charge(3, 0, 0, 1, 1));
    assert!(users.configure(UserKey(4), "configured", 500));
    settle(&mut users, &charge(5, 0, 0, 1, 0));
    assert!(users.get(UserKey(3), 1).is_none(), "the least counter went");
    settle(&mut users, &charge(6, 0, 0, 1, 0));
    assert!(users.get(UserKey(2), 1).is_none());
    let refused = charge(7, 1, 0, 1, 0);
    assert!(
        !users.charge(ReplicaId(1), &refused, &PRICES, 1),
        "nobody can be forgotten"
    );
    assert_eq!((users.len(), users.check()), (4, Ok(())));
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
    };
    for _ in 0..3 {
        settle(&mut users, &forged);
    }
    users.configure(UserKey(1), "a", 1);
    for _ in 0..3 {
        settle(&mut users, &forged);
    }
    settle(&mut users, &charge(1, 0, 0, 0, u32::MAX));
    settle(&mut users, &charge(2, 0, 0, 1, u32::MAX));
    assert_eq!(users.backlogged_len(), 0);
}

#[test]
fn pages_follow_each_other() {
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

/// A charge, a new weight or an ended replica.
#[derive(Debug, Clone)]
enum Step {
    Charge(u8, Charge),
    Weight(u64, u32),
    Close(u8),
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
    fn the_table_is_the_sum_of_its_charges(steps in steps()) {
        let mut users = Users::new();
        let mut priced: BTreeMap<u64, u64> = BTreeMap::new();
        let mut in_flight: BTreeMap<(u64, u8), u32> = BTreeMap::new();
        let mut counters: BTreeMap<u64, u64> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Charge(replica, charge) => {
                    let user = charge.user.0;
                    prop_assert!(users.charge(ReplicaId(replica), &charge, &PRICES, 1));
                    *priced.entry(user).or_default() += charge.input_uncached + 2 * charge.output;
                    let open = in_flight.entry((user, replica)).or_default();
                    *open = (*open + charge.started).saturating_sub(charge.ended);
                }
                Step::Weight(user, weight) => {
                    prop_assert!(users.configure(UserKey(user), "name", weight));
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
    fn a_counter_does_not_depend_on_how_charges_are_cut(
        amounts in prop::collection::vec(0_u64..1000, 1..30), weight in 1_u32..5000,
    ) {
        let mut piecewise = Users::new();
        let mut at_once = Users::new();
        for users in [&mut piecewise, &mut at_once] {
            users.configure(UserKey(1), "name", weight);
        }
        for amount in &amounts {
            piecewise.charge(ReplicaId(1), &charge(1, *amount, 0, 0, 0), &PRICES, 1);
        }
        at_once.charge(ReplicaId(1), &charge(1, amounts.iter().sum(), 0, 0, 0), &PRICES, 1);
        let counter = |users: &Users| users.get(UserKey(1), 1).unwrap().counter_milli_tokens;
        prop_assert_eq!(counter(&piecewise), counter(&at_once));
        let exact = amounts.iter().sum::<u64>() * 1_000_000 / u64::from(weight);
        prop_assert_eq!(counter(&at_once), exact);
    }
}
