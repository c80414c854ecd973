//! Errors of this crate, distinguished by how a caller can handle them.

use std::path::PathBuf;

/// Result of proposing a command that is now committed and applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Index of the command in the log.
    pub index: u64,
    /// Reply of the state machine.
    pub reply: Vec<u8>,
}

/// Reason why a proposal is not known to be committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// No leader took the proposal, or confirmed a read barrier, in time. The command entered no
    /// log, so it is safe to propose it again.
    #[error("no leader is known")]
    NoLeader,
    /// A read barrier was confirmed, but its entries were not applied in time.
    #[error("this replica has applied the log up to {applied} and not yet to {wanted}")]
    NotApplied {
        /// Index that was confirmed.
        wanted: u64,
        /// Index up to which this replica has applied the log.
        applied: u64,
    },
    /// The command may or may not be committed, now or later. The caller should propose the same
    /// bytes again.
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
        /// Length of the command, in bytes.
        bytes: usize,
    },
}

/// Reason why a change of membership or leadership failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The change is not possible in the current membership; contains the reason.
    #[error("{0}")]
    Refused(String),
    /// The change may or may not have taken place.
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// Reason why a replica failed to start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The options are invalid; contains the reason.
    #[error("{0}")]
    Options(String),
    /// A file of the store is damaged.
    #[error("{path} is damaged at byte {offset}: {what}")]
    Damaged {
        /// Path of the damaged file or folder.
        path: String,
        /// Offset in the file in bytes, or the index of a log entry; 0 if unknown.
        offset: u64,
        /// Description of what was expected and what was found.
        what: String,
    },
    /// The store belongs to another replica or cluster; contains the details.
    #[error("{0}")]
    WrongStore(String),
    /// The store cannot be opened or written.
    #[error("open store {path}: {source}")]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error from the operating system.
        source: std::io::Error,
    },
}
