//! The writer's side of the view: adds blocks to segments and removes them, and rebuilds a shard's
//! table when it is full.
//!
//! **An owned block is at exactly one place**: in the segment of the block before it, or at the
//! head of its own segment. So readers need not look for a block twice. A block joins the segment
//! of the one before it only if no other block follows there, and only if it is not yet a head.
//!
//! A rebuild affects one shard of about ten thousand blocks, so no change of the index takes long.
//! Tables grow by a factor of only 1.18, because slack costs memory.

use std::sync::atomic::Ordering::Relaxed;

use crate::ids::{BlockHash, Slot};
use crate::view::directory::Directory;
use crate::view::segment::{ChainSegment, SEGMENT_BLOCKS, SegmentShape, lane_words};
use crate::view::sync::{Arc, Ordering};
use crate::view::table::{Probed, Table};
use crate::view::{BlockView, SHARDS, shard_of};

/// Percentage of used entries above which a table is rebuilt.
const LOAD_MAX: usize = 85;
/// Percentage of used entries directly after a rebuild.
const LOAD_FRESH: usize = 72;
/// Number of entries in the smallest table.
const CAPACITY_MIN: usize = 8;
/// Minimum number of free row words directly after a rebuild. Loom models change rows in place,
/// without a rebuild in between.
const ROW_SLACK_MIN: usize = if cfg!(loom) { 128 } else { 16 };
/// Minimum number of further blocks for which an extended segment gets room.
const GROWTH_MIN: usize = 4;

/// Place of an owned block in the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockPlace {
    /// First block of the segment that holds the block.
    pub(crate) head: BlockHash,
    /// Distance from the head to the block, in blocks.
    pub(crate) behind: u8,
}

/// Writer of the index that all handles of one [`BlockView`] read. Each index has exactly one.
pub(crate) struct ViewWriter {
    view: BlockView,
    /// Current directory, as last published.
    directory: Directory,
    shards: Vec<Shard>,
    /// Number of words in a mask of all slots seen so far.
    width: usize,
}

impl ViewWriter {
    /// Creates an empty index of `shards` shards, a power of two up to [`SHARDS`].
    pub(crate) fn new(shards: usize) -> Self {
        assert!(
            shards.is_power_of_two() && shards <= SHARDS,
            "{shards} shards"
        );
        // One unused entry ends all probes; the first insertion builds a real table.
        let empty = Table::new(1, 0);
        let directory = Directory::of(&empty);
        Self {
            view: BlockView::over(directory.clone(), shards),
            directory,
            shards: (0..shards).map(|_| Shard::new(empty.clone())).collect(),
            width: 0,
        }
    }

    /// Returns the readers' handle to the index.
    pub(crate) fn view(&self) -> &BlockView {
        &self.view
    }

    /// Makes room for `slot`. Must precede the first insertion for this slot.
    pub(crate) fn admit(&mut self, slot: Slot) {
        self.width = self.width.max(usize::from(slot.0) / 64 + 1);
        self.view.shared.width.store(self.width, Ordering::Release);
    }

    /// Prefetches the memory that changes to the segments of `heads` will touch. Returning the sum
    /// keeps the compiler from removing the loads.
    pub(crate) fn prefetch(&self, heads: &[BlockHash]) -> u64 {
        let load = |&head: &BlockHash| self.shards[self.shard_of(head)].table.prefetch(head);
        heads.iter().map(load).fold(0, u64::wrapping_add)
    }

    /// Makes `slot` an owner of `blocks`, none of which it owns: consecutive blocks of a chain that
    /// follow the block at `after`, which it owns (`None` from the first block on). Calls `placed`
    /// with each block's distance from the head of its segment, in order.
    pub(crate) fn append(
        &mut self,
        slot: Slot,
        after: Option<BlockPlace>,
        blocks: &[BlockHash],
        mut placed: impl FnMut(u8),
    ) {
        let mut last = after;
        let mut rest = blocks;
        while let Some(&next) = rest.first() {
            let extended = last.map(|last| (last, self.extend(slot, last, rest)));
            let (head, from, added) = match extended {
                Some((last, added)) if added > 0 => {
                    (last.head, usize::from(last.behind) + 1, added)
                }
                _ => (next, 0, self.begin(slot, last, rest)),
            };
            let until = from + added;
            (from..until).for_each(|behind| placed(behind as u8));
            last = Some(BlockPlace {
                head,
                behind: (until - 1) as u8,
            });
            rest = &rest[added..];
        }
        let added = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        self.count(slot, |owned| owned.saturating_add(added));
    }

