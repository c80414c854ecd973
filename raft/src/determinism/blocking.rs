//! Keeps blocking work off async tasks, except in a simulation, which runs it in place.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Place where blocking work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockingMode {
    /// Runs work on a pool of threads.
    Pool,
    /// Runs work on the calling task, at once. An in-memory disk never blocks, and a repeatable
    /// simulation has a single thread. The work must therefore not wait for another task.
    InPlace,
}

impl BlockingMode {
    /// Runs `work` and returns its result.
    ///
    /// # Errors
    /// Fails if `work` panics.
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

    /// Runs `work`, which may fail, and returns its result.
    ///
    /// # Errors
    /// Returns the error of `work`, or an error if it panics.
    pub(crate) async fn try_run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        self.run(work).await?
    }
}
