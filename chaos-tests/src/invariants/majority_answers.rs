//! A replica that reaches no majority neither acknowledges a write nor responds to a barrier read.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::OperationResult;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I41";
/// Statement of the invariant.
pub const NAME: &str = "without a majority nothing is acknowledged";

/// Checks every operation that began and ended while its replica was cut off.
///
/// # Errors
/// If such an operation was acknowledged.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut subjects = 0;
    for cut in &record.observation.cut_off {
        for operation in &record.history.operations {
            if operation.run.replica != cut.replica {
                continue;
            }
            let Some(returned_at_us) = operation.returned_at_us else {
                continue;
            };
            if !cut.span.covers(operation.called_at_us, returned_at_us) {
                continue;
            }
            subjects += 1;
            match operation.outcome {
                OperationResult::Refused | OperationResult::Unknown => {}
                OperationResult::Written(_) | OperationResult::Read { .. } => {
                    let detail = format!("{operation:?}, although {cut:?}");
                    return Err(super::violation(NUMBER, NAME, detail));
                }
            }
        }
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, put};
    use crate::oracle::history::Action;
    use state::ids::ReplicaId;

    #[test]
    fn an_acknowledgement_by_a_minority_is_detected() {
        let mut story = RecordBuilder::begun();
        let seen = &mut story.record.observation;
        seen.reaches_majority(0, ReplicaId(1), false);
        story.asked(1, Action::Write(put("a", 1)), OperationResult::Unknown);
        assert_eq!(check(&story.record), Ok(1));
        let index = story.write(1, put("a", 1));
        story.acknowledged(1, put("a", 1), index);
        assert!(check(&story.record).is_err());
        let until = story.now_us() - 1;
        let seen = &mut story.record.observation;
        seen.reaches_majority(until, ReplicaId(1), true);
        assert_eq!(check(&story.record), Ok(1));
    }
}
