//! Linearizability by witness: the log gives the order in which operations took effect.
//!
//! A write takes effect at its log index, a read at the index at which it was read. The check
//! compares this order with the responses to clients. An operation that ended before another began
//! must precede it, and each read must return the value that the writes up to its index left. The
//! check takes one pass over the operations by time and one over the log.

use std::collections::BTreeMap;

use state::ids::LogIndex;

use super::RunRecord;
use super::history::{Action, Operation, OperationResult};
use super::model::CommandEffect;
use super::register::{RegisterKey, RegisterText, Registers};

/// An operation with the log index at which it took effect.
struct Placed<'a> {
    operation: &'a Operation,
    index: u64,
}

/// Checks all operations whose index is known, and returns their number.
///
/// # Errors
/// Describes the first contradiction to the log's order.
pub fn check(record: &RunRecord) -> Result<u64, String> {
    let mut placed: Vec<Placed> = Vec::new();
    for operation in &record.history.operations {
        if let Some(index) = place(record, operation) {
            placed.push(Placed { operation, index });
        }
    }
    in_time(&placed)?;
    reads_see_writes(record, &placed)?;
    Ok(placed.len() as u64)
}

/// Returns the index at which an operation took effect; `None` if unknown or without effect.
fn place(record: &RunRecord, operation: &Operation) -> Option<u64> {
    match &operation.outcome {
        OperationResult::Read { index, .. } => Some(index.0),
        OperationResult::Written(committed) => effective(record, committed.index),
        OperationResult::Refused | OperationResult::Unknown => None,
    }
}

/// Returns the index at which the command at `index` took effect: `index` itself, or that of its
/// first occurrence.
pub(crate) fn effective(record: &RunRecord, index: LogIndex) -> Option<u64> {
    let comparison = record.comparison();
    match comparison.effects.get(&index.0)? {
        CommandEffect::Done(_) => Some(index.0),
        CommandEffect::Stale => None,
        CommandEffect::Repeat => {
            let origin = comparison.commands.get(&index.0)?.origin;
            comparison.model.sessions.effects.get(&origin).copied()
        }
    }
}

/// Checks that each operation that ended before another began precedes it in the log.
fn in_time(placed: &[Placed]) -> Result<(), String> {
    let mut by_call: Vec<&Placed> = placed.iter().collect();
    by_call.sort_by_key(|it| it.operation.called_at_us);
    let mut by_return = by_call.clone();
    by_return.sort_by_key(|it| it.operation.returned_at_us);
    let mut returned = by_return.into_iter().peekable();
    let mut latest: Option<&Placed> = None;
    for this in by_call {
        while let Some(before) = returned.next_if(|it| {
            let returned_at_us = it.operation.returned_at_us;
            returned_at_us.is_some_and(|at_us| at_us < this.operation.called_at_us)
        }) {
            if latest.is_none_or(|latest| latest.index < before.index) {
                latest = Some(before);
            }
        }
        let Some(latest) = latest else {
            continue;
        };
        // A read may see an unchanged state; a write must follow everything that was seen.
        let is_read = matches!(this.operation.action, Action::Read(_));
        let is_behind = latest.index < this.index || is_read && latest.index == this.index;
        if !is_behind {
            return Err(format!(
                "{:?} took effect at index {}, {:?} at {}, but ended before the other began",
                this.operation, this.index, latest.operation, latest.index
            ));
        }
    }
    Ok(())
}

/// Checks that each read returns the value that the writes up to its index left.
fn reads_see_writes(record: &RunRecord, placed: &[Placed]) -> Result<(), String> {
    let mut reads: BTreeMap<u64, Vec<(&RegisterKey, &RegisterText, &Operation)>> = BTreeMap::new();
    for it in placed {
        if let (Action::Read(key), OperationResult::Read { value, .. }) =
            (&it.operation.action, &it.operation.outcome)
        {
            let at = reads.entry(it.index).or_default();
            at.push((key, value, it.operation));
        }
    }
    let comparison = record.comparison();
    let mut registers = Registers::default();
    let mut commands = comparison.commands.iter().peekable();
    for (index, reads) in reads {
        while let Some((at, envelope)) = commands.next_if(|(at, _)| **at <= index) {
            if let Some(CommandEffect::Done(_)) = comparison.effects.get(at) {
                registers.write(&envelope.command);
            }
        }
        for (key, seen, operation) in reads {
            let must = registers.value(key);
            if *seen != must {
                return Err(format!(
                    "{operation:?} saw {seen:?}, the writes up to index {index} left {must:?}"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
