//! Metrics of the data plane, and the [`RequestMetricsGuard`] that counts every request exactly
//! once, even if its future is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::access::{AccessEntry, EndedAccess};
use super::archive::LostRecords;
use super::broken_streams::{BreakLabels, StreamBreak, StreamFate};
use super::decisions::DecisionLog;
use super::model_metrics::{ModelMeter, ModelMetrics};
pub use super::outcome::RequestOutcome;
use super::request_record::RequestRecord;
use super::stage_metrics::StageMetrics;
pub use super::status_label::StatusLabel;
use crate::cluster::figures::TimeBuckets;
use crate::engines::backends::pool::PoolCounters;
use crate::error::ProxyError;
use crate::net::connections::ConnectionRequestGuard;
use crate::proxy::limits::request_ids::RequestIdGuard;
use crate::proxy::limits::retry_budget::BudgetGuard;
use crate::proxy::limits::users::UserRequestGuard;
use crate::traces::{EndedTrace, RequestTrace};

/// Upper bounds of the histograms' buckets, in seconds.
const BUCKETS_S: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 120.0,
    300.0, 600.0, 1800.0,
];

/// Labels of the request counter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// Outcome of the request.
    pub outcome: RequestOutcome,
    /// HTTP status sent to the client; 0 if the client left earlier.
    pub code: StatusLabel,
}

/// Metrics of one data plane. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct ProxyMetrics {
    /// Number of requests by outcome and status.
    pub requests: Family<RequestLabels, Counter>,
    /// Requests in flight: from the end of their body to the end of the response.
    pub in_flight: Gauge,
    /// Requests whose body is still arriving.
    pub reading: Gauge,
    /// Open client connections.
    pub connections: Gauge,
    /// Idle connections closed to make room for others, the longest idle first.
    pub connections_evicted: Counter,
    /// Connections closed because their address had reached its limit.
    pub connections_refused: Counter,
    /// Connections to a TLS listener that ended before their handshake was complete.
    pub tls_handshakes_failed: Counter,
    /// Seconds from a request's last byte to the first output of a stream.
    pub time_to_first_token: Seconds,
    /// Seconds from a request's head to the end of the response.
    pub duration: Seconds,
    /// Attempts after the first one of each request.
    pub retries: Counter,
    /// Retries refused by the retry budget.
    pub retries_refused: Counter,
    /// Requests refused because they broke two connections.
    pub suspects_refused: Counter,
    /// Streams whose engine failed in the middle of its output.
    pub streams_broken: Family<BreakLabels, Counter>,
    /// Responses that ended before their charge was committed, if charges are durable.
    pub charges_unconfirmed: Counter,
    /// Records of decisions that are missing in the archive.
    pub decisions_lost: LostRecords,
    /// Bytes of request bodies received.
    pub request_bytes: Counter,
    /// Bytes of responses relayed to clients.
    pub answer_bytes: Counter,
    /// Counters of connections to engines.
    pub pool: PoolCounters,
    /// Counts and times from which recent figures for people are computed.
    pub recent: Arc<RecentRequests>,
    /// Metrics by model.
    pub(in crate::proxy) models: ModelMetrics,
    /// Metrics of requests that use two backends.
    pub(in crate::proxy) stages: StageMetrics,
}

impl Default for ModelMetrics {
    fn default() -> Self {
        Self::new(Seconds::histogram)
    }
}

impl Default for StageMetrics {
    fn default() -> Self {
        Self::new(Seconds::histogram)
    }
}

/// Counts and times of requests, from which [`crate::cluster::figures`] computes recent figures.
#[derive(Debug, Default)]
pub struct RecentRequests {
    /// Number of requests that ended.
    pub ended: AtomicU64,
    /// Number of requests that failed.
    pub failed: AtomicU64,
    /// Number of broken streams that went on, or were completed.
    pub streams_continued: AtomicU64,
    /// Number of broken streams that ended there.
    pub streams_lost: AtomicU64,
    /// Times from a request's last byte to the first output of a stream.
    pub ttft: TimeBuckets,
    /// Times from a request's last byte to its first dispatch, without the wait for admission.
    pub routing: TimeBuckets,
}

/// A histogram of seconds.
#[derive(Debug, Clone)]
pub struct Seconds(Histogram);

impl Default for Seconds {
    fn default() -> Self {
        Self(Self::histogram())
    }
}

impl Seconds {
    /// Creates a histogram with the bucket bounds that all histograms here share.
    pub(super) fn histogram() -> Histogram {
        Histogram::new(BUCKETS_S)
    }

