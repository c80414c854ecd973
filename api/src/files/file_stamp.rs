//! Detection of changed files by their attributes, and the loop that polls them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

/// Interval for polling files.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Attributes that change with a file: identity, length and times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    inode: u64,
    bytes: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    /// Returns the file's attributes; `None` if the file does not exist or is not accessible.
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

/// Calls `look` at once and every two seconds until `stop`. The calls run on a blocking thread,
/// since files may be on a slow disk.
pub async fn look_regularly(look: impl Fn() + Send + Sync + 'static, stop: CancellationToken) {
    let look = Arc::new(look);
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let look = Arc::clone(&look);
        let looked = tokio::task::spawn_blocking(move || look()).await;
        if looked.is_err() {
            tracing::error!("could not read a file's metadata");
        }
    }
}
