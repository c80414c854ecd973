//! Arrival times of a day: none at night, a steep morning, a peak at noon, a slow evening; with noise
//! and two bursts.
//!
//! Arrivals are a Poisson process with the curve's rate, by thinning one of the highest rate. The curve
//! is drawn before, so it does not depend on how many requests arrive.

use crate::rng::Rng;
use crate::simulate::events::Micros;

/// Hours with the share of the peak rate; linear between them, none before and after.
const CURVE: [(f64, f64); 9] = [
    (6.0, 0.0),
    (8.5, 0.8),
    (11.0, 0.85),
    (12.5, 1.0),
    (14.0, 0.85),
    (17.0, 0.8),
    (20.0, 0.35),
    (22.5, 0.05),
    (23.0, 0.0),
];
/// First minute of each burst, its length in minutes, and its rate relative to the curve.
const BURSTS: [(usize, usize, f64); 2] = [(10 * 60 + 20, 3, 1.3), (15 * 60 + 40, 2, 1.5)];
const MINUTES: usize = 24 * 60;
/// Share of a minute's deviation that is left in the next one.
const NOISE_KEPT: f64 = 0.8;
/// Largest change of the deviation from one minute to the next.
const NOISE_STEP: f64 = 0.05;

/// Rate of requests over a day, and the arrivals drawn from it.
pub(super) struct DayCurve {
    /// Rate in each minute of the day, in requests per second.
    rates: Vec<f64>,
    /// Duration of a minute of the day, in microseconds.
    minute: f64,
    highest: f64,
    rng: Rng,
}

impl DayCurve {
    /// Draws the curve of a day that lasts `duration`, with `mean` requests per second without noise
    /// and bursts.
    pub(super) fn new(mean: f64, duration: Micros, seed: u64) -> Self {
        let mut rng = Rng::new(seed, 5);
        let mut noise = 0.0;
        let shares: Vec<f64> = (0..MINUTES).map(share_at).collect();
        let peak = mean * MINUTES as f64 / shares.iter().sum::<f64>();
        let rate = |(minute, share): (usize, f64)| {
            noise = NOISE_KEPT * noise + NOISE_STEP * (2.0 * rng.unit() - 1.0);
            let in_burst =
                |(from, length, _): &&(usize, usize, f64)| (*from..from + length).contains(&minute);
            let burst = BURSTS.iter().find(in_burst).map_or(1.0, |burst| burst.2);
            peak * share * (1.0 + noise) * burst
        };
        let rates: Vec<f64> = shares.into_iter().enumerate().map(rate).collect();
        Self {
            highest: rates.iter().copied().fold(f64::MIN_POSITIVE, f64::max),
            minute: duration as f64 / MINUTES as f64,
            rates,
            rng,
        }
    }

    /// Draws the first arrival after `at`; after the end of the day if there is none.
    pub(super) fn next_after(&mut self, mut at: Micros) -> Micros {
        loop {
            at += self.rng.gap_us(self.highest).max(1);
            let rate = self.rates.get((at as f64 / self.minute) as usize);
            let is_kept = |rate: &f64| self.rng.unit() * self.highest < *rate;
            if rate.is_none_or(is_kept) {
                return at;
            }
        }
    }
}

/// Returns the share of the peak rate in a minute.
fn share_at(minute: usize) -> f64 {
    let hour = minute as f64 / 60.0;
    let between = |pair: &[(f64, f64)]| {
        let [(from, low), (until, high)] = [pair[0], pair[1]];
        (from..until)
            .contains(&hour)
            .then(|| low + (high - low) * (hour - from) / (until - from))
    };
    CURVE.windows(2).find_map(between).unwrap_or(0.0)
}
