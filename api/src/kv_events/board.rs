//! Status of the KV event streams that this replica reads, for the admin API and metrics.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use state::ids::Slot;

use super::stream::StreamCounts;

/// All streams that this replica reads.
#[derive(Debug, Default)]
pub struct StreamBoard(Mutex<BTreeMap<Slot, BackendStreams>>);

/// One backend's streams, as its reader sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct BackendStreams {
    /// Why nothing is followed yet.
    pub detail: Option<String>,
    /// By rank.
    pub ranks: Vec<RankStreamStatus>,
}

/// One rank's stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RankStreamStatus {
    /// The rank.
    pub rank: u16,
    /// Where its events are had.
    pub endpoint: String,
    /// Whether the subscription stands.
    pub is_connected: bool,
    /// Why something is not as it should be.
    pub detail: Option<String>,
    /// Newest message that came.
    pub newest_seq: Option<u64>,
    /// Last message told to the cluster.
    pub told_seq: Option<u64>,
    /// Messages that came and are not applied here.
    pub lag_messages: u64,
    /// What it met so far.
    pub counts: StreamCounts,
}

impl StreamBoard {
    /// How the streams of the backend in `slot` stand; `None`: another replica reads them, or nobody.
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
        // Entries are written whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
