//! After all faults are healed, and without load, all members reach one state that contains every
//! acknowledged write.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::OperationResult;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I42";
/// Statement of the invariant.
pub const NAME: &str = "healed and left alone, all members reach one state";

/// Compares the states of all members at rest.
///
/// # Errors
/// If two states differ, or one lacks an acknowledged write.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let at_rest = &record.observation.at_rest;
    let operations = record.history.operations.iter();
    let written = operations.filter_map(|operation| match &operation.outcome {
        OperationResult::Written(committed) => Some(committed.index.0),
        OperationResult::Read { .. } | OperationResult::Refused | OperationResult::Unknown => None,
    });
    let last = written.max().unwrap_or(0);
    let place = |at: &crate::oracle::observation::AtRest| (at.image.index, at.image.digest);
    let first = at_rest.values().next().map(place);
    for at in at_rest.values() {
        if Some(place(at)) != first || at.image.index < last {
            let detail = format!(
                "{} is at {:?}, another at {first:?}, the last acknowledged write at {last}",
                at.run,
                place(at)
            );
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    Ok(at_rest.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, put};

    #[test]
    fn a_lagging_replica_is_detected() {
        let mut story = RecordBuilder::lively();
        story.rest();
        assert_eq!(check(&story.record), Ok(1));
        let index = story.write(1, put("a", 1));
        story.acknowledged(1, put("a", 1), index);
        assert!(check(&story.record).is_err());
    }

    #[test]
    fn a_diverged_state_is_detected() {
        let mut story = RecordBuilder::lively();
        story.rest();
        let at_rest = &mut story.record.observation.at_rest;
        let mut other = at_rest.values().next().unwrap().clone();
        let image = std::sync::Arc::make_mut(&mut other.image);
        image.digest += 1;
        at_rest.insert(state::ids::ReplicaId(9), other);
        assert!(check(&story.record).is_err());
    }
}
