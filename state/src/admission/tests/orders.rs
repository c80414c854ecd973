//! Tests of each order by example.

use super::*;

#[test]
fn vtc_takes_the_least_counter_then_the_earliest_arrival() {
    let users = Users::with(&[300, 100, 200, 100]);
    let requests = [
        waiting(1, 1),
        waiting(2, 5),
        waiting(3, 3),
        waiting(4, 4),
        waiting(2, 2),
    ];
    let mut queue = queue(Order::Vtc, &users, &requests);
    // Users 2 and 4 have equal counters, so the arrival of their first request decides.
    assert_eq!(drain(&mut queue, &users), [2, 4, 5, 3, 1]);
}

#[test]
fn vtc_shares_evenly_at_unequal_demand() {
    // Sheng et al., section 4: each of two backlogged clients is served half, at equal prices.
    let mut users = Users::with(&[0, 0]);
    let many: Vec<QueuedRequest> = (1..=90).map(|ticket| waiting(1, ticket)).collect();
    let few: Vec<QueuedRequest> = (91..=100).map(|ticket| waiting(2, ticket)).collect();
    let mut queue = queue(Order::Vtc, &users, &[many, few].concat());
    let mut served = [0_u64; 2];
    for _ in 0..20 {
        let Next::Go(request) = queue.next(0, &users, &mut Gate::default(), all) else {
            panic!("there is room and nobody else");
        };
        let user = request.user.0;
        served[user as usize - 1] += 10;
        users.set(user, served[user as usize - 1]);
        assert!(served[0].abs_diff(served[1]) <= 10, "{served:?}");
    }
    assert_eq!(served, [100, 100]);
}

#[test]
fn vtc_serves_users_in_proportion_to_weights() {
    let mut users = Users::with(&[0, 0, 0, 0]);
    for user in 1..=4 {
        users.figures_mut(user).weight_milli = 1000 * user as u32;
    }
    let requests: Vec<QueuedRequest> = (0..400)
        .map(|ticket| waiting(ticket % 4 + 1, ticket))
        .collect();
    let mut queue = queue(Order::Vtc, &users, &requests);
    let mut served = [0_u64; 4];
    for _ in 0..100 {
        let ticket = next(&mut queue, &users).unwrap();
        let user = ticket % 4 + 1;
        served[user as usize - 1] += 1;
        let figures = users.figures_mut(user);
        figures.counter_milli += figures.milli_of(10);
    }
    assert_eq!(served, [10, 20, 30, 40]);
}

#[test]
fn vtc_max_fair_counts_requests_in_flight() {
    let mut users = Users::with(&[100, 120]);
    users.figures_mut(1).in_flight = 3;
    let requests = [waiting(1, 1), waiting(2, 2)];
    // Three requests of 10 tokens in flight: 130 against 120.
    let mut fair = queue(Order::VtcMaxFair, &users, &requests);
    assert_eq!(drain(&mut fair, &users), [2, 1]);
    let mut plain = queue(Order::Vtc, &users, &requests);
    assert_eq!(drain(&mut plain, &users), [1, 2]);
}

#[test]
fn vtc_pred_orders_by_counters_with_predicted_output() {
    // The prediction is in the counter from the dispatch on, through the ledger's advance.
    let mut ledger = CreditLedger::default();
    let pricing = Pricing::default();
    let mut users = Users::with(&[0, 50]);
    let estimate = TokenDelta {
        input_uncached: 10,
        output: 100,
        ..TokenDelta::default()
    };
    let (_, charge) = ledger.open(UserKey(1), &estimate, &pricing);
    users.set(1, pricing.due(&charge));
    let mut queue = queue(
        Order::VtcPred,
        &users,
        &[waiting(1, 1), waiting(2, 2), waiting(1, 3)],
    );
    assert_eq!(pricing.due(&charge), 210);
    assert_eq!(drain(&mut queue, &users), [2, 1, 3]);
}

#[test]
fn lcf_does_not_lift_counters() {
    let mut users = Users::with(&[1000, 1000]);
    users.figures_mut(1).served_milli = 900_000;
    users.figures_mut(2).served_milli = 1000;
    let requests = [waiting(1, 1), waiting(2, 2), waiting(2, 3)];
    let mut lcf = queue(Order::Lcf, &users, &requests);
    assert_eq!(drain(&mut lcf, &users), [2, 3, 1]);
    let mut vtc = queue(Order::Vtc, &users, &requests);
    assert_eq!(drain(&mut vtc, &users), [1, 2, 3]);
}

