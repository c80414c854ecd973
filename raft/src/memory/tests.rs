//! Checks which data survives a crash of the in-memory disk.

use std::io::{Read, Write};
use std::path::Path;

use super::*;
use crate::files::Files;
use crate::log::disk::{Disk, DiskContents};
use crate::testing;
use crate::types::{Entry, Vote};

fn entry(index: u64) -> Entry {
    testing::entry(1, index, 7)
}

fn content(handle: &MemoryHandle, path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    handle.open(Path::new(path))?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[test]
fn a_crash_keeps_synced_data_and_a_prefix_of_the_rest() {
    for kept in 0..=4 {
        let disk = MemoryDisk::new();
        let handle = disk.open();
        handle
            .write_synced(&[LogChange::Append(vec![entry(0), entry(1)])])
            .unwrap();
        let vote = Vote::new(2, 1);
        let entries = vec![entry(2), entry(3)];
        let changes = [
            LogChange::Append(entries),
            LogChange::Vote(vote),
            LogChange::Truncate { from: 3 },
        ];
        handle.write(&changes).unwrap();
        disk.crash(|unsynced| {
            assert_eq!(unsynced, 4, "an append is torn between its entries");
            kept
        });
        let contents = disk.open().contents().unwrap();
        let last = [1, 2, 3, 3, 2][kept];
        let expected = DiskContents {
            vote: (kept >= 3).then_some(vote),
            last: Some(entry(last).log_id),
            ..DiskContents::default()
        };
        assert_eq!(contents, expected, "{kept} kept");
        let read = disk.open().read(0..9, usize::MAX).unwrap();
        assert_eq!(read, (0..=last).map(entry).collect::<Vec<_>>());
        disk.crash(|unsynced| unsynced);
        assert_eq!(disk.open().contents().unwrap(), contents);
    }
}

#[test]
fn a_handle_from_before_a_crash_changes_nothing() {
    let disk = MemoryDisk::new();
    let (before, path) = (disk.open(), Path::new("/data/raft/lock"));
    let lock = before.lock(path).unwrap();
    assert!(disk.open().lock(path).is_err(), "one replica at a time");
    let mut file = before.create(Path::new("/data/a")).unwrap();
    disk.crash(|unsynced| unsynced);
    assert!(before.write(&[LogChange::Vote(Vote::new(1, 1))]).is_err());
    assert!(before.sync().is_err());
    assert!(before.read(0..1, 1).is_err());
    assert!(file.write(b"late").is_err());
    let after = disk.open();
    assert_eq!(content(&after, "/data/a").unwrap(), b"");
    assert_eq!(after.contents().unwrap(), DiskContents::default());
    let held = after.lock(path).unwrap();
    drop(lock);
    assert!(
        after.lock(path).is_err(),
        "it is not the first one's to free"
    );
    drop(held);
    after.lock(path).unwrap();
}

#[test]
fn a_file_survives_once_it_and_its_folder_are_synced() {
    let disk = MemoryDisk::new();
    let handle = disk.open();
    let write = |path: &str, bytes: &[u8], sync: bool| {
        let mut file = handle.create(Path::new(path)).unwrap();
        file.write_all(bytes).unwrap();
        if sync {
            file.sync().unwrap();
        }
    };
    write("/data/kept", b"1", true);
    write("/data/empty", b"2", false);
    write("/data/new", b"3", true);
    handle
        .rename(Path::new("/data/new"), Path::new("/data/kept"))
        .unwrap();
    handle.sync_folder(Path::new("/data")).unwrap();
    write("/data/lost", b"4", true);
    handle.remove(Path::new("/data/kept")).unwrap();
    assert!(content(&handle, "/data/kept").is_err());
    disk.crash(|_| 0);
    let handle = disk.open();
    assert_eq!(content(&handle, "/data/kept").unwrap(), b"3");
    assert_eq!(content(&handle, "/data/empty").unwrap(), b"");
    let mut listed = handle.list(Path::new("/data")).unwrap();
    listed.sort();
    assert_eq!(listed, [Path::new("/data/empty"), Path::new("/data/kept")]);
}

#[test]
fn a_short_disk_refuses_new_writes_until_it_recovers() {
    let disk = MemoryDisk::new();
    let handle = disk.open();
    let path = Path::new("/data/a");
    let mut open_file = handle.create(path).unwrap();
    disk.run_short(Some(DiskShortage::Space));
    assert!(handle.room_for(&[]).is_err());
    assert!(open_file.write(b"more").is_err());
    assert_eq!(content(&handle, "/data/a").unwrap(), b"");
    disk.run_short(Some(DiskShortage::Descriptors));
    handle.room_for(&[]).unwrap();
    open_file.write_all(b"1").unwrap();
    assert!(handle.create(Path::new("/data/b")).is_err());
    assert!(handle.open(path).is_err() && handle.list(Path::new("/data")).is_err());
    disk.run_short(None);
    assert_eq!(content(&handle, "/data/a").unwrap(), b"1");
    assert!(!handle.exists(Path::new("/data/b")));
}

#[test]
fn a_broken_disk_refuses_writes_until_repaired() {
    let disk = MemoryDisk::new();
    let handle = disk.open();
    disk.fail(Some("disk full".to_owned()));
    let change = [LogChange::Vote(Vote::new(1, 1))];
    assert!(handle.write(&change).is_err());
    assert!(handle.create(Path::new("/data/a")).is_err());
    assert_eq!(handle.contents().unwrap(), DiskContents::default());
    disk.fail(None);
    handle.write(&change).unwrap();
    assert_eq!(handle.contents().unwrap().vote, Some(Vote::new(1, 1)));
}
