//! When a loop looks again.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};

/// Ticks at once and then every `period`, counted from the last look where one took longer.
pub(super) fn every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
