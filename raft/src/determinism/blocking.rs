//! Work that blocks, kept off the tasks.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Where work that blocks is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockingMode {
    /// On a pool of threads.
    Pool,
    /// At once, in place: over a disk in memory nothing blocks, and a simulation that shall run
    /// again as it ran before has one thread. What is handed over must therefore not wait for
    /// another task.
    InPlace,
}

impl BlockingMode {
    /// Does some work and answers its result.
    ///
    /// # Errors
    /// When the work panics.
    pub(crate) async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        match self {
            Self::Pool => tokio::task::spawn_blocking(work)
                .await
                .map_err(io::Error::other),
            Self::InPlace => catch_unwind(AssertUnwindSafe(work))
                .map_err(|_| io::Error::other("work on the disk panicked")),
        }
    }
}
