//! Conversion of simulated time to the times of production code and of the replicated state.

use std::time::Duration;

use tokio::time::Instant;

use super::events::Micros;

/// Unix time at the start of every simulation, in milliseconds.
pub(super) const EPOCH_MS: u64 = 1_700_000_000_000;
/// Clock that maps simulated time to the [`Instant`]s of production code. Its origin does not
/// matter, because only differences are used.
#[derive(Debug, Clone, Copy)]
pub struct SimClock(Instant);

impl SimClock {
    /// Creates a clock whose origin is the current time.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it is not a value among others")]
    pub fn new() -> Self {
        Self(Instant::now())
    }

    /// Converts a simulated time to an [`Instant`].
    #[must_use]
    pub fn at(self, now: Micros) -> Instant {
        self.0 + Duration::from_micros(now)
    }
}

/// Converts a simulated time to wall-clock time, in Unix milliseconds.
#[must_use]
pub fn unix_ms(now: Micros) -> u64 {
    EPOCH_MS + now / 1000
}
