//! Fits the speed of engines to what a recording tells: times to first tokens and ends of streams.
//!
//! Prefill is linear in the uncached prompt tokens: a first token takes `a + t * uncached`. The slope
//! is the median over pairs of one request from the half with fewer uncached tokens and one from the
//! other half, which outliers such as a request behind a long one do not move (the incomplete method
//! of Theil, 1950). A decode step is the median time between tokens, less what the mean number of
//! running requests adds in the simulated engine.

use std::time::Duration;

use api::files::recording::{RecordedReport, RecordedRequest};

use crate::engine::model::DECODE_BATCH_DOUBLING;

/// Minimum number of requests for a fit.
const REQUESTS_MIN: usize = 16;
/// Minimum difference in uncached tokens of a pair: below, noise exceeds what prefill takes.
const TOKENS_APART_MIN: f64 = 64.0;
/// Minimum number of output tokens from which the time between them is known well enough.
const OUTPUT_MIN: u64 = 8;

/// Speed of the recorded engines. `None`: the recording does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct RecordedSpeed {
    /// Prompt tokens computed per second.
    pub prefill_rate: Option<u32>,
    /// Fixed time of a decode step, in milliseconds.
    pub decode_ms: Option<f64>,
}

impl RecordedSpeed {
    /// Fits the speed of `backends` engines to their requests.
    pub(super) fn of(requests: &[&RecordedRequest], backends: usize) -> Self {
        let reports = requests.iter().filter_map(|request| request.report());
        let streams: Vec<&RecordedReport> = reports.filter(|it| it.end == "finished").collect();
        Self {
            prefill_rate: prefill_rate(&streams),
            decode_ms: decode_ms(&streams, running(requests, backends)),
        }
    }

    /// Returns the fixed time of a decode step, if it is known.
    pub(super) fn decode(&self) -> Option<Duration> {
        Some(Duration::from_secs_f64(self.decode_ms? / 1000.0))
    }
}

/// Returns the prompt tokens that an engine computes per second.
fn prefill_rate(streams: &[&RecordedReport]) -> Option<u32> {
    let mut points: Vec<(f64, f64)> = streams
        .iter()
        .filter_map(|it| {
            let uncached = it.prompt_tokens?.saturating_sub(it.cached_tokens?);
            Some((uncached as f64, it.ttft_ms?))
        })
        .collect();
    if points.len() < REQUESTS_MIN {
        return None;
    }
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (few, many) = points.split_at(points.len() / 2);
    let pairs = few.iter().zip(many);
    let slopes = pairs.filter_map(|((few, earlier), (many, later))| {
        let apart = many - few;
        (apart >= TOKENS_APART_MIN).then(|| (later - earlier) / apart)
    });
    let slope_ms = median(slopes.collect()).filter(|slope| *slope > 0.0)?;
    Some(((1000.0 / slope_ms) as u32).clamp(1, 100_000_000))
}

/// Returns the fixed time of a decode step of an engine that runs `running` requests on average.
fn decode_ms(streams: &[&RecordedReport], running: f64) -> Option<f64> {
    let gaps = streams.iter().filter_map(|it| {
        let steps = it
            .output_tokens
            .checked_sub(1)
            .filter(|_| it.output_tokens >= OUTPUT_MIN)?;
        let took = it.duration_ms - it.ttft_ms?;
        (took > 0.0).then(|| took / steps as f64)
    });
    let gap = median(gaps.collect())?;
    Some(gap / (1.0 + running / DECODE_BATCH_DOUBLING as f64))
}

/// Returns the mean number of requests that ran at an engine, by Little's law.
fn running(requests: &[&RecordedRequest], backends: usize) -> f64 {
    let first = requests.first().map_or(0, |it| it.at_ms);
    let last = requests.last().map_or(0, |it| it.at_ms);
    let span_ms = last.saturating_sub(first).max(1) as f64;
    let took = requests.iter().filter_map(|request| request.report());
    let took: f64 = took.map(|report| report.duration_ms).sum();
    (took / span_ms / backends.max(1) as f64).max(1.0)
}

/// Returns the median; `None` of fewer than [`REQUESTS_MIN`] / 2 numbers.
fn median(mut numbers: Vec<f64>) -> Option<f64> {
    if numbers.len() < REQUESTS_MIN / 2 {
        return None;
    }
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(uncached: u64, ttft_ms: f64, output: u64, duration_ms: f64) -> RecordedReport {
        RecordedReport {
            end: "finished".to_owned(),
            prompt_tokens: Some(uncached + 100),
            cached_tokens: Some(100),
            output_tokens: output,
            ttft_ms: Some(ttft_ms),
            duration_ms,
        }
    }

    #[test]
    fn speed_is_fitted_despite_outliers() {
        let streams: Vec<RecordedReport> = (0..40)
            .map(|nth| {
                let uncached = nth * 100;
                // 5,000 tokens per second after 30 ms; every seventh waits for a second.
                let late = if nth % 7 == 0 { 1000.0 } else { 0.0 };
                let ttft = 30.0 + uncached as f64 / 5.0 + late;
                stream(uncached, ttft, 51, ttft + 50.0 * 24.0)
            })
            .collect();
        let streams: Vec<&RecordedReport> = streams.iter().collect();
        let rate = prefill_rate(&streams).unwrap();
        assert!((4900..=5100).contains(&rate), "{rate}");
        let step = decode_ms(&streams, 12.8).unwrap();
        assert!((step - 20.0).abs() < 0.01, "{step}");
    }

    #[test]
    fn a_recording_without_variety_fits_no_speed() {
        let same: Vec<RecordedReport> = (0..40).map(|_| stream(0, 5.0, 1, 5.0)).collect();
        let same: Vec<&RecordedReport> = same.iter().collect();
        assert_eq!((prefill_rate(&same), decode_ms(&same, 1.0)), (None, None));
        assert_eq!(
            (prefill_rate(&same[..3]), decode_ms(&[], 1.0)),
            (None, None)
        );
    }
}