    /// Adds leading `blocks` to the segment of the block at `last`, and returns how many it added;
    /// 0 if they need their own segment.
    fn extend(&mut self, slot: Slot, last: BlockPlace, blocks: &[BlockHash]) -> usize {
        let from = usize::from(last.behind) + 1;
        let at = self.shard_of(last.head);
        let Some((entry, segment)) = self.shards[at].find(last.head) else {
            return 0;
        };
        let shape = segment.shape();
        let written = (from..shape.filled).zip(blocks);
        let known = written.take_while(|&(nth, &block)| segment.hash(nth) == block);
        let known = known.count();
        if known > 0 {
            segment.set_owned(slot.0, from + known, shape.filled);
            return known;
        }
        let added = shape.room().saturating_sub(from).min(blocks.len());
        if from != shape.filled || added == 0 || self.is_head(blocks[0]) {
            return 0;
        }
        let wanted = SegmentShape {
            filled: from + added,
            ..shape
        };
        self.change(at, |shard| {
            let entry = if wanted.filled > shape.capacity {
                shard.relocate(last.head, with_slack(wanted, GROWTH_MIN))?
            } else {
                entry
            };
            let segment = shard.segment(entry);
            segment.write_hashes(from, blocks[..added].iter().copied());
            segment.set_owned(slot.0, wanted.filled, wanted.filled);
            Ok(())
        });
        added
    }

    /// Adds leading `blocks` at the head of a segment, and returns how many it added. `last` is the
    /// place of the block before them, or `None` if they begin a chain.
    fn begin(&mut self, slot: Slot, last: Option<BlockPlace>, blocks: &[BlockHash]) -> usize {
        let head = blocks[0];
        let at = self.shard_of(head);
        if self.is_head(head) {
            self.change(at, |shard| shard.join(head, slot));
            return 1;
        }
        let base = last.map_or(0, |last| self.position_after(last));
        let added = blocks.len().min(SEGMENT_BLOCKS - base);
        let shape = SegmentShape {
            base,
            filled: added,
            capacity: added,
            lane_words: 1,
        };
        self.change(at, |shard| {
            let entry = shard.create(head, with_slack(shape, 0))?;
            let segment = shard.segment(entry);
            segment.write_hashes(1, blocks[1..added].iter().copied());
            segment.set_owned(slot.0, added, added);
            Ok(())
        });
        added
    }

    /// Returns the position in its window of the block that follows the one at `last`.
    fn position_after(&self, last: BlockPlace) -> usize {
        let shard = &self.shards[self.shard_of(last.head)];
        let base = shard
            .find(last.head)
            .map_or(0, |(_, segment)| segment.shape().base);
        (base + usize::from(last.behind) + 1) % SEGMENT_BLOCKS
    }

    /// Whether a segment starts with `block`.
    pub(crate) fn is_head(&self, block: BlockHash) -> bool {
        self.shards[self.shard_of(block)].find(block).is_some()
    }

    /// Ends `slot`'s ownership of the block at `place`, which must be the last one that it owns in
    /// the segment.
    pub(crate) fn remove(&mut self, slot: Slot, place: BlockPlace) {
        self.shorten(slot, place.head, usize::from(place.behind));
    }

    /// Ends `slot`'s ownership of all blocks in the segment of `head`. Readers must no longer see
    /// `slot` as an owner of blocks that follow.
    pub(crate) fn clear(&mut self, slot: Slot, head: BlockHash) {
        self.shorten(slot, head, 0);
    }

    /// Limits the blocks that `slot` owns in the segment of `head` to the first `kept`.
    fn shorten(&mut self, slot: Slot, head: BlockHash, kept: usize) {
        let at = self.shard_of(head);
        let shard = &mut self.shards[at];
        let Some((entry, segment)) = shard.find(head) else {
            return;
        };
        let owned = segment.owned(slot.0);
        if owned <= kept {
            return;
        }
        segment.set_owned(slot.0, kept, segment.shape().filled);
        let mut is_owned = kept > 0;
        if !is_owned {
            segment.for_each_owner(|_, _| is_owned = true);
        }
        if !is_owned {
            shard.table.make_tombstone(entry.entry);
            shard.live -= 1;
        }
        self.count(slot, |before| before.saturating_sub((owned - kept) as u32));
    }

