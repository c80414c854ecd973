//! The view alone: against sets of pairs, and while another thread reads.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BlockHash, Slot};
use crate::view::table::{Owners, row_words};
use crate::view::{BlockView, ViewWriter};

fn owners(view: &BlockView, block: u64) -> Vec<u16> {
    let mut owners = Vec::new();
    view.owners(BlockHash(block), |slot| owners.push(slot.0));
    owners
}

#[test]
fn owners_survive_encoding() {
    let all = [
        Owners::Nobody,
        Owners::inline(&[0]),
        Owners::inline(&[1023, 3]),
        Owners::inline(&[7, 1023, 0]),
        Owners::List { at: 0, words: 1 },
        Owners::List {
            at: 12_345,
            words: 2,
        },
        Owners::List {
            at: (1 << 28) - 1,
            words: 4,
        },
        Owners::Bitmap { at: 99 },
    ];
    for owners in all {
        assert_eq!(Owners::decode(owners.encode()), owners);
    }
}

#[test]
fn rows_are_lists_while_that_is_shorter() {
    let words = |count, width| row_words(count, width);
    assert_eq!(
        [words(4, 16), words(5, 16), words(9, 16), words(17, 16)],
        [1, 2, 4, 16]
    );
    assert_eq!(
        [words(4, 1), words(60, 1), words(9, 3), words(4, 3)],
        [1, 1, 3, 1]
    );
}

#[test]
fn one_block_takes_every_backend_and_gives_them_back() {
    let mut writer = ViewWriter::new(1);
    let slots: Vec<u16> = (0..BACKENDS_MAX as u16).rev().collect();
    for (count, &slot) in slots.iter().enumerate() {
        writer.admit(Slot(slot));
        writer.insert(Slot(slot), BlockHash(9));
        writer.insert(Slot(slot), BlockHash(9));
        assert_eq!(writer.pairs(), count as u64 + 1);
    }
    let mut expected: Vec<u16> = (0..BACKENDS_MAX as u16).collect();
    assert_eq!(owners(writer.view(), 9), expected);
    for &slot in slots.iter().skip(1) {
        writer.remove(Slot(slot), BlockHash(9));
        writer.remove(Slot(slot), BlockHash(9));
        expected.retain(|&other| other != slot);
        assert_eq!(owners(writer.view(), 9), expected);
    }
    writer.remove(Slot(1023), BlockHash(9));
    assert_eq!((owners(writer.view(), 9), writer.pairs()), (vec![], 0));
}

#[test]
fn hashes_that_are_not_uniform_are_found_too() {
    let mut writer = ViewWriter::new(4096);
    let odd = |i: u64| [i, i << 52, u64::MAX - i];
    for i in 0..2000 {
        odd(i)
            .into_iter()
            .for_each(|hash| writer.insert(Slot(0), BlockHash(hash)));
    }
    for i in 0..2000 {
        odd(i)
            .into_iter()
            .for_each(|hash| assert!(writer.view().owns(Slot(0), BlockHash(hash))));
        assert!(!writer.view().owns(Slot(0), BlockHash(1 << 40 | i)));
    }
}

#[test]
fn memory_stays_bounded_under_churn() {
    let mut writer = ViewWriter::new(4);
    for i in 0..200_000_u64 {
        writer.insert(Slot((i % 5) as u16), BlockHash(i / 5));
        if i >= 5_000 {
            let old = i - 5_000;
            writer.remove(Slot((old % 5) as u16), BlockHash(old / 5));
        }
    }
    // 1,000 blocks with five owners each.
    assert_eq!(writer.pairs(), 5_000);
    let per_block = writer.memory_bytes() / 1_000;
    assert!(per_block < 60, "{per_block} bytes per block of five owners");
}

#[test]
fn readers_see_growing_prefixes_while_the_writer_inserts_chain_after_chain() {
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
        for &block in chains.iter().flatten() {
            writer.insert(Slot(70), block);
        }
        is_done.store(true, Ordering::Release);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn the_view_is_a_set_of_pairs(
        ops in prop::collection::vec((any::<bool>(), 0_usize..40, 0_u64..30), 1..400),
    ) {
        // Slots in clusters, so that rows of every kind appear and disappear.
        let slot_of = |at: usize| Slot((at * at * 7 % BACKENDS_MAX) as u16);
        let mut writer = ViewWriter::new(2);
        let mut pairs = BTreeSet::new();
        for (is_insert, at, block) in ops {
            let slot = slot_of(at);
            writer.admit(slot);
            if is_insert {
                writer.insert(slot, BlockHash(block));
                pairs.insert((block, slot.0));
            } else {
                writer.remove(slot, BlockHash(block));
                pairs.remove(&(block, slot.0));
            }
            let of_block = pairs.range((block, 0)..(block + 1, 0)).map(|&(_, slot)| slot);
            prop_assert_eq!(owners(writer.view(), block), of_block.collect::<Vec<_>>());
        }
        prop_assert_eq!(writer.pairs(), pairs.len() as u64);
        for (block, slot) in pairs {
            prop_assert!(writer.view().owns(Slot(slot), BlockHash(block)));
        }
    }
}
