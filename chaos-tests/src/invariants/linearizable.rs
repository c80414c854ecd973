//! Administrative writes and barrier reads are linearizable, one register per key. The log is the
//! order that explains every answer.

use super::{PropertyError, Subjects};
use crate::oracle::{RunRecord, linear};

/// In docs/ARCHITECTURE.md.
pub const NUMBER: &str = "I31";
/// As a statement.
pub const NAME: &str =
    "administrative writes and barrier reads are linearizable, in the log's order";

/// See [`linear`].
///
/// # Errors
/// When the log's order is not the one that the clients saw.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    linear::check(record).map_err(|detail| super::violation(NUMBER, NAME, detail))
}
