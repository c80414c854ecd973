//! Longest owned prefix for all backends at once, by mask bisection over windows of the chain.
//!
//! Ownership is prefix-closed: the owner of block `i` of a chain owns every block before it.
//! Therefore only the owners of the first block matter, and each has one boundary to find. An owner
//! of a window's first block is an owner of the segment that starts there. The search takes two
//! steps:
//!
//! 1. Find the last window whose first block a backend owns. The search probes the first and the
//!    last window. Between two probed windows, only backends that own the first block of the former
//!    but not of the latter are undecided. Probes of the heads between split them.
//! 2. Find how many blocks of that window it owns. A segment shows how many of its blocks a backend
//!    owns; comparing hashes shows how many of them are the chain's. Where the chain leaves the
//!    segment, it may continue in another one, whose head is the block at that position.
//!
//! A probe is a cache miss, and misses overlap if they do not depend on each other. So a round
//! narrows all undecided intervals together, each by [`POINTS`] heads at even distances.
//!
//! While the writer works, each probe sees its own moment. A backend found at block `i` owned it
//! and everything before it at the moment of that probe, or of the replacement of the probed table
//! or row if that came first. So every result was true at some moment during the call.

use std::hint::black_box;

use crate::ids::{BlockHash, Slot};
use crate::view::Tables;
use crate::view::mask::{Mask, WORDS_MAX};
use crate::view::segment::SEGMENT_BLOCKS;

/// Number of heads that a round probes between the ends of an interval.
const POINTS: usize = 7;
/// Maximum number of intervals that a round narrows together.
const INTERVALS: usize = 8;

/// Two windows, and the backends that own the head of the first one but not of the second.
#[derive(Clone, Copy)]
struct ChainInterval<const W: usize> {
    from: usize,
    to: usize,
    undecided: Mask<W>,
}

impl<const W: usize> ChainInterval<W> {
    const EMPTY: Self = Self {
        from: 0,
        to: 0,
        undecided: Mask::EMPTY,
    };

    /// Returns the windows to probe within the interval, ascending.
    fn points(&self) -> impl Iterator<Item = usize> + use<W> {
        let (from, width) = (self.from, self.to - self.from);
        let count = POINTS.min(width - 1);
        (1..=count).map(move |nth| from + width * nth / (count + 1))
    }
}

/// Intervals that one round narrows together.
struct Round<const W: usize> {
    intervals: [ChainInterval<W>; INTERVALS],
    count: usize,
}

impl<const W: usize> Round<W> {
    const EMPTY: Self = Self {
        intervals: [ChainInterval::EMPTY; INTERVALS],
        count: 0,
    };

    fn kept(&self) -> &[ChainInterval<W>] {
        &self.intervals[..self.count]
    }
}

/// Search for the owned prefixes of one chain.
struct PrefixSearch<'a, const W: usize> {
    chain: &'a [BlockHash],
    tables: &'a Tables<'a>,
    /// Number of leading blocks that each slot owns, by word and bit of the mask.
    blocks: [[u32; 64]; W],
}

/// Calls `matched(slot, blocks)` for each owner of the first block of `chain`, in ascending order
/// of slot. `blocks` is the number of leading blocks that it owns.
pub(super) fn match_prefix<const W: usize>(
    chain: &[BlockHash],
    tables: &Tables<'_>,
    mut matched: impl FnMut(Slot, u32),
) {
    let Some(&first_head) = chain.first() else {
        return;
    };
    let last_window = (chain.len() - 1) / SEGMENT_BLOCKS;
    black_box(tables.prefetch(chain[last_window * SEGMENT_BLOCKS]));
    let first = owners::<W>(tables, first_head);
    if first.is_empty() {
        return;
    }
    let mut search = PrefixSearch {
        chain,
        tables,
        blocks: [[0; 64]; W],
    };
    search.find(first, last_window);
    first.for_each(|slot| {
        let (word, bit) = (usize::from(slot) / 64, usize::from(slot) % 64);
        matched(Slot(slot), search.blocks[word][bit]);
    });
}

/// Returns how many leading blocks of `chain` `slot` owns. Starts at the `known` blocks found
/// before; returns 0 if the slot no longer owns those.
pub(super) fn match_slot(
    chain: &[BlockHash],
    tables: &Tables<'_>,
    slot: Slot,
    known: usize,
) -> u32 {
    let is_owner = |head: &BlockHash| {
        let segment = tables.segment(*head);
        segment.is_some_and(|segment| segment.has_owner(slot.0))
    };
    // The last window whose head is owned lies in `from..to`.
    let mut to = chain.len().div_ceil(SEGMENT_BLOCKS);
    let mut from = known.min(chain.len()).saturating_sub(1) / SEGMENT_BLOCKS;
    let first = chain.get(from * SEGMENT_BLOCKS);
    if !first.is_some_and(is_owner) {
        return 0;
    }
    while to - from > 1 {
        let middle = from + (to - from) / 2;
        if is_owner(&chain[middle * SEGMENT_BLOCKS]) {
            from = middle;
        } else {
            to = middle;
        }
    }
    let mut wanted = Mask::<WORDS_MAX>::EMPTY;
    wanted.insert(slot.0);
    let mut owned = 0;
    resolve(chain, tables, from, wanted, |_, blocks| owned = blocks);
    owned
}

