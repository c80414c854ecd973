//! Histogram of output lengths with logarithmic buckets: exact up to 63 tokens, within 1/32 beyond.
//!
//! Old lengths fade. Each length adds `WEIGHT`, and when the total exceeds `WEIGHTS_MAX`, every
//! bucket is halved. A length that occurred once thus disappears after a few halvings.

use bincode::{Decode, Encode};

/// Number of buckets: 64 of width 1, then 32 for every doubling.
pub const BUCKETS: usize = 512;
/// Longest distinguishable output, in tokens. Longer outputs count as this long.
pub const OUTPUT_TOKENS_MAX: u32 = (1 << 20) - 1;
/// Weight of one output.
const WEIGHT: u32 = 16;
/// Maximum total weight: that of 4096 outputs.
const WEIGHTS_MAX: u32 = WEIGHT * 4096;
/// Number of binary digits of a bucket's index within its doubling.
const DIGITS: u32 = 5;

/// A histogram of output lengths whose old values fade.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Histogram {
    /// Weight of each of the [`BUCKETS`] buckets.
    weights: Vec<u32>,
    /// Sum of the weights.
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

/// A bucket with at least one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Smallest length in the bucket.
    pub start: u32,
    /// Smallest length beyond the bucket.
    pub end: u32,
    /// Weight of the lengths in the bucket.
    pub weight: u32,
}

impl Histogram {
    /// Adds one output of `tokens` tokens.
    pub fn add(&mut self, tokens: u32) {
        self.weights[bucket_of(tokens)] += WEIGHT;
        self.total += WEIGHT;
        if self.total > WEIGHTS_MAX {
            self.weights.iter_mut().for_each(|weight| *weight /= 2);
            self.total = self.weights.iter().sum();
        }
    }

    /// Whether the histogram has no outputs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Returns the sum of all weights.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Iterates over the non-empty buckets, in ascending order of lengths.
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

    /// Returns the shortest length that at least half of the outputs do not exceed, as the middle
    /// of its bucket. `None` before the first output.
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

    /// Returns the mean length of outputs longer than `produced` tokens, rounded up: the expected
    /// length of a response that has reached this length. `None` if no output was longer.
    #[must_use]
    pub fn mean_beyond(&self, produced: u32) -> Option<u32> {
        // Lengths are taken to be spread evenly over their bucket. The factor preserves the
        // fraction of a bucket that `produced` cuts off.
        const SCALE: u64 = 1 << 16;
        // All weights together are at most 2^16 and all lengths below 2^20, so sums stay below
        // 2^53.
        let (mut mass, mut sum) = (0_u64, 0_u64);
        let buckets = self.buckets_from(bucket_of(produced));
        for bucket in buckets.filter(|bucket| bucket.end - 1 > produced) {
            let first = bucket.start.max(produced.saturating_add(1));
            let width = u64::from(bucket.end - bucket.start);
            let part = u64::from(bucket.weight) * SCALE * u64::from(bucket.end - first) / width;
            mass += part;
            // The sum of the first and the last length is twice their mean.
            sum += part * u64::from(first + bucket.end - 1);
        }
        let mean = sum.div_ceil(mass.max(1) * 2);
        (mass > 0).then(|| u32::try_from(mean).unwrap_or(u32::MAX))
    }

    /// Whether a decoded histogram has the right number of buckets and total weight.
    pub(super) fn is_sound(&self) -> bool {
        let total: u64 = self.weights.iter().map(|weight| u64::from(*weight)).sum();
        self.weights.len() == BUCKETS && total == u64::from(self.total) && self.total <= WEIGHTS_MAX
    }
}

fn bucket_of(tokens: u32) -> usize {
    let tokens = tokens.min(OUTPUT_TOKENS_MAX);
    // Number of binary digits below the significant ones.
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
    fn buckets_are_exact_then_within_one_in_thirty_two() {
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
    fn histogram_forgets_old_lengths() {
        let mut histogram = Histogram::default();
        histogram.add(7);
        (0..50_000).for_each(|_| histogram.add(100));
        assert!(histogram.is_sound());
        assert_eq!(histogram.buckets().count(), 1, "7 is forgotten");
        (0..4096).for_each(|_| histogram.add(10));
        assert_eq!(histogram.median(), Some(10));
    }

    #[test]
    fn an_empty_histogram_has_no_expectation() {
        let histogram = Histogram::default();
        assert_eq!(histogram.median(), None);
        assert_eq!(histogram.mean_beyond(0), None);
    }

    proptest! {
        #[test]
        fn mean_beyond_equals_the_mean_of_longer_lengths(
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
        fn expected_length_grows_with_tokens_produced(
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
