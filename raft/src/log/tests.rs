//! Runs openraft's test suite on both disks and checks what a restart must find.

use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};
use openraft::testing::log::{StoreBuilder, Suite};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::adapter::StateMachineAdapter;
use crate::memory::{DiskShortage, MemoryDisk};
use crate::snapshot::SnapshotFolder;
use crate::storage::Storage;
use crate::testing::{Journal, entries};
use crate::types;

struct Builder {
    on_sled: bool,
}

impl StoreBuilder<Config, LogStore, StateMachineAdapter, TempDir> for Builder {
    async fn build(
        &self,
    ) -> Result<(TempDir, LogStore, StateMachineAdapter), openraft::StorageError<Config>> {
        let folder = tempfile::tempdir().unwrap();
        let storage = if self.on_sled {
            Storage::Sled
        } else {
            Storage::Memory(MemoryDisk::new())
        };
        let log = open(&folder, &storage).unwrap();
        let layout = Layout::new(folder.path());
        let snapshots = SnapshotFolder::open(layout.files.clone(), layout.snapshots()).unwrap();
        let host = StateMachineAdapter::open(
            Box::new(Journal::default()),
            snapshots,
            storage.blocking(),
            FatalError::new(),
            CancellationToken::new(),
        )
        .unwrap();
        Ok((folder, log, host))
    }
}

fn open(folder: &TempDir, storage: &Storage) -> Result<LogStore, StartError> {
    let layout = Layout::new(folder.path());
    layout.create().unwrap();
    storage.open_log(&layout, FatalError::new())
}

fn log_id(term: u64, index: u64) -> LogId {
    types::log_id(term, 1, index)
}

/// Closes the log and reopens it.
async fn reopen(log: LogStore, folder: &TempDir) -> LogStore {
    log.close().await;
    drop(log);
    open(folder, &Storage::Sled).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_on_sled_passes_the_suite() {
    Suite::test_all(Builder { on_sled: true }).await.unwrap();
}

#[tokio::test]
async fn the_log_in_memory_passes_the_suite() {
    Suite::test_all(Builder { on_sled: false }).await.unwrap();
}

#[tokio::test]
async fn a_restart_recovers_vote_entries_and_committed() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(&folder, &Storage::Sled).unwrap();
    assert!(log.is_pristine());
    log.save_vote(&Vote::new_committed(3, 1)).await.unwrap();
    log.blocking_append(entries(3, 0..5, 100_000))
        .await
        .unwrap();
    log.save_committed(Some(log_id(3, 3))).await.unwrap();
    log.blocking_append(entries(3, 5..2000, 10)).await.unwrap();

    let mut log = reopen(log, &folder).await;
    assert_eq!(
        log.read_vote().await.unwrap(),
        Some(Vote::new_committed(3, 1))
    );
    assert_eq!(log.read_committed().await.unwrap(), Some(log_id(3, 3)));
    let read = log.try_get_log_entries(0..3000).await.unwrap();
    assert_eq!(read.len(), 2000);
    assert_eq!(read[..5], entries(3, 0..5, 100_000));
    assert_eq!(read[5..], entries(3, 5..2000, 10));
    log.close().await;
}

#[tokio::test]
async fn a_restart_forgets_what_was_truncated_and_purged() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(&folder, &Storage::Sled).unwrap();
    log.blocking_append(entries(1, 0..3000, 10)).await.unwrap();
    log.truncate_after(Some(log_id(1, 1499))).await.unwrap();
    log.blocking_append(entries(2, 1500..1600, 20))
        .await
        .unwrap();
    log.purge(log_id(1, 1199)).await.unwrap();

    let mut log = reopen(log, &folder).await;
    let state = log.get_log_state().await.unwrap();
    assert_eq!(state.last_purged_log_id, Some(log_id(1, 1199)));
    assert_eq!(state.last_log_id, Some(log_id(2, 1599)));
    let read = log.try_get_log_entries(0..9999).await.unwrap();
    assert_eq!(read[..300], entries(1, 1200..1500, 10));
    assert_eq!(read[300..], entries(2, 1500..1600, 20));

    // A snapshot can lie beyond the end of the log.
    log.purge(log_id(2, 5000)).await.unwrap();
    log.blocking_append(entries(2, 5001..5003, 10))
        .await
        .unwrap();
    let mut log = reopen(log, &folder).await;
    assert_eq!(
        log.try_get_log_entries(..).await.unwrap(),
        entries(2, 5001..5003, 10)
    );
    log.close().await;
}

