//! Cache of one rank: the engine's blocks as a forest of entries, indexed by both hashes.
//!
//! The entries alone determine which of them count as owned, see [`BlockTree::is_owned`].
//! [`BlockTree::visit_descendants`] and [`BlockTree::reported_descendants`] find what starts or
//! stops counting when an entry is added or removed.

use xxhash_rust::xxh3::xxh3_128;

use crate::ids::{BlockHash, EngineHash, Slot};
use crate::kv_events::entries::{ByEngine, ByRouter, CachedBlock, CachedBlocks, NONE};
use crate::kv_events::tiers::{LEVELS, LOWER_TIERS, LowerTier, TierIndexes};
use crate::ownership::index::RecordIndex;

/// All blocks of one rank; see the module documentation.
pub(super) struct BlockTree {
    pub(super) entries: CachedBlocks,
    by_engine: RecordIndex,
    /// Index by the router's hash, without foreign entries: the first of blocks that look alike.
    by_router: RecordIndex,
    /// Number of entries, including blocks that are gone but kept.
    len: u32,
    /// Number of entries held by some physical block of the GPU.
    live: u32,
    /// Number of entries on each tier below the GPU.
    lower: [u32; LOWER_TIERS],
    /// Number of entries reported at each level.
    reported: [u32; LEVELS],
    /// Number of physical blocks of all entries.
    copies: u64,
    /// Wrapping sum of the entries' hashes.
    sum: u128,
    /// Slot and rank, which make the hashes in `sum` specific to this tree.
    place: [u8; 4],
}

/// Result of storing a block, with the index of its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreResult {
    /// The block is another copy of a known one.
    Copy(u32),
    /// The block is new, or was gone.
    Fresh(u32),
    /// The engine's hash already belongs to another block, which gained a copy.
    Contradiction(u32),
    /// The block was not stored, because there are too many entries.
    Full,
}

impl BlockTree {
    pub(super) fn new(slot: Slot, rank: u16) -> Self {
        let [slot_low, slot_high] = slot.0.to_le_bytes();
        let [rank_low, rank_high] = rank.to_le_bytes();
        Self {
            entries: CachedBlocks::new(),
            by_engine: RecordIndex::new(),
            by_router: RecordIndex::new(),
            len: 0,
            live: 0,
            lower: [0; LOWER_TIERS],
            reported: [0; LEVELS],
            copies: 0,
            sum: 0,
            place: [slot_low, slot_high, rank_low, rank_high],
        }
    }

    /// Returns an empty tree of the same rank.
    pub(super) fn emptied(&self) -> Self {
        let [slot_low, slot_high, rank_low, rank_high] = self.place;
        let slot = Slot(u16::from_le_bytes([slot_low, slot_high]));
        Self::new(slot, u16::from_le_bytes([rank_low, rank_high]))
    }

    /// Returns the number of entries, including blocks that are gone but kept.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the number of entries held by some physical block.
    pub(super) fn live(&self) -> u32 {
        self.live
    }

    /// Returns the number of entries on each tier below the GPU.
    pub(super) fn lower(&self) -> [u32; LOWER_TIERS] {
        self.lower
    }

    /// Returns the number of entries reported at `level`.
    pub(super) fn reported(&self, level: usize) -> u32 {
        self.reported[level]
    }

    /// Returns the number of physical blocks of all entries.
    pub(super) fn copies(&self) -> u64 {
        self.copies
    }

    pub(super) fn sum(&self) -> u128 {
        self.sum
    }

    pub(super) fn find(&self, block: EngineHash) -> Option<u32> {
        let key = BlockHash(block.0);
        self.by_engine.find(key, &ByEngine(&self.entries))
    }

    /// Returns the index of the entry that is not foreign and has this router's hash, if any.
    pub(super) fn find_router(&self, block: BlockHash) -> Option<u32> {
        self.by_router.find(block, &ByRouter(&self.entries))
    }

