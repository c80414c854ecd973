//! Traces of requests for OTLP collectors.
//!
//! A sampled request is a span with the children `admission`, `decide` and `attempt`, one of each
//! per backend tried. Spans wait in a bounded queue for a separate task. If the collector is slow
//! or unreachable, they are dropped and counted, and no request waits for them (I125). Without
//! `[tracing]`, a request has no trace, and its `traceparent` is forwarded unchanged.
//!
//! A span never contains a prompt, a key, a response or a user (I17).

mod attempt;
mod clock;
mod context;
mod export;
mod request;

pub use attempt::{AttemptTrace, TracedEnd};
pub use context::TraceHeaders;
pub(crate) use context::client_trace_id;
pub use export::{SpanExport, TracingError, TracingMetrics, TracingSettings};
pub(crate) use request::{EndedTrace, TracedDecision, TracedQuestion};
pub use request::{RequestTrace, Tracer, WaitTrace};
