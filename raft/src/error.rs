//! Errors, distinguished by what a caller can do about them.

use std::path::PathBuf;

/// A command that is committed and applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Index of the command in the log.
    pub index: u64,
    /// Reply of the machine.
    pub reply: Vec<u8>,
}

/// Why a proposal is not known to be committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Refused before it entered any log; it is safe to propose again.
    #[error("no leader is known")]
    NoLeader,
    /// The command may or may not be committed, now or later: propose the same bytes again.
    #[error("outcome unknown: {0}")]
    Unknown(String),
    /// This replica is stopping or has stopped.
    #[error("replica stopped: {0}")]
    Stopped(String),
    /// A member could not apply the command, so it entered no log; contains the reason.
    #[error("refused: {0}")]
    Refused(String),
    /// The command is larger than [`crate::COMMAND_BYTES_MAX`] and entered no log.
    #[error("command of {bytes} bytes is larger than {}", crate::COMMAND_BYTES_MAX)]
    TooLarge {
        /// Length of the command.
        bytes: usize,
    },
}

/// Why a change of membership or leadership failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The change is not possible in the current membership; contains the reason.
    #[error("{0}")]
    Refused(String),
    /// The change may or may not have taken place.
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// Why a replica failed to start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The options are invalid.
    #[error("{0}")]
    Options(String),
    /// A file of the store is damaged.
    #[error("{path} is damaged at byte {offset}: {what}")]
    Damaged {
        /// The file, or the tree and key for the log inside sled.
        path: String,
        /// Offset in the file, or the index of a log entry.
        offset: u64,
        /// What was expected and what was found.
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
        /// Error from the operating system.
        source: std::io::Error,
    },
}
