//! Pauses between tries that get longer.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Pauses, each twice as long as the one before, up to a maximum.
pub(crate) struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { next: first, max }
    }

    /// How long the next pause is.
    pub(crate) fn next(&self) -> Duration {
        self.next
    }

    /// Pauses, at most until `stop` is cancelled.
    pub(crate) async fn pause(&mut self, stop: &CancellationToken) {
        stop.run_until_cancelled(tokio::time::sleep(self.next))
            .await;
        self.next = (self.next * 2).min(self.max);
    }
}
