//! Replicas that agree on their group and on a backend's limit together never run more requests
//! there than the limit.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I70";
/// Statement of the invariant.
pub const NAME: &str = "a backend's limit holds over all replicas";

/// Returns the violation that was observed during the run, if any, and otherwise the number of
/// times at which requests started at a limited backend.
///
/// # Errors
/// If a request started beyond the limit.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let limits = &record.observation.limits;
    match &limits.exceeded {
        Some(detail) => Err(super::violation(NUMBER, NAME, detail.clone())),
        None => Ok(limits.starts),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use state::ids::{BackendRef, Incarnation, ReplicaId, Slot};

    use super::*;
    use crate::oracle::limits::ShareObservation;

    /// Checks successive moments. Each lists the replicas as `(epoch, limit, running, allowed)`.
    fn story(moments: &[&[(u64, u32, u32, u32)]]) -> Result<Subjects, PropertyError> {
        let backend = BackendRef {
            slot: Slot(0),
            incarnation: Incarnation(1),
        };
        let mut record = RunRecord::default();
        for (at_us, moment) in (0..).zip(moments) {
            let look = |(id, (epoch, limit, running, allowed)): (u8, &(u64, u32, u32, u32))| {
                let alike = moment.iter().filter(|it| it.0 == *epoch);
                ShareObservation {
                    replica: ReplicaId(id),
                    epoch: *epoch,
                    members: alike.count(),
                    is_settled: true,
                    limit: *limit,
                    running: *running,
                    allowed: *allowed,
                }
            };
            let looks = (1..).zip(*moment).map(look).collect();
            let looks = BTreeMap::from([(backend, looks)]);
            record.observation.limits.look(at_us, &looks);
        }
        check(&record)
    }

    #[test]
    fn a_fully_used_limit_is_accepted() {
        let idle = [(7, 6, 0, 3), (7, 6, 0, 3)];
        let full = [(7, 6, 3, 3), (7, 6, 3, 3)];
        let moved = [(7, 6, 2, 2), (7, 6, 4, 4)];
        assert_eq!(story(&[&idle, &full, &idle, &moved]), Ok(2));
        // Requests that ran before the limit fell go on.
        let fell = [(7, 4, 3, 2), (7, 4, 3, 2)];
        assert_eq!(story(&[&idle, &full, &fell]), Ok(1));
        // Each side of a partition has a limit of its own.
        let sides = [(8, 6, 6, 6), (9, 6, 6, 6)];
        assert_eq!(story(&[&full, &sides, &sides]), Ok(0));
    }

    #[test]
    fn a_request_beyond_the_limit_is_detected() {
        let idle = [(7, 6, 0, 3), (7, 6, 0, 3)];
        let beyond = [(7, 6, 4, 4), (7, 6, 3, 3)];
        assert!(story(&[&idle, &beyond]).is_err());
        let over = [(7, 6, 5, 3), (7, 6, 2, 3)];
        let more = [(7, 6, 5, 3), (7, 6, 3, 3)];
        let most = [(7, 6, 5, 3), (7, 6, 4, 4)];
        assert_eq!(story(&[&over, &more]), Ok(1));
        assert!(story(&[&over, &most]).is_err());
    }

    #[test]
    fn replicas_that_disagree_are_not_judged() {
        let one = [(7, 6, 9, 9)];
        assert_eq!(story(&[&one]), Ok(0));
        let two_limits = [(7, 6, 3, 3), (7, 9, 6, 6)];
        assert_eq!(story(&[&two_limits, &two_limits]), Ok(0));
    }
}
