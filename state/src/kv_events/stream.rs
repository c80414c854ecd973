//! Event stream of one rank: how far it is applied, what is in doubt, and the resulting cache.

use bincode::{Decode, Encode};

use crate::ids::{BlockHash, EngineHash, Slot};
use crate::kv_events::entries::NONE;
use crate::kv_events::tiers::{LEVELS, LOWER_TIERS, LowerTier, TierIndexes};
use crate::kv_events::tree::{BlockTree, StoreResult};
use crate::kv_events::{
    KvCondition, KvEvent, KvMessage, KvMode, KvPosition, KvReason, KvRejection, KvUncertainty,
};
use crate::ownership::{Ownership, ReportRejection};

/// The ownership of one backend, to which a rank reports its blocks.
pub(super) struct ReportedOwnership<'a> {
    pub(super) ownership: &'a mut Ownership,
    /// Indexes of the levels below the GPU.
    pub(super) tiers: &'a mut TierIndexes,
    pub(super) slot: Slot,
    /// Whether blocks are reported. This requires that the cache of every rank is known.
    pub(super) is_reporting: bool,
    /// Whether the backend has no other rank.
    pub(super) is_only_rank: bool,
    /// Maximum number of entries that the rank may have.
    pub(super) room: u64,
    /// Number of entries from which on no more are kept for tiers below the GPU. Lower, because the
    /// tiers are useless without the blocks of the GPU.
    pub(super) room_below: u64,
    /// Tips of open leases that are closed because their blocks were removed.
    pub(super) closed_lease_tips: &'a mut Vec<BlockHash>,
}

impl ReportedOwnership<'_> {
    fn report(
        &mut self,
        level: usize,
        parent: Option<BlockHash>,
        block: BlockHash,
    ) -> Result<(), ReportRejection> {
        let closed = &mut *self.closed_lease_tips;
        match level {
            0 => self.ownership.report(self.slot, parent, block, closed),
            _ => (self.tiers.at(level)).report(self.slot, parent, block, closed),
        }
    }

    fn unreport(&mut self, level: usize, block: BlockHash) {
        let closed = &mut *self.closed_lease_tips;
        match level {
            0 => self.ownership.unreport(self.slot, block, closed),
            _ => self.tiers.at(level).unreport(self.slot, block, closed),
        }
    }

    /// Removes all blocks of the backend.
    pub(super) fn clear(&mut self) {
        self.ownership.clear(self.slot, self.closed_lease_tips);
        self.tiers.clear(self.slot);
    }
}

/// Reason why a rank's cache is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(super) enum UnknownCause {
    Lost,
    Refused(KvRejection),
    TooManyBlocks,
}

/// Reason why the engine may cache more than is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(super) enum IncompleteCause {
    UnknownParent,
    Contradiction,
}

/// State of a stream, other than the cache.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub(super) struct StreamProgress {
    pub(super) publisher: u64,
    /// Sequence number and part of the message to apply next.
    next: (u64, u16),
    /// Sequence number and mark of the last message applied completely; `None` before the first.
    last: Option<(u64, u64)>,
    /// Sequence number before which all messages are known to exist.
    awaited_seq: u64,
    doubt: Option<KvUncertainty>,
    incomplete_cause: Option<IncompleteCause>,
    unknown_cause: Option<UnknownCause>,
    /// Number of blocks left out because the block before them is unknown, since the run began or
    /// was cleared.
    unrooted: u64,
    /// Tiers below the GPU on which the engine has reported a block since the run began or was
    /// cleared.
    tiers: [bool; LOWER_TIERS],
    /// Number of blocks left out on these tiers, because the blocks are unknown or too many.
    left_out_below: u64,
}

/// Event stream and cache of one rank; see the module documentation.
pub(super) struct RankStream {
    pub(super) progress: StreamProgress,
    pub(super) tree: BlockTree,
}

impl StreamProgress {
    /// Starts over with an empty cache, which is unknown for `unknown_cause`, if any.
    fn restart(&mut self, unknown_cause: Option<UnknownCause>) {
        (self.unknown_cause, self.incomplete_cause) = (unknown_cause, None);
        (self.unrooted, self.left_out_below) = (0, 0);
        self.tiers = [false; LOWER_TIERS];
    }
}

