//! The access log: one line per completed request, or only per failed one, or none, as the config
//! says.
//!
//! Each line is written after the response, from data that the request holds anyway, so it does not
//! delay the request. It never contains a prompt, a key or a response (I17). For refusals, it
//! contains only the error code, because the message may quote the body.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Method, Uri};
use opentelemetry::trace::TraceId;

use super::request_record::{DecidedAttempt, RequestRecord};
use crate::base::log_rate_limit::LogRateLimit;
use crate::proxy::request::routes::shown_path;
use crate::proxy::settings::LoggedRequests;
use crate::routing::AttemptReport;

/// Log target of the lines, for filters.
pub const ACCESS_TARGET: &str = "quorate::access";

/// Maximum number of lines per [`ERROR_PERIOD`], separately for failures and for refusals.
const ERROR_LINES: u32 = 20;
/// Period of the limit [`ERROR_LINES`], which applies only if the log is restricted to errors.
const ERROR_PERIOD: Duration = Duration::from_secs(1);

/// Writer of the access log of one data plane.
pub(in crate::proxy) struct AccessLog {
    logged: LoggedRequests,
    /// Limiter of lines about failures: a status of 5xx, or a response that broke off or contained an
    /// error.
    failures: LogRateLimit,
    /// Limiter of lines about refusals: a status of 4xx.
    refusals: LogRateLimit,
}

/// A request in flight that may be logged when it ends.
pub(in crate::proxy) struct AccessEntry {
    log: Arc<AccessLog>,
    id: HeaderValue,
    method: Method,
    uri: Uri,
    /// Trace of the request; `None` if it has none.
    trace: Option<TraceId>,
}

/// Result of a request, as its line reports it.
pub(super) struct EndedAccess<'a> {
    /// Outcome as counted by `quorate_proxy_requests_total`.
    pub(in crate::proxy) outcome: &'static str,
    /// Whether the response broke off or contained an error, despite its status.
    pub(super) is_spoiled: bool,
    /// Status sent to the client; 0 if none was sent.
    pub(in crate::proxy) status: u16,
    /// Code of the error sent to the client, if any.
    pub(in crate::proxy) code: Option<&'static str>,
    /// Cause of the failure, if known.
    pub(in crate::proxy) cause: Option<&'a str>,
    /// Time from the request's last byte to the first output of a stream, if there was any.
    pub(super) ttft: Option<Duration>,
    /// Time from the request's head to the end of the response.
    pub(in crate::proxy) duration: Duration,
    /// Record of the request; `None` if it ended before it was parsed.
    pub(in crate::proxy) record: Option<&'a RequestRecord>,
}

impl AccessLog {
    pub(in crate::proxy) fn new(logged: LoggedRequests) -> Self {
        Self {
            logged,
            failures: LogRateLimit::new(ERROR_LINES, ERROR_PERIOD),
            refusals: LogRateLimit::new(ERROR_LINES, ERROR_PERIOD),
        }
    }

    /// Creates the entry of a request that begins; `None` if the log is off.
    pub(in crate::proxy) fn begin(
        self: &Arc<Self>,
        id: &HeaderValue,
        (method, uri): (&Method, &Uri),
        trace: impl FnOnce() -> Option<TraceId>,
    ) -> Option<AccessEntry> {
        (self.logged != LoggedRequests::Off).then(|| AccessEntry {
            log: Arc::clone(self),
            id: id.clone(),
            method: method.clone(),
            uri: uri.clone(),
            trace: trace(),
        })
    }

    /// Decides whether to log a request that ended this way. Returns the number of lines suppressed
    /// since the last one, or `None` to log nothing.
    fn try_acquire(&self, end: &EndedAccess<'_>) -> Option<u64> {
        match self.logged {
            LoggedRequests::Off => None,
            LoggedRequests::All => Some(0),
            LoggedRequests::Errors if end.is_failure() => self.failures.try_acquire(),
            LoggedRequests::Errors if end.status >= 400 => self.refusals.try_acquire(),
            LoggedRequests::Errors => None,
        }
    }
}

impl EndedAccess<'_> {
    fn is_failure(&self) -> bool {
        self.status >= 500 || self.is_spoiled
    }
}

