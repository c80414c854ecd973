//! The file `log.mark`: a lower bound on what the log must contain.
//!
//! The file is opened once. Its two slots are overwritten in place, alternately, and synced, so
//! moving the mark needs neither a descriptor nor space. The newest intact slot is valid; a torn
//! write leaves the previous one.
//!
//! ```text
//! slot     at 0 and at 4096, the rest of it zeros
//! magic    8 bytes   "quomark1": the version is in its last byte
//! crc      4 bytes   CRC-32 (IEEE) over what follows
//! number   8 bytes   one more than the slot written before; its lowest bit says which slot
//! length   4 bytes   of the mark
//! mark               as protobuf
//! ```
//!
//! All numbers are little-endian.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use prost::Message;

use super::disk::DiskContents;
use crate::error::StartError;
use crate::files::{Files as _, Layout, SystemFiles, damaged, io_error};
use crate::types::{LogId, Vote};
use crate::wire::proto;

const MAGIC: &[u8; 8] = b"quomark1";
const SLOT_BYTES: usize = 4096;
const SLOTS: u64 = 2;
const HEAD_BYTES: usize = 24;

/// Lower bound on the contents of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LogMark {
    pub(super) vote: Option<Vote>,
    pub(super) last: Option<LogId>,
}

/// Open mark file, and the number of its newest slot.
pub(super) struct MarkFile {
    file: File,
    /// Number of the slot written last.
    number: u64,
}

impl MarkFile {
    /// Opens the file, or creates it if it does not exist, and reads the mark.
    pub(super) fn open(layout: &Layout) -> Result<(Self, LogMark), StartError> {
        let path = layout.mark();
        let failed = |error| io_error(&path, error);
        let Some(bytes) = read_synced(&path).map_err(failed)? else {
            let new = Self::create(&path, LogMark::default()).map_err(failed)?;
            return Ok((new, LogMark::default()));
        };
        let Some((number, mark)) = newest(&bytes) else {
            return Err(damaged(&path, 0, "none of its two slots is whole"));
        };
        let file = open_to_write(&path).map_err(failed)?;
        Ok((Self { file, number }, mark))
    }

    /// Creates a file with `mark`, replacing an existing one.
    fn create(path: &Path, mark: LogMark) -> io::Result<Self> {
        let beside = path.with_extension("new");
        let mut file = File::create(&beside)?;
        let mut bytes = slot(0, mark);
        // Allocate the space for both slots once.
        bytes.resize(SLOT_BYTES * SLOTS as usize, 0);
        file.write_all(&bytes)?;
        file.sync_all()?;
        SystemFiles.rename(&beside, path)?;
        SystemFiles.sync_folder(path.parent().expect("a file of the layout has a folder"))?;
        Ok(Self {
            file: open_to_write(path)?,
            number: 0,
        })
    }

    /// Writes `mark` to the older slot and syncs it.
    pub(super) fn store(&mut self, mark: LogMark) -> io::Result<()> {
        let number = self.number + 1;
        let at = (number % SLOTS) * SLOT_BYTES as u64;
        self.file.write_all_at(&slot(number, mark), at)?;
        self.file.sync_data()?;
        self.number = number;
        Ok(())
    }
}

impl LogMark {
    /// Returns an error if the log contains less than this mark requires.
    pub(super) fn check(&self, contents: &DiskContents, data: &Path) -> Result<(), StartError> {
        if self.last > contents.last {
            let index = self.last.map_or(0, |last| last.index + 1);
            let found = contents.last.map_or(0, |last| last.index + 1);
            let what = format!("the log ends at entry {found}, it had reached {index}");
            return Err(damaged(data, found, what));
        }
        if self.vote > contents.vote {
            return Err(damaged(data, 0, "the last vote is missing"));
        }
        Ok(())
    }
}

impl From<proto::LogMark> for LogMark {
    fn from(wire: proto::LogMark) -> Self {
        Self {
            vote: wire.vote.map(Into::into),
            last: wire.last.map(Into::into),
        }
    }
}

impl From<LogMark> for proto::LogMark {
    fn from(mark: LogMark) -> Self {
        Self {
            vote: mark.vote.map(Into::into),
            last: mark.last.map(Into::into),
        }
    }
}

