//! The port between the log and where it is kept.

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::weight;
use crate::types::{Entry, LogId, Vote};

/// One change of the log. Changes take effect in the order they are given.
#[derive(Debug, Clone)]
pub(crate) enum LogChange {
    /// What was voted for.
    Vote(Vote),
    /// Up to where entries are known committed. A hint: it may lag behind, never run ahead.
    Committed(LogId),
    /// Entries that follow the last one.
    Append(Vec<Entry>),
    /// Takes back every entry from this index on.
    Truncate {
        /// The first that goes.
        from: u64,
    },
    /// Forgets entries.
    Purge {
        /// The last that goes. May lie beyond the last entry.
        upto: LogId,
    },
}

impl LogChange {
    /// What its entries weigh.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Append(entries) => entries.iter().map(weight).sum(),
            Self::Vote(_) | Self::Committed(_) | Self::Truncate { .. } | Self::Purge { .. } => 0,
        }
    }

    /// The first entry it takes back.
    pub(crate) fn truncates_from(&self) -> Option<u64> {
        match self {
            Self::Truncate { from } => Some(*from),
            Self::Vote(_) | Self::Committed(_) | Self::Append(_) | Self::Purge { .. } => None,
        }
    }
}

/// What a disk holds when it is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskContents {
    /// What was voted for.
    pub(crate) vote: Option<Vote>,
    /// Up to where entries are known committed.
    pub(crate) committed: Option<LogId>,
    /// Last entry forgotten.
    pub(crate) purged: Option<LogId>,
    /// Last entry; the last one forgotten when there is none.
    pub(crate) last: Option<LogId>,
}

/// Keeps a log. Every call may block; one thread writes at a time, any number read.
pub(crate) trait Disk: Send + Sync + 'static {
    /// Whether a write of these changes can begin. Changes nothing.
    ///
    /// # Errors
    /// When there is no room for it at present: to be asked again.
    fn room_for(&self, changes: &[LogChange]) -> io::Result<()>;

    /// Makes all changes durable, in order. A power cut in between leaves a prefix of them.
    ///
    /// # Errors
    /// After any error nothing is certain: the disk must not be written again.
    fn write(&self, changes: &[LogChange]) -> io::Result<()>;

    /// Reads entries from the start of `range` on, without gaps, until it ends or their commands
    /// exceed `bytes_max`; at least one if there is one. Entries that the disk does not hold at
    /// either end are left out.
    ///
    /// # Errors
    /// When an entry in between is missing or damaged.
    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>>;

    /// Lets go of files and threads. Reads and writes fail from then on.
    fn close(&self);
}

/// A disk that blocks nobody: a task writes, waits as long as a sync takes, and then syncs.
pub(crate) trait TimedDisk: Disk {
    /// Makes all changes readable, in order, and none of them durable.
    ///
    /// # Errors
    /// As [`Disk::write`].
    fn write_unsynced(&self, changes: &[LogChange]) -> io::Result<()>;

    /// How long the next sync takes.
    ///
    /// # Errors
    /// As [`Disk::write`].
    fn sync_time(&self) -> io::Result<Duration>;

    /// Makes durable what was written.
    ///
    /// # Errors
    /// As [`Disk::write`].
    fn sync(&self) -> io::Result<()>;
}
