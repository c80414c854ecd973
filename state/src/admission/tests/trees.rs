//! Tests of the turns of one user's trees of sessions.

use proptest::prelude::*;

use super::*;
use crate::ids::AgentSessionKey;

/// Returns a request of user 1 in `tree` with `tokens` uncached prompt tokens; tree 0 is that of
/// requests without a session.
fn of_tree(tree: u64, ticket: u64, tokens: u32) -> QueuedRequest {
    QueuedRequest {
        tree: (tree > 0).then_some(AgentSessionKey(tree)),
        input_tokens: tokens,
        ..waiting(1, ticket)
    }
}

#[test]
fn an_agent_need_not_wait_for_the_sub_agents_of_another() {
    let users = Users::default();
    let burst = (1..=51).map(|ticket| of_tree(1, ticket, 10));
    let lone = [of_tree(2, 60, 10), of_tree(0, 61, 10)];
    let requests: Vec<QueuedRequest> = burst.chain(lone).collect();
    let mut in_turns = queue(Order::Vtc, &users, &requests);
    assert_eq!(drain(&mut in_turns, &users)[..4], [1, 60, 61, 2]);
    let mut first_come = queue(Order::Fcfs, &users, &requests);
    assert_eq!(drain(&mut first_come, &users)[..4], [1, 2, 3, 4]);
}

#[test]
fn the_expected_wait_of_a_lone_agent_leaves_out_the_burst_beside_it() {
    let users = Users::default();
    let burst: Vec<QueuedRequest> = (1..=51).map(|ticket| of_tree(1, ticket, 10)).collect();
    let queue = queue(Order::Vtc, &users, &burst);
    let ahead = |request| queue.prospect(&request, 0, &users, &Gate::default()).ahead;
    assert_eq!(ahead(of_tree(1, 60, 10)), 51);
    assert_eq!(ahead(of_tree(2, 60, 10)), 1);
}

#[test]
fn a_tree_that_comes_back_does_not_make_up_for_its_absence() {
    let users = Users::default();
    let first: Vec<QueuedRequest> = (1..=20).map(|ticket| of_tree(1, ticket, 10)).collect();
    let mut queue = queue(Order::Vtc, &users, &first);
    for ticket in 1..=10 {
        assert_eq!(next(&mut queue, &users), Some(ticket));
    }
    for ticket in 31..=35 {
        let back = of_tree(2, ticket, 10);
        queue
            .push(back, 0, &users, &Gate::default())
            .expect("it has room");
    }
    assert_eq!(drain(&mut queue, &users)[..6], [11, 31, 12, 32, 13, 33]);
}

#[test]
fn trees_of_one_request_without_end_do_not_stop_a_tree_that_was_served() {
    let users = Users::default();
    let mut queue = queue(Order::Vtc, &users, &[]);
    let mut ticket = 0;
    let mut push = |queue: &mut Queue, tree| {
        ticket += 1;
        let request = of_tree(tree, ticket, 100);
        queue
            .push(request, 0, &users, &Gate::default())
            .expect("it has room");
        ticket
    };
    for tree in 2..5 {
        push(&mut queue, tree);
    }
    let mut own = push(&mut queue, 1);
    let mut served = 0;
    for fresh in 5..1_005 {
        if next(&mut queue, &users) == Some(own) {
            served += 1;
            own = push(&mut queue, 1);
        } else {
            push(&mut queue, fresh);
        }
    }
    // A quarter of the turns, less what each newcomer gains by one request.
    assert!(served >= 150, "{served}");
}

#[test]
fn trees_that_left_or_were_served_are_forgotten() {
    let users = Users::default();
    let mut queue = queue(Order::Vtc, &users, &[of_tree(0, 1, 10)]);
    for ticket in 2..500 {
        let request = of_tree(ticket, ticket, 10);
        queue
            .push(request, 0, &users, &Gate::default())
            .expect("it has room");
        match ticket % 2 {
            0 => drop(queue.remove(Ticket(ticket))),
            _ => drop(next(&mut queue, &users)),
        }
    }
    assert!(
        queue.trees_of(UserKey(1)) <= 4,
        "{}",
        queue.trees_of(UserKey(1))
    );
}

