//! Bugs that can be planted to prove that the tests find them.
//!
//! Each is a condition at the place where the bug would be made. Without the feature `planted` it
//! is constantly false and compiled away. With the feature, one bug at a time can be planted per
//! thread. docs/internals/testing.md lists them, and which test catches each.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A bug that people could make.
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
    /// A state that reaches less far than this machine's is taken over.
    OlderStateTakenOver,
    /// A snapshot from the leader is restored, but its file is not kept.
    SnapshotNotAdopted,
    /// A snapshot replaces the one before although only its name is on the disk.
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

    /// How often the planted bug was executed on this thread; one that never is cannot be caught.
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
