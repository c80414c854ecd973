//! The invariants of a run, one per file, numbered as in docs/internals/invariants.md.
//!
//! Each invariant is a function over a [`RunRecord`] that returns its number of subjects. A check
//! without subjects has proved nothing, and the runner reports it.

pub mod acknowledged_writes_stay;
pub mod advances_are_used;
pub mod answers_are_one_turn;
pub mod applied_in_order;
pub mod blocks_as_leased;
pub mod charges_add_up;
pub mod computed_work_is_charged;
pub mod converged;
pub mod counters_as_charged;
pub mod dispatched_to_registered;
pub mod events_in_order;
pub mod exact_mode_is_true;
#[cfg(test)]
pub(crate) mod fixture;
pub mod formats_known;
pub mod learned_as_reported;
pub mod leases_as_logged;
pub mod limits_respected;
pub mod linearizable;
pub mod linearizable_by_search;
pub mod majority_answers;
pub mod nothing_leaks;
pub mod one_leader;
pub mod owned_blocks_are_consistent;
pub mod same_answers;
pub mod same_digest;
pub mod same_log;
pub mod settings_as_written;
pub mod sound_state;
pub mod sources_remove_gradually;
pub mod time_as_stamped;
pub mod time_passes;
pub mod writes_happen_once;

use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;

/// Number of subjects of a check: observations that could have violated the invariant.
pub type Subjects = u64;

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{number} {name}: {detail}")]
pub struct PropertyError {
    /// Number of the invariant in docs/internals/invariants.md, such as `"I25"`.
    pub number: &'static str,
    /// Statement of the invariant.
    pub name: &'static str,
    /// Observed values that violate the invariant.
    pub detail: String,
}

/// An invariant of a run, with its check.
#[derive(Clone, Copy)]
pub struct Invariant {
    /// Number of the invariant in docs/internals/invariants.md.
    pub number: &'static str,
    /// Statement of the invariant.
    pub name: &'static str,
    /// Function that checks the record of a run so far.
    pub check: fn(&RunRecord) -> Result<Subjects, PropertyError>,
}

/// Builds the [`Invariant`] of a module with `NUMBER`, `NAME` and `check`.
macro_rules! invariant {
    ($module:ident) => {
        Invariant {
            number: $module::NUMBER,
            name: $module::NAME,
            check: $module::check,
        }
    };
}

/// All invariants of a run. Each may be checked at any time. Those about a healed cluster have no
/// subjects until [`RunRecord::observation`] contains the state at rest. [`sound_state`] is
/// missing, because it checks a single state, at the replica.
pub const ALL: &[Invariant] = &[
    invariant!(same_log),
    invariant!(same_digest),
    invariant!(same_answers),
    invariant!(applied_in_order),
    invariant!(one_leader),
    invariant!(acknowledged_writes_stay),
    invariant!(writes_happen_once),
    invariant!(linearizable),
    invariant!(linearizable_by_search),
    invariant!(settings_as_written),
    invariant!(counters_as_charged),
    invariant!(leases_as_logged),
    invariant!(blocks_as_leased),
    invariant!(learned_as_reported),
    invariant!(time_as_stamped),
    invariant!(time_passes),
    invariant!(owned_blocks_are_consistent),
    invariant!(charges_add_up),
    invariant!(computed_work_is_charged),
    invariant!(answers_are_one_turn),
    invariant!(dispatched_to_registered),
    invariant!(events_in_order),
    invariant!(exact_mode_is_true),
    invariant!(majority_answers),
    invariant!(converged),
    invariant!(nothing_leaks),
    invariant!(advances_are_used),
    invariant!(limits_respected),
    invariant!(formats_known),
    invariant!(sources_remove_gradually),
];

/// Invariants that need no replay of the log, and so are cheap enough to check repeatedly.
const CHEAP: &[Invariant] = &[
    invariant!(same_log),
    invariant!(same_digest),
    invariant!(applied_in_order),
    invariant!(one_leader),
    invariant!(owned_blocks_are_consistent),
    invariant!(events_in_order),
    invariant!(exact_mode_is_true),
    invariant!(majority_answers),
    invariant!(limits_respected),
    invariant!(formats_known),
];

/// Checks the cheap invariants, so that a broken run ends early.
///
/// # Errors
/// The first invariant that does not hold.
pub fn check_in_passing(record: &RunRecord) -> Result<(), PropertyError> {
    let mut looked_at = CHEAP.iter().map(|it| (it.check)(record));
    looked_at.try_for_each(|it| it.map(drop))
}

/// Checks all invariants and returns their numbers of subjects, in the order of [`ALL`].
///
/// # Errors
/// The first invariant that does not hold.
pub fn check_all(record: &RunRecord) -> Result<Vec<Subjects>, PropertyError> {
    ALL.iter().map(|it| (it.check)(record)).collect()
}

fn violation(number: &'static str, name: &'static str, detail: String) -> PropertyError {
    PropertyError {
        number,
        name,
        detail,
    }
}

/// Compares some parts of all state images with a naive replay of the log. Returns the number of
/// comparisons, or the first difference.
fn replayed(
    record: &RunRecord,
    parts: &[StatePart],
    number: &'static str,
    name: &'static str,
) -> Result<Subjects, PropertyError> {
    let comparison = record.comparison();
    let mut differences = comparison.differences.iter();
    if let Some(difference) = differences.find(|it| parts.contains(&it.part)) {
        return Err(violation(number, name, difference.detail.clone()));
    }
    let compared = parts
        .iter()
        .filter_map(|part| comparison.compared.get(part));
    Ok(compared.sum())
}
