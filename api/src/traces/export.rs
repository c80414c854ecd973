//! Export of spans to the collector: a bounded queue, and the task that drains it.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::tonic_types::transport::ClientTlsConfig;
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter, WithExportConfig as _, WithTonicConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    Sampler, SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor,
};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use state::ids::ReplicaId;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::request::Tracer;
use crate::base::log_rate_limit::LogRateLimit;

/// Maximum number of spans that wait for the collector.
const SPANS_WAITING_MAX: usize = 8192;
/// Maximum number of spans in one call to the collector.
const BATCH_SPANS_MAX: usize = 512;
/// Maximum time for which spans wait for others to share a call.
const BATCH_EVERY: Duration = Duration::from_secs(1);
/// Timeout of one call to the collector.
const CALL_MAX: Duration = Duration::from_secs(10);
/// Time for which a stopping replica waits for the collector.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// Minimum interval of log lines about failed calls.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Settings of tracing: the collector, and which requests to sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingSettings {
    /// URL of the collector's gRPC listener.
    pub endpoint: String,
    /// Sampled requests per million, among those whose clients do not decide it.
    pub sample_ppm: u32,
    /// Id of this replica.
    pub replica: ReplicaId,
    /// Name of the cluster.
    pub cluster: String,
}

/// Error in the configuration of tracing.
#[derive(Debug, thiserror::Error)]
#[error("tracing.otlp_endpoint: {0}")]
pub struct TracingError(#[from] ExporterBuildError);

/// Counters of exported and of dropped spans.
#[derive(Debug, Clone, Default)]
pub struct TracingMetrics {
    /// Spans accepted by the collector.
    pub exported: Counter,
    /// Spans that did not reach the collector.
    pub dropped: Family<DroppedLabels, Counter>,
}

/// Labels of dropped spans.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DroppedLabels {
    /// `queue-full` if too many were waiting, `export-failed` if the call failed or timed out.
    pub reason: &'static str,
}

const QUEUE_FULL: &str = "queue-full";
const EXPORT_FAILED: &str = "export-failed";

impl TracingMetrics {
    /// Adds the metrics to `registry` as `quorate_tracing_...`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("quorate_tracing");
        registry.register(
            "spans_exported",
            "Spans that the OTLP collector accepted",
            self.exported.clone(),
        );
        registry.register(
            "spans_dropped",
            "Spans dropped because the queue was full or a call to the OTLP collector failed",
            self.dropped.clone(),
        );
        for reason in [QUEUE_FULL, EXPORT_FAILED] {
            // Both series exist from the start.
            drop(self.dropped.get_or_create(&DroppedLabels { reason }));
        }
    }

    fn drop_spans(&self, reason: &'static str, spans: usize) {
        let dropped = self.dropped.get_or_create(&DroppedLabels { reason });
        dropped.inc_by(spans as u64);
    }
}

/// Queue that accepts finished spans of requests without waiting.
#[derive(Debug)]
struct SpanQueue {
    waiting: mpsc::Sender<SpanData>,
    metrics: TracingMetrics,
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        if self.waiting.try_send(span).is_err() {
            self.metrics.drop_spans(QUEUE_FULL, 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Task that sends spans to the collector.
pub struct SpanExport {
    waiting: mpsc::Receiver<SpanData>,
    exporter: SpanExporter,
    metrics: TracingMetrics,
    warnings: LogRateLimit,
    endpoint: String,
}

impl SpanExport {
    /// Creates the tracer and the export that must [run](Self::run) beside it. Must be called
    /// within a tokio runtime. Connects when the first spans are sent.
    ///
    /// # Errors
    /// Fails if the endpoint is not a URL.
    pub fn new(
        settings: &TracingSettings,
        metrics: TracingMetrics,
    ) -> Result<(Tracer, Self), TracingError> {
        let endpoint = &settings.endpoint;
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(CALL_MAX);
        let exporter = match endpoint.starts_with("https:") {
            true => exporter.with_tls_config(ClientTlsConfig::new().with_native_roots()),
            false => exporter,
        };
        let mut exporter = exporter.build()?;
        let resource = resource(settings);
        exporter.set_resource(&resource);
        let (sender, waiting) = mpsc::channel(SPANS_WAITING_MAX);
        let queue = SpanQueue {
            waiting: sender,
            metrics: metrics.clone(),
        };
        let share = f64::from(settings.sample_ppm) / 1e6;
        let by_share = Sampler::TraceIdRatioBased(share);
        let provider = SdkTracerProvider::builder()
            .with_span_processor(queue)
            .with_sampler(Sampler::ParentBased(Box::new(by_share)))
            .with_resource(resource)
            .build();
        let export = Self {
            waiting,
            exporter,
            metrics,
            warnings: LogRateLimit::new(1, WARN_EVERY),
            endpoint: endpoint.clone(),
        };
        Ok((Tracer(provider.tracer("quorate")), export))
    }

    /// Sends spans until `stop`, and then the waiting ones for a short time.
    pub async fn run(mut self, stop: CancellationToken) {
        let late = async {
            stop.cancelled().await;
            sleep(LEAVE_MAX).await;
        };
        tokio::select! {
            biased;
            () = self.carry(&stop) => {}
            () = late => {}
        }
    }

    async fn carry(&mut self, stop: &CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled(), if !self.waiting.is_closed() => self.waiting.close(),
                taken = self.waiting.recv_many(&mut batch, BATCH_SPANS_MAX) => {
                    if taken == 0 {
                        return;
                    }
                    self.fill(&mut batch, stop).await;
                    self.export(std::mem::take(&mut batch)).await;
                }
            }
        }
    }

    /// Adds spans that end within [`BATCH_EVERY`] to the batch, until it is full.
    async fn fill(&mut self, batch: &mut Vec<SpanData>, stop: &CancellationToken) {
        let until = Instant::now() + BATCH_EVERY;
        while batch.len() < BATCH_SPANS_MAX {
            let room = BATCH_SPANS_MAX - batch.len();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                taken = timeout_at(until, self.waiting.recv_many(batch, room)) => {
                    if !taken.is_ok_and(|taken| taken > 0) {
                        return;
                    }
                }
            }
        }
    }

    async fn export(&self, batch: Vec<SpanData>) {
        let spans = batch.len();
        let why = match timeout(CALL_MAX, self.exporter.export(batch)).await {
            Ok(Ok(())) => {
                self.metrics.exported.inc_by(spans as u64);
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no response in time".to_owned(),
        };
        self.metrics.drop_spans(EXPORT_FAILED, spans);
        if let Some(suppressed) = self.warnings.try_acquire() {
            let endpoint = &*self.endpoint;
            tracing::warn!(
                endpoint,
                spans,
                error = why,
                suppressed,
                "could not export spans; requests are served without tracing"
            );
        }
    }
}

/// Returns the attributes of this replica as the source of spans.
fn resource(settings: &TracingSettings) -> Resource {
    Resource::builder_empty()
        .with_attributes([
            KeyValue::new("service.name", "quorate"),
            KeyValue::new("service.namespace", settings.cluster.clone()),
            KeyValue::new("service.instance.id", i64::from(settings.replica.0)),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        ])
        .build()
}
