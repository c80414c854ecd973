//! Snapshot files: written beside the old one, synced, renamed, and only then the old one removed.
//!
//! ```text
//! magic    8 bytes   "quosnap1": the version is in its last byte
//! head     length (4 bytes), CRC-32 (4), then what the snapshot stands for, as protobuf
//! chunks   length (4 bytes, not 0), CRC-32 (4), bytes; as many as it takes
//! end      length 0 (4 bytes), CRC-32 of the next 16 (4), number of chunks (8), their bytes (8)
//! ```
//!
//! All numbers are little-endian. A file without a whole end is damaged: nothing that was not
//! written completely is ever taken for a snapshot.

mod read;
mod write;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use self::read::SnapshotReader;
pub(crate) use self::write::SnapshotWriter;
use crate::files;
use crate::types::LogId;

const MAGIC: &[u8; 8] = b"quosnap1";
/// Length and checksum before each part.
const FRAME_HEAD_BYTES: usize = 8;
/// Chunks that are written. Read is what is at most eight times that.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;
const CHUNK_BYTES_MAX: usize = 8 * CHUNK_BYTES;
const HEAD_BYTES_MAX: usize = 16 * 1024 * 1024;
const END_BYTES: usize = 16;

const EXTENSION: &str = "snapshot";
const UNFINISHED: &str = "unfinished";

/// A finished snapshot file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotFile {
    pub(crate) path: PathBuf,
}

/// The folder of snapshots of one replica.
#[derive(Debug)]
pub(crate) struct SnapshotFolder {
    folder: PathBuf,
    unfinished: AtomicU64,
}

impl SnapshotFolder {
    /// Opens the folder and removes what was left unfinished.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        for path in listed(&folder)? {
            if path
                .extension()
                .is_some_and(|extension| extension == UNFINISHED)
            {
                fs::remove_file(path)?;
            }
        }
        Ok(Self {
            folder,
            unfinished: AtomicU64::new(0),
        })
    }

    /// The newest snapshot.
    pub(crate) fn newest(&self) -> io::Result<Option<SnapshotFile>> {
        // Names sort as log ids do.
        Ok(self
            .finished()?
            .into_iter()
            .max()
            .map(|path| SnapshotFile { path }))
    }

    /// A path to write a new snapshot at.
    pub(crate) fn unfinished(&self) -> PathBuf {
        let number = self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{number}.{UNFINISHED}"))
    }

    /// Gives a written and synced file its name, then removes every older snapshot.
    pub(crate) fn adopt(&self, unfinished: &Path, last: Option<LogId>) -> io::Result<SnapshotFile> {
        let path = self.folder.join(name(last));
        if unfinished != path {
            fs::rename(unfinished, &path)?;
            files::sync_folder(&self.folder)?;
        }
        for other in self.finished()? {
            if other < path {
                fs::remove_file(other)?;
            }
        }
        Ok(SnapshotFile { path })
    }

    fn finished(&self) -> io::Result<Vec<PathBuf>> {
        let mut paths = listed(&self.folder)?;
        paths.retain(|path| {
            path.extension()
                .is_some_and(|extension| extension == EXTENSION)
        });
        Ok(paths)
    }
}

fn name(last: Option<LogId>) -> String {
    let (term, node, next) = last.map_or((0, 0, 0), |id| {
        (id.leader_id.term, id.leader_id.node_id, id.index + 1)
    });
    format!("{term:020}-{node:03}-{next:020}.{EXTENSION}")
}

fn listed(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::error::StartError;
    use crate::types::LeaderId;
    use crate::wire::proto;

    fn meta(index: u64) -> proto::SnapshotMeta {
        let last = Some(proto::LogId {
            term: 1,
            node: 1,
            index,
        });
        let membership = Some(proto::StoredMembership {
            log_id: None,
            membership: Some(proto::Membership::default()),
        });
        proto::SnapshotMeta {
            last,
            membership,
            has_commands: true,
        }
    }

    fn log_id(index: u64) -> LogId {
        LogId {
            leader_id: LeaderId {
                term: 1,
                node_id: 1,
            },
            index,
        }
    }

    fn write(folder: &SnapshotFolder, index: u64, bytes: &[u8]) -> SnapshotFile {
        let path = folder.unfinished();
        let mut writer = SnapshotWriter::create(&path, &meta(index)).unwrap();
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap();
        folder.adopt(&path, Some(log_id(index))).unwrap()
    }

    fn read(file: &SnapshotFile) -> Result<Vec<u8>, StartError> {
        let (mut reader, _) = SnapshotReader::open(&file.path)?;
        let mut bytes = Vec::new();
        reader
            .read_to_end(&mut bytes)
            .map_err(|error| reader.start_error(&error))?;
        Ok(bytes)
    }

    #[test]
    fn a_snapshot_is_read_back_at_any_length() {
        let folder = tempfile::tempdir().unwrap();
        let folder = SnapshotFolder::open(folder.path().to_path_buf()).unwrap();
        for (index, length) in [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1].into_iter().enumerate() {
            let bytes = vec![index as u8; length];
            let file = write(&folder, index as u64, &bytes);
            assert_eq!(folder.newest().unwrap().as_ref(), Some(&file));
            assert_eq!(
                SnapshotReader::open(&file.path).unwrap().1,
                meta(index as u64)
            );
            assert!(read(&file).unwrap() == bytes, "{length} bytes differ");
        }
        assert_eq!(
            listed(&folder.folder).unwrap().len(),
            1,
            "older ones are removed"
        );
    }

    #[test]
    fn any_damage_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let folder = SnapshotFolder::open(folder.path().to_path_buf()).unwrap();
        let file = write(&folder, 1, b"the state of a machine");
        let whole = fs::read(&file.path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            fs::write(&file.path, &damaged).unwrap();
            assert!(
                matches!(read(&file), Err(StartError::Damaged { .. })),
                "byte {at}"
            );
            fs::write(&file.path, &whole[..at]).unwrap();
            assert!(
                matches!(read(&file), Err(StartError::Damaged { .. })),
                "first {at} bytes"
            );
        }
    }

    #[test]
    fn what_was_left_unfinished_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("7.unfinished"), b"half").unwrap();
        let snapshots = SnapshotFolder::open(folder.path().to_path_buf()).unwrap();
        assert_eq!(snapshots.newest().unwrap(), None);
        assert!(listed(folder.path()).unwrap().is_empty());
    }
}