#[tokio::test]
async fn evicted_entries_are_read_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(&folder, &Storage::Sled).unwrap();
    let bytes = 512 * 1024;
    let count = (2 * CACHE_BYTES_MAX / bytes) as u64;
    for index in 0..count {
        log.blocking_append(entries(1, index..index + 1, bytes))
            .await
            .unwrap();
    }
    assert!(lock(&log.memory.0).cache.len() < count as usize);
    let read = log.try_get_log_entries(..).await.unwrap();
    assert!(read == entries(1, 0..count, bytes), "entries differ");
    let some = log.limited_get_log_entries(3, count).await.unwrap();
    assert!(
        !some.is_empty() && some.len() <= 2,
        "{} entries",
        some.len()
    );
    log.close().await;
}

#[tokio::test]
async fn a_cached_entry_does_not_retain_its_read_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(&folder, &Storage::Memory(MemoryDisk::new())).unwrap();
    let read: Arc<[u8]> = Arc::from([7; 8192]);
    let slice = Bytes::from_owner(read.clone()).slice(100..110);
    let mut entry = entries(1, 0..1, 1).remove(0);
    entry.payload = Payload::Normal(types::Command(slice));
    log.blocking_append([entry]).await.unwrap();
    assert_eq!(lock(&log.memory.0).cache.len(), 1);
    assert_eq!(Arc::strong_count(&read), 1);
}

#[tokio::test]
async fn a_failed_disk_is_not_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let disk = MemoryDisk::new();
    let fault = FatalError::new();
    let layout = Layout::new(folder.path());
    let storage = Storage::Memory(disk.clone());
    let mut log = storage.open_log(&layout, fault.clone()).unwrap();
    log.blocking_append(entries(1, 0..1, 1)).await.unwrap();
    disk.fail(Some("disk full".to_owned()));
    assert!(log.blocking_append(entries(1, 1..2, 1)).await.is_err());
    assert_eq!(fault.get().as_deref(), Some("log: disk full"));
    disk.fail(None);
    assert!(
        log.save_vote(&Vote::new(2, 1)).await.is_err(),
        "it was not repaired for this replica"
    );
    assert_eq!(
        log.try_get_log_entries(0..1).await.unwrap(),
        entries(1, 0..1, 1)
    );
}

#[tokio::test]
async fn a_panic_in_the_disk_counts_as_failure() {
    let folder = tempfile::tempdir().unwrap();
    let disk = MemoryDisk::with_sync(|| panic!("on purpose"));
    let fault = FatalError::new();
    let storage = Storage::Memory(disk);
    let mut log = storage
        .open_log(&Layout::new(folder.path()), fault.clone())
        .unwrap();
    let error = log.blocking_append(entries(1, 0..1, 1)).await.unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert_eq!(
        fault.get().as_deref(),
        Some("log: the log's writer panicked")
    );
    assert!(log.save_vote(&Vote::new(2, 1)).await.is_err());
}

#[tokio::test]
async fn writes_wait_while_the_disk_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, fault) = (MemoryDisk::new(), FatalError::new());
    let layout = Layout::new(folder.path());
    let storage = Storage::Memory(disk.clone());
    let log = storage.open_log(&layout, fault.clone()).unwrap();
    disk.run_short(Some(DiskShortage::Space));
    let mut waiting = log.waiting();
    let mut writes = log.clone();
    let written = tokio::spawn(async move {
        writes.blocking_append(entries(1, 0..3, 1)).await?;
        writes.save_vote(&Vote::new(2, 1)).await
    });
    waiting.wait_for(Option::is_some).await.unwrap();
    assert_eq!(disk.open().contents().unwrap(), DiskContents::default());
    disk.run_short(None);
    written.await.unwrap().unwrap();
    assert_eq!(*waiting.borrow(), None);
    assert_eq!(fault.get(), None);
    let contents = disk.open().contents().unwrap();
    assert_eq!(contents.last, Some(log_id(1, 2)));
    assert_eq!(contents.vote, Some(Vote::new(2, 1)));
}

