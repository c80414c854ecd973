//! The log contains every acknowledged write as requested, at the index reported to the client, and
//! the write had the reported effect.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::{Action, Operation, OperationResult};
use crate::oracle::linear::effective;
use crate::oracle::model::CommandEffect;
use crate::oracle::search::plain;
use state::command::{Committed, Reply};

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I29";
/// Statement of the invariant.
pub const NAME: &str = "an acknowledged write stands in the log as it was asked for";

/// Looks up every acknowledged write in the log.
///
/// # Errors
/// If a write is missing, differs, or had another effect than the client was told.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut subjects = 0;
    for operation in &record.history.operations {
        if let OperationResult::Written(committed) = &operation.outcome {
            subjects += 1;
            stands(record, operation, committed).map_err(|why| {
                let detail = format!("{operation:?}: {why}");
                super::violation(NUMBER, NAME, detail)
            })?;
        }
    }
    Ok(subjects)
}

fn stands(record: &RunRecord, operation: &Operation, committed: &Committed) -> Result<(), String> {
    let Action::Write(command) = &operation.action else {
        return Err("a read was answered as a write".to_owned());
    };
    let comparison = record.comparison();
    let index = committed.index.0;
    let Some(found) = comparison.commands.get(&index) else {
        let last = comparison.effects.keys().next_back().copied();
        // Entries after a restored backup are not replayed, so nothing is known about them.
        let is_beyond = comparison.model.is_replaced && last.is_none_or(|last| index > last);
        return match is_beyond {
            true => Ok(()),
            false => Err("no such command stands there".to_owned()),
        };
    };
    if *command != found.command || found.origin.replica != operation.run.replica {
        return Err(format!("what stands there is {found:?}"));
    }
    let Some(effect) = comparison.effects.get(&index) else {
        return Err("its effect is not known".to_owned());
    };
    if *effect == CommandEffect::Stale {
        let is_told = matches!(plain(&committed.reply), Reply::Rejected(_));
        return if is_told {
            Ok(())
        } else {
            Err("its run was over, it had no effect".to_owned())
        };
    }
    let Some(index) = effective(record, committed.index) else {
        return Err("it had no effect".to_owned());
    };
    let entry = &record.observation.log[&index];
    if entry.applied_at_us < operation.called_at_us {
        return Err(format!(
            "it had its effect at index {index}, before it was asked for"
        ));
    }
    let told = plain(&committed.reply);
    match comparison.effects.get(&index) {
        Some(CommandEffect::Done(reply)) if reply == told => Ok(()),
        // For a repeat older than the last command, the state only remembers that it was applied.
        Some(CommandEffect::Done(_))
            if *effect == CommandEffect::Repeat && *told == Reply::Applied =>
        {
            Ok(())
        }
        other => Err(format!("its effect was {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, drain, put};

    #[test]
    fn a_lost_write_is_detected() {
        let mut story = RecordBuilder::begun();
        let index = story.write(1, put("a", 1));
        story.acknowledged(1, put("a", 1), index);
        assert_eq!(check(&story.record), Ok(1));
        story.acknowledged(1, put("b", 1), index);
        assert!(check(&story.record).is_err());
    }

    #[test]
    fn a_write_of_another_replica_or_the_future_is_detected() {
        let mut story = RecordBuilder::begun();
        let index = story.write(1, put("a", 1));
        story.acknowledged(2, put("a", 1), index);
        assert!(check(&story.record).is_err());
        let mut story = RecordBuilder::begun();
        let index = story.write(1, put("a", 1));
        story.acknowledged(1, put("a", 1), index + 1);
        assert!(check(&story.record).is_err());
    }

    #[test]
    fn an_unreported_effect_is_detected() {
        let mut story = RecordBuilder::begun();
        let index = story.write(1, drain("nobody", true));
        story.acknowledged(1, drain("nobody", true), index);
        assert!(check(&story.record).is_err());
    }
}