/// Returns the content of a file, or `None` if it does not exist. Syncs it first, since a killed
/// process may not have: otherwise a power cut could tear both slots.
fn read_synced(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    file.sync_all()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn open_to_write(path: &Path) -> io::Result<File> {
    File::options().write(true).open(path)
}

fn slot(number: u64, mark: LogMark) -> Vec<u8> {
    let body = proto::LogMark::from(mark).encode_to_vec();
    let length = u32::try_from(body.len()).expect("a mark is some dozen bytes");
    let sealed = [&number.to_le_bytes()[..], &length.to_le_bytes(), &body].concat();
    let crc = crc32fast::hash(&sealed).to_le_bytes();
    let slot = [&MAGIC[..], &crc, &sealed].concat();
    assert!(slot.len() <= SLOT_BYTES, "a mark of {} bytes", slot.len());
    slot
}

/// Returns the mark in the newest intact slot and its number; `None` if no slot is intact.
pub(super) fn newest(bytes: &[u8]) -> Option<(u64, LogMark)> {
    let whole = bytes.chunks(SLOT_BYTES).filter_map(read_slot);
    whole.max_by_key(|(number, _)| *number)
}

fn read_slot(slot: &[u8]) -> Option<(u64, LogMark)> {
    let (head, rest) = slot.split_at_checked(HEAD_BYTES)?;
    let (magic, head) = head.split_first_chunk::<8>()?;
    let (crc, head) = head.split_first_chunk::<4>()?;
    let (number, length) = head.split_first_chunk::<8>()?;
    let length = u32::from_le_bytes(*length.first_chunk::<4>()?) as usize;
    let body = rest.get(..length)?;
    let sealed = &slot[MAGIC.len() + crc.len()..HEAD_BYTES + length];
    if magic != MAGIC || *crc != crc32fast::hash(sealed).to_le_bytes() {
        return None;
    }
    let mark = proto::LogMark::decode(body).ok()?;
    Some((u64::from_le_bytes(*number), mark.into()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::types::log_id;

    fn mark(index: u64) -> LogMark {
        LogMark {
            vote: Some(Vote::new_committed(3, 2)),
            last: Some(log_id(3, 2, index)),
        }
    }

    fn laid_out() -> (tempfile::TempDir, Layout) {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path());
        layout.create().unwrap();
        (folder, layout)
    }

    fn found(layout: &Layout) -> Result<LogMark, StartError> {
        MarkFile::open(layout).map(|(_, mark)| mark)
    }

    #[test]
    fn the_newest_mark_survives_restarts() {
        let (_folder, layout) = laid_out();
        assert_eq!(found(&layout).unwrap(), LogMark::default());
        for index in 0..5 {
            let (mut file, _) = MarkFile::open(&layout).unwrap();
            for index in [index * 10, index * 10 + 1] {
                file.store(mark(index)).unwrap();
                assert_eq!(found(&layout).unwrap(), mark(index));
            }
        }
    }

    #[test]
    fn a_corrupt_slot_falls_back_to_the_previous_mark() {
        let (_folder, layout) = laid_out();
        let (mut file, _) = MarkFile::open(&layout).unwrap();
        for index in 1..=3 {
            file.store(mark(index)).unwrap();
        }
        let whole = fs::read(layout.mark()).unwrap();
        let length = slot(3, mark(3)).len();
        for at in SLOT_BYTES..SLOT_BYTES + length {
            let mut torn = whole.clone();
            torn[at] ^= 0x10;
            fs::write(layout.mark(), torn).unwrap();
            assert_eq!(found(&layout).unwrap(), mark(2), "byte {at}");
        }
        let mut torn = whole;
        torn[0] ^= 1;
        torn[SLOT_BYTES] ^= 1;
        fs::write(layout.mark(), torn).unwrap();
        assert!(matches!(found(&layout), Err(StartError::Damaged { .. })));
    }

    /// Pins the byte layout of a slot: changing it requires a new magic number.
    #[test]
    fn a_mark_slot_has_golden_bytes() {
        let golden = [
            &MAGIC[..],
            &[0xff; 4],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[14, 0, 0, 0],
            &[10, 6, 8, 3, 16, 2, 24, 1, 18, 4, 8, 3, 16, 2],
        ]
        .concat();
        let mut slot = slot(3, mark(0));
        slot[8..12].fill(0xff);
        assert_eq!(slot, golden);
    }
}
