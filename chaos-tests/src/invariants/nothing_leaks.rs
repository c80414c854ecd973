//! At rest, requests leave nothing behind: no lease, no count in flight or waiting, and no item in
//! an outbox or overlay.

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::observation::AtRest;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I14";
/// Statement of the invariant.
pub const NAME: &str = "when no request is under way nothing is left of any";

/// Checks every replica at rest.
///
/// # Errors
/// If a request left something behind.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let at_rest = &record.observation.at_rest;
    for at in at_rest.values() {
        let left = left(at);
        if !left.is_empty() {
            let detail = format!("{}, index {}: {}", at.run, at.image.index, left.join(", "));
            return Err(super::violation(NUMBER, NAME, detail));
        }
    }
    Ok(at_rest.len() as u64)
}

fn left(at: &AtRest) -> Vec<String> {
    let mut left: Vec<String> = Vec::new();
    let image = &at.image;
    for (holder, lease) in &image.leases {
        left.push(format!("the lease {lease:?} of {holder:?}"));
    }
    for (user, it) in &image.users {
        if it.in_flight > 0 || it.waiting > 0 {
            left.push(format!(
                "user {user} has {} in flight, {} waiting",
                it.in_flight, it.waiting
            ));
        }
    }
    let counts = [
        ("items in the outbox", at.outbox_items as u64),
        ("blocks in the overlay", at.overlay_blocks as u64),
        ("requests in flight", at.in_flight),
    ];
    let counts = counts.iter().filter(|(_, count)| *count > 0);
    left.extend(counts.map(|(what, count)| format!("{count} {what}")));
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::RecordBuilder;

    #[test]
    fn leftovers_at_rest_are_detected() {
        let mut story = RecordBuilder::lively();
        story.rest();
        assert!(check(&story.record).is_err());
        let at_rest = story.record.observation.at_rest.values_mut();
        for at in at_rest {
            let image = std::sync::Arc::make_mut(&mut at.image);
            image.leases.clear();
            image.users.values_mut().for_each(|user| user.in_flight = 0);
        }
        assert_eq!(check(&story.record), Ok(1));
        let mut at_rest = story.record.observation.at_rest.values_mut();
        at_rest.next().unwrap().overlay_blocks = 1;
        assert!(check(&story.record).is_err());
    }
}
