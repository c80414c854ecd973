//! Exercises the log on sled alone, to detect one planted bug. A simulated cluster rarely exposes
//! entries that survive a truncation, because they must be read back before the new leader's
//! entries replace them.

use std::io;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use openraft::storage::{RaftLogReader, RaftLogStorage, RaftLogStorageExt};

use crate::fault::FatalError;
use crate::files::Layout;
use crate::log::LogStore;
use crate::types::{Command, Entry, Payload, log_id};

/// Appends ten entries of a leader of term 1 to a log below `folder`, and replaces the last five
/// with two of term 2. Returns the index and term of each entry found after reopening the log.
///
/// # Errors
/// Fails if the log cannot be opened, written or read.
pub async fn replace_entries(folder: &Path) -> io::Result<Vec<(u64, u64)>> {
    let mut log = open(folder)?;
    log.blocking_append(entries(1, 0..10)).await?;
    log.truncate_after(Some(log_id(1, 1, 4))).await?;
    log.blocking_append(entries(2, 5..7)).await?;
    log.close().await;
    drop(log);
    let mut log = open(folder)?;
    let read = log.try_get_log_entries(..).await?;
    log.close().await;
    let ids = read.iter().map(|entry| entry.log_id);
    Ok(ids.map(|it| (it.index, it.leader_id.term)).collect())
}

fn open(folder: &Path) -> io::Result<LogStore> {
    let layout = Layout::new(folder);
    layout.create().map_err(io::Error::other)?;
    LogStore::on_sled(&layout, FatalError::new()).map_err(io::Error::other)
}

fn entries(term: u64, indexes: Range<u64>) -> Vec<Entry> {
    let entry = |index| Entry {
        log_id: log_id(term, 1, index),
        payload: Payload::Normal(Command(Bytes::from_static(b"command"))),
    };
    indexes.map(entry).collect()
}
