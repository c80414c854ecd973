//! The wall clock, for values compared between machines (stamps of commands, start times of
//! engines), and replicated time, which users' limits follow.
//!
//! The assembly of a replica passes the clock down, because each simulated replica has its own,
//! which jumps when a fault requires it. Values compared only on one machine use
//! [`tokio::time::Instant`], which a simulation steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Source of Unix time. Cheap to clone; the default is the system's clock.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Source>>);

/// Function that returns Unix time, in milliseconds.
type Source = dyn Fn() -> u64 + Send + Sync;

impl Clock {
    /// Creates a clock that returns the result of `unix_ms`.
    #[must_use]
    pub fn of(unix_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(unix_ms)))
    }

    /// Returns Unix time in milliseconds; 0 if the clock is before 1970.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        self.0
            .as_ref()
            .map_or_else(system_unix_ms, |source| source())
    }
}

/// Replicated time, extended beyond the last applied command by this replica's monotonic clock.
/// Without the extension, a user over a limit would stay rejected while no commands arrive.
#[derive(Debug)]
pub struct LogTime {
    began: Instant,
    /// Last replicated time seen, in milliseconds.
    told_ms: AtomicU64,
    /// Time at which `told_ms` was first seen, in milliseconds since `began`.
    told_at_ms: AtomicU64,
}

impl Default for LogTime {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            told_ms: AtomicU64::new(0),
            told_at_ms: AtomicU64::new(0),
        }
    }
}

impl LogTime {
    /// Returns the current replicated time, given the state's `told_ms`. The extension counts from
    /// the first call with that value, so call this regularly.
    pub fn present_ms(&self, told_ms: u64) -> u64 {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if self.told_ms.load(Ordering::Acquire) != told_ms {
            // A concurrent caller may see slightly more or less elapsed time.
            self.told_at_ms.store(now_ms, Ordering::Relaxed);
            self.told_ms.store(told_ms, Ordering::Release);
        }
        let told_at_ms = self.told_at_ms.load(Ordering::Relaxed);
        told_ms.saturating_add(now_ms.saturating_sub(told_at_ms))
    }
}

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.0.as_ref().map_or("system", |_| "given");
        f.debug_tuple("Clock").field(&name).finish()
    }
}

fn system_unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn replicated_time_passes_without_commands() {
        let time = LogTime::default();
        let pass = |ms| tokio::time::advance(Duration::from_millis(ms));
        assert_eq!(time.present_ms(5_000), 5_000);
        pass(700).await;
        assert_eq!(time.present_ms(5_000), 5_700);
        assert_eq!(time.present_ms(5_650), 5_650);
        pass(100).await;
        assert_eq!(time.present_ms(5_650), 5_750);
        // Another state replaced this one.
        assert_eq!(time.present_ms(0), 0);
        pass(100).await;
        assert_eq!(time.present_ms(0), 100);
    }
}
