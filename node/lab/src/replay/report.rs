//! Results of a load: counts, times, and the hit rates that engines reported and the router
//! predicted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::client::{ReplayAnswer, ReplayError};

/// Maximum value of histograms, in microseconds: one hour.
const TIME_US_MAX: u64 = 3_600_000_000;
/// Weight of an input token in a user's service, as in VTC; an output token weighs `OUTPUT_PRICE`.
const INPUT_PRICE: u64 = 1;
const OUTPUT_PRICE: u64 = 2;

/// Collector of request results, from which the report is made.
#[derive(Debug)]
pub struct LoadTally {
    all: TargetCounts,
    targets: BTreeMap<String, TargetCounts>,
    backends: BTreeMap<String, u64>,
    users: BTreeMap<Arc<str>, UserReport>,
    errors: BTreeMap<String, ErrorReport>,
    late: Histogram<u64>,
    /// Number of responses through a replica that did not report its decision.
    untold: u64,
}

/// Counts and times of one target, or of all targets.
#[derive(Debug)]
struct TargetCounts {
    ok: u64,
    failed: u64,
    lost: u64,
    /// Number of prompt tokens, over the responses with `usage`.
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Number of prompt tokens, over the responses that report cached tokens.
    cached_of: u64,
    cached_tokens: u64,
    blocks_matched: u64,
    blocks: u64,
    ttft: Histogram<u64>,
    latency: Histogram<u64>,
}

/// Results of a load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoadReport {
    /// Time from the first request to the last response, in seconds.
    pub duration_s: f64,
    /// Results of all requests together.
    pub total: GroupReport,
    /// Results by target.
    pub targets: BTreeMap<String, GroupReport>,
    /// Number of responses by backend, from `x-quorate-backend`; empty without a router.
    pub backends: BTreeMap<String, u64>,
    /// Number of responses of replicas that did not report their decision. They are missing in
    /// `backends` and `predicted_hit_rate`.
    pub decisions_untold: u64,
    /// Results by user.
    pub users: BTreeMap<String, UserReport>,
    /// Jain's index of the users' service. 1 means even service, and 1/n that one of n users got
    /// everything. `None` if no user got service.
    pub jain_index: Option<f64>,
    /// Failures by kind of error.
    pub errors: BTreeMap<String, ErrorReport>,
    /// Delay of requests relative to the trace, caused by the load generator.
    pub late_ms: LatencySummary,
}

/// Counts, rates and times of one target, or of all targets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupReport {
    /// Number of requests that have ended.
    pub requests: u64,
    /// Number of requests completed.
    pub ok: u64,
    /// Number of requests that failed.
    pub failed: u64,
    /// Number of requests that were in flight at a target when it was taken down on purpose.
    pub lost: u64,
    /// Number of completed requests per second.
    pub requests_per_s: f64,
    /// Number of output tokens per second.
    pub output_tokens_per_s: f64,
    /// Number of prompt tokens, from the engines' `usage`.
    pub prompt_tokens: u64,
    /// Number of prompt tokens found in the engines' caches; `None` if no engine reported them.
    pub cached_tokens: Option<u64>,
    /// Number of output tokens, from the engines' `usage`.
    pub completion_tokens: u64,
    /// Hit rate as reported by engines: cached over prompt tokens; `None` without reports.
    pub hit_rate: Option<f64>,
    /// Hit rate as predicted by the router: matched over all blocks; `None` without a router.
    pub predicted_hit_rate: Option<f64>,
    /// Time from sending a request to its first text, in milliseconds.
    pub ttft_ms: LatencySummary,
    /// Time from sending a request to the end of its response, in milliseconds.
    pub latency_ms: LatencySummary,
}

/// Summary of a distribution of times, in milliseconds; all zero if the distribution is empty.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LatencySummary {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
}

/// Token counts and results of one user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct UserReport {
    /// Number of requests completed.
    pub ok: u64,
    /// Number of requests that failed or were lost.
    pub failed: u64,
    /// Number of prompt tokens in the user's responses.
    pub prompt_tokens: u64,
    /// Number of output tokens in the user's responses.
    pub completion_tokens: u64,
    /// Service that the user received: prompt tokens plus twice the output tokens.
    pub service: u64,
}

