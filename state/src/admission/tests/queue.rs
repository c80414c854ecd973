//! Tests of bounds, leaving, bins, and the effect of a blocked request on others.

use super::*;
use crate::ids::ReplicaId;
use crate::outputs::batch::BatchRoom;

#[test]
fn a_full_queue_refuses_until_a_request_leaves() {
    let users = Users::default();
    let mut queue = Queue::new(QueueSettings {
        queue_max: 2,
        ..rules(Order::Vtc)
    });
    let gate = Gate::default();
    let push = |queue: &mut Queue, ticket| queue.push(waiting(1, ticket), 0, &users, &gate);
    assert_eq!(push(&mut queue, 1), Ok(()));
    assert_eq!(push(&mut queue, 2), Ok(()));
    assert_eq!(push(&mut queue, 3), Err(QueueRejection::Full));
    assert_eq!(queue.remove(Ticket(1)), Some(waiting(1, 1)));
    assert_eq!(queue.remove(Ticket(1)), None);
    assert_eq!(push(&mut queue, 3), Ok(()));
    assert_eq!(
        (queue.len(), queue.len_of(UserKey(1)), queue.users_len()),
        (2, 2, 1)
    );
    assert_eq!(drain(&mut queue, &users), [2, 3]);
    assert!(queue.is_empty() && queue.users_len() == 0);
    assert_eq!(
        queue.next(0, &users, &mut Gate::default(), all),
        Next::Empty
    );
}

#[test]
fn requests_expire_in_order_of_their_deadlines() {
    let users = Users::default();
    let mut queue = queue(
        Order::Vtc,
        &users,
        &[waiting(1, 30), waiting(2, 10), waiting(1, 20)],
    );
    let expired = |queue: &mut Queue, now_ms| {
        let expired = queue.expire(now_ms).into_iter();
        expired
            .map(|it| (it.waiting.ticket.0, it.why))
            .collect::<Vec<_>>()
    };
    assert_eq!(expired(&mut queue, 10_009), []);
    let too_long = [(10, ExpiryReason::TooLong), (20, ExpiryReason::TooLong)];
    assert_eq!(expired(&mut queue, 10_020), too_long);
    assert_eq!(drain(&mut queue, &users), [30]);
}

#[test]
fn a_returning_user_gains_nothing_from_its_absence() {
    let mut users = Users::with(&[5000]);
    let mut queue = queue(Order::Vtc, &users, &[waiting(1, 1), waiting(1, 2)]);
    // The state has not seen user 2 wait: the counter of 0 counts as 5000 here.
    for ticket in [3, 4] {
        queue
            .push(waiting(2, ticket), 0, &users, &Gate::default())
            .unwrap();
    }
    assert_eq!(next(&mut queue, &users), Some(1));
    users.set(1, 5010);
    assert_eq!(next(&mut queue, &users), Some(3));
    // Once the state has seen user 2 wait, its counter applies.
    users.set(2, 5020);
    assert_eq!(next(&mut queue, &users), Some(2));
}

#[test]
fn arrivals_are_lifted_to_the_least_counter_at_peers() {
    let users = Users::with(&[9000]);
    let mut gate = Gate::default();
    let backlog = Backlog {
        priority: 0,
        least_milli: 7_000_000,
        users: 1,
        waiting: 1,
    };
    gate.record_report(ReplicaId(2), Some(backlog), 0);
    let mut queue = Queue::new(rules(Order::Vtc));
    queue.push(waiting(2, 1), 0, &users, &gate).unwrap();
    assert_eq!(queue.backlog(0, &users).unwrap().least_milli, 7_000_000);
}

#[test]
fn a_skipped_request_lets_others_pass_and_stop_ends_the_scan() {
    let users = Users::with(&[1, 2, 3]);
    let requests = [waiting(1, 1), waiting(2, 2), waiting(3, 3)];
    let mut queue = queue(Order::Vtc, &users, &requests);
    let mut gate = Gate::default();
    let skip_first = |request: &QueuedRequest| match request.user.0 {
        1 => DispatchVerdict::Skip,
        _ => DispatchVerdict::Go,
    };
    assert_eq!(
        queue.next(0, &users, &mut gate, skip_first),
        Next::Go(waiting(2, 2))
    );
    let mut calls = 0;
    let stop = |_: &QueuedRequest| {
        calls += 1;
        DispatchVerdict::Stop
    };
    assert_eq!(queue.next(0, &users, &mut gate, stop), Next::NoRoom);
    assert_eq!(calls, 1);
    let none = |_: &QueuedRequest| DispatchVerdict::Skip;
    assert_eq!(queue.next(0, &users, &mut gate, none), Next::NoRoom);
    assert_eq!(drain(&mut queue, &users), [1, 3]);
}

fn binned(user: u64, ticket: u64, bin: u16) -> QueuedRequest {
    QueuedRequest {
        bin,
        ..waiting(user, ticket)
    }
}

