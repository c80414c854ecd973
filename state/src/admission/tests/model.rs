//! Tests of the queue against a model that examines everything each time.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Push { user: u64, priority: i16, bin: u16 },
    Remove(prop::sample::Index),
    Charge { user: u64, tokens: u64 },
    Next { skipped: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let user = || 1_u64..7;
    let step = prop_oneof![
        4 => (user(), 0_i16..2, 0_u16..1)
            .prop_map(|(user, priority, bin)| Step::Push { user, priority, bin }),
        1 => any::<prop::sample::Index>().prop_map(Step::Remove),
        3 => (user(), 0_u64..50).prop_map(|(user, tokens)| Step::Charge { user, tokens }),
        // 0 skips no user.
        3 => (0_u64..4).prop_map(|skipped| Step::Next { skipped }),
    ];
    prop::collection::vec(step, 0..120)
}

/// Returns the request that goes next by the definition of the orders.
fn naive(
    requests: &BTreeMap<u64, QueuedRequest>,
    users: &Users,
    order: Order,
    skipped: u64,
) -> Option<u64> {
    let head = |it: &QueuedRequest| {
        let same = |other: &&QueuedRequest| (other.user, other.priority) == (it.user, it.priority);
        requests.values().filter(same).map(|it| it.ticket).min() == Some(it.ticket)
    };
    let key = |it: &QueuedRequest| {
        let figures = users.figures(it.user);
        match order {
            Order::Lcf => figures.served_milli,
            Order::Rpm => u64::from(figures.requests_last_minute),
            Order::Fcfs => 0,
            _ => figures.counter_milli,
        }
    };
    let heads = requests
        .values()
        .filter(|it| it.user.0 != skipped && head(it));
    let first = heads.min_by_key(|it| (std::cmp::Reverse(it.priority), key(it), it.ticket));
    first.map(|it| it.ticket.0)
}

proptest! {
    #[test]
    fn queue_dispatches_as_the_reference_model(
        steps in steps(),
        order in prop::sample::select(vec![Order::Vtc, Order::VtcPred, Order::Lcf, Order::Rpm, Order::Fcfs]),
    ) {
        let mut users = Users::with(&[0; 7]);
        let mut queue = Queue::new(rules(order));
        let mut requests = BTreeMap::new();
        let mut gate = Gate::default();
        for (ticket, step) in (1..).zip(steps) {
            match step {
                Step::Push { user, priority, bin } => {
                    let request = QueuedRequest { priority, bin, ..waiting(user, ticket) };
                    queue.push(request, 0, &users, &gate).unwrap();
                    requests.insert(ticket, request);
                }
                Step::Remove(index) if !requests.is_empty() => {
                    let ticket = *requests.keys().nth(index.index(requests.len())).unwrap();
                    prop_assert_eq!(queue.remove(Ticket(ticket)), requests.remove(&ticket));
                }
                Step::Remove(_) => {}
                Step::Charge { user, tokens } => {
                    let figures = users.figures_mut(user);
                    figures.counter_milli += tokens * 1000;
                    figures.served_milli += tokens * 999;
                    figures.requests_last_minute += tokens as u32;
                }
                Step::Next { skipped } => {
                    let expected = naive(&requests, &users, order, skipped);
                    let verdict = |it: &QueuedRequest| {
                        if it.user.0 == skipped { DispatchVerdict::Skip } else { DispatchVerdict::Go }
                    };
                    let next = match queue.next(0, &users, &mut gate, verdict) {
                        Next::Go(request) => Some(request.ticket.0),
                        _ => None,
                    };
                    prop_assert_eq!(next, expected);
                    if let Some(ticket) = next {
                        requests.remove(&ticket);
                    }
                }
            }
            prop_assert_eq!(queue.len(), requests.len());
            prop_assert_eq!(queue.users_len(), requests.values().map(|it| it.user).collect::<std::collections::BTreeSet<_>>().len());
        }
    }

    /// For any order, bins, slack and blocked requests, every request goes exactly once.
    #[test]
    fn queue_loses_and_starves_no_request(
        pushes in prop::collection::vec((1_u64..5, 0_u16..4, 0_i16..3, 0_u32..9), 1..60),
        order in prop::sample::select(vec![
            Order::Vtc, Order::VtcMaxFair, Order::VtcPred, Order::Dlpm, Order::Lcf, Order::Rpm, Order::Fcfs,
        ]),
        slack in 0_u64..100,
        odd: u64,
    ) {
        let mut users = Users::default();
        let mut gate = Gate::default();
        gate.set_slack(slack);
        let mut queue = Queue::new(rules(order));
        for (ticket, (user, bin, priority, matched_blocks)) in (0..).zip(&pushes) {
            let request = QueuedRequest {
                bin: *bin,
                priority: *priority,
                matched_blocks: *matched_blocks,
                ..waiting(*user, ticket)
            };
            queue.push(request, 0, &users, &gate).unwrap();
        }
        let mut gone = std::collections::BTreeSet::new();
        let mut now_ms = 0;
        while !queue.is_empty() {
            now_ms += 1;
            let stubborn = |it: &QueuedRequest| {
                if (it.ticket.0 + now_ms + odd % 7).is_multiple_of(3) { DispatchVerdict::Skip } else { DispatchVerdict::Go }
            };
            if let Next::Go(request) = queue.next(now_ms, &users, &mut gate, stubborn) {
                prop_assert!(gone.insert(request.ticket));
                let figures = users.figures_mut(request.user.0);
                figures.counter_milli += 10_000;
                figures.requests_last_minute += 1;
            }
            prop_assert!(now_ms < 10_000, "{} starve", queue.len());
        }
        prop_assert_eq!(gone.len(), pushes.len());
    }
}
