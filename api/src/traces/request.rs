//! The span of a request and those of its stages, but for attempts (`attempt.rs`).
//!
//! All times are of one clock: the moment a request came, and what has passed since on the
//! monotonic clock, so that no child begins before its parent.

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

/// Makes the traces of requests.
#[derive(Debug, Clone)]
pub struct Tracer(pub(super) SdkTracer);

/// A request's part of a trace.
#[derive(Debug)]
pub struct RequestTrace {
    tracer: SdkTracer,
    context: SpanContext,
    /// Whether the client's `tracestate` is of this trace.
    keeps_state: bool,
    clock: TraceClock,
    span: Mutex<Span>,
}

/// What a request asks for, in the words of OpenTelemetry's conventions for generative AI.
pub(crate) struct TracedQuestion<'a> {
    /// Of the data plane.
    pub(crate) path: &'a str,
    pub(crate) model: &'a str,
    pub(crate) tokens_max: Option<u32>,
    pub(crate) choices: u32,
    pub(crate) is_stream: bool,
    /// Prompt tokens, as far as they are known.
    pub(crate) tokens: u32,
}

/// Where a request goes, and since when that was being decided.
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

/// How a request ended.
pub(crate) struct EndedTrace<'a> {
    pub(crate) outcome: &'static str,
    /// 0: its client left before it was told one.
    pub(crate) status: u16,
    /// Code of the error it was told.
    pub(crate) code: Option<&'static str>,
    /// Why it failed; `None`: it did not.
    pub(crate) failure: Option<&'a str>,
    /// Whether its client has taken all of an answer.
    pub(crate) is_finished: bool,
}

impl Tracer {
    /// A request that came. `shown` is its path as logs show it.
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
    /// Whether collectors are told of it.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.context.is_sampled()
    }

    /// The trace.
    pub(crate) fn trace_id(&self) -> TraceId {
        self.context.trace_id()
    }

    /// What an engine is told whose part in it is no attempt.
    pub(crate) fn headers(&self) -> TraceHeaders {
        TraceHeaders::of(&self.context, self.keeps_state)
    }

    /// It was understood.
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
        if asked.choices > 1 {
            let choices = i64::from(asked.choices);
            span.set_attribute(KeyValue::new("gen_ai.request.choice.count", choices));
        }
    }

    /// It asks for a backend, and may have to wait; `None`: collectors are told nothing.
    pub(crate) fn waits(&self) -> Option<WaitTrace> {
        let now = Instant::now();
        let span = self.child("admission", SpanKind::Internal, now)?;
        Some(WaitTrace {
            span,
            clock: self.clock,
            is_over: false,
        })
    }

    /// Its backend was chosen.
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

    /// It goes to a backend: to answer it, or to compute its prompt. `None`: collectors are told
    /// nothing.
    pub(crate) fn attempts(&self, backend: &str, stage: &'static str) -> Option<AttemptTrace> {
        let now = Instant::now();
        let mut span = self.child("attempt", SpanKind::Client, now)?;
        span.set_attributes([
            KeyValue::new("quorate.backend", backend.to_owned()),
            KeyValue::new("quorate.stage", stage),
        ]);
        Some(AttemptTrace::new(span, self.clock, self.keeps_state))
    }

    /// The answer begins.
    pub(crate) fn first_byte(&self) {
        if self.is_sampled() {
            let now = self.clock.at(Instant::now());
            let mut span = self.lock();
            span.add_event_with_timestamp("first_byte", now, Vec::new());
        }
    }

    /// It is over.
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

    /// A child that begins at `began`; `None`: collectors are told nothing.
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

/// A request on its way to a backend. Dropped before that, its client has left.
#[derive(Debug)]
pub struct WaitTrace {
    span: Span,
    clock: TraceClock,
    is_over: bool,
}

impl WaitTrace {
    /// It may go, and where to is decided from `at` on.
    pub(crate) fn admitted(mut self, at: Instant) {
        self.end("admitted", at);
    }

    /// It has no backend.
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

/// What a path is for, as the conventions name it.
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
