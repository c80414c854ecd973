//! Errors that indicate corruption or a bug: undecodable entries, unusable snapshots, broken
//! invariants.

/// A log entry that this build cannot decode.
#[derive(Debug, thiserror::Error)]
#[error("decode log entry: {0}")]
pub struct DecodeEntryError(pub String);

/// A snapshot that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("corrupt snapshot at byte {offset}: {what}")]
pub struct SnapshotError {
    /// Offset of the fault in the stream, in bytes.
    pub offset: u64,
    /// Description of the fault.
    pub what: String,
}

/// A violated invariant of docs/internals/invariants.md.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invariant {number} broken: {detail}")]
pub struct InvariantError {
    /// Number of the invariant in docs/internals/invariants.md, such as `"I4"`.
    pub number: &'static str,
    /// Description of the violation, with the offending values.
    pub detail: String,
}