#[test]
fn bins_alternate_within_the_slack() {
    let users = Users::with(&[0]);
    let requests = [
        binned(1, 1, 0),
        binned(1, 2, 0),
        binned(1, 3, 2),
        binned(1, 4, 2),
        binned(1, 5, 1),
        binned(1, 6, 2),
    ];
    let mut turns = queue(Order::Vtc, &users, &requests);
    assert_eq!(
        turns.bins().into_iter().collect::<Vec<_>>(),
        [(0, 2), (1, 1), (2, 3)]
    );
    assert_eq!(drain(&mut turns, &users), [5, 3, 1, 4, 2, 6]);
    let mut longest = Queue::new(QueueSettings {
        bin_selection: BinSelection::LongestQueue,
        ..rules(Order::Vtc)
    });
    for request in requests {
        longest.push(request, 0, &users, &Gate::default()).unwrap();
    }
    assert_eq!(drain(&mut longest, &users), [3, 1, 4, 2, 5, 6]);
}

#[test]
fn a_bins_turn_does_not_exceed_the_slack() {
    let mut users = Users::with(&[0, 150]);
    let requests = [binned(1, 1, 0), binned(2, 2, 1)];
    let take = |slack: u64, users: &Users| {
        let mut queue = queue(Order::Vtc, users, &requests);
        let mut gate = Gate::default();
        gate.set_slack(slack);
        match queue.next(0, users, &mut gate, all) {
            Next::Go(request) => request.ticket.0,
            other => panic!("{other:?}"),
        }
    };
    // It is bin 1's turn.
    assert_eq!(take(150, &users), 2);
    assert_eq!(take(149, &users), 1);
    // No other request can go, so the capacity is used.
    users.set(1, 1000);
    let mut queue = queue(Order::Vtc, &users, &requests);
    let only_1 = |request: &QueuedRequest| match request.user.0 {
        1 => DispatchVerdict::Go,
        _ => DispatchVerdict::Skip,
    };
    let next = queue.next(0, &users, &mut Gate::default(), only_1);
    assert_eq!(next, Next::Go(requests[0]));
}

#[test]
fn an_old_request_precedes_its_bins_turn() {
    let users = Users::with(&[0, 0]);
    let requests = [binned(1, 1, 0), binned(2, 4000, 1)];
    for (now_ms, first) in [(5000, 4000), (5001, 1)] {
        let mut queue = queue(Order::Vtc, &users, &requests);
        let next = queue.next(now_ms, &users, &mut Gate::default(), all);
        let Next::Go(request) = next else {
            panic!("{next:?}");
        };
        assert_eq!(request.ticket.0, first);
    }
}

#[test]
fn backlog_describes_the_highest_priority() {
    let users = Users::with(&[5, 3, 9]);
    let urgent = QueuedRequest {
        priority: 1,
        ..waiting(3, 3)
    };
    let requests = [waiting(1, 1), waiting(2, 2), urgent];
    let mut vtc = queue(Order::Vtc, &users, &requests);
    let expected = Backlog {
        priority: 1,
        least_milli: 9000,
        users: 3,
        waiting: 3,
    };
    assert_eq!(vtc.backlog(0, &users), Some(expected));
    vtc.remove(Ticket(3));
    let least = vtc.backlog(0, &users).unwrap();
    assert_eq!((least.priority, least.least_milli), (0, 3000));
    // Orders without counters have no precedence across replicas.
    assert_eq!(
        queue(Order::Fcfs, &users, &requests).backlog(0, &users),
        None
    );
    assert_eq!(queue(Order::Vtc, &users, &[]).backlog(0, &users), None);
}

#[test]
fn a_gated_queue_gives_a_retry_time_and_opens_if_the_peer_is_silent() {
    let users = Users::with(&[100]);
    let mut queue = queue(Order::Vtc, &users, &[waiting(1, 1)]);
    let mut gate = Gate::default();
    let backlog = Backlog {
        priority: 0,
        least_milli: 99_999,
        users: 1,
        waiting: 1,
    };
    gate.record_report(ReplicaId(3), Some(backlog), 10);
    let retry_ms = GATE_RETRY_MS;
    assert_eq!(
        queue.next(10, &users, &mut gate, all),
        Next::Held { retry_ms }
    );
    assert_eq!(
        queue.next(10 + PEER_SILENT_MS, &users, &mut gate, all),
        Next::Go(waiting(1, 1))
    );
}

