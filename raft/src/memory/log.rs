//! Log of the in-memory disk.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::time::Duration;

use super::{DiskShortage, DiskStep, MemoryHandle};
use crate::log::disk::{Disk, DiskContents, LogChange};
use crate::log::weight;
use crate::types::Entry;

/// Content of the log at one moment.
#[derive(Clone, Default)]
pub(super) struct LogImage {
    pub(super) contents: DiskContents,
    entries: BTreeMap<u64, Entry>,
}

impl LogImage {
    pub(super) fn apply(&mut self, change: &LogChange) {
        match change {
            LogChange::Vote(vote) => self.contents.vote = Some(*vote),
            LogChange::Committed(committed) => self.contents.committed = Some(*committed),
            LogChange::Append(entries) => {
                for entry in entries {
                    self.entries.insert(entry.log_id.index, entry.clone());
                }
                // As on a real disk, a later entry that was not truncated is still present.
                let last = self.entries.values().next_back().map(|entry| entry.log_id);
                self.contents.last = last.or(self.contents.last);
            }
            LogChange::Truncate { from } => {
                drop(self.entries.split_off(from));
                let last = self.entries.values().next_back().map(|entry| entry.log_id);
                self.contents.last = last.or(self.contents.purged);
            }
            LogChange::Purge { upto } => {
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
    /// Returns what the log contains.
    pub(crate) fn contents(&self) -> io::Result<DiskContents> {
        self.with(|state| Ok(state.seen.log.contents))
    }
}

impl Disk for MemoryHandle {
    fn room_for(&self, _changes: &[LogChange]) -> io::Result<()> {
        self.with(|state| state.refuse_if_short(DiskShortage::Space))
    }

    fn write(&self, changes: &[LogChange]) -> io::Result<()> {
        self.with(|state| {
            state.refuse_if_failed()?;
            for change in changes {
                match change {
                    // A power cut may fall between two entries of a write.
                    LogChange::Append(entries) => {
                        for entry in entries {
                            state.take(DiskStep::Log(LogChange::Append(vec![entry.clone()])));
                        }
                    }
                    LogChange::Vote(_)
                    | LogChange::Committed(_)
                    | LogChange::Truncate { .. }
                    | LogChange::Purge { .. } => state.take(DiskStep::Log(change.clone())),
                }
            }
            Ok(())
        })
    }

    fn sync_delay(&self) -> io::Result<Duration> {
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
            state.sync(|step| matches!(step, DiskStep::Log(_)));
            Ok(())
        })
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<Entry>> {
        self.with(|state| Ok(state.seen.log.read(range, bytes_max)))
    }

    fn close(&self) {}
}
