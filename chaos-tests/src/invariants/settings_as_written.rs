//! Settings, registry and sessions match the writes in the log, applied in order.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I32";
/// Statement of the invariant.
pub const NAME: &str = "settings, backends and sessions are those that the log wrote";

/// Compares settings, backends and sessions in state images with a naive replay of the log.
///
/// # Errors
/// If a state differs from the replay.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    super::replayed(
        record,
        &[StatePart::Settings, StatePart::Sessions],
        NUMBER,
        NAME,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn an_unwritten_setting_is_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|_| {});
        assert!(check(&story.record).is_ok_and(|subjects| subjects > 3));
        story.image(|image| {
            let backend = image.backends.values_mut().next().unwrap();
            backend.draining = !backend.draining;
        });
        assert!(check(&story.record).is_err());
    }

    #[test]
    fn an_advanced_session_is_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|image| {
            let (_, seqs) = image.sessions.values_mut().next().unwrap();
            seqs[1] += 1;
        });
        assert!(check(&story.record).is_err());
    }
}
