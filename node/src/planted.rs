//! Bugs that tests plant on purpose, to prove that they would be found.
//!
//! Each bug is one condition at the place where a programmer would make the mistake. Without the
//! feature `planted`, the condition is constant `false` and the compiler removes it. With it, one
//! bug at a time can be planted per thread. docs/reports/2026-11-planted-bugs.md lists the bugs and
//! what catches each.

api::plantable_bugs! {
    /// An administrative write with an unknown outcome is acknowledged.
    UnknownAcknowledged,
    /// An administrative write with an unknown outcome is proposed again under another number.
    UnknownRenumbered,
    /// Every run of a replica uses the same session.
    SessionKept,
    /// Commands are proposed before all members can decode them.
    FormatSentEarly,
}
