//! Handle to stop an app, by a drain or an abort.

use tokio_util::sync::CancellationToken;

/// Stops an app. Cheap to clone, and usable from any thread.
#[derive(Debug, Clone, Default)]
pub struct ShutdownHandle {
    drain: CancellationToken,
    abort: CancellationToken,
}

impl ShutdownHandle {
    /// Creates a handle that has requested nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests a graceful exit: the replica becomes unready at once and finishes its requests.
    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// Requests an immediate exit without finishing anything, like a crash.
    pub fn abort(&self) {
        self.abort.cancel();
        self.drain.cancel();
    }

    /// Waits until [`Self::drain`] or [`Self::abort`] was called.
    pub async fn draining(&self) {
        self.drain.cancelled().await;
    }

    /// Waits until [`Self::abort`] was called.
    pub async fn aborted(&self) {
        self.abort.cancelled().await;
    }
}
