//! Bugs that tests can plant on purpose, to prove that the tests meant to catch them do so.
//!
//! Each bug is one condition at the place where a developer would make the mistake. Without the
//! feature `planted`, the condition is constant `false` and the compiler removes it. With the
//! feature, tests can plant one bug at a time per thread. docs/reports/2026-11-planted-bugs.md lists
//! the bugs and what catches each.

/// Defines a crate's list of bugs and, with the crate's feature `planted`, the per-thread switch
/// that plants one. `node` uses it too.
#[doc(hidden)]
#[macro_export]
macro_rules! plantable_bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A typical mistake that a test can plant.
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
    /// An envelope with an unknown outcome counts as applied.
    OutboxForgetsUnknown,
    /// An envelope with an unknown outcome is proposed again under a new number.
    OutboxRenumbersUnknown,
    /// An envelope's charges are queued again when its outcome is unknown, in addition to the
    /// envelope.
    OutboxChargesUnknownAgain,
    /// A draining backend gets new requests.
    DrainingChosen,
    /// A request starts at a limited backend whatever share of the limit its replica has.
    ShareIgnored,
    /// A replica does not notice that its state differs from most others'.
    MinorityUnnoticed,
    /// The backend that goes on with an answer charges all of it.
    AnswerPaidAgain,
    /// Decisions notice changed settings only together with changed backends.
    SettingsNoticedLate,
}
