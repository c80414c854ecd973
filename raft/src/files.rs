//! Small files that are written whole or not at all, and the folder layout below a data directory.
//!
//! `<data_dir>/raft/` holds everything a replica must not lose:
//!
//! | path | what |
//! | --- | --- |
//! | `lock` | held by the process that runs on it |
//! | `identity` | who the replica is and which cluster it belongs to |
//! | `log.mark` | what the log has promised at least |
//! | `log/` | sled: vote and entries |
//! | `snapshots/` | snapshot files |

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use prost::Message;

use crate::error::StartError;

const FOLDER: &str = "raft";
const LOCK: &str = "lock";
const MAGIC: &[u8; 8] = b"quorate1";
const HEAD_BYTES: usize = MAGIC.len() + 4;

/// A store taken by this process, until it is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Where a replica's files are.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(crate) fn new(data_dir: &Path) -> Self {
        Self {
            root: data_dir.join(FOLDER),
        }
    }

    /// Makes the folders and has their names on disk.
    pub(crate) fn create(&self) -> Result<(), StartError> {
        for folder in [self.root.clone(), self.snapshots()] {
            fs::create_dir_all(&folder).map_err(|source| io_error(&folder, source))?;
        }
        for folder in self.root.ancestors().take(2) {
            sync_folder(folder).map_err(|source| io_error(folder, source))?;
        }
        Ok(())
    }

    /// Takes the store for this process.
    pub(crate) fn lock(&self) -> Result<Lock, StartError> {
        let path = self.root.join(LOCK);
        let locked = File::create(&path).and_then(|file| lock(&file).map(|()| file));
        locked
            .map(|file| Lock { _file: file })
            .map_err(|error| io_error(&path, error))
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

/// A start error of the file system.
pub(crate) fn io_error(path: &Path, source: io::Error) -> StartError {
    StartError::Io {
        path: path.to_path_buf(),
        source,
    }
}

/// A start error of a file whose bytes are wrong.
pub(crate) fn damaged(path: &Path, offset: u64, what: impl Into<String>) -> StartError {
    StartError::Damaged {
        path: path.display().to_string(),
        offset,
        what: what.into(),
    }
}

/// Has a folder's entries on disk: a renamed or new file is only then sure to be found again.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Replaces a small file by a message: written beside, synced, renamed, folder synced.
pub(crate) fn store_message(path: &Path, message: &impl Message) -> io::Result<()> {
    let body = message.encode_to_vec();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    bytes.extend_from_slice(&body);

    let beside = path.with_extension("new");
    let mut file = File::create(&beside)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    sync_folder(path.parent().expect("a file of the layout has a folder"))
}

/// Reads what [`store_message`] wrote; `None` when there is no such file.
pub(crate) fn load_message<M: Message + Default>(path: &Path) -> Result<Option<M>, StartError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error(path, error)),
    };
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

/// Moves the log, vote and snapshots of a damaged replica below `data_dir` aside, so that it joins
/// under a new id and is rebuilt from its peers. Answers where they are; `None` when there
/// were none.
///
/// # Errors
/// Those of the file system, and `ResourceBusy` while a replica runs on the store.
pub fn set_store_aside(data_dir: &Path) -> io::Result<Option<PathBuf>> {
    let folder = data_dir.join(FOLDER);
    if !folder.try_exists()? {
        return Ok(None);
    }
    refuse_if_in_use(&folder)?;
    for number in 1_u32.. {
        let aside = data_dir.join(format!("{FOLDER}.aside-{number}"));
        if !aside.try_exists()? {
            fs::rename(&folder, &aside)?;
            sync_folder(data_dir)?;
            return Ok(Some(aside));
        }
    }
    unreachable!("more than 2^32 stores were set aside")
}

/// Refuses a store that a process runs on.
fn refuse_if_in_use(folder: &Path) -> io::Result<()> {
    match File::open(folder.join(LOCK)) {
        Ok(file) => lock(&file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "a replica runs on it, stop that first",
        )),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::proto;

    #[test]
    fn a_message_is_read_back_and_damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity");
        assert_eq!(load_message::<proto::Identity>(&path).unwrap(), None);
        let identity = proto::Identity {
            id: 3,
            store: 4,
            ..proto::Identity::default()
        };
        store_message(&path, &identity).unwrap();
        assert_eq!(load_message(&path).unwrap(), Some(identity));

        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = load_message::<proto::Identity>(&path).unwrap_err();
        assert!(
            matches!(error, StartError::Damaged { offset: 8, .. }),
            "{error}"
        );
    }

    #[test]
    fn a_store_is_set_aside_once_per_damage() {
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
