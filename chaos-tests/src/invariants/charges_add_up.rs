//! Users' totals match the usage of their requests: no usage is charged twice, and usage is lost
//! only if it was still in the outbox when its replica stopped.
//!
//! The check works from the clients' side, with the usage that engines reported. It does not read
//! the log.

use std::collections::BTreeMap;

use state::users::UserUsage;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::history::{InferenceRequest, RequestTokens};
use crate::oracle::image::StateImage;
use crate::oracle::observation::{Observation, ReplicaRun};

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I38";
/// Statement of the invariant.
pub const NAME: &str = "users are charged what their requests used, once";

/// Compares the totals of all users with the maximum that they can have used, and at rest also with
/// the minimum.
///
/// # Errors
/// If a user was charged too much or too little.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let seen = &record.observation;
    let mut subjects = 0;
    for (at_us, run, image) in &seen.images {
        for (user, [_, most]) in bounds(record, *at_us) {
            let total = total(record, image, user);
            subjects += u64::from(total != UserUsage::default());
            if exceeds(&total, &most) {
                return Err(wrong(*run, image, user, &total, "more than", &most));
            }
        }
    }
    for at_rest in seen.at_rest.values() {
        let image = &at_rest.image;
        for (user, [least, most]) in bounds(record, u64::MAX) {
            let total = total(record, image, user);
            subjects += u64::from(least != RequestTokens::default());
            if exceeds(&total, &most) {
                return Err(wrong(at_rest.run, image, user, &total, "more than", &most));
            }
            if falls_short(&total, &least) {
                return Err(wrong(at_rest.run, image, user, &total, "less than", &least));
            }
        }
    }
    Ok(subjects)
}

/// Returns the minimum and maximum charge of each user for requests that began by `at_us`.
fn bounds(record: &RunRecord, at_us: u64) -> BTreeMap<&str, [RequestTokens; 2]> {
    let mut bounds: BTreeMap<&str, [RequestTokens; 2]> = BTreeMap::new();
    for request in &record.history.requests {
        if request.called_at_us > at_us {
            continue;
        }
        let [least, most] = bounds.entry(&request.user).or_default();
        let end = request.end.filter(|end| end.at_us <= at_us);
        // Usage is charged as it arrives: before the end, any part of the maximum may be charged.
        let used = end.and_then(|end| end.used);
        add(most, &used.unwrap_or(request.most));
        if is_handed_over(&record.observation, request)
            && let Some(used) = used
        {
            add(least, &used);
        }
    }
    bounds
}

/// Returns whether the outbox of the request's replica was empty at some time after its end.
pub(super) fn is_handed_over(seen: &Observation, request: &InferenceRequest) -> bool {
    let Some(end) = request.end else {
        return false;
    };
    let last_us = seen.outbox_empty.get(&request.run);
    last_us.is_some_and(|last_us| *last_us > end.at_us)
}

pub(super) fn total(record: &RunRecord, image: &StateImage, user: &str) -> UserUsage {
    let key = record.comparison().model.users.key(user);
    image.users.get(&key).map(|it| it.total).unwrap_or_default()
}

fn add(sum: &mut RequestTokens, more: &RequestTokens) {
    sum.input_uncached += more.input_uncached;
    sum.input_cached += more.input_cached;
    sum.output += more.output;
}

fn exceeds(total: &UserUsage, most: &RequestTokens) -> bool {
    total.input_uncached > most.input_uncached
        || total.input_cached > most.input_cached
        || total.output > most.output
}

fn falls_short(total: &UserUsage, least: &RequestTokens) -> bool {
    total.input_uncached < least.input_uncached
        || total.input_cached < least.input_cached
        || total.output < least.output
}

fn wrong(
    run: ReplicaRun,
    image: &StateImage,
    user: &str,
    total: &UserUsage,
    than: &str,
    bound: &RequestTokens,
) -> PropertyError {
    let detail = format!(
        "{run}, index {}: {user:?} was charged {total:?}, {than} {bound:?}",
        image.index
    );
    super::violation(NUMBER, NAME, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, run};
    use crate::oracle::history::RequestEnd;

    /// Checks a user who used `output` tokens while the state shows `charged`.
    fn used(output: u64, charged: u64, is_handed_over: bool) -> Result<Subjects, PropertyError> {
        let mut story = RecordBuilder::begun();
        story.charge(1, "ann", charged);
        let history = &mut story.record.history;
        let most = RequestTokens {
            output: 100,
            ..RequestTokens::default()
        };
        let request = history.request(run(1, 1), "ann", 1, most);
        let used = Some(RequestTokens {
            output,
            ..RequestTokens::default()
        });
        history.ended(request, RequestEnd { at_us: 5, used });
        if is_handed_over {
            story.record.observation.outbox_is_empty(6, run(1, 1));
        }
        story.rest();
        check(&story.record)
    }

    #[test]
    fn overcharges_and_undercharges_are_detected() {
        assert_eq!(used(10, 10, true), Ok(1));
        assert!(used(10, 11, true).is_err());
        assert!(used(10, 9, true).is_err());
        assert_eq!(used(10, 9, false), Ok(0));
        assert!(used(10, 11, false).is_err());
    }
}
