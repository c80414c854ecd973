//! Checks that a power cut keeps all synced data and any mix of the unsynced pages.
//!
//! Killing a process loses no written data, so it proves nothing about syncing. These tests
//! construct the disk after a cut: the data file as of the last acknowledged write, plus a
//! pseudo-random half of the pages written since. The log must open and contain everything
//! acknowledged. The mark is torn in the same way, in pieces smaller than a slot.

use std::fs;
use std::path::Path;

use super::disk::{Disk, DiskContents, LogChange};
use super::sled::SledDisk;
use crate::files::Layout;
use crate::testing::{entries, entry};
use crate::types::{Entry, LogId, Payload, Vote};

const PAGE_BYTES: usize = 4096;
/// Size of the pieces in which a slot of the mark is torn, in bytes.
const MARK_PIECE_BYTES: usize = 16;

/// A small seeded generator, so that every run is identical.
struct Coin(u64);

impl Coin {
    fn toss(&mut self) -> bool {
        self.below(2) == 1
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // The lower bits of a linear congruential generator have short periods.
        ((self.0 >> 33) * limit) >> 31
    }
}

/// Copies a folder recursively.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for item in fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        let target = to.join(item.file_name());
        if item.file_type().unwrap().is_dir() {
            copy(&item.path(), &target);
        } else {
            fs::copy(item.path(), target).unwrap();
        }
    }
}

/// Returns a file after a power cut: the synced content plus some of the pieces written since.
fn cut_in_pieces(synced: &[u8], written: &[u8], bytes: usize, coin: &mut Coin) -> Vec<u8> {
    let mut after = synced.to_vec();
    for (at, page) in written.chunks(bytes).enumerate() {
        let range = at * bytes..at * bytes + page.len();
        if synced.get(range.clone()) != Some(page) && coin.toss() {
            after.resize(after.len().max(range.end), 0);
            after[range].copy_from_slice(page);
        }
    }
    after
}

/// Creates an empty log in a temporary folder that is removed with the first value.
fn new_log() -> (tempfile::TempDir, Layout, SledDisk) {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    layout.create().unwrap();
    let (disk, _) = SledDisk::open(&layout).unwrap();
    (folder, layout, disk)
}

/// Writes batches of entries, cuts the power during the last one and checks what remains.
fn survive(bytes: usize, batches: u64, seed: u64) {
    let (folder, layout, disk) = new_log();
    let vote = Vote::new_committed(1, 1);
    disk.write_synced(&[LogChange::Vote(vote)]).unwrap();
    let mut coin = Coin(seed);
    let mut next = 0;
    let mut batch = |size: u64| {
        next += size;
        LogChange::Append(entries(1, next - size..next, bytes))
    };
    for number in 0..batches {
        disk.write_synced(&[batch(number % 5 + 1)]).unwrap();
    }
    let data = layout.log().join("db");
    let acknowledged = fs::read(&data).unwrap();
    disk.write(&[batch(3)]).unwrap();
    let (written, mark) = (fs::read(&data).unwrap(), fs::read(layout.mark()).unwrap());
    let expected = entries(1, 0..next - 3, bytes);
    for round in 0..4 {
        let content = match round {
            0 => acknowledged.clone(),
            _ => cut_in_pieces(&acknowledged, &written, PAGE_BYTES, &mut coin),
        };
        let left = left(folder.path(), &content, &mark);
        assert_eq!(left.vote, Some(vote));
        assert!(
            left.entries.get(..expected.len()) == Some(&expected[..]),
            "entries of {bytes} bytes differ: seed {seed}, round {round}"
        );
    }
    disk.close();
}

#[test]
fn a_power_cut_loses_no_acknowledged_entry_of_1_kib() {
    (0..6).for_each(|seed| survive(1024, 40 + seed, seed));
}

#[test]
fn a_power_cut_loses_no_acknowledged_entry_of_16_kib() {
    (0..4).for_each(|seed| survive(16 * 1024, 40 + seed, seed));
}

#[test]
fn a_power_cut_loses_no_acknowledged_entry_of_64_kib() {
    (0..4).for_each(|seed| survive(64 * 1024, 40 + seed, seed));
}