impl RankStream {
    /// Creates the stream of a new run. It is in doubt until its reader has caught up.
    pub(super) fn new(slot: Slot, rank: u16, publisher: u64) -> Self {
        let progress = StreamProgress {
            publisher,
            next: (0, 0),
            last: None,
            awaited_seq: 0,
            doubt: Some(KvUncertainty::Gap),
            incomplete_cause: None,
            unknown_cause: None,
            unrooted: 0,
            tiers: [false; LOWER_TIERS],
            left_out_below: 0,
        };
        Self::of(slot, rank, progress)
    }

    /// Creates a stream with the given progress and an empty cache.
    pub(super) fn of(slot: Slot, rank: u16, progress: StreamProgress) -> Self {
        Self {
            progress,
            tree: BlockTree::new(slot, rank),
        }
    }

    /// Whether the cache is known as of the last applied message.
    pub(super) fn is_known(&self) -> bool {
        self.progress.unknown_cause.is_none()
    }

    pub(super) fn condition(&self) -> KvCondition {
        let it = &self.progress;
        if let Some(unknown_cause) = it.unknown_cause {
            let reason = match unknown_cause {
                UnknownCause::Lost => KvReason::Lost,
                UnknownCause::Refused(refusal) => KvReason::Refused(refusal),
                UnknownCause::TooManyBlocks => KvReason::TooManyBlocks,
            };
            return KvCondition::new(KvMode::Lease, reason);
        }
        let has_gap = it.next.1 > 0 || it.next.0 < it.awaited_seq;
        let doubt = it.doubt.or(has_gap.then_some(KvUncertainty::Gap));
        let reason = match (doubt, it.incomplete_cause) {
            (Some(doubt), _) => KvReason::Doubt(doubt),
            (None, Some(IncompleteCause::UnknownParent)) => KvReason::UnknownParent,
            (None, Some(IncompleteCause::Contradiction)) => KvReason::Contradiction,
            (None, None) => return KvCondition::EXACT,
        };
        KvCondition::new(KvMode::Degraded, reason)
    }

    pub(super) fn position(&self, rank: u16) -> KvPosition {
        KvPosition {
            rank,
            publisher: self.progress.publisher,
            last: self.progress.last,
        }
    }

    pub(super) fn unrooted(&self) -> u64 {
        self.progress.unrooted
    }

    pub(super) fn left_out_below(&self) -> u64 {
        self.progress.left_out_below
    }

    /// Returns for each level whether blocks are reported at it, if any are.
    pub(super) fn levels(&self) -> [bool; LEVELS] {
        let [cpu, disk, store] = self.progress.tiers;
        [true, cpu, disk, store]
    }

    pub(super) fn doubt(&mut self, doubt: KvUncertainty) {
        self.progress.doubt = Some(doubt);
    }

    /// Records that the newest message is `seq`, which ends any doubt if nothing is missing.
    pub(super) fn current(&mut self, seq: Option<u64>) {
        let end = seq.map_or(0, |seq| seq.saturating_add(1));
        let next = self.progress.next;
        if (end, 0) == next {
            self.progress.doubt = None;
        } else if (end, 0) > next {
            self.await_up_to(end);
        }
    }

    pub(super) fn refuse(&mut self, refusal: KvRejection, show: &mut ReportedOwnership<'_>) {
        self.become_unknown(UnknownCause::Refused(refusal), show);
    }

    /// Marks the cache as unknown and empties it. Blocks implied by leases stay if nothing was
    /// reported.
    pub(super) fn become_unknown(
        &mut self,
        unknown_cause: UnknownCause,
        show: &mut ReportedOwnership<'_>,
    ) {
        if show.is_reporting {
            self.empty(show);
        }
        self.tree = self.tree.emptied();
        self.progress.restart(Some(unknown_cause));
    }