    /// Prefetches the memory where lookups of these hashes begin.
    pub(super) fn prefetch(&self, engines: &[BlockHash], routers: &[BlockHash]) {
        let engines = self.by_engine.prefetch(engines);
        std::hint::black_box(engines.wrapping_add(self.by_router.prefetch(routers)));
    }

    /// Adds one physical block behind the entry `parent`, or as a first block if it is [`NONE`].
    pub(super) fn store(
        &mut self,
        engine: EngineHash,
        router: BlockHash,
        parent: u32,
    ) -> StoreResult {
        let Some(index) = self.find(engine) else {
            let entry = CachedBlock {
                copies: 1,
                ..CachedBlock::new(engine, router, parent)
            };
            return self.insert(entry);
        };
        let entry = *self.entries.get(index);
        let is_fresh = entry.copies == 0;
        self.live += u32::from(is_fresh);
        self.change(index, |entry| entry.copies = entry.copies.saturating_add(1));
        if (entry.router, entry.parent) != (router, parent) {
            StoreResult::Contradiction(index)
        } else if is_fresh {
            StoreResult::Fresh(index)
        } else {
            StoreResult::Copy(index)
        }
    }

    /// Adds a copy of a known block on `tier`. Returns whether the tier did not hold it before.
    pub(super) fn copy(&mut self, index: u32, tier: LowerTier) -> bool {
        let is_fresh = !self.entries.get(index).is_on(tier);
        self.lower[tier.at()] += u32::from(is_fresh);
        // vLLM's host memory can hold a block in several chunks. Its storage tiers report a block
        // again without having dropped it.
        if is_fresh || tier == LowerTier::Cpu {
            self.change(index, |entry| {
                let copies = &mut entry.lower[tier.at()];
                *copies = copies.saturating_add(1);
            });
        }
        is_fresh
    }

    /// Removes a copy of a block from `tier`. Returns whether it was the last one.
    pub(super) fn take_from(&mut self, index: u32, tier: LowerTier) -> bool {
        let copies = self.entries.get(index).lower[tier.at()];
        if copies > 0 {
            self.lower[tier.at()] -= u32::from(copies == 1);
            self.change(index, |entry| entry.lower[tier.at()] -= 1);
        }
        copies == 1
    }

    /// Adds a block that is on `tier` and nowhere else.
    pub(super) fn insert_below(
        &mut self,
        tier: LowerTier,
        (engine, router): (EngineHash, BlockHash),
        parent: u32,
    ) -> StoreResult {
        let mut entry = CachedBlock::new(engine, router, parent);
        entry.lower[tier.at()] = 1;
        self.insert(entry)
    }

    fn insert(&mut self, mut entry: CachedBlock) -> StoreResult {
        let parent = entry.parent;
        if (parent != NONE && self.entries.get(parent).is_foreign())
            || self.find_router(entry.router).is_some()
        {
            entry.set_foreign();
        }
        let Some(index) = self.entries.insert(entry) else {
            return StoreResult::Full;
        };
        self.enter(index);
        StoreResult::Fresh(index)
    }

    /// Adds an entry to its parent's list of children, to the indexes and to the counts.
    fn enter(&mut self, index: u32) {
        self.link(index);
        let entry = *self.entries.get(index);
        let key = BlockHash(entry.engine.0);
        self.by_engine.insert(key, index, &ByEngine(&self.entries));
        if !entry.is_foreign() {
            self.by_router
                .insert(entry.router, index, &ByRouter(&self.entries));
        }
        self.len += 1;
        self.live += u32::from(entry.copies > 0);
        for tier in LowerTier::ALL {
            self.lower[tier.at()] += u32::from(entry.is_on(tier));
        }
        for level in 0..LEVELS {
            self.reported[level] += u32::from(entry.is_reported(level));
        }
        self.copies += u64::from(entry.copies);
        self.sum = self.sum.wrapping_add(self.hash(&entry));
    }

