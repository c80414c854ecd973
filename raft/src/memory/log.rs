//! The log in memory.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::time::Duration;

use super::{MemoryHandle, Shortage, Step};
use crate::log::disk::{Change, Contents, Disk, TimedDisk};
use crate::log::weight;
use crate::types::Entry;

/// What a log holds.
#[derive(Clone, Default)]
pub(super) struct LogImage {
    pub(super) contents: Contents,
    entries: BTreeMap<u64, Entry>,
}

impl LogImage {
    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Vote(vote) => self.contents.vote = Some(*vote),
            Change::Committed(committed) => self.contents.committed = Some(*committed),
            Change::Append(entries) => {
                for entry in entries {
                    self.entries.insert(entry.log_id.index, entry.clone());
                }
                // As what is on a disk says: a later entry that was not truncated is still there.
                let last = self.entries.values().next_back().map(|entry| entry.log_id);
                self.contents.last = last.or(self.contents.last);
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

    fn read(&self, range: Range<u64>, bytes_max: usize) -> Vec<Entry> {
        let mut read = Vec::new();
        let mut bytes = 0;
        for entry in self.entries.range(range).map(|(_, entry)| entry) {
            bytes += weight(entry);
            if bytes > bytes_max && !read.is_empty() {
                break;
            }
            read.push(entry.clone());
        }
        read
    }
}

impl MemoryHandle {
    /// What the log holds.
    pub(crate) fn contents(&self) -> io::Result<Contents> {
        self.with(|state| Ok(state.seen.log.contents))
    }
}

impl Disk for MemoryHandle {
    fn room_for(&self, _changes: &[Change]) -> io::Result<()> {
        self.with(|state| state.refuse_if_short(Shortage::Space))
    }

    fn write(&self, changes: &[Change]) -> io::Result<()> {
        self.write_unsynced(changes)?;
        self.sync()
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>> {
        self.with(|state| Ok(state.seen.log.read(range, bytes_max)))
    }

    fn close(&self) {}
}

impl TimedDisk for MemoryHandle {
    fn write_unsynced(&self, changes: &[Change]) -> io::Result<()> {
        self.with(|state| {
            state.refuse_if_failed()?;
            for change in changes {
                match change {
                    // A write is torn between two entries, too.
                    Change::Append(entries) => {
                        for entry in entries {
                            state.take(Step::Log(Change::Append(vec![entry.clone()])));
                        }
                    }
                    Change::Vote(_)
                    | Change::Committed(_)
                    | Change::Truncate { .. }
                    | Change::Purge { .. } => state.take(Step::Log(change.clone())),
                }
            }
            Ok(())
        })
    }

    fn sync_time(&self) -> io::Result<Duration> {
        self.with(|state| {
            Ok(state
                .sync_time
                .as_mut()
                .map_or(Duration::ZERO, |time| time()))
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.with(|state| {
            state.refuse_if_failed()?;
            state.sync(|step| matches!(step, Step::Log(_)));
            Ok(())
        })
    }
}