/// Writes a line at the given level. Fields that are `None` are omitted.
macro_rules! line {
    ($level:ident, $entry:expr, $end:expr, $decided:expr, $suppressed:expr) => {
        tracing::$level!(
            target: ACCESS_TARGET,
            request_id = $entry.id.to_str().unwrap_or_default(),
            trace_id = $entry.trace.map(tracing::field::display),
            method = $entry.method.as_str(),
            path = shown_path($entry.uri.path()),
            status = $end.status,
            outcome = $end.outcome,
            code = $end.code,
            cause = $decided.cause,
            user = $decided.user,
            model = $decided.model,
            requested_model = $decided.requested,
            stream = $decided.stream,
            resumed = $decided.resumed,
            backend = $decided.backend,
            policy = $decided.policy,
            reason = $decided.reason,
            blocks_matched = $decided.blocks_matched,
            blocks_total = $decided.blocks_total,
            prompt_tokens = $decided.tokens.map(|it| it.prompt),
            cached_tokens = $decided.tokens.map(|it| it.cached),
            completion_tokens = $decided.tokens.map(|it| it.completion),
            waited_ms = $decided.waited.map(ms),
            ttft_ms = $end.ttft.map(ms),
            duration_ms = ms($end.duration),
            attempts = $decided.attempts,
            suppressed = Some($suppressed).filter(|count| *count > 0),
            "request"
        )
    };
}

impl AccessEntry {
    /// Writes the line of a completed request.
    pub(super) fn end(&self, end: &EndedAccess<'_>) {
        let Some(suppressed) = self.log.try_acquire(end) else {
            return;
        };
        let attempts = end.record.map(RequestRecord::attempts);
        let last = attempts.as_deref().and_then(|them| them.last());
        let cause = cause(end, last);
        let mut decided = DecidedFields {
            cause: cause.as_deref(),
            ..DecidedFields::default()
        };
        if let Some(record) = end.record {
            decided.user = Some(record.user.as_str());
            decided.model = Some(&record.model);
            decided.requested = record.requested.as_deref();
            decided.stream = Some(record.is_stream);
            decided.resumed = record.is_resumed.then_some(true);
            decided.blocks_total = Some(record.blocks);
            decided.attempts = attempts.as_deref().map(Vec::len);
        }
        if let Some(last) = last {
            decided.of(last);
        }
        if end.is_failure() {
            line!(warn, self, end, decided, suppressed);
        } else {
            line!(info, self, end, decided, suppressed);
        }
    }
}

/// Cause of a failure, and the fields of a line that only parsed requests have.
#[derive(Default)]
struct DecidedFields<'a> {
    cause: Option<&'a str>,
    user: Option<&'a str>,
    model: Option<&'a str>,
    /// Name that the request gives, if it is not the model's.
    requested: Option<&'a str>,
    stream: Option<bool>,
    /// `true`, or absent.
    resumed: Option<bool>,
    backend: Option<&'a str>,
    policy: Option<&'static str>,
    reason: Option<&'static str>,
    blocks_matched: Option<u32>,
    blocks_total: Option<u32>,
    tokens: Option<TokensUsed>,
    waited: Option<Duration>,
    attempts: Option<usize>,
}

impl<'a> DecidedFields<'a> {
    /// Sets the fields that come from the last attempt.
    fn of(&mut self, last: &'a DecidedAttempt) {
        let decision = &last.decision;
        self.backend = Some(&decision.name);
        self.policy = Some(decision.policy_name());
        self.reason = Some(decision.reason().label());
        self.blocks_matched = Some(decision.matched());
        self.waited = Some(last.waited);
        self.tokens = decision.outcome().map(TokensUsed::of);
    }
}

/// Token counts of an attempt, as its engine reported them or else as they were charged.
#[derive(Clone, Copy)]
struct TokensUsed {
    prompt: u64,
    cached: u64,
    completion: u64,
}

impl TokensUsed {
    fn of(report: &AttemptReport) -> Self {
        let [uncached, cached, output] = report.charged;
        match report.usage {
            Some(usage) => Self {
                prompt: usage.prompt_tokens,
                cached: usage.cached_tokens.unwrap_or(cached),
                completion: usage.completion_tokens,
            },
            None => Self {
                prompt: uncached + cached,
                cached,
                completion: output,
            },
        }
    }
}

/// Returns the cause of a failure, from the last attempt or else from the client's error; `None` if
/// the request did not fail and no cause is known.
fn cause(end: &EndedAccess<'_>, last: Option<&DecidedAttempt>) -> Option<String> {
    if !end.is_failure() {
        return end.cause.map(str::to_owned);
    }
    let decision = last.map(|last| &last.decision);
    let failure = decision.and_then(|decision| Some((decision.failure()?, decision.detail())));
    match (failure, end.cause) {
        (Some((failure, Some(detail))), _) => Some(format!("{failure}: {detail}")),
        (Some((failure, None)), _) => Some(failure.to_owned()),
        (None, Some(cause)) => Some(cause.to_owned()),
        (None, None) => Some(format!("the engine answered {}", end.status)),
    }
}

/// Converts `time` to milliseconds with a resolution of one microsecond, up to 71 minutes.
fn ms(time: Duration) -> f64 {
    let us = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    f64::from(us) / 1000.0
}
