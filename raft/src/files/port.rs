//! Files as a replica needs them, and the system's.

use std::any::Any;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Where identity and snapshots are kept. Every call may block.
pub(crate) trait Files: fmt::Debug + Send + Sync + 'static {
    /// Makes a folder and those above it, unless they are there.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Has a folder's entries on disk: a renamed or new file is only then sure to be found again.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;

    /// The files in a folder, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>>;

    /// Whether there is a file or folder of this name.
    fn exists(&self, path: &Path) -> bool;

    /// Reads a file from its begin.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>>;

    /// Makes an empty file in place of what has that name.
    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>>;

    /// Gives a file another name of the same folder, in place of what has that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Takes what `path` stands for, until the answer is dropped.
    fn lock(&self, path: &Path) -> io::Result<StoreLock>;
}

/// A file that is being written.
pub(crate) trait NewFile: Write + Send {
    /// Has its content on disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// A store taken by one replica, until it is dropped or its process ends.
pub(crate) struct StoreLock {
    _held: Box<dyn Any + Send + Sync>,
}

impl StoreLock {
    /// Held as long as `held` lives.
    pub(crate) fn new(held: impl Any + Send + Sync) -> Self {
        Self {
            _held: Box::new(held),
        }
    }
}

/// The files of the system.
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

/// Takes an open lock file for this process.
pub(super) fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(in_use()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// What is answered to whoever wants a store that is taken.
pub(crate) fn in_use() -> io::Error {
    io::Error::new(
        io::ErrorKind::ResourceBusy,
        "a replica runs on it, stop that first",
    )
}
