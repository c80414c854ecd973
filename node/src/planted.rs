//! Bugs that tests can plant on purpose, to prove that the tests meant to catch them do.
//!
//! Each bug is one condition at the place where somebody would make the mistake. Without the
//! feature `planted` the condition is constant `false` and the compiler removes it. With the
//! feature, one bug at a time can be planted per thread. docs/internals/testing.md lists the bugs
//! and what catches each.

api::plantable_bugs! {
    /// An administrative write whose fate is unknown is answered as done.
    UnknownAcknowledged,
    /// An administrative write whose fate is unknown is proposed again under a number of its own.
    UnknownRenumbered,
    /// Every run of a replica has the same session.
    SessionKept,
    /// Commands are proposed before all members can read them.
    FormatSentEarly,
    /// Messages are sent before all members can read them.
    MessageSentEarly,
}
