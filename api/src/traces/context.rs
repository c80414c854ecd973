//! W3C trace context: the trace of a request, read from its headers and passed to engines.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// Header with the trace and the parent span of a request.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Header with further data of vendors about the same trace.
pub(crate) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Length of a `traceparent` of version 00, in bytes.
const PARENT_BYTES: usize = 55;
/// Maximum length of a `tracestate` in spans, in bytes. A longer one is still forwarded.
const STATE_BYTES_MAX: usize = 512;

/// Trace headers for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceHeaders {
    /// Value of `traceparent`: the trace, and the span of the attempt or request as parent.
    pub(super) parent: HeaderValue,
    /// Whether the client's `tracestate` belongs to the same trace.
    pub(super) keeps_state: bool,
}

impl TraceHeaders {
    pub(super) fn of(context: &SpanContext, keeps_state: bool) -> Self {
        let text = format!(
            "00-{}-{}-{:02x}",
            context.trace_id(),
            context.span_id(),
            context.trace_flags().to_u8(),
        );
        let parent = HeaderValue::from_str(&text).expect("hex digits are visible ascii");
        Self {
            parent,
            keeps_state,
        }
    }

    /// Replaces the client's trace headers in `headers`.
    pub(crate) fn put_into(&self, headers: &mut HeaderMap) {
        if !self.keeps_state {
            headers.remove(TRACESTATE);
        }
        headers.insert(TRACEPARENT, self.parent.clone());
    }
}

/// Returns the id of the client's trace; `None` if its header is missing or invalid.
pub(crate) fn client_trace_id(headers: &HeaderMap) -> Option<TraceId> {
    parent(headers).map(|(trace, ..)| trace)
}

/// Returns the client's span context; `None` if it is missing or invalid.
pub(super) fn told_context(headers: &HeaderMap) -> Option<SpanContext> {
    let (trace, span, flags) = parent(headers)?;
    Some(SpanContext::new(trace, span, flags, true, state(headers)))
}

/// Returns the trace, span and flags of `traceparent`; `None` if it is absent or invalid. Several
/// headers count as none (W3C Trace Context, section 3.2).
fn parent(headers: &HeaderMap) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut all = headers.get_all(TRACEPARENT).iter();
    let (Some(only), None) = (all.next(), all.next()) else {
        return None;
    };
    read_parent(only.to_str().ok()?.trim())
}

fn read_parent(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let known = text.get(..PARENT_BYTES)?;
    let mut fields = known.split('-');
    let mut field = |length: usize| {
        let field = fields.next()?;
        (field.len() == length && field.bytes().all(is_hex)).then_some(field)
    };
    let (version, trace, span, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
    let rest = &text[PARENT_BYTES..];
    // A later version may append more fields.
    let is_whole = rest.is_empty() || (version != "00" && rest.starts_with('-'));
    if version == "ff" || !is_whole {
        return None;
    }
    let trace = TraceId::from_hex(trace).ok()?;
    let span = SpanId::from_hex(span).ok()?;
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    let is_valid = trace != TraceId::INVALID && span != SpanId::INVALID;
    is_valid.then_some((trace, span, flags))
}

fn state(headers: &HeaderMap) -> TraceState {
    let fields = headers.get_all(TRACESTATE).iter();
    let fields: Option<Vec<&str>> = fields.map(|field| field.to_str().ok()).collect();
    let text = fields.unwrap_or_default().join(",");
    let state = (text.len() <= STATE_BYTES_MAX).then(|| text.parse().ok());
    state.flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn headers(fields: &[(HeaderName, &'static str)]) -> HeaderMap {
        let fields = fields.iter();
        let field = |(name, value): &(HeaderName, &'static str)| {
            (name.clone(), HeaderValue::from_static(value))
        };
        let mut headers = HeaderMap::new();
        for (name, value) in fields.map(field) {
            headers.append(name, value);
        }
        headers
    }

    #[test]
    fn traceparent_is_read_and_written_by_the_standard() {
        let told = headers(&[
            (TRACEPARENT, PARENT),
            (TRACESTATE, "a=1"),
            (TRACESTATE, "b=2"),
        ]);
        let context = told_context(&told).unwrap();
        assert!(context.is_sampled() && context.is_remote());
        assert_eq!(context.trace_state().header(), "a=1,b=2");
        let mut passed = told.clone();
        TraceHeaders::of(&context, true).put_into(&mut passed);
        assert_eq!(passed, told);
        TraceHeaders::of(&context, false).put_into(&mut passed);
        assert_eq!(passed, headers(&[(TRACEPARENT, PARENT)]));
    }

    #[test]
    fn an_invalid_traceparent_is_ignored() {
        for wrong in [
            "",
            "00-1-2-03",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0é",
        ] {
            assert_eq!(read_parent(wrong), None, "{wrong}");
        }
        let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-more";
        assert_eq!(read_parent(later), read_parent(PARENT));
        let twice = headers(&[(TRACEPARENT, PARENT), (TRACEPARENT, PARENT)]);
        assert_eq!(client_trace_id(&twice), None);
    }
}
