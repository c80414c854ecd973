//! The span of one attempt of a request at one backend.

use opentelemetry::KeyValue;
use opentelemetry::trace::{Span as _, Status};
use opentelemetry_sdk::trace::Span;
use tokio::time::Instant;

use super::clock::{TraceClock, number};
use super::context::TraceHeaders;

/// Span of an attempt. If it is dropped before its end, the client has left.
#[derive(Debug)]
pub struct AttemptTrace(Box<OpenTrace>);

#[derive(Debug)]
struct OpenTrace {
    span: Span,
    clock: TraceClock,
    keeps_state: bool,
    /// Whether the reason for a missing response is already recorded.
    has_failed: bool,
    is_over: bool,
}

/// End of an attempt, as its span records it.
#[derive(Debug, Clone, Copy)]
pub struct TracedEnd {
    /// Outcome as named in the admin API.
    pub outcome: &'static str,
    /// Whether the backend responded completely.
    pub is_whole: bool,
    /// Whether the backend is at fault.
    pub is_failure: bool,
    /// Prompt tokens, cached ones among them, and output tokens; `None` if unknown.
    pub tokens: Option<[u64; 3]>,
    /// Time of the end.
    pub at: Instant,
}

impl AttemptTrace {
    pub(super) fn new(span: Span, clock: TraceClock, keeps_state: bool) -> Self {
        Self(Box::new(OpenTrace {
            span,
            clock,
            keeps_state,
            has_failed: false,
            is_over: false,
        }))
    }

    /// Returns the trace headers for the backend.
    pub(crate) fn headers(&self) -> TraceHeaders {
        TraceHeaders::of(self.0.span.span_context(), self.0.keeps_state)
    }

    /// Records the status of the backend's response.
    pub(crate) fn answered(&mut self, status: u16) {
        let status = KeyValue::new("http.response.status_code", i64::from(status));
        self.0.span.set_attribute(status);
    }

    /// Records why there is no response.
    pub(crate) fn failed(&mut self, why: &'static str) {
        let span = &mut self.0.span;
        span.set_attribute(KeyValue::new("error.type", why));
        span.set_status(Status::error(why));
        self.0.has_failed = true;
    }

    /// Records the beginning of the response body.
    pub(crate) fn first_byte(&mut self, at: Instant) {
        let OpenTrace { span, clock, .. } = &mut *self.0;
        span.add_event_with_timestamp("first_byte", clock.at(at), Vec::new());
    }

    /// Ends the span.
    pub(crate) fn end(mut self, end: &TracedEnd) {
        self.close(end);
    }

    fn close(&mut self, end: &TracedEnd) {
        let OpenTrace {
            span,
            clock,
            has_failed,
            ..
        } = &mut *self.0;
        let at = clock.at(end.at);
        span.set_attribute(KeyValue::new("quorate.outcome", end.outcome));
        if let Some([prompt, cached, output]) = end.tokens {
            span.set_attributes([
                KeyValue::new("gen_ai.usage.input_tokens", number(prompt)),
                KeyValue::new("gen_ai.usage.cache_read.input_tokens", number(cached)),
                KeyValue::new("gen_ai.usage.output_tokens", number(output)),
            ]);
        }
        if end.is_whole {
            span.add_event_with_timestamp("last_byte", at, Vec::new());
        }
        if end.is_failure && !*has_failed {
            span.set_status(Status::error(end.outcome));
        }
        span.end_with_timestamp(at);
        self.0.is_over = true;
    }
}

impl Drop for AttemptTrace {
    fn drop(&mut self) {
        if !self.0.is_over {
            self.close(&TracedEnd {
                outcome: "client-left",
                is_whole: false,
                is_failure: false,
                tokens: None,
                at: Instant::now(),
            });
        }
    }
}
