//! A disk in memory, with the log, identity and snapshots of one replica, for tests and simulation.
//!
//! What is written is read back at once. It survives a crash when it was synced before; of what was
//! not, a crash leaves a prefix, as a disk that is cut off in the middle does. The log's writes take
//! a while to be synced, everything else is synced at once.

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

/// A disk in memory. Clones are the same disk: a replica that is started again with it finds what
/// the one before has left.
#[derive(Clone, Default)]
pub struct MemoryDisk(Arc<Mutex<DiskState>>);

/// What a disk runs short of for a while. Nothing is begun meanwhile that needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskShortage {
    /// The process has no descriptors left: no file or folder can be opened.
    Descriptors,
    /// The disk is full: nothing can be written.
    Space,
}

/// The disk as one start of a replica has it: until a crash.
#[derive(Clone)]
pub(crate) struct MemoryHandle {
    disk: MemoryDisk,
    era: u64,
}

#[derive(Default)]
struct DiskState {
    /// What is read.
    seen: DiskImage,
    /// What a crash leaves for sure.
    durable: DiskImage,
    /// What leads from `durable` to `seen`, in the order in which it was written.
    unsynced: VecDeque<DiskStep>,
    /// How long the log's next sync takes; at once if `None`.
    sync_time: Option<Box<dyn FnMut() -> Duration + Send>>,
    failure: Option<String>,
    shortage: Option<DiskShortage>,
    /// Counts crashes: who opened the disk before the last one has lost it.
    era: u64,
    is_locked: bool,
    files_made: u64,
}

#[derive(Clone, Default)]
struct DiskImage {
    log: LogImage,
    files: FileImage,
}

/// One change that is made durable or not, never in part.
enum DiskStep {
    Log(LogChange),
    File(FileStep),
}

impl MemoryDisk {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty one on which a write of the log is durable, and answered, after the time that
    /// `sync_time` says, asked anew for each.
    #[must_use]
    pub fn with_sync(sync_time: impl FnMut() -> Duration + Send + 'static) -> Self {
        let disk = Self::default();
        lock(&disk.0).sync_time = Some(Box::new(sync_time));
        disk
    }

    /// Has every later write fail, as on a full or broken disk; `None` repairs it.
    pub fn fail(&self, what: Option<String>) {
        lock(&self.0).failure = what;
    }

    /// Has it run short of something; `None` ends that.
    pub fn run_short(&self, of: Option<DiskShortage>) {
        lock(&self.0).shortage = of;
    }

    /// Cuts the disk off from the replica that runs on it, which can neither read nor change it from
    /// here on. Of the changes that were not synced, the oldest ones survive, as many as `keep`
    /// answers when it is told how many there are; the others never were.
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

    /// The disk for one start of a replica: a process of its own, with descriptors.
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