/// Number of failures of one kind, with an example.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorReport {
    /// Number of failures.
    pub count: u64,
    /// Message of the first failure.
    pub example: String,
}

impl LoadTally {
    /// Creates an empty tally for the targets with these names.
    #[must_use]
    pub fn new<'a>(targets: impl Iterator<Item = &'a str>) -> Self {
        Self {
            all: TargetCounts::new(),
            targets: targets
                .map(|name| (name.to_owned(), TargetCounts::new()))
                .collect(),
            backends: BTreeMap::new(),
            users: BTreeMap::new(),
            errors: BTreeMap::new(),
            late: histogram(),
            untold: 0,
        }
    }

    /// Records that a request was sent `late` after its time in the trace.
    pub fn sent(&mut self, late: Duration) {
        record(&mut self.late, late);
    }

    /// Records a response of `target` to `user`.
    pub fn answered(&mut self, target: &str, user: &Arc<str>, answer: &ReplayAnswer) {
        self.all.answered(answer);
        self.target(target).answered(answer);
        if let Some(backend) = &answer.backend {
            *self.backends.entry(backend.clone()).or_default() += 1;
        } else if answer.is_routed {
            self.untold += 1;
        }
        let of_user = self.users.entry(user.clone()).or_default();
        let prompt = answer.prompt_tokens.unwrap_or(0);
        let completion = answer.completion_tokens.unwrap_or(0);
        of_user.ok += 1;
        of_user.prompt_tokens += prompt;
        of_user.completion_tokens += completion;
        of_user.service += INPUT_PRICE * prompt + OUTPUT_PRICE * completion;
    }

    /// Records a request of `user` that failed at `target`.
    pub fn failed(&mut self, target: &str, user: &Arc<str>, failure: &ReplayError) {
        self.all.failed += 1;
        self.target(target).failed += 1;
        self.users.entry(user.clone()).or_default().failed += 1;
        let first = ErrorReport {
            count: 0,
            example: failure.to_string(),
        };
        self.errors.entry(failure.kind()).or_insert(first).count += 1;
    }

    /// Records a request of `user` that was in flight when `target` was taken down on purpose.
    pub fn lost(&mut self, target: &str, user: &Arc<str>) {
        self.all.lost += 1;
        self.target(target).lost += 1;
        self.users.entry(user.clone()).or_default().failed += 1;
    }

    /// Returns the number of ended requests and the number of failed ones.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (
            self.all.ok + self.all.failed + self.all.lost,
            self.all.failed,
        )
    }

    /// Returns the number of prompt tokens in responses that report cached tokens, and the number
    /// of cached tokens.
    #[must_use]
    pub fn hits(&self) -> (u64, u64) {
        (self.all.cached_of, self.all.cached_tokens)
    }

    /// Returns the results of a load that took `duration`.
    #[must_use]
    pub fn report(self, duration: Duration) -> LoadReport {
        let users: BTreeMap<String, UserReport> = self
            .users
            .into_iter()
            .map(|(user, report)| (user.to_string(), report))
            .collect();
        let service: Vec<f64> = users.values().map(|user| user.service as f64).collect();
        LoadReport {
            duration_s: duration.as_secs_f64(),
            total: self.all.report(duration),
            targets: self
                .targets
                .into_iter()
                .map(|(name, group)| (name, group.report(duration)))
                .collect(),
            backends: self.backends,
            decisions_untold: self.untold,
            jain_index: jain_index(&service),
            users,
            errors: self.errors,
            late_ms: LatencySummary::of(&self.late),
        }
    }

    fn target(&mut self, name: &str) -> &mut TargetCounts {
        self.targets
            .get_mut(name)
            .expect("every target is known from the start")
    }
}

impl TargetCounts {
    fn new() -> Self {
        Self {
            ok: 0,
            failed: 0,
            lost: 0,
            prompt_tokens: 0,
            completion_tokens: 0,
            cached_of: 0,
            cached_tokens: 0,
            blocks_matched: 0,
            blocks: 0,
            ttft: histogram(),
            latency: histogram(),
        }
    }

