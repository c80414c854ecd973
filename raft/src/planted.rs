//! Bugs that can be planted here, so that the tests which should find them can be tested.
//!
//! Each stands at the place where it would be made: one condition, false in every build without the
//! feature `planted`, so that the compiler leaves it out. With the feature one bug at a time can be
//! planted per thread. docs/internals/testing.md lists them, and what catches each.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A bug that people make.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug { $($(#[$doc])* $bug,)* }

        impl Bug {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$bug,)*];
        }
    };
}

bugs! {
    /// Entries are acknowledged when they are written, before they are on the disk.
    AckBeforeFlush,
    /// A vote is given before it is on the disk, and never written.
    VoteNotKept,
    /// Entries that a later leader replaced stay on the disk.
    TruncationNotKept,
    /// A state that stands before this one's is taken over.
    OlderStateTakenOver,
    /// What a snapshot that came from the leader holds is used, and the file thrown away.
    SnapshotNotAdopted,
    /// A snapshot takes the place of the one before while only its name is on the disk.
    SnapshotNotSynced,
    /// A leader answers a read barrier without asking whether it still leads.
    BarrierWithoutQuorum,
    /// A read barrier does not wait until this replica has applied what it covers.
    BarrierNotAwaited,
}

/// Whether this bug is planted on this thread.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub(crate) const fn is(_: Bug) -> bool {
    false
}

#[cfg(feature = "planted")]
pub(crate) use switch::is;
#[cfg(feature = "planted")]
pub use switch::{met, plant};

#[cfg(feature = "planted")]
mod switch {
    //! Which bug is planted, per thread.

    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
        static MET: Cell<u64> = const { Cell::new(0) };
    }

    /// Plants a bug on this thread in place of the one before, or none.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
        MET.set(0);
    }

    /// How often the planted bug was met on this thread: one that never is cannot be caught.
    #[must_use]
    pub fn met() -> u64 {
        MET.get()
    }

    /// Whether this bug is planted on this thread.
    pub(crate) fn is(bug: Bug) -> bool {
        let is_planted = PLANTED.get() == Some(bug);
        if is_planted {
            MET.set(MET.get() + 1);
        }
        is_planted
    }
}

#[cfg(feature = "planted")]
pub mod trial {
    //! The log on sled by itself: entries that stay behind a truncation show in hardly any simulated
    //! cluster, as they must be read back before the new leader's entries have grown over them.

    use std::io;
    use std::ops::Range;
    use std::path::Path;

    use bytes::Bytes;
    use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};

    use crate::fault::Fault;
    use crate::files::Layout;
    use crate::log::LogStore;
    use crate::options::Storage;
    use crate::types::{Command, Entry, LeaderId, LogId, Payload};

    /// A leader of term 1 writes ten entries below `folder`, one of term 2 replaces the last five by
    /// two. Answers index and term of each that is there after a restart.
    ///
    /// # Errors
    /// When the log cannot be opened, written or read.
    pub async fn replace_entries(folder: &Path) -> io::Result<Vec<(u64, u64)>> {
        let mut log = open(folder)?;
        log.blocking_append(entries(1, 0..10)).await?;
        log.truncate_after(Some(log_id(1, 4))).await?;
        log.blocking_append(entries(2, 5..7)).await?;
        log.close().await;
        drop(log);
        let mut log = open(folder)?;
        let read = log.try_get_log_entries(..).await?;
        log.close().await;
        let ids = read.iter().map(|entry| entry.log_id);
        Ok(ids.map(|it| (it.index, it.leader_id.term)).collect())
    }

    fn open(folder: &Path) -> io::Result<LogStore> {
        let layout = Layout::new(folder);
        layout.create().map_err(io::Error::other)?;
        LogStore::open(&Storage::Sled, &layout, Fault::new()).map_err(io::Error::other)
    }

    fn log_id(term: u64, index: u64) -> LogId {
        let leader_id = LeaderId { term, node_id: 1 };
        LogId { leader_id, index }
    }

    fn entries(term: u64, indexes: Range<u64>) -> Vec<Entry> {
        let entry = |index| Entry {
            log_id: log_id(term, index),
            payload: Payload::Normal(Command(Bytes::from_static(b"command"))),
        };
        indexes.map(entry).collect()
    }
}
