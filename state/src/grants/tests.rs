//! Tests of the waiting list, by example and against a model.

use proptest::prelude::*;

use super::*;

fn wait(ticket: u64, user: u64, priority: i16) -> Wait {
    Wait {
        ticket: Ticket(ticket),
        model: ModelKey(1),
        user: UserKey(user),
        priority,
        tokens: 10,
    }
}

fn list(waits: &[(u8, Wait)]) -> WaitingList {
    let mut list = WaitingList::default();
    for (replica, wait) in waits {
        assert!(list.wait(ReplicaId(*replica), *wait));
    }
    assert!(list.is_consistent());
    list
}

/// Grants requests one after another while no counter moves.
fn grants(list: &mut WaitingList, counter: impl Fn(UserKey) -> u64) -> Vec<u64> {
    std::iter::from_fn(|| list.grant(ModelKey(1), &counter))
        .map(|(_, wait)| wait.ticket.0)
        .collect()
}

#[test]
fn priority_then_counter_then_log_order() {
    let mut list = list(&[
        (1, wait(1, 1, 0)),
        (2, wait(2, 2, 0)),
        (1, wait(3, 3, 0)),
        (3, wait(4, 2, 0)),
        (1, wait(5, 1, 9)),
    ]);
    let counters = |user: UserKey| [0, 30, 10, 10][user.0 as usize];
    assert_eq!(grants(&mut list, counters), [5, 2, 3, 4, 1]);
    assert!(list.is_consistent());
    let view = list.view();
    let of_1: Vec<u64> = view.granted(ReplicaId(1)).map(|it| it.ticket.0).collect();
    assert_eq!((of_1, view.waiting_len()), (vec![1, 3, 5], 0));
    assert!(view.knows(ReplicaId(2), Ticket(2)) && !view.knows(ReplicaId(1), Ticket(2)));
}

#[test]
fn grants_go_to_requests_of_their_model() {
    let mut list = list(&[(1, wait(1, 1, 0))]);
    assert_eq!(list.grant(ModelKey(2), |_| 0), None);
    assert_eq!(list.grant(ModelKey(0), |_| 0), None);
    assert!(list.grant(ModelKey(1), |_| 0).is_some());
}

#[test]
fn a_closed_replica_leaves_the_list_and_returns_its_grants() {
    let mut list = list(&[(1, wait(1, 1, 0)), (1, wait(2, 2, 0)), (2, wait(1, 3, 0))]);
    assert!(list.grant(ModelKey(1), |_| 0).is_some());
    assert_eq!(list.close_replica(ReplicaId(1)), [ModelKey(1)]);
    assert!(list.is_consistent());
    assert!(list.leave(ReplicaId(2), Ticket(1)));
    assert!(!list.leave(ReplicaId(2), Ticket(1)));
    assert_eq!(list, WaitingList::default());
}

#[test]
fn tickets_are_unique_and_each_replica_is_bounded() {
    let mut list = list(&[(1, wait(1, 1, 0))]);
    assert!(!list.wait(ReplicaId(1), wait(1, 2, 0)));
    for ticket in 2..=WAITING_PER_REPLICA_MAX as u64 {
        assert!(list.wait(ReplicaId(1), wait(ticket, 1, 0)));
    }
    assert!(!list.wait(ReplicaId(1), wait(1 << 40, 1, 0)));
    assert!(list.wait(ReplicaId(2), wait(1 << 40, 1, 0)));
}

#[test]
fn a_forged_image_is_refused() {
    let (last_seq, entries) = list(&[(1, wait(1, 1, 0)), (1, wait(2, 1, 0))]).image();
    assert!(WaitingList::restored((last_seq, entries.clone())).is_ok());
    assert!(WaitingList::restored((1, entries.clone())).is_err());
    assert!(WaitingList::restored((5, Vec::new())).is_err());
    let twice = [&entries[..], &entries[..1]].concat();
    assert!(WaitingList::restored((9, twice)).is_err());
    let mut same_seq = entries;
    same_seq[1].seq = same_seq[0].seq;
    assert!(WaitingList::restored((9, same_seq)).is_err());
}

#[test]
fn a_refused_wait_leaves_no_trace() {
    let mut list = WaitingList::default();
    let full = WAITING_MAX / WAITING_PER_REPLICA_MAX;
    for replica in 0..full as u8 {
        for ticket in 0..WAITING_PER_REPLICA_MAX as u64 {
            assert!(list.wait(ReplicaId(replica), wait(ticket, 1, 0)));
        }
    }
    let late = ReplicaId(full as u8);
    assert!(!list.wait(late, wait(1, 1, 0)));
    assert!(!list.replicas().any(|replica| replica == late));
}

#[derive(Debug, Clone)]
enum Step {
    Wait(u8, u64, u64, i16),
    Leave(u8, u64),
    Grant,
    Charge(u64, u64),
    Close(u8),
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    let (replica, ticket, user) = (|| 1_u8..4, || 1_u64..12, || 0_u64..5);
    prop_oneof![
        6 => (replica(), ticket(), user(), 0_i16..2)
            .prop_map(|(replica, ticket, user, priority)| Step::Wait(replica, ticket, user, priority)),
        2 => (replica(), ticket()).prop_map(|(replica, ticket)| Step::Leave(replica, ticket)),
        4 => Just(Step::Grant),
        4 => (user(), 0_u64..9).prop_map(|(user, tokens)| Step::Charge(user, tokens)),
        1 => replica().prop_map(Step::Close),
        1 => Just(Step::Restore),
    ]
}

proptest! {
    #[test]
    fn grants_follow_the_reference_model(steps in prop::collection::vec(step(), 0..120)) {
        let mut list = WaitingList::default();
        let mut counters = [0_u64; 5];
        // Entries in log order: replica, request, and whether it is granted.
        let mut model: Vec<(u8, Wait, bool)> = Vec::new();
        for step in steps {
            match step {
                Step::Wait(replica, ticket, user, priority) => {
                    let wait = wait(ticket, user, priority);
                    let is_new = !model.iter().any(|it| (it.0, it.1.ticket) == (replica, wait.ticket));
                    prop_assert_eq!(list.wait(ReplicaId(replica), wait), is_new);
                    if is_new {
                        model.push((replica, wait, false));
                    }
                }
                Step::Leave(replica, ticket) => {
                    let before = model.len();
                    model.retain(|it| (it.0, it.1.ticket.0) != (replica, ticket));
                    prop_assert_eq!(list.leave(ReplicaId(replica), Ticket(ticket)), model.len() < before);
                }
                Step::Grant => {
                    let waiting = model.iter_mut().filter(|it| !it.2);
                    // `min_by_key` returns the first of equals in log order, but the order goes by
                    // the user's first request.
                    let next = waiting.min_by_key(|it| (Reverse(it.1.priority), counters[it.1.user.0 as usize]));
                    let expected = next.map(|it| { it.2 = true; (ReplicaId(it.0), it.1) });
                    let granted = list.grant(ModelKey(1), |user| counters[user.0 as usize]);
                    prop_assert_eq!(granted, expected);
                }
                Step::Charge(user, tokens) => counters[user as usize] += tokens,
                Step::Close(replica) => {
                    let granted = model.iter().filter(|it| it.0 == replica && it.2).count();
                    prop_assert_eq!(list.close_replica(ReplicaId(replica)).len(), granted);
                    model.retain(|it| it.0 != replica);
                }
                Step::Restore => list = WaitingList::restored(list.image()).unwrap(),
            }
            prop_assert!(list.is_consistent());
        }
    }
}
