//! What must not happen and is told when it does: bytes nobody can read, invariants that do not hold.

/// A log entry that is not a command this build knows.
#[derive(Debug, thiserror::Error)]
#[error("decode log entry: {0}")]
pub struct DecodeEntryError(pub String);

/// A snapshot that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("corrupt snapshot at byte {offset}: {what}")]
pub struct SnapshotError {
    /// Where in the stream.
    pub offset: u64,
    /// What was wrong and what was expected.
    pub what: String,
}

/// An invariant of docs/ARCHITECTURE.md that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invariant {number} broken: {detail}")]
pub struct InvariantError {
    /// Number as in docs/ARCHITECTURE.md, `"I4"`.
    pub number: &'static str,
    /// With the values that break it.
    pub detail: String,
}
