//! KV events are applied in order, whichever replica reads them: along the log, the position in a
//! rank's stream only moves forward, publisher run by publisher run and message by message.

use std::collections::BTreeMap;

use state::ids::BackendRef;

use super::{PropertyError, Subjects};
use crate::oracle::RunRecord;

/// Number of the invariant in docs/internals/invariants.md.
pub const NUMBER: &str = "I40";
/// Statement of the invariant.
pub const NAME: &str = "what is applied of a stream of KV events goes forwards";

/// Compares the stream positions in state images, in the order of their indices.
///
/// # Errors
/// If a later state is behind an earlier one.
pub fn check(record: &RunRecord) -> Result<Subjects, PropertyError> {
    let mut images: Vec<_> = record.observation.images.iter().collect();
    images.sort_by_key(|(_, _, image)| image.index);
    let mut last: BTreeMap<(BackendRef, u16), (u64, Option<u64>)> = BTreeMap::new();
    let mut subjects = 0;
    for (_, run, image) in images {
        for backend in image.backends.values() {
            let positions = backend.kv.iter().flat_map(|kv| &kv.positions);
            for position in positions {
                let at = (position.publisher, position.last.map(|(seq, _)| seq));
                let key = (backend.handle, position.rank);
                let before = last.insert(key, at);
                subjects += u64::from(before.is_some_and(|before| before != at));
                if before.is_some_and(|before| at < before) {
                    let detail = format!(
                        "{run}, index {}: rank {} of {:?} is at {at:?}, it was at {before:?}",
                        image.index, position.rank, backend.handle
                    );
                    return Err(super::violation(NUMBER, NAME, detail));
                }
            }
        }
    }
    Ok(subjects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::fixture::{RecordBuilder, following};
    use state::kv_events::KvMode;

    #[test]
    fn an_event_stream_going_back_is_detected() {
        let mut story = RecordBuilder::lively();
        story.image(|image| following(image, KvMode::Exact, 7, Some(3)));
        story.image(|image| following(image, KvMode::Exact, 7, Some(4)));
        story.image(|image| following(image, KvMode::Exact, 8, None));
        assert_eq!(check(&story.record), Ok(2));
        story.image(|image| following(image, KvMode::Exact, 7, Some(5)));
        assert!(check(&story.record).is_err());
    }
}