#[test]
fn rpm_takes_the_user_with_fewest_requests_in_the_last_minute() {
    let mut users = Users::with(&[0, 500, 900]);
    for (user, requests) in [(1, 30), (2, 4), (3, 5)] {
        users.figures_mut(user).requests_last_minute = requests;
    }
    let mut queue = queue(
        Order::Rpm,
        &users,
        &[waiting(1, 1), waiting(2, 2), waiting(3, 3)],
    );
    assert_eq!(drain(&mut queue, &users), [2, 3, 1]);
}

#[test]
fn fcfs_takes_the_earliest_arrival() {
    let users = Users::with(&[900, 0]);
    let requests = [waiting(2, 2), waiting(1, 1), waiting(1, 4), waiting(2, 3)];
    let mut queue = queue(Order::Fcfs, &users, &requests);
    assert_eq!(drain(&mut queue, &users), [1, 2, 3, 4]);
}

#[test]
fn priority_precedes_every_order() {
    for order in [Order::Vtc, Order::Dlpm, Order::Rpm, Order::Fcfs, Order::Lcf] {
        let users = Users::with(&[0, 1_000_000]);
        let urgent = QueuedRequest {
            priority: 5,
            ..waiting(2, 9)
        };
        let idle = QueuedRequest {
            priority: -1,
            ..waiting(1, 0)
        };
        let mut queue = queue(order, &users, &[idle, waiting(1, 1), urgent]);
        assert_eq!(drain(&mut queue, &users), [9, 1, 0], "{order:?}");
    }
}

#[test]
fn dlpm_takes_the_longest_match_while_deficit_lasts() {
    // Cao et al., "Locality-aware fair scheduling in LLM serving", 2025: with a quantum of 100, the
    // user with long matches is served about that much before the other's turn.
    let mut users = Users::with(&[0, 0]);
    let long = |ticket| QueuedRequest {
        matched_blocks: 50,
        ..waiting(1, ticket)
    };
    let mut requests: Vec<QueuedRequest> = (1..=20).map(long).collect();
    requests.extend((21..=40).map(|ticket| waiting(2, ticket)));
    let mut gate = Gate::default();
    gate.set_slack(100);
    let mut queue = Queue::new(rules(Order::Dlpm));
    for request in requests {
        queue.push(request, 0, &users, &gate).unwrap();
    }
    let mut order = Vec::new();
    while let Next::Go(request) = queue.next(0, &users, &mut gate, all) {
        order.push(request.user.0);
        let figures = users.figures_mut(request.user.0);
        figures.counter_milli += figures.milli_of(40);
    }
    // Three requests of 40 overdraw a quantum of 100 by 20, which reduces the next one.
    assert_eq!(order[..12], [1, 1, 1, 2, 2, 2, 1, 1, 2, 2, 1, 1]);
    assert_eq!(order.len(), 40);
}

#[test]
fn dlpm_gives_a_returning_user_no_new_deficit() {
    // User 1 sends one request at a time and so leaves the queue with every dispatch; all of it is
    // cached.
    let mut users = Users::with(&[0, 0]);
    let mut gate = Gate::default();
    gate.set_slack(100);
    let mut queue = Queue::new(rules(Order::Dlpm));
    for ticket in 1..=100 {
        queue.push(waiting(2, ticket), 0, &users, &gate).unwrap();
    }
    let mut served = [0_u64; 2];
    for ticket in 101..161 {
        let long = QueuedRequest {
            matched_blocks: 50,
            ..waiting(1, ticket)
        };
        if queue.len_of(UserKey(1)) == 0 {
            queue.push(long, 0, &users, &gate).unwrap();
        }
        let Next::Go(request) = queue.next(0, &users, &mut gate, all) else {
            panic!("there is room and nobody else");
        };
        let user = request.user.0;
        served[user as usize - 1] += 40;
        users.set(user, served[user as usize - 1]);
        assert!(served[0].abs_diff(served[1]) <= 240, "{served:?}");
    }
}

#[test]
fn dlpm_takes_the_longest_match_within_a_user() {
    let users = Users::with(&[0]);
    let requests = [(1, 0), (2, 9), (3, 4)].map(|(ticket, matched_blocks)| QueuedRequest {
        matched_blocks,
        ..waiting(1, ticket)
    });
    let mut queue = queue(Order::Dlpm, &users, &requests);
    assert_eq!(drain(&mut queue, &users), [2, 3, 1]);
}

#[test]
fn a_changed_order_applies_to_the_next_dispatch() {
    let users = Users::with(&[900, 0]);
    let requests = [waiting(1, 1), waiting(2, 2), waiting(1, 3), waiting(2, 4)];
    let mut queue = queue(Order::Vtc, &users, &requests);
    assert_eq!(next(&mut queue, &users), Some(2));
    queue.set_rules(rules(Order::Fcfs));
    assert_eq!(drain(&mut queue, &users), [1, 3, 4]);
}
