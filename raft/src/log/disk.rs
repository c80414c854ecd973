//! The port between the log and where it is kept.

use std::io;
use std::ops::Range;
use std::time::Duration;

use super::weight;
use crate::types::{Entry, LogId, Vote};

/// One change of the log. Changes take effect in the order they are given.
#[derive(Debug, Clone)]
pub(crate) enum LogChange {
    /// The vote given last.
    Vote(Vote),
    /// The last entry known to be committed. A hint: it may lag behind, but is never ahead.
    Committed(LogId),
    /// Entries that follow the last one.
    Append(Vec<Entry>),
    /// Removes the end of the log.
    Truncate {
        /// The first entry removed.
        from: u64,
    },
    /// Removes the beginning of the log.
    Purge {
        /// The last entry removed. May be beyond the end of the log.
        upto: LogId,
    },
}

impl LogChange {
    /// The weight of its entries.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Append(entries) => entries.iter().map(weight).sum(),
            Self::Vote(_) | Self::Committed(_) | Self::Truncate { .. } | Self::Purge { .. } => 0,
        }
    }

    /// The first entry it removes from the end.
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
    /// The vote given last.
    pub(crate) vote: Option<Vote>,
    /// The last entry known to be committed.
    pub(crate) committed: Option<LogId>,
    /// The last entry purged.
    pub(crate) purged: Option<LogId>,
    /// The last entry; the last one purged if there is none.
    pub(crate) last: Option<LogId>,
}

/// Keeps a log. Every call may block; one thread writes at a time, any number read.
pub(crate) trait Disk: Send + Sync + 'static {
    /// Checks that a write of these changes can begin. Changes nothing.
    ///
    /// # Errors
    /// When there is no room for it at present: ask again later.
    fn room_for(&self, changes: &[LogChange]) -> io::Result<()>;

    /// Applies changes in order: they can be read at once, and are durable after [`Disk::sync`]. A
    /// power cut before that leaves a prefix of them.
    ///
    /// # Errors
    /// After any error nothing is certain: the disk must not be written again.
    fn write(&self, changes: &[LogChange]) -> io::Result<()>;

    /// How long to wait between a write and its sync, for a disk whose own sync takes no time.
    ///
    /// # Errors
    /// As [`Disk::write`].
    fn sync_delay(&self) -> io::Result<Duration> {
        Ok(Duration::ZERO)
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// As [`Disk::write`].
    fn sync(&self) -> io::Result<()>;

    /// Reads entries from the start of `range` on, without gaps, until the range ends or their
    /// commands exceed `bytes_max`; at least one if there is one. Entries that the disk does not
    /// hold at either end are left out.
    ///
    /// # Errors
    /// When an entry in between is missing or damaged.
    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>>;

    /// Releases files and threads. Reads and writes fail from then on.
    fn close(&self);

    /// Writes and syncs.
    #[cfg(test)]
    fn write_synced(&self, changes: &[LogChange]) -> io::Result<()> {
        self.write(changes)?;
        self.sync()
    }
}
