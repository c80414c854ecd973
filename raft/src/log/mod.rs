//! The Raft log: votes and entries, on a [`Disk`] behind one writer.
//!
//! An appended entry is readable at once and durable once its callback reports success. Until then,
//! and for some time after, it stays in memory, so applying and replicating recent entries reads no
//! disk.

pub(crate) mod disk;
mod file_release;
pub(crate) mod mark;
pub(crate) mod record;
mod reserved_space;
mod sled;
mod sync_times;
mod writer;

#[cfg(test)]
mod descriptor_tests;
#[cfg(test)]
mod power_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::Stream;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use tokio::sync::oneshot;

use self::disk::{Disk, DiskContents, LogChange};
use self::sled::SledDisk;
pub use self::sync_times::{SYNC_BUCKETS_S, SyncTimes};
use self::writer::{LogWriter, WriteCallback, WriteObserver, WriteOp};
use crate::determinism::blocking::BlockingMode;
use crate::determinism::watch;
use crate::error::StartError;
use crate::fault::FatalError;
use crate::files::{Layout, io_error};
use crate::locks::lock;
use crate::planted::{self, Bug};
use crate::types::{Config, Entry, LogId, Payload, Vote};

/// Maximum weight of the cached entries, in bytes, not counting those that are not durable yet.
const CACHE_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Maximum weight of the entries read and sent at a time, in bytes.
const READ_BYTES_MAX: usize = 1024 * 1024;

/// Opens the disk of the log for reading only. sled's recovery may still write.
pub(crate) fn open_disk(layout: &Layout) -> Result<(impl Disk + use<>, DiskContents), StartError> {
    SledDisk::open(layout)
}

/// Raft's log: a cache and a writer in front of a disk. Clones share the log.
#[derive(Clone)]
pub(crate) struct LogStore {
    writer: Arc<LogWriter>,
    disk: Arc<dyn Disk>,
    blocking: BlockingMode,
    memory: Arc<LogCache>,
}

/// Part of the log that is kept in memory.
#[derive(Default)]
struct LogCache(Mutex<LogCacheState>);

#[derive(Default)]
struct LogCacheState {
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    last: Option<LogId>,
    /// Index of the log's first entry, or of the next one if the log is empty.
    first: u64,
    /// Newest entries, without gaps up to the last, each with its sequence number among all entries
    /// ever appended.
    cache: BTreeMap<u64, (u64, Entry)>,
    cache_bytes: usize,
    /// Number of entries ever appended.
    appended: u64,
    /// Number of appended entries that are written. An index or id would not do: a durable entry
    /// can be replaced by one from an earlier leader.
    written: u64,
    /// Greatest entry that was ever durable; `None` if there was none.
    durable: Option<LogId>,
}

/// Returns the weight of an entry in the cache and in a batch, in bytes.
pub(crate) fn weight(entry: &Entry) -> usize {
    const OVERHEAD: usize = 64;
    match &entry.payload {
        Payload::Normal(command) => OVERHEAD + command.0.len(),
        Payload::Blank | Payload::Membership(_) => OVERHEAD,
    }
}

/// Copies the entry's command into memory of its own. A command received from a peer is a slice of
/// the connection's 8 KiB read buffer and would keep the whole buffer alive.
fn with_own_memory(mut entry: Entry) -> Entry {
    if let Payload::Normal(command) = &mut entry.payload {
        command.0 = Bytes::copy_from_slice(&command.0);
    }
    entry
}

impl LogStore {
    /// Opens the log on sled and checks every entry. Blocks.
    pub(crate) fn on_sled(layout: &Layout, fault: FatalError) -> Result<Self, StartError> {
        let (disk, contents) = SledDisk::open(layout)?;
        let log = Self::over(Arc::new(disk), contents, fault, BlockingMode::Pool);
        log.map_err(|error| io_error(&layout.log(), error))
    }

    /// Creates a log on a disk that holds `contents`.
    pub(crate) fn over(
        disk: Arc<dyn Disk>,
        contents: DiskContents,
        fault: FatalError,
        blocking: BlockingMode,
    ) -> io::Result<Self> {
        let memory = LogCache::new(&*disk, contents);
        let writer = LogWriter::start(disk.clone(), memory.clone(), fault, blocking)?;
        Ok(Self {
            writer: Arc::new(writer),
            disk,
            blocking,
            memory,
        })
    }

    /// Whether the log never had a vote or an entry.
    pub(crate) fn is_pristine(&self) -> bool {
        let state = lock(&self.memory.0);
        state.vote.is_none() && state.last.is_none()
    }

    /// Whether the log has or ever had an entry.
    pub(crate) fn has_entries(&self) -> bool {
        lock(&self.memory.0).last.is_some()
    }

    /// Returns the last purged entry, if there is one; a snapshot must cover it.
    pub(crate) fn purged(&self) -> Option<LogId> {
        lock(&self.memory.0).purged
    }

    /// Whether the log contains the entry `id`. Purged entries do not count.
    pub(crate) async fn holds(&self, id: LogId) -> io::Result<bool> {
        let found = self.read_all(id.index..id.index.saturating_add(1)).await?;
        Ok(found.iter().any(|entry| entry.log_id == id))
    }