#[inline]
fn owners<const W: usize>(tables: &Tables<'_>, head: BlockHash) -> Mask<W> {
    let segment = tables.segment(head);
    segment.map_or(Mask::EMPTY, |segment| segment.owners())
}

impl<const W: usize> PrefixSearch<'_, W> {
    /// Finds how many leading blocks each of `first`, the owners of the first block, owns.
    fn find(&mut self, first: Mask<W>, last_window: usize) {
        if last_window == 0 {
            self.settle(0, first);
            return;
        }
        let last = owners(self.tables, self.head(last_window)).and(&first);
        self.settle(last_window, last);
        let whole = ChainInterval {
            from: 0,
            to: last_window,
            undecided: first.without(&last),
        };
        let mut round = Round::EMPTY;
        self.keep(whole, &mut round);
        self.narrow(round.kept());
    }

    fn head(&self, window: usize) -> BlockHash {
        self.chain[window * SEGMENT_BLOCKS]
    }

    /// Finds the last owned windows in `intervals`, each of which has windows between its ends.
    /// Runs one round, then recurses for the intervals that it leaves undecided.
    fn narrow(&mut self, intervals: &[ChainInterval<W>]) {
        if intervals.is_empty() {
            return;
        }
        let points = intervals.iter().flat_map(ChainInterval::points);
        let warmed = points.map(|window| self.tables.prefetch(self.head(window)));
        black_box(warmed.fold(0, u64::wrapping_add));
        let mut narrower = Round::EMPTY;
        for &interval in intervals {
            let mut rest = interval;
            for window in interval.points() {
                let holders = owners(self.tables, self.head(window)).and(&rest.undecided);
                let part = ChainInterval {
                    to: window,
                    undecided: rest.undecided.without(&holders),
                    ..rest
                };
                self.keep(part, &mut narrower);
                rest.from = window;
                rest.undecided = holders;
                if holders.is_empty() {
                    break;
                }
            }
            self.keep(rest, &mut narrower);
        }
        self.narrow(narrower.kept());
    }

    /// Adds an interval to the next round if it is still undecided.
    fn keep(&mut self, interval: ChainInterval<W>, next: &mut Round<W>) {
        if interval.undecided.is_empty() {
            return;
        }
        if interval.to - interval.from == 1 {
            self.settle(interval.from, interval.undecided);
            return;
        }
        if next.count == INTERVALS {
            self.narrow(&next.intervals);
            next.count = 0;
        }
        next.intervals[next.count] = interval;
        next.count += 1;
    }

    /// Records how many blocks `slots` own, given that `window` is the last whose head they own.
    fn settle(&mut self, window: usize, slots: Mask<W>) {
        let blocks = &mut self.blocks;
        resolve(self.chain, self.tables, window, slots, |slot, owned| {
            blocks[usize::from(slot) / 64][usize::from(slot) % 64] = owned;
        });
    }
}

/// Calls `owns` for each of `slots`, which own the head of `window`, with the number of leading
/// blocks of `chain` that it owns. Assumes that it owns none beyond the window.
fn resolve<const W: usize>(
    chain: &[BlockHash],
    tables: &Tables<'_>,
    window: usize,
    slots: Mask<W>,
    mut owns: impl FnMut(u16, u32),
) {
    let end = chain.len().min((window + 1) * SEGMENT_BLOCKS);
    let mut from = window * SEGMENT_BLOCKS;
    let mut rest = slots;
    while !rest.is_empty() && from < end {
        let part = &chain[from..end];
        let Some(segment) = tables.segment(part[0]) else {
            break;
        };
        let whole = segment.full_owners().and(&rest);
        let most = if whole.is_empty() {
            segment.most_owned(&rest)
        } else {
            segment.shape().room()
        };
        let known = segment.common(part, most);
        if known == 0 {
            break;
        }
        // An owner of the whole segment owns all of its blocks in the chain.
        let mut further = whole;
        rest = rest.without(&whole);
        if !rest.is_empty() {
            segment.for_each_owner(|slot, owned| {
                if !rest.contains(slot) {
                    return;
                }
                rest.remove(slot);
                if owned >= known {
                    further.insert(slot);
                } else {
                    owns(slot, count(from + owned));
                }
            });
        }
        rest.for_each(|slot| owns(slot, count(from)));
        from += known;
        rest = further;
    }
    rest.for_each(|slot| owns(slot, count(from)));
}

/// Returns the number of blocks as `u32`, at least 1 for an owner of the first block, even if the
/// writer removes it meanwhile.
fn count(blocks: usize) -> u32 {
    u32::try_from(blocks.max(1)).unwrap_or(u32::MAX)
}
