//! The model's KV event streams: the newest known message of each.

use std::collections::BTreeMap;

use state::ids::BackendRef;
use state::kv_events::{KvBatch, KvUpdate};

/// Newest message of each stream, by backend, rank and publisher.
#[derive(Debug, Clone, Default)]
pub struct ModelStreams(BTreeMap<(BackendRef, u16, u64), u64>);

impl ModelStreams {
    pub(super) fn tell(&mut self, batch: &KvBatch) {
        let newest = match &batch.news {
            KvUpdate::Message(message) => Some(message.seq),
            KvUpdate::Current { seq } => *seq,
            KvUpdate::Begin | KvUpdate::Doubt(_) | KvUpdate::Refuse(_) => None,
        };
        if let Some(newest) = newest {
            let key = (batch.backend, batch.rank, batch.publisher);
            let known = self.0.entry(key).or_default();
            *known = newest.max(*known);
        }
    }

    /// Returns the number of the newest message that any reader reported.
    #[must_use]
    pub fn newest(&self, backend: BackendRef, rank: u16, publisher: u64) -> Option<u64> {
        self.0.get(&(backend, rank, publisher)).copied()
    }
}
