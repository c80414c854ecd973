//! Bugs that can be planted here, so that the tests which should find them can be tested.
//!
//! Each stands at the place where it would be made: one condition, false in every build without the
//! feature `planted`, so that the compiler leaves it out. With the feature one bug at a time can be
//! planted per thread. docs/internals/testing.md lists them, and what catches each.

state::plantable_bugs! {
    /// An administrative write whose fate is unknown is answered as done.
    UnknownAcknowledged,
    /// An administrative write whose fate is unknown is proposed again under a number of its own.
    UnknownRenumbered,
    /// Every run of a replica has the same session.
    SessionKept,
}