#[test]
fn trees_take_turns_by_tokens_not_by_requests() {
    let users = Users::default();
    let long = (1..=4).map(|ticket| of_tree(1, ticket, 300));
    let short = (11..=22).map(|ticket| of_tree(2, ticket, 100));
    let requests: Vec<QueuedRequest> = long.chain(short).collect();
    let mut queue = queue(Order::Vtc, &users, &requests);
    let order = drain(&mut queue, &users);
    let of_long = order[..8].iter().filter(|ticket| **ticket < 10).count();
    assert_eq!(of_long, 2, "{order:?}");
}

/// Highest price of a request below.
const LONGEST: u32 = 500;

proptest! {
    /// The bound of start-time fair queueing: two flows that are always backlogged differ by at
    /// most the sum of their longest packets.
    #[test]
    fn backlogged_trees_differ_by_at_most_two_requests(
        requests in prop::collection::vec((0_u64..3, 1_u32..500), 60..120),
        rounds in 1_usize..20,
    ) {
        let users = Users::default();
        let mut by_tree = [0_usize; 3];
        let numbered = (1..).zip(requests);
        let requests: Vec<QueuedRequest> = numbered
            .map(|(ticket, (tree, tokens))| of_tree(tree, ticket, tokens))
            .collect();
        for request in &requests {
            by_tree[request.tree.map_or(0, |it| it.0 as usize)] += 1;
        }
        let mut queue = queue(Order::Vtc, &users, &requests);
        let price = |it: &QueuedRequest| u64::from(it.input_tokens);
        let longest = requests.iter().map(price).max().unwrap_or_default();
        let mut served = [0_u64; 3];
        for _ in 0..rounds {
            let ticket = next(&mut queue, &users).expect("requests wait");
            let request = requests[ticket as usize - 1];
            let tree = request.tree.map_or(0, |it| it.0 as usize);
            served[tree] += price(&request);
            by_tree[tree] -= 1;
            if by_tree.contains(&0) {
                break;
            }
            let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
            prop_assert!(most - least <= 2 * longest, "{:?}", served);
        }
    }

    /// A tree that asks for less than its share waits for one turn of each other tree at most, however
    /// often it has come back before.
    #[test]
    fn a_tree_within_its_share_waits_for_one_turn_of_each_other_tree(
        others in 2_u64..6,
        prices in prop::collection::vec(1_u32..=LONGEST, 20..60),
    ) {
        let users = Users::default();
        let mut queue = queue(Order::Vtc, &users, &[]);
        let mut prices = prices.into_iter().cycle();
        let mut sent: Vec<(u64, u64)> = Vec::new();
        let mut push = |queue: &mut Queue, sent: &mut Vec<(u64, u64)>, tree| {
            let tokens = prices.next().expect("prices repeat");
            sent.push((tree, tokens.into()));
            let request = of_tree(tree, sent.len() as u64, tokens);
            queue.push(request, 0, &users, &Gate::default()).expect("it has room");
        };
        for tree in (1..=others).cycle().take(2 * others as usize) {
            push(&mut queue, &mut sent, tree);
        }
        for _ in 0..60 {
            let (mut between, mut ahead) = (0, 0);
            while between < 3 * others * u64::from(LONGEST) {
                let (tree, tokens) = sent[next(&mut queue, &users).unwrap() as usize - 1];
                between += tokens;
                push(&mut queue, &mut sent, tree);
            }
            push(&mut queue, &mut sent, others + 1);
            loop {
                let (tree, tokens) = sent[next(&mut queue, &users).unwrap() as usize - 1];
                if tree > others {
                    break;
                }
                ahead += tokens;
                push(&mut queue, &mut sent, tree);
            }
            prop_assert!(ahead <= others * u64::from(LONGEST), "{}", ahead);
        }
    }
}
