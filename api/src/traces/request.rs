//! The span of a request and those of its stages, except for attempts (`attempt.rs`).
//!
//! All times come from one clock: the arrival of the request plus the elapsed time on the monotonic
//! clock. No child therefore begins before its parent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{HeaderMap, Method};
use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, TraceId,
    Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{SdkTracer, Span};
use tokio::time::Instant;

use super::attempt::AttemptTrace;
use super::clock::{TraceClock, number};
use super::context::{TraceHeaders, told_context};

/// Creator of request traces.
#[derive(Debug, Clone)]
pub struct Tracer(pub(super) SdkTracer);

/// Trace of a request, with its span.
#[derive(Debug)]
pub struct RequestTrace {
    tracer: SdkTracer,
    context: SpanContext,
    /// Whether the client's `tracestate` belongs to this trace.
    keeps_state: bool,
    clock: TraceClock,
    span: Mutex<Span>,
}

/// A request's attributes, named as in OpenTelemetry's conventions for generative AI.
pub(crate) struct TracedQuestion<'a> {
    /// Path on the data plane.
    pub(crate) path: &'a str,
    pub(crate) model: &'a str,
    pub(crate) tokens_max: Option<u32>,
    pub(crate) choices: u32,
    pub(crate) is_stream: bool,
    /// Whether the request goes on with a stream of another replica.
    pub(crate) is_resumed: bool,
    /// Number of prompt tokens, as far as known.
    pub(crate) tokens: u32,
}

/// A routing decision with its time.
pub(crate) struct TracedDecision<'a> {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    pub(crate) backend: &'a str,
    pub(crate) policy: &'static str,
    pub(crate) reason: &'static str,
    pub(crate) matched: u32,
    pub(crate) total: u32,
    pub(crate) index: u64,
}

/// End of a request, as its span records it.
pub(crate) struct EndedTrace<'a> {
    pub(crate) outcome: &'static str,
    /// Status sent to the client; 0 if the client left earlier.
    pub(crate) status: u16,
    /// Code of the error sent to the client, if any.
    pub(crate) code: Option<&'static str>,
    /// Cause of the failure; `None` without one.
    pub(crate) failure: Option<&'a str>,
    /// Whether the client has received a complete response.
    pub(crate) is_finished: bool,
}

impl Tracer {
    /// Begins the trace of a request. `shown` is its path in the form used in logs.
    #[must_use]
    pub fn begin(
        &self,
        headers: &HeaderMap,
        (method, shown): (&Method, &str),
        id: &str,
    ) -> Arc<RequestTrace> {
        let told = told_context(headers);
        let clock = TraceClock::now();
        let builder = SpanBuilder::from_name("request")
            .with_kind(SpanKind::Server)
            .with_start_time(clock.time);
        let keeps_state = told.is_some();
        let parent = match told {
            Some(told) => Context::new().with_remote_span_context(told),
            None => Context::new(),
        };
        let mut span = self.0.build_with_context(builder, &parent);
        if span.is_recording() {
            span.update_name(format!("{method} {shown}"));
            span.set_attributes([
                KeyValue::new("http.request.method", method.as_str().to_owned()),
                KeyValue::new("url.path", shown.to_owned()),
                KeyValue::new("quorate.request_id", id.to_owned()),
            ]);
        }
        Arc::new(RequestTrace {
            tracer: self.0.clone(),
            context: span.span_context().clone(),
            keeps_state,
            clock,
            span: Mutex::new(span),
        })
    }
}