    fn observe(&self, time: Duration) {
        self.0.observe(time.as_secs_f64());
    }
}

impl ProxyMetrics {
    /// Adds the metrics to `registry` as `quorate_proxy_...`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("quorate_proxy");
        let Self {
            requests,
            in_flight,
            reading,
            retries,
            retries_refused,
            suspects_refused,
            ..
        } = self;
        registry.register(
            "requests",
            "Requests by outcome and status",
            requests.clone(),
        );
        registry.register(
            "in_flight_requests",
            "Requests in flight",
            in_flight.clone(),
        );
        registry.register(
            "reading_requests",
            "Requests whose body is still being received",
            reading.clone(),
        );
        registry.register(
            "ttft_seconds",
            "Time from a request's last byte to the first output of a stream: text, reasoning or a tool call",
            self.time_to_first_token.0.clone(),
        );
        registry.register(
            "duration_seconds",
            "Time from a request's head to the end of its response",
            self.duration.0.clone(),
        );
        registry.register("retries", "Retries on another backend", retries.clone());
        registry.register(
            "retries_refused",
            "Retries refused by the retry budget",
            retries_refused.clone(),
        );
        registry.register(
            "suspects_refused",
            "Requests refused because they broke two backends' connections",
            suspects_refused.clone(),
        );
        registry.register(
            "charges_unconfirmed",
            "Answers that ended although their charge was not committed in time, with users.charges = durable",
            self.charges_unconfirmed.clone(),
        );
        registry.register(
            "request_bytes",
            "Bytes of request bodies received",
            self.request_bytes.clone(),
        );
        registry.register(
            "answer_bytes",
            "Bytes of responses relayed to clients",
            self.answer_bytes.clone(),
        );
        self.models.register(registry);
        self.stages.register(registry);
        self.register_connections(registry);
        self.register_decisions_and_breaks(registry);
    }

    /// Counts a stream whose engine or router failed in the middle of its output.
    pub(in crate::proxy) fn stream_broke(&self, labels: &BreakLabels) {
        self.streams_broken.get_or_create(labels).inc();
        if let Some(fate) = labels.fate() {
            let counted = match fate {
                StreamFate::Continued => &self.recent.streams_continued,
                StreamFate::Lost => &self.recent.streams_lost,
            };
            counted.fetch_add(1, Relaxed);
        }
    }

    fn register_decisions_and_breaks(&self, registry: &mut Registry) {
        registry.register(
            "decisions_lost",
            "Decisions that were not written to disk, by reason: queue-full, disk",
            self.decisions_lost.clone(),
        );
        StreamBreak::begin(&self.streams_broken);
        registry.register(
            "streams_broken",
            "Streams whose backend failed in the middle of its output, by cause and result: continued, completed, or what prevented it",
            self.streams_broken.clone(),
        );
    }

    fn register_connections(&self, registry: &mut Registry) {
        let Self {
            connections,
            connections_evicted,
            connections_refused,
            tls_handshakes_failed,
            pool,
            ..
        } = self;
        registry.register(
            "connections",
            "Open client connections",
            connections.clone(),
        );
        registry.register(
            "connections_evicted",
            "Idle connections closed to make room for others",
            connections_evicted.clone(),
        );
        registry.register(
            "connections_refused",
            "Connections refused because their address is at its limit",
            connections_refused.clone(),
        );
        registry.register(
            "tls_handshakes_failed",
            "Connections that ended before their TLS handshake was complete",
            tls_handshakes_failed.clone(),
        );
        registry.register(
            "engine_connections_opened",
            "Connections opened to engines",
            pool.opened.clone(),
        );
        registry.register(
            "engine_connections_reused",
            "Requests sent over a reused engine connection",
            pool.reused.clone(),
        );
        registry.register(
            "engine_connections_reset",
            "Reused connections that the engine closed before it read the request, sent again over a new one",
            pool.reset.clone(),
        );
    }
}

