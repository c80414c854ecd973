//! Algorithms 2 and 7: how many concurrent requests keep the time between tokens within the service
//! level `D ± eps`.
//!
//! The controller is a noisy binary search over an interval `[low, high]` whose middle is the
//! limit. It decides once per [`SAMPLES_PER_DECISION`] samples, by the time measured since its last
//! decision. An average over a longer period would judge this limit by the effects of an earlier
//! one.
//!
//! - **Too slow** (`tau > D + eps`): the upper end falls to the middle, or, if the interval is
//!   already narrow, the whole interval moves down. Requests in excess of the limit, left from
//!   before it fell, reveal nothing about the limit and move nothing. Slowness *below* the limit
//!   also moves it: a limit above what is already too much can only be wrong. Otherwise, an
//!   interval that starts at the middle of `batch_min..=batch_max` would not be searched until the
//!   load reached it.
//! - **Fast** (`tau < D - eps`): the lower end rises to the middle and the upper end by a step. The
//!   backend must have been at its limit, and this limit must have been what held it: that few
//!   requests are fast reveals nothing about many. Raising the limit anyway, as the original
//!   algorithm does, winds it up while the backend idles.
//! - **Within the band**: the interval closes around the middle, which moves by one towards `D`,
//!   again only at the limit. The original centres on the average batch instead. That never exceeds
//!   the limit, so every lull lowers it, nothing raises it, and it gets trapped at 2.
//!
//! Steps are a quarter of the limit, so the controller recovers from any fault within some twenty
//! decisions.

use bincode::{Decode, Encode};

use super::ServiceSample;
use super::SlaSettings;
use crate::settings::BATCH_MAX;

/// Number of samples with tokens per decision: Algorithm 2's warm-up, repeated after every move.
const SAMPLES_PER_DECISION: u32 = 3;
/// Minimum number of gaps between tokens per decision.
const GAPS_PER_DECISION: u64 = 64;
/// Maximum credible mean gap of a sample, in microseconds.
const GAP_US_MAX: u64 = 60_000_000;
/// Maximum number of gaps in one sample. Larger values cannot have been measured.
const SAMPLE_GAPS_MAX: u64 = 1 << 32;
/// Width below which the interval does not narrow further (`alpha` of Algorithm 2).
const WIDTH_MIN: u32 = 4;
/// Minimum step outside the band (`delta` of Algorithm 2).
const STEP_MIN: u32 = 2;

/// Controller of one backend's limit; see the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct SlaController {
    /// Lower end of the interval. Both ends are 0 before the first sample, which stands for the
    /// whole range of the settings.
    low: u32,
    high: u32,
    /// Number of samples since the last decision.
    samples: u32,
    gaps: u64,
    gap_us: u64,
    running: u64,
    at_limit: u64,
    /// Time between tokens at the last decision, in microseconds; 0 before the first.
    inter_token_us: u32,
}

/// Result of evaluating the sums since the last decision.
struct PaceVerdict {
    inter_token_us: u32,
    /// Mean number of running requests over the gaps, rounded.
    running: u32,
    /// Whether at least half of the gaps were measured while the backend was at its limit.
    is_at_limit: bool,
}

impl SlaController {
    /// Adds a sample and decides if there are enough. `b_mem` is the memory limit in effect.
    pub(crate) fn observe(
        &mut self,
        sample: &ServiceSample,
        sla: &SlaSettings,
        b_mem: Option<u32>,
    ) {
        let is_possible = (1..=SAMPLE_GAPS_MAX).contains(&sample.gaps)
            && sample.gap_us <= sample.gaps * GAP_US_MAX
            && sample.gap_running <= sample.gaps * u64::from(BATCH_MAX)
            && sample.gaps_at_limit <= sample.gaps;
        if !is_possible {
            return;
        }
        (self.low, self.high) = self.interval(sla);
        self.samples = self.samples.saturating_add(1);
        self.gaps = self.gaps.saturating_add(sample.gaps);
        self.gap_us = self.gap_us.saturating_add(sample.gap_us);
        self.running = self.running.saturating_add(sample.gap_running);
        self.at_limit = self.at_limit.saturating_add(sample.gaps_at_limit);
        if self.samples >= SAMPLES_PER_DECISION && self.gaps >= GAPS_PER_DECISION {
            let verdict = self.conclude();
            self.decide(&verdict, sla, b_mem);
        }
    }

