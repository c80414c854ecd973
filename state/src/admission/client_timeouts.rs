//! Timeouts of clients: how long they wait before they leave, learned from those who did.
//!
//! Most clients do not announce how long they will wait. A client that leaves while waiting shows
//! its timeouts. One that is served or rejected first only shows that it waited that long. Both are
//! used, as in Kaplan and Meier's survival estimate (1958): of the clients that waited into an age
//! bucket, the estimate takes the share that left within it.

/// Width of an age bucket, in milliseconds.
const STEP_MS: u64 = 250;
/// Number of age buckets; the last one is unbounded.
const STEPS: usize = 128;
/// Minimum number of requests for a bucket to count.
const REACHED_LEAST: u32 = 16;
/// Number of requests at which the counts of a bucket are halved.
const REACHED_MAX: u32 = 1024;
/// Interval at which the counts of all buckets are halved, in milliseconds, because clients change.
const HALF_LIFE_MS: u64 = 60_000;
/// Share of clients still there below which waiting is pointless, in millionths.
const STAYED_LEAST: u64 = 500_000;
const MILLION: u64 = 1_000_000;

/// Observed timeouts of one queue's clients.
#[derive(Debug, Clone)]
pub(super) struct ClientTimeouts {
    steps: [AgeBucket; STEPS],
    /// Time of the last halving, or of the first check before any; `None` before that.
    halved_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct AgeBucket {
    /// Number of requests that waited into the bucket.
    reached: u32,
    /// Number of requests in `reached` whose clients left within the bucket.
    left: u32,
}

impl Default for ClientTimeouts {
    fn default() -> Self {
        Self {
            steps: [AgeBucket::default(); STEPS],
            halved_ms: None,
        }
    }
}

impl ClientTimeouts {
    /// Records that a client left after waiting for `waited_ms`.
    pub(super) fn left(&mut self, waited_ms: u64) {
        let last = self.stayed(waited_ms);
        self.steps[last].left += 1;
    }

    /// Records that a client stayed for its whole wait. Returns the index of the wait's bucket.
    pub(super) fn stayed(&mut self, waited_ms: u64) -> usize {
        let last = usize::try_from(waited_ms / STEP_MS).unwrap_or(usize::MAX);
        let last = last.min(STEPS - 1);
        for step in &mut self.steps[..=last] {
            step.reached += 1;
            if step.reached >= REACHED_MAX {
                step.halve();
            }
        }
        last
    }

    /// Halves all counts if [`HALF_LIFE_MS`] has passed since the last time.
    pub(super) fn look(&mut self, now_ms: u64) {
        let halved_ms = *self.halved_ms.get_or_insert(now_ms);
        if now_ms.saturating_sub(halved_ms) >= HALF_LIFE_MS {
            self.halved_ms = Some(now_ms);
            self.steps.iter_mut().for_each(AgeBucket::halve);
        }
    }

    /// Returns the longest wait that at least half of the clients stay for, in milliseconds. `None`
    /// if it is longer than any observed wait, or if too few requests have been observed.
    pub(super) fn quantile_ms(&self) -> Option<u64> {
        let mut stayed = MILLION;
        for (at, step) in self.steps.iter().enumerate() {
            if step.reached < REACHED_LEAST {
                return None;
            }
            stayed = stayed * u64::from(step.reached - step.left) / u64::from(step.reached);
            if stayed < STAYED_LEAST {
                return Some(at as u64 * STEP_MS);
            }
        }
        None
    }
}

impl AgeBucket {
    fn halve(&mut self) {
        self.reached /= 2;
        self.left /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_timeout_is_unknown_until_enough_clients_left() {
        let mut timeouts = ClientTimeouts::default();
        assert_eq!(timeouts.quantile_ms(), None);
        for _ in 0..REACHED_LEAST - 1 {
            timeouts.left(3000);
        }
        assert_eq!(timeouts.quantile_ms(), None);
        timeouts.left(3000);
        assert_eq!(timeouts.quantile_ms(), Some(3000));
    }

    #[test]
    fn clients_served_early_do_not_affect_the_timeout_estimate() {
        let mut timeouts = ClientTimeouts::default();
        for _ in 0..900 {
            timeouts.stayed(100);
        }
        for _ in 0..100 {
            timeouts.left(3010);
        }
        assert_eq!(timeouts.quantile_ms(), Some(3000));
    }

    #[test]
    fn a_minority_of_impatient_clients_sets_no_timeout() {
        let mut timeouts = ClientTimeouts::default();
        for turn in 0..1000 {
            if turn % 5 < 2 {
                timeouts.left(0);
            } else {
                timeouts.stayed(9000);
            }
        }
        assert_eq!(timeouts.quantile_ms(), None);
    }

    #[test]
    fn client_timeout_estimate_decays() {
        let mut timeouts = ClientTimeouts::default();
        timeouts.look(0);
        for _ in 0..64 {
            timeouts.left(3000);
        }
        for minute in 1..=2 {
            timeouts.look(minute * HALF_LIFE_MS);
            assert_eq!(timeouts.quantile_ms(), Some(3000), "{minute}");
        }
        timeouts.look(3 * HALF_LIFE_MS);
        assert_eq!(timeouts.quantile_ms(), None);
    }

    #[test]
    fn client_timeout_estimate_saturates() {
        let mut timeouts = ClientTimeouts::default();
        for _ in 0..100_000 {
            timeouts.left(u64::MAX);
        }
        assert_eq!(timeouts.quantile_ms(), Some((STEPS as u64 - 1) * STEP_MS));
    }
}
