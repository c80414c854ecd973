//! A backend in lease mode owns exactly the blocks that leases added and eviction (least recently
//! released first) did not remove.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I35";
/// Statement of the invariant.
pub const NAME: &str = "backends own what leases brought, less what had to go";

/// Compares the blocks in state images with a naive replay of the log.
///
/// # Errors
/// If a state differs from the replay.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    super::replayed(record, &[StatePart::Blocks], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn eviction_of_a_wrong_block_is_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|_| {});
        assert!(check(&story.record).is_ok_and(|subjects| subjects > 0));
        story.image(|image| {
            let mut backends = image.backends.values_mut();
            let backend = backends.find(|it| !it.owned.is_empty()).unwrap();
            backend.owned.pop_last();
        });
        assert!(check(&story.record).is_err());
    }
}