    /// Returns the limit: the middle of the interval.
    pub(crate) fn b_sla(&self, sla: &SlaSettings) -> u32 {
        middle(self.interval(sla))
    }

    /// Returns the interval, restricted to the settings.
    pub(crate) fn interval(&self, sla: &SlaSettings) -> (u32, u32) {
        let (least, most) = (sla.batch_min, sla.batch_max);
        if self.high == 0 {
            return (least, most);
        }
        let high = self.high.clamp(least, most);
        (self.low.clamp(least, high), high)
    }

    /// Returns the microseconds between tokens at the last decision; `None` before the first.
    pub(crate) fn inter_token_us(&self) -> Option<u32> {
        Some(self.inter_token_us).filter(|us| *us > 0)
    }

    /// Evaluates the sums since the last decision and resets them.
    fn conclude(&mut self) -> PaceVerdict {
        let gaps = self.gaps.max(1);
        let verdict = PaceVerdict {
            inter_token_us: u32::try_from(self.gap_us / gaps).unwrap_or(u32::MAX).max(1),
            running: u32::try_from(self.running.saturating_add(gaps / 2) / gaps)
                .unwrap_or(u32::MAX),
            is_at_limit: self.at_limit >= self.gaps.div_ceil(2),
        };
        *self = Self {
            low: self.low,
            high: self.high,
            inter_token_us: verdict.inter_token_us,
            ..Self::default()
        };
        verdict
    }

    fn decide(&mut self, verdict: &PaceVerdict, sla: &SlaSettings, b_mem: Option<u32>) {
        let bound = middle((self.low, self.high));
        // Allows some slack, because the number of running requests is an average and replicas see
        // each other late.
        let is_above = verdict.running > bound.saturating_add(bound / 8 + 1);
        let is_holding = verdict.is_at_limit && b_mem.is_none_or(|b_mem| bound <= b_mem);
        let tau = verdict.inter_token_us;
        if tau > sla.inter_token_us.saturating_add(sla.tolerance_us) {
            if !is_above {
                self.fall(bound, sla);
            }
        } else if tau.saturating_add(sla.tolerance_us) < sla.inter_token_us {
            if is_holding {
                self.rise(bound, verdict.running, sla);
            }
        } else if is_holding && !(is_above && tau > sla.inter_token_us) {
            self.settle(bound, tau, sla);
        }
    }

    fn fall(&mut self, bound: u32, sla: &SlaSettings) {
        let step = step(bound);
        self.high = if self.high - self.low > WIDTH_MIN {
            bound.max(self.low.saturating_add(WIDTH_MIN)).min(self.high)
        } else {
            self.high.saturating_sub(step).max(sla.batch_min)
        };
        self.low = self.low.saturating_sub(step).max(sla.batch_min);
    }

    fn rise(&mut self, bound: u32, running: u32, sla: &SlaSettings) {
        let step = step(bound);
        self.low = if self.high - self.low > WIDTH_MIN {
            bound.max(running).min(self.high - WIDTH_MIN).max(self.low)
        } else {
            self.low.saturating_add(step).min(sla.batch_max)
        };
        self.high = self.high.saturating_add(step).min(sla.batch_max);
    }

    fn settle(&mut self, bound: u32, tau: u32, sla: &SlaSettings) {
        let centre = match tau.cmp(&sla.inter_token_us) {
            std::cmp::Ordering::Less => bound.saturating_add(1).min(sla.batch_max),
            std::cmp::Ordering::Equal => bound,
            std::cmp::Ordering::Greater => bound.saturating_sub(1).max(sla.batch_min),
        };
        // Extends equally far to both sides, so that the middle is the centre even next to an end.
        let half = (WIDTH_MIN / 2)
            .min(centre - sla.batch_min)
            .min(sla.batch_max - centre);
        (self.low, self.high) = (centre - half, centre + half);
    }
}

fn middle((low, high): (u32, u32)) -> u32 {
    low + (high - low) / 2
}

fn step(bound: u32) -> u32 {
    (bound / 4).max(STEP_MIN)
}