    /// Applies `change` to the shard with the number `at`. If it lacks room, rebuilds its table,
    /// retries and publishes the new table.
    fn change(&mut self, at: usize, change: impl Fn(&mut Shard) -> Result<(), NoRoom>) {
        let shard = &mut self.shards[at];
        let Err(NoRoom { words }) = change(shard) else {
            return;
        };
        shard.rebuild(words);
        let is_done = change(shard).is_ok();
        debug_assert!(is_done, "a rebuilt table has no room for {words} words");
        self.directory.set(at, shard.table.clone());
        self.publish();
    }

    fn shard_of(&self, block: BlockHash) -> usize {
        shard_of(block, self.view.shared.shard_bits)
    }

    fn publish(&self) {
        let directory = Arc::new(self.directory.clone());
        self.view.shared.directory.publish(directory);
    }

    /// Applies `change` to the number of blocks that `slot` owns. With a single writer, a load and
    /// a store are exact.
    fn count(&self, slot: Slot, change: impl Fn(u32) -> u32) {
        if let Some(owned) = self.view.shared.owned.get(usize::from(slot.0)) {
            owned.store(change(owned.load(Relaxed)), Relaxed);
        }
    }

    /// Creates an index with the same number of shards that no reader sees, for [`Self::adopt`].
    pub(crate) fn unpublished(&self) -> Self {
        Self::new(self.shards.len())
    }

    /// Publishes the content of `other` to this writer's readers. Each of their calls sees either
    /// the old index or the new one.
    pub(crate) fn adopt(&mut self, other: Self) {
        self.width = other.width;
        self.view.shared.width.store(self.width, Ordering::Release);
        self.shards = other.shards;
        self.directory = other.directory;
        for (owned, fresh) in self.view.shared.owned.iter().zip(&other.view.shared.owned) {
            owned.store(fresh.load(Relaxed), Relaxed);
        }
        self.publish();
    }

    /// Whether the view shows `slot` as an owner of `block`, which is at `place`.
    pub(crate) fn shows(&self, slot: Slot, place: BlockPlace, block: BlockHash) -> bool {
        let found = self.shards[self.shard_of(place.head)].find(place.head);
        found.is_some_and(|(_, segment)| {
            let behind = usize::from(place.behind);
            let is_there = behind == 0 && block == place.head
                || behind > 0 && behind < segment.shape().filled && block == segment.hash(behind);
            is_there && behind < segment.owned(slot.0)
        })
    }

    /// Returns the number of pairs of block and owner in the view.
    pub(crate) fn pairs(&self) -> u64 {
        let mut pairs = 0;
        for Shard { table, .. } in &self.shards {
            table.for_each(|_, segment| segment.for_each_owner(|_, owned| pairs += owned as u64));
        }
        pairs
    }

    /// Returns the heap size of the tables in bytes, without older tables that readers still hold.
    pub(crate) fn memory_bytes(&self) -> usize {
        let tables = self.shards.iter().map(|shard| shard.table.memory_bytes());
        let shards = self.shards.len();
        tables.sum::<usize>() + shards * size_of::<Shard>() + Directory::memory_bytes(shards)
    }
}

/// Returns `shape` with room for a quarter more blocks, and at least for `least`, if the segment
/// may grow.
fn with_slack(shape: SegmentShape, least: usize) -> SegmentShape {
    let more = (shape.filled / 4).max(least);
    let capacity = (shape.filled + more).min(shape.room()).max(shape.filled);
    SegmentShape { capacity, ..shape }
}

/// Error of a change for which the table has no room: it lacks an entry for a key, or a row of this
/// many words.
#[derive(Debug, Clone, Copy)]
struct NoRoom {
    words: usize,
}

/// Table of one shard with the writer's bookkeeping.
struct Shard {
    table: Table,
    /// Number of entries with a key, tombstones included.
    used: usize,
    /// Number of entries with a segment.
    live: usize,
    /// Number of row words allocated.
    row_words_used: usize,
}

/// Entry with a segment, and the start of its row.
#[derive(Debug, Clone, Copy)]
struct SegmentEntry {
    entry: usize,
    row: usize,
}

impl Shard {
    fn new(table: Table) -> Self {
        Self {
            table,
            used: 0,
            live: 0,
            row_words_used: 0,
        }
    }

    fn find(&self, head: BlockHash) -> Option<(SegmentEntry, ChainSegment<'_>)> {
        match self.table.probe(head) {
            Probed::Segment { entry, row } => {
                Some((SegmentEntry { entry, row }, self.table.segment_at(row)))
            }
            Probed::Unused(_) | Probed::Tombstone(_) => None,
        }
    }

