//! The log on sled 0.34, used in the one way that measurably survives power cuts.
//!
//! - `Db::flush` ends in `sync_file_range`, which does not flush the disk's cache. So each sync
//!   ends with `fdatasync` on sled's single data file.
//! - Values that sled moves to `blobs/` are never synced. It moves a leaf of up to 17 values if it
//!   exceeds a quarter of a segment. With 4 MiB segments and values of at most 32 KiB none does.
//!   Every sync checks that the folder is empty.
//! - After a failed write sled's in-memory state is undefined. So a write begins only if it has
//!   space ([`super::reserved_space`]), and opens nothing: the folder, the mark and the data file
//!   stay open.
//! - Each [`RANGE`] of indexes has its own tree. Dropping a tree frees its space at once, whereas
//!   removing entries one by one costs as much as writing them.
//! - Data that a killed process wrote without syncing is visible to the next one, until a power
//!   cut. So everything is synced before it is read and trusted, including sled's `conf`, which
//!   sled itself never syncs.
//! - sled's thread pool may hold the data file and its lock after the last `Db` is dropped. Closing
//!   waits until it is released.
//! - On recovery sled treats damage as the end of its log and silently drops the rest. The file
//!   `log.mark` ([`super::mark`]) states the minimum that must be present, and records carry their
//!   own checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use prost::Message;

use super::disk::{Disk, DiskContents, LogChange};
use super::mark::{LogMark, MarkFile};
use super::reserved_space::{ReservedSpace, SEGMENT_BYTES};
use super::{file_release, record, weight};
use crate::error::StartError;
use crate::files::{Files, Layout, SystemFiles, damaged, io_error};
use crate::locks::lock;
use crate::types::{Entry, LogId};
use crate::wire::proto;

/// Number of indexes per tree.
const RANGE: u64 = 1024;
const VALUE_BYTES_MAX: usize = 32 * 1024;
const CACHE_BYTES: u64 = 64 * 1024 * 1024;
/// Number of entries after which the mark advances. sled could lose this many undetected.
const MARK_EVERY: u64 = 1024;

const TREE_PREFIX: &[u8] = b"log-";
const KEY_BYTES: usize = 10;
const VOTE: &[u8] = b"vote";
const COMMITTED: &[u8] = b"committed";
const PURGED: &[u8] = b"purged";

/// The log's disk, backed by sled.
pub(crate) struct SledDisk {
    open: RwLock<Option<OpenLog>>,
}

struct OpenLog {
    db: sled::Db,
    trees: Mutex<BTreeMap<u64, sled::Tree>>,
    /// sled's data file, opened a second time for syncing and reserving space.
    file: File,
    room: ReservedSpace,
    data: PathBuf,
    /// sled's folder for large values, kept open.
    blobs: Mutex<rustix::fs::Dir>,
    writing: Mutex<WriterState>,
}

/// State that only the writer uses.
struct WriterState {
    contents: DiskContents,
    mark: LogMark,
    mark_file: MarkFile,
    /// Trees to drop once the purge that emptied them is durable.
    purged_trees: BTreeSet<u64>,
    /// Whether a write is not synced yet or has failed, so that the content on disk is unknown.
    is_unsure: bool,
}