    fn answered(&mut self, answer: &ReplayAnswer) {
        self.ok += 1;
        let prompt_tokens = answer.prompt_tokens.unwrap_or(0);
        self.prompt_tokens += prompt_tokens;
        self.completion_tokens += answer.completion_tokens.unwrap_or(0);
        if let Some(cached) = answer.cached_tokens {
            self.cached_of += prompt_tokens;
            self.cached_tokens += cached;
        }
        if let Some((matched, total)) = answer.prefix {
            self.blocks_matched += matched;
            self.blocks += total;
        }
        record(&mut self.ttft, answer.ttft);
        record(&mut self.latency, answer.latency);
    }

    fn report(&self, duration: Duration) -> GroupReport {
        let seconds = duration.as_secs_f64().max(f64::MIN_POSITIVE);
        GroupReport {
            requests: self.ok + self.failed + self.lost,
            ok: self.ok,
            failed: self.failed,
            lost: self.lost,
            requests_per_s: self.ok as f64 / seconds,
            output_tokens_per_s: self.completion_tokens as f64 / seconds,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: (self.cached_of > 0).then_some(self.cached_tokens),
            completion_tokens: self.completion_tokens,
            hit_rate: ratio(self.cached_tokens, self.cached_of),
            predicted_hit_rate: ratio(self.blocks_matched, self.blocks),
            ttft_ms: LatencySummary::of(&self.ttft),
            latency_ms: LatencySummary::of(&self.latency),
        }
    }
}

impl LatencySummary {
    fn of(histogram: &Histogram<u64>) -> Self {
        if histogram.is_empty() {
            return Self::default();
        }
        let quantile = |at| histogram.value_at_quantile(at) as f64 / 1e3;
        Self {
            mean: histogram.mean() / 1e3,
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            max: histogram.max() as f64 / 1e3,
        }
    }
}

/// Returns Jain's fairness index of `service`, `(sum x)^2 / (n * sum x^2)`; `None` if all are zero.
#[must_use]
pub fn jain_index(service: &[f64]) -> Option<f64> {
    let sum: f64 = service.iter().sum();
    let squares: f64 = service.iter().map(|x| x * x).sum();
    (squares > 0.0).then(|| sum * sum / (service.len() as f64 * squares))
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, TIME_US_MAX, 3).expect("the bounds are valid")
}

fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_cover_reported_counts_only() {
        let mut tally = LoadTally::new(["a", "b"].into_iter());
        let user: Arc<str> = Arc::from("u");
        let answer = ReplayAnswer {
            prompt_tokens: Some(100),
            cached_tokens: Some(25),
            completion_tokens: Some(10),
            prefix: Some((1, 3)),
            backend: Some("gpu".to_owned()),
            ttft: Duration::from_millis(5),
            latency: Duration::from_millis(50),
            ..ReplayAnswer::default()
        };
        tally.answered("a", &user, &answer);
        tally.answered(
            "b",
            &user,
            &ReplayAnswer {
                cached_tokens: None,
                is_routed: true,
                backend: None,
                prefix: None,
                ..answer
            },
        );
        tally.failed("b", &user, &ReplayError::TimedOut);
        tally.lost("b", &user);
        let report = tally.report(Duration::from_secs(2));
        assert_eq!(report.total.hit_rate, Some(0.25));
        assert_eq!(report.total.predicted_hit_rate, Some(1.0 / 3.0));
        assert_eq!(report.total.prompt_tokens, 200);
        assert_eq!(
            (
                report.total.requests,
                report.total.failed,
                report.total.lost
            ),
            (4, 1, 1)
        );
        assert_eq!(report.targets["b"].hit_rate, None);
        assert_eq!(report.targets["b"].cached_tokens, None);
        assert_eq!(report.users["u"].service, 240);
        assert_eq!((report.backends["gpu"], report.decisions_untold), (1, 1));
        assert_eq!(report.errors["timed out"].count, 1);
        assert_eq!(report.total.output_tokens_per_s, 10.0);
        assert!((report.total.ttft_ms.p50 - 5.0).abs() < 0.01);
    }

    #[test]
    fn jains_index_separates_even_from_uneven() {
        assert_eq!(jain_index(&[5.0, 5.0, 5.0]), Some(1.0));
        assert_eq!(jain_index(&[9.0, 0.0, 0.0]), Some(1.0 / 3.0));
        assert_eq!(jain_index(&[0.0]), None);
    }
}