/// A batch that was given up leaves a gap: nothing may follow it, even if space becomes available.
#[tokio::test]
async fn a_log_stopped_on_a_full_disk_writes_nothing_later() {
    for blocking in [BlockingMode::InPlace, BlockingMode::Pool] {
        let (disk, fault) = (MemoryDisk::new(), FatalError::new());
        let handle = Arc::new(disk.open());
        let memory = LogCache::new(&*handle, DiskContents::default());
        let writer = LogWriter::start(handle, memory, fault.clone(), blocking).unwrap();
        disk.run_short(Some(DiskShortage::Space));
        let append = |indexes| {
            let (waiter, written) = oneshot::channel();
            let change = LogChange::Append(entries(1, indexes, 1));
            let done = WriteCallback::Waiter(waiter);
            (WriteOp { change, done }, written)
        };
        let (first, first_written) = append(0..1);
        writer.submit(first).await.unwrap();
        writer.waiting().wait_for(Option::is_some).await.unwrap();
        writer.stop_waiting();
        assert!(first_written.await.unwrap().is_err());
        disk.run_short(None);
        let (second, second_written) = append(1..2);
        writer.submit(second).await.unwrap();
        assert!(second_written.await.unwrap().is_err());
        assert_eq!(disk.open().contents().unwrap(), DiskContents::default());
        assert_eq!(fault.get(), None, "nothing is wrong with the disk");
        writer.finish().await;
        writer.close();
    }
}

#[tokio::test]
async fn a_committed_id_that_differs_from_its_entry_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let disk = MemoryDisk::new();
    let append = LogChange::Append(entries(5, 0..3, 1));
    let committed = |term| LogChange::Committed(log_id(term, 2));
    let storage = Storage::Memory(disk.clone());
    disk.open().write_synced(&[append, committed(3)]).unwrap();
    let mut log = open(&folder, &storage).unwrap();
    assert_eq!(log.read_committed().await.unwrap(), None);
    disk.open().write_synced(&[committed(5)]).unwrap();
    let mut log = open(&folder, &storage).unwrap();
    assert_eq!(log.read_committed().await.unwrap(), Some(log_id(5, 2)));
}

#[test]
fn an_entry_of_an_earlier_leader_stays_cached_until_written() {
    let memory = LogCache::new(&MemoryDisk::new().open(), DiskContents::default());
    let later = entries(5, 0..1, 1);
    lock(&memory.0).push(later[0].clone());
    memory.after(&[LogChange::Append(later)]);
    // The leader was replaced by one that has an older entry at this index.
    let older = entries(3, 0..1, CACHE_BYTES_MAX);
    lock(&memory.0).truncate(None);
    lock(&memory.0).push(older[0].clone());
    memory.after(&[LogChange::Truncate { from: 0 }]);
    let EntryLocation::All(found) = memory.read(0..1, usize::MAX) else {
        panic!("not in memory before it is on disk")
    };
    assert!(found == older, "entries differ");
    memory.after(&[LogChange::Append(older)]);
    assert!(lock(&memory.0).cache.is_empty(), "too large to stay");
}

#[tokio::test]
async fn a_failed_write_does_not_move_the_mark() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = open(&folder, &Storage::Sled).unwrap();
    log.save_vote(&Vote::new_committed(1, 1)).await.unwrap();
    log.blocking_append(entries(1, 0..3, 10)).await.unwrap();
    let layout = Layout::new(folder.path());
    let mark = std::fs::read(layout.mark()).unwrap();
    // Looks to the disk like a value that sled moved there.
    let strange = layout.log().join("blobs").join("1");
    std::fs::write(&strange, b"").unwrap();
    assert!(log.blocking_append(entries(1, 3..6, 10)).await.is_err());
    log.close().await;
    assert_eq!(std::fs::read(layout.mark()).unwrap(), mark);
    std::fs::remove_file(strange).unwrap();
    let mut log = reopen(log, &folder).await;
    let read = log.try_get_log_entries(0..3).await.unwrap();
    assert_eq!(read, entries(1, 0..3, 10));
    log.close().await;
}
