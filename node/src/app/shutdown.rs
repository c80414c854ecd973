//! Shutdown handle: drain, or abort.

use tokio_util::sync::CancellationToken;

/// Tells an app to stop. Cheap to clone; any clone may be used from any thread.
#[derive(Debug, Clone, Default)]
pub struct ShutdownHandle {
    drain: CancellationToken,
    abort: CancellationToken,
}

impl ShutdownHandle {
    /// A handle that nobody has used.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Leave in peace: not ready at once, requests under way are finished.
    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// Stop without finishing anything, as a crash would.
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

    /// Whether [`Self::abort`] was called.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.abort.is_cancelled()
    }
}