/// Accounting of one request: counts it from creation to drop, and holds its resources until then.
/// If its future or body is dropped without an outcome, the client has left.
pub(in crate::proxy) struct RequestMetricsGuard {
    metrics: Arc<ProxyMetrics>,
    started: Instant,
    /// Time at which the request's body was complete; `None` before.
    read_at: Option<Instant>,
    outcome: RequestOutcome,
    code: u16,
    /// Code of the error sent to the client; `None` if none was sent.
    failure: Option<&'static str>,
    /// Cause of the failure, for the log and the trace; `None` if the request did not fail, or was
    /// refused.
    cause: Option<String>,
    /// Time from the request's last byte to the first output of a stream; `None` before, and without
    /// a stream.
    ttft: Option<Duration>,
    /// Record that receives the outcome, and its log; `None` before the body is parsed, or if no
    /// record is kept.
    record: Option<(Arc<RequestRecord>, Arc<DecisionLog>)>,
    /// Access log line of the request; `None` if the log is off.
    access: Option<AccessEntry>,
    /// Trace of the request; `None` without tracing.
    trace: Option<Arc<RequestTrace>>,
    stage: RequestStage,
    /// Guard that counts the request for its connection and address; `None` if a gateway asks.
    _request_guard: Option<ConnectionRequestGuard>,
    /// Guard that counts the request for its user; `None` before the user is known.
    counted: Option<UserRequestGuard>,
    /// Guard that counts the request in its model's retry budget; `None` before its first attempt.
    spending: Option<BudgetGuard>,
    /// Metrics of the model; `None` before the model is known.
    model: Option<Arc<ModelMeter>>,
    /// Claim on the request's id; `None` if the client chose none, or one in flight.
    request_id: Option<RequestIdGuard>,
}

/// Stage of a request, which determines the gauge that counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestStage {
    /// The body is arriving.
    Reading,
    /// The body is complete.
    UnderWay,
    /// The request is refused; neither gauge counts it.
    Refused,
}

impl RequestMetricsGuard {
    pub(in crate::proxy) fn open(
        metrics: &Arc<ProxyMetrics>,
        request_guard: Option<ConnectionRequestGuard>,
    ) -> Self {
        metrics.reading.inc();
        Self {
            metrics: Arc::clone(metrics),
            started: Instant::now(),
            read_at: None,
            outcome: RequestOutcome::ClientLeft,
            code: 0,
            failure: None,
            cause: None,
            ttft: None,
            record: None,
            access: None,
            trace: None,
            stage: RequestStage::Reading,
            _request_guard: request_guard,
            counted: None,
            spending: None,
            model: None,
            request_id: None,
        }
    }

    /// Marks the body as complete. Fails if `requests_max` are in flight already.
    pub(in crate::proxy) fn is_read(&mut self, requests_max: usize) -> Result<(), ProxyError> {
        let before = self.metrics.in_flight.inc();
        self.metrics.reading.dec();
        self.stage = RequestStage::UnderWay;
        self.read_at = Some(Instant::now());
        match usize::try_from(before) {
            Ok(before) if before < requests_max => Ok(()),
            Ok(_) | Err(_) => Err(ProxyError::Overloaded),
        }
    }

    /// Counts the request for its user.
    pub(in crate::proxy) fn counts(&mut self, counted: UserRequestGuard) {
        self.counted = Some(counted);
    }

    /// Counts the request in the metrics of its model.
    pub(in crate::proxy) fn is_for(&mut self, model: Arc<ModelMeter>) {
        self.model = Some(model);
    }

    /// Keeps the claim on the request's id until the request has ended.
    pub(in crate::proxy) fn claims(&mut self, request_id: Option<RequestIdGuard>) {
        self.request_id = request_id;
    }

    /// Sets the record in `log` that receives the outcome; `None` if no record is kept.
    pub(in crate::proxy) fn records(
        &mut self,
        record: Option<Arc<RequestRecord>>,
        log: &Arc<DecisionLog>,
    ) {
        self.record = record.map(|record| (record, Arc::clone(log)));
    }

    /// Sets the access log entry that is written at the end; `None` if the log is off.
    pub(in crate::proxy) fn logs(&mut self, access: Option<AccessEntry>) {
        self.access = access;
    }

    /// Sets the trace that ends with the request; `None` without tracing.
    pub(in crate::proxy) fn traces(&mut self, trace: Option<Arc<RequestTrace>>) {
        self.trace = trace;
    }

    /// Sets the code of the error sent to the client.
    pub(in crate::proxy) fn fails(&mut self, code: &'static str) {
        self.failure = Some(code);
    }

    /// Sets the cause of the failure, which only operators see.
    pub(in crate::proxy) fn fails_because(&mut self, cause: String) {
        self.cause = Some(cause);
    }

    /// Counts the request in its model's retry budget.
    pub(in crate::proxy) fn spends(&mut self, spending: BudgetGuard) {
        self.spending = Some(spending);
    }

    /// Whether the model's retry budget allows another engine.
    pub(in crate::proxy) fn may_retry(&mut self) -> bool {
        self.spending.as_mut().is_none_or(BudgetGuard::may_retry)
    }

