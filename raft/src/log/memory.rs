//! The in-memory twin of the disk, for tests and simulation.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::{Change, Contents, Disk};
use super::weight;
use crate::types::Entry;

/// A log kept in memory. Clones share it: a replica that is started again with the same disk finds
/// what was acknowledged before, as after a crash of the process.
#[derive(Clone, Default)]
pub struct MemoryDisk(Arc<Mutex<Memory>>);

#[derive(Default)]
struct Memory {
    contents: Contents,
    entries: BTreeMap<u64, Entry>,
    failure: Option<String>,
}

impl MemoryDisk {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Has every later write fail, as on a full or broken disk; `None` repairs it.
    pub fn fail(&self, what: Option<String>) {
        self.lock().failure = what;
    }

    pub(crate) fn contents(&self) -> Contents {
        self.lock().contents
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDisk").finish_non_exhaustive()
    }
}

impl Memory {
    fn change(&mut self, change: &Change) {
        match change {
            Change::Vote(vote) => self.contents.vote = Some(*vote),
            Change::Committed(committed) => self.contents.committed = Some(*committed),
            Change::Append(entries) => {
                for entry in entries {
                    self.entries.insert(entry.log_id.index, entry.clone());
                    self.contents.last = Some(entry.log_id);
                }
            }
            Change::Truncate { from } => {
                drop(self.entries.split_off(from));
                let last = self.entries.values().next_back().map(|entry| entry.log_id);
                self.contents.last = last.or(self.contents.purged);
            }
            Change::Purge { upto } => {
                self.entries = self.entries.split_off(&(upto.index + 1));
                self.contents.purged = Some(*upto);
                self.contents.last = self.contents.last.max(Some(*upto));
            }
        }
    }
}

impl Disk for MemoryDisk {
    fn write(&self, changes: &[Change]) -> io::Result<()> {
        let mut memory = self.lock();
        if let Some(what) = &memory.failure {
            return Err(io::Error::other(what.clone()));
        }
        for change in changes {
            memory.change(change);
        }
        Ok(())
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>> {
        let memory = self.lock();
        let mut read = Vec::new();
        let mut bytes = 0;
        for entry in memory.entries.range(range).map(|(_, entry)| entry) {
            bytes += weight(entry);
            if bytes > bytes_max && !read.is_empty() {
                break;
            }
            read.push(entry.clone());
        }
        Ok(read)
    }

    fn close(&self) {}
}
