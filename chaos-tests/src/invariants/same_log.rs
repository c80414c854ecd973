//! All replicas apply the same command at the same index.

use xxhash_rust::xxh3::xxh3_128;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::observation::Cause;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I25";
/// Statement of the invariant.
pub const NAME: &str = "all replicas apply the same command at the same index";

/// Compares every applied entry with the first observation of its index.
///
/// # Errors
/// If two replicas applied different entries at one index.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let log = record.observation.log.iter();
    let hashes: std::collections::BTreeMap<u64, Option<u128>> = log
        .map(|(index, entry)| (*index, entry.command.as_deref().map(xxh3_128)))
        .collect();
    let mut subjects = 0;
    for (run, steps) in &record.observation.steps {
        for step in steps {
            let applied = match step.cause {
                Cause::Applied(hash) => Some(hash),
                Cause::Skipped => None,
                Cause::Restored => continue,
            };
            subjects += 1;
            if hashes.get(&step.index) != Some(&applied) {
                let detail = format!(
                    "{run} applied {applied:032x?} at index {}, another replica {:032x?}",
                    step.index,
                    hashes.get(&step.index)
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
    fn different_commands_at_one_index_are_detected() {
        let mut record = RunRecord::default();
        let seen = &mut record.observation;
        seen.applied(1, run(1, 1), 1, None, None);
        seen.applied(2, run(1, 1), 2, Some(b"a"), None);
        seen.applied(3, run(2, 1), 1, None, None);
        assert_eq!(check(&record), Ok(3));
        record
            .observation
            .applied(4, run(2, 1), 2, Some(b"b"), None);
        assert_eq!(check(&record).unwrap_err().number, NUMBER);
    }

    #[test]
    fn a_command_in_place_of_a_blank_entry_is_detected() {
        let mut record = RunRecord::default();
        let seen = &mut record.observation;
        seen.applied(1, run(1, 1), 1, None, None);
        seen.applied(2, run(2, 1), 1, Some(b"a"), None);
        assert!(check(&record).is_err());
    }
}
