//! The values that a state has learned from engines' responses follow from the reports in the log.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I74";
/// Statement of the invariant.
pub const NAME: &str =
    "bytes per token and block sizes are those that the reports in the log teach";

/// Compares the learned values in state images with a naive replay of the log.
///
/// # Errors
/// If a state differs from the replay.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    super::replayed(record, &[StatePart::Learnt], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use state::command::{Command, Item};
    use state::ids::{AttemptId, ModelKey};
    use state::ratios::TextSample;

    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn an_unreported_ratio_is_detected() {
        let mut story = RecordBuilder::lively();
        let sample = TextSample {
            model: ModelKey(3),
            bytes: 9000,
            tokens: 3000,
        };
        let base_attempt = AttemptId(0);
        let items = vec![Item::ObserveText(sample)];
        story.write(
            1,
            Command::Batch {
                base_attempt,
                items,
            },
        );
        story.image(|image| assert_eq!(image.ratios[&ModelKey(3)], 3254));
        assert!(check(&story.record).is_ok_and(|subjects| subjects > 0));
        story.image(|image| *image.ratios.get_mut(&ModelKey(3)).unwrap() += 1);
        assert!(check(&story.record).is_err());
    }
}
