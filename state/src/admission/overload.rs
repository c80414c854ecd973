//! Overload detection: the rate at which a queue is served, when more arrives than can be served,
//! and how long clients wait before they leave.
//!
//! A burst should wait its turn. When more requests arrive than backends can serve for longer than
//! a burst, the excess should be rejected early, because clients served after a long wait may be
//! gone by then. This is the difference between a good and a bad queue in `CoDel` (Nichols and
//! Jacobson, "Controlling Queue Delay", ACM Queue 2012), whose terms are used here. As in
//! Facebook's use of it for requests (Maurer, "Fail at Scale", ACM Queue 2015), an overloaded queue
//! serves the newest first and lets no request wait longer than the *target*.
//!
//! One difference from `CoDel`: newest first makes the sojourn time of served requests short
//! whatever the queue, so overload is detected from arrivals and departures. A closed loop of many
//! patient clients has a long queue in which as many requests arrive as depart; it is left alone.

use std::collections::VecDeque;

use super::client_timeouts::ClientTimeouts;

/// Maximum number of recent departures from which the rate is computed.
const DEPARTURES_MAX: usize = 128;
/// Minimum time over which arrivals are compared with departures, in milliseconds.
pub const CODEL_INTERVAL_MS: u64 = 500;
/// Time after which arrivals are compared with even a few departures, in milliseconds.
const INTERVAL_MS_MAX: u64 = 5000;
/// Number of departures (or of arrivals, for overload) that suffices for a comparison.
const INTERVAL_DEPARTURES: u64 = 8;
/// Number of consecutive intervals with too many arrivals before a queue counts as overloaded.
const INTERVALS_IN_A_ROW: u32 = 2;
/// Default limit on the wait in an overloaded queue, in milliseconds.
pub const CODEL_TARGET_MS: u64 = 1000;
/// Maximum number of requests ahead of a request that is never rejected by prediction.
pub const SHORT_QUEUE: u64 = 4;
/// Lower bound of the wait limit from observed client timeouts, in milliseconds: clients that keep leaving
/// at once must not close the queue to others.
const PATIENCE_MS_LEAST: u64 = 1000;

/// Measured load on one queue; see the module documentation.
#[derive(Debug, Clone, Default)]
pub struct Overload {
    /// Times of the most recent departures, on a clock that stops while nothing waits.
    departures: VecDeque<u64>,
    /// Start of the period that `departures` covers, on the clock of `departures`.
    from_ms: u64,
    /// Total time for which the clock of `departures` stopped, in milliseconds.
    idle_ms: u64,
    /// Time when the queue became empty; `None` while requests wait, or if none ever did.
    emptied_ms: Option<u64>,
    interval: Interval,
    /// Number of consecutive intervals with too many arrivals.
    overloaded_intervals: u32,
    is_on: bool,
    /// Mean time from a departure to the end of the response, in milliseconds.
    service_ms: u64,
    pub(super) client_timeouts: ClientTimeouts,
}

/// Arrivals and departures since a point in time.
#[derive(Debug, Clone, Copy, Default)]
struct Interval {
    since_ms: u64,
    arrivals: u64,
    departures: u64,
}

/// Configured limits on the wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaitBounds {
    /// Longest wait at any time, in milliseconds.
    pub(super) wait_ms_max: u64,
    /// Longest wait in overload, in milliseconds.
    pub(super) target_ms: u64,
}

impl Overload {
    /// Starts measuring when the first request waits. Measurements from before a long gap no longer
    /// apply and are dropped; after a short gap, measuring continues.
    pub(super) fn begin(&mut self, now_ms: u64) {
        if let Some(emptied_ms) = self.emptied_ms.take() {
            let gone_ms = now_ms.saturating_sub(emptied_ms);
            self.idle_ms += gone_ms;
            if gone_ms < CODEL_INTERVAL_MS {
                return;
            }
        }
        self.departures.clear();
        self.from_ms = self.clock(now_ms);
        self.interval = Interval {
            since_ms: now_ms,
            ..Interval::default()
        };
        self.overloaded_intervals = 0;
        self.is_on = false;
    }

