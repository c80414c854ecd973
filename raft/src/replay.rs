//! Replays a store's log offline, up to any index that it still holds.
//!
//! sled writes to the store that it opens. So the store is copied first and only the copy is
//! opened, which protects the log and snapshots of the original. The original is locked meanwhile,
//! and a store in use is refused.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::error::StartError;
use crate::files::{self, Layout, damaged, io_error};
use crate::log::disk::{Disk, DiskContents};
use crate::log::open_disk;
use crate::machine::{StateMachine, StopReplicaError};
use crate::snapshot::{SnapshotFolder, SnapshotReader};
use crate::types::{Payload, SnapshotMeta, public_index};

/// Maximum weight of the entries read at a time, in bytes.
const READ_BYTES_MAX: usize = 1024 * 1024;

/// Range of indexes to which a store can be replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayRange {
    /// Index of the snapshot, the start of the range; 0 without a snapshot.
    pub snapshot: u64,
    /// Index of the last entry known to be committed. Later entries may be committed too.
    pub committed: u64,
    /// Index of the last entry.
    pub last: u64,
}

/// Reason why a store was not replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// There is no store at this path.
    #[error("no store below {0}: expected the data directory of a replica, or a copy of one")]
    NoStore(PathBuf),
    /// The store does not hold the requested index.
    #[error(
        "index {wanted} is not in this store: its snapshot is at index {}, its log ends at {}",
        range.snapshot, range.last
    )]
    OutOfRange {
        /// The requested index.
        wanted: u64,
        /// Range of indexes that the store holds.
        range: ReplayRange,
    },
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] StartError),
    /// A command cannot be applied.
    #[error("log index {index}: {source}")]
    Machine {
        /// Index of the command.
        index: u64,
        /// Error from the state machine.
        source: StopReplicaError,
    },
}

/// Copy of a store, which is removed when this is dropped.
struct StoreCopy(PathBuf);

impl Drop for StoreCopy {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            let path = self.0.display();
            tracing::warn!(%error, %path, "could not remove the copy of the store");
        }
    }
}

/// Copies the store below `data_dir` to the new folder `scratch`, and applies its snapshot and its
/// log to `machine` up to the index `to`, by default the last one known to be committed. Removes
/// the copy again. Blocks.
///
/// # Errors
/// See [`ReplayError`]. The machine may then have applied some of the entries.
pub fn replay(
    data_dir: &Path,
    scratch: &Path,
    to: Option<u64>,
    machine: &mut dyn StateMachine,
) -> Result<ReplayRange, ReplayError> {
    let copy = copied(data_dir, scratch)?;
    let layout = Layout::new(&copy.0);
    let folder = layout.snapshots();
    let snapshots = SnapshotFolder::open(layout.files.clone(), folder.clone());
    let newest = snapshots.and_then(|snapshots| snapshots.newest());
    let newest = newest.map_err(|error| io_error(&folder, error))?;
    let snapshot = match &newest {
        None => None,
        Some(file) => {
            let (reader, head) = SnapshotReader::open(file)?;
            let meta = SnapshotMeta::try_from(head)
                .map_err(|error| damaged(&file.path, 0, error.to_string()))?;
            Some((reader, public_index(meta.last_log_id.as_ref())))
        }
    };
    let begin = snapshot.as_ref().map_or(0, |(_, index)| *index);
    let (disk, contents) = open_disk(&layout)?;
    let range = range_of(begin, &contents);
    let to = to.unwrap_or(range.committed);
    let replayed = if (range.snapshot..=range.last).contains(&to) {
        restore(snapshot.map(|(reader, _)| reader), machine)
            .and_then(|()| apply(&disk, &layout, begin..to, machine))
            .map(|()| range)
    } else {
        Err(ReplayError::OutOfRange { wanted: to, range })
    };
    disk.close();
    replayed
}

fn range_of(snapshot: u64, contents: &DiskContents) -> ReplayRange {
    ReplayRange {
        snapshot,
        committed: public_index(contents.committed.as_ref()).max(snapshot),
        last: public_index(contents.last.as_ref()).max(snapshot),
    }
}

fn restore(
    snapshot: Option<SnapshotReader>,
    machine: &mut dyn StateMachine,
) -> Result<(), ReplayError> {
    let Some(mut reader) = snapshot else {
        return Ok(());
    };
    let restored = machine.restore(&mut reader);
    let restored = restored.map_err(|error| io::Error::other(error.to_string()));
    let whole = restored.and_then(|()| reader.check_rest());
    Ok(whole.map_err(|error| reader.start_error(&error))?)
}

/// Applies the entries after the index `range.start`, up to `range.end`.
fn apply(
    disk: &impl Disk,
    layout: &Layout,
    range: std::ops::Range<u64>,
    machine: &mut dyn StateMachine,
) -> Result<(), ReplayError> {
    // Public indexes start at 1: the entry after public index N has internal index N.
    let mut next = range.start;
    while next < range.end {
        let read = disk.read(next..range.end, READ_BYTES_MAX);
        let entries = read.map_err(|error| io_error(&layout.log(), error))?;
        if entries.first().map(|first| first.log_id.index) != Some(next) {
            let index = next + 1;
            let what = format!("log entry {index} is missing");
            return Err(damaged(&layout.log(), index, what).into());
        }
        for entry in entries {
            next = entry.log_id.index + 1;
            match &entry.payload {
                Payload::Blank | Payload::Membership(_) => machine.skip(next),
                Payload::Normal(command) => {
                    let applied = machine.apply(next, &command.0);
                    applied.map_err(|source| ReplayError::Machine {
                        index: next,
                        source,
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// Copies the store below `data_dir` to `scratch`, unless the store is in use.
fn copied(data_dir: &Path, scratch: &Path) -> Result<StoreCopy, ReplayError> {
    let from = files::store_folder(data_dir);
    if !from.is_dir() {
        return Err(ReplayError::NoStore(data_dir.to_owned()));
    }
    let _lock = files::lock_unused(&from).map_err(|error| io_error(&from, error))?;
    // The copy contains sensitive data: users' names, and the secret used to hash blocks.
    let made = DirBuilder::new().mode(0o700).create(scratch);
    made.map_err(|error| io_error(scratch, error))?;
    let copy = StoreCopy(scratch.to_owned());
    copy_folder(&from, &files::store_folder(scratch))
        .map_err(|(path, error)| io_error(&path, error))?;
    Ok(copy)
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), (PathBuf, io::Error)> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    fs::create_dir(to).map_err(at(to))?;
    for entry in fs::read_dir(from).map_err(at(from))? {
        let entry = entry.map_err(at(from))?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().map_err(at(&path))?.is_dir() {
            copy_folder(&path, &copy)?;
        } else {
            fs::copy(&path, &copy).map_err(at(&path))?;
            // The original may be write-protected; sled opens the copy for writing.
            let writable = File::open(&copy).and_then(|file| make_writable(&file));
            writable.map_err(at(&copy))?;
        }
    }
    Ok(())
}

fn make_writable(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o600))
}
