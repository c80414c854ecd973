//! Algorithms 3 to 6 exactly as originally given. Only tests use them, to show where they fail.

use std::collections::VecDeque;

/// Bins as half-open ranges of lengths, from the smallest length to the smallest length beyond.
pub(super) type Boundaries = Vec<(u32, u32)>;

/// Computes bins by Algorithm 6, with quantiles interpolated as in `numpy.quantile`.
pub(super) fn equal_mass(lengths: &[u32], bins: usize) -> Boundaries {
    if bins == 1 {
        return vec![(0, 10_000)];
    }
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable();
    let quantile = |at: usize| {
        let place = (sorted.len() - 1) as f64 * at as f64 / bins as f64;
        let (below, above) = (place.floor() as usize, place.ceil() as usize);
        let (low, high) = (f64::from(sorted[below]), f64::from(sorted[above]));
        (low + (high - low) * place.fract()).floor() as u32
    };
    let mut boundaries: Boundaries = (0..bins)
        .map(|at| (quantile(at), quantile(at + 1)))
        .collect();
    boundaries[bins - 1].1 = 10_000;
    boundaries
}

/// Returns the bin of a predicted length by Algorithm 4.
pub(super) fn bin_of(boundaries: &Boundaries, predicted: u32) -> usize {
    let place = boundaries
        .iter()
        .position(|(least, beyond)| (*least..*beyond).contains(&predicted));
    place.unwrap_or(boundaries.len() - 1)
}

/// Forms a batch by Algorithm 5 with the longest queue and, within it, Algorithm 3. Requests are
/// represented by their tokens.
pub(super) fn form(bins: &mut [VecDeque<u64>], target: usize, capacity: u64) -> Vec<u64> {
    let Some(longest) = bins.iter().map(VecDeque::len).max().filter(|len| *len > 0) else {
        return Vec::new();
    };
    let bin = bins
        .iter_mut()
        .find(|bin| bin.len() == longest)
        .expect("one is longest");
    let count = target.min(bin.len());
    let candidates: Vec<u64> = bin.drain(..count).collect();
    let mut batch = candidates.clone();
    while !batch.is_empty() && batch.iter().sum::<u64>() > capacity {
        batch.pop();
    }
    for unused in candidates[batch.len()..].iter().rev() {
        bin.push_front(*unused);
    }
    batch
}