impl SledDisk {
    /// Opens the log and reads all of it to detect damage.
    pub(crate) fn open(layout: &Layout) -> Result<(Self, DiskContents), StartError> {
        let folder = layout.log();
        let data = folder.join("db");
        let (mark_file, mark) = MarkFile::open(layout)?;
        let config = sled::Config::new()
            .path(&folder)
            .segment_size(SEGMENT_BYTES)
            .cache_capacity(CACHE_BYTES)
            .flush_every_ms(None);
        sync_left(&folder).map_err(|error| io_error(&folder, error))?;
        let db = catch_unwind(AssertUnwindSafe(|| config.open()))
            .map_err(|panic| damaged(&data, 0, panic_text(&*panic)))?
            .map_err(|error| start_error(&data, error))?;
        // Recovery writes too, and on the first start every file is new.
        sync_left(&folder).map_err(|error| io_error(&folder, error))?;
        let root = folder.parent().expect("the log lies below the root");
        SystemFiles
            .sync_folder(root)
            .map_err(|error| io_error(root, error))?;
        let file = File::options().read(true).write(true).open(&data);
        let file = file.map_err(|error| io_error(&data, error))?;
        let blobs = folder.join("blobs");
        let blobs = File::open(&blobs)
            .and_then(|folder| Ok(rustix::fs::Dir::new(folder)?))
            .map_err(|error| io_error(&blobs, error))?;
        let open = OpenLog {
            trees: Mutex::new(BTreeMap::new()),
            file,
            room: ReservedSpace::default(),
            data: data.clone(),
            blobs: Mutex::new(blobs),
            writing: Mutex::new(WriterState {
                contents: DiskContents::default(),
                mark: mark.clone(),
                mark_file,
                purged_trees: BTreeSet::new(),
                is_unsure: false,
            }),
            db,
        };
        let contents = catch_unwind(AssertUnwindSafe(|| open.load(&data)))
            .map_err(|panic| damaged(&data, 0, panic_text(&*panic)))??;
        mark.check(&contents, &data)?;
        open.writing().contents = contents;
        Ok((
            Self {
                open: RwLock::new(Some(open)),
            },
            contents,
        ))
    }

    fn with<T>(&self, run: impl FnOnce(&OpenLog) -> io::Result<T>) -> io::Result<T> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        run(open
            .as_ref()
            .ok_or_else(|| io::Error::other("the log is closed"))?)
    }
}

impl Disk for SledDisk {
    fn room_for(&self, changes: &[LogChange]) -> io::Result<()> {
        self.with(|open| open.room.take(&open.file, changes))
    }

    fn write(&self, changes: &[LogChange]) -> io::Result<()> {
        self.with(|open| open.write(changes))
    }

    fn sync(&self) -> io::Result<()> {
        self.with(OpenLog::sync)
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>> {
        self.with(|open| open.read(range, bytes_max))
    }

    fn close(&self) {
        let open = self
            .open
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(open) = open else { return };
        if let Err(error) = open.settle() {
            tracing::warn!(%error, "log was closed without its mark");
        }
        let data = open.data.clone();
        drop(open);
        if let Err(error) = file_release::wait(&data) {
            tracing::warn!(%error, path = %data.display(), "closed log is still locked");
        }
    }
}

impl OpenLog {
    fn writing(&self) -> MutexGuard<'_, WriterState> {
        lock(&self.writing)
    }

    fn write(&self, changes: &[LogChange]) -> io::Result<()> {
        let mut writing = self.writing();
        // Reset only at the end of a sync, which neither an error nor a panic reaches.
        writing.is_unsure = true;
        writing.lower_mark(changes)?;
        self.apply(changes, &mut writing)?;
        self.db.flush()?;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut writing = self.writing();
        self.file.sync_data()?;
        self.refuse_blobs()?;
        for range in std::mem::take(&mut writing.purged_trees) {
            self.db.drop_tree(tree_name(range))?;
        }
        writing.raise_mark()?;
        writing.is_unsure = false;
        Ok(())
    }

    /// Fails if sled moved a value to a separate file, which is never synced.
    fn refuse_blobs(&self) -> io::Result<()> {
        let mut blobs = lock(&self.blobs);
        blobs.rewind();
        while let Some(entry) = blobs.read() {
            if ![&b"."[..], b".."].contains(&entry?.file_name().to_bytes()) {
                return Err(io::Error::other(
                    "sled moved a value to its unsynced blobs folder",
                ));
            }
        }
        Ok(())
    }

