//! One shard's table: block hash to set of owners, written by one thread while others read.
//!
//! The table uses open addressing with linear probing over slots of three words,
//! `[key low, key high, owners]`. It is sound without locks because **a key is written once within
//! a table**. The writer stores the two key words, then `owners` with Release. A reader loads
//! `owners` first, with Acquire, so a used slot has a key that never changes. A block that lost its
//! last owner keeps its key, as a tombstone. Growing and dropping tombstones means building another
//! table and publishing that.
//!
//! `owners` holds up to three slots itself. More than three are stored in a *row*: a run of words
//! in an area beside the slots, allocated to one key and never to another. A row is a list of
//! 16-bit slots while they are few, else a bitmap. Rows change in place, one atomic word at a time.
//! A reader may therefore see a set that is a moment old or halfway through several changes, but
//! never an owner that the block never had. Inline slots and lists bound the cost of a block with
//! `k` owners to about `12 + 4k` bytes for any number of backends; bitmaps alone would cost 128
//! bytes at 1,024 backends.

use std::sync::Arc;

use crate::ids::BlockHash;
use crate::view::mask::Mask;
use crate::view::sync::{AtomicU32, AtomicU64, Ordering};

/// `owners` of a slot that was never used, which ends a probe.
pub(super) const UNUSED: u32 = 0;
/// `owners` of a tombstone.
pub(super) const NOBODY: u32 = 1;
/// A vacant place in a list row.
const VACANT: u16 = u16::MAX;
/// Flag of `owners` words that hold up to three slots of ten bits each. Unused places repeat the
/// last slot.
const INLINE: u32 = 1 << 31;
const INLINE_BITS: u32 = 10;
const INLINE_SLOT: u32 = (1 << INLINE_BITS) - 1;
/// Position of the row's kind, above its offset: 1, 2 and 3 are lists of 1, 2 and 4 words, 4 is a
/// bitmap.
const KIND_SHIFT: u32 = 28;
const OFFSET: u32 = (1 << KIND_SHIFT) - 1;
const KIND_BITMAP: u32 = 4;

/// A decoded `owners` word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owners {
    /// No owner: a tombstone or an unused slot.
    Nobody,
    /// One to three slots, ascending; the last one is repeated.
    Inline([u16; 3]),
    /// A list row of `words` words with four slots each.
    List { at: usize, words: usize },
    /// A bitmap row of the table's `width` words.
    Bitmap { at: usize },
}

impl Owners {
    #[inline]
    pub(super) fn decode(word: u32) -> Self {
        if word & INLINE != 0 {
            let slot = |place: u32| ((word >> (place * INLINE_BITS)) & INLINE_SLOT) as u16;
            return Self::Inline([slot(0), slot(1), slot(2)]);
        }
        let at = (word & OFFSET) as usize;
        match word >> KIND_SHIFT {
            0 => Self::Nobody,
            KIND_BITMAP => Self::Bitmap { at },
            kind => Self::List {
                at,
                words: 1 << (kind - 1),
            },
        }
    }

    pub(super) fn encode(self) -> u32 {
        match self {
            Self::Nobody => NOBODY,
            Self::Inline(slots) => {
                let place = |i: usize| u32::from(slots[i]) << (i as u32 * INLINE_BITS);
                INLINE | place(0) | place(1) | place(2)
            }
            Self::List { at, words } => {
                (words.trailing_zeros() + 1) << KIND_SHIFT | at as u32 & OFFSET
            }
            Self::Bitmap { at } => KIND_BITMAP << KIND_SHIFT | at as u32 & OFFSET,
        }
    }

    /// Encodes one to three slots, given in any order.
    pub(super) fn inline(slots: &[u16]) -> Self {
        let mut places = [slots[slots.len() - 1]; 3];
        places[..slots.len()].copy_from_slice(slots);
        places[..slots.len()].sort_unstable();
        let last = places[slots.len() - 1];
        places[slots.len()..].fill(last);
        Self::Inline(places)
    }
}

/// A slot: a key with its owners.
struct Entry {
    key_low: AtomicU32,
    key_high: AtomicU32,
    owners: AtomicU32,
}

/// A handle on a table of owners; see the module documentation. Clones share the table.
#[derive(Clone)]
pub(super) struct Table {
    entries: Arc<[Entry]>,
    rows: Arc<[AtomicU64]>,
    /// Number of words in a bitmap row.
    pub(super) width: usize,
}

