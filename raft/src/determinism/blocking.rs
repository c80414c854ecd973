//! Blocking work, kept off the tasks.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Where blocking work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockingMode {
    /// On a pool of threads.
    Pool,
    /// At once, on the calling task. A disk in memory never blocks, and a simulation that is to be
    /// repeatable has a single thread. The work must therefore not wait for another task.
    InPlace,
}

impl BlockingMode {
    /// Does some work.
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

    /// Does some work that may fail.
    ///
    /// # Errors
    /// Those of the work, and when it panics.
    pub(crate) async fn try_run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        self.run(work).await?
    }
}
