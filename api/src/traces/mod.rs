//! Traces: what OTLP collectors receive about requests (ADR 0090).
//!
//! A sampled request is a span with children: `admission`, `decide` and `attempt`, one each for
//! every backend that it is tried on. Spans wait in a bounded queue for a task of their own; where
//! the collector is slow or gone they are dropped and counted, and no request waits for them
//! (I125). Without `[tracing]` a request has no trace, and its `traceparent` passes as it came.
//!
//! A span never has a prompt, a key, an answer or a user (I17).

mod attempt;
mod clock;
mod context;
mod export;
mod request;

pub use attempt::{AttemptTrace, TracedEnd};
pub use context::TraceHeaders;
pub(crate) use context::told_trace_id;
pub use export::{SpanExport, TracingError, TracingMetrics, TracingSettings};
pub(crate) use request::{EndedTrace, TracedDecision, TracedQuestion};
pub use request::{RequestTrace, Tracer, WaitTrace};
