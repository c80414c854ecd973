//! Advance charges are used up: at the end of the log, a replica's unsettled advances of a user do
//! not exceed the highest price of that user's concurrent prompts there (summed over its runs).
//!
//! Advances are for requests in flight or left over from earlier ones. A dispatch uses up the rest
//! of earlier advances before it charges more. The invariant covers neither admission that charges
//! by predictions or through the log, nor a restored backup.

use std::collections::BTreeMap;

use state::ids::{ReplicaId, UserKey};
use state::users::FairnessSettings;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::RequestTokens;
use crate::oracle::observation::ReplicaRun;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I44";
/// Statement of the invariant.
pub const NAME: &str = "what is charged ahead is used up";

/// Compares the advances in the log with the requests of every replica and user.
///
/// # Errors
/// If more was charged in advance than the concurrent prompts cost.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let comparison = record.comparison();
    let model = &comparison.model;
    if model.charges_otherwise || model.is_replaced {
        return Ok(0);
    }
    let mut most: BTreeMap<(ReplicaId, UserKey), i128> = BTreeMap::new();
    for ((run, user), worth) in most_at_once(record, model.prices()) {
        let key = (run.replica, model.users.key(user));
        *most.entry(key).or_default() += worth;
    }
    let mut subjects = 0;
    for (key, ahead) in &model.ahead {
        let most = most.get(key).copied().unwrap_or_default();
        subjects += u64::from(most > 0);
        if *ahead > most {
            let (replica, user) = key;
            let detail = format!(
                "replica {replica} has charged user {user} {ahead} ahead, prompts that were under way \
                 at once cost {most}"
            );
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    Ok(subjects)
}

/// Returns the highest price of concurrent prompts for each run and user.
fn most_at_once(
    record: &RunRecord,
    prices: FairnessSettings,
) -> BTreeMap<(ReplicaRun, &str), i128> {
    let mut changes: BTreeMap<(ReplicaRun, &str), Vec<(u64, i128)>> = BTreeMap::new();
    for request in &record.history.requests {
        let worth = worth(&request.most, prices);
        let changes = changes.entry((request.run, &request.user)).or_default();
        changes.push((request.called_at_us, worth));
        // A request that ends at the moment when another begins counts as concurrent.
        let until_us = request.end.map_or(u64::MAX, |end| end.at_us + 1);
        changes.push((until_us, -worth));
    }
    let most = |mut changes: Vec<(u64, i128)>| {
        changes.sort_unstable();
        let sums = changes.iter().scan(0, |sum, (_, change)| {
            *sum += change;
            Some(*sum)
        });
        sums.max().unwrap_or_default()
    };
    changes
        .into_iter()
        .map(|(key, changes)| (key, most(changes)))
        .collect()
}

/// Returns the price of a request's whole prompt, which is the most that is charged in advance.
fn worth(tokens: &RequestTokens, prices: FairnessSettings) -> i128 {
    let input = i128::from(tokens.input_uncached) + i128::from(tokens.input_cached);
    input * i128::from(prices.input_price)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, run};
    use crate::oracle::history::RequestEnd;

    #[test]
    fn an_unsettled_advance_is_detected() {
        let mut story = RecordBuilder::begun();
        let most = RequestTokens {
            input_uncached: 10,
            ..RequestTokens::default()
        };
        let history = &mut story.record.history;
        for at_us in [1, 100] {
            let request = history.request(run(1, 1), "ann", at_us, most);
            let end = RequestEnd {
                at_us: at_us + 50,
                used: None,
            };
            history.ended(request, end);
        }
        story.charge_ahead(1, "ann", 10, 0);
        assert_eq!(check(&story.record), Ok(1));
        story.charge_ahead(1, "ann", 10, 10);
        assert_eq!(check(&story.record), Ok(1));
        story.charge_ahead(1, "ann", 1, 0);
        assert!(check(&story.record).is_err());
    }
}
