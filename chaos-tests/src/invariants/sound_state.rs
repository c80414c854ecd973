//! The invariants of one state, I1 to I9 and on: `RouterState::check`, which names the one that is broken.

use state::RouterState;

use super::Violation;
use crate::oracle::observation::Run;

/// As a statement.
pub const NAME: &str = "a state is sound";

/// Checks the state of a replica. Slow on a large state.
///
/// # Errors
/// The first invariant that does not hold, under its own number.
pub fn check(run: Run, state: &RouterState) -> Result<(), Violation> {
    state.check().map_err(|broken| Violation {
        number: broken.number,
        name: NAME,
        detail: format!("{run}, index {}: {}", state.applied(), broken.detail),
    })
}
