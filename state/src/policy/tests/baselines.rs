//! Tests which requests the baselines count as load.

use super::*;

#[test]
fn a_request_queued_in_its_engine_counts_once() {
    let backend = |slot, running, waiting| Candidate {
        slot: Slot(slot),
        running,
        waiting,
        ..Candidate::default()
    };
    for policy in [
        PolicyConfig::LeastRequest,
        PolicyConfig::PowerOfTwo,
        PolicyConfig::Session(SessionSettings::default()),
    ] {
        let chosen = |candidates: &[Candidate]| choose(&policy, &REQUEST, candidates).unwrap().slot;
        // Eight of ten wait; all twelve of the other run.
        let queued = [backend(0, 10, 8), backend(1, 12, 0)];
        assert_eq!(chosen(&queued), Slot(0), "{}", policy.name());
        // Requests of other clients fill the engine's queue.
        let foreign = [backend(0, 1, 20), backend(1, 12, 0)];
        assert_eq!(chosen(&foreign), Slot(1), "{}", policy.name());
    }
}
