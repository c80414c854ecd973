//! Errors, distinguished by what a caller can do about them.

use std::path::PathBuf;

/// A command that is committed and applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its index in the log.
    pub index: u64,
    /// The machine's reply.
    pub reply: Vec<u8>,
}

/// Why a proposal is not known to be committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Refused before it entered any log: proposing again is safe.
    #[error("no leader is known")]
    NoLeader,
    /// It may be committed, now or later, or not: propose the same bytes again.
    #[error("outcome unknown: {0}")]
    Unknown(String),
    /// This replica is stopping or has stopped.
    #[error("replica stopped: {0}")]
    Stopped(String),
    /// Some member could not apply it, so it entered no log; says why.
    #[error("refused: {0}")]
    Refused(String),
    /// It is larger than [`crate::COMMAND_BYTES_MAX`] and entered no log.
    #[error("command of {bytes} bytes is larger than {}", crate::COMMAND_BYTES_MAX)]
    TooLarge {
        /// Its length.
        bytes: usize,
    },
}

/// Why a change of membership or leadership did not take place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It is not possible in the present membership; says why.
    #[error("{0}")]
    Refused(String),
    /// It may have taken place or not.
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// Why a replica did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The options cannot work.
    #[error("{0}")]
    Options(String),
    /// A file of the store is damaged.
    #[error("{path} is damaged at byte {offset}: {what}")]
    Damaged {
        /// The file (or tree and key, for the log inside sled).
        path: String,
        /// Where in the file; for a log entry its index.
        offset: u64,
        /// What was found and what was expected.
        what: String,
    },
    /// The store belongs to another replica or cluster.
    #[error("{0}")]
    WrongStore(String),
    /// The store cannot be opened or written.
    #[error("open store {path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}