    /// Removes one physical block of an entry and returns how many it has left.
    pub(super) fn take_copy(&mut self, index: u32) -> u32 {
        let copies = self.entries.get(index).copies;
        if copies > 0 {
            self.live -= u32::from(copies == 1);
            self.change(index, |entry| entry.copies -= 1);
        }
        copies.saturating_sub(1)
    }

    /// Removes an entry that is gone and childless, then ancestors that were kept for it alone.
    pub(super) fn prune(&mut self, mut index: u32) {
        while index != NONE {
            let entry = *self.entries.get(index);
            if !entry.is_gone() || entry.first_child != NONE {
                return;
            }
            self.unlink(&entry);
            self.by_engine.remove(BlockHash(entry.engine.0), index);
            if !entry.is_foreign() {
                self.by_router.remove(entry.router, index);
            }
            self.sum = self.sum.wrapping_sub(self.hash(&entry));
            self.len -= 1;
            self.entries.remove(index);
            index = entry.parent;
        }
    }

    /// Whether an entry counts as owned at `level`: a tier of the level holds it, it is not foreign,
    /// and its parent is reported at the level or it has none.
    pub(super) fn is_owned(&self, level: usize, entry: &CachedBlock) -> bool {
        let is_rooted = entry.parent == NONE || self.entries.get(entry.parent).is_reported(level);
        entry.is_held(level) && !entry.is_foreign() && is_rooted
    }

    /// Returns the indexes of the entries without a parent.
    pub(super) fn roots(&self) -> Vec<u32> {
        let roots = self.entries.iter().filter(|(_, it)| it.parent == NONE);
        roots.map(|(index, _)| index).collect()
    }

    /// Visits `top` and everything behind it, parents first. `visit` returns whether to continue
    /// behind an entry.
    pub(super) fn visit_descendants(
        &mut self,
        top: u32,
        mut visit: impl FnMut(&mut Self, u32) -> bool,
    ) {
        let mut next = vec![top];
        while let Some(index) = next.pop() {
            if visit(self, index) {
                self.for_each_child(index, |child| next.push(child));
            }
        }
    }

    /// Returns the indexes of the entries reported at `level`, at and behind `top`, deepest first.
    pub(super) fn reported_descendants(&self, level: usize, top: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = vec![top];
        while let Some(index) = next.pop() {
            if self.entries.get(index).is_reported(level) {
                found.push(index);
                self.for_each_child(index, |child| next.push(child));
            }
        }
        found.reverse();
        found
    }

    /// Returns the last block of each unbranched chain behind `top`, such as the response to a
    /// prompt. Examines only the newest few chains, and blocks on the GPU.
    pub(super) fn ends_behind(&self, top: u32) -> Vec<BlockHash> {
        const ROWS_MAX: usize = 8;
        const BLOCKS_MAX: usize = 64;
        let mut ends = Vec::new();
        let on_gpu = |mut at: u32| {
            while at != NONE && !self.entries.get(at).is_reported(0) {
                at = self.entries.get(at).next;
            }
            at
        };
        let mut row = on_gpu(self.entries.get(top).first_child);
        for _ in 0..ROWS_MAX {
            let mut at = row;
            for _ in 0..BLOCKS_MAX {
                if at == NONE {
                    break;
                }
                let entry = self.entries.get(at);
                let child = on_gpu(entry.first_child);
                if child == NONE {
                    ends.push(entry.router);
                    break;
                }
                let is_branch = on_gpu(self.entries.get(child).next) != NONE;
                at = if is_branch { NONE } else { child };
            }
            if row == NONE {
                break;
            }
            row = on_gpu(self.entries.get(row).next);
        }
        ends
    }

    pub(super) fn set_reported(&mut self, level: usize, index: u32, is_reported: bool) {
        let was_reported = self.entries.get(index).is_reported(level);
        self.reported[level] += u32::from(is_reported);
        self.reported[level] -= u32::from(was_reported);
        self.change(index, |entry| entry.set_reported(level, is_reported));
    }

