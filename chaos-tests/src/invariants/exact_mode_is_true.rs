//! A backend marked exact is exact: its reported blocks are those that its engine held after
//! publishing the last applied message, and no reader has reported a later message.

use std::collections::BTreeSet;

use state::ids::BlockHash;
use state::kv_events::KvMode;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;
use crate::oracle::image::KvImage;
use crate::oracle::observation::Observation;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I24";
/// Statement of the invariant.
pub const NAME: &str = "what is called exact is what the engine holds";

/// Compares every exact backend of every state image with its engine.
///
/// # Errors
/// If the reported blocks differ from those that the engine held.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let seen = &record.observation;
    let mut subjects = super::replayed(record, &[StatePart::Streams], NUMBER, NAME)?;
    for (_, run, image) in &seen.images {
        for (name, backend) in &image.backends {
            let exact = backend.kv.as_ref().filter(|kv| kv.mode == KvMode::Exact);
            let Some(held) = exact.and_then(|kv| held(seen, kv)) else {
                continue;
            };
            subjects += u64::from(!held.is_empty());
            let reported = backend.owned.iter().filter(|(_, it)| it.reports > 0);
            let reported: BTreeSet<BlockHash> = reported.map(|(block, _)| *block).collect();
            if reported != held {
                let missing: Vec<_> = held.difference(&reported).collect();
                let wrong: Vec<_> = reported.difference(&held).collect();
                let detail = format!(
                    "{run}, index {}: {name} is exact and lacks {missing:?}, has {wrong:?} too many",
                    image.index
                );
                return Err(super::violation(NUMBER, NAME, detail));
            }
        }
    }
    Ok(subjects)
}

/// Returns the blocks that all ranks of the engine held after publishing the applied messages, or
/// `None` if the world does not know.
fn held(seen: &Observation, kv: &KvImage) -> Option<BTreeSet<BlockHash>> {
    let mut held = BTreeSet::new();
    for position in &kv.positions {
        if let Some(last) = position.last {
            held.extend(seen.engines.get(&last)?.iter().copied());
        }
    }
    Some(held)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::invariants::fixture::{RecordBuilder, following};

    #[test]
    fn a_false_exact_mode_is_detected() {
        let mut story = RecordBuilder::lively();
        let cached = Arc::new(BTreeSet::from([BlockHash(1), BlockHash(2)]));
        story.record.observation.published(3, 0, cached);
        story.image(|image| {
            following(image, KvMode::Degraded, 7, Some(3));
        });
        assert_eq!(check(&story.record), Ok(0));
        story.image(|image| {
            following(image, KvMode::Exact, 7, Some(3));
            let owned = &mut image.backends.get_mut("a").unwrap().owned;
            owned.retain(|block, _| *block <= BlockHash(2));
            owned.values_mut().for_each(|it| it.reports = 1);
        });
        assert_eq!(check(&story.record), Ok(1));
        story.image(|image| {
            following(image, KvMode::Exact, 7, Some(3));
            let owned = &mut image.backends.get_mut("a").unwrap().owned;
            owned.values_mut().for_each(|it| it.reports = 1);
        });
        assert!(check(&story.record).is_err());
    }
}
