//! A lease stays open until it is released, its session ends, or its backend begins another
//! incarnation.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I34";
/// Statement of the invariant.
pub const NAME: &str = "exactly those leases are open that the log opened and did not close";

/// Compares the leases in state images with a naive replay of the log.
///
/// # Errors
/// If a state differs from the replay.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    super::replayed(record, &[StatePart::Leases], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn a_lost_lease_is_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|_| {});
        assert!(check(&story.record).is_ok_and(|subjects| subjects > 0));
        story.image(|image| image.leases.clear());
        assert!(check(&story.record).is_err());
    }
}
