//! [`FollowedBackends`]: all backends whose KV events are followed, and how batches change them.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use crate::ids::{BackendRef, BlockHash, EngineHash, Slot};
use crate::kv_events::status::{KvMap, KvRankStatus, KvStatus};
use crate::kv_events::stream::{RankStream, ReportedOwnership, UnknownCause};
use crate::kv_events::tiers::{LowerTierBlocks, TierIndexes};
use crate::kv_events::{
    KV_BLOCKS_PER_BATCH_MAX, KV_CONFIRM_MS_MAX, KV_ENTRIES_MAX, KV_ENTRIES_PER_BACKEND_MAX,
    KV_RANKS_MAX, KvBatch, KvCondition, KvMode, KvPosition, KvUncertainty, KvUpdate,
};
use crate::ownership::Ownership;

/// Resolution of the deadlines of pending releases, in milliseconds.
const FADING_STEP_MS: u64 = 1_000;
/// Maximum number of pending releases. Further ones are merged with the last one.
pub(super) const FADING_STEPS_MAX: usize = 64;

/// Effects of a batch, other than those on the blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct KvChanges {
    /// Tips of open leases that are closed because their blocks were removed.
    pub(crate) closed_lease_tips: Vec<BlockHash>,
    /// Whether the backend's condition changed.
    pub(crate) is_condition_changed: bool,
}

/// All backends whose KV events are followed.
pub(crate) struct FollowedBackends {
    pub(super) followed: BTreeMap<Slot, FollowedBackend>,
    /// Number of entries of all backends together.
    pub(super) entries: u64,
    /// Maximum number of entries of one backend, and of all backends together.
    limits: (u64, u64),
}

/// A backend whose KV events are followed.
pub(super) struct FollowedBackend {
    pub(super) backend: BackendRef,
    pub(super) ranks: BTreeMap<u16, RankStream>,
    /// Whether the blocks of the ranks are reported to the ownership. This requires that the caches
    /// of all ranks are known.
    pub(super) is_reporting: bool,
    /// Deadline and highest epoch of releases whose blocks await confirmation. Both ascend.
    pub(super) pending_releases: VecDeque<(u64, u64)>,
}

impl Default for FollowedBackends {
    fn default() -> Self {
        Self::with_limits(KV_ENTRIES_PER_BACKEND_MAX, KV_ENTRIES_MAX)
    }
}

impl FollowedBackends {
    /// Creates an empty set with limits on the entries of one backend and of all backends.
    pub(super) fn with_limits(per_backend: u64, all: u64) -> Self {
        Self {
            followed: BTreeMap::new(),
            entries: 0,
            limits: (per_backend, all),
        }
    }

    /// Applies a reader's batch for `backend`, a current handle of the engine or of the rank
    /// itself. Returns `None`, without a change, if the batch exceeds a bound. Outdated news is
    /// accepted but changes nothing.
    pub(crate) fn apply(
        &mut self,
        backend: BackendRef,
        batch: &KvBatch,
        (ownership, tiers): (&mut Ownership, &mut TierIndexes),
    ) -> Option<KvChanges> {
        if batch.blocks() > KV_BLOCKS_PER_BATCH_MAX {
            return None;
        }
        let slot = backend.slot;
        let of_others = self.entries - self.followed.get(&slot).map_or(0, FollowedBackend::entries);
        let is_first = !self.followed.contains_key(&slot);
        let followed = self
            .followed
            .entry(slot)
            .or_insert_with(|| FollowedBackend::new(backend));
        if followed.ranks.len() >= KV_RANKS_MAX && !followed.ranks.contains_key(&batch.rank) {
            return None;
        }
        let (per_backend, all) = self.limits;
        let room = per_backend.min(all.saturating_sub(of_others));
        let room_below = (per_backend / 4 * 3).min((all / 4 * 3).saturating_sub(of_others));
        let mut changes = KvChanges::default();
        let before = followed.condition();
        let closed = &mut changes.closed_lease_tips;
        followed.apply(batch, (room, room_below), (ownership, tiers), closed);
        changes.is_condition_changed = is_first || followed.condition() != before;
        self.entries = of_others + followed.entries();
        Some(changes)
    }

    /// Marks the state of `slot` as possibly out of date. Returns whether its condition changed.
    pub(crate) fn doubt(&mut self, slot: Slot, doubt: KvUncertainty) -> bool {
        let Some(followed) = self.followed.get_mut(&slot) else {
            return false;
        };
        let before = followed.condition();
        followed.ranks.values_mut().for_each(|it| it.doubt(doubt));
        followed.condition() != before
    }

