//! The writer's side of the view: sets and clears owners, and rebuilds a shard's table when it is
//! full.
//!
//! A rebuild affects one shard of at most a few thousand entries, so no change of the index takes
//! long. Tables grow by a factor of only 1.18, because their slack costs memory.

use std::sync::atomic::Ordering::Relaxed;

use crate::ids::{BlockHash, Slot};
use crate::view::directory::Directory;
use crate::view::mask::{Mask, WORDS_MAX};
use crate::view::sync::{Arc, Ordering};
use crate::view::table::{Owners, Table, UNUSED, row_words};
use crate::view::{BlockView, SHARDS, shard_of};

/// Percentage of used slots above which a table is rebuilt.
const LOAD_MAX: usize = 85;
/// Percentage of used slots directly after a rebuild.
const LOAD_FRESH: usize = 72;
/// Number of slots of the smallest table.
const CAPACITY_MIN: usize = 8;

/// The writer behind all handles of one [`BlockView`]. There is one per index.
pub(crate) struct ViewWriter {
    view: BlockView,
    /// As published.
    directory: Directory,
    shards: Vec<Shard>,
    /// Number of words in a bitmap of all slots seen so far.
    width: usize,
}

impl ViewWriter {
    /// Creates an empty index of `shards` shards, a power of two up to [`SHARDS`].
    pub(crate) fn new(shards: usize) -> Self {
        assert!(
            shards.is_power_of_two() && shards <= SHARDS,
            "{shards} shards"
        );
        // One unused entry: probes end there, and the first insertion builds a real table.
        let empty = Table::new(1, 0, 1);
        let directory = Directory::of(&empty);
        Self {
            view: BlockView::over(directory.clone(), shards),
            directory,
            shards: (0..shards).map(|_| Shard::new(empty.clone())).collect(),
            width: 1,
        }
    }

    /// Returns a handle for readers.
    pub(crate) fn view(&self) -> &BlockView {
        &self.view
    }

    /// Makes room for `slot`. Must precede the first insertion for it.
    pub(crate) fn admit(&mut self, slot: Slot) {
        self.width = self.width.max(usize::from(slot.0) / 64 + 1);
        self.view.shared.width.store(self.width, Ordering::Release);
    }

    /// Prefetches the memory that changes of `blocks` will touch, see [`crate::ownership`]. The sum
    /// keeps the compiler from removing the loads.
    pub(crate) fn warm(&self, blocks: &[BlockHash]) -> u32 {
        let load = |&block: &BlockHash| self.shards[self.shard_of(block)].table.warm(block);
        blocks.iter().map(load).fold(0, u32::wrapping_add)
    }

    /// Makes `slot` an owner of `block`.
    pub(crate) fn insert(&mut self, slot: Slot, block: BlockHash) {
        let at = self.shard_of(block);
        let shard = &mut self.shards[at];
        if shard.insert(slot.0, block, self.width) {
            self.directory.set(at, shard.table.clone());
            self.publish();
        }
        self.count(slot, |owned| owned.saturating_add(1));
    }

    /// Ends `slot`'s ownership of `block`.
    pub(crate) fn remove(&mut self, slot: Slot, block: BlockHash) {
        let at = self.shard_of(block);
        self.shards[at].remove(slot.0, block);
        self.count(slot, |owned| owned.saturating_sub(1));
    }

    fn shard_of(&self, block: BlockHash) -> usize {
        shard_of(block, self.view.shared.shard_bits)
    }

    fn publish(&self) {
        let directory = Arc::new(self.directory.clone());
        self.view.shared.directory.publish(directory);
    }

    /// Changes the count of `slot`. With a single writer, a load and a store are exact.
    fn count(&self, slot: Slot, change: impl Fn(u32) -> u32) {
        if let Some(owned) = self.view.shared.owned.get(usize::from(slot.0)) {
            owned.store(change(owned.load(Relaxed)), Relaxed);
        }
    }

    /// Creates an index with as many shards that no reader sees, to be filled for [`Self::adopt`].
    pub(crate) fn unpublished(&self) -> Self {
        Self::new(self.shards.len())
    }

    /// Publishes `other`'s content to this writer's readers. Each call of theirs sees the old index or
    /// the new one.
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

