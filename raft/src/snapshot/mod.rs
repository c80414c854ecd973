//! Snapshot files. A new file is written under another name, synced and renamed before the old one
//! is removed.
//!
//! ```text
//! magic    8 bytes   "quosnap1": the version is in its last byte
//! head     length (4 bytes), CRC-32 (4), then the last log id and the membership, as protobuf
//! chunks   length (4 bytes, not 0), CRC-32 (4), bytes; as many as it takes
//! end      length 0 (4 bytes), CRC-32 of the next 16 (4), number of chunks (8), their bytes (8)
//! ```
//!
//! All numbers are little-endian. A file without an intact end is damaged, so an incomplete file is
//! never mistaken for a snapshot.

mod read;
mod write;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use self::read::SnapshotReader;
pub(crate) use self::write::SnapshotWriter;
use crate::files::Files;
use crate::types::LogId;

const MAGIC: &[u8; 8] = b"quosnap1";
/// Length of the head of each frame, in bytes: the frame's length and checksum.
const FRAME_HEAD_BYTES: usize = 8;
/// Size of the chunks written, in bytes. The reader accepts chunks up to eight times that size.
pub(crate) const CHUNK_BYTES: usize = 256 * 1024;
pub(crate) const CHUNK_BYTES_MAX: usize = 8 * CHUNK_BYTES;
/// Maximum size of the head, in bytes: 255 members with all permitted labels stay below it.
pub(crate) const HEAD_BYTES_MAX: usize = 16 * 1024 * 1024;
const END_BYTES: usize = 16;

const EXTENSION: &str = "snapshot";
const UNFINISHED: &str = "unfinished";

/// Snapshot file, or a path at which one can be written.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotFile {
    pub(crate) files: Arc<dyn Files>,
    pub(crate) path: PathBuf,
}

impl SnapshotFile {
    /// Removes the file, if it exists. If that fails, the next start removes it.
    pub(crate) fn remove(&self) {
        self.files.remove(&self.path).ok();
    }
}

/// Folder of a replica's snapshots.
#[derive(Debug)]
pub(crate) struct SnapshotFolder {
    files: Arc<dyn Files>,
    folder: PathBuf,
    unfinished: AtomicU64,
}

impl SnapshotFolder {
    /// Opens the folder and removes unfinished files.
    pub(crate) fn open(files: Arc<dyn Files>, folder: PathBuf) -> io::Result<Self> {
        for path in files.list(&folder)? {
            if path
                .extension()
                .is_some_and(|extension| extension == UNFINISHED)
            {
                files.remove(&path)?;
            }
        }
        Ok(Self {
            files,
            folder,
            unfinished: AtomicU64::new(0),
        })
    }

    /// Returns the newest snapshot in the folder; `None` if there is none.
    pub(crate) fn newest(&self) -> io::Result<Option<SnapshotFile>> {
        // Names sort in the order of log ids.
        Ok(self.finished()?.into_iter().max().map(|path| self.at(path)))
    }

    /// Returns a new unfinished file, in which a snapshot can be written.
    pub(crate) fn unfinished(&self) -> SnapshotFile {
        let number = self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.at(self.folder.join(format!("{number}.{UNFINISHED}")))
    }

    fn at(&self, path: PathBuf) -> SnapshotFile {
        let files = self.files.clone();
        SnapshotFile { files, path }
    }

    /// Gives a complete and synced file its final name, then removes older snapshots. May be
    /// repeated if it fails for lack of descriptors.
    pub(crate) fn adopt(&self, unfinished: &Path, last: Option<LogId>) -> io::Result<SnapshotFile> {
        let path = self.folder.join(name(last));
        if unfinished != path {
            match self.files.rename(unfinished, &path) {
                // An earlier attempt already renamed it.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && self.files.exists(&path) => {}
                renamed => renamed?,
            }
            self.files.sync_folder(&self.folder)?;
        }
        for other in self.finished()? {
            if other < path {
                self.files.remove(&other)?;
            }
        }
        Ok(self.at(path))
    }

    fn finished(&self) -> io::Result<Vec<PathBuf>> {
        let mut paths = self.files.list(&self.folder)?;
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};

    use super::*;
    use crate::error::StartError;
    use crate::files::SystemFiles;
    use crate::types::log_id;
    use crate::wire::proto;

    fn meta(index: u64) -> proto::SnapshotMeta {
        let last = Some(log_id(1, 1, index).into());
        let membership = Some(proto::StoredMembership {
            log_id: None,
            membership: Some(proto::Membership::default()),
        });
        proto::SnapshotMeta {
            last,
            membership,
            has_commands: true,
            removals: Vec::new(),
        }
    }

    fn write(folder: &SnapshotFolder, index: u64, bytes: &[u8]) -> SnapshotFile {
        let file = folder.unfinished();
        let mut writer = SnapshotWriter::create(&file, &meta(index)).unwrap();
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap();
        folder.adopt(&file.path, Some(log_id(1, 1, index))).unwrap()
    }

    fn opened(folder: &tempfile::TempDir) -> SnapshotFolder {
        SnapshotFolder::open(Arc::new(SystemFiles), folder.path().to_path_buf()).unwrap()
    }

    fn read(file: &SnapshotFile) -> Result<Vec<u8>, StartError> {
        let (mut reader, _) = SnapshotReader::open(file)?;
        let mut bytes = Vec::new();
        reader
            .read_to_end(&mut bytes)
            .map_err(|error| reader.start_error(&error))?;
        Ok(bytes)
    }

    #[test]
    fn snapshots_of_any_length_round_trip() {
        let folder = tempfile::tempdir().unwrap();
        let folder = opened(&folder);
        for (index, length) in [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1].into_iter().enumerate() {
            let bytes = vec![index as u8; length];
            let file = write(&folder, index as u64, &bytes);
            assert_eq!(folder.newest().unwrap().unwrap().path, file.path);
            assert_eq!(SnapshotReader::open(&file).unwrap().1, meta(index as u64));
            assert!(read(&file).unwrap() == bytes, "{length} bytes differ");
        }
        assert_eq!(
            SystemFiles.list(&folder.folder).unwrap().len(),
            1,
            "older ones are removed"
        );
    }

    #[test]
    fn any_snapshot_damage_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let folder = opened(&folder);
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
    fn unfinished_snapshots_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("7.unfinished"), b"half").unwrap();
        let snapshots = opened(&folder);
        assert!(snapshots.newest().unwrap().is_none());
        assert!(SystemFiles.list(folder.path()).unwrap().is_empty());
    }
}