    /// Applies a message if it is the next one or follows lost ones, and its reader knew every block
    /// that is known here; else records any gap.
    pub(super) fn message(&mut self, message: &KvMessage, show: &mut ReportedOwnership<'_>) {
        let next = self.progress.next;
        let at = (message.seq, message.part);
        let is_loss = message.is_after_loss && message.part == 0 && message.seq > next.0;
        if is_loss {
            if self.is_known() {
                self.become_unknown(UnknownCause::Lost, show);
            }
        } else if at > next {
            self.await_up_to(message.seq.saturating_add(1));
            return;
        } else if at < next {
            return;
        }
        if self.leaves_out_known(&message.events) {
            self.await_up_to(message.seq.saturating_add(1));
            return;
        }
        for event in &message.events {
            self.event(event, show);
        }
        let it = &mut self.progress;
        if message.is_last {
            it.last = Some((message.seq, message.mark));
            it.next = (message.seq.saturating_add(1), 0);
        } else {
            it.next = (message.seq, message.part.saturating_add(1));
        }
    }

    /// Whether the reader of these events left out blocks although the one before them is known.
    fn leaves_out_known(&self, events: &[KvEvent]) -> bool {
        let mut before_clear = events.iter().take_while(|it| **it != KvEvent::Cleared);
        before_clear.any(|event| match event {
            KvEvent::LeftOut { parent } => self.tree.find(*parent).is_some(),
            _ => false,
        })
    }

    fn await_up_to(&mut self, seq: u64) {
        let it = &mut self.progress;
        it.awaited_seq = it.awaited_seq.max(seq);
    }

    fn event(&mut self, event: &KvEvent, show: &mut ReportedOwnership<'_>) {
        match event {
            KvEvent::Stored { parent, blocks } if self.is_known() => {
                self.stored(*parent, blocks, show);
            }
            KvEvent::Removed { blocks } if self.is_known() => {
                for group in blocks.chunks(GROUP_BLOCKS) {
                    self.warm_removals(group, show);
                    for block in group {
                        self.removed(*block, show);
                    }
                }
            }
            KvEvent::TierStored {
                tier,
                parent,
                blocks,
            } if self.is_known() => self.stored_below(*tier, *parent, blocks, show),
            KvEvent::TierCopied { tier, blocks } if self.is_known() => {
                for block in blocks {
                    match self.tree.find(*block) {
                        Some(index) if self.has_room_below(index, *tier, show) => {
                            self.copied(index, *tier, show);
                        }
                        Some(_) | None => self.progress.left_out_below += 1,
                    }
                }
            }
            KvEvent::TierRemoved { tier, blocks } if self.is_known() => {
                for block in blocks {
                    if let Some(index) = self.tree.find(*block)
                        && self.tree.take_from(index, *tier)
                    {
                        self.settle(index, show);
                        self.tree.prune(index);
                    }
                }
            }
            KvEvent::Cleared => self.cleared(show),
            _ => {}
        }
    }

    fn stored(
        &mut self,
        parent: Option<EngineHash>,
        blocks: &[(EngineHash, BlockHash)],
        show: &mut ReportedOwnership<'_>,
    ) {
        let mut behind = NONE;
        if let Some(parent) = parent {
            let Some(index) = self.tree.find(parent) else {
                // Blocks behind an unknown block are unknown too, and never first blocks.
                self.progress.incomplete_cause = Some(IncompleteCause::UnknownParent);
                self.progress.unrooted = self.progress.unrooted.saturating_add(blocks.len() as u64);
                return;
            };
            behind = index;
        }
        for group in blocks.chunks(GROUP_BLOCKS) {
            self.prefetch(group, show);
            for (engine, router) in group {
                let stored = self.tree.store(*engine, *router, behind);
                if stored == StoreResult::Full || u64::from(self.tree.len()) > show.room {
                    return self.become_unknown(UnknownCause::TooManyBlocks, show);
                }
                behind = match stored {
                    StoreResult::Full => return,
                    StoreResult::Copy(index) => index,
                    StoreResult::Fresh(index) => {
                        if !self.settle(index, show) {
                            return self.become_unknown(UnknownCause::TooManyBlocks, show);
                        }
                        index
                    }
                    StoreResult::Contradiction(index) => {
                        self.contradicted(index, show);
                        index
                    }
                };
            }
        }
    }

    fn removed(&mut self, block: EngineHash, show: &mut ReportedOwnership<'_>) {
        if let Some(index) = self.tree.find(block)
            && self.tree.take_copy(index) == 0
        {
            self.settle(index, show);
            self.tree.prune(index);
        }
    }

