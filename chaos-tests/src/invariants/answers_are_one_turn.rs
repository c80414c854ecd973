//! An answer is one turn of its session and is paid once, however many engines generated it: its
//! prompt once, and each output token once.
//!
//! The check works from the clients' side, with requests that have a session each. A session that
//! the state does not know is skipped, because sessions end in idle time.

use super::charges_add_up::is_handed_over;
use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::{InferenceRequest, OnlyTurn};
use state::trees::AgentSession;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I166";
/// Statement of the invariant.
pub const NAME: &str = "an answer of several engines is charged as one, and is one turn";

/// Compares the sessions of states at rest with the only turn of each.
///
/// # Errors
/// If a turn counts more than once or not at all, or with other tokens than those of one answer.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut subjects = 0;
    for at_rest in record.observation.at_rest.values() {
        for request in &record.history.requests {
            let Some(turn) = request.turn else { continue };
            let Some(found) = at_rest.agent_sessions.get(&turn.session) else {
                continue;
            };
            subjects += u64::from(found.turns > 0);
            if let Some(how) = difference(record, request, &turn, found) {
                let (run, user) = (at_rest.run, &request.user);
                let detail = format!("{run}: {how} of {user:?}: {found:?}, {turn:?}");
                return Err(super::violation(NUMBER, NAME, detail));
            }
        }
    }
    Ok(subjects)
}

fn difference(
    record: &RunRecord,
    request: &InferenceRequest,
    turn: &OnlyTurn,
    found: &AgentSession,
) -> Option<&'static str> {
    let most = u32::from(turn.has_run);
    let least = if is_handed_over(&record.observation, request) {
        most
    } else {
        0
    };
    if !(least..=most).contains(&found.turns) {
        return Some("other turns");
    }
    if found.turns == 0 {
        return None;
    }
    let used = &found.usage;
    match turn.output {
        _ if used.input() != turn.input => Some("another prompt"),
        Some(output) if used.output != output => Some("other output"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use state::command::{Command, Item};
    use state::ids::{AgentSessionKey, AttemptId};
    use state::prefix::{model_key, user_key};
    use state::trees::{NewSession, SessionRef, SessionTurn, TurnUsage};

    use super::*;
    use crate::invariants::fixture::{RecordBuilder, run};
    use crate::oracle::history::{RequestEnd, RequestTokens};

    const SESSION: AgentSessionKey = AgentSessionKey(9);

    /// Checks an answer of 7 prompt and 5 output tokens, whose turn ended once with each of `used`.
    fn turns(
        used: &[(u64, u64)],
        has_run: bool,
        is_handed_over: bool,
    ) -> Result<Subjects, PropertyError> {
        let mut story = RecordBuilder::lively();
        let begun = Item::BeginSession(NewSession {
            key: SESSION,
            parent: None,
            user: user_key(5, "ann"),
            model: model_key(5, "m"),
            home: story.backend("a"),
        });
        let turn = |&(input_uncached, output): &(u64, u64)| {
            Item::EndTurn(SessionTurn {
                session: SessionRef::Key(SESSION),
                usage: TurnUsage {
                    input_uncached,
                    input_cached: 0,
                    output,
                },
            })
        };
        let items = [begun].into_iter().chain(used.iter().map(turn)).collect();
        let base_attempt = AttemptId(2);
        story.write(
            1,
            Command::Batch {
                base_attempt,
                items,
            },
        );
        let history = &mut story.record.history;
        let request = history.request(run(1, 1), "ann", 1, RequestTokens::default());
        history.turned(
            request,
            OnlyTurn {
                session: SESSION,
                has_run,
                input: 7,
                output: Some(5),
            },
        );
        let end = RequestEnd {
            at_us: 5,
            used: None,
        };
        history.ended(request, end);
        if is_handed_over {
            story.record.observation.outbox_is_empty(6, run(1, 1));
        }
        story.rest();
        check(&story.record)
    }

    #[test]
    fn turns_that_count_twice_or_not_at_all_are_detected() {
        assert_eq!(turns(&[(7, 5)], true, true), Ok(1));
        assert!(turns(&[(7, 5), (0, 0)], true, true).is_err());
        assert!(turns(&[], true, true).is_err());
        assert_eq!(turns(&[], true, false), Ok(0));
        assert!(turns(&[(7, 5)], false, false).is_err());
    }

    #[test]
    fn tokens_that_count_twice_are_detected() {
        for used in [(14, 5), (7, 10), (0, 5), (7, 3)] {
            assert!(turns(&[used], true, true).is_err(), "{used:?}");
        }
    }
}