#[test]
fn a_request_without_room_does_not_block_later_ones() {
    // All requests are of one user, as in a cluster that does not distinguish users.
    let users = Users::with(&[0]);
    for order in [Order::Vtc, Order::Dlpm, Order::Fcfs] {
        let requests = [1, 2, 3, 4].map(|ticket| waiting(1, ticket));
        let mut queue = queue(order, &users, &requests);
        let verdict = |it: &QueuedRequest| match it.ticket.0 {
            1 | 2 => DispatchVerdict::Skip,
            _ => DispatchVerdict::Go,
        };
        let mut next = || queue.next(0, &users, &mut Gate::default(), verdict);
        assert_eq!(next(), Next::Go(waiting(1, 3)), "{order:?}");
        assert_eq!(next(), Next::Go(waiting(1, 4)), "{order:?}");
        assert_eq!(next(), Next::NoRoom, "{order:?}");
    }
}

/// Forms the next batch of at most `room`, as a backend that runs nothing gets it. Each request
/// raises its user's counter by `price`. Returns the tickets.
fn batch(queue: &mut Queue, users: &mut Users, price: u64, mut room: BatchRoom) -> Vec<u64> {
    let mut gate = Gate::default();
    let Next::Go(first) = queue.next(0, users, &mut gate, all) else {
        return Vec::new();
    };
    let mut tickets = Vec::new();
    let mut next = Some(first);
    while let Some(waiting) = next {
        tickets.push(waiting.ticket.0);
        room.take(waiting.input_tokens.into());
        let counter = users.figures(waiting.user).counter_milli / 1000;
        users.set(waiting.user.0, counter + price);
        next = queue.next_alike(&first, 0, users, &mut gate, |waiting| {
            match room.fits(waiting.input_tokens.into()) {
                true => DispatchVerdict::Go,
                false => DispatchVerdict::Stop,
            }
        });
    }
    tickets
}

#[test]
fn a_batch_takes_requests_of_one_bin_in_the_fair_order() {
    let mut users = Users::with(&[0, 0, 0]);
    let greedy = (1..=6).map(|ticket| binned(1, ticket, 0));
    let modest = (7..=8).map(|ticket| binned(2, ticket, 0));
    let other: Vec<_> = [binned(3, 9, 1)].into();
    let requests: Vec<_> = greedy.chain(modest).chain(other).collect();
    let mut queue = queue(Order::Vtc, &users, &requests);
    let room = BatchRoom {
        requests: 4,
        tokens: None,
    };
    let mut form = || batch(&mut queue, &mut users, 100, room);
    assert_eq!(form(), [9], "the next bin");
    assert_eq!(form(), [1, 7, 2, 8]);
    assert_eq!(form(), [3, 4, 5, 6]);
}

#[test]
fn a_batch_ends_at_the_first_request_that_does_not_fit() {
    let mut users = Users::with(&[0]);
    let sized = |(ticket, input_tokens)| QueuedRequest {
        input_tokens,
        ..waiting(1, ticket)
    };
    let requests = [(1, 60), (2, 50), (3, 10), (4, 90)].map(sized);
    let mut queue = queue(Order::Fcfs, &users, &requests);
    let room = BatchRoom {
        requests: 9,
        tokens: Some(100),
    };
    let mut form = || batch(&mut queue, &mut users, 1, room);
    assert_eq!([form(), form(), form()], [vec![1], vec![2, 3], vec![4]]);
}

#[test]
fn a_prospect_is_the_place_that_the_request_would_get() {
    let users = Users::with(&[100, 300, 0]);
    let here = [waiting(1, 1), waiting(1, 2), waiting(2, 3)];
    let mut queue = queue(Order::Vtc, &users, &here);
    let of = |user, gate: &Gate| queue.prospect(&waiting(user, 9), 0, &users, gate);
    let alone = Gate::default();
    let ahead = [1, 2, 3, 4].map(|user| of(user, &alone).ahead);
    assert_eq!(
        ahead,
        [2, 3, 0, 1],
        "user 4 returns, and is raised to user 1"
    );
    assert_eq!(of(4, &alone).counter_milli, 100_000);
    assert_eq!(of(2, &alone).least_milli, Some(100_000));
    assert!(!of(2, &alone).is_held);

    let mut gate = Gate::default();
    let backlog = Backlog {
        priority: 0,
        least_milli: 50_000,
        users: 1,
        waiting: 1,
    };
    gate.record_report(crate::ids::ReplicaId(2), Some(backlog), 0);
    gate.set_slack(100);
    assert_eq!(of(2, &gate).least_milli, Some(50_000));
    assert_eq!(of(2, &gate).slack_milli, 100_000);
    assert_eq!(
        [1, 2, 3].map(|user| of(user, &gate).is_held),
        [false, true, false]
    );
    assert_eq!(drain(&mut queue, &users), [1, 2, 3], "nothing has changed");
}

#[test]
fn a_prospect_in_a_full_queue_is_a_refusal() {
    let users = Users::with(&[0, 0]);
    let queue = Queue::new(QueueSettings {
        queue_max: 0,
        ..rules(Order::Vtc)
    });
    let prospect = queue.prospect(&waiting(1, 1), 0, &users, &Gate::default());
    assert_eq!(prospect.rejection, Some(QueueRejection::Full));
}