    /// Adds blocks that the engine stored on a lower tier, with all that identifies them. What is
    /// known of them already counts more.
    fn stored_below(
        &mut self,
        tier: LowerTier,
        parent: Option<EngineHash>,
        blocks: &[(EngineHash, BlockHash)],
        show: &mut ReportedOwnership<'_>,
    ) {
        let mut behind = NONE;
        if let Some(parent) = parent {
            let Some(index) = self.tree.find(parent) else {
                self.progress.left_out_below += blocks.len() as u64;
                return;
            };
            behind = index;
        }
        for (nth, block) in blocks.iter().enumerate() {
            let known = self.tree.find(block.0);
            let has_room = match known {
                Some(index) => self.has_room_below(index, tier, show),
                None => u64::from(self.tree.len()) < show.room_below,
            };
            behind = match known {
                Some(index) if has_room => {
                    self.copied(index, tier, show);
                    index
                }
                None if has_room
                    && let StoreResult::Fresh(index) =
                        self.tree.insert_below(tier, *block, behind) =>
                {
                    self.begin_tier(tier, show);
                    self.settle(index, show);
                    index
                }
                Some(_) | None => {
                    self.progress.left_out_below += (blocks.len() - nth) as u64;
                    return;
                }
            };
        }
    }

    /// Whether `tier` may hold the block: it does already, or there is room for one more block that
    /// stays known when the GPU evicts it.
    fn has_room_below(&self, index: u32, tier: LowerTier, show: &ReportedOwnership<'_>) -> bool {
        self.tree.entries.get(index).is_on(tier) || u64::from(self.tree.len()) < show.room_below
    }

    /// Adds a copy of a block on `tier`.
    fn copied(&mut self, index: u32, tier: LowerTier, show: &mut ReportedOwnership<'_>) {
        self.begin_tier(tier, show);
        if self.tree.copy(index, tier) {
            self.settle(index, show);
        }
    }

    /// Begins the level of `tier` with the blocks of faster tiers, if it has not begun.
    fn begin_tier(&mut self, tier: LowerTier, show: &mut ReportedOwnership<'_>) {
        if !std::mem::replace(&mut self.progress.tiers[tier.at()], true) {
            self.show_level(1 + tier.at(), show);
        }
    }

    /// Reports a block, and those behind it, at the levels at which they are owned now, and ends the
    /// reports at others. Returns `false` if the ownership lacks room.
    fn settle(&mut self, index: u32, show: &mut ReportedOwnership<'_>) -> bool {
        let levels = self.levels();
        (0..LEVELS).filter(|level| levels[*level]).all(|level| {
            let entry = *self.tree.entries.get(index);
            if self.tree.is_owned(level, &entry) {
                return self.show(level, index, show);
            }
            self.hide(level, index, show);
            true
        })
    }

    /// Marks a block as foreign, because the engine's events contradict each other about it.
    fn contradicted(&mut self, index: u32, show: &mut ReportedOwnership<'_>) {
        self.progress.incomplete_cause = Some(IncompleteCause::Contradiction);
        (0..LEVELS).for_each(|level| self.hide(level, index, show));
        self.tree.set_foreign(index);
    }

    /// Empties the cache after the engine cleared its own. The cache is then known. Does nothing if
    /// the engine's events are refused.
    fn cleared(&mut self, show: &mut ReportedOwnership<'_>) {
        if let Some(UnknownCause::Refused(_)) = self.progress.unknown_cause {
            return;
        }
        self.empty(show);
        self.progress.restart(None);
    }

    /// Removes all blocks of this rank and, if the backend has no other rank, also those implied by
    /// leases.
    pub(super) fn empty(&mut self, show: &mut ReportedOwnership<'_>) {
        if show.is_only_rank {
            show.clear();
        } else if show.is_reporting {
            for root in self.tree.roots() {
                (0..LEVELS).for_each(|level| self.hide(level, root, show));
            }
        }
        self.tree = self.tree.emptied();
    }

    /// Reports the owned part of the whole cache. Returns `false` if the ownership lacks room.
    pub(super) fn show_all(&mut self, show: &mut ReportedOwnership<'_>) -> bool {
        let levels = self.levels();
        (0..LEVELS)
            .filter(|level| levels[*level])
            .all(|level| self.show_level(level, show))
    }