    /// Applies `changes` to sled, without syncing them.
    fn apply(&self, changes: &[LogChange], writing: &mut WriterState) -> io::Result<()> {
        let contents = &mut writing.contents;
        let mut changes = changes.iter().peekable();
        while let Some(change) = changes.next() {
            match change {
                LogChange::Vote(vote) => {
                    self.db.insert(VOTE, sealed(&proto::Vote::from(*vote)))?;
                    contents.vote = Some(*vote);
                }
                LogChange::Committed(committed) => {
                    self.db
                        .insert(COMMITTED, sealed(&proto::LogId::from(*committed)))?;
                    contents.committed = Some(*committed);
                }
                LogChange::Append(entries) => {
                    // Consecutive appends become one sled batch per tree.
                    let mut run: Vec<&Entry> = entries.iter().collect();
                    while let Some(LogChange::Append(more)) = changes.peek() {
                        run.extend(more);
                        changes.next();
                    }
                    self.append(&run)?;
                    contents.last = run.last().map(|entry| entry.log_id).or(contents.last);
                }
                LogChange::Truncate { from } if contents.last.is_none_or(|l| l.index < *from) => {}
                LogChange::Truncate { from } => {
                    self.truncate(*from)?;
                    contents.last = match from.checked_sub(1) {
                        Some(last) if contents.purged.is_none_or(|purged| purged.index < last) => {
                            self.read(last..*from, 0)?.last().map(|entry| entry.log_id)
                        }
                        _ => contents.purged,
                    };
                }
                LogChange::Purge { upto } => {
                    self.db.insert(PURGED, sealed(&proto::LogId::from(*upto)))?;
                    contents.purged = Some(*upto);
                    contents.last = contents.last.max(Some(*upto));
                    writing.purged_trees.extend(self.forget_trees(upto.index));
                }
            }
        }
        Ok(())
    }

    fn append(&self, entries: &[&Entry]) -> io::Result<()> {
        for run in entries.chunk_by(|a, b| a.log_id.index / RANGE == b.log_id.index / RANGE) {
            let mut batch = sled::Batch::default();
            for entry in run {
                let record = record::encode(entry);
                for (part, value) in record.chunks(VALUE_BYTES_MAX).enumerate() {
                    let part = u16::try_from(part).expect("commands are bounded below 2 GiB");
                    batch.insert(&key(entry.log_id.index, part), value);
                }
            }
            self.tree(run[0].log_id.index / RANGE)?.apply_batch(batch)?;
        }
        Ok(())
    }

    fn truncate(&self, from: u64) -> io::Result<()> {
        let above: Vec<u64> = {
            let mut trees = lock(&self.trees);
            trees
                .split_off(&from.div_ceil(RANGE))
                .into_keys()
                .rev()
                .collect()
        };
        // Backwards from the end, so that a power cut leaves no hole.
        for range in above {
            self.db.drop_tree(tree_name(range))?;
        }
        if !from.is_multiple_of(RANGE) {
            let tree = self.tree(from / RANGE)?;
            let mut batch = sled::Batch::default();
            for key in tree.range(key(from, 0)..).keys().rev() {
                batch.remove(key?);
            }
            tree.apply_batch(batch)?;
        }
        Ok(())
    }

    /// Forgets the trees that hold no entry after `upto`, and returns them.
    fn forget_trees(&self, upto: u64) -> Vec<u64> {
        let mut trees = lock(&self.trees);
        let kept = trees.split_off(&((upto + 1) / RANGE));
        std::mem::replace(&mut *trees, kept).into_keys().collect()
    }

