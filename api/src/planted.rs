//! Bugs that can be planted here, so that the tests which should find them can be tested.
//!
//! Each stands at the place where it would be made: one condition, false in every build without the
//! feature `planted`, so that the compiler leaves it out. With the feature one bug at a time can be
//! planted per thread. docs/internals/testing.md lists them, and what catches each.

state::plantable_bugs! {
    /// An envelope whose fate is unknown counts as applied.
    OutboxForgetsUnknown,
    /// An envelope whose fate is unknown is proposed again under a number of its own.
    OutboxRenumbersUnknown,
    /// What an envelope charges is queued again when its fate is unknown, beside the envelope.
    OutboxChargesUnknownAgain,
    /// Blocks on their way stay in the overlay when their steps are void.
    OverlayKeepsVoided,
    /// Blocks on their way stay in the overlay when they are applied.
    OverlayKeepsApplied,
    /// A request whose client left is not charged for its tokens.
    AbortNotCharged,
    /// A request whose client left keeps its lease.
    AbortNotReleased,
    /// A backend that drains is given new requests.
    DrainingChosen,
    /// A replica does not notice that its state differs from most others'.
    MinorityUnnoticed,
    /// Of the replicated time only that passes which commands tell.
    TimeStandsBetween,
}
