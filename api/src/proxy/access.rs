//! The access log: one line per request, when it is over.
//!
//! A line is made of what the request held anyway, after its answer was written, so that it costs
//! the request nothing. It never has a prompt, a key or an answer (I17): of a refusal it has the
//! code only, as the message may quote the body.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Method, Uri};
use opentelemetry::trace::TraceId;

use super::request_record::{DecidedAttempt, RequestRecord};
use super::routes::shown_path;
use super::settings::LoggedRequests;
use crate::log_rate_limit::LogRateLimit;
use crate::routing::AttemptReport;

/// Target of the lines, for filters of the log.
pub const ACCESS_TARGET: &str = "quorate::access";

/// Of errors, the log has at most so many lines of either kind ...
const ERROR_LINES: u32 = 20;
/// ... in this time, unless it has a line of every request.
const ERROR_PERIOD: Duration = Duration::from_secs(1);

/// Writes the lines of one data plane.
pub(super) struct AccessLog {
    logged: LoggedRequests,
    /// Lines about failures: a 5xx, or an answer that broke off.
    failures: LogRateLimit,
    /// Lines about refusals: a 4xx.
    refusals: LogRateLimit,
}

/// A request that may leave a line.
pub(super) struct AccessEntry {
    log: Arc<AccessLog>,
    id: HeaderValue,
    method: Method,
    uri: Uri,
    /// The trace that it is part of; `None`: none.
    trace: Option<TraceId>,
}

/// How a request ended, as its line tells it.
pub(super) struct EndedAccess<'a> {
    /// As `quorate_proxy_requests_total` counts it.
    pub(super) outcome: &'static str,
    pub(super) is_broken_off: bool,
    /// Status its client was told; 0: none.
    pub(super) status: u16,
    /// Code of the error it was told.
    pub(super) code: Option<&'static str>,
    /// Why it failed.
    pub(super) cause: Option<&'a str>,
    /// From its last byte to the first one of the answer's body.
    pub(super) ttft: Option<Duration>,
    /// From its head to the end.
    pub(super) duration: Duration,
    /// `None`: it was answered before it was understood.
    pub(super) record: Option<&'a RequestRecord>,
}

impl AccessLog {
    pub(super) fn new(logged: LoggedRequests) -> Self {
        Self {
            logged,
            failures: LogRateLimit::new(ERROR_LINES, ERROR_PERIOD),
            refusals: LogRateLimit::new(ERROR_LINES, ERROR_PERIOD),
        }
    }

    /// A request that begins; `None` where none is logged.
    pub(super) fn begin(
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

    /// Whether there is a line about this end; how many were left out since the last one.
    fn may_say(&self, end: &EndedAccess<'_>) -> Option<u64> {
        match self.logged {
            LoggedRequests::Off => None,
            LoggedRequests::All => Some(0),
            LoggedRequests::Errors if end.is_failure() => self.failures.may_say(),
            LoggedRequests::Errors if end.status >= 400 => self.refusals.may_say(),
            LoggedRequests::Errors => None,
        }
    }
}

impl EndedAccess<'_> {
    fn is_failure(&self) -> bool {
        self.status >= 500 || self.is_broken_off
    }
}

/// Writes a line at one level. Fields that are `None` are left out.
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
            stream = $decided.stream,
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
    /// The request is over.
    pub(super) fn end(&self, end: &EndedAccess<'_>) {
        let Some(suppressed) = self.log.may_say(end) else {
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
            decided.stream = Some(record.is_stream);
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

/// What a line says of a request that was understood.
#[derive(Default)]
struct DecidedFields<'a> {
    cause: Option<&'a str>,
    user: Option<&'a str>,
    model: Option<&'a str>,
    stream: Option<bool>,
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
    /// Those of the last attempt.
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

/// Tokens of an attempt: as its engine reported, else as they were charged.
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

/// Why a request failed: by its last attempt, else by what its client was told.
fn cause(end: &EndedAccess<'_>, last: Option<&DecidedAttempt>) -> Option<String> {
    if !end.is_failure() {
        return None;
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

/// Milliseconds with their microseconds.
fn ms(time: Duration) -> f64 {
    let us = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    f64::from(us) / 1000.0
}
