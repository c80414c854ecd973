//! Output lengths as a histogram of logarithmic buckets: exact up to 63 tokens, within 1/32 beyond.
//!
//! Old lengths fade: each counts `WEIGHT`, and when all together reach `WEIGHTS_MAX` every
//! bucket is halved, so that a length that came once disappears after four halvings and not at the
//! first.

use bincode::{Decode, Encode};

/// Buckets: 64 of width 1, then 32 to every doubling.
pub const BUCKETS: usize = 512;
/// Longest output told apart; longer ones count as this.
pub const OUTPUT_TOKENS_MAX: u32 = (1 << 20) - 1;
/// What one length adds to its bucket.
const WEIGHT: u32 = 16;
/// All weights together, at most: 4096 lengths.
const WEIGHTS_MAX: u32 = WEIGHT * 4096;
/// Binary digits of a bucket's number within its doubling.
const DIGITS: u32 = 5;

/// A faded histogram.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Histogram {
    /// By bucket, [`BUCKETS`] of them.
    weights: Vec<u32>,
    /// Their sum.
    total: u32,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            weights: vec![0; BUCKETS],
            total: 0,
        }
    }
}

/// A bucket that holds lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Smallest length in it.
    pub start: u32,
    /// Smallest length beyond it.
    pub end: u32,
    /// Weight of the lengths in it.
    pub weight: u32,
}

impl Histogram {
    /// Counts in one output.
    pub fn add(&mut self, tokens: u32) {
        self.weights[bucket_of(tokens)] += WEIGHT;
        self.total += WEIGHT;
        if self.total > WEIGHTS_MAX {
            self.weights.iter_mut().for_each(|weight| *weight /= 2);
            self.total = self.weights.iter().sum();
        }
    }

    /// Whether nothing was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Sum of all weights.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// The buckets that hold anything, ascending.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> {
        self.buckets_from(0)
    }

    fn buckets_from(&self, first: usize) -> impl Iterator<Item = Bucket> {
        let filled = self.weights.iter().enumerate().skip(first);
        filled
            .filter(|(_, weight)| **weight > 0)
            .map(|(at, weight)| Bucket {
                start: start_of(at),
                end: start_of(at + 1),
                weight: *weight,
            })
    }

    /// The shortest length that half of the outputs do not exceed, at its bucket's middle; `None`
    /// before the first output.
    #[must_use]
    pub fn median(&self) -> Option<u32> {
        let mut below = 0;
        self.buckets()
            .find(|bucket| {
                below += bucket.weight;
                below * 2 >= self.total
            })
            .map(|bucket| bucket.start + (bucket.end - 1 - bucket.start) / 2)
    }

    /// The mean length of outputs longer than `produced` tokens, rounded up: what an answer that
    /// has come so far is expected to reach. `None` when none was longer.
    #[must_use]
    pub fn mean_beyond(&self, produced: u32) -> Option<u32> {
        // Lengths are taken as spread evenly over their bucket. The factor keeps the share of a
        // bucket that `produced` cuts.
        const SCALE: u64 = 1 << 16;
        // All weights together are at most 2^16, all lengths below 2^20: sums stay below 2^53.
        let (mut mass, mut sum) = (0_u64, 0_u64);
        let buckets = self.buckets_from(bucket_of(produced));
        for bucket in buckets.filter(|bucket| bucket.end - 1 > produced) {
            let first = bucket.start.max(produced.saturating_add(1));
            let width = u64::from(bucket.end - bucket.start);
            let part = u64::from(bucket.weight) * SCALE * u64::from(bucket.end - first) / width;
            mass += part;
            // Twice the mean of the first and the last length.
            sum += part * u64::from(first + bucket.end - 1);
        }
        let mean = sum.div_ceil(mass.max(1) * 2);
        (mass > 0).then(|| u32::try_from(mean).unwrap_or(u32::MAX))
    }

    /// Whether the buckets are as many as there must be and add up; for what was decoded.
    pub(super) fn is_sound(&self) -> bool {
        let total: u64 = self.weights.iter().map(|weight| u64::from(*weight)).sum();
        self.weights.len() == BUCKETS && total == u64::from(self.total) && self.total <= WEIGHTS_MAX
    }
}

fn bucket_of(tokens: u32) -> usize {
    let tokens = tokens.min(OUTPUT_TOKENS_MAX);
    // Digits below the ones that count.
    let shift = tokens.checked_ilog2().unwrap_or(0).saturating_sub(DIGITS);
    ((shift << DIGITS) + (tokens >> shift)) as usize
}

fn start_of(bucket: usize) -> u32 {
    let bucket = u32::try_from(bucket).expect("buckets are few");
    let within = 1 << DIGITS;
    if bucket < 2 * within {
        return bucket;
    }
    (within + bucket % within) << (bucket / within - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_exact_at_first_and_then_within_a_thirty_second() {
        assert_eq!(bucket_of(OUTPUT_TOKENS_MAX), BUCKETS - 1);
        assert_eq!(bucket_of(u32::MAX), BUCKETS - 1);
        let mut expected = 0;
        for at in 0..BUCKETS {
            let (start, end) = (start_of(at), start_of(at + 1));
            assert_eq!(start, expected, "buckets leave no gap");
            assert_eq!((bucket_of(start), bucket_of(end - 1)), (at, at));
            assert!(end - start == 1 || (end - start) * 32 <= start);
            expected = end;
        }
        assert_eq!(expected, OUTPUT_TOKENS_MAX + 1);
    }

    #[test]
    fn old_lengths_fade_and_the_last_ones_stay() {
        let mut histogram = Histogram::default();
        histogram.add(7);
        (0..50_000).for_each(|_| histogram.add(100));
        assert!(histogram.is_sound());
        assert_eq!(histogram.buckets().count(), 1, "7 is forgotten");
        (0..4096).for_each(|_| histogram.add(10));
        assert_eq!(histogram.median(), Some(10));
    }

    #[test]
    fn an_empty_histogram_expects_nothing() {
        let histogram = Histogram::default();
        assert_eq!(histogram.median(), None);
        assert_eq!(histogram.mean_beyond(0), None);
    }

    proptest! {
        #[test]
        fn means_beyond_are_those_of_the_lengths(
            lengths in prop::collection::vec(1_u32..64, 1..100),
            produced in 0_u32..64,
        ) {
            let mut histogram = Histogram::default();
            lengths.iter().for_each(|tokens| histogram.add(*tokens));
            let longer: Vec<u32> = lengths.into_iter().filter(|it| *it > produced).collect();
            let mean = longer.iter().sum::<u32>().div_ceil(longer.len().max(1) as u32);
            let expected = (!longer.is_empty()).then_some(mean);
            prop_assert_eq!(histogram.mean_beyond(produced), expected);
        }

        #[test]
        fn more_tokens_are_expected_the_more_have_come(
            lengths in prop::collection::vec(any::<u32>(), 1..100),
            produced in 0..OUTPUT_TOKENS_MAX,
        ) {
            let mut histogram = Histogram::default();
            lengths.iter().for_each(|tokens| histogram.add(*tokens));
            if let Some(mean) = histogram.mean_beyond(produced) {
                prop_assert!(mean > produced);
                prop_assert!(histogram.mean_beyond(0).expect("there are longer ones") <= mean);
            }
        }
    }
}
