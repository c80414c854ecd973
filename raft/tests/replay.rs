//! A store can be replayed offline to any index that it holds, and stays unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{Cluster, Journal};
use raft::{ReplayError, ReplayRange, StartError};

/// Returns every file below a folder, with its bytes.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path.display().to_string(), fs::read(&path).unwrap());
        }
    }
    found
}

/// Replays to `to`, and checks that no copy is left behind.
fn replayed(data: &Path, to: Option<u64>) -> (Result<ReplayRange, ReplayError>, Journal) {
    let scratch = tempfile::tempdir().unwrap();
    let (copy, mut journal) = (scratch.path().join("copy"), Journal::default());
    let range = raft::replay(data, &copy, to, &mut journal);
    assert!(!copy.exists(), "the copy is removed");
    (range, journal)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_can_be_replayed_to_any_index_it_has() {
    let mut cluster = Cluster::found_with(1, |options| options.snapshot_every_entries = 20).await;
    let seat = &mut cluster.seats[0];
    for number in 0..30 {
        seat.propose(&format!("{number} {}", "x".repeat(40_000)))
            .await;
    }
    seat.wait("a snapshot", |status| status.snapshot.is_some())
        .await;
    let last = seat.propose("the last").await.index;
    let folder = seat.folder.path().to_owned();

    let (refused, _) = replayed(&folder, None);
    let Err(ReplayError::Store(StartError::Io { source, .. })) = refused else {
        panic!("a store in use is refused: {refused:?}");
    };
    assert!(
        source.to_string().contains("a replica runs on it"),
        "{source}"
    );

    let all = seat.journal.commands();
    seat.shutdown().await;
    let before = files(&folder);
    let (range, journal) = replayed(&folder, Some(last));
    let range = range.unwrap();
    assert_eq!(range.last, last);
    assert!(range.snapshot > 0 && range.snapshot <= range.committed && range.committed <= last);
    assert_eq!(journal.commands(), all);
    for index in [range.snapshot, range.snapshot + 1, last - 1] {
        let (range_again, journal) = replayed(&folder, Some(index));
        assert_eq!(range_again.unwrap(), range);
        let until: BTreeMap<_, _> = all
            .range(..=index)
            .map(|(at, it)| (*at, it.clone()))
            .collect();
        assert_eq!(journal.commands(), until, "index {index}");
    }
    let (by_default, journal) = replayed(&folder, None);
    let until = all.range(..=by_default.unwrap().committed).count();
    assert_eq!(journal.commands().len(), until);
    for wanted in [0, range.snapshot - 1, last + 1] {
        let (refused, journal) = replayed(&folder, Some(wanted));
        let error = refused.unwrap_err();
        assert!(matches!(error, ReplayError::OutOfRange { .. }), "{error}");
        let (from, to) = (range.snapshot.to_string(), last.to_string());
        let told = error.to_string();
        assert!(told.contains(&from) && told.contains(&to), "{told}");
        assert!(journal.commands().is_empty());
    }
    assert!(files(&folder) == before, "the store stays as it is");
}

#[test]
fn a_folder_without_a_store_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (refused, _) = replayed(folder.path(), None);
    assert!(matches!(refused, Err(ReplayError::NoStore(at)) if at == folder.path()));
}