    /// Moves the followed backends to the new handles that `handle` returns, and marks them as
    /// possibly out of date. Forgets backends without a new handle.
    pub(crate) fn rename(&mut self, handle: impl Fn(Slot) -> Option<BackendRef>) {
        let slots: Vec<Slot> = self.followed.keys().copied().collect();
        for slot in slots {
            match (handle(slot), self.followed.get_mut(&slot)) {
                (Some(handle), Some(followed)) => {
                    followed.backend = handle;
                    self.doubt(slot, KvUncertainty::Handover);
                }
                (Some(_) | None, _) => {
                    self.forget(slot);
                }
            }
        }
    }

    /// Forgets the backend in `slot` and returns whether it was followed.
    pub(crate) fn forget(&mut self, slot: Slot) -> bool {
        let gone = self.followed.remove(&slot);
        self.entries -= gone.as_ref().map_or(0, FollowedBackend::entries);
        gone.is_some()
    }

    /// Records the release of a lease that ended at `tip`. Blocks that the lease added fade unless
    /// confirmed. Blocks that its request produced behind them get the same age.
    pub(crate) fn released(
        &mut self,
        slot: Slot,
        tip: Option<BlockHash>,
        ownership: &mut Ownership,
        now_ms: u64,
    ) {
        if let Some(followed) = self.followed.get_mut(&slot).filter(|it| it.is_reporting) {
            let trees = followed.ranks.values().map(|rank| &rank.tree);
            let ends = trees.filter_map(|tree| Some(tree.ends_behind(tree.find_router(tip?)?)));
            for end in ends.flatten() {
                ownership.age_leaf(slot, end);
            }
            let until_ms = now_ms.saturating_add(KV_CONFIRM_MS_MAX + FADING_STEP_MS - 1);
            let until_ms = until_ms - until_ms % FADING_STEP_MS;
            followed.fade_later(until_ms, ownership.epoch(slot));
        }
    }

    /// Evicts the released blocks that no report confirmed in time.
    pub(crate) fn fade(&mut self, ownership: &mut Ownership, now_ms: u64) {
        for (slot, followed) in &mut self.followed {
            if followed.pending_releases.is_empty() || followed.condition().mode != KvMode::Exact {
                continue;
            }
            let mut due = None;
            while let Some((_, epoch)) = followed.pending_releases.pop_front_if(|it| it.0 <= now_ms)
            {
                due = Some(epoch);
            }
            if let Some(epoch) = due {
                ownership.evict_released(*slot, epoch);
            }
        }
    }

    /// Iterates over the reporting backends with a single rank, with the number of physical blocks
    /// in use. Skips backends with several ranks, whose caches are separate.
    pub(crate) fn shown(&self) -> impl Iterator<Item = (BackendRef, u64)> {
        let shown = self.followed.values();
        let shown = shown.filter(|it| it.is_reporting && it.ranks.len() == 1);
        shown.map(|it| {
            let held = it.ranks.values().map(|rank| rank.tree.copies());
            (it.backend, held.sum())
        })
    }

    /// Iterates over the conditions of all followed backends, in ascending order of slots.
    pub(crate) fn conditions(&self) -> impl Iterator<Item = (BackendRef, KvCondition)> {
        let followed = self.followed.values();
        followed.map(|followed| (followed.backend, followed.condition()))
    }

    pub(crate) fn status(&self, slot: Slot, ownership: &Ownership) -> Option<KvStatus> {
        let followed = self.followed.get(&slot)?;
        let reported_blocks = ownership.reported(slot);
        let ranks = followed.ranks.iter();
        Some(KvStatus {
            backend: followed.backend,
            condition: followed.condition(),
            reported_blocks,
            unconfirmed_blocks: ownership.owned(slot) - reported_blocks,
            ranks: ranks.map(|(rank, it)| it.status(*rank)).collect(),
        })
    }

    pub(crate) fn positions(&self, slot: Slot) -> Vec<KvPosition> {
        let ranks = self.followed.get(&slot).map(|followed| &followed.ranks);
        let ranks = ranks.into_iter().flatten();
        ranks.map(|(rank, it)| it.position(*rank)).collect()
    }

    pub(crate) fn router_hash(
        &self,
        slot: Slot,
        rank: u16,
        block: EngineHash,
    ) -> Option<BlockHash> {
        let tree = &self.followed.get(&slot)?.ranks.get(&rank)?.tree;
        Some(tree.entries.get(tree.find(block)?).router)
    }

    pub(crate) fn map(&self, slot: Slot, rank: u16) -> Option<KvMap> {
        let stream = self.followed.get(&slot)?.ranks.get(&rank)?;
        let entries = stream.tree.entries.clone();
        Some(KvMap { entries })
    }

