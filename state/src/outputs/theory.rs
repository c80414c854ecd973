//! Theory of bins, for batches that last as long as their longest request.

/// Returns the mean time of a batch of `batch` requests from one of `bins` bins of equal mass, with
/// request times uniform over `least..=most`:
/// `E[T_k] = (a + b) / 2 + (b - a) / (2k) * (B - 1) / (B + 1)`.
///
/// Within one bin, the largest of `B` uniform times over a range of length `w` is expected at
/// `w * B / (B + 1)` above its start. The starts of `k` ranges of length `(b - a) / k` are on
/// average `(b - a) / 2 * (1 - 1 / k)` above `a` (Guldogan et al., "Multi-Bin Batching for
/// Increasing LLM Inference Throughput", 2024).
///
/// For reports only: nothing replicated depends on the result.
#[must_use]
pub fn batch_time_mean(least: f64, most: f64, bins: u16, batch: u32) -> f64 {
    let (bins, batch) = (f64::from(bins.max(1)), f64::from(batch.max(1)));
    f64::midpoint(least, most) + (most - least) / (2.0 * bins) * (batch - 1.0) / (batch + 1.0)
}

/// Returns the number of requests per unit of time that batches of [`batch_time_mean`] serve.
#[must_use]
pub fn throughput(least: f64, most: f64, bins: u16, batch: u32) -> f64 {
    f64::from(batch.max(1)) / batch_time_mean(least, most, bins, batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bins_approach_the_mean_of_a_single_request() {
        let times: Vec<String> = [1, 2, 4, 32, 1000]
            .map(|bins| format!("{:.3}", batch_time_mean(1.0, 20.0, bins, 8)))
            .to_vec();
        assert_eq!(times, ["17.889", "14.194", "12.347", "10.731", "10.507"]);
        assert!((batch_time_mean(1.0, 20.0, 4, 1) - 10.5).abs() < 1e-12);
        assert!((throughput(1.0, 20.0, 1, 8) - 8.0 / 17.888_888).abs() < 1e-6);
    }
}
