//! Settings, the registry and the sessions are what the writes in the log left, one after the other.

use super::{Subjects, Violation};
use crate::oracle::Record;
use crate::oracle::comparison::Part;

/// In docs/ARCHITECTURE.md.
pub const NUMBER: &str = "I32";
/// As a statement.
pub const NAME: &str = "settings, backends and sessions are those that the log wrote";

/// Compares images of states with a naive replay of the log.
///
/// # Errors
/// When a state holds something else.
pub fn check(record: &Record) -> Result<Subjects, Violation> {
    super::replayed(record, &[Part::Settings, Part::Sessions], NUMBER, NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::Story;

    #[test]
    fn a_setting_that_nobody_wrote_is_seen() {
        let mut story = Story::lively();
        story.image(|_| {});
        assert!(check(&story.record).is_ok_and(|subjects| subjects > 3));
        story.image(|image| {
            let backend = image.backends.values_mut().next().unwrap();
            backend.draining = !backend.draining;
        });
        assert!(check(&story.record).is_err());
    }

    #[test]
    fn a_session_that_went_on_is_seen() {
        let mut story = Story::lively();
        story.image(|image| {
            let (_, seqs) = image.sessions.values_mut().next().unwrap();
            seqs[1] += 1;
        });
        assert!(check(&story.record).is_err());
    }
}
