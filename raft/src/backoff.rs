//! Backoff between retries.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Doubling pauses, up to a maximum.
pub(crate) struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { next: first, max }
    }

    /// Returns the length of the next pause.
    pub(crate) fn next(&self) -> Duration {
        self.next
    }

    /// Pauses, or returns early when `stop` is cancelled.
    pub(crate) async fn pause(&mut self, stop: &CancellationToken) {
        stop.run_until_cancelled(tokio::time::sleep(self.next))
            .await;
        self.next = (self.next * 2).min(self.max);
    }
}
