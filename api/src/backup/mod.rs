//! Backup files: a cluster's state with what is needed to know it by and to find any damage.
//!
//! # Format 1 (integers little-endian)
//! ```text
//! magic    8 bytes   "QUORATEB"
//! format   u16
//! head     length u32, JSON (see Head), xxh3-64 of everything up to here
//! chunks   length u32, bytes, xxh3-64 of the bytes seeded with the chunk's number, from 0
//! end      length 0 (u32), chunks u64, bytes u64, xxh3-64 of these sixteen bytes
//! ```
//! The chunks are a snapshot of the state as `state` writes it; every one but the last has
//! [`CHUNK_BYTES`]. A file is whole only with its end, so that one cut short is never taken for a backup. A
//! build that writes another format raises the number; this one refuses what it does not know.
//!
//! Neither side holds more than a chunk. The checksums find damage, not forgery: whoever may restore may
//! as well send any state.

mod read;
mod write;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use state::command::RESTORE_PART_BYTES;

pub use read::{BackupPiece, BackupReader, FileReader};
pub use write::{BackupWriter, LengthCounter, file_bytes};

/// First bytes of every backup.
pub const MAGIC: [u8; 8] = *b"QUORATEB";
/// The format that is written.
pub const FORMAT: u16 = 1;
/// Bytes of a chunk; only the last is shorter. As many as a restore sends at once.
pub const CHUNK_BYTES: usize = RESTORE_PART_BYTES;
/// Longest head, in bytes.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Magic, format and the head's length.
const PREFIX_BYTES: usize = 8 + 2 + 4;
const LENGTH_BYTES: usize = 4;
const CHECKSUM_BYTES: usize = 8;
/// Numbers of chunks and of bytes.
const END_BYTES: usize = 16;

/// What a backup says of itself. Unknown fields are passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupHead {
    /// When it was made by the clock of the replica that made it, unix milliseconds.
    pub made_at_ms: u64,
    /// The cluster's id; `None`: it was not formed yet.
    pub cluster: Option<String>,
    /// The replica that made it.
    pub replica: u8,
    /// Its version.
    pub version: String,
    /// Log index up to which the state is applied.
    pub index: u64,
    /// Digest of the state, 32 hex digits.
    pub digest: String,
    /// Length of the state in bytes.
    pub bytes: u64,
    /// Backends in it.
    pub backends: u64,
    /// Users in it.
    pub users: u64,
    /// Owned blocks in it, each backend's counted.
    pub blocks: u64,
}

/// A file that is no whole backup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("backup damaged at byte {offset}: {what}")]
pub struct BackupError {
    /// Where in the file.
    pub offset: u64,
    /// What was found and what was expected.
    pub what: String,
}
