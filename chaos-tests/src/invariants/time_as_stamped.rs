//! Replicated time follows the stamps of effective commands and never falls: it keeps the pace of
//! stamps that agree, and ignores a single clock that differs from all others.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I36";
/// Statement of the invariant.
pub const NAME: &str = "replicated time passes as the stamps tell that agree";

/// Compares the time in state images with a naive replay of the log.
///
/// # Errors
/// If a state differs from the replay.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    super::replayed(record, &[StatePart::Time], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn a_deviating_time_is_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|_| {});
        assert_eq!(check(&story.record), Ok(1));
        story.image(|image| image.now_ms -= 1);
        assert!(check(&story.record).is_err());
    }
}