    fn show_level(&mut self, level: usize, show: &mut ReportedOwnership<'_>) -> bool {
        let mut roots = self.tree.roots().into_iter();
        roots.all(|root| self.show(level, root, show))
    }

    /// Marks all blocks as unreported, after the ownership has cleared the backend's blocks.
    pub(super) fn hidden(&mut self) {
        for root in self.tree.roots() {
            for level in 0..LEVELS {
                for index in self.tree.reported_descendants(level, root) {
                    self.tree.set_reported(level, index, false);
                }
            }
        }
    }

    /// Reports the blocks newly owned at `level`, at and behind `top`. Returns `false` if there is no
    /// room.
    fn show(&mut self, level: usize, top: u32, show: &mut ReportedOwnership<'_>) -> bool {
        if !show.is_reporting {
            return true;
        }
        if level > 0 {
            show.tiers.begin(level, show.slot);
        }
        let (mut has_room, mut contradictions) = (true, Vec::new());
        self.tree.visit_descendants(top, |tree, index| {
            let entry = *tree.entries.get(index);
            if !has_room || entry.is_reported(level) || !tree.is_owned(level, &entry) {
                return false;
            }
            let parent = (entry.parent != NONE).then(|| tree.entries.get(entry.parent).router);
            match show.report(level, parent, entry.router) {
                Ok(()) => tree.set_reported(level, index, true),
                Err(ReportRejection::Contradiction) => {
                    contradictions.push(index);
                    return false;
                }
                Err(ReportRejection::NoRoom) => has_room = false,
            }
            has_room
        });
        for index in contradictions {
            self.contradicted(index, show);
        }
        has_room
    }

    /// Ends the reports of `top` at `level`, and of everything behind it, deepest first.
    fn hide(&mut self, level: usize, top: u32, show: &mut ReportedOwnership<'_>) {
        if self.tree.entries.get(top).first_child == NONE {
            self.hide_one(level, top, show);
            return;
        }
        for index in self.tree.reported_descendants(level, top) {
            self.hide_one(level, index, show);
        }
    }

    fn hide_one(&mut self, level: usize, index: u32, show: &mut ReportedOwnership<'_>) {
        let entry = *self.tree.entries.get(index);
        if entry.is_reported(level) {
            self.tree.set_reported(level, index, false);
            show.unreport(level, entry.router);
        }
    }

    /// Prefetches the memory that storing `blocks` will touch, so that the cache misses overlap.
    fn prefetch(&self, blocks: &[(EngineHash, BlockHash)], show: &ReportedOwnership<'_>) {
        let mut engines = [BlockHash(0); GROUP_BLOCKS];
        let mut routers = [BlockHash(0); GROUP_BLOCKS];
        let places = engines.iter_mut().zip(&mut routers);
        for ((to_engine, to_router), (engine, router)) in places.zip(blocks) {
            (*to_engine, *to_router) = (BlockHash(engine.0), *router);
        }
        let count = blocks.len().min(GROUP_BLOCKS);
        self.tree.prefetch(&engines[..count], &routers[..count]);
        show.ownership.prefetch(show.slot, &routers[..count]);
    }

    /// Prefetches the memory that removing `blocks` will touch, so that the cache misses overlap.
    fn warm_removals(&self, blocks: &[EngineHash], show: &ReportedOwnership<'_>) {
        let mut engines = [BlockHash(0); GROUP_BLOCKS];
        for (to, engine) in engines.iter_mut().zip(blocks) {
            *to = BlockHash(engine.0);
        }
        let count = blocks.len().min(GROUP_BLOCKS);
        self.tree.prefetch(&engines[..count], &[]);
        let mut routers = [BlockHash(0); GROUP_BLOCKS];
        let mut known = 0;
        for block in &blocks[..count] {
            if let Some(index) = self.tree.find(*block) {
                routers[known] = self.tree.entries.get(index).router;
                known += 1;
            }
        }
        self.tree.prefetch(&[], &routers[..known]);
        show.ownership.prefetch(show.slot, &routers[..known]);
    }
}

/// Number of blocks whose memory is prefetched together.
const GROUP_BLOCKS: usize = 32;
