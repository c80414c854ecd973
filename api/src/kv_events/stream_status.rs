//! Status of the KV event streams that this replica reads, for the admin API and metrics.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use schemars::JsonSchema;
use serde::Serialize;
use state::ids::Slot;

use super::stream::StreamCounts;

/// Status of all streams that this replica reads.
#[derive(Debug, Default)]
pub struct StreamBoard(Mutex<BTreeMap<Slot, BackendStreams>>);

/// One backend's streams as seen by its reader.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BackendStreams {
    /// Why no stream is followed yet.
    pub detail: Option<String>,
    /// Streams by rank.
    pub ranks: Vec<RankStreamStatus>,
}

/// Status of one rank's stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RankStreamStatus {
    /// Data-parallel rank.
    pub rank: u16,
    /// Endpoint of its events.
    pub endpoint: String,
    /// Whether the subscription is established.
    pub is_connected: bool,
    /// Description of a problem, if any.
    pub detail: Option<String>,
    /// Sequence number of the newest message received.
    pub newest_seq: Option<u64>,
    /// Sequence number of the last message reported to the cluster.
    pub told_seq: Option<u64>,
    /// Number of messages received but not applied here.
    pub lag_messages: u64,
    /// Counters since the start.
    pub counts: StreamCounts,
}

impl StreamBoard {
    /// Returns the streams of the backend in `slot`; `None` if another replica reads them or none
    /// does.
    #[must_use]
    pub fn standing(&self, slot: Slot) -> Option<BackendStreams> {
        self.lock().get(&slot).cloned()
    }

    pub(super) fn show(&self, slot: Slot, standing: BackendStreams) {
        self.lock().insert(slot, standing);
    }

    pub(super) fn show_rank(&self, slot: Slot, rank: RankStreamStatus) {
        let mut board = self.lock();
        let Some(standing) = board.get_mut(&slot) else {
            return;
        };
        match standing.ranks.iter_mut().find(|it| it.rank == rank.rank) {
            Some(shown) => *shown = rank,
            None => standing.ranks.push(rank),
        }
    }

    pub(super) fn take_down(&self, slot: Slot) {
        self.lock().remove(&slot);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Slot, BackendStreams>> {
        // Entries are always written completely, so a poisoned lock is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
