//! A sliding window of usage: a ring of buckets of fixed length.

use bincode::{Decode, Encode};

use super::UserUsage;

/// Number of buckets in the sliding window.
pub const WINDOW_BUCKETS: usize = 5;
/// Length of one bucket in milliseconds, unless the live policy requests another.
pub const WINDOW_BUCKET_MS: u64 = 60_000;

/// Usage of one user in the last [`WINDOW_BUCKETS`] buckets. All users share one bucket length, so
/// it is passed to each call. Usage recorded under another length does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct UsageWindow {
    buckets: [WindowBucket; WINDOW_BUCKETS],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
struct WindowBucket {
    /// Number of the bucket's time slice since the epoch. A bucket from an earlier lap does not
    /// count.
    stretch: u64,
    usage: UserUsage,
}

impl UsageWindow {
    pub(super) fn add(&mut self, now_ms: u64, bucket_ms: u64, usage: &UserUsage) {
        let stretch = now_ms / bucket_ms;
        let place = usize::try_from(stretch % WINDOW_BUCKETS as u64)
            .expect("a remainder by the number of buckets is a place");
        let bucket = &mut self.buckets[place];
        if bucket.stretch != stretch {
            *bucket = WindowBucket {
                stretch,
                usage: UserUsage::default(),
            };
        }
        bucket.usage.add(usage);
    }

    pub(super) fn sum(&self, now_ms: u64, bucket_ms: u64) -> UserUsage {
        let newest = now_ms / bucket_ms;
        let mut sum = UserUsage::default();
        for bucket in &self.buckets {
            if newest
                .checked_sub(bucket.stretch)
                .is_some_and(|age| age < WINDOW_BUCKETS as u64)
            {
                sum.add(&bucket.usage);
            }
        }
        sum
    }

    /// Returns the number of requests within the last `span_ms`, as far as the window reaches. A
    /// bucket that began earlier counts in proportion to its overlap, assuming evenly spread
    /// requests.
    pub(super) fn requests_within(&self, now_ms: u64, bucket_ms: u64, span_ms: u64) -> u64 {
        let since_ms = now_ms.saturating_sub(span_ms);
        let newest = now_ms / bucket_ms;
        let counted = |bucket: &WindowBucket| {
            let age = newest.checked_sub(bucket.stretch)?;
            let end_ms = bucket.stretch.saturating_add(1).saturating_mul(bucket_ms);
            let overlap_ms = match age {
                0 => bucket_ms,
                _ if age < WINDOW_BUCKETS as u64 => end_ms.saturating_sub(since_ms).min(bucket_ms),
                _ => 0,
            };
            let part = u128::from(bucket.usage.requests) * u128::from(overlap_ms);
            u64::try_from(part / u128::from(bucket_ms.max(1))).ok()
        };
        let counted = self.buckets.iter().filter_map(counted);
        counted.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(output: u64) -> UserUsage {
        UserUsage {
            output,
            ..UserUsage::default()
        }
    }

    #[test]
    fn window_buckets_expire_one_by_one() {
        let mut window = UsageWindow::default();
        for minute in 0..5 {
            window.add(
                minute * WINDOW_BUCKET_MS,
                WINDOW_BUCKET_MS,
                &output(10 + minute),
            );
        }
        let sums: Vec<u64> = (4..11)
            .map(|minute| {
                window
                    .sum(minute * WINDOW_BUCKET_MS, WINDOW_BUCKET_MS)
                    .output
            })
            .collect();
        assert_eq!(sums, [60, 50, 39, 27, 14, 0, 0]);
        window.add(7 * WINDOW_BUCKET_MS, WINDOW_BUCKET_MS, &output(1));
        assert_eq!(
            window.sum(7 * WINDOW_BUCKET_MS, WINDOW_BUCKET_MS).output,
            28
        );
    }

    #[test]
    fn the_window_accepts_the_last_possible_time() {
        let mut window = UsageWindow::default();
        window.add(u64::MAX, WINDOW_BUCKET_MS, &output(u64::MAX));
        window.add(u64::MAX, WINDOW_BUCKET_MS, &output(1));
        assert_eq!(window.sum(u64::MAX, WINDOW_BUCKET_MS).output, u64::MAX);
    }
}