/// Expected contents of a log.
#[derive(Debug, Clone, PartialEq, Default)]
struct Model {
    vote: Option<Vote>,
    purged: Option<LogId>,
    /// Entries after the last purged one.
    entries: Vec<Entry>,
}

impl Model {
    fn first(&self) -> u64 {
        self.purged.map_or(0, |purged| purged.index + 1)
    }

    fn next(&self) -> u64 {
        self.first() + self.entries.len() as u64
    }

    fn cut_to(&self, next: u64) -> Self {
        let mut cut = self.clone();
        cut.entries.truncate((next - self.first()) as usize);
        cut
    }

    /// Returns every intermediate state of `change`; the last one is its result.
    fn ways(&self, change: &LogChange) -> Vec<Self> {
        let mut after = self.clone();
        match change {
            LogChange::Vote(vote) => after.vote = Some(*vote),
            LogChange::Committed(_) => {}
            LogChange::Append(entries) => {
                return (0..=entries.len())
                    .map(|count| {
                        let mut some = self.clone();
                        some.entries.extend_from_slice(&entries[..count]);
                        some
                    })
                    .collect();
            }
            LogChange::Truncate { from } => {
                let nexts = (*from..=self.next()).rev();
                return nexts.map(|next| self.cut_to(next)).collect();
            }
            LogChange::Purge { upto } => {
                after
                    .entries
                    .drain(..(upto.index + 1 - self.first()) as usize);
                after.purged = Some(*upto);
            }
        }
        vec![after]
    }

    fn read(disk: &SledDisk, contents: &DiskContents) -> Self {
        Self {
            vote: contents.vote,
            purged: contents.purged,
            entries: {
                let first = contents.purged.map_or(0, |purged| purged.index + 1);
                disk.read(first..u64::MAX >> 1, usize::MAX).unwrap()
            },
        }
    }
}

/// Returns a batch that Raft could request: new entries, a new leader's replacements, or a purge.
fn some_batch(model: &Model, term: &mut u64, coin: &mut Coin) -> Vec<LogChange> {
    let append = |term, from, count| LogChange::Append(entries(term, from..from + count, 40));
    let held = model.entries.len() as u64;
    match coin.below(4) {
        0 if held > 0 => {
            *term += 1;
            let from = model.next() - coin.below(held.min(3000)) - 1;
            let vote = LogChange::Vote(Vote::new_committed(*term, 1));
            let count = 1 + coin.below(400);
            vec![
                vote,
                LogChange::Truncate { from },
                append(*term, from, count),
            ]
        }
        1 if held > 1500 => {
            let upto = model.entries[coin.below(held) as usize].log_id;
            let next = model.next();
            vec![
                LogChange::Purge { upto },
                append(*term, next, 1 + coin.below(50)),
            ]
        }
        _ => vec![append(*term, model.next(), 1 + coin.below(900))],
    }
}

#[test]
fn a_power_cut_amid_truncations_and_purges_leaves_a_reached_state() {
    for seed in 0..4 {
        let (folder, layout, disk) = new_log();
        let (mut model, mut term, mut coin) = (Model::default(), 1, Coin(seed));
        let data = layout.log().join("db");
        for _ in 0..12 {
            let batch = some_batch(&model, &mut term, &mut coin);
            disk.write_synced(&batch).unwrap();
            for change in &batch {
                model = model.ways(change).pop().unwrap();
            }
        }
        let acknowledged = fs::read(&data).unwrap();
        let batch = some_batch(&model, &mut term, &mut coin);
        disk.write(&batch).unwrap();
        let (written, mark) = (fs::read(&data).unwrap(), fs::read(layout.mark()).unwrap());
        let mut ways = vec![model];
        for change in &batch {
            let more = ways.last().unwrap().ways(change);
            ways.extend(more);
        }
        for _ in 0..4 {
            let content = cut_in_pieces(&acknowledged, &written, PAGE_BYTES, &mut coin);
            assert!(
                ways.contains(&left(folder.path(), &content, &mark)),
                "seed {seed}: none of the states on the way"
            );
        }
        disk.close();
    }
}

/// Reads the log from a data file and a mark as a cut left them.
fn left(folder: &Path, data: &[u8], mark: &[u8]) -> Model {
    let after = tempfile::tempdir().unwrap();
    copy(folder, after.path());
    let after = Layout::new(after.path());
    fs::write(after.log().join("db"), data).unwrap();
    fs::write(after.mark(), mark).unwrap();
    let (disk, contents) = SledDisk::open(&after).unwrap();
    let left = Model::read(&disk, &contents);
    disk.close();
    left
}

