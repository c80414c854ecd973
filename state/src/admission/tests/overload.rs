//! Tests of rejections on arrival, and of the effects of overload.

use super::*;

/// A queue served at a steady rate, and its users.
struct Counter {
    queue: Queue,
    users: Users,
    gate: Gate,
    last_ticket: u64,
    now_ms: u64,
    /// User and wait, in milliseconds, of each dispatched request.
    gone: Vec<(u64, u64)>,
    expired: Vec<Expired>,
    refused: u64,
}

impl Counter {
    fn new(order: Order) -> Self {
        Self {
            queue: Queue::new(rules(order)),
            users: Users::with(&[0; 10]),
            gate: Gate::default(),
            last_ticket: 0,
            now_ms: 0,
            gone: Vec::new(),
            expired: Vec::new(),
            refused: 0,
        }
    }

    fn push(
        &mut self,
        user: u64,
        change: impl Fn(QueuedRequest) -> QueuedRequest,
    ) -> Result<(), QueueRejection> {
        self.last_ticket += 1;
        let waiting = change(QueuedRequest {
            arrived_ms: self.now_ms,
            ..waiting(user, self.last_ticket)
        });
        self.queue
            .push(waiting, self.now_ms, &self.users, &self.gate)
    }

    /// Simulates a second in which each of the users sends `coming` requests, and `going` requests
    /// in all are dispatched, evenly.
    fn second(&mut self, users: &[u64], coming: u64, going: u64) {
        for _ in 0..1000 {
            self.now_ms += 1;
            let is_time = |per_s| self.now_ms * per_s % 1000 < per_s;
            let (comes, goes) = (is_time(coming), is_time(going));
            for user in users.iter().filter(|_| comes) {
                self.refused += u64::from(self.push(*user, |it| it).is_err());
            }
            self.expired.extend(self.queue.expire(self.now_ms));
            if goes
                && let Next::Go(it) = self
                    .queue
                    .next(self.now_ms, &self.users, &mut self.gate, all)
            {
                self.gone.push((it.user.0, self.now_ms - it.arrived_ms));
                let figures = self.users.figures_mut(it.user.0);
                figures.counter_milli += 10_000;
                figures.served_milli += 10_000;
                figures.requests_last_minute += 1;
            }
        }
    }
}

const TOO_LATE: fn(&QueueRejection) -> bool = |it| matches!(it, QueueRejection::TooLate { .. });

#[test]
fn a_request_is_refused_only_if_it_would_miss_its_deadline() {
    let mut at = Counter::new(Order::Vtc);
    // The queue dispatches 20 requests per second, and 50 more than that wait.
    at.second(&[1], 70, 20);
    assert_eq!(at.refused, 0);
    let within = |ms: u64| {
        move |it: QueuedRequest| QueuedRequest {
            due_ms: Some(1000 + ms),
            ..it
        }
    };
    let refused = at.push(1, within(1500)).unwrap_err();
    assert!(TOO_LATE(&refused), "{refused}");
    at.push(1, within(4000)).expect("50 requests take 2.5 s");
    // Nothing is ahead of a user who was served less than the waiting ones.
    at.users.set(1, 1000);
    at.users.set(2, 0);
    at.push(2, within(100)).expect("it goes first");
    // Waiting requests go first by their priority, or by their order.
    let urgent = |it: QueuedRequest| QueuedRequest {
        priority: 1,
        ..within(100)(it)
    };
    at.push(1, urgent).expect("it goes before all");
    let selective = |it: QueuedRequest| QueuedRequest {
        is_selective: true,
        ..within(100)(it)
    };
    at.push(1, selective)
        .expect("its own backends may have room");
}

#[test]
fn fcfs_forecast_counts_the_whole_queue() {
    let mut at = Counter::new(Order::Fcfs);
    at.second(&[1], 70, 20);
    let soon = |it: QueuedRequest| QueuedRequest {
        due_ms: Some(1500),
        ..it
    };
    assert!(TOO_LATE(&at.push(2, soon).unwrap_err()));
}

#[test]
fn no_request_is_refused_at_unknown_rate_or_short_queue() {
    let mut at = Counter::new(Order::Vtc);
    let at_once = |it: QueuedRequest| QueuedRequest {
        due_ms: Some(1),
        ..it
    };
    for _ in 0..1000 {
        at.push(1, at_once).expect("nothing was measured");
    }
    let mut at = Counter::new(Order::Vtc);
    at.second(&[1], 24, 20);
    at.push(1, at_once).expect("four wait");
}

#[test]
fn a_queued_request_expires_at_its_deadline() {
    let mut at = Counter::new(Order::Vtc);
    at.push(1, |it| QueuedRequest {
        due_ms: Some(700),
        ..it
    })
    .unwrap();
    assert_eq!(at.queue.expire(699), []);
    let expired = at.queue.expire(700);
    assert_eq!(expired[0].why, ExpiryReason::Deadline);
    assert!(at.queue.is_empty());
}

/// Orders in which users take turns, and the one in which they do not.
const ORDERS: [Order; 4] = [Order::Vtc, Order::Lcf, Order::Rpm, Order::Fcfs];