    /// Records that the queue is empty.
    pub(super) fn emptied(&mut self, now_ms: u64) {
        self.emptied_ms = Some(now_ms);
    }

    fn clock(&self, now_ms: u64) -> u64 {
        self.emptied_ms
            .unwrap_or(now_ms)
            .saturating_sub(self.idle_ms)
    }

    /// Records an arrival, whether or not the request may wait.
    pub(super) fn arrived(&mut self) {
        self.interval.arrivals += 1;
    }

    /// Records that a request went to a backend.
    pub(super) fn departed(&mut self, now_ms: u64) {
        self.interval.departures += 1;
        if self.departures.len() == DEPARTURES_MAX
            && let Some(oldest) = self.departures.pop_front()
        {
            self.from_ms = oldest;
        }
        self.departures.push_back(self.clock(now_ms));
    }

    /// Re-evaluates overload with `waiting` requests. Returns whether the verdict changed.
    pub(super) fn evaluate(&mut self, now_ms: u64, waiting: usize, bounds: &WaitBounds) -> bool {
        let was_on = self.is_on;
        let Interval {
            since_ms,
            arrivals,
            departures,
        } = self.interval;
        let age_ms = now_ms.saturating_sub(since_ms);
        let can_tell = departures >= INTERVAL_DEPARTURES || age_ms >= INTERVAL_MS_MAX;
        if age_ms < CODEL_INTERVAL_MS || !can_tell {
            return false;
        }
        self.interval = Interval {
            since_ms: now_ms,
            ..Interval::default()
        };
        let is_too_much = arrivals >= INTERVAL_DEPARTURES && 2 * arrivals >= 3 * departures;
        let is_long = self.wait_ms(waiting as u64, now_ms) > bounds.target_ms;
        if is_too_much && (is_long || self.is_on) {
            self.overloaded_intervals = self.overloaded_intervals.saturating_add(1);
        } else {
            self.overloaded_intervals = 0;
        }
        // Between the two thresholds, the state is unchanged.
        let is_less = arrivals <= departures;
        self.is_on = (self.is_on && !is_less) || self.overloaded_intervals >= INTERVALS_IN_A_ROW;
        self.client_timeouts.look(now_ms);
        self.is_on != was_on
    }

    /// Whether the queue is overloaded: more requests arrive than can be served.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Returns how long `ahead` requests take to depart, in milliseconds, at the highest plausible
    /// rate: one deviation above the measured mean. 0 when measuring has just begun; without
    /// departures, the result grows with time.
    pub(super) fn wait_ms(&self, ahead: u64, now_ms: u64) -> u64 {
        let departures = self.departures.len() as u64;
        let elapsed_ms = self.clock(now_ms).saturating_sub(self.from_ms);
        let plausible = departures + departures.isqrt() + 1;
        ahead.saturating_mul(elapsed_ms) / plausible
    }

    /// Sets the backends' mean response time, used by [`Overload::patience_ms`].
    pub(super) fn set_service_ms(&mut self, service_ms: u64) {
        self.service_ms = service_ms;
    }

    /// Returns the value set by [`Overload::set_service_ms`].
    pub(super) fn service_ms(&self) -> u64 {
        self.service_ms
    }

    /// Returns the number of departures per 1000 seconds; `None` if nothing has been measured.
    pub(super) fn rate_milli(&self, now_ms: u64) -> Option<u64> {
        let elapsed_ms = self.clock(now_ms).saturating_sub(self.from_ms);
        let departures = self.departures.len() as u64;
        (departures > 0).then(|| departures * 1_000_000 / elapsed_ms.max(1))
    }

    /// Returns the wait after which most clients would leave before their response is complete, in
    /// milliseconds, as learned from those who left. `None` if too little is known.
    fn patience_ms(&self) -> Option<u64> {
        let leaves_ms = self.client_timeouts.quantile_ms()?;
        let left_ms = leaves_ms.saturating_sub(self.service_ms);
        Some(left_ms.max(PATIENCE_MS_LEAST))
    }