    fn tree(&self, range: u64) -> io::Result<sled::Tree> {
        let mut trees = lock(&self.trees);
        if let Some(tree) = trees.get(&range) {
            return Ok(tree.clone());
        }
        let tree = self.db.open_tree(tree_name(range))?;
        trees.insert(range, tree.clone());
        Ok(tree)
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>> {
        let trees: Vec<sled::Tree> = {
            let trees = lock(&self.trees);
            let last = range.end.div_ceil(RANGE).max(range.start / RANGE);
            trees
                .range(range.start / RANGE..last)
                .map(|(_, tree)| tree.clone())
                .collect()
        };
        let mut read: Vec<Entry> = Vec::new();
        let mut bytes = 0;
        for tree in trees {
            let done = each_record(&tree, range.clone(), |index, record| {
                let entry =
                    record::decode(index, record).map_err(|what| bad_entry(index, &what))?;
                if read
                    .last()
                    .is_some_and(|last| last.log_id.index + 1 != index)
                {
                    return Err(bad_entry(index - 1, "missing"));
                }
                bytes += weight(&entry);
                if bytes > bytes_max && !read.is_empty() {
                    return Ok(false);
                }
                read.push(entry);
                Ok(true)
            })?;
            if !done {
                break;
            }
        }
        Ok(read)
    }

    /// Reads the whole log: finds the trees, drops purged ones and checks every record.
    fn load(&self, data: &Path) -> Result<DiskContents, StartError> {
        let failed = |error: sled::Error| start_error(data, error);
        let purged: Option<LogId> = self.meta::<proto::LogId>(PURGED, data)?.map(Into::into);
        let mut last = purged;
        let first = purged.map_or(0, |purged| purged.index + 1);
        let mut ranges: BTreeSet<u64> = BTreeSet::new();
        for name in self.db.tree_names() {
            if let Some(number) = name.strip_prefix(TREE_PREFIX) {
                let number = <[u8; 8]>::try_from(number)
                    .map_err(|_| damaged(data, 0, "a tree with a strange name"))?;
                ranges.insert(u64::from_be_bytes(number));
            }
        }
        for range in ranges {
            if (range + 1) * RANGE <= first {
                self.db.drop_tree(tree_name(range)).map_err(failed)?;
                continue;
            }
            let tree = self.tree(range).map_err(|error| io_error(data, error))?;
            each_record(&tree, first..u64::MAX, |index, bytes| {
                let entry = record::decode(index, bytes).map_err(|what| bad_entry(index, &what))?;
                let expected = last.map_or(0, |last| last.index + 1);
                if index != expected {
                    return Err(bad_entry(expected, "missing"));
                }
                last = Some(entry.log_id);
                Ok(true)
            })
            .map_err(|error| entry_error(data, error))?;
        }
        Ok(DiskContents {
            vote: self.meta::<proto::Vote>(VOTE, data)?.map(Into::into),
            committed: self.meta::<proto::LogId>(COMMITTED, data)?.map(Into::into),
            purged,
            last,
        })
    }

    fn meta<M: Message + Default>(&self, key: &[u8], data: &Path) -> Result<Option<M>, StartError> {
        let Some(value) = self.db.get(key).map_err(|error| start_error(data, error))? else {
            return Ok(None);
        };
        let wrong =
            |what: &str| damaged(data, 0, format!("{}: {what}", String::from_utf8_lossy(key)));
        let (crc, body) = value
            .split_at_checked(4)
            .ok_or_else(|| wrong("too short"))?;
        if crc != crc32fast::hash(body).to_le_bytes() {
            return Err(wrong("checksum differs"));
        }
        M::decode(body)
            .map(Some)
            .map_err(|error| wrong(&error.to_string()))
    }

    /// Flushes everything and moves the mark to the end, unless a write failed: a mark ahead of the
    /// log would be reported as damage at the next start.
    fn settle(&self) -> io::Result<()> {
        let mut writing = self.writing();
        if writing.is_unsure {
            return Ok(());
        }
        self.db.flush()?;
        self.file.sync_data()?;
        let DiskContents { vote, last, .. } = writing.contents;
        writing.store_mark(LogMark { vote, last })
    }
}

impl WriterState {
    /// Lowers the mark before `changes` remove entries that it covers.
    fn lower_mark(&mut self, changes: &[LogChange]) -> io::Result<()> {
        let lowest = changes.iter().filter_map(LogChange::truncates_from).min();
        let Some(from) = lowest else { return Ok(()) };
        if self.mark.last.is_some_and(|last| last.index >= from) {
            let vote = self.mark.vote;
            self.store_mark(LogMark { vote, last: None })?;
        }
        Ok(())
    }