    /// Returns the durations of the syncs so far.
    pub(crate) fn sync_times(&self) -> SyncTimes {
        self.writer.sync_times()
    }

    /// Watches why the log cannot be written now; `None` if it can. The log resumes by itself.
    pub(crate) fn waiting(&self) -> watch::WatchReceiver<Option<String>> {
        self.writer.waiting()
    }

    /// Stops waiting for disk space for good, because the replica is stopping.
    pub(crate) fn stop_waiting(&self) {
        self.writer.stop_waiting();
    }

    /// Writes all queued changes and releases the disk.
    pub(crate) async fn close(&self) {
        self.writer.finish().await;
        let log = self.clone();
        let closed = self.blocking.run(move || log.close_blocking()).await;
        if let Err(error) = closed {
            tracing::error!(%error, "could not close the log");
        }
    }

    /// Writes all queued changes and releases the disk. Blocks.
    pub(crate) fn close_blocking(&self) {
        self.writer.close();
    }

    async fn submit(&self, change: LogChange, done: WriteCallback) -> io::Result<()> {
        self.writer.submit(WriteOp { change, done }).await
    }

    /// Reads entries from the start of `range` until the range ends or `bytes_max` is reached.
    async fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>> {
        let start = range.start;
        let (mut entries, range) = match self.memory.read(range, bytes_max) {
            EntryLocation::All(entries) => return Ok(entries),
            EntryLocation::OnDisk { disk, after } => {
                let reader = self.disk.clone();
                let read = self.blocking.try_run(move || reader.read(disk, bytes_max));
                (read.await?, after)
            }
        };
        let first = entries.first().map(|first| first.log_id.index);
        let wanted = lock(&self.memory.0).first.max(start);
        if first.unwrap_or(range.start) > wanted {
            let what = format!("log entry {} is missing", wanted + 1);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let read: usize = entries.iter().map(weight).sum();
        let reached = entries
            .last()
            .is_none_or(|last| last.log_id.index + 1 == range.start);
        if reached && read < bytes_max && !range.is_empty() {
            let left = bytes_max - read;
            match self.memory.read(range, left) {
                EntryLocation::All(more) => entries.extend(more),
                // Evicted in the meantime: the caller retries.
                EntryLocation::OnDisk { .. } => {}
            }
        }
        Ok(entries)
    }

    /// Reads all entries in `range`, in as many reads as needed.
    async fn read_all(&self, mut range: Range<u64>) -> io::Result<Vec<Entry>> {
        let mut all: Vec<Entry> = Vec::new();
        while !range.is_empty() {
            let some = self.read(range.clone(), READ_BYTES_MAX).await?;
            let Some(last) = some.last() else { break };
            range.start = last.log_id.index + 1;
            all.extend(some);
        }
        Ok(all)
    }
}

/// Location of the entries of a range.
enum EntryLocation {
    /// All entries are in memory.
    All(Vec<Entry>),
    /// The first entries are on disk, followed by the others.
    OnDisk { disk: Range<u64>, after: Range<u64> },
}

impl LogCache {
    fn new(disk: &dyn Disk, contents: DiskContents) -> Arc<Self> {
        let DiskContents {
            vote,
            committed,
            purged,
            last,
        } = contents;
        let first = purged.map_or(0, |purged| purged.index + 1);
        let state = LogCacheState {
            first,
            vote,
            committed: committed.filter(|id| holds(disk, purged, *id)),
            purged,
            last,
            durable: last,
            ..LogCacheState::default()
        };
        Arc::new(Self(Mutex::new(state)))
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> EntryLocation {
        let state = lock(&self.0);
        let range = range.start.max(state.first)..range.end.min(state.next());
        if range.is_empty() {
            return EntryLocation::All(Vec::new());
        }
        let cached = state.cache.keys().next().copied().unwrap_or(state.next());
        if range.start < cached {
            let end = cached.min(range.end);
            return EntryLocation::OnDisk {
                disk: range.start..end,
                after: end..range.end,
            };
        }
        let mut entries = Vec::new();
        let mut bytes = 0;
        for (_, entry) in state.cache.range(range).map(|(_, cached)| cached) {
            bytes += weight(entry);
            if bytes > bytes_max && !entries.is_empty() {
                break;
            }
            entries.push(entry.clone());
        }
        EntryLocation::All(entries)
    }
}

impl LogCacheState {
    fn next(&self) -> u64 {
        self.last.map_or(0, |last| last.index + 1)
    }

    fn push(&mut self, entry: Entry) {
        if self.first >= self.next() {
            self.first = entry.log_id.index;
        }
        self.last = Some(entry.log_id);
        self.cache_bytes += weight(&entry);
        self.appended += 1;
        self.cache
            .insert(entry.log_id.index, (self.appended, entry));
    }

    fn truncate(&mut self, last: Option<LogId>) {
        self.last = self.last.min(last).max(self.purged);
        self.first = self.first.min(self.next());
        for (_, entry) in self.cache.split_off(&self.next()).values() {
            self.cache_bytes -= weight(entry);
        }
    }

