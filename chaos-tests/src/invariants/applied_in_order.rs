//! Within a run a state only moves forward: it applies every index once and in order, and only a
//! snapshot skips ahead. The only exception is a state that the simulated world has corrupted.
//! Another replica's state may replace it, at an index that it has already passed.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::observation::Cause;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I27";
/// Statement of the invariant.
pub const NAME: &str = "a run applies every index once and in order";

/// Checks every pair of consecutive steps of every run.
///
/// # Errors
/// If an index is applied twice or left out, or a snapshot moves a state backwards.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut subjects = 0;
    for (run, steps) in &record.observation.steps {
        let mut at = 0;
        let mut at_us = 0;
        for step in steps {
            let spoiled = record.observation.spoiled.iter();
            let is_its = |(when_us, whose): &&(u64, _)| {
                whose == run && (at_us..=step.at_us).contains(when_us)
            };
            let was_spoiled = || spoiled.clone().any(|it| is_its(&it));
            let is_in_order = match step.cause {
                Cause::Applied(_) | Cause::Skipped => step.index == at + 1,
                Cause::Restored => step.index >= at || was_spoiled(),
            };
            subjects += 1;
            if !is_in_order {
                let detail = format!("{run} was at index {at}, then {step:?}");
                return Err(super::violation(NUMBER, NAME, detail));
            }
            at = step.index;
            if step.digest.is_some() {
                at_us = step.at_us;
            }
        }
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::run;

    fn applied(indices: &[u64]) -> RunRecord {
        let mut record = RunRecord::default();
        for index in indices {
            record
                .observation
                .applied(*index, run(1, 1), *index, None, Some(0));
        }
        record
    }

    #[test]
    fn a_skipped_or_repeated_index_is_detected() {
        assert_eq!(check(&applied(&[1, 2, 3])), Ok(3));
        assert!(check(&applied(&[1, 3])).is_err());
        assert!(check(&applied(&[1, 2, 2])).is_err());
        assert!(check(&applied(&[2])).is_err());
    }

    #[test]
    fn only_snapshots_skip_indexes_and_only_forwards() {
        let mut record = applied(&[1, 2]);
        record.observation.restored(9, run(1, 1), 9, Some(0));
        record.observation.applied(10, run(1, 1), 10, None, Some(0));
        assert_eq!(check(&record), Ok(4));
        record.observation.restored(12, run(1, 1), 9, Some(0));
        assert!(check(&record).is_err());
        record.observation.spoiled(11, run(1, 1));
        assert_eq!(check(&record), Ok(5));
    }

    #[test]
    fn a_restarted_run_begins_at_a_possible_index() {
        let mut record = applied(&[1, 2]);
        record.observation.applied(5, run(1, 2), 1, None, Some(0));
        assert_eq!(check(&record), Ok(3));
    }
}