    /// Returns the heap size of the caches of all ranks, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let streams = self.followed.values().flat_map(|it| it.ranks.values());
        streams.map(|it| it.tree.memory_bytes() as u64).sum()
    }

    /// Returns the blocks that the ranks in `slot` report at `level`, once per rank.
    pub(crate) fn reports(&self, level: usize, slot: Slot) -> Vec<BlockHash> {
        let ranks = self.followed.get(&slot).map(|followed| &followed.ranks);
        let entries = ranks.into_iter().flatten();
        let entries = entries.flat_map(|(_, it)| it.tree.entries.iter());
        entries
            .filter(|(_, entry)| entry.is_reported(level))
            .map(|(_, entry)| entry.router)
            .collect()
    }
}

impl FollowedBackend {
    pub(super) fn new(backend: BackendRef) -> Self {
        Self {
            backend,
            ranks: BTreeMap::new(),
            is_reporting: false,
            pending_releases: VecDeque::new(),
        }
    }

    pub(super) fn entries(&self) -> u64 {
        let ranks = self.ranks.values();
        ranks.map(|it| u64::from(it.tree.len())).sum()
    }

    /// Returns the condition of the rank with the worst mode.
    pub(super) fn condition(&self) -> KvCondition {
        let conditions = self.ranks.values().map(RankStream::condition);
        conditions
            .reduce(|worst, it| if it.mode > worst.mode { it } else { worst })
            .unwrap_or(KvCondition::EXACT)
    }

    fn apply(
        &mut self,
        batch: &KvBatch,
        (room, room_below): (u64, u64),
        (ownership, tiers): (&mut Ownership, &mut TierIndexes),
        closed_lease_tips: &mut Vec<BlockHash>,
    ) {
        let (slot, rank) = (self.backend.slot, batch.rank);
        let others = self.ranks.iter().filter(|(other, _)| **other != rank);
        let of_others: u64 = others.map(|(_, it)| u64::from(it.tree.len())).sum();
        let mut show = ReportedOwnership {
            ownership,
            tiers,
            slot,
            is_reporting: self.is_reporting,
            is_only_rank: self.ranks.keys().all(|other| *other == rank),
            room: room.saturating_sub(of_others),
            room_below: room_below.saturating_sub(of_others),
            closed_lease_tips,
        };
        let publisher = batch.publisher;
        let begin = || RankStream::new(slot, rank, publisher);
        let stream = self.ranks.entry(rank).or_insert_with(begin);
        match publisher.cmp(&stream.progress.publisher) {
            Ordering::Less => return,
            Ordering::Equal => {}
            Ordering::Greater => {
                stream.empty(&mut show);
                *stream = begin();
            }
        }
        match &batch.news {
            KvUpdate::Begin => {}
            KvUpdate::Message(message) => stream.message(message, &mut show),
            KvUpdate::Current { seq } => stream.current(*seq),
            KvUpdate::Doubt(doubt) => stream.doubt(*doubt),
            KvUpdate::Refuse(refusal) => stream.refuse(*refusal, &mut show),
        }
        self.settle(&mut show);
    }

    /// Reports the blocks of all ranks if the cache of every rank is known, else none.
    fn settle(&mut self, show: &mut ReportedOwnership<'_>) {
        let is_known = self.ranks.values().all(RankStream::is_known);
        if is_known && !self.is_reporting {
            // Blocks that leases added before stay in use until the engine's reports are complete.
            self.pending_releases.clear();
            self.fade_later(0, show.ownership.epoch(show.slot));
            self.is_reporting = true;
            show.is_reporting = true;
            let mut ranks = self.ranks.values_mut();
            if let Some(full) = ranks.find_map(|it| (!it.show_all(show)).then_some(it)) {
                full.become_unknown(UnknownCause::TooManyBlocks, show);
            }
        }
        if self.is_reporting && !self.ranks.values().all(RankStream::is_known) {
            self.is_reporting = false;
            self.pending_releases.clear();
            show.clear();
            self.ranks.values_mut().for_each(RankStream::hidden);
        }
    }

    fn fade_later(&mut self, until_ms: u64, epoch: u64) {
        let is_full = self.pending_releases.len() >= FADING_STEPS_MAX;
        match self.pending_releases.back_mut() {
            Some(last) if last.0 >= until_ms => last.1 = epoch,
            Some(last) if is_full => *last = (until_ms, epoch),
            Some(_) | None => self.pending_releases.push_back((until_ms, epoch)),
        }
    }
}

impl RankStream {
    fn status(&self, rank: u16) -> KvRankStatus {
        let position = self.position(rank);
        KvRankStatus {
            rank,
            publisher: position.publisher,
            condition: self.condition(),
            last_seq: position.last.map(|(seq, _)| seq),
            blocks: self.tree.live(),
            unowned_blocks: self.tree.live() - self.tree.reported(0),
            unrooted_blocks: self.unrooted(),
            lower_tier_blocks: LowerTierBlocks::from(self.tree.lower()),
            lower_tier_blocks_left_out: self.left_out_below(),
        }
    }
}
