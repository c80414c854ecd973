//! The view under every interleaving that loom finds: one writer, one or two readers, and tables of
//! one shard with a handful of entries.

use loom::thread;

use crate::ids::{BlockHash, Slot};
use crate::view::table::SHARD_BITS;
use crate::view::{BlockPlace, BlockView, ViewWriter, mix, spread};

/// Three blocks of one chain: a window of two, and the head of the next one.
const CHAIN: [BlockHash; 3] = [BlockHash(0x11), BlockHash(0x22), BlockHash(0x33)];
/// Places of the blocks of [`CHAIN`] in the view.
const PLACES: [BlockPlace; 3] = [at(0, 0), at(0, 1), at(2, 0)];
/// A block that follows `CHAIN[0]`, beside `CHAIN[1]`.
const BRANCH: BlockHash = BlockHash(0x44);

const fn at(head: usize, behind: u8) -> BlockPlace {
    let head = CHAIN[head];
    BlockPlace { head, behind }
}

/// Adds the blocks `from..to` of [`CHAIN`].
fn add(writer: &mut ViewWriter, slot: u16, from: usize, to: usize) {
    let after = from.checked_sub(1).map(|last| PLACES[last]);
    writer.append(Slot(slot), after, &CHAIN[from..to], |_| {});
}

fn matched(view: &BlockView, chain: &[BlockHash]) -> Vec<(u16, u32)> {
    let mut found = Vec::new();
    view.match_prefix(chain, |slot, blocks| found.push((slot.0, blocks)));
    found
}

fn writer() -> ViewWriter {
    let mut writer = ViewWriter::new(1);
    writer.admit(Slot(5));
    // Replaces the one-entry table of a new index, so that each model starts with room in the
    // table.
    writer.append(Slot(0), None, &[BlockHash(0x99)], |_| {});
    writer
}

/// Explores all interleavings of `body` in the writer with `read` in one reader.
fn model(
    prepare: fn(&mut ViewWriter),
    write: fn(&mut ViewWriter),
    read: impl Fn(&BlockView) + Send + Sync + Copy + 'static,
    readers: usize,
) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(move || {
        let mut writer = writer();
        prepare(&mut writer);
        let threads: Vec<_> = (0..readers)
            .map(|_| {
                let view = writer.view().clone();
                thread::spawn(move || read(&view))
            })
            .collect();
        write(&mut writer);
        for thread in threads {
            thread.join().expect("the reader does not panic");
        }
    });
}

#[test]
fn loom_a_new_key_never_shows_a_wrong_owner() {
    let write = |writer: &mut ViewWriter| {
        add(writer, 1, 0, 1);
        writer.append(Slot(2), None, &[BRANCH], |_| {});
    };
    let read = |view: &BlockView| {
        assert!(matches!(matched(view, &CHAIN[..1])[..], [] | [(1, 1)]));
        assert!(matches!(matched(view, &[BRANCH])[..], [] | [(2, 1)]));
        assert!(matched(view, &CHAIN[2..]).is_empty());
    };
    model(|_| {}, write, read, 1);
}

#[test]
fn loom_readers_never_see_part_of_a_key() {
    // Probes for block 0 start where `stranger` goes. A reader that saw its row before its key
    // would take the zeros of an unused entry for block 0.
    fn stranger() -> BlockHash {
        let home = |block: &BlockHash| spread((mix(*block) << SHARD_BITS >> 32) as u32, 8);
        let mut others = (1_u64..).map(|hash| BlockHash(hash << 31 | 1 << 62));
        others
            .find(|other| home(other) == home(&BlockHash(0)))
            .expect("one in eight does")
    }
    let write = |writer: &mut ViewWriter| writer.append(Slot(1), None, &[stranger()], |_| {});
    let read = |view: &BlockView| {
        assert!(matched(view, &[BlockHash(0)]).is_empty());
        assert!(matches!(matched(view, &[stranger()])[..], [] | [(1, 1)]));
    };
    model(|_| {}, write, read, 2);
}

