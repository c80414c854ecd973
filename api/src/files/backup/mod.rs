//! Backup files: a cluster's state, with a description of it and checksums that reveal any damage.
//!
//! # Format 1 (integers little-endian)
//! ```text
//! magic    8 bytes   "QUORATEB"
//! format   u16
//! head     length u32, JSON (see BackupHead), xxh3-64 of everything up to here
//! chunks   length u32, bytes, xxh3-64 of the bytes seeded with the chunk's number, from 0
//! end      length 0 (u32), chunks u64, bytes u64, xxh3-64 of these sixteen bytes
//! ```
//! The chunks are a snapshot of the state as `state` writes it. All but the last have
//! [`CHUNK_BYTES`] bytes. A file without an end is incomplete, so a truncated file is never
//! accepted as a backup. A build that changes the format raises its number. This build rejects
//! unknown formats.
//!
//! Neither side holds more than one chunk in memory. The checksums reveal damage, not forgery:
//! anyone who may restore a backup could send any state.

mod read;
mod write;

#[cfg(test)]
mod tests;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::command::RESTORE_PART_BYTES;

pub use read::{BackupPiece, BackupReader, FileReader};
pub use write::{BackupWriter, LengthCounter, file_bytes};

/// First bytes of every backup.
pub const MAGIC: [u8; 8] = *b"QUORATEB";
/// Format that this build writes and reads.
pub const FORMAT: u16 = 1;
/// Length of a chunk and of a part of a restore, in bytes. Only the last one may be shorter.
pub const CHUNK_BYTES: usize = RESTORE_PART_BYTES;
/// Maximum length of the head, in bytes.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Length of the magic, the format and the head's length, in bytes.
const PREFIX_BYTES: usize = 8 + 2 + 4;
const LENGTH_BYTES: usize = 4;
const CHECKSUM_BYTES: usize = 8;
/// Length of the counts of chunks and bytes at the end, in bytes.
const END_BYTES: usize = 16;

/// Description of a backup. Unknown fields are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BackupHead {
    /// When the backup was made, in Unix milliseconds by the clock of the replica that made it.
    pub made_at_ms: u64,
    /// Id of the cluster; `None` if the cluster was not formed yet.
    pub cluster: Option<String>,
    /// Replica that made the backup.
    pub replica: u8,
    /// Version of the replica that made the backup.
    pub version: String,
    /// Applied index of the state.
    pub index: u64,
    /// Digest of the state, 32 hex digits.
    pub digest: String,
    /// Length of the state, in bytes.
    pub bytes: u64,
    /// Number of backends.
    pub backends: u64,
    /// Number of users.
    pub users: u64,
    /// Number of owned blocks, summed over all backends.
    pub blocks: u64,
}

/// Error in a file that is not a complete backup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("backup damaged at byte {offset}: {what}")]
pub struct BackupError {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// What was found and what was expected.
    pub what: String,
}
