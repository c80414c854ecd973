//! Who owns a block of which only the hash is known.
//!
//! Only the heads of segments can be looked up, so this reads the whole index once, for any number of
//! blocks: 8 bytes per block, some 20 ms for 10 M blocks.

use std::collections::BTreeMap;

use crate::ids::BlockHash;
use crate::view::Tables;
use crate::view::mask::{Mask, WORDS_MAX};
use crate::view::segment::ChainSegment;

/// Bits of a hash that the filter tells apart.
const FILTER_BITS: u32 = 16;

/// Blocks that are looked for, with what was found of each.
pub(super) struct BlockSearch {
    found: BTreeMap<BlockHash, Mask<WORDS_MAX>>,
    /// Which low bits occur among the hashes: nearly all others are told from them by one load.
    filter: Vec<u64>,
}

impl BlockSearch {
    pub(super) fn new(blocks: &[BlockHash]) -> Self {
        let mut filter = vec![0; 1 << (FILTER_BITS - 6)];
        for &block in blocks {
            let (word, bit) = place(block);
            filter[word] |= bit;
        }
        Self {
            found: blocks.iter().map(|&block| (block, Mask::EMPTY)).collect(),
            filter,
        }
    }

    /// Looks through all tables.
    pub(super) fn run(mut self, tables: &Tables<'_>) -> BTreeMap<BlockHash, Mask<WORDS_MAX>> {
        for shard in 0..1 << tables.shard_bits {
            let table = tables.directory.table(shard);
            table.for_each(|head, segment| self.look_at(head, segment));
        }
        self.found
    }

    fn look_at(&mut self, head: BlockHash, segment: ChainSegment<'_>) {
        let mut most = 0;
        segment.for_each_owner(|_, owned| most = owned.max(most));
        for nth in 0..most {
            let block = if nth == 0 { head } else { segment.hash(nth) };
            let (word, bit) = place(block);
            if self.filter[word] & bit == 0 {
                continue;
            }
            let Some(owners) = self.found.get_mut(&block) else {
                continue;
            };
            segment.for_each_owner(|slot, owned| {
                if owned > nth {
                    owners.insert(slot);
                }
            });
        }
    }
}

fn place(block: BlockHash) -> (usize, u64) {
    let low = block.0 as usize & ((1 << FILTER_BITS) - 1);
    (low / 64, 1 << (low % 64))
}
