//! Simulated time as production code and replicated time have it.

use std::time::Duration;

use tokio::time::Instant;

use super::events::Micros;

/// Unix time at the beginning of every simulation, in milliseconds.
pub(super) const EPOCH_MS: u64 = 1_700_000_000_000;
/// Simulated time as production code takes it. The origin does not matter: only differences are
/// ever looked at.
#[derive(Debug, Clone, Copy)]
pub struct SimClock(Instant);

impl SimClock {
    /// A clock that begins now.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it is not a value among others")]
    pub fn new() -> Self {
        Self(Instant::now())
    }

    /// A simulated moment.
    #[must_use]
    pub fn at(self, now: Micros) -> Instant {
        self.0 + Duration::from_micros(now)
    }
}

/// A simulated moment as replicated time has it.
#[must_use]
pub fn unix_ms(now: Micros) -> u64 {
    EPOCH_MS + now / 1000
}
