//! A backend marked exact is exact: its reported blocks are those that its engine held after
//! publishing the last applied message, and no reader has reported a later message.

use std::collections::BTreeSet;

use state::ids::BlockHash;
use state::kv_events::KvMode;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;
use crate::oracle::image::KvImage;
use crate::oracle::observation::{EngineCache, Observation};

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
            subjects += u64::from(!held.gpu.is_empty());
            let reported = backend.owned.iter().filter(|(_, it)| it.reports > 0);
            let reported: BTreeSet<BlockHash> = reported.map(|(block, _)| *block).collect();
            let with_cpu = backend.kv.as_ref().map(|kv| kv.with_cpu.clone());
            for (known, held) in [
                (reported, held.gpu),
                (with_cpu.unwrap_or_default(), held.with_cpu),
            ] {
                if known != held {
                    let missing: Vec<_> = held.difference(&known).collect();
                    let wrong: Vec<_> = known.difference(&held).collect();
                    let detail = format!(
                        "{run}, index {}: {name} is exact and lacks {missing:?}, has {wrong:?} too \
                         many",
                        image.index
                    );
                    return Err(super::violation(NUMBER, NAME, detail));
                }
            }
        }
    }
    Ok(subjects)
}

/// Returns the blocks that all ranks of the engine held after publishing the applied messages, or
/// `None` if the world does not know.
fn held(seen: &Observation, kv: &KvImage) -> Option<EngineCache> {
    let mut held = EngineCache::default();
    for position in &kv.positions {
        if let Some(last) = position.last {
            let engine = seen.engines.get(&last)?;
            held.gpu.extend(&engine.gpu);
            held.with_cpu.extend(&engine.with_cpu);
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
        let cached = EngineCache {
            gpu: BTreeSet::from([BlockHash(1), BlockHash(2)]),
            with_cpu: BTreeSet::new(),
        };
        story
            .record
            .observation
            .published(3, 0, Arc::new(cached.clone()));
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
        story.record.observation.images.pop();
        let tiered = EngineCache {
            with_cpu: BTreeSet::from([BlockHash(1)]),
            ..cached
        };
        story.record.observation.published(3, 0, Arc::new(tiered));
        let lacks = check(&story.record).expect_err("the block in host memory is not known");
        assert!(
            lacks.to_string().contains("lacks [0000000000000001]"),
            "{lacks}"
        );
    }
}
