//! Users are charged for what engines computed, whatever the client did. If the engine reported
//! usage, the charge covers it. Otherwise it covers the whole prompt and at least about half of the
//! output.
//!
//! Charges that a replica had not handed over when it stopped do not count. I38 checks that no user
//! is charged too much.

use std::collections::BTreeMap;

use super::charges_add_up::{is_handed_over, total};
use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::InferenceRequest;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I63";
/// Statement of the invariant.
pub const NAME: &str = "what engines computed is charged, told or not";

/// Number of output tokens per request that an estimate may miss. It must cover half of the others.
const MISSED_TOKENS_MAX: u64 = 32;

/// Number of prompt tokens and number of output tokens.
type TokenSums = [u64; 2];

/// Compares the totals at rest of users for whose requests the engines' computation is known.
///
/// # Errors
/// If a user was charged too little.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut least: BTreeMap<&str, (TokenSums, u64)> = BTreeMap::new();
    for request in &record.history.requests {
        if request.end.is_none() || !is_handed_over(&record.observation, request) {
            continue;
        }
        let Some(due) = due(request) else { continue };
        let (sum, hidden) = least.entry(&request.user).or_default();
        sum[0] += due[0];
        sum[1] += due[1];
        *hidden += u64::from(request.end.is_some_and(|end| end.used.is_none()));
    }
    least.retain(|_, (_, hidden)| *hidden > 0);
    let mut subjects = 0;
    for at_rest in record.observation.at_rest.values() {
        for (user, (least, hidden)) in &least {
            let total = total(record, &at_rest.image, user);
            let found = [total.input_uncached + total.input_cached, total.output];
            subjects += hidden;
            if found[0] < least[0] || found[1] < least[1] {
                let run = at_rest.run;
                let detail = format!(
                    "{run}: {user:?} was charged {found:?} (prompts, output), at least {least:?} \
                     was due; engines told nothing of {hidden} requests"
                );
                return Err(super::violation(NUMBER, NAME, detail));
            }
        }
    }
    Ok(subjects)
}

/// Returns the minimum charge for a request; `None` if its usage is not known.
fn due(request: &InferenceRequest) -> Option<TokenSums> {
    let used = request.end.and_then(|end| end.used);
    if let Some(used) = used {
        return Some([used.input_uncached + used.input_cached, used.output]);
    }
    let computed = request.computed?;
    let output = computed.output.saturating_sub(MISSED_TOKENS_MAX) / 2;
    Some([computed.input_uncached + computed.input_cached, output])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, run};
    use crate::oracle::history::{RequestEnd, RequestTokens};

    /// Checks an engine that made `output` tokens without reporting usage; the state shows
    /// `charged`.
    fn hidden(output: u64, charged: u64) -> Result<Subjects, PropertyError> {
        let mut story = RecordBuilder::begun();
        story.charge(1, "ann", charged);
        let history = &mut story.record.history;
        let request = history.request(run(1, 1), "ann", 1, RequestTokens::default());
        let computed = RequestTokens {
            output,
            ..RequestTokens::default()
        };
        history.computed(request, computed);
        history.ended(
            request,
            RequestEnd {
                at_us: 5,
                used: None,
            },
        );
        story.record.observation.outbox_is_empty(6, run(1, 1));
        story.rest();
        check(&story.record)
    }

    #[test]
    fn uncharged_service_is_detected() {
        assert_eq!(hidden(232, 232), Ok(1));
        assert_eq!(hidden(232, 100), Ok(1));
        assert!(hidden(232, 99).is_err());
        assert!(hidden(232, 0).is_err());
    }
}