#[test]
fn overload_dispatches_fresh_requests_and_sheds_the_rest_early() {
    for order in ORDERS {
        let mut at = Counter::new(order);
        for _ in 0..5 {
            at.second(&[1, 2], 100, 20);
        }
        at.gone.clear();
        at.expired.clear();
        at.refused = 0;
        for _ in 0..10 {
            at.second(&[1, 2], 100, 20);
        }
        assert!(at.gone.len() >= 190, "{order:?}: {} of 200", at.gone.len());
        let longest = at.gone.iter().map(|(_, waited)| *waited).max().unwrap();
        assert!(longest <= 1000, "{order:?}: {longest} ms");
        assert!(at.refused > 1400, "{order:?}: {} refused", at.refused);
        assert!(
            at.expired.iter().all(|it| it.why == ExpiryReason::Overload),
            "{order:?}"
        );
        if order != Order::Fcfs {
            let of_first = at.gone.iter().filter(|(user, _)| *user == 1).count();
            assert!(
                (90..=110).contains(&of_first),
                "{order:?}: {of_first} of 200"
            );
        }
        // Overload ends with the load: waiting requests go, and later arrivals go at once.
        at.second(&[1, 2], 5, 20);
        at.second(&[1, 2], 5, 20);
        at.gone.clear();
        at.second(&[1, 2], 5, 20);
        assert!(
            at.gone.iter().all(|(_, waited)| *waited <= 100),
            "{:?}",
            at.gone
        );
    }
}

#[test]
fn a_user_sending_ten_times_as_much_is_served_no_more() {
    let mut at = Counter::new(Order::Vtc);
    for turn in 0..100 {
        at.second(&[1], 200, 20);
        if turn == 4 {
            at.gone.clear();
        }
        for _ in 0..20 {
            // The request may be rejected or not.
            let _refused = at.push(2, |it| it);
        }
    }
    let of_second = at.gone.iter().filter(|(user, _)| *user == 2).count();
    let share = 100 * of_second / at.gone.len();
    assert!((45..=55).contains(&share), "{share} %");
}

#[test]
fn bursts_and_closed_loops_queue_without_refusal() {
    let mut at = Counter::new(Order::Vtc);
    for _ in 0..150 {
        at.push(1, |it| it).expect("a burst");
    }
    for _ in 0..7 {
        at.second(&[2], 0, 20);
    }
    assert_eq!((at.expired.len(), at.gone.len()), (0, 140));
    let waits: Vec<u64> = at.gone.iter().map(|(_, waited)| *waited).collect();
    assert!(waits.is_sorted(), "first come, first served");
    let mut at = Counter::new(Order::Vtc);
    for _ in 0..100 {
        at.push(1, |it| it).expect("the loop begins");
    }
    for _ in 0..60 {
        at.second(&[1], 20, 20);
    }
    assert_eq!((at.expired.len(), at.refused), (0, 0));
}

#[test]
fn observed_client_timeout_becomes_the_queue_deadline() {
    let mut at = Counter::new(Order::Vtc);
    for _ in 0..40 {
        at.push(1, |it| it).unwrap();
    }
    for ticket in 1..=40 {
        at.queue.left(Ticket(ticket), 3010).unwrap();
    }
    at.queue.set_service_ms(600);
    assert_eq!(at.queue.forecast(0).wait_ms_max, 2400);
    let queue = Queue::new(rules(Order::Vtc)).with_overload(at.queue.into_overload());
    assert_eq!(queue.forecast(0).wait_ms_max, 2400);
    at.queue = queue;
    at.now_ms = 10_000;
    at.push(1, |it| it).unwrap();
    assert_eq!(at.queue.expire(12_399), []);
    assert_eq!(at.queue.expire(12_400)[0].why, ExpiryReason::Deadline);
}

#[test]
fn held_requests_wait_for_their_own_time_and_never_count_as_overload() {
    let mut at = Counter::new(Order::Vtc);
    let held = |it: QueuedRequest| QueuedRequest {
        hold_ms: Some(60_000),
        ..it
    };
    // Nothing is dispatched for 40 s, which is longer than others may wait.
    for _ in 0..40 {
        assert_eq!(at.push(1, held), Ok(()));
        assert_eq!(at.push(2, held), Ok(()));
        at.second(&[], 0, 0);
    }
    assert_eq!((at.queue.len(), at.expired.len()), (80, 0));
    assert!(at.queue.holds_any() && !at.queue.forecast(at.now_ms).is_overloaded);
    at.second(&[], 0, 20);
    let of = |user| at.gone.iter().filter(move |(it, _)| *it == user).count();
    assert_eq!((of(1), of(2)), (10, 10), "users take turns");
    at.second(&[], 0, 10);
    assert_eq!(at.gone[29].1, 28_000, "the oldest of a user goes first");
    for _ in 0..60 {
        at.second(&[], 0, 0);
    }
    assert_eq!((at.queue.len(), at.expired.len()), (0, 50));
    let is_too_long = |it: &Expired| it.why == ExpiryReason::TooLong;
    assert!(at.expired.iter().all(is_too_long));
    assert!(!at.queue.holds_any());
}

#[test]
fn a_held_request_keeps_the_bound_of_the_queue_and_its_clients_deadline() {
    let mut at = Counter::new(Order::Vtc);
    let held = |it: QueuedRequest| QueuedRequest {
        hold_ms: Some(60_000),
        ..it
    };
    let due = |it: QueuedRequest| QueuedRequest {
        due_ms: Some(2_000),
        ..held(it)
    };
    assert_eq!(at.push(1, due), Ok(()));
    let room = rules(Order::Vtc).queue_max - 1;
    for _ in 0..room {
        assert_eq!(at.push(1, held), Ok(()));
    }
    assert_eq!(at.push(1, held), Err(QueueRejection::Full));
    at.second(&[], 0, 0);
    at.second(&[], 0, 0);
    assert_eq!(at.expired.len(), 1);
    assert_eq!(at.expired[0].why, ExpiryReason::Deadline);
}
