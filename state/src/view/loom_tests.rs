//! The view under every interleaving that loom finds: one writer, one or two readers, and tables of
//! one shard with a handful of entries.

use loom::thread;

use crate::ids::{BlockHash, Slot};
use crate::view::table::SHARD_BITS;
use crate::view::{BlockView, ViewWriter, mix, spread};

const CHAIN: [BlockHash; 3] = [BlockHash(0x11), BlockHash(0x22), BlockHash(0x33)];

fn owners(view: &BlockView, block: BlockHash) -> Vec<u16> {
    let mut owners = Vec::new();
    view.owners(block, |slot| owners.push(slot.0));
    owners
}

fn matched(view: &BlockView, chain: &[BlockHash]) -> Vec<(u16, u32)> {
    let mut found = Vec::new();
    view.match_prefix(chain, |slot, blocks| found.push((slot.0, blocks)));
    found
}

fn writer() -> ViewWriter {
    let mut writer = ViewWriter::new(1);
    writer.admit(Slot(5));
    // Replaces the one-entry table of a new index, so that each model starts with a table that has
    // room.
    writer.insert(Slot(0), BlockHash(0x99));
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
fn loom_a_new_key_never_shows_an_owner_it_did_not_have() {
    let write = |writer: &mut ViewWriter| {
        writer.insert(Slot(1), CHAIN[0]);
        writer.insert(Slot(2), CHAIN[1]);
    };
    let read = |view: &BlockView| {
        assert!(matches!(owners(view, CHAIN[0])[..], [] | [1]));
        assert!(matches!(owners(view, CHAIN[1])[..], [] | [2]));
        assert!(owners(view, CHAIN[2]).is_empty());
    };
    model(|_| {}, write, read, 2);
}

#[test]
fn loom_a_key_is_seen_whole_or_not_at_all() {
    // Probes for block 0 begin where `stranger` goes. A reader that saw its owner before its key
    // would take the zeros of an unused slot for block 0.
    fn stranger() -> BlockHash {
        let home = |block: &BlockHash| spread((mix(*block) << SHARD_BITS >> 32) as u32, 8);
        let mut others = (1_u64..).map(|hash| BlockHash(hash << 31 | 1 << 62));
        others
            .find(|other| home(other) == home(&BlockHash(0)))
            .expect("one in eight does")
    }
    let write = |writer: &mut ViewWriter| writer.insert(Slot(1), stranger());
    let read = |view: &BlockView| {
        assert!(owners(view, BlockHash(0)).is_empty());
        assert!(matches!(owners(view, stranger())[..], [] | [1]));
    };
    model(|_| {}, write, read, 2);
}

#[test]
fn loom_removal_and_return_show_only_owners_of_that_key() {
    let prepare = |writer: &mut ViewWriter| writer.insert(Slot(1), CHAIN[0]);
    let write = |writer: &mut ViewWriter| {
        writer.remove(Slot(1), CHAIN[0]);
        writer.insert(Slot(2), CHAIN[1]);
        writer.insert(Slot(3), CHAIN[0]);
    };
    let read = |view: &BlockView| {
        assert!(matches!(owners(view, CHAIN[0])[..], [] | [1] | [3]));
        assert!(matches!(owners(view, CHAIN[1])[..], [] | [2]));
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_moving_to_a_row_and_within_it_loses_and_invents_nothing() {
    let prepare = |writer: &mut ViewWriter| {
        for slot in 0..3 {
            writer.insert(Slot(slot), CHAIN[0]);
        }
    };
    // A row, for which the table is rebuilt; then a change within that row.
    let write = |writer: &mut ViewWriter| {
        writer.insert(Slot(3), CHAIN[0]);
        writer.insert(Slot(4), CHAIN[0]);
        writer.remove(Slot(0), CHAIN[0]);
    };
    let read = |view: &BlockView| {
        let owners = owners(view, CHAIN[0]);
        let stages: [&[u16]; 4] = [&[0, 1, 2], &[0, 1, 2, 3], &[0, 1, 2, 3, 4], &[1, 2, 3, 4]];
        assert!(stages.contains(&&owners[..]), "{owners:?}");
    };
    model(prepare, write, read, 2);
}

#[test]
fn loom_growing_hides_nothing_that_was_there() {
    // The smallest table takes six keys; the prepared one holds five.
    let prepare = |writer: &mut ViewWriter| {
        for filler in 0..3 {
            writer.insert(Slot(0), BlockHash(0x1000 + filler));
        }
        writer.insert(Slot(1), CHAIN[0]);
    };
    let write = |writer: &mut ViewWriter| {
        writer.insert(Slot(1), CHAIN[1]);
        writer.insert(Slot(1), CHAIN[2]);
    };
    let read = |view: &BlockView| {
        assert_eq!(owners(view, CHAIN[0]), [1]);
        // Parents before children: a reader that sees the child sees the parent afterwards.
        if view.owns(Slot(1), CHAIN[2]) {
            assert!(view.owns(Slot(1), CHAIN[1]));
        }
        assert!(matches!(matched(view, &CHAIN)[..], [(1, 1..=3)]));
    };
    model(prepare, write, read, 1);
}

#[test]
fn loom_eviction_shortens_matches_and_never_lengthens_them() {
    let prepare = |writer: &mut ViewWriter| {
        for block in CHAIN {
            writer.insert(Slot(1), block);
        }
        writer.insert(Slot(2), CHAIN[0]);
    };
    let write = |writer: &mut ViewWriter| {
        writer.remove(Slot(1), CHAIN[2]);
        writer.remove(Slot(1), CHAIN[1]);
        writer.remove(Slot(2), CHAIN[0]);
    };
    let read = |view: &BlockView| {
        // Children before parents: what is gone from a parent is gone from its children.
        let is_first_gone = !view.owns(Slot(1), CHAIN[1]);
        if is_first_gone {
            assert!(!view.owns(Slot(1), CHAIN[2]));
        }
        for (slot, blocks) in matched(view, &CHAIN) {
            let most = if slot == 1 { 3 } else { 1 };
            assert!(
                (slot == 1 || slot == 2) && (1..=most).contains(&blocks),
                "{slot} {blocks}"
            );
        }
        // A second look never finds more than an earlier one left.
        let before = matched(view, &CHAIN);
        let after = matched(view, &CHAIN);
        for (slot, blocks) in after {
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
fn loom_a_restore_shows_the_old_content_or_the_new() {
    let prepare = |writer: &mut ViewWriter| writer.insert(Slot(1), CHAIN[0]);
    let write = |writer: &mut ViewWriter| {
        let mut other = writer.unpublished();
        other.admit(Slot(2));
        other.insert(Slot(2), CHAIN[0]);
        writer.adopt(other);
    };
    let read = |view: &BlockView| {
        assert!(matches!(owners(view, CHAIN[0])[..], [1] | [2]));
    };
    model(prepare, write, read, 2);
}