    /// Marks an entry as foreign, because it only looks like the block of its router's hash.
    pub(super) fn set_foreign(&mut self, index: u32) {
        let entry = *self.entries.get(index);
        if !entry.is_foreign() {
            self.by_router.remove(entry.router, index);
            self.change(index, CachedBlock::set_foreign);
        }
    }

    /// Reports the entries that are reported at `level` to its index, parents first.
    pub(super) fn report_to(&self, tiers: &mut TierIndexes, slot: Slot, level: usize) {
        tiers.begin(level, slot);
        let index_of_level = tiers.at(level);
        let mut next = self.roots();
        while let Some(index) = next.pop() {
            let entry = self.entries.get(index);
            if entry.is_reported(level) {
                let parent = (entry.parent != NONE).then(|| self.entries.get(entry.parent).router);
                let _ = index_of_level.report(slot, parent, entry.router, &mut Vec::new());
                self.for_each_child(index, |child| next.push(child));
            }
        }
    }

    fn for_each_child(&self, index: u32, mut visit: impl FnMut(u32)) {
        let mut child = self.entries.get(index).first_child;
        while child != NONE {
            visit(child);
            child = self.entries.get(child).next;
        }
    }

    fn link(&mut self, index: u32) {
        let parent = self.entries.get(index).parent;
        if parent == NONE {
            return;
        }
        let first = self.entries.get(parent).first_child;
        self.entries.get_mut(index).next = first;
        if first != NONE {
            self.entries.get_mut(first).prev = index;
        }
        self.entries.get_mut(parent).first_child = index;
    }

    fn unlink(&mut self, entry: &CachedBlock) {
        if entry.prev != NONE {
            self.entries.get_mut(entry.prev).next = entry.next;
        } else if entry.parent != NONE {
            self.entries.get_mut(entry.parent).first_child = entry.next;
        }
        if entry.next != NONE {
            self.entries.get_mut(entry.next).prev = entry.prev;
        }
    }

    fn change(&mut self, index: u32, change: impl FnOnce(&mut CachedBlock)) {
        let (before, copies) = (
            self.hash(self.entries.get(index)),
            self.entries.get(index).copies,
        );
        change(self.entries.get_mut(index));
        let after = self.hash(self.entries.get(index));
        self.copies += u64::from(self.entries.get(index).copies);
        self.copies -= u64::from(copies);
        self.sum = self.sum.wrapping_sub(before).wrapping_add(after);
    }

    /// Returns the contribution of an entry to `sum`. It does not depend on the entry's index.
    fn hash(&self, entry: &CachedBlock) -> u128 {
        let parent = (entry.parent != NONE).then(|| self.entries.get(entry.parent).engine.0);
        let mut bytes = [0_u8; 33 + 1 + LOWER_TIERS];
        bytes[..4].copy_from_slice(&self.place);
        bytes[4..12].copy_from_slice(&entry.engine.0.to_le_bytes());
        bytes[12..20].copy_from_slice(&entry.router.0.to_le_bytes());
        bytes[20..28].copy_from_slice(&parent.unwrap_or(0).to_le_bytes());
        bytes[28..32].copy_from_slice(&entry.copies.to_le_bytes());
        let flags = [parent.is_some(), entry.is_foreign(), entry.is_reported(0)];
        bytes[32] = flags
            .iter()
            .fold(0, |bits, flag| bits << 1 | u8::from(*flag));
        bytes[33] = (1..LEVELS).fold(0, |bits, level| {
            bits << 1 | u8::from(entry.is_reported(level))
        });
        bytes[34..].copy_from_slice(&entry.lower);
        // Without lower tiers, nothing of them is hashed, which costs nothing then.
        let has_lower = bytes[33..].iter().any(|byte| *byte != 0);
        xxh3_128(if has_lower { &bytes } else { &bytes[..33] })
    }