    /// Raises the mark for every new vote, and otherwise when it lags by [`MARK_EVERY`] entries.
    fn raise_mark(&mut self) -> io::Result<()> {
        let DiskContents { vote, last, .. } = self.contents;
        let next = |last: Option<LogId>| last.map_or(0, |last| last.index + 1);
        let lag = next(last).saturating_sub(next(self.mark.last));
        if vote == self.mark.vote && lag < MARK_EVERY {
            return Ok(());
        }
        self.store_mark(LogMark { vote, last })
    }

    fn store_mark(&mut self, mark: LogMark) -> io::Result<()> {
        self.mark_file.store(mark.clone())?;
        self.mark = mark;
        Ok(())
    }
}

#[cfg(test)]
thread_local! {
    /// Paths that this thread synced while opening a log, for tests.
    pub(super) static SYNCED: std::cell::RefCell<Vec<PathBuf>> = const {
        std::cell::RefCell::new(Vec::new())
    };
}

/// Syncs everything in sled's folder, if it exists.
fn sync_left(folder: &Path) -> io::Result<()> {
    let items = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        items => items?,
    };
    for item in items {
        let item = item?;
        if item.file_type()?.is_file() {
            File::open(item.path())?.sync_all()?;
            #[cfg(test)]
            SYNCED.with(|synced| synced.borrow_mut().push(item.path()));
        }
    }
    SystemFiles.sync_folder(folder)
}

fn tree_name(range: u64) -> Vec<u8> {
    [TREE_PREFIX, &range.to_be_bytes()].concat()
}

fn key(index: u64, part: u16) -> [u8; KEY_BYTES] {
    let mut key = [0; KEY_BYTES];
    key[..8].copy_from_slice(&index.to_be_bytes());
    key[8..].copy_from_slice(&part.to_be_bytes());
    key
}

/// Assembles each record in `range` from its parts and passes it to `hand_on`, until that returns
/// `false` or fails. Returns `false` if `hand_on` did.
fn each_record(
    tree: &sled::Tree,
    range: Range<u64>,
    mut hand_on: impl FnMut(u64, &[u8]) -> io::Result<bool>,
) -> io::Result<bool> {
    let mut whole: Option<(u64, Vec<u8>)> = None;
    for item in tree.range(key(range.start, 0)..key(range.end, 0)) {
        let (key, value) = item?;
        let key = <[u8; KEY_BYTES]>::try_from(&*key)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "a key of strange length"))?;
        let mut index = [0; 8];
        index.copy_from_slice(&key[..8]);
        let index = u64::from_be_bytes(index);
        match &mut whole {
            Some((open, bytes)) if *open == index => bytes.extend_from_slice(&value),
            _ => {
                if let Some((index, bytes)) = whole.replace((index, value.to_vec()))
                    && !hand_on(index, &bytes)?
                {
                    return Ok(false);
                }
            }
        }
    }
    match whole {
        Some((index, bytes)) => hand_on(index, &bytes),
        None => Ok(true),
    }
}

/// Encodes a small value with a checksum in front.
fn sealed(message: &impl Message) -> Vec<u8> {
    let body = message.encode_to_vec();
    [&crc32fast::hash(&body).to_le_bytes()[..], &body].concat()
}

/// Error for a damaged entry, carried in an `io::Error`.
#[derive(Debug, thiserror::Error)]
#[error("log entry {}: {what}", index + 1)]
struct CorruptEntryError {
    index: u64,
    what: String,
}

fn bad_entry(index: u64, what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        CorruptEntryError {
            index,
            what: what.to_owned(),
        },
    )
}

fn entry_error(data: &Path, error: io::Error) -> StartError {
    match error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<CorruptEntryError>())
    {
        Some(bad) => damaged(data, bad.index + 1, bad.to_string()),
        None if error.kind() == io::ErrorKind::InvalidData => damaged(data, 0, error.to_string()),
        None => io_error(data, error),
    }
}

fn start_error(data: &Path, error: sled::Error) -> StartError {
    match error {
        sled::Error::Corruption { at, .. } => {
            damaged(data, at.map_or(0, |at| at.lid()), "sled found corruption")
        }
        other => io_error(data, other.into()),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("sled panicked: {}", text.unwrap_or("without a message"))
}
