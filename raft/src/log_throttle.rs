//! Limits how often a peer can make this replica log a line.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::lock;

/// Minimum time between two log lines.
const EVERY: Duration = Duration::from_secs(10);

/// Limiter that allows one log line every ten seconds.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle(Mutex<Option<Instant>>);

impl LogThrottle {
    /// Whether a line may be logged now. If so, the next one must wait.
    pub(crate) fn try_acquire(&self) -> bool {
        let mut last_line = lock(&self.0);
        let is_time = last_line.is_none_or(|at| at.elapsed() >= EVERY);
        if is_time {
            *last_line = Some(Instant::now());
        }
        is_time
    }
}