/// Spreads a hash over 64 bits. Block hashes are uniform already, but hashes made up by a test, or
/// drawn from few values, are not.
#[inline]
pub(crate) fn mix(block: BlockHash) -> u64 {
    block.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Maps 32 uniform bits to `0..len` (Lemire's fast range). `len` need not be a power of two.
#[inline]
pub(crate) fn spread(bits: u32, len: usize) -> usize {
    ((u64::from(bits) * len as u64) >> 32) as usize
}

/// Maximum number of bits of a mixed hash that select a shard.
pub(super) const SHARD_BITS: u32 = 12;

impl Table {
    pub(super) fn new(capacity: usize, row_words: usize, width: usize) -> Self {
        let entry = || Entry {
            key_low: AtomicU32::new(0),
            key_high: AtomicU32::new(0),
            owners: AtomicU32::new(UNUSED),
        };
        Self {
            entries: (0..capacity).map(|_| entry()).collect(),
            rows: (0..row_words).map(|_| AtomicU64::new(0)).collect(),
            width,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn row_words(&self) -> usize {
        self.rows.len()
    }

    /// Returns the heap size of the table in bytes, without its handles.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.entries) + size_of_val(&*self.rows)
    }

    /// Prefetches the entry where a probe for `block` begins.
    #[inline]
    pub(super) fn warm(&self, block: BlockHash) -> u32 {
        self.entries[self.home(block)]
            .owners
            .load(Ordering::Relaxed)
    }

    #[inline]
    fn home(&self, block: BlockHash) -> usize {
        spread((mix(block) << SHARD_BITS >> 32) as u32, self.entries.len())
    }

    /// Returns the place and `owners` of `block`, or the unused place where it belongs.
    ///
    /// Terminates because the writer keeps at least one slot in eight unused.
    #[inline]
    fn probe(&self, block: BlockHash) -> (usize, u32) {
        let (low, high) = (block.0 as u32, (block.0 >> 32) as u32);
        let mut at = self.home(block);
        loop {
            let entry = &self.entries[at];
            // The first of the three loads: Acquire makes the key of a used slot visible.
            let owners = entry.owners.load(Ordering::Acquire);
            if owners == UNUSED {
                return (at, UNUSED);
            }
            if entry.key_low.load(Ordering::Relaxed) == low
                && entry.key_high.load(Ordering::Relaxed) == high
            {
                return (at, owners);
            }
            at += 1;
            if at == self.entries.len() {
                at = 0;
            }
        }
    }

    /// Whether `slot` owns `block`.
    pub(super) fn owns(&self, slot: u16, block: BlockHash) -> bool {
        self.contains(Owners::decode(self.probe(block).1), slot)
    }

    /// Returns the owners of `block` among the slots below `64 * W`.
    #[inline]
    pub(super) fn owners<const W: usize>(&self, block: BlockHash) -> Mask<W> {
        self.mask(Owners::decode(self.probe(block).1))
    }

    pub(super) fn contains(&self, owners: Owners, slot: u16) -> bool {
        match owners {
            Owners::Nobody => false,
            Owners::Inline(slots) => slots.contains(&slot),
            Owners::List { at, words } => {
                (at..at + words).any(|word| lanes(self.row(word)).contains(&slot))
            }
            Owners::Bitmap { at } => {
                let word = usize::from(slot) / 64;
                word < self.width && self.row(at + word) >> (slot % 64) & 1 == 1
            }
        }
    }

    #[inline]
    pub(super) fn mask<const W: usize>(&self, owners: Owners) -> Mask<W> {
        let mut mask = Mask::EMPTY;
        match owners {
            Owners::Nobody => {}
            Owners::Inline(slots) => slots.into_iter().for_each(|slot| mask.insert(slot)),
            Owners::List { at, words } => {
                for word in at..at + words {
                    for slot in lanes(self.row(word)) {
                        mask.insert(slot); // A vacant place is beyond any mask's width.
                    }
                }
            }
            Owners::Bitmap { at } => {
                for (word, bits) in mask.0.iter_mut().enumerate().take(self.width) {
                    *bits = self.row(at + word);
                }
            }
        }
        mask
    }

    #[inline]
    fn row(&self, word: usize) -> u64 {
        self.rows[word].load(Ordering::Acquire)
    }

    /// Calls `each` with every key that has an owner, and its owners.
    pub(super) fn for_each(&self, mut each: impl FnMut(BlockHash, Owners)) {
        for entry in self.entries.iter() {
            let owners = Owners::decode(entry.owners.load(Ordering::Acquire));
            if owners != Owners::Nobody {
                let (low, high) = (&entry.key_low, &entry.key_high);
                let key = u64::from(high.load(Ordering::Relaxed)) << 32
                    | u64::from(low.load(Ordering::Relaxed));
                each(BlockHash(key), owners);
            }
        }
    }
}

/// Operations of the writer only. There is one writer, so it may load, compute and store.
impl Table {
    /// Returns the place of `block` and its `owners` word, or the place where it belongs
    /// ([`UNUSED`]).
    pub(super) fn find(&self, block: BlockHash) -> (usize, u32) {
        self.probe(block)
    }

    /// Puts a key into an unused slot.
    pub(super) fn occupy(&self, at: usize, block: BlockHash, owners: Owners) {
        let entry = &self.entries[at];
        debug_assert_eq!(
            entry.owners.load(Ordering::Relaxed),
            UNUSED,
            "slot {at} has a key"
        );
        entry.key_low.store(block.0 as u32, Ordering::Relaxed);
        entry
            .key_high
            .store((block.0 >> 32) as u32, Ordering::Relaxed);
        entry.owners.store(owners.encode(), Ordering::Release);
    }

    /// Replaces the owners of a key.
    pub(super) fn set_owners(&self, at: usize, owners: Owners) {
        self.entries[at]
            .owners
            .store(owners.encode(), Ordering::Release);
    }

    /// Adds `slot` to a row; returns `false` if the row has no room.
    pub(super) fn row_insert(&self, owners: Owners, slot: u16) -> bool {
        match owners {
            Owners::List { at, words } => (at..at + words).any(|word| {
                let bits = self.row(word);
                let Some(lane) = lanes(bits).iter().position(|&place| place == VACANT) else {
                    return false;
                };
                self.rows[word].store(with_lane(bits, lane, slot), Ordering::Release);
                true
            }),
            Owners::Bitmap { at } => {
                let word = usize::from(slot) / 64;
                if word >= self.width {
                    return false;
                }
                let bits = self.row(at + word) | 1 << (slot % 64);
                self.rows[at + word].store(bits, Ordering::Release);
                true
            }
            Owners::Nobody | Owners::Inline(_) => false,
        }
    }

    /// Removes `slot` from a row; returns whether the row is empty afterwards.
    pub(super) fn row_remove(&self, owners: Owners, slot: u16) -> bool {
        match owners {
            Owners::List { at, words } => {
                let mut is_empty = true;
                for word in at..at + words {
                    let mut bits = self.row(word);
                    if let Some(lane) = lanes(bits).iter().position(|&place| place == slot) {
                        bits = with_lane(bits, lane, VACANT);
                        self.rows[word].store(bits, Ordering::Release);
                    }
                    is_empty &= bits == u64::MAX;
                }
                is_empty
            }
            Owners::Bitmap { at } => {
                let word = at + usize::from(slot) / 64;
                let bits = self.row(word) & !(1 << (slot % 64));
                self.rows[word].store(bits, Ordering::Release);
                (at..at + self.width).all(|word| self.row(word) == 0)
            }
            Owners::Nobody | Owners::Inline(_) => false,
        }
    }

    /// Fills the unallocated row at `at` with `slots`, as a list or a bitmap, whichever is cheaper.
    pub(super) fn row_write<const W: usize>(&self, at: usize, slots: &Mask<W>) -> Owners {
        let words = row_words(slots.count(), self.width);
        if words == self.width {
            for (word, &bits) in slots.0.iter().enumerate().take(self.width) {
                self.rows[at + word].store(bits, Ordering::Relaxed);
            }
            return Owners::Bitmap { at };
        }
        for word in at..at + words {
            self.rows[word].store(u64::MAX, Ordering::Relaxed);
        }
        let list = Owners::List { at, words };
        slots.for_each(|slot| {
            let has_room = self.row_insert(list, slot);
            debug_assert!(has_room, "row of {words} words is too short");
        });
        list
    }
}

/// Returns the number of words for a row of `count` slots in a table whose bitmaps have `width`
/// words.
pub(super) fn row_words(count: usize, width: usize) -> usize {
    let list = count.div_ceil(4).next_power_of_two();
    if list > 4 { width } else { list.min(width) }
}

#[inline]
fn lanes(bits: u64) -> [u16; 4] {
    std::array::from_fn(|lane| (bits >> (16 * lane)) as u16)
}

fn with_lane(bits: u64, lane: usize, slot: u16) -> u64 {
    bits & !(0xffff << (16 * lane)) | u64::from(slot) << (16 * lane)
}
