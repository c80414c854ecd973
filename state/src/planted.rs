//! Bugs that tests can plant on purpose, to prove that the tests meant to catch them do.
//!
//! Each bug is one condition at the place where somebody would make the mistake. Without the
//! feature `planted` the condition is constant `false` and the compiler removes it. With the
//! feature, one bug at a time can be planted per thread. docs/internals/testing.md lists the bugs
//! and what catches each.

/// Defines a crate's list of bugs and, with the crate's feature `planted`, the per-thread switch
/// that plants one.
#[doc(hidden)]
#[macro_export]
macro_rules! plantable_bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A typical mistake.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug { $($(#[$doc])* $bug,)* }

        impl Bug {
            /// All bugs.
            pub const ALL: &[Self] = &[$(Self::$bug,)*];
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
            //! Per-thread switch of the planted bug.

            use std::cell::Cell;

            use super::Bug;

            thread_local! {
                static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
                static MET: Cell<u64> = const { Cell::new(0) };
            }

            /// Plants a bug on this thread, replacing the previous one; `None` removes it.
            pub fn plant(bug: Option<Bug>) {
                PLANTED.set(bug);
                MET.set(0);
            }

            /// Returns how often this thread reached the planted bug. A bug that is never reached
            /// cannot be caught.
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
    };
}

plantable_bugs! {
    /// A repeated command is applied twice.
    DedupDropped,
    /// Only the last command is recognised as a repeat, not an earlier one that arrives late.
    DedupOfLastOnly,
    /// A late command of an ended session revives the session.
    EndedRunComesBack,
    /// Snapshots, and the digest that guards them, omit the sessions.
    SnapshotWithoutSessions,
    /// Readers of the view keep the blocks from before a restore.
    RestoreNotShown,
    /// A user returning from idle is not lifted.
    LiftLost,
    /// The lift takes the least counter of all users, active or not.
    LiftOverAll,
    /// A new weight also applies to past charges.
    WeightRewritesPast,
    /// Usage paid for by an advance is charged again.
    AdvanceForgotten,
    /// Eviction takes the block with the lowest memory address.
    EvictsByPlace,
    /// A leaf pinned by a lease can be evicted.
    EvictsPinned,
    /// A backend owns one block more than its capacity.
    CapacityOffByOne,
    /// Removing a backend leaves its blocks behind.
    RemovalStrandsBlocks,
    /// A backend is identified by its slot alone, ignoring the incarnation.
    IncarnationIgnored,
    /// A chain behind a block that is not owned is taken for the start of a prompt.
    MissingTipIsFirst,
    /// A discarded lease returns its blocks but keeps its pin.
    DiscardKeepsPin,
    /// The incremental digest ignores the end of a lease.
    DigestNotFollowed,
    /// The published registry ignores admin writes.
    RegistryNotFollowed,
    /// Each replica stamps what it applies with its own clock.
    OwnClock,
    /// A proposer whose clock is behind sets replicated time back.
    TimeGoesBack,
    /// Replicated time stands still until clocks that were set back have caught up.
    TimeHeld,
    /// A clock far ahead of the others is believed at once.
    OneClockBelieved,
    /// The end of a session leaves its leases open.
    ExpiryLeavesLeases,
    /// The end of a session leaves its requests in flight.
    ExpiryLeavesRequests,
    /// An engine's messages are applied whatever their number, even twice.
    EventsReadTwice,
    /// Missing messages of an engine go unnoticed.
    GapUnnoticed,
    /// Messages lost for good do not invalidate what was known before.
    LossIgnored,
    /// A reader that reports a message newer than the last applied one ends the doubt.
    ExactAfterGap,
}

/// A private clock of this replica. Constant without the feature.
#[cfg(not(feature = "planted"))]
pub(crate) const fn own_clock_ms() -> u64 {
    0
}

#[cfg(feature = "planted")]
pub(crate) use switch::met as own_clock_ms;
