//! All replicas of a cluster at rest give the same answer to the same question.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I175";
/// Statement of the invariant.
pub const NAME: &str = "replicas at the same index route a request alike, for the same reason";

/// Compares what the replicas at rest say about requests that nobody sent.
///
/// # Errors
/// If two answers to one question differ.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut members = record.observation.at_rest.values();
    let Some(first) = members.next() else {
        return Ok(0);
    };
    let mut subjects = 0;
    for other in members {
        for (known, answer) in first.answers.iter().zip(&other.answers) {
            // A cluster that has not healed has replicas at several indexes.
            let index = |text: &str| text.split(',').next().map(str::to_owned);
            if index(known) != index(answer) {
                continue;
            }
            if known != answer {
                let at = known.bytes().zip(answer.bytes());
                let at = at.take_while(|(left, right)| left == right).count();
                let from = |text: &str| {
                    let bytes = &text.as_bytes()[at.saturating_sub(200)..];
                    String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned()
                };
                let detail = format!(
                    "{} says ..{}.., {} says ..{}..",
                    first.run,
                    from(known),
                    other.run,
                    from(answer)
                );
                return Err(super::violation(NUMBER, NAME, detail));
            }
            subjects += 1;
        }
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use state::ids::ReplicaId;

    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn a_different_answer_is_detected() {
        let mut story = RecordBuilder::begun();
        story.rest();
        let at_rest = &mut story.record.observation.at_rest;
        let at = |index: u64, answer: &str| format!("{{\"index\":{index},\"choice\":{answer:?}}}");
        let answers = |last: &str| vec![at(7, "a"), at(7, last)];
        let first = at_rest.values_mut().next().unwrap();
        first.answers = answers("b");
        let mut other = first.clone();
        other.answers = answers("c");
        at_rest.insert(ReplicaId(2), other);
        assert!(check(&story.record).is_err());
        let at_rest = &mut story.record.observation.at_rest;
        at_rest.get_mut(&ReplicaId(2)).unwrap().answers = answers("b");
        assert_eq!(check(&story.record), Ok(2));
        let at_rest = &mut story.record.observation.at_rest;
        at_rest.get_mut(&ReplicaId(2)).unwrap().answers = vec![at(8, "c")];
        assert_eq!(check(&story.record), Ok(0));
    }
}
