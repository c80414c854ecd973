//! Tests the view alone: compared with sets of owned chains, and while another thread reads.
//! Windows have four blocks here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BlockHash, Slot};
use crate::view::mask::{Mask, WORDS_MAX};
use crate::view::segment::{ChainSegment, SEGMENT_BLOCKS, SegmentShape, lane_words};
use crate::view::{BlockPlace, BlockView, SHARDS, ViewWriter};

fn owners(view: &BlockView, block: BlockHash) -> Vec<u16> {
    let owners = &view.owners(&[block])[&block];
    owners.iter().map(|slot| slot.0).collect()
}

fn matched(view: &BlockView, chain: &[BlockHash]) -> Vec<(u16, u32)> {
    let mut found = Vec::new();
    view.match_prefix(chain, |slot, blocks| found.push((slot.0, blocks)));
    found
}

/// Returns a block of a tree of chains, named by the path to it.
fn block(path: &[u8]) -> BlockHash {
    let hash = path.iter().fold(0x5eed_5eed_5eed_u64, |hash, &step| {
        let mixed = (hash ^ (u64::from(step) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 29
    });
    BlockHash(hash)
}

fn chain(path: &[u8]) -> Vec<BlockHash> {
    (1..=path.len()).map(|end| block(&path[..end])).collect()
}

/// Paths that one slot owns, with the places that the writer returned.
#[derive(Default)]
struct OwnedPaths(BTreeMap<Vec<u8>, BlockPlace>);

impl OwnedPaths {
    /// Adds a path and everything before it.
    fn add(&mut self, writer: &mut ViewWriter, slot: Slot, path: &[u8]) {
        let owned = (1..=path.len()).take_while(|&end| self.0.contains_key(&path[..end]));
        let owned = owned.count();
        let after = self.0.get(&path[..owned]).copied();
        let blocks = &chain(path)[owned..];
        let mut behind = Vec::new();
        writer.append(slot, after, blocks, |it| behind.push(it));
        assert_eq!(behind.len(), blocks.len());
        let mut head = after.map_or(BlockHash(0), |after| after.head);
        for (nth, behind) in behind.into_iter().enumerate() {
            if behind == 0 {
                head = blocks[nth];
            }
            let path = path[..owned + nth + 1].to_vec();
            self.0.insert(path, BlockPlace { head, behind });
        }
    }

    /// Removes the last path at or after `path` that no other one extends.
    fn remove(&mut self, writer: &mut ViewWriter, slot: Slot, path: &[u8]) {
        let below = self.0.range(path.to_vec()..);
        let below = below.take_while(|(it, _)| it.starts_with(path));
        let leaf = below.map(|(it, _)| it.clone()).last();
        if let Some(leaf) = leaf {
            let place = self.0.remove(&leaf).expect("it was found");
            writer.remove(slot, place);
        }
    }

    fn matched(&self, path: &[u8]) -> u32 {
        let owned = (1..=path.len()).take_while(|&end| self.0.contains_key(&path[..end]));
        owned.count() as u32
    }
}

#[test]
fn segment_shapes_round_trip() {
    let all = [
        SegmentShape {
            base: 0,
            filled: 1,
            capacity: 1,
            lane_words: 1,
        },
        SegmentShape {
            base: 63,
            filled: 64,
            capacity: 64,
            lane_words: 512,
        },
        SegmentShape {
            base: 17,
            filled: 0,
            capacity: 33,
            lane_words: 4,
        },
    ];
    for shape in all {
        assert_eq!(SegmentShape::decode(shape.encode()), shape);
    }
    let words = [0, 1, 2, 3, 5, 6, 11, BACKENDS_MAX].map(lane_words);
    assert_eq!(words, [1, 1, 1, 2, 2, 4, 4, 512]);
}

#[test]
fn lanes_take_owners_up_to_their_capacity() {
    let words: Vec<AtomicU64> = (0..5).map(|_| AtomicU64::new(u64::MAX)).collect();
    let shape = SegmentShape {
        base: 1,
        filled: 2,
        capacity: 2,
        lane_words: 4,
    };
    let segment = ChainSegment::initialise(&words, shape);
    for slot in 0..11_u16 {
        assert!(
            segment.set_owned(1023 - slot, 1 + usize::from(slot % 2), 2),
            "{slot}"
        );
    }
    assert!(!segment.set_owned(3, 1, 2));
    assert!(segment.set_owned(1023, 2, 2) && segment.set_owned(1020, 0, 2));
    assert!(segment.set_owned(3, 1, 2));
    let mut owned = BTreeMap::new();
    segment.for_each_owner(|slot, blocks| _ = owned.insert(slot, blocks));
    assert_eq!(
        (owned.len(), owned[&1023], owned[&3], owned[&1022]),
        (11, 2, 1, 2)
    );
    assert_eq!(segment.shape(), shape);
}

#[test]
fn bitmaps_and_lanes_agree() {
    let shape = SegmentShape {
        base: 1,
        filled: 3,
        capacity: 3,
        lane_words: 8,
    };
    let words: Vec<AtomicU64> = (0..shape.words())
        .map(|_| AtomicU64::new(u64::MAX))
        .collect();
    let segment = ChainSegment::initialise(&words, shape);
    for step in 0..400_u16 {
        let (slot, blocks) = (step * 7 % 20 * 51, usize::from(step / 3 % 4));
        assert!(segment.set_owned(slot, blocks, 3));
        let (mut owners, mut whole) = (Mask::<WORDS_MAX>::EMPTY, Mask::<WORDS_MAX>::EMPTY);
        segment.for_each_owner(|slot, blocks| {
            owners.insert(slot);
            if blocks == 3 {
                whole.insert(slot);
            }
        });
        assert_eq!((segment.owners(), segment.full_owners()), (owners, whole));
    }
}

#[test]
fn one_block_can_be_owned_by_every_backend() {
    let mut writer = ViewWriter::new(1);
    let slots: Vec<u16> = (0..BACKENDS_MAX as u16).rev().collect();
    for (count, &slot) in slots.iter().enumerate() {
        writer.admit(Slot(slot));
        writer.append(Slot(slot), None, &[BlockHash(9)], |behind| {
            assert_eq!(behind, 0);
        });
        assert_eq!(writer.pairs(), count as u64 + 1);
    }
    let mut expected: Vec<u16> = (0..BACKENDS_MAX as u16).collect();
    assert_eq!(owners(writer.view(), BlockHash(9)), expected);
    let place = BlockPlace {
        head: BlockHash(9),
        behind: 0,
    };
    for &slot in slots.iter().skip(1) {
        writer.remove(Slot(slot), place);
        writer.remove(Slot(slot), place);
        expected.retain(|&other| other != slot);
        assert_eq!(owners(writer.view(), BlockHash(9)), expected);
    }
    writer.remove(Slot(1023), place);
    assert_eq!(
        (owners(writer.view(), BlockHash(9)), writer.pairs()),
        (vec![], 0)
    );
}

#[test]
fn lookups_find_non_uniform_hashes() {
    let mut writer = ViewWriter::new(SHARDS);
    let odd = |i: u64| [i + 1, (i + 1) << 52, u64::MAX - i].map(BlockHash);
    for i in 0..500 {
        for head in odd(i) {
            writer.append(Slot(0), None, &[head], |_| {});
        }
    }
    for head in (0..500).flat_map(odd) {
        assert_eq!(matched(writer.view(), &[head]), [(0, 1)]);
    }
    assert!(matched(writer.view(), &[BlockHash(1 << 40 | 3)]).is_empty());
}

#[test]
fn a_chain_takes_one_segment_per_window() {
    let mut writer = ViewWriter::new(1);
    let blocks = chain(&[0; 2 * SEGMENT_BLOCKS + 1]);
    let mut behind = Vec::new();
    // In three parts, as when a response and the next turn follow.
    writer.append(Slot(0), None, &blocks[..2], |it| behind.push(it));
    let at = |head: usize, behind| {
        Some(BlockPlace {
            head: blocks[head],
            behind,
        })
    };
    writer.append(Slot(0), at(0, 1), &blocks[2..3], |it| behind.push(it));
    writer.append(Slot(0), at(0, 2), &blocks[3..], |it| behind.push(it));
    assert_eq!(behind, [0, 1, 2, 3, 0, 1, 2, 3, 0]);
}

#[test]
fn unowned_blocks_are_replaced() {
    let mut writer = ViewWriter::new(1);
    let mut owned = OwnedPaths::default();
    let slot = Slot(0);
    owned.add(&mut writer, slot, &[0, 0, 0]);
    owned.remove(&mut writer, slot, &[0, 0, 0]);
    // The hash of the removed block is still written behind the others.
    owned.add(&mut writer, slot, &[0, 0, 1]);
    assert_eq!(matched(writer.view(), &chain(&[0, 0, 1])), [(0, 3)]);
    assert_eq!(matched(writer.view(), &chain(&[0, 0, 0])), [(0, 2)]);
    owned.add(&mut writer, slot, &[0, 0, 0]);
    assert_eq!(matched(writer.view(), &chain(&[0, 0, 0])), [(0, 3)]);
    assert_eq!(writer.pairs(), 4);
}

#[test]
fn memory_stays_bounded_under_churn() {
    let mut writer = ViewWriter::new(4);
    let mut owned = OwnedPaths::default();
    let path = |i: u16| [(i >> 8) as u8, i as u8, 0, 0, 0, 0];
    for i in 0..20_000_u16 {
        owned.add(&mut writer, Slot(0), &path(i));
        if i >= 500 {
            let old = path(i - 500);
            (0..5).for_each(|_| owned.remove(&mut writer, Slot(0), &old[..2]));
        }
    }
    let pairs = writer.pairs();
    assert_eq!(pairs, owned.0.len() as u64);
    let per_block = writer.memory_bytes() as u64 / pairs;
    // Segments of four blocks: a key of 12 bytes, two words, and slack.
    assert!(per_block < 30, "{per_block} bytes per block");
}

#[test]
fn readers_see_growing_prefixes_while_the_writer_inserts() {
    let mut writer = ViewWriter::new(2);
    writer.admit(Slot(70));
    let view = writer.view().clone();
    let chains: Vec<Vec<BlockHash>> = (1..200_u64)
        .map(|chain| {
            (0..50)
                .map(|block| BlockHash(chain << 32 | block))
                .collect()
        })
        .collect();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seen = vec![0; chains.len()];
            let mut is_last = false;
            while !is_last {
                is_last = is_done.load(Ordering::Acquire);
                for (chain, seen) in chains.iter().zip(&mut seen) {
                    view.match_prefix(chain, |slot, blocks| {
                        assert!(slot == Slot(70) && blocks >= *seen && blocks <= 50);
                        *seen = blocks;
                    });
                }
            }
            assert!(seen.iter().all(|&blocks| blocks == 50));
        });
        for chain in &chains {
            let mut last = None;
            for (nth, &block) in chain.iter().enumerate() {
                let head = |behind: u8| chain[nth - usize::from(behind)];
                let mut place = None;
                writer.append(Slot(70), last, &[block], |behind| {
                    place = Some(BlockPlace {
                        head: head(behind),
                        behind,
                    });
                });
                last = place;
            }
        }
        is_done.store(true, Ordering::Release);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn the_view_equals_a_set_of_owned_chains(
        ops in prop::collection::vec(
            (any::<bool>(), 0_usize..40, prop::collection::vec(0_u8..3, 1..11)), 1..120),
        queried in prop::collection::vec(prop::collection::vec(0_u8..3, 1..13), 8),
    ) {
        // Slots in clusters, so that lanes of one and of many words appear and disappear.
        let slot_of = |at: usize| Slot((at * at * 7 % BACKENDS_MAX) as u16);
        let mut writer = ViewWriter::new(2);
        let mut all = BTreeMap::<Slot, OwnedPaths>::new();
        for (is_insert, at, path) in &ops {
            let slot = slot_of(*at);
            writer.admit(slot);
            let owned = all.entry(slot).or_default();
            if *is_insert {
                owned.add(&mut writer, slot, path);
            } else {
                owned.remove(&mut writer, slot, &path[..1]);
            }
            for (path, place) in &owned.0 {
                let block = block(path);
                prop_assert!(writer.shows(slot, *place, block), "{path:?} {place:?}");
                prop_assert_eq!(writer.is_head(block), place.behind == 0);
            }
            for path in queried.iter().chain([path]) {
                let chain = chain(path);
                let expected = all.iter().map(|(slot, owned)| (slot.0, owned.matched(path)));
                let expected: Vec<_> = expected.filter(|it| it.1 > 0).collect();
                prop_assert_eq!(matched(writer.view(), &chain), expected);
                let by_position = writer.view().match_by_position(&chain, slot);
                prop_assert_eq!(by_position, all[&slot].matched(path));
                for known in 0..=by_position {
                    let further = writer.view().match_from(&chain, slot, known);
                    prop_assert_eq!(further, by_position, "from {}", known);
                }
            }
        }
        let pairs = all.values().map(|owned| owned.0.len() as u64).sum::<u64>();
        prop_assert_eq!(writer.pairs(), pairs);
        let paths: BTreeSet<_> = all.values().flat_map(|owned| owned.0.keys()).collect();
        for path in paths {
            let of_path = all.iter().filter(|(_, owned)| owned.0.contains_key(path));
            let of_path: Vec<_> = of_path.map(|(slot, _)| slot.0).collect();
            prop_assert_eq!(owners(writer.view(), block(path)), of_path);
        }
        let slots: Vec<_> = all.keys().copied().collect();
        for slot in slots {
            let heads: BTreeSet<_> = all[&slot].0.values().map(|place| place.head).collect();
            heads.into_iter().for_each(|head| writer.clear(slot, head));
            prop_assert_eq!(writer.view().owned(slot), 0);
        }
        prop_assert_eq!(writer.pairs(), 0);
    }
}

