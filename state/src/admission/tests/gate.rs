//! Tests of the gate's rules by example. `tests/fairness.rs` tests the resulting bound.

use super::*;
use crate::ids::ReplicaId;

fn backlog(least_tokens: u64) -> Backlog {
    Backlog {
        priority: 0,
        least_milli: least_tokens * 1000,
        users: 2,
        waiting: 5,
    }
}

fn told(peers: &[(u8, u64)]) -> Gate {
    let mut gate = Gate::default();
    for (peer, least) in peers {
        gate.record_report(ReplicaId(*peer), Some(backlog(*least)), 0);
    }
    gate
}

fn lets(gate: &mut Gate, tokens: u64, now_ms: u64) -> bool {
    lets_weighted(gate, 0, tokens * 1000, 1000, now_ms)
}

/// Asks the gate as the queue does when there is capacity.
fn lets_weighted(
    gate: &mut Gate,
    priority: i16,
    milli: u64,
    weight_milli: u32,
    now_ms: u64,
) -> bool {
    gate.hold(priority, milli, weight_milli, now_ms);
    !gate.holds(priority, milli, weight_milli, now_ms)
}

#[test]
fn gate_bounds_the_lead_over_a_peers_least_counter_by_the_slack() {
    let mut gate = told(&[(2, 500), (3, 400)]);
    assert_eq!(gate.least(0, 0), Some(400_000));
    assert_eq!(gate.users(0), 4);
    assert!(lets(&mut gate, 400, 0));
    assert!(!lets(&mut gate, 401, 0));
    gate.set_slack(100);
    assert!(lets(&mut gate, 500, 0));
    assert!(!lets(&mut gate, 501, 0));
    // The slack is in tokens at weight 1: with twice the weight, half of it in the counter.
    assert!(!lets_weighted(&mut gate, 0, 451_000, 2000, 0));
    assert!(lets_weighted(&mut gate, 0, 450_000, 2000, 0));
}

#[test]
fn gate_yields_to_higher_priority_and_ignores_lower_at_peers() {
    let mut gate = told(&[(2, 500)]);
    assert!(!lets_weighted(&mut gate, -1, 0, 1000, 0));
    assert!(lets_weighted(&mut gate, 1, u64::MAX, 1000, 0));
    assert_eq!(gate.least(1, 0), None);
}

#[test]
fn silent_and_idle_peers_do_not_close_the_gate() {
    let mut gate = told(&[(2, 0)]);
    assert!(!lets(&mut gate, 1, PEER_SILENT_MS - 1));
    assert!(lets(&mut gate, 1, PEER_SILENT_MS));
    assert!(!gate.record_report(ReplicaId(2), Some(backlog(0)), 600));
    assert!(!lets(&mut gate, 1, 600));
    assert!(gate.record_report(ReplicaId(2), None, 601));
    assert!(!gate.record_report(ReplicaId(2), None, 602));
    assert!(lets(&mut gate, 1, 602));
}

/// Asks the gate every [`GATE_RETRY_MS`] with a fresh report of the peer. Returns the time at which
/// the gate let the request go.
fn stalled_for(gate: &mut Gate, least: u64, from_ms: u64) -> u64 {
    for step in 0..100 {
        let now_ms = from_ms + step * GATE_RETRY_MS;
        gate.record_report(ReplicaId(2), Some(backlog(least)), now_ms);
        if lets(gate, 1_000_000, now_ms) {
            return now_ms - from_ms;
        }
    }
    panic!("held for ever");
}

#[test]
fn gate_ignores_a_peer_report_that_does_not_change() {
    let mut gate = told(&[(2, 7)]);
    assert_eq!(stalled_for(&mut gate, 7, 0), GATE_STALL_MS);
    // The gate ignores the report until it changes, and waits less for the next one.
    assert!(lets(&mut gate, 1_000_000, GATE_STALL_MS));
    let waits: Vec<u64> = (8..14)
        .map(|least| stalled_for(&mut gate, least, 1000 * least))
        .collect();
    assert_eq!(waits, [250, 150, 100, 50, 50, 50]);
    // A peer whose report changes in time is trusted again.
    assert!(!lets(&mut told(&[(2, 20)]), 21, 0));
    gate.record_report(ReplicaId(2), Some(backlog(20)), 20_000);
    assert!(!lets(&mut gate, 21, 20_000));
    gate.record_report(ReplicaId(2), Some(backlog(21)), 20_010);
    assert!(lets(&mut gate, 21, 20_010));
    assert_eq!(stalled_for(&mut gate, 30, 30_000), GATE_STALL_MS);
}

#[test]
fn time_without_room_does_not_count_as_a_gate_stall() {
    let mut gate = told(&[(2, 7)]);
    for step in 0..100 {
        let now_ms = step * 100;
        gate.record_report(ReplicaId(2), Some(backlog(7)), now_ms);
        assert!(!lets(&mut gate, 1_000_000, now_ms));
        gate.no_room();
    }
}

#[test]
fn slack_and_bound_are_as_documented() {
    // The rate of 30,000 priced tokens per second is 50 ms old and shared by 6 users: 500 each.
    assert_eq!(slack_tokens(100, 30_000, 50, 6), 500);
    assert_eq!(slack_tokens(4000, 30_000, 50, 6), 4000);
    assert_eq!(slack_tokens(1, u64::MAX, u64::MAX, 0), u64::MAX);
    assert_eq!(bound(4000, 200, 4000), 16_400);
    assert_eq!(bound(u64::MAX, 1, 1), u64::MAX);
}
