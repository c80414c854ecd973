//! Limits log lines that a peer could otherwise trigger without end.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::lock;

/// Minimum time between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// Allows one line every ten seconds.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle(Mutex<Option<Instant>>);

impl LogThrottle {
    /// Whether a line may be logged now.
    pub(crate) fn try_acquire(&self) -> bool {
        let mut said = lock(&self.0);
        let is_time = said.is_none_or(|at| at.elapsed() >= EVERY);
        if is_time {
            *said = Some(Instant::now());
        }
        is_time
    }
}
