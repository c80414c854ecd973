//! States at the same index have the same digest, however they got there.

use std::collections::BTreeMap;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::observation::{ReplicaRun, StateStep};

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I26";
/// Statement of the invariant.
pub const NAME: &str = "states at the same index have the same digest";

/// Compares the digests of all states by index, both applied and restored ones.
///
/// # Errors
/// If two digests differ at one index.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut digests: BTreeMap<u64, (u128, ReplicaRun, StateStep)> = BTreeMap::new();
    let mut subjects = 0;
    for (run, steps) in &record.observation.steps {
        for step in steps {
            let Some(digest) = step.digest else {
                continue;
            };
            let (known, other, before) = digests.entry(step.index).or_insert((digest, *run, *step));
            // Only a second observation of an index could differ.
            subjects += u64::from(before != step || other != run);
            if *known != digest {
                let detail = format!(
                    "at index {} the state of {run} is {digest:032x} ({:?}), that of {other} \
                     {known:032x} ({:?})",
                    step.index, step.cause, before.cause
                );
                return Err(super::violation(NUMBER, NAME, detail));
            }
        }
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::run;

    #[test]
    fn a_different_digest_is_detected() {
        let mut record = RunRecord::default();
        let seen = &mut record.observation;
        seen.applied(1, run(1, 1), 1, Some(b"a"), Some(7));
        seen.applied(2, run(2, 1), 1, Some(b"a"), Some(7));
        assert_eq!(check(&record), Ok(1));
        record.observation.restored(3, run(3, 1), 1, Some(8));
        assert!(check(&record).is_err());
    }

    #[test]
    fn a_deliberately_corrupted_state_is_not_judged() {
        let mut record = RunRecord::default();
        let seen = &mut record.observation;
        seen.applied(1, run(1, 1), 1, Some(b"a"), Some(7));
        seen.applied(2, run(2, 1), 1, Some(b"a"), None);
        assert_eq!(check(&record), Ok(0));
    }
}