    fn purge(&mut self, upto: LogId) {
        self.purged = Some(upto);
        self.last = self.last.max(Some(upto));
        self.first = upto.index + 1;
        let kept = self.cache.split_off(&(upto.index + 1));
        for (_, entry) in std::mem::replace(&mut self.cache, kept).values() {
            self.cache_bytes -= weight(entry);
        }
    }

    /// Drops the oldest entries that are certainly on disk.
    fn evict(&mut self) {
        while self.cache_bytes > CACHE_BYTES_MAX
            && let Some(first) = self.cache.first_entry()
            && first.get().0 <= self.written
        {
            self.cache_bytes -= weight(&first.remove().1);
        }
    }
}

impl WriteObserver for LogCache {
    /// Writes the committed index along with the next batch, unless it is ahead of the entries on
    /// disk, because a restart could not apply up to it.
    fn before(&self, changes: &mut Vec<LogChange>) {
        let state = lock(&self.0);
        let appended = changes.iter().rev().find_map(|change| match change {
            LogChange::Append(entries) => entries.last().map(|entry| entry.log_id),
            LogChange::Vote(_)
            | LogChange::Committed(_)
            | LogChange::Truncate { .. }
            | LogChange::Purge { .. } => None,
        });
        let on_disk = appended.max(state.durable);
        if let Some(committed) = state.committed
            && Some(committed) <= on_disk
        {
            changes.push(LogChange::Committed(committed));
        }
    }

    fn after(&self, changes: &[LogChange]) {
        let mut state = lock(&self.0);
        for change in changes {
            match change {
                LogChange::Append(entries) => {
                    let last = entries.last().map(|entry| entry.log_id);
                    state.durable = state.durable.max(last);
                    state.written += entries.len() as u64;
                }
                LogChange::Purge { upto } => state.durable = state.durable.max(Some(*upto)),
                LogChange::Vote(_) | LogChange::Committed(_) | LogChange::Truncate { .. } => {}
            }
        }
        state.evict();
    }
}

/// Whether the entry `id` is on disk or was purged. A committed index may be written while another
/// entry still has that index, and that entry must never be applied.
fn holds(disk: &dyn Disk, purged: Option<LogId>, id: LogId) -> bool {
    if purged.is_some_and(|purged| id.index <= purged.index) {
        return true;
    }
    // Damage is reported when the entry is read.
    let found = disk.read(id.index..id.index + 1, 0).unwrap_or_default();
    found.first().is_some_and(|entry| entry.log_id == id)
}

fn bounds(range: impl RangeBounds<u64>) -> Range<u64> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => u64::MAX,
    };
    start..end
}

impl RaftLogReader<Config> for LogStore {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> io::Result<Vec<Entry>>
    where
        RB: RangeBounds<u64> + Clone + Debug + Send,
    {
        self.read_all(bounds(range)).await
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.read(start..end, READ_BYTES_MAX).await
    }

    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = io::Result<Entry>> + Send
    where
        RB: RangeBounds<u64> + Clone + Debug + Send,
    {
        let start = (self.clone(), bounds(range), Vec::new().into_iter());
        futures_util::stream::try_unfold(start, |(log, mut range, mut some)| async move {
            if some.len() == 0 {
                some = log.read(range.clone(), READ_BYTES_MAX).await?.into_iter();
            }
            let Some(entry) = some.next() else {
                return Ok(None);
            };
            range.start = entry.log_id.index + 1;
            Ok(Some((entry, (log, range, some))))
        })
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(lock(&self.memory.0).vote)
    }
}

impl RaftLogStorage<Config> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<Config>> {
        let state = lock(&self.memory.0);
        Ok(LogState {
            last_purged_log_id: state.purged,
            last_log_id: state.last,
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        lock(&self.memory.0).vote = Some(*vote);
        if planted::is(Bug::VoteNotKept) {
            return Ok(());
        }
        let (waiter, durable) = oneshot::channel();
        self.submit(LogChange::Vote(*vote), WriteCallback::Waiter(waiter))
            .await?;
        durable
            .await
            .map_err(|_| io::Error::other("the log is closed"))?
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        lock(&self.memory.0).committed = committed;
        Ok(())
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        let state = lock(&self.memory.0);
        Ok(state
            .committed
            .filter(|committed| Some(*committed) <= state.last))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Config>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + Send,
        I::IntoIter: Send,
    {
        let entries: Vec<Entry> = entries.into_iter().map(with_own_memory).collect();
        {
            let mut state = lock(&self.memory.0);
            for entry in &entries {
                state.push(entry.clone());
            }
        }
        self.submit(LogChange::Append(entries), WriteCallback::Flushed(callback))
            .await
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |last| last.index + 1);
        lock(&self.memory.0).truncate(last);
        if planted::is(Bug::TruncationNotKept) {
            return Ok(());
        }
        self.submit(LogChange::Truncate { from }, WriteCallback::Nobody)
            .await
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        lock(&self.memory.0).purge(upto);
        self.submit(LogChange::Purge { upto }, WriteCallback::Nobody)
            .await
    }
}