impl RequestTrace {
    /// Whether the trace is exported.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.context.is_sampled()
    }

    /// Returns the id of the trace.
    pub(crate) fn trace_id(&self) -> TraceId {
        self.context.trace_id()
    }

    /// Returns the trace headers for an engine outside attempts.
    pub(crate) fn headers(&self) -> TraceHeaders {
        TraceHeaders::of(&self.context, self.keeps_state)
    }

    /// Records the attributes of the parsed request.
    pub(crate) fn asks(&self, asked: &TracedQuestion<'_>) {
        if !self.is_sampled() {
            return;
        }
        let operation = operation(asked.path);
        let mut span = self.lock();
        span.update_name(format!("{operation} {}", asked.model));
        span.set_attributes([
            KeyValue::new("gen_ai.operation.name", operation),
            KeyValue::new("gen_ai.request.model", asked.model.to_owned()),
            KeyValue::new("gen_ai.request.stream", asked.is_stream),
            KeyValue::new("quorate.prompt_tokens", i64::from(asked.tokens)),
        ]);
        if let Some(tokens) = asked.tokens_max {
            span.set_attribute(KeyValue::new(
                "gen_ai.request.max_tokens",
                i64::from(tokens),
            ));
        }
        if asked.is_resumed {
            span.set_attribute(KeyValue::new("quorate.resumed", true));
        }
        if asked.choices > 1 {
            let choices = i64::from(asked.choices);
            span.set_attribute(KeyValue::new("gen_ai.request.choice.count", choices));
        }
    }

    /// Begins the span of the wait for a backend; `None` if the trace is not exported.
    pub(crate) fn waits(&self) -> Option<WaitTrace> {
        let now = Instant::now();
        let span = self.child("admission", SpanKind::Internal, now)?;
        Some(WaitTrace {
            span,
            clock: self.clock,
            is_over: false,
        })
    }

    /// Writes the span of a routing decision.
    pub(crate) fn decided(&self, decision: &TracedDecision<'_>) {
        let Some(mut span) = self.child("decide", SpanKind::Internal, decision.began) else {
            return;
        };
        span.set_attributes([
            KeyValue::new("quorate.backend", decision.backend.to_owned()),
            KeyValue::new("quorate.policy", decision.policy),
            KeyValue::new("quorate.reason", decision.reason),
            KeyValue::new("quorate.blocks.matched", i64::from(decision.matched)),
            KeyValue::new("quorate.blocks.total", i64::from(decision.total)),
            KeyValue::new("quorate.index", number(decision.index)),
        ]);
        span.end_with_timestamp(self.clock.at(decision.ended));
    }

    /// Begins the span of an attempt at `backend`, for the response or only for the prompt. Returns
    /// `None` if the trace is not exported.
    pub(crate) fn attempts(&self, backend: &str, stage: &'static str) -> Option<AttemptTrace> {
        let now = Instant::now();
        let mut span = self.child("attempt", SpanKind::Client, now)?;
        span.set_attributes([
            KeyValue::new("quorate.backend", backend.to_owned()),
            KeyValue::new("quorate.stage", stage),
        ]);
        Some(AttemptTrace::new(span, self.clock, self.keeps_state))
    }

    /// Records the beginning of the response body.
    pub(crate) fn first_byte(&self) {
        if self.is_sampled() {
            let now = self.clock.at(Instant::now());
            let mut span = self.lock();
            span.add_event_with_timestamp("first_byte", now, Vec::new());
        }
    }

    /// Ends the span of the request.
    pub(crate) fn end(&self, end: &EndedTrace<'_>) {
        if !self.is_sampled() {
            return;
        }
        let now = self.clock.at(Instant::now());
        let mut span = self.lock();
        span.set_attribute(KeyValue::new("quorate.outcome", end.outcome));
        if end.status > 0 {
            let status = i64::from(end.status);
            span.set_attribute(KeyValue::new("http.response.status_code", status));
        }
        if end.failure.is_some() || end.code.is_some() {
            let kind = end.code.unwrap_or(end.outcome);
            span.set_attribute(KeyValue::new("error.type", kind));
        }
        if let Some(failure) = end.failure {
            span.set_status(Status::error(failure.to_owned()));
        }
        if end.is_finished {
            span.add_event_with_timestamp("last_byte", now, Vec::new());
        }
        span.end_with_timestamp(now);
    }

    /// Creates a child that begins at `began`; `None` if the trace is not exported.
    fn child(&self, name: &'static str, kind: SpanKind, began: Instant) -> Option<Span> {
        if !self.is_sampled() {
            return None;
        }
        let builder = SpanBuilder::from_name(name)
            .with_kind(kind)
            .with_start_time(self.clock.at(began));
        let parent = Context::new().with_remote_span_context(self.context.clone());
        Some(self.tracer.build_with_context(builder, &parent))
    }

    fn lock(&self) -> MutexGuard<'_, Span> {
        self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Span of the wait for a backend. If it is dropped before its end, the client has left.
#[derive(Debug)]
pub struct WaitTrace {
    span: Span,
    clock: TraceClock,
    is_over: bool,
}

impl WaitTrace {
    /// Ends the wait. The choice of the backend begins at `at`.
    pub(crate) fn admitted(mut self, at: Instant) {
        self.end("admitted", at);
    }

    /// Ends the wait without a backend. `code` is that of the client's error.
    pub(crate) fn refused(mut self, code: &'static str) {
        self.span.set_attribute(KeyValue::new("error.type", code));
        self.end("refused", Instant::now());
    }

    fn end(&mut self, outcome: &'static str, at: Instant) {
        self.is_over = true;
        let outcome = KeyValue::new("quorate.outcome", outcome);
        self.span.set_attribute(outcome);
        self.span.end_with_timestamp(self.clock.at(at));
    }
}

impl Drop for WaitTrace {
    fn drop(&mut self) {
        if !self.is_over {
            self.end("client-left", Instant::now());
        }
    }
}

/// Returns the operation of a path, named as in OpenTelemetry's conventions.
fn operation(path: &str) -> &'static str {
    match path {
        "/v1/chat/completions" | "/v1/responses" | "/v1/messages" => "chat",
        "/v1/completions" => "text_completion",
        "/v1/embeddings" => "embeddings",
        "/v1/rerank" | "/rerank" => "rerank",
        "/v1/score" | "/score" => "score",
        "/tokenize" => "tokenize",
        "/detokenize" => "detokenize",
        _ => "other",
    }
}