/// The mark is lowered before entries are removed and raised after others are synced. Torn at
/// either moment, it promises no more than the log contains.
#[test]
fn a_power_cut_amid_a_mark_leaves_a_valid_mark() {
    let (mut lowered, mut raised) = (0, 0);
    for seed in 0..4 {
        let (folder, layout, disk) = new_log();
        let (mut model, mut term, mut coin) = (Model::default(), 1, Coin(seed));
        let data = || fs::read(layout.log().join("db")).unwrap();
        let mark = || fs::read(layout.mark()).unwrap();
        for _ in 0..10 {
            let batch = some_batch(&model, &mut term, &mut coin);
            let (data_before, mark_before) = (data(), mark());
            disk.write(&batch).unwrap();
            let mark_between = mark();
            if mark_between != mark_before {
                lowered += 1;
                let torn = cut_in_pieces(&mark_before, &mark_between, MARK_PIECE_BYTES, &mut coin);
                assert!(
                    left(folder.path(), &data_before, &torn) == model,
                    "seed {seed}"
                );
            }
            for change in &batch {
                model = model.ways(change).pop().unwrap();
            }
            disk.sync().unwrap();
            let mark_after = mark();
            if mark_after != mark_between {
                raised += 1;
                let torn = cut_in_pieces(&mark_between, &mark_after, MARK_PIECE_BYTES, &mut coin);
                assert!(left(folder.path(), &data(), &torn) == model, "seed {seed}");
            }
        }
        disk.close();
    }
    assert!(
        lowered > 2 && raised > 8,
        "lowered {lowered}, raised {raised} times"
    );
}

/// Everything is synced when opened, because sled never syncs the file with the layout of its data.
#[test]
fn opening_a_log_syncs_all_files() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    layout.create().unwrap();
    let synced = || super::sled::SYNCED.with(|synced| std::mem::take(&mut *synced.borrow_mut()));
    let (disk, _) = SledDisk::open(&layout).unwrap();
    let files = synced();
    for name in ["conf", "db"] {
        assert!(files.contains(&layout.log().join(name)), "{name}");
    }
    disk.write(&[LogChange::Append(vec![entry(1, 0, 10)])])
        .unwrap();
    // As after a kill: written data is present and must be synced from now on.
    std::mem::forget(disk);
    let after = tempfile::tempdir().unwrap();
    copy(folder.path(), after.path());
    let after = Layout::new(after.path());
    let (disk, contents) = SledDisk::open(&after).unwrap();
    assert_eq!(contents.last.map(|last| last.index), Some(0));
    assert!(synced().contains(&after.log().join("db")));
    disk.close();
}

/// Damage anywhere in the data file is reported, however sled interprets it.
#[test]
fn a_damaged_log_does_not_open() {
    let (_folder, layout, disk) = new_log();
    disk.write_synced(&[LogChange::Vote(Vote::new_committed(1, 1))])
        .unwrap();
    for index in 0..64 {
        disk.write_synced(&[LogChange::Append(vec![entry(1, index, 4096)])])
            .unwrap();
    }
    disk.close();
    let data = layout.log().join("db");
    let whole = fs::read(&data).unwrap();
    let needle = &entry(1, 20, 4096);
    let Payload::Normal(command) = &needle.payload else {
        unreachable!()
    };
    let at: Vec<usize> = (0..whole.len() - 4096)
        .filter(|at| whole[*at..*at + 64] == command.0[..64] && whole[*at..*at + 4096] == command.0)
        .collect();
    assert!(!at.is_empty(), "the entry is in the file");
    let mut damaged = whole;
    for at in at {
        damaged[at + 2000] ^= 1;
    }
    fs::write(&data, damaged).unwrap();
    match SledDisk::open(&layout) {
        Err(crate::error::StartError::Damaged { path, .. }) => {
            assert_eq!(path, data.display().to_string());
        }
        Err(other) => panic!("not named as damage: {other}"),
        Ok((_, contents)) => panic!("opened with {contents:?}"),
    }
}
