//! The wall clock, for what is compared between machines: the stamps of commands, starts of engines; and
//! the replicated time, by which users' limits go.
//!
//! It is handed down from where a replica is put together, as simulated replicas each have a clock
//! of their own that jumps when a fault says so. What is compared on one machine only goes by
//! [`tokio::time::Instant`], which a simulation steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::planted::{self, Bug};

/// Tells Unix time. Cheap to clone; the default is the system's clock.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Source>>);

/// Answers Unix time in milliseconds.
type Source = dyn Fn() -> u64 + Send + Sync;

impl Clock {
    /// A clock that shows what `unix_ms` answers.
    #[must_use]
    pub fn of(unix_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(unix_ms)))
    }

    /// Unix time in milliseconds; 0 by a clock that stands before 1970.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        self.0
            .as_ref()
            .map_or_else(system_unix_ms, |source| source())
    }
}

/// What of replicated time has passed since the state last told: a replica's own monotonic clock goes
/// on where no command does, so that whoever is refused for now is not refused for good.
#[derive(Debug)]
pub struct LogTime {
    began: Instant,
    /// What the state told last.
    told_ms: AtomicU64,
    /// When it did, in milliseconds since `began`.
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
    /// The present replicated time, where the state's is `told_ms`. What has passed counts from the first
    /// call with that, so that somebody has to call again and again.
    pub fn present_ms(&self, told_ms: u64) -> u64 {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if self.told_ms.load(Ordering::Acquire) != told_ms {
            // Whoever comes in between takes a little more or less for passed.
            self.told_at_ms.store(now_ms, Ordering::Relaxed);
            self.told_ms.store(told_ms, Ordering::Release);
        }
        if planted::is(Bug::TimeStandsBetween) {
            return told_ms;
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
    async fn replicated_time_passes_also_where_no_command_does() {
        let time = LogTime::default();
        let pass = |ms| tokio::time::advance(Duration::from_millis(ms));
        assert_eq!(time.present_ms(5_000), 5_000);
        pass(700).await;
        assert_eq!(time.present_ms(5_000), 5_700);
        assert_eq!(time.present_ms(5_650), 5_650);
        pass(100).await;
        assert_eq!(time.present_ms(5_650), 5_750);
        // Another state was put in its place.
        assert_eq!(time.present_ms(0), 0);
        pass(100).await;
        assert_eq!(time.present_ms(0), 100);
    }
}
