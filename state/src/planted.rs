//! Bugs that can be planted here, so that the tests which should find them can be tested.
//!
//! Each stands at the place where it would be made: one condition, false in every build without the
//! feature `planted`, so that the compiler leaves it out. With the feature one bug at a time can be
//! planted per thread. docs/internals/testing.md lists them, and what catches each.

/// Lists a crate's bugs, and has them planted one at a time per thread where the crate is built with
/// its feature `planted`.
#[doc(hidden)]
#[macro_export]
macro_rules! plantable_bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A bug that people make.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Bug { $($(#[$doc])* $bug,)* }

        impl Bug {
            /// All of them.
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
    };
}

plantable_bugs! {
    /// A command that comes twice is applied twice.
    DedupDropped,
    /// Only the last command is known for a repeat, not one that comes late.
    DedupOfLastOnly,
    /// A late command of a run that is over begins a run.
    EndedRunComesBack,
    /// Snapshots, and the digest that guards them, leave the sessions out.
    SnapshotWithoutSessions,
    /// Readers keep the blocks from before a restore.
    RestoreNotShown,
    /// A user who comes back from idle is not lifted.
    LiftLost,
    /// The lift goes to the least counter of all users, whether they are active or not.
    LiftOverAll,
    /// A new weight counts for the past, too.
    WeightRewritesPast,
    /// What was charged ahead is charged once more when it comes.
    AdvanceForgotten,
    /// The block that goes first is the one with the lowest place in memory.
    EvictsByPlace,
    /// A leaf that a lease pins can be evicted.
    EvictsPinned,
    /// A backend owns one block more than its capacity.
    CapacityOffByOne,
    /// Removing a backend leaves its blocks.
    RemovalStrandsBlocks,
    /// A backend is told by its slot alone, not by its life.
    IncarnationIgnored,
    /// A chain behind a block that is not owned is taken for a prompt's beginning.
    MissingTipIsFirst,
    /// What was never run gives its blocks back, but not its pin.
    DiscardKeepsPin,
    /// The incremental digest does not follow a lease that ends.
    DigestNotFollowed,
    /// What readers see of the registry does not follow administrative writes.
    RegistryNotFollowed,
    /// Each replica stamps what it applies by a clock of its own.
    OwnClock,
    /// A proposer with a clock behind the others sets the replicated time back.
    TimeGoesBack,
    /// Time stands until clocks that were set back are where they had been.
    TimeHeld,
    /// A clock that is far ahead is believed at once.
    OneClockBelieved,
    /// The end of a session leaves its leases open.
    ExpiryLeavesLeases,
    /// The end of a session leaves its requests in flight.
    ExpiryLeavesRequests,
    /// Messages of an engine are applied whatever their number, also a second time.
    EventsReadTwice,
    /// Messages of an engine that are missing are not noticed.
    GapUnnoticed,
    /// Messages that are lost for good do not end what was known before.
    LossIgnored,
    /// A reader that tells of a newer message than the last applied one ends the doubt.
    ExactAfterGap,
}

/// A clock of this replica's own, which stands still in a build without the feature.
#[cfg(not(feature = "planted"))]
pub(crate) const fn own_clock_ms() -> u64 {
    0
}

#[cfg(feature = "planted")]
pub(crate) use switch::met as own_clock_ms;
