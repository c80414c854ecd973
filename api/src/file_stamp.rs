//! Whether a file has changed, by its attributes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Attributes that change with a file: identity, length and times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    inode: u64,
    bytes: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// Returns the attributes; `None` if the file does not exist.
    #[must_use]
    pub fn of(file: &Path) -> Option<Self> {
        let found = file.metadata().ok()?;
        Some(Self {
            inode: found.ino(),
            bytes: found.len(),
            written: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}
