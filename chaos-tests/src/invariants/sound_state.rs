//! The invariants of a single state (I1 to I9 and more), checked by `RouterState::check`, which
//! names the violated one.

use state::RouterState;

use super::PropertyError;
use crate::oracle::observation::ReplicaRun;

/// Statement of the invariants as a whole.
pub const NAME: &str = "a state is sound";

/// Checks the state of a replica. Slow on a large state.
///
/// # Errors
/// The first invariant that does not hold, under its own number.
pub fn check(run: ReplicaRun, state: &RouterState) -> Result<(), PropertyError> {
    state.check().map_err(|broken| PropertyError {
        number: broken.number,
        name: NAME,
        detail: format!("{run}, index {}: {}", state.applied(), broken.detail),
    })
}
