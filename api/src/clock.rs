//! The wall clock, for what is compared between machines: the stamps of commands, limits of users,
//! starts of engines.
//!
//! It is handed down from where a replica is put together, as simulated replicas each have a clock
//! of their own that jumps when a fault says so. What is compared on one machine only goes by
//! [`tokio::time::Instant`], which a simulation steps.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

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