    /// Returns the longest wait of a request without a client deadline, in milliseconds.
    pub(super) fn wait_ms_max(&self, bounds: &WaitBounds) -> u64 {
        let patience_ms = self.patience_ms().unwrap_or(u64::MAX);
        let most_ms = bounds.wait_ms_max.min(patience_ms);
        if self.is_on {
            most_ms.min(bounds.target_ms)
        } else {
            most_ms
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: WaitBounds = WaitBounds {
        wait_ms_max: 10_000,
        target_ms: 1000,
    };

    /// Simulates a queue of `waiting` requests with `rates` of arrivals and departures per second.
    fn load(
        overload: &mut Overload,
        seconds: std::ops::Range<u64>,
        rates: (u64, u64),
        waiting: usize,
    ) {
        for ms in seconds.start * 1000..seconds.end * 1000 {
            if (ms * rates.0) % 1000 < rates.0 {
                overload.arrived();
            }
            if (ms * rates.1) % 1000 < rates.1 {
                overload.departed(ms);
            }
            overload.evaluate(ms, waiting, &BOUNDS);
        }
    }

    #[test]
    fn forecast_wait_is_queue_length_over_departure_rate() {
        let mut overload = Overload::default();
        overload.begin(5000);
        assert_eq!(overload.wait_ms(1000, 5000), 0);
        assert_eq!(overload.rate_milli(5000), None);
        overload.begin(0);
        load(&mut overload, 0..10, (20, 20), 10);
        let rate_milli = overload.rate_milli(10_000).unwrap();
        assert!((19_500..=20_000).contains(&rate_milli), "{rate_milli}");
        // 200 requests at 20 per second take 10 s. 128 departures make a 9 % higher rate plausible.
        let wait_ms = overload.wait_ms(200, 10_000);
        assert!((9000..=10_000).contains(&wait_ms), "{wait_ms}");
        // Without further departures, the wait grows.
        assert!(overload.wait_ms(200, 20_000) > wait_ms * 2);
    }

    #[test]
    fn departure_rate_ignores_time_without_a_queue() {
        let mut overload = Overload::default();
        overload.begin(0);
        load(&mut overload, 0..1, (20, 20), 10);
        overload.emptied(1000);
        overload.begin(1400);
        assert_eq!(overload.rate_milli(1400), Some(20_000));
        overload.departed(1450);
        assert_eq!(overload.rate_milli(1450), Some(20_000));
        overload.emptied(1450);
        overload.begin(9000);
        assert_eq!(overload.rate_milli(9000), None);
    }

    #[test]
    fn departure_rate_is_bounded_after_a_long_stall() {
        let mut overload = Overload::default();
        overload.begin(0);
        assert_eq!(overload.wait_ms(10, 9000), 90_000);
    }

    #[test]
    fn only_sustained_excess_arrivals_count_as_overload() {
        let mut overload = Overload::default();
        overload.begin(0);
        load(&mut overload, 0..10, (30, 30), 1000);
        assert!(!overload.is_on(), "as many come as go");
        for _ in 0..1000 {
            overload.arrived();
        }
        load(&mut overload, 10..20, (0, 30), 1000);
        assert!(!overload.is_on(), "a burst");
        load(&mut overload, 20..22, (300, 30), 10);
        assert!(!overload.is_on(), "the queue is short");
        load(&mut overload, 22..24, (300, 30), 1000);
        assert!(overload.is_on());
        assert_eq!(overload.wait_ms_max(&BOUNDS), 1000);
        load(&mut overload, 24..30, (36, 30), 10);
        assert!(overload.is_on(), "it stays until no more come than go");
        load(&mut overload, 30..32, (20, 30), 10);
        assert!(!overload.is_on());
        assert_eq!(overload.wait_ms_max(&BOUNDS), 10_000);
    }

    #[test]
    fn learned_client_timeout_leaves_service_time_and_has_a_minimum() {
        let mut overload = Overload::default();
        overload.begin(0);
        for _ in 0..100 {
            overload.client_timeouts.left(3000);
        }
        overload.set_service_ms(600);
        assert_eq!(overload.wait_ms_max(&BOUNDS), 2400);
        for _ in 0..1000 {
            overload.client_timeouts.left(1);
        }
        assert_eq!(overload.wait_ms_max(&BOUNDS), PATIENCE_MS_LEAST);
    }
}
