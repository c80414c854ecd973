//! Administrative writes and barrier reads are linearizable, one register per key. The log is the
//! order that explains every response.

use super::{PropertyError, Subjects};
use crate::oracle::{RunRecord, linear};

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I31";
/// Statement of the invariant.
pub const NAME: &str =
    "administrative writes and barrier reads are linearizable, in the log's order";

/// Checks all operations against the order of the log, see [`linear`].
///
/// # Errors
/// If the log's order contradicts the responses to clients.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    linear::check(record).map_err(|detail| super::violation(NUMBER, NAME, detail))
}
