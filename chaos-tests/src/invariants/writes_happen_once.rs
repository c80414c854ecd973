//! A write takes effect at most once, and a rejected write never does.
//!
//! The check works from outside. A replica's command may take effect as often as clients sent it to
//! that replica without being rejected. Commands that no client sent are the replicas' own.

use std::collections::BTreeMap;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::{Action, OperationResult};
use crate::oracle::model::CommandEffect;
use state::ids::ReplicaId;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I30";
/// Statement of the invariant.
pub const NAME: &str = "a write happens at most once, and never when it was refused";

/// Counts the effects of every command that a client sent.
///
/// # Errors
/// If a command took effect more often than clients sent it.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut asked: BTreeMap<(ReplicaId, String), i64> = BTreeMap::new();
    for operation in &record.history.operations {
        if let Action::Write(command) = &operation.action {
            let key = (operation.run.replica, format!("{command:?}"));
            let may_happen = operation.outcome != OperationResult::Refused;
            *asked.entry(key).or_default() += i64::from(may_happen);
        }
    }
    let comparison = record.comparison();
    for (index, found) in &comparison.commands {
        if !matches!(comparison.effects.get(index), Some(CommandEffect::Done(_))) {
            continue;
        }
        let key = (found.origin.replica, format!("{:?}", found.command));
        let Some(left) = asked.get_mut(&key) else {
            continue;
        };
        *left -= 1;
        if *left < 0 {
            let detail = format!("{found:?} had an effect at index {index} that nobody asked for");
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    Ok(asked.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, put};

    #[test]
    fn a_repeated_effect_is_detected() {
        let mut story = RecordBuilder::begun();
        let index = story.write(1, put("a", 1));
        story.acknowledged(1, put("a", 1), index);
        story.write_again(index);
        assert_eq!(check(&story.record), Ok(1));
        story.write(1, put("a", 1));
        assert!(check(&story.record).is_err());
    }

    #[test]
    fn an_effect_of_a_refused_write_is_detected() {
        let mut story = RecordBuilder::begun();
        story.write(1, put("a", 1));
        story.asked(1, Action::Write(put("a", 1)), OperationResult::Unknown);
        assert_eq!(check(&story.record), Ok(1));
        let mut story = RecordBuilder::begun();
        story.write(1, put("a", 1));
        story.asked(1, Action::Write(put("a", 1)), OperationResult::Refused);
        assert!(check(&story.record).is_err());
    }
}
