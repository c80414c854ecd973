//! Longest owned prefix for all backends at once, by mask bisection.
//!
//! Ownership is prefix-closed: the owner of block `i` of a chain owns every block before it. Only
//! the owners of the first block matter, therefore, and each of them has one boundary to find. The
//! search probes the first and the last block. Between two probed blocks, only the backends that
//! own the former but not the latter are undecided; the owners of the blocks between split them. A
//! chain that is owned to its end, or not at all, costs two probes.
//!
//! A probe is a cache miss, and misses overlap if nothing waits for the one before. So a round
//! narrows all undecided intervals together, each by [`POINTS`] blocks at even distances: `k`
//! different boundaries in a chain of `n` blocks cost some `log8 n` rounds, where halving costs up
//! to `k log2 n` misses one after the other.
//!
//! While the writer works, each probe sees its own moment. A backend found at block `i` owned it
//! and everything before it at the moment of that probe, or of the replacement of the probed table
//! if that came before; so every answer was true at some moment during the call.

use std::hint::black_box;

use crate::ids::{BlockHash, Slot};
use crate::view::mask::Mask;

/// Blocks between the ends of an interval that a round probes.
const POINTS: usize = 7;
/// Intervals that a round narrows.
const INTERVALS: usize = 8;

/// What tells the owners of a block.
pub(super) trait BlockLookup {
    /// Returns the owners of `block` among the slots below `64 * W`.
    fn owners<const W: usize>(&self, block: BlockHash) -> Mask<W>;

    /// Loads what [`Self::owners`] will need. The caller uses the result, so that the compiler
    /// keeps the load.
    fn warm(&self, block: BlockHash) -> u32;
}

/// Two blocks with the backends that own the former but not the latter.
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

    /// The blocks to probe, ascending.
    fn points(&self) -> impl Iterator<Item = usize> + use<W> {
        let (from, width) = (self.from, self.to - self.from);
        let count = POINTS.min(width - 1);
        (1..=count).map(move |nth| from + width * nth / (count + 1))
    }
}

/// Intervals that one round narrows.
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

/// A search of one chain.
struct PrefixSearch<'a, L, const W: usize> {
    chain: &'a [BlockHash],
    lookup: &'a L,
    /// Blocks owned, by word and bit of the mask.
    blocks: [[u32; 64]; W],
}

/// Calls `matched(slot, blocks)` for each owner of the first block, in ascending order of slot.
pub(super) fn match_prefix<const W: usize>(
    chain: &[BlockHash],
    lookup: &impl BlockLookup,
    mut matched: impl FnMut(Slot, u32),
) {
    let (Some(&first_block), Some(&last_block)) = (chain.first(), chain.last()) else {
        return;
    };
    black_box(lookup.warm(last_block));
    let first = lookup.owners::<W>(first_block);
    if first.is_empty() {
        return;
    }
    let last = lookup.owners(last_block).and(&first);
    let total = u32::try_from(chain.len()).unwrap_or(u32::MAX);
    if last == first {
        first.for_each(|slot| matched(Slot(slot), total));
        return;
    }
    let mut search = PrefixSearch {
        chain,
        lookup,
        blocks: [[total; 64]; W],
    };
    let whole = ChainInterval {
        from: 0,
        to: chain.len() - 1,
        undecided: first.without(&last),
    };
    let mut round = Round::EMPTY;
    search.keep(whole, &mut round);
    search.narrow(round.kept());
    first.for_each(|slot| {
        let (word, bit) = (usize::from(slot) / 64, usize::from(slot) % 64);
        matched(Slot(slot), search.blocks[word][bit]);
    });
}

impl<L: BlockLookup, const W: usize> PrefixSearch<'_, L, W> {
    /// Finds the boundaries in these intervals of more than two blocks: one round, then the rounds
    /// of what it leaves undecided.
    fn narrow(&mut self, intervals: &[ChainInterval<W>]) {
        if intervals.is_empty() {
            return;
        }
        let points = intervals.iter().flat_map(ChainInterval::points);
        let warmed = points.map(|at| self.lookup.warm(self.chain[at]));
        black_box(warmed.fold(0, u32::wrapping_add));
        let mut narrower = Round::EMPTY;
        for &interval in intervals {
            let mut rest = interval;
            for at in interval.points() {
                let holders = self.lookup.owners(self.chain[at]).and(&rest.undecided);
                let part = ChainInterval {
                    to: at,
                    undecided: rest.undecided.without(&holders),
                    ..rest
                };
                self.keep(part, &mut narrower);
                rest.from = at;
                rest.undecided = holders;
                if holders.is_empty() {
                    break;
                }
            }
            self.keep(rest, &mut narrower);
        }
        self.narrow(narrower.kept());
    }

    /// Adds an interval to the next round, if it leaves something undecided.
    fn keep(&mut self, interval: ChainInterval<W>, next: &mut Round<W>) {
        if interval.undecided.is_empty() {
            return;
        }
        if interval.to - interval.from == 1 {
            self.settle(&interval);
            return;
        }
        if next.count == INTERVALS {
            self.narrow(&next.intervals);
            next.count = 0;
        }
        next.intervals[next.count] = interval;
        next.count += 1;
    }

    /// The undecided backends own every block before the end of the interval, which has none
    /// between its ends.
    fn settle(&mut self, interval: &ChainInterval<W>) {
        let length = u32::try_from(interval.to).unwrap_or(u32::MAX);
        interval.undecided.for_each(|slot| {
            self.blocks[usize::from(slot) / 64][usize::from(slot) % 64] = length;
        });
    }
}