    /// Marks the request as refused. From then on it counts neither as reading nor in flight.
    pub(in crate::proxy) fn is_refused(&mut self) {
        self.leave_stage();
        self.stage = RequestStage::Refused;
    }

    fn leave_stage(&self) {
        match self.stage {
            RequestStage::Reading => drop(self.metrics.reading.dec()),
            RequestStage::UnderWay => drop(self.metrics.in_flight.dec()),
            RequestStage::Refused => {}
        }
    }

    pub(in crate::proxy) fn metrics(&self) -> &ProxyMetrics {
        &self.metrics
    }

    /// Sets the status sent to the client.
    pub(in crate::proxy) fn answered(&mut self, status: StatusCode) {
        self.code = status.as_u16();
    }

    /// Records the first data of an engine's response body.
    pub(in crate::proxy) fn first_byte(&self) {
        if let Some(trace) = &self.trace {
            trace.first_byte();
        }
    }

    /// Records the first output of a stream.
    pub(in crate::proxy) fn first_token(&mut self) {
        if let Some(read_at) = self.read_at {
            let ttft = read_at.elapsed();
            self.ttft = Some(ttft);
            self.metrics.time_to_first_token.observe(ttft);
            self.metrics.recent.ttft.add(ttft);
            if let Some(model) = &self.model {
                model.ttft.observe(ttft.as_secs_f64());
            }
        }
    }

    /// Records the first dispatch to a backend, after the request `waited` for admission.
    pub(in crate::proxy) fn routed(&self, waited: Duration) {
        if let Some(read_at) = self.read_at {
            let took = read_at.elapsed().saturating_sub(waited);
            self.metrics.recent.routing.add(took);
        }
    }

    pub(in crate::proxy) fn ends(&mut self, outcome: RequestOutcome) {
        self.outcome = outcome;
    }
}

impl Drop for RequestMetricsGuard {
    fn drop(&mut self) {
        if let Some((record, log)) = &self.record {
            // Before the request counts as over, so that its record is complete by then.
            record.ends(self.outcome.label(), self.code, self.failure);
            log.ended(record);
        }
        self.leave_stage();
        let Self {
            metrics,
            started,
            outcome,
            code,
            ..
        } = self;
        let duration = started.elapsed();
        metrics.duration.observe(duration);
        metrics.recent.ended.fetch_add(1, Relaxed);
        if outcome.is_failure() {
            metrics.recent.failed.fetch_add(1, Relaxed);
        }
        if let Some(model) = &self.model {
            model.ends(*outcome, duration);
        }
        let labels = RequestLabels {
            outcome: *outcome,
            code: StatusLabel::from(*code),
        };
        metrics.requests.get_or_create(&labels).inc();
        if let Some(trace) = &self.trace {
            let failure = outcome.is_failure().then(|| {
                let cause = self.cause.as_deref();
                cause.unwrap_or_else(|| outcome.label())
            });
            trace.end(&EndedTrace {
                outcome: outcome.label(),
                status: *code,
                code: self.failure,
                failure,
                is_finished: *outcome == RequestOutcome::Finished,
            });
        }
        if let Some(access) = &self.access {
            access.end(&EndedAccess {
                outcome: self.outcome.label(),
                is_spoiled: self.code < 400 && self.outcome.is_failure(),
                status: self.code,
                code: self.failure,
                cause: self.cause.as_deref(),
                ttft: self.ttft,
                duration,
                record: self.record.as_ref().map(|(record, _)| &**record),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_metrics_have_the_documented_names() {
        let metrics = Arc::new(ProxyMetrics::default());
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        drop(RequestMetricsGuard::open(&metrics, None));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        let line = "quorate_proxy_requests_total{outcome=\"client-left\",code=\"0\"} 1\n";
        assert!(page.contains(line), "{page}");
    }

    #[tokio::test(start_paused = true)]
    async fn time_to_first_token_starts_at_the_requests_last_byte() {
        let metrics = Arc::new(ProxyMetrics::default());
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut request_metrics = RequestMetricsGuard::open(&metrics, None);
        tokio::time::advance(Duration::from_secs(3)).await;
        request_metrics.is_read(1).unwrap();
        tokio::time::advance(Duration::from_secs(2)).await;
        request_metrics.first_token();
        drop(request_metrics);
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        for line in ["ttft_seconds_sum 2.0", "duration_seconds_sum 5.0"] {
            assert!(page.contains(&format!("quorate_proxy_{line}\n")), "{page}");
        }
    }
}