    fn segment(&self, at: SegmentEntry) -> ChainSegment<'_> {
        self.table.segment_at(at.row)
    }

    /// Allocates `words` words for a row and returns where they start.
    fn allocate(&mut self, words: usize) -> Result<usize, NoRoom> {
        let row = self.row_words_used;
        if row + words > self.table.row_words() {
            return Err(NoRoom { words });
        }
        self.row_words_used += words;
        Ok(row)
    }

    /// Creates a segment for `head`, which must have none. Readers see it without owners.
    fn create(&mut self, head: BlockHash, shape: SegmentShape) -> Result<SegmentEntry, NoRoom> {
        let words = shape.words();
        let probed = self.table.probe(head);
        let is_new = matches!(probed, Probed::Unused(_));
        if is_new && (self.used + 1) * 100 > self.table.capacity() * LOAD_MAX {
            return Err(NoRoom { words });
        }
        let row = self.allocate(words)?;
        self.table.initialise_segment(row, shape);
        let (Probed::Unused(entry) | Probed::Tombstone(entry) | Probed::Segment { entry, .. }) =
            probed;
        if is_new {
            self.table.insert_key(entry, head, row);
            self.used += 1;
        } else {
            self.table.set_row(entry, row);
        }
        self.live += 1;
        Ok(SegmentEntry { entry, row })
    }

    /// Makes `slot` an owner of `head` alone, which must have a segment.
    fn join(&mut self, head: BlockHash, slot: Slot) -> Result<(), NoRoom> {
        let Some((_, segment)) = self.find(head) else {
            return Ok(());
        };
        let shape = segment.shape();
        if segment.set_owned(slot.0, 1, shape.filled) {
            return Ok(());
        }
        let wider = SegmentShape {
            lane_words: shape.lane_words * 2,
            ..shape
        };
        let entry = self.relocate(head, wider)?;
        self.segment(entry).set_owned(slot.0, 1, shape.filled);
        Ok(())
    }

    /// Moves the segment of `head` to a row of the given shape.
    fn relocate(&mut self, head: BlockHash, shape: SegmentShape) -> Result<SegmentEntry, NoRoom> {
        let words = shape.words();
        let Probed::Segment { entry, row } = self.table.probe(head) else {
            return Err(NoRoom { words });
        };
        let fresh = self.allocate(words)?;
        copy_segment(&self.table.segment_at(row), &self.table, fresh, shape);
        self.table.set_row(entry, fresh);
        Ok(SegmentEntry { entry, row: fresh })
    }

    /// Moves the segments to a new table with room for at least one more key and a row of `words`.
    fn rebuild(&mut self, words: usize) {
        let old = self.table.clone();
        let mut row_words_live = 0;
        old.for_each(|_, segment| row_words_live += compact(&segment).words());
        let capacity = ((self.live + 1) * 100)
            .div_ceil(LOAD_FRESH)
            .max(CAPACITY_MIN);
        let slack = (row_words_live / 6 + words).max(ROW_SLACK_MIN);
        let table = Table::new(capacity, row_words_live + slack);
        let mut fresh = Self::new(table);
        old.for_each(|head, segment| {
            let shape = compact(&segment);
            let row = fresh.row_words_used;
            fresh.row_words_used += shape.words();
            copy_segment(&segment, &fresh.table, row, shape);
            if let Probed::Unused(entry) = fresh.table.probe(head) {
                fresh.table.insert_key(entry, head, row);
                fresh.live += 1;
            }
        });
        debug_assert_eq!(fresh.live, self.live, "segments miscounted");
        fresh.used = fresh.live;
        *self = fresh;
    }
}

/// Returns the smallest shape that fits a segment's owners and owned blocks.
fn compact(segment: &ChainSegment<'_>) -> SegmentShape {
    let (mut owners, mut filled) = (0, 1);
    segment.for_each_owner(|_, owned| {
        owners += 1;
        filled = owned.max(filled);
    });
    SegmentShape {
        base: segment.shape().base,
        filled,
        capacity: filled,
        lane_words: lane_words(owners),
    }
}

/// Copies a segment to an unused row of the given shape.
fn copy_segment(from: &ChainSegment<'_>, table: &Table, row: usize, shape: SegmentShape) {
    let written = shape.filled.min(from.shape().filled);
    let to = table.initialise_segment(
        row,
        SegmentShape {
            filled: written,
            ..shape
        },
    );
    to.write_hashes(1, (1..written).map(|nth| from.hash(nth)));
    let mut nth = 0;
    from.for_each_owner(|slot, owned| {
        to.put_owner(nth, slot, owned, written);
        nth += 1;
    });
}
