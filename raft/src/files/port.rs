//! Port for files, and its implementation with the operating system's files.

use std::any::Any;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Port for the files of identity and snapshots. Every call may block.
pub(crate) trait Files: fmt::Debug + Send + Sync + 'static {
    /// Creates a folder and its parents, unless they exist.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder's entries durable. Until then a new or renamed file may be lost.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// Lists the files in a folder, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>>;

    /// Whether a file or folder with this name exists.
    fn exists(&self, path: &Path) -> bool;

    /// Opens a file for reading.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>>;

    /// Creates an empty file, replacing an existing one.
    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>>;

    /// Renames a file within a folder, replacing an existing file with the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Locks `path` until the returned guard is dropped. Fails with `ResourceBusy` if it is locked.
    fn lock(&self, path: &Path) -> io::Result<StoreLock>;
}

/// File that is being written.
pub(crate) trait NewFile: Write + Send {
    /// Makes all content written so far durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// Lock on a store, held until it is dropped or the process ends.
pub(crate) struct StoreLock {
    _held: Box<dyn Any + Send + Sync>,
}

impl StoreLock {
    /// Creates a lock that lasts as long as `held`.
    pub(crate) fn new(held: impl Any + Send + Sync) -> Self {
        Self {
            _held: Box::new(held),
        }
    }
}

/// Implementation of the port with the operating system's files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SystemFiles;

impl Files for SystemFiles {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(File::open(path)?))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        Ok(Box::new(File::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn lock(&self, path: &Path) -> io::Result<StoreLock> {
        let file = File::create(path)?;
        lock(&file)?;
        Ok(StoreLock::new(file))
    }
}

impl NewFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Locks an open file for this process.
pub(super) fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(in_use()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Returns the error for a store that is already locked.
pub(crate) fn in_use() -> io::Error {
    io::Error::new(
        io::ErrorKind::ResourceBusy,
        "a replica runs on it, stop that first",
    )
}
