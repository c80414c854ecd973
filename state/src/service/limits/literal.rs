//! Algorithms 1, 2 and 7 exactly as originally given, to show where they fail. Tests only.

/// Algorithm 1: keeps a tenth of the capacity free, regardless of the deviation.
pub(super) fn b_mem(capacity: f64, prompt_mean: f64, output_mean: f64, bounds: (u32, u32)) -> u32 {
    let mut per_request = prompt_mean + output_mean;
    if per_request <= 0.0 {
        per_request = 500.0;
    }
    let buffer = 0.1 * capacity;
    let b = ((capacity - buffer) / per_request).floor();
    (b as u32).clamp(bounds.0, bounds.1)
}

/// Averages of Algorithm 7, which start at 0.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Statistics {
    pub(super) prompt_mean: f64,
    pub(super) output_mean: f64,
}

const WEIGHT: f64 = 0.2;
const ALPHA: i64 = 4;
const DELTA: i64 = 2;

impl Statistics {
    pub(super) fn update(&mut self, prompt_mean: f64, output_mean: f64) {
        self.prompt_mean = WEIGHT * prompt_mean + (1.0 - WEIGHT) * self.prompt_mean;
        self.output_mean = WEIGHT * output_mean + (1.0 - WEIGHT) * self.output_mean;
    }
}

/// Controller of Algorithms 2 and 7.
#[derive(Debug, Clone, Copy)]
pub(super) struct Controller {
    pub(super) low: i64,
    pub(super) high: i64,
    pub(super) tau: f64,
    pub(super) b_avg: f64,
    pub(super) n_decode: i64,
    pub(super) updates: u32,
    pub(super) target: f64,
    pub(super) tolerance: f64,
    pub(super) bounds: (i64, i64),
}

impl Controller {
    pub(super) fn new(target: f64, tolerance: f64, bounds: (i64, i64)) -> Self {
        Self {
            low: bounds.0,
            high: bounds.1,
            tau: 0.0,
            b_avg: 0.0,
            n_decode: 0,
            updates: 0,
            target,
            tolerance,
            bounds,
        }
    }

    /// Returns the limit by Algorithm 2.
    pub(super) fn b_sla(&mut self) -> i64 {
        let (least, most) = self.bounds;
        if self.tau == 0.0 || self.updates < 3 {
            return (self.low + self.high) / 2;
        }
        let b_avg = self.b_avg.floor() as i64;
        if self.tau > self.target + self.tolerance {
            let high = b_avg.max(self.low + ALPHA);
            let low = (self.low - DELTA).max(least);
            self.high = self.high.min(high);
            self.low = low;
        } else if self.tau < self.target - self.tolerance {
            let low = b_avg.min(self.high - ALPHA);
            let high = (self.high + DELTA).min(most);
            self.low = self.low.max(low);
            self.high = high;
        } else {
            self.high = (b_avg + ALPHA / 2).min(most);
            self.low = (b_avg - ALPHA / 2).max(least);
        }
        self.low = self.low.max(least);
        self.high = self.high.min(most);
        if self.low > self.high {
            self.low = self.high;
        }
        let b_sla = (self.low + self.high) / 2;
        b_sla.max(self.n_decode).clamp(least, most)
    }

    /// Updates the averages by Algorithm 7.
    pub(super) fn update(&mut self, tau: f64, batch: i64, n_decode: i64) {
        self.tau = WEIGHT * tau + (1.0 - WEIGHT) * self.tau;
        self.b_avg = WEIGHT * batch as f64 + (1.0 - WEIGHT) * self.b_avg;
        self.n_decode = n_decode;
        self.updates += 1;
    }
}