    /// Returns the number of pairs of block and owner in the view.
    pub(crate) fn pairs(&self) -> u64 {
        let mut pairs = 0;
        for Shard { table, .. } in &self.shards {
            table.for_each(|_, owners| pairs += table.mask::<WORDS_MAX>(owners).count() as u64);
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

/// The writer's bookkeeping for one shard's table.
struct Shard {
    table: Table,
    /// Number of slots with a key, tombstones included.
    used: usize,
    /// Number of slots with an owner.
    live: usize,
    /// Number of row words allocated.
    row_words_used: usize,
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

    /// Inserts an owner. Returns whether the table was replaced and must be published.
    fn insert(&mut self, slot: u16, block: BlockHash, width: usize) -> bool {
        if self.try_insert(slot, block) {
            return false;
        }
        self.rebuild(width);
        let has_room = self.try_insert(slot, block);
        assert!(has_room, "a rebuilt table has no room for slot {slot}");
        true
    }

    /// Inserts an owner in place. Returns `false`, without a change, if the table has no room.
    fn try_insert(&mut self, slot: u16, block: BlockHash) -> bool {
        let (at, word) = self.table.find(block);
        if word == UNUSED {
            if (self.used + 1) * 100 > self.table.capacity() * LOAD_MAX {
                return false;
            }
            self.table.occupy(at, block, Owners::inline(&[slot]));
            self.used += 1;
            self.live += 1;
            return true;
        }
        let owners = Owners::decode(word);
        if self.table.contains(owners, slot) {
            return true;
        }
        match owners {
            Owners::Nobody => {
                self.table.set_owners(at, Owners::inline(&[slot]));
                self.live += 1;
                true
            }
            Owners::Inline([a, b, c]) if b == c => {
                let slots = if a == b {
                    &[a, slot][..]
                } else {
                    &[a, b, slot]
                };
                self.table.set_owners(at, Owners::inline(slots));
                true
            }
            Owners::List { .. } | Owners::Bitmap { .. } if self.table.row_insert(owners, slot) => {
                true
            }
            Owners::Inline(_) | Owners::List { .. } | Owners::Bitmap { .. } => {
                self.move_to_row(at, owners, slot)
            }
        }
    }

    /// Adds `slot` to the owners of the key at `at` by moving them to a new row. Returns `false`,
    /// without a change, if the table has no room.
    fn move_to_row(&mut self, at: usize, owners: Owners, slot: u16) -> bool {
        let table = &self.table;
        let mut slots = table.mask::<WORDS_MAX>(owners);
        slots.insert(slot);
        let words = row_words(slots.count(), table.width);
        let row = self.row_words_used;
        // Slots beyond the table's width need the wider bitmaps of a rebuilt table.
        let is_wide = slots.0[table.width..].iter().any(|&bits| bits != 0);
        if is_wide || row + words > table.row_words() {
            return false;
        }
        table.set_owners(at, table.row_write(row, &slots));
        self.row_words_used += words;
        true
    }

    fn remove(&mut self, slot: u16, block: BlockHash) {
        let (at, word) = self.table.find(block);
        let owners = Owners::decode(word);
        if !self.table.contains(owners, slot) {
            return;
        }
        let rest = match owners {
            Owners::Inline([a, b, c]) => match (a == slot, b == slot, c == slot) {
                (true, true, _) => Owners::Nobody,
                (true, false, _) => Owners::inline(&[b, c]),
                (false, true, true) => Owners::inline(&[a]),
                (false, true, false) => Owners::inline(&[a, c]),
                (false, false, _) => Owners::inline(&[a, b]),
            },
            Owners::List { .. } | Owners::Bitmap { .. } => {
                if !self.table.row_remove(owners, slot) {
                    return;
                }
                Owners::Nobody
            }
            Owners::Nobody => return,
        };
        self.table.set_owners(at, rest);
        if rest == Owners::Nobody {
            self.live -= 1;
        }
    }

    /// Moves the live entries to a table with room for at least one more key and one more row.
    fn rebuild(&mut self, width: usize) {
        let width = width.max(self.table.width);
        let old = self.table.clone();
        let mut row_words_live = 0;
        let mut has_rows = false;
        old.for_each(|_, owners| match owners {
            Owners::Nobody => {}
            Owners::Inline([a, b, c]) => has_rows |= a != b && b != c,
            Owners::List { .. } | Owners::Bitmap { .. } => {
                let count = old.mask::<WORDS_MAX>(owners).count();
                has_rows = true;
                row_words_live += if count > 3 {
                    row_words(count, width)
                } else {
                    0
                };
            }
        });
        let slack = if has_rows {
            row_words_live / 4 + 2 * width.max(4)
        } else {
            0
        };
        let capacity = ((self.live + 1) * 100)
            .div_ceil(LOAD_FRESH)
            .max(CAPACITY_MIN);
        let table = Table::new(capacity, row_words_live + slack, width);
        let mut row = 0;
        let mut live = 0;
        old.for_each(|block, owners| {
            let owners = match owners {
                Owners::Nobody | Owners::Inline(_) => owners,
                Owners::List { .. } | Owners::Bitmap { .. } => {
                    copy_row(&table, &mut row, &old.mask::<WORDS_MAX>(owners))
                }
            };
            table.occupy(table.find(block).0, block, owners);
            live += 1;
        });
        debug_assert_eq!(live, self.live, "live entries miscounted");
        *self = Self {
            table,
            used: live,
            live,
            row_words_used: row,
        };
    }
}

/// Copies a row, whose slots are `slots` now, into another table in the cheapest form.
fn copy_row(table: &Table, row: &mut usize, slots: &Mask<WORDS_MAX>) -> Owners {
    let count = slots.count();
    if count > 3 {
        let at = *row;
        *row += row_words(count, table.width);
        return table.row_write(at, slots);
    }
    let mut few = [0_u16; 3];
    let mut next = few.iter_mut();
    slots.for_each(|slot| {
        if let Some(place) = next.next() {
            *place = slot;
        }
    });
    Owners::inline(&few[..count])
}
