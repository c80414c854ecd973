//! In-memory disk with a replica's log, identity and snapshots, for tests and simulations.
//!
//! Writes are readable at once. A crash keeps all synced data and a prefix of the rest, like a disk
//! that loses power halfway. Log syncs can be configured to take time; other syncs take none.

mod files;
mod log;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::files::{FileImage, FileStep};
use self::log::LogImage;
use crate::locks::lock;
use crate::log::disk::LogChange;

/// An in-memory disk. Clones refer to the same disk, so a restarted replica finds its earlier data.
#[derive(Clone, Default)]
pub struct MemoryDisk(Arc<Mutex<DiskState>>);

/// Temporary shortage of a resource. Operations that need it fail without any effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskShortage {
    /// Shortage of file descriptors: no file or folder can be opened.
    Descriptors,
    /// Shortage of space: nothing can be written.
    Space,
}

/// Access to a disk for one run of a replica, until a crash.
#[derive(Clone)]
pub(crate) struct MemoryHandle {
    disk: MemoryDisk,
    era: u64,
}

#[derive(Default)]
struct DiskState {
    /// Content that reads return.
    seen: DiskImage,
    /// Content that is certain to survive a crash.
    durable: DiskImage,
    /// Changes from `durable` to `seen`, in the order of writing.
    unsynced: VecDeque<DiskStep>,
    /// Source of the duration of the next log sync; `None` if syncs take no time.
    sync_time: Option<Box<dyn FnMut() -> Duration + Send>>,
    failure: Option<String>,
    shortage: Option<DiskShortage>,
    /// Number of crashes so far. A handle opened before the last crash is cut off.
    era: u64,
    is_locked: bool,
    files_made: u64,
}

#[derive(Clone, Default)]
struct DiskImage {
    log: LogImage,
    files: FileImage,
}

/// Single change, which becomes durable completely or not at all.
enum DiskStep {
    Log(LogChange),
    File(FileStep),
}

impl MemoryDisk {
    /// Creates an empty disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty disk on which each log sync takes as long as `sync_time` returns.
    #[must_use]
    pub fn with_sync(sync_time: impl FnMut() -> Duration + Send + 'static) -> Self {
        let disk = Self::default();
        lock(&disk.0).sync_time = Some(Box::new(sync_time));
        disk
    }

    /// Makes all later writes fail with the message `what`, as on a broken disk; `None` repairs it.
    pub fn fail(&self, what: Option<String>) {
        lock(&self.0).failure = what;
    }

    /// Starts the shortage `of` a resource; `None` ends it.
    pub fn run_short(&self, of: Option<DiskShortage>) {
        lock(&self.0).shortage = of;
    }

    /// Cuts the disk off from the replica that uses it, which can no longer read or change it.
    /// `keep` receives the number of unsynced changes and returns how many of them survive, oldest
    /// first.
    pub fn crash(&self, keep: impl FnOnce(usize) -> usize) {
        let mut state = lock(&self.0);
        state.era += 1;
        state.is_locked = false;
        let unsynced = std::mem::take(&mut state.unsynced);
        let kept = keep(unsynced.len());
        for step in unsynced.iter().take(kept) {
            state.durable.apply(step);
        }
        state.seen = state.durable.clone();
    }

    /// Opens the disk for one run of a replica: a new process with its own descriptors.
    pub(crate) fn open(&self) -> MemoryHandle {
        let mut state = lock(&self.0);
        if state.shortage == Some(DiskShortage::Descriptors) {
            state.shortage = None;
        }
        MemoryHandle {
            era: state.era,
            disk: self.clone(),
        }
    }
}

impl fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDisk").finish_non_exhaustive()
    }
}

impl MemoryHandle {
    fn with<T>(&self, work: impl FnOnce(&mut DiskState) -> io::Result<T>) -> io::Result<T> {
        let mut state = lock(&self.disk.0);
        if state.era != self.era {
            return Err(io::Error::other("the disk was cut off"));
        }
        work(&mut state)
    }
}

impl fmt::Debug for MemoryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryHandle").finish_non_exhaustive()
    }
}

impl DiskState {
    fn refuse_if_failed(&self) -> io::Result<()> {
        match &self.failure {
            Some(what) => Err(io::Error::other(what.clone())),
            None => Ok(()),
        }
    }

    fn refuse_if_short(&self, of: DiskShortage) -> io::Result<()> {
        if self.shortage != Some(of) {
            return Ok(());
        }
        let errno = match of {
            DiskShortage::Descriptors => rustix::io::Errno::MFILE,
            DiskShortage::Space => rustix::io::Errno::NOSPC,
        };
        Err(errno.into())
    }

    fn take(&mut self, step: DiskStep) {
        self.seen.apply(&step);
        self.unsynced.push_back(step);
    }

    fn sync(&mut self, is_synced: impl Fn(&DiskStep) -> bool) {
        for step in std::mem::take(&mut self.unsynced) {
            if is_synced(&step) {
                self.durable.apply(&step);
            } else {
                self.unsynced.push_back(step);
            }
        }
    }
}

impl DiskImage {
    fn apply(&mut self, step: &DiskStep) {
        match step {
            DiskStep::Log(change) => self.log.apply(change),
            DiskStep::File(step) => self.files.apply(step),
        }
    }
}
