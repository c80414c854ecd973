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
    /// Reason why no stream is followed; null if there is none.
    pub detail: Option<String>,
    /// Streams by rank.
    pub ranks: Vec<RankStreamStatus>,
}

/// Status of one rank's stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RankStreamStatus {
    /// Data-parallel rank.
    pub rank: u16,
    /// Address of the rank's events, such as `tcp://10.0.0.1:5557`.
    pub endpoint: String,
    /// Whether the subscription is established.
    pub is_connected: bool,
    /// Latest problem with the subscription or a replay since the subscription was established;
    /// null if there is none.
    pub detail: Option<String>,
    /// Largest sequence number received in the engine's current run, live or replayed; null if there
    /// is none.
    pub newest_seq: Option<u64>,
    /// Sequence number of the last message reported to the cluster; null if there is none.
    pub told_seq: Option<u64>,
    /// Number of messages received but not applied here.
    pub lag_messages: u64,
    /// Counters since the reader started.
    pub counts: StreamCounts,
}

impl StreamBoard {
    /// Returns the streams of the backend in `slot`; `None` if this replica does not read them.
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