    /// Rebuilds the indexes, lists and counts from the entries.
    ///
    /// # Errors
    /// Describes the first fault of the entries.
    pub(super) fn rebuild(&mut self) -> Result<(), String> {
        self.check_paths()?;
        let present: Vec<u32> = self.entries.iter().map(|(index, _)| index).collect();
        self.by_engine = RecordIndex::with_room(present.len());
        self.by_router = RecordIndex::with_room(present.len());
        (self.len, self.live, self.sum) = (0, 0, 0);
        (self.lower, self.reported) = ([0; LOWER_TIERS], [0; LEVELS]);
        self.copies = 0;
        for &index in &present {
            let entry = *self.entries.get(index);
            let is_known = self.find(entry.engine).is_some();
            if is_known || !entry.is_foreign() && self.find_router(entry.router).is_some() {
                return Err(format!("{entry:?} stands twice"));
            }
            self.enter(index);
        }
        Ok(())
    }

    /// Checks that the path of parents of every entry leads to a first block.
    fn check_paths(&self) -> Result<(), String> {
        const UNKNOWN: u8 = 0;
        const ON_PATH: u8 = 1;
        const GOOD: u8 = 2;
        let mut marks = vec![UNKNOWN; self.entries.len() as usize];
        for (start, _) in self.entries.iter() {
            let mut at = start;
            while at != NONE && marks[at as usize] == UNKNOWN {
                marks[at as usize] = ON_PATH;
                at = self.entries.get(at).parent;
                if at != NONE && self.entries.present(at).is_none() {
                    return Err(format!("entry {start} follows one that is not there"));
                }
            }
            if at != NONE && marks[at as usize] == ON_PATH {
                return Err(format!("entry {start} follows itself"));
            }
            let mut at = start;
            while at != NONE && marks[at as usize] == ON_PATH {
                marks[at as usize] = GOOD;
                at = self.entries.get(at).parent;
            }
        }
        Ok(())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.entries.memory_bytes() + self.by_engine.memory_bytes() + self.by_router.memory_bytes()
    }

    /// Checks counts, sum and lists from scratch, and that at each of the reported `levels` exactly
    /// the owned entries are reported. An error describes the first violation.
    pub(super) fn check(&self, levels: [bool; LEVELS]) -> Result<(), String> {
        let (mut len, mut live, mut sum, mut links) = (0, 0, 0_u128, 0);
        let (mut lower, mut reported) = ([0; LOWER_TIERS], [0; LEVELS]);
        let mut copies = 0;
        for (index, entry) in self.entries.iter() {
            len += 1;
            copies += u64::from(entry.copies);
            live += u32::from(entry.copies > 0);
            for tier in LowerTier::ALL {
                lower[tier.at()] += u32::from(entry.is_on(tier));
            }
            sum = sum.wrapping_add(self.hash(entry));
            let mut children = 0;
            self.for_each_child(index, |child| {
                children += u32::from(self.entries.get(child).parent == index);
            });
            links += children + u32::from(entry.parent == NONE);
            let is_found = self.find(entry.engine) == Some(index);
            let is_claimed = self.find_router(entry.router) == Some(index);
            if !is_found || is_claimed == entry.is_foreign() {
                return Err(format!("{entry:?} is not found"));
            }
            if entry.is_gone() && entry.first_child == NONE {
                return Err(format!("{entry:?} is gone and kept for nothing"));
            }
            for (level, is_shown) in levels.into_iter().enumerate() {
                reported[level] += u32::from(entry.is_reported(level));
                if entry.is_reported(level) != (is_shown && self.is_owned(level, entry)) {
                    return Err(format!("{entry:?} is wrongly reported or not at {level}"));
                }
            }
        }
        let counts = (len, live, lower, reported, sum, links, copies);
        let kept = (
            self.len,
            self.live,
            self.lower,
            self.reported,
            self.sum,
            len,
            self.copies,
        );
        if counts != kept {
            return Err(format!("counts are {counts:?}, kept {kept:?}"));
        }
        Ok(())
    }
}
