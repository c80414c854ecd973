//! A request goes to a backend that was registered in that incarnation and not draining, in the
//! state that its replica saw when it decided.

use std::ops::Bound::{Excluded, Included};

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use state::ids::LogIndex;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I39";
/// Statement of the invariant.
pub const NAME: &str = "requests go to registered backends that do not drain";

/// Checks the backend of every dispatch.
///
/// # Errors
/// If a dispatch went to a backend that was not registered or was draining.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let comparison = record.comparison();
    let mut subjects = 0;
    let known = comparison.effects.keys().next_back().copied().unwrap_or(0);
    for request in &record.history.requests {
        for dispatch in &request.dispatches {
            let (from, until) = dispatch.seen;
            if comparison.model.is_replaced && until.0 > known {
                continue;
            }
            subjects += 1;
            let changes = comparison
                .backends
                .range((Excluded(from.0), Included(until.0)));
            let seen = changes.map(|(_, backends)| backends);
            let mut seen = seen.chain([comparison.backends_at(LogIndex(from.0))]);
            if !seen.any(|backends| backends.get(&dispatch.backend) == Some(&false)) {
                let detail = format!("{dispatch:?} of {request:?}");
                return Err(super::violation(NUMBER, NAME, detail));
            }
        }
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, drain, put, run};
    use crate::oracle::history::{Dispatch, RequestTokens};

    fn dispatched(
        story: &mut RecordBuilder,
        from: u64,
        until: u64,
    ) -> Result<Subjects, PropertyError> {
        let backend = story.backend("a");
        let history = &mut story.record.history;
        let request = history.request(run(1, 1), "ann", 1, RequestTokens::default());
        let dispatch = Dispatch {
            at_us: 2,
            backend,
            seen: (LogIndex(from), LogIndex(until)),
        };
        history.dispatched(request, dispatch);
        check(&story.record)
    }

    #[test]
    fn dispatch_to_a_draining_or_unknown_backend_is_detected() {
        let mut story = RecordBuilder::begun();
        let put = story.write(1, put("a", 1));
        let drained = story.write(1, drain("a", true));
        assert_eq!(dispatched(&mut story, put, put), Ok(1));
        assert_eq!(dispatched(&mut story, put, drained), Ok(2));
        assert!(dispatched(&mut story, drained, drained).is_err());
        story.record.history.requests.clear();
        assert!(dispatched(&mut story, put - 1, put - 1).is_err());
    }

    #[test]
    fn dispatch_to_an_earlier_incarnation_is_detected() {
        let mut story = RecordBuilder::begun();
        let first = story.write(1, put("a", 1));
        assert_eq!(dispatched(&mut story, first, first), Ok(1));
        let moved = story.write(1, put("a", 2));
        assert!(dispatched(&mut story, first, first).is_err());
        story.record.history.requests.pop();
        assert_eq!(dispatched(&mut story, moved, moved), Ok(2));
    }
}
