//! Bugs that tests can plant on purpose, to prove that the tests meant to catch them do.
//!
//! Each bug is one condition at the place where somebody would make the mistake. Without the
//! feature `planted` the condition is constant `false` and the compiler removes it. With the
//! feature, one bug at a time can be planted per thread. docs/internals/testing.md lists the bugs
//! and what catches each.

state::plantable_bugs! {
    /// An envelope with an unknown outcome counts as applied.
    OutboxForgetsUnknown,
    /// An envelope with an unknown outcome is proposed again under a new number.
    OutboxRenumbersUnknown,
    /// An envelope's charges are queued again when its outcome is unknown, in addition to the
    /// envelope.
    OutboxChargesUnknownAgain,
    /// Blocks in transit stay in the overlay when their steps are void.
    OverlayKeepsVoided,
    /// Blocks in transit stay in the overlay when they are applied.
    OverlayKeepsApplied,
    /// A request whose client left is not charged for its tokens.
    AbortNotCharged,
    /// A request whose client left keeps its lease.
    AbortNotReleased,
    /// A draining backend gets new requests.
    DrainingChosen,
    /// A replica does not notice that its state differs from most others'.
    MinorityUnnoticed,
    /// Replicated time passes only with commands.
    TimeStandsBetween,
}
