//! Port between the log and its storage.

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::weight;
use crate::types::{Entry, LogId, Vote};

/// Change to the log. Changes take effect in the order in which they are given.
#[derive(Debug, Clone)]
pub(crate) enum LogChange {
    /// Replaces the vote.
    Vote(Vote),
    /// Sets the last entry known to be committed. A hint: it may lag behind, but is never ahead.
    Committed(LogId),
    /// Appends entries that follow the last entry.
    Append(Vec<Entry>),
    /// Removes the end of the log.
    Truncate {
        /// Index of the first entry to remove.
        from: u64,
    },
    /// Removes the beginning of the log.
    Purge {
        /// Last entry to remove. May be beyond the end of the log.
        upto: LogId,
    },
}

impl LogChange {
    /// Returns the total weight of the entries that this change appends, in bytes.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Append(entries) => entries.iter().map(weight).sum(),
            Self::Vote(_) | Self::Committed(_) | Self::Truncate { .. } | Self::Purge { .. } => 0,
        }
    }

    /// Returns the first index that this change truncates; `None` if it truncates nothing.
    pub(crate) fn truncates_from(&self) -> Option<u64> {
        match self {
            Self::Truncate { from } => Some(*from),
            Self::Vote(_) | Self::Committed(_) | Self::Append(_) | Self::Purge { .. } => None,
        }
    }
}

/// Contents of a disk at the time when it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskContents {
    /// Latest vote; `None` if none was ever written.
    pub(crate) vote: Option<Vote>,
    /// Last entry known to be committed; `None` if unknown.
    pub(crate) committed: Option<LogId>,
    /// Last purged entry; `None` if nothing was purged.
    pub(crate) purged: Option<LogId>,
    /// Last entry, or the last purged entry if the log is empty.
    pub(crate) last: Option<LogId>,
}

/// Storage for a log. Every call may block. One thread writes at a time; any number may read.
pub(crate) trait Disk: Send + Sync + 'static {
    /// Checks that there is space to begin writing `changes`. Changes nothing.
    ///
    /// # Errors
    /// Fails if there is currently no space; try again later.
    fn room_for(&self, changes: &[LogChange]) -> io::Result<()>;

    /// Applies the changes in order. They are readable at once and durable after [`Disk::sync`]. A
    /// power cut before that leaves a prefix of them.
    ///
    /// # Errors
    /// After any error the state is undefined: the disk must not be written again.
    fn write(&self, changes: &[LogChange]) -> io::Result<()>;

    /// Returns the time to wait between a write and its sync. Nonzero only for a disk whose own
    /// sync takes no time.
    ///
    /// # Errors
    /// Fails like [`Disk::write`].
    fn sync_delay(&self) -> io::Result<Duration> {
        Ok(Duration::ZERO)
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// Fails like [`Disk::write`].
    fn sync(&self) -> io::Result<()>;

    /// Reads entries from the start of `range`, without gaps, until the range ends or their
    /// commands exceed `bytes_max`. Returns at least one entry if the range holds any. Omits
    /// entries missing at either end of the range.
    ///
    /// # Errors
    /// Fails if an entry in between is missing or damaged.
    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>>;

    /// Releases files and threads. Later reads and writes fail.
    fn close(&self);

    /// Writes `changes` and makes them durable.
    #[cfg(test)]
    fn write_synced(&self, changes: &[LogChange]) -> io::Result<()> {
        self.write(changes)?;
        self.sync()
    }
}
