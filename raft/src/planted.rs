//! Bugs that can be planted to prove that the tests detect them.
//!
//! Each bug is a condition where the mistake would be made. Without the feature `planted` it is
//! constantly false and compiled away. With it, one bug per thread can be planted at a time.
//! docs/reports/2026-11-planted-bugs.md lists the bugs and the test that catches each.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A plausible bug that can be planted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug { $($(#[$doc])* $bug,)* }

        impl Bug {
            /// All bugs that can be planted.
            pub const ALL: &[Self] = &[$(Self::$bug,)*];
        }
    };
}

bugs! {
    /// Entries are acknowledged when they are written, before they are durable.
    AckBeforeFlush,
    /// A vote is granted before it is durable, and never written.
    VoteNotKept,
    /// Entries that a later leader replaced stay on the disk.
    TruncationNotKept,
    /// A state is installed although it is older than this machine's.
    OlderStateTakenOver,
    /// A snapshot from the leader is restored, but its file is not kept.
    SnapshotNotAdopted,
    /// A snapshot replaces the previous one although only its name is durable.
    SnapshotNotSynced,
    /// A leader answers a read barrier without confirming that it still leads.
    BarrierWithoutQuorum,
    /// A read barrier does not wait until this replica has applied the covered entries.
    BarrierNotAwaited,
}

/// Whether this bug is planted on this thread: never, without the feature.
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
    //! Keeps the planted bug of each thread.

    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
        static MET: Cell<u64> = const { Cell::new(0) };
    }

    /// Plants a bug on this thread in place of the previous one; `None` removes it.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
        MET.set(0);
    }

    /// Returns how often this thread executed the planted bug. One that never ran cannot be caught.
    #[must_use]
    pub fn met() -> u64 {
        MET.get()
    }

    /// Whether this bug is planted on this thread. If so, counts the call for [`met`].
    pub(crate) fn is(bug: Bug) -> bool {
        let is_planted = PLANTED.get() == Some(bug);
        if is_planted {
            MET.set(MET.get() + 1);
        }
        is_planted
    }
}
