//! Layout of a data directory, and small files that are written completely or not at all.
//!
//! `<data_dir>/raft/` holds everything that a replica must not lose:
//!
//! | path | what |
//! | --- | --- |
//! | `lock` | locked by the process that uses the store |
//! | `identity` | the replica's identity and its cluster |
//! | `log.mark` | lower bound on the log's contents; kept open (`crate::log::mark`) |
//! | `log/` | sled: vote and entries |
//! | `snapshots/` | snapshot files |

mod port;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;

pub(crate) use self::port::{Files, NewFile, StoreLock, SystemFiles, in_use};
use crate::error::StartError;

const FOLDER: &str = "raft";
const LOCK: &str = "lock";
const MAGIC: &[u8; 8] = b"quorate1";
const HEAD_BYTES: usize = MAGIC.len() + 4;

/// Paths of a replica's store, and access to its files.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
    /// Port for all files except the log's.
    pub(crate) files: Arc<dyn Files>,
}

impl Layout {
    /// Creates a layout on the operating system's files.
    pub(crate) fn new(data_dir: &Path) -> Self {
        Self::over(Arc::new(SystemFiles), data_dir)
    }

    /// Creates a layout on the given implementation of the port.
    pub(crate) fn over(files: Arc<dyn Files>, data_dir: &Path) -> Self {
        let root = store_folder(data_dir);
        Self { root, files }
    }

    /// Creates the store's folders and makes their names durable.
    pub(crate) fn create(&self) -> Result<(), StartError> {
        for folder in [self.root.clone(), self.snapshots()] {
            let created = self.files.create_folder(&folder);
            created.map_err(|source| io_error(&folder, source))?;
        }
        for folder in self.root.ancestors().take(2) {
            let synced = self.files.sync_folder(folder);
            synced.map_err(|source| io_error(folder, source))?;
        }
        Ok(())
    }

    /// Locks the store for the use of one replica.
    pub(crate) fn lock(&self) -> Result<StoreLock, StartError> {
        let path = self.root.join(LOCK);
        let locked = self.files.lock(&path);
        locked.map_err(|error| io_error(&path, error))
    }

    pub(crate) fn identity(&self) -> PathBuf {
        self.root.join("identity")
    }

    pub(crate) fn mark(&self) -> PathBuf {
        self.root.join("log.mark")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.root.join("log")
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }
}

/// Returns the store's folder below a data directory.
pub(crate) fn store_folder(data_dir: &Path) -> PathBuf {
    data_dir.join(FOLDER)
}

/// Builds a start error from an I/O error.
pub(crate) fn io_error(path: &Path, source: io::Error) -> StartError {
    StartError::Io {
        path: path.to_path_buf(),
        source,
    }
}

/// Builds a start error for a file with invalid bytes.
pub(crate) fn damaged(path: &Path, offset: u64, what: impl Into<String>) -> StartError {
    StartError::Damaged {
        path: path.display().to_string(),
        offset,
        what: what.into(),
    }
}

/// Whether an error reports a shortage that may pass. Retrying is safe only if the failed step has
/// not changed anything yet.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let is_short = |errno| {
        use rustix::io::Errno;
        [Errno::MFILE, Errno::NFILE, Errno::NOMEM].contains(&errno)
    };
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::Interrupted
            | io::ErrorKind::WouldBlock
            | io::ErrorKind::OutOfMemory
    ) || rustix::io::Errno::from_io_error(error).is_some_and(is_short)
}

/// Replaces a small file with a message: writes and syncs a new file, renames it, syncs the folder.
pub(crate) fn store_message(
    files: &dyn Files,
    path: &Path,
    message: &impl Message,
) -> io::Result<()> {
    let body = message.encode_to_vec();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    bytes.extend_from_slice(&body);

    let beside = path.with_extension("new");
    let mut file = files.create(&beside)?;
    file.write_all(&bytes)?;
    file.sync()?;
    files.rename(&beside, path)?;
    files.sync_folder(path.parent().expect("a file of the layout has a folder"))
}

/// Reads a message that [`store_message`] wrote; `None` if the file does not exist.
pub(crate) fn load_message<M: Message + Default>(
    files: &dyn Files,
    path: &Path,
) -> Result<Option<M>, StartError> {
    let mut bytes = Vec::new();
    let read = files
        .open(path)
        .and_then(|mut file| file.read_to_end(&mut bytes));
    match read {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error(path, error)),
    }
    let Some((head, body)) = bytes.split_at_checked(HEAD_BYTES) else {
        return Err(damaged(path, 0, "shorter than its head"));
    };
    let (magic, crc) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(damaged(path, 0, "unknown magic number"));
    }
    if crc != crc32fast::hash(body).to_le_bytes() {
        return Err(damaged(path, MAGIC.len() as u64, "checksum differs"));
    }
    let message =
        M::decode(body).map_err(|error| damaged(path, HEAD_BYTES as u64, error.to_string()))?;
    Ok(Some(message))
}

/// Moves the store (log, vote and snapshots) of a damaged replica below `data_dir` aside, so that
/// the replica can rejoin under a new id and be rebuilt from its peers. Returns the new path, or
/// `None` if there was no store.
///
/// # Errors
/// File system errors, and `ResourceBusy` while a replica runs on the store.
pub fn set_store_aside(data_dir: &Path) -> io::Result<Option<PathBuf>> {
    let folder = store_folder(data_dir);
    if !folder.try_exists()? {
        return Ok(None);
    }
    drop(lock_unused(&folder)?);
    for number in 1_u32.. {
        let aside = data_dir.join(format!("{FOLDER}.aside-{number}"));
        if !aside.try_exists()? {
            fs::rename(&folder, &aside)?;
            SystemFiles.sync_folder(data_dir)?;
            return Ok(Some(aside));
        }
    }
    unreachable!("more than 2^32 stores were set aside")
}

/// Locks a store that no running process uses, until the file is dropped. Returns `None` if it has
/// no lock file, because it is a copy that no process ever used. Changes nothing.
pub(crate) fn lock_unused(folder: &Path) -> io::Result<Option<File>> {
    match File::open(folder.join(LOCK)) {
        Ok(file) => port::lock(&file).map(|()| Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto;

    #[test]
    fn a_message_file_round_trips_and_damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity");
        assert_eq!(
            load_message::<proto::Identity>(&SystemFiles, &path).unwrap(),
            None
        );
        let identity = proto::Identity {
            id: 3,
            store: 4,
            ..proto::Identity::default()
        };
        store_message(&SystemFiles, &path, &identity).unwrap();
        assert_eq!(load_message(&SystemFiles, &path).unwrap(), Some(identity));

        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = load_message::<proto::Identity>(&SystemFiles, &path).unwrap_err();
        assert!(
            matches!(error, StartError::Damaged { offset: 8, .. }),
            "{error}"
        );
    }

    #[test]
    fn each_damaged_store_is_set_aside_under_a_new_name() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(set_store_aside(folder.path()).unwrap(), None);
        for number in 1..=2 {
            Layout::new(folder.path()).create().unwrap();
            let aside = set_store_aside(folder.path()).unwrap().unwrap();
            assert_eq!(aside, folder.path().join(format!("raft.aside-{number}")));
            assert!(aside.join("snapshots").is_dir());
        }
        assert_eq!(set_store_aside(folder.path()).unwrap(), None);
    }
}
