//! Users' totals, their counters with every lift, and their requests in flight and waiting follow
//! from the charges in the log.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I33";
/// Statement of the invariant.
pub const NAME: &str = "users have the counters, sums and requests that the log charged";

/// Compares the users in state images with a naive replay of the log.
///
/// # Errors
/// If a state differs from the replay.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    super::replayed(record, &[StatePart::Users], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn extra_charges_and_missing_lifts_are_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|_| {});
        assert!(check(&story.record).is_ok_and(|subjects| subjects > 1));
        let mut other = RecordBuilder::lively();
        other.image(|image| image.users.values_mut().next().unwrap().total.output += 1);
        assert!(check(&other.record).is_err());
        story.image(|image| {
            image
                .users
                .values_mut()
                .next()
                .unwrap()
                .counter_milli_tokens -= 1;
        });
        assert!(check(&story.record).is_err());
    }
}
