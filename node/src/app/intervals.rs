//! Intervals of the background loops.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};

/// Returns an interval that ticks at once and then every `period`. After a late tick, the period
/// counts from that tick.
pub(super) fn every(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