#[test]
fn runs_are_all_owned_blocks_with_their_place_in_the_window() {
    let mut writer = ViewWriter::new(1);
    let (mut first, mut second) = (OwnedPaths::default(), OwnedPaths::default());
    for slot in [Slot(0), Slot(1)] {
        writer.admit(slot);
    }
    first.add(&mut writer, Slot(0), &[0; 6]);
    first.add(&mut writer, Slot(0), &[0, 0, 0, 1, 1]);
    second.add(&mut writer, Slot(1), &[0, 0]);
    let mut runs = Vec::new();
    let view = writer.view().clone();
    view.for_each_run(|slot, from, blocks| runs.push((slot.0, from, blocks.to_vec())));
    runs.sort_unstable_by_key(|(slot, from, blocks)| {
        (*slot, *from, std::cmp::Reverse(blocks.len()))
    });
    let (whole, branch) = (chain(&[0; 6]), chain(&[0, 0, 0, 1, 1]));
    let of = |slot, from, blocks: &[BlockHash]| (slot, from, blocks.to_vec());
    let expected = [
        of(0, 0, &whole[..4]),
        of(0, 0, &whole[4..]),
        of(0, 0, &branch[4..]),
        of(0, 3, &branch[3..4]),
        of(1, 0, &whole[..2]),
    ];
    assert_eq!(runs, expected);
}
