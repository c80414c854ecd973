//! A power cut keeps what was synced, and of what was not, any pages in any mix.
//!
//! Killing a process loses nothing that was written, so it proves nothing about syncing. Here the
//! disk after a cut is made up: the data file as it was at the last acknowledged write, with a
//! pseudo-random half of the pages that were written since. The log must open and hold everything
//! acknowledged.

use std::fs;
use std::path::Path;

use bytes::Bytes;

use super::disk::{Change, Disk};
use super::sled::SledDisk;
use crate::files::Layout;
use crate::types::{Command, Entry, LeaderId, LogId, Payload, Vote};

const PAGE_BYTES: usize = 4096;

fn entry(index: u64, bytes: usize) -> Entry {
    let leader_id = LeaderId {
        term: 1,
        node_id: 1,
    };
    let command = (0..bytes)
        .map(|at| (at as u64 ^ index) as u8)
        .collect::<Vec<u8>>();
    Entry {
        log_id: LogId { leader_id, index },
        payload: Payload::Normal(Command(Bytes::from(command))),
    }
}

/// A small generator of its own keeps each run the same.
struct Coin(u64);

impl Coin {
    fn toss(&mut self) -> bool {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 63 == 1
    }
}

/// Copies a folder with all in it.
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

/// The data file after a cut: synced pages, and some of those written since.
fn cut(synced: &[u8], written: &[u8], coin: &mut Coin) -> Vec<u8> {
    let mut after = synced.to_vec();
    for (at, page) in written.chunks(PAGE_BYTES).enumerate() {
        let range = at * PAGE_BYTES..at * PAGE_BYTES + page.len();
        if synced.get(range.clone()) != Some(page) && coin.toss() {
            after.resize(after.len().max(range.end), 0);
            after[range].copy_from_slice(page);
        }
    }
    after
}

/// Writes batches of entries, cuts the power during the last, and looks what is left.
fn survive(bytes: usize, batches: u64, seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    layout.create().unwrap();
    let (disk, _) = SledDisk::open(&layout).unwrap();
    let vote = Vote::new_committed(1, 1);
    disk.write(&[Change::Vote(vote)]).unwrap();
    let mut coin = Coin(seed);
    let mut next = 0;
    let mut batch = |size: u64| {
        let entries: Vec<Entry> = (next..next + size)
            .map(|index| entry(index, bytes))
            .collect();
        next += size;
        Change::Append(entries)
    };
    for number in 0..batches {
        disk.write(&[batch(number % 5 + 1)]).unwrap();
    }
    let data = layout.log().join("db");
    let acknowledged = fs::read(&data).unwrap();
    let unacknowledged = batch(3);
    disk.write_unsynced(&[unacknowledged]).unwrap();
    let written = fs::read(&data).unwrap();
    let total = next - 3;

    for round in 0..4 {
        let after = tempfile::tempdir().unwrap();
        copy(folder.path(), after.path());
        let after = Layout::new(after.path());
        let content = if round == 0 {
            acknowledged.clone()
        } else {
            cut(&acknowledged, &written, &mut coin)
        };
        fs::write(after.log().join("db"), content).unwrap();
        let (left, contents) = SledDisk::open(&after).unwrap();
        assert_eq!(contents.vote, Some(vote));
        let read = left.read(0..total, usize::MAX).unwrap();
        assert_eq!(
            read.len() as u64,
            total,
            "entries of {bytes} bytes, seed {seed}, round {round}"
        );
        for (index, found) in (0..).zip(read) {
            assert!(found == entry(index, bytes), "entry {index} differs");
        }
        left.close();
    }
    disk.close();
}

#[test]
fn a_power_cut_loses_no_acknowledged_entry_of_1_kib() {
    for seed in 0..6 {
        survive(1024, 40 + seed, seed);
    }
}

#[test]
fn a_power_cut_loses_no_acknowledged_entry_of_16_kib() {
    for seed in 0..4 {
        survive(16 * 1024, 40 + seed, seed);
    }
}

#[test]
fn a_power_cut_loses_no_acknowledged_entry_of_64_kib() {
    for seed in 0..4 {
        survive(64 * 1024, 40 + seed, seed);
    }
}

/// Damage somewhere in the data file is named, whatever sled makes of it.
#[test]
fn a_damaged_log_does_not_open() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    layout.create().unwrap();
    let (disk, _) = SledDisk::open(&layout).unwrap();
    disk.write(&[Change::Vote(Vote::new_committed(1, 1))])
        .unwrap();
    for index in 0..64 {
        disk.write(&[Change::Append(vec![entry(index, 4096)])])
            .unwrap();
    }
    disk.close();
    let data = layout.log().join("db");
    let whole = fs::read(&data).unwrap();
    let needle = &entry(20, 4096);
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
