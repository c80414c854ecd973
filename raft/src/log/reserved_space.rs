//! Reserves disk space for the next write.
//!
//! After a write fails halfway, sled's in-memory state is undefined. So space is reserved at the
//! end of sled's data file before each write: a full disk is detected before anything is written,
//! and the writer can wait. On file systems that cannot reserve space, far more free space than a
//! write takes is required.

use std::fs::File;
use std::io;
use std::sync::Mutex;

use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use rustix::io::Errno;

use super::disk::LogChange;

pub(super) const SEGMENT_BYTES: usize = 4 * 1024 * 1024;
/// Minimum space that is reserved for a write, in bytes: several of sled's segments.
const BYTES_MIN: u64 = 4 * SEGMENT_BYTES as u64;
/// Extra space to reserve, in bytes, so that most writes need no new reservation. At about 300
/// bytes per request it lasts for thousands of requests, and a full disk is detected that much
/// later.
const AHEAD_BYTES: u64 = 1024 * 1024;
/// Number of bytes that sled writes per byte of a command (4.8 measured).
const WRITTEN_PER_BYTE: u64 = 5;

use crate::locks::lock;

/// Part of a file for which space is reserved.
#[derive(Default)]
pub(super) struct ReservedSpace(Mutex<ReservedRange>);

#[derive(Default)]
struct ReservedRange {
    /// Last known length of the file, in bytes. If sled truncates it, the reservation is lost.
    file_bytes: u64,
    /// End of the reserved range, which starts at offset 0.
    end: u64,
}

impl ReservedSpace {
    /// Reserves space at the end of `file` for writing `changes`.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`] if there is currently no space; nothing was changed.
    pub(super) fn take(&self, file: &File, changes: &[LogChange]) -> io::Result<()> {
        let file_bytes = file.metadata()?.len();
        let wanted = wanted(changes);
        let mut taken = lock(&self.0);
        let was_cut = file_bytes < taken.file_bytes;
        taken.file_bytes = file_bytes;
        if !was_cut && file_bytes + wanted <= taken.end {
            return Ok(());
        }
        // Start at 0: parts of the file that were never written have no space either.
        let end = file_bytes + wanted + AHEAD_BYTES;
        taken.end = 0;
        match fallocate(file, FallocateFlags::KEEP_SIZE, 0, end) {
            Ok(()) => {
                taken.end = end;
                Ok(())
            }
            Err(Errno::NOSPC | Errno::DQUOT | Errno::INTR) => Err(shortage(file, wanted)),
            Err(_) if free(file).is_some_and(|free| free < wanted) => Err(shortage(file, wanted)),
            Err(_) => Ok(()),
        }
    }
}

/// Returns the number of bytes that writing `changes` may need.
fn wanted(changes: &[LogChange]) -> u64 {
    let commands: usize = changes.iter().map(LogChange::weight).sum();
    BYTES_MIN + WRITTEN_PER_BYTE * commands as u64
}

/// Returns the number of free bytes, or `None` if the file system does not report it.
fn free(file: &File) -> Option<u64> {
    let space = fstatvfs(file).ok().filter(|space| space.f_blocks > 0)?;
    Some(space.f_bavail.saturating_mul(space.f_frsize))
}

fn shortage(file: &File, wanted: u64) -> io::Error {
    let free = free(file).unwrap_or(0) >> 10;
    let what = format!("{free} KiB free, {} KiB needed", wanted >> 10);
    io::Error::new(io::ErrorKind::StorageFull, what)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn space_is_reserved_ahead_and_again_after_truncation() {
        let file = tempfile::tempfile().unwrap();
        let room = ReservedSpace::default();
        file.set_len(BYTES_MIN).unwrap();
        let has_space = || file.metadata().unwrap().blocks() * 512;
        for _ in 0..2 {
            room.take(&file, &[]).unwrap();
            let length = file.metadata().unwrap().len();
            assert!(has_space() >= length + BYTES_MIN, "{} bytes", has_space());
            file.set_len(length / 2).unwrap();
        }
    }
}
