//! Growing pauses between retries.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Pauses between retries that double up to a maximum.
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

    /// Sleeps for the next pause, or until `stop` is cancelled. The pause after it is twice as
    /// long, up to the maximum.
    pub(crate) async fn pause(&mut self, stop: &CancellationToken) {
        stop.run_until_cancelled(tokio::time::sleep(self.next))
            .await;
        self.next = (self.next * 2).min(self.max);
    }
}
