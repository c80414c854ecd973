//! Files of the in-memory disk.
//!
//! Folders are implicit: a folder exists if it contains a file. A new name is durable once its
//! folder is synced, and content once its file is synced.

use std::collections::BTreeMap;
use std::io::{self, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{DiskShortage, DiskStep, MemoryHandle};
use crate::files::{Files, NewFile, StoreLock, in_use};

/// All files at one moment. A file keeps its number when it is renamed.
#[derive(Clone, Default)]
pub(super) struct FileImage {
    names: BTreeMap<PathBuf, u64>,
    contents: BTreeMap<u64, Vec<u8>>,
}

/// Single change to the files.
#[derive(Clone)]
pub(super) enum FileStep {
    /// Creates an empty file.
    Create { path: PathBuf, file: u64 },
    /// Appends content to a file.
    Write { file: u64, bytes: Arc<[u8]> },
    /// Changes a file's name.
    Rename { from: PathBuf, to: PathBuf },
    /// Removes a file.
    Remove { path: PathBuf },
}

impl FileImage {
    pub(super) fn apply(&mut self, step: &FileStep) {
        match step {
            FileStep::Create { path, file } => self.name(path.clone(), *file),
            FileStep::Write { file, bytes } => {
                self.contents.entry(*file).or_default().extend(&bytes[..]);
            }
            FileStep::Rename { from, to } => {
                if let Some(file) = self.names.remove(from) {
                    self.name(to.clone(), file);
                }
            }
            FileStep::Remove { path } => {
                if let Some(file) = self.names.remove(path) {
                    self.contents.remove(&file);
                }
            }
        }
    }

    fn name(&mut self, path: PathBuf, file: u64) {
        if let Some(before) = self.names.insert(path, file) {
            self.contents.remove(&before);
        }
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = self.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.contents.get(file).cloned().unwrap_or_default())
    }
}

impl FileStep {
    /// Whether this step changes which files `folder` contains.
    fn is_in(&self, folder: &Path) -> bool {
        match self {
            Self::Create { path, .. } | Self::Remove { path } | Self::Rename { to: path, .. } => {
                path.parent() == Some(folder)
            }
            Self::Write { .. } => false,
        }
    }

    fn writes(&self, to: u64) -> bool {
        match self {
            Self::Write { file, .. } => *file == to,
            Self::Create { .. } | Self::Rename { .. } | Self::Remove { .. } => false,
        }
    }
}

impl MemoryHandle {
    fn change(&self, step: FileStep) -> io::Result<()> {
        self.with(|state| {
            state.refuse_if_failed()?;
            if matches!(step, FileStep::Create { .. } | FileStep::Write { .. }) {
                state.refuse_if_short(DiskShortage::Space)?;
            }
            state.take(DiskStep::File(step));
            Ok(())
        })
    }

    fn refuse_to_open(&self) -> io::Result<()> {
        self.with(|state| state.refuse_if_short(DiskShortage::Descriptors))
    }

    fn sync_files(&self, is_synced: impl Fn(&FileStep) -> bool) -> io::Result<()> {
        self.with(|state| {
            state.refuse_if_failed()?;
            state.sync(|step| matches!(step, DiskStep::File(step) if is_synced(step)));
            Ok(())
        })
    }
}

impl Files for MemoryHandle {
    fn create_folder(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.refuse_to_open()?;
        self.sync_files(|step| step.is_in(path))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<PathBuf>> {
        self.refuse_to_open()?;
        self.with(|state| {
            let names = state.seen.files.names.keys();
            let inside = names.filter(|name| name.parent() == Some(folder));
            Ok(inside.cloned().collect())
        })
    }

    fn exists(&self, path: &Path) -> bool {
        let found = self.with(|state| Ok(state.seen.files.names.contains_key(path)));
        found.unwrap_or(false)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        self.refuse_to_open()?;
        let content = self.with(|state| state.seen.files.read(path))?;
        Ok(Box::new(Cursor::new(content)))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        self.refuse_to_open()?;
        let file = self.with(|state| {
            state.files_made += 1;
            Ok(state.files_made)
        })?;
        let path = path.to_path_buf();
        self.change(FileStep::Create { path, file })?;
        let disk = self.clone();
        Ok(Box::new(MemoryFile { disk, file }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if !self.exists(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.change(FileStep::Rename {
            from: from.to_path_buf(),
            to: to.to_path_buf(),
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if !self.exists(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let path = path.to_path_buf();
        self.change(FileStep::Remove { path })
    }

    fn lock(&self, _path: &Path) -> io::Result<StoreLock> {
        self.with(|state| {
            if std::mem::replace(&mut state.is_locked, true) {
                return Err(in_use());
            }
            Ok(StoreLock::new(DiskHold(self.clone())))
        })
    }
}

/// File that is being written.
struct MemoryFile {
    disk: MemoryHandle,
    file: u64,
}

impl Write for MemoryFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (file, written) = (self.file, bytes.len());
        let bytes = bytes.into();
        self.disk.change(FileStep::Write { file, bytes })?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl NewFile for MemoryFile {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.sync_files(|step| step.writes(self.file))
    }
}

/// Guard that holds the lock on the disk.
struct DiskHold(MemoryHandle);

impl Drop for DiskHold {
    fn drop(&mut self) {
        // After a crash the lock belongs to another handle.
        let freed = self.0.with(|state| {
            state.is_locked = false;
            Ok(())
        });
        freed.ok();
    }
}
