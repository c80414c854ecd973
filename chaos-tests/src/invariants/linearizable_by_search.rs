//! The property of [`super::linearizable`], judged without the log: an established checker
//! searches, key by key, for an order that explains the responses to clients.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::{Action, Operation};
use crate::oracle::register::{RegisterKey, RegisterText, Registers};
use crate::oracle::search::{self, SearchCounts};
use state::codec::decode_envelope;

pub use super::linearizable::NUMBER;
/// Statement of the invariant.
pub const NAME: &str = "administrative writes and barrier reads are linearizable, in some order";

/// Checks the operations on each key separately, see [`search`].
///
/// # Errors
/// If no order explains the observations of a key.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let tally = examine(record)?;
    Ok(tally.explained)
}

/// Performs the same check as [`check`], and returns all counts, including the undecided pieces.
///
/// # Errors
/// If no order explains the observations of a key.
pub fn examine(record: &RunRecord) -> Result<SearchCounts, PropertyError> {
    let told = search::check(&record.history, |key| before(record, key));
    told.map_err(|detail| super::violation(NUMBER, NAME, detail))
}

/// Returns the value of a key before its first operation. It comes from the log, because no client
/// asks for the initial values.
fn before(record: &RunRecord, key: &RegisterKey) -> RegisterText {
    let is_its = |operation: &&Operation| match &operation.action {
        Action::Read(its) => its == key,
        Action::Write(command) => RegisterKey::all_of(command).contains(key),
    };
    let mut operations = record.history.operations.iter();
    let from_us = operations.find(is_its)?.called_at_us;
    let mut registers = Registers::default();
    for entry in record.observation.log.values() {
        if entry.applied_at_us >= from_us {
            break;
        }
        let command = entry.command.as_deref();
        if let Some(Ok(envelope)) = command.map(decode_envelope) {
            registers.write(&envelope.command);
        }
    }
    registers.value(key)
}
