//! Checks that the running log opens no file, by running it in a process without free descriptors.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::disk::{Disk, LogChange};
use super::sled::SledDisk;
use crate::files::Layout;
use crate::testing::entries;
use crate::types::{Vote, log_id};

/// Environment variable set in the child process, since the limit applies to the whole process.
const ALONE: &str = "RAFT_TEST_WITHOUT_DESCRIPTORS";
const NAME: &str = "log::descriptor_tests::a_running_log_opens_no_descriptors";

#[test]
fn a_running_log_opens_no_descriptors() {
    if std::env::var_os(ALONE).is_some() {
        return work_without_descriptors();
    }
    let program = std::env::current_exe().unwrap();
    let alone = Command::new(program)
        .args(["--exact", NAME, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&alone.stderr);
    assert!(alone.status.success(), "{said}");
}

fn work_without_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path());
    layout.create().unwrap();
    let (disk, _) = SledDisk::open(&layout).unwrap();
    let limit = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, none).unwrap();
    assert!(
        std::fs::File::open(folder.path()).is_err(),
        "a descriptor is free"
    );

    // Votes move the mark, truncations lower it; trees are created and dropped, segments fill.
    for term in 1..=6 {
        let first = (term - 1) * 1500;
        disk.write_synced(&[LogChange::Vote(Vote::new_committed(term, 1))])
            .unwrap();
        disk.write_synced(&[LogChange::Append(entries(term, first..first + 1600, 2000))])
            .unwrap();
        disk.write_synced(&[LogChange::Truncate { from: first + 1500 }])
            .unwrap();
        let upto = log_id(term, 1, first + 1000);
        disk.write_synced(&[LogChange::Purge { upto }]).unwrap();
    }
    disk.write_synced(&[LogChange::Append(entries(6, 9000..9001, 1_000_000))])
        .unwrap();
    let read = disk.read(8900..9001, usize::MAX).unwrap();
    assert_eq!(read.len(), 101);

    setrlimit(Resource::Nofile, limit).unwrap();
    disk.close();
    let (disk, contents) = SledDisk::open(&layout).unwrap();
    assert_eq!(contents.last.map(|last| last.index), Some(9000));
    assert_eq!(contents.vote, Some(Vote::new_committed(6, 1)));
    disk.close();
}
