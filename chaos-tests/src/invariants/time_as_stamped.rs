//! Replicated time goes by the stamps of the commands that had effect, forwards only: as fast as those that
//! follow each other, and past those of one clock that differs from all others.

use super::{Subjects, Violation};
use crate::oracle::Record;
use crate::oracle::comparison::Part;

/// In docs/ARCHITECTURE.md.
pub const NUMBER: &str = "I36";
/// As a statement.
pub const NAME: &str = "replicated time passes as the stamps tell that agree";

/// Compares images of states with a naive replay of the log.
///
/// # Errors
/// When a state holds something else.
pub fn check(record: &Record) -> Result<Subjects, Violation> {
    super::replayed(record, &[Part::Time], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::Story;

    #[test]
    fn a_time_of_its_own_is_seen() {
        let mut story = Story::lively();
        story.image(|_| {});
        assert_eq!(check(&story.record), Ok(1));
        story.image(|image| image.now_ms -= 1);
        assert!(check(&story.record).is_err());
    }
}