#[test]
fn loom_a_block_is_counted_only_once_its_hash_is_written() {
    // A reader that counted the block before its hash was there would compare it with zero.
    let prepare = |writer: &mut ViewWriter| add(writer, 1, 0, 1);
    let write = |writer: &mut ViewWriter| add(writer, 1, 1, 2);
    let read = |view: &BlockView| {
        assert!(matches!(matched(view, &CHAIN[..2])[..], [(1, 1..=2)]));
        assert_eq!(matched(view, &[CHAIN[0], BlockHash(0)]), [(1, 1)]);
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_removal_and_reinsertion_show_only_the_keys_owners() {
    let prepare = |writer: &mut ViewWriter| add(writer, 1, 0, 1);
    let write = |writer: &mut ViewWriter| {
        writer.remove(Slot(1), PLACES[0]);
        writer.append(Slot(2), None, &[BRANCH], |_| {});
        add(writer, 3, 0, 1);
    };
    let read = |view: &BlockView| {
        assert!(matches!(
            matched(view, &CHAIN[..1])[..],
            [] | [(1, 1)] | [(3, 1)]
        ));
        assert!(matches!(matched(view, &[BRANCH])[..], [] | [(2, 1)]));
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_a_reused_lane_shows_one_slot_or_the_other() {
    let prepare = |writer: &mut ViewWriter| {
        add(writer, 1, 0, 2);
        add(writer, 2, 0, 1);
    };
    let write = |writer: &mut ViewWriter| {
        writer.clear(Slot(1), CHAIN[0]);
        add(writer, 3, 0, 1);
    };
    let read = |view: &BlockView| {
        for (slot, blocks) in matched(view, &CHAIN[..2]) {
            let most = if slot == 1 { 2 } else { 1 };
            assert!(matches!(slot, 1..=3) && blocks <= most, "{slot} {blocks}");
        }
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_moving_rows_neither_loses_nor_adds_owners() {
    let prepare = |writer: &mut ViewWriter| (0..2).for_each(|slot| add(writer, slot, 0, 1));
    // Moves to a row with more lanes, for which the table is rebuilt; then changes that row.
    let write = |writer: &mut ViewWriter| {
        add(writer, 3, 0, 1);
        add(writer, 4, 0, 1);
        writer.remove(Slot(0), PLACES[0]);
    };
    let read = |view: &BlockView| {
        let owners: Vec<_> = matched(view, &CHAIN[..1]);
        let owners: Vec<_> = owners.into_iter().map(|(slot, _)| slot).collect();
        let stages: [&[u16]; 4] = [&[0, 1], &[0, 1, 3], &[0, 1, 3, 4], &[1, 3, 4]];
        assert!(stages.contains(&&owners[..]), "{owners:?}");
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_bitmaps_neither_lose_nor_add_owners() {
    let prepare = |writer: &mut ViewWriter| (0..3).for_each(|slot| add(writer, slot, 0, 2));
    let write = |writer: &mut ViewWriter| {
        writer.remove(Slot(0), PLACES[1]);
        add(writer, 0, 1, 2);
    };
    let read = |view: &BlockView| {
        let owned = matched(view, &CHAIN[..2]);
        assert!(
            matches!(owned[..], [(0, 1..=2), (1, 2), (2, 2)]),
            "{owned:?}"
        );
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_growing_hides_no_existing_block() {
    // The smallest table takes six keys; the prepared one holds five.
    let prepare = |writer: &mut ViewWriter| {
        for filler in 0..3 {
            writer.append(Slot(0), None, &[BlockHash(0x1000 + filler)], |_| {});
        }
        add(writer, 1, 0, 1);
    };
    let write = |writer: &mut ViewWriter| {
        add(writer, 1, 1, 2);
        add(writer, 1, 2, 3);
        writer.append(Slot(1), Some(PLACES[0]), &[BRANCH], |_| {});
    };
    let read = |view: &BlockView| {
        // Parents before children: a reader that sees the later block then sees the earlier one.
        let before = matched(view, &CHAIN);
        assert!(matches!(before[..], [(1, 1..=3)]));
        let branch = matched(view, &[CHAIN[0], BRANCH]);
        assert!(matches!(branch[..], [(1, 1..=2)]));
        if branch[0].1 == 2 {
            assert_eq!(matched(view, &CHAIN), [(1, 3)]);
        }
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_eviction_shortens_matches_and_never_lengthens_them() {
    let prepare = |writer: &mut ViewWriter| {
        add(writer, 1, 0, 3);
        add(writer, 2, 0, 1);
    };
    let write = |writer: &mut ViewWriter| {
        writer.remove(Slot(1), PLACES[2]);
        writer.remove(Slot(1), PLACES[1]);
        writer.remove(Slot(2), PLACES[0]);
    };
    let read = |view: &BlockView| {
        let before = matched(view, &CHAIN);
        for &(slot, blocks) in &before {
            let most = if slot == 1 { 3 } else { 1 };
            assert!(
                (slot == 1 || slot == 2) && (1..=most).contains(&blocks),
                "{slot} {blocks}"
            );
        }
        // A second match never finds more than the first one did.
        for (slot, blocks) in matched(view, &CHAIN) {
            assert!(
                before
                    .iter()
                    .any(|&(other, most)| other == slot && blocks <= most)
            );
        }
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_a_restore_shows_old_or_new_content() {
    let prepare = |writer: &mut ViewWriter| add(writer, 1, 0, 1);
    let write = |writer: &mut ViewWriter| {
        let mut other = writer.unpublished();
        other.admit(Slot(2));
        add(&mut other, 2, 0, 1);
        writer.adopt(other);
    };
    let read = |view: &BlockView| {
        assert!(matches!(matched(view, &CHAIN)[..], [(1, 1)] | [(2, 1)]));
    };
    model(prepare, write, read, 2);
}
