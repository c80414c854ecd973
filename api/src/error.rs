//! The forms of this crate's HTTP error responses: OpenAI's on the data plane, except on
//! Anthropic's paths (`proxy/dialect.rs`), and problem+json (RFC 9457) on the admin API.
//!
//! A failure of the data plane is a [`ProxyError`]. Only [`rescue`] decides its status, its error
//! code and whether the client's SDK should retry. Details for operators only (addresses,
//! operating-system errors) are logged where they occur and never reach clients.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, ALLOW, CONTENT_TYPE, RETRY_AFTER, UPGRADE};
use http::{HeaderName, HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

/// Response header with which OpenAI's SDKs decide whether to retry a request.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Default `retry-after` of temporary failures, in seconds.
const UNAVAILABLE_RETRY_AFTER_S: u32 = 1;

/// An error of the admin API in the form of RFC 9457.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Problem {
    /// Stable URI of the kind of problem, relative to the API: `/problems/no-quorum`.
    #[serde(rename = "type")]
    pub type_: String,
    /// Description of the kind of problem, the same for every occurrence.
    pub title: String,
    /// HTTP status.
    #[serde(serialize_with = "status_as_number")]
    #[schemars(with = "u16", range(min = 400, max = 599))]
    pub status: StatusCode,
    /// Description of this occurrence; absent if there is nothing to add to `title`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Further members, such as `outcome` or `index`.
    #[serde(flatten)]
    #[schemars(with = "Map<String, Value>")]
    pub members: Box<Map<String, Value>>,
    /// Value of `retry-after`, in seconds; `None`: the default of the status.
    #[serde(skip)]
    retry_after_s: Option<u32>,
}

fn status_as_number<S: serde::Serializer>(
    status: &StatusCode,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_u16(status.as_u16())
}

impl Problem {
    /// Creates a problem of the kind `name`, the last part of its type, such as `no-quorum`.
    #[must_use]
    pub fn new(status: StatusCode, name: &str, title: impl Into<String>) -> Self {
        Self {
            type_: format!("/problems/{name}"),
            title: title.into(),
            status,
            detail: None,
            members: Box::default(),
            retry_after_s: None,
        }
    }

    /// Sets the `retry-after` header, in seconds. Without it, the statuses that ask for a retry,
    /// 429 and 503, get one second.
    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    /// Adds a description of this occurrence.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Adds a further member.
    #[must_use]
    pub fn member(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.members.insert(name.to_owned(), value.into());
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = serde_json::to_vec(&self).expect("strings, numbers and JSON values serialise");
        let content_type = HeaderValue::from_static("application/problem+json");
        let mut response = (self.status, [(CONTENT_TYPE, content_type)], body).into_response();
        let is_passing = matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        let usual = is_passing.then_some(UNAVAILABLE_RETRY_AFTER_S);
        if let Some(seconds) = self.retry_after_s.or(usual) {
            let seconds = HeaderValue::from(seconds);
            response.headers_mut().insert(RETRY_AFTER, seconds);
        }
        response
    }
}

/// Reason why the data plane cannot return a backend's response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// The request is invalid: syntax, types, missing fields, or a body shorter than announced.
    #[error("{message}")]
    BadRequest {
        /// What is wrong and what was expected.
        message: String,
        /// Field or header at fault, if known.
        param: Option<String>,
    },
    /// A required key is missing or unknown.
    #[error("missing or unknown API key")]
    BadKey,
    /// The key has expired, or its secret was replaced and the grace period is over.
    #[error("this API key has expired")]
    ExpiredKey,
    /// The key does not allow the path.
    #[error("this API key may not use this path; it may use {allowed}")]
    PathNotAllowed {
        /// Paths that the key allows.
        allowed: String,
    },
    /// The key, or its user, does not allow the model.
    #[error("this API key or user may not use the model `{model}`; it may use {allowed}")]
    ModelNotAllowed {
        /// Model of the request, shortened.
        model: String,
        /// Models that the key and its user allow.
        allowed: String,
    },
    /// This replica cannot tell whether the key was revoked since its list was last current.
    #[error("this replica is cut off from its cluster and cannot check API keys; use another one")]
    StaleKeys,
    /// The path is unknown.
    #[error("no route for {method} {path}")]
    UnknownRoute {
        /// Method of the request.
        method: String,
        /// Path of the request, shortened.
        path: String,
    },
    /// The path belongs to an OpenAI API whose server stores objects between requests, such as
    /// files, batches or assistants. The router stores none.
    #[error("{kept} are not stored here: send complete requests instead")]
    KeepsNothing {
        /// Kind of the objects, as in the path.
        kept: &'static str,
    },
    /// The path does not allow this method.
    #[error("method not allowed on this path; use {allowed}")]
    WrongMethod {
        /// Allowed methods, as listed in the `allow` header.
        allowed: &'static str,
    },
    /// No registered backend serves the model.
    #[error("the model `{model}` does not exist")]
    UnknownModel {
        /// Model of the request, shortened.
        model: String,
    },
    /// No backend accepts a prompt of this length. Clients look for this wording.
    #[error(
        "This model's maximum context length is {tokens_max} tokens. However, your request has \
         about {tokens} input tokens. Please reduce the length of the input."
    )]
    ContextTooLong {
        /// Length of the prompt in tokens, estimated if unknown.
        tokens: u64,
        /// Length of the longest acceptable prompt, in tokens.
        tokens_max: u64,
    },
    /// The content encoding of the body is not supported.
    #[error(
        "content-encoding {encoding:?} is not supported; send gzip or zstd, or the body uncompressed"
    )]
    UnsupportedEncoding {
        /// The encoding, shortened.
        encoding: String,
    },
    /// The client requests a websocket.
    #[error("websockets are not supported; use POST with `\"stream\": true` instead")]
    NoWebsockets,
    /// The client requests a websocket on a path that it also uses over HTTP.
    #[error("websockets are not supported; use POST over HTTP instead")]
    HttpOnly,
    /// An engine may serve the path, but the config does not list it.
    #[error("no route for {path}; if the engines serve it, list it in requests.extra_paths")]
    UnlistedPath {
        /// Path of the request.
        path: &'static str,
    },
    /// No backend has stored a response with this id.
    #[error("no response with id {id:?} is stored")]
    UnknownResponse {
        /// Id in the request's path.
        id: String,
    },
    /// The body exceeds the limit.
    #[error("the body is larger than {bytes_max} bytes")]
    BodyTooLarge {
        /// Limit, in bytes.
        bytes_max: u64,
    },
    /// The client stopped sending its body.
    #[error("the body did not arrive in time")]
    BodyTimeout,
    /// Backends serve the model, but none of them is healthy.
    #[error("no healthy backend serves this model")]
    NoneHealthy,
    /// The user has reached a rate limit.
    #[error("rate limit reached for this user: {limit}")]
    OverLimit {
        /// Name of the limit, such as `requests per window`.
        limit: &'static str,
        /// Time until there is room again, in milliseconds.
        retry_after_ms: u64,
    },
    /// The user has used up a budget.
    #[error("this user's budget of tokens for this {period} (UTC) is used up")]
    OverBudget {
        /// `day` or `month`.
        period: &'static str,
        /// Time until the period ends, in milliseconds.
        retry_after_ms: u64,
    },
    /// The client's address has reached its limit of requests in flight.
    #[error("too many concurrent requests from this client address")]
    AddressAtLimit,
    /// The user has reached the limit of requests in flight at this replica.
    #[error("too many concurrent requests of this user at this replica")]
    UserAtLimit,
    /// The request has an unsupported `expect` header.
    #[error("unsupported `expect` header; only `100-continue` is supported")]
    BadExpectation,
    /// The request broke two connections to backends within a minute, without an answer in between.
    #[error(
        "this request broke two connections to backends within a minute and is refused for a minute"
    )]
    BreaksBackends,
    /// The queue of this model is full.
    #[error("every backend is at its limit and the queue of this model is full")]
    QueueFull {
        /// Time until a retry makes sense, in milliseconds.
        retry_after_ms: u64,
    },
    /// The predicted wait exceeds the longest acceptable one.
    #[error(
        "every backend is at its limit; the predicted wait is {}.{} s, the longest acceptable {}.{} s",
        wait_ms / 1000, wait_ms / 100 % 10, wait_ms_max / 1000, wait_ms_max / 100 % 10
    )]
    TooLate {
        /// Predicted wait, in milliseconds.
        wait_ms: u64,
        /// Longest acceptable wait, in milliseconds.
        wait_ms_max: u64,
        /// Time until a retry makes sense, in milliseconds.
        retry_after_ms: u64,
    },
    /// The request has waited for a backend for the maximum time.
    #[error("every backend is at its limit, and none became available in time")]
    WaitedTooLong {
        /// Time until a retry makes sense, in milliseconds.
        retry_after_ms: u64,
    },
    /// This replica is shutting down, and no backend has become available for the waiting request.
    #[error("this replica is shutting down; use another one")]
    Leaving,
    /// Backends serve the model, but the gateway offers none of their endpoints.
    #[error("no backend of this model is among the endpoints that the gateway offers")]
    NoneOffered,
    /// Backends serve the model, but none has an endpoint, and a gateway asks.
    #[error(
        "the URL of each backend of this model has a host name or a path; a gateway can send requests \
         only to an address and a port"
    )]
    NoEndpoint,
    /// Backends are healthy, but none has the requested labels.
    #[error("no healthy backend of this model has the requested labels")]
    NoneSelected,
    /// The user's cached blocks must be isolated, and no healthy backend isolates them.
    #[error("no healthy backend of this model isolates this user's cached prompts")]
    NoneIsolating,
    /// The model's backends separate prefill and decode, and cannot do so on this path.
    #[error(
        "the backends of this model separate prefill and decode, which is not possible for this request; \
         use /v1/chat/completions or /v1/completions with a single prompt and choice"
    )]
    NotSeparable,
    /// The model's decode backends need a prefill backend, and none is healthy.
    #[error("this model has no healthy prefill backend")]
    NoPrefill,
    /// The user's cached blocks must be isolated, and backends cannot isolate them on this path.
    #[error(
        "this user's cached prompts are isolated, which engines do not support on this path; \
         use /v1/chat/completions, /v1/completions or /v1/responses"
    )]
    PathNotIsolated,
    /// This replica has no state to route by: it is in no cluster, or has not caught up with it.
    #[error("this replica is starting and does not know its cluster's models yet")]
    Starting,
    /// This replica has reached its limit of requests.
    #[error("this replica has too many requests in flight")]
    Overloaded,
    /// This replica lacks descriptors or ports for a connection to a backend.
    #[error("this replica has run out of descriptors or ports for connections")]
    OutOfConnections,
    /// No backend could be reached.
    #[error("no backend could be reached")]
    Unreachable,
    /// Every available backend refused, the last one with a response too long to pass on.
    #[error("all backends refused this request")]
    Refused,
    /// The backend responded with a redirect, which is not passed on because its target may be
    /// unreachable for clients.
    #[error("the backend responded with a redirect")]
    Redirected,
    /// The backend refused the credentials, which were not the client's.
    #[error("the backend refused the credentials of this router, not yours")]
    RefusedCredentials,
    /// The backend closed the connection, or its response was not HTTP.
    #[error("the backend closed the connection before it responded")]
    EngineBroke,
    /// The backend failed in the middle of its response, and no other backend goes on with it.
    #[error(
        "the backend failed in the middle of its response{}{}; the request may be sent again",
        after(*.tokens),
        because(.obstacle.as_deref())
    )]
    EngineBrokeOff {
        /// Number of output tokens that the client has received; `None` if they were not counted.
        tokens: Option<u64>,
        /// Why no other backend goes on; `None` if streams are not continued.
        obstacle: Option<String>,
    },
    /// The answer cannot be continued behind what the client has received.
    #[error("this answer cannot be continued: {obstacle}; the request may be sent again")]
    NotResumable {
        /// What is in the way.
        obstacle: String,
    },
    /// Another request carries the stream.
    #[error("another request has taken this stream over")]
    TakenOver,
    /// The log did not confirm in time that this replica carries the stream.
    #[error("the cluster did not confirm in time that this replica carries the stream")]
    Unconfirmed,
    /// The backend did not start or continue its response in time.
    #[error("the backend did not respond in time")]
    EngineTimeout,
}

fn after(tokens: Option<u64>) -> String {
    tokens.map_or_else(String::new, |it| format!(" after {it} output tokens"))
}

fn because(obstacle: Option<&str>) -> String {
    obstacle.map_or_else(String::new, |it| format!(", and {it}"))
}

/// HTTP form of a data-plane failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorResponse {
    /// HTTP status.
    pub status: StatusCode,
    /// Value of `type` in OpenAI's error object.
    pub type_: &'static str,
    /// Value of `code` in OpenAI's error object.
    pub code: &'static str,
    /// Value of `retry-after`, in seconds; `None` to omit the header.
    pub retry_after_s: Option<u32>,
    /// Value of `x-should-retry`; `None` to omit the header. `false` if the backend may have
    /// computed for the request, so that a retry would be charged again.
    pub should_retry: Option<bool>,
}

/// Returns the HTTP form of a failure. No other code decides it.
#[must_use]
pub fn rescue(failure: &ProxyError) -> ErrorResponse {
    let (status, type_, code) = match failure {
        ProxyError::BadRequest { .. } => (400, "invalid_request_error", "invalid_request"),
        ProxyError::BadKey => (401, "invalid_request_error", "invalid_api_key"),
        ProxyError::ExpiredKey => (401, "invalid_request_error", "expired_api_key"),
        ProxyError::PathNotAllowed { .. } => (403, "invalid_request_error", "path_not_allowed"),
        ProxyError::ModelNotAllowed { .. } => (403, "invalid_request_error", "model_not_allowed"),
        ProxyError::StaleKeys => (503, "server_error", "api_keys_stale"),
        ProxyError::UnknownRoute { .. } => (404, "invalid_request_error", "unknown_url"),
        ProxyError::WrongMethod { .. } => (405, "invalid_request_error", "method_not_supported"),
        ProxyError::UnknownModel { .. } => (404, "invalid_request_error", "model_not_found"),
        ProxyError::BodyTooLarge { .. } => (413, "invalid_request_error", "request_too_large"),
        ProxyError::ContextTooLong { .. } => {
            (400, "invalid_request_error", "context_length_exceeded")
        }
        ProxyError::UnsupportedEncoding { .. } => {
            (415, "invalid_request_error", "unsupported_content_encoding")
        }
        ProxyError::KeepsNothing { .. } => (501, "invalid_request_error", "endpoint_not_supported"),
        ProxyError::NoWebsockets => (501, "invalid_request_error", "websockets_not_supported"),
        ProxyError::HttpOnly => (426, "invalid_request_error", "websockets_not_supported"),
        ProxyError::UnlistedPath { .. } => (404, "invalid_request_error", "unknown_url"),
        ProxyError::UnknownResponse { .. } => (404, "invalid_request_error", "response_not_found"),
        ProxyError::BodyTimeout => (408, "invalid_request_error", "request_timeout"),
        ProxyError::BadExpectation => (417, "invalid_request_error", "expectation_failed"),
        ProxyError::AddressAtLimit | ProxyError::UserAtLimit => {
            (429, "rate_limit_error", "too_many_requests_at_once")
        }
        ProxyError::BreaksBackends => (422, "invalid_request_error", "request_breaks_backends"),
        ProxyError::OverLimit { .. } => (429, "rate_limit_error", "rate_limit_exceeded"),
        ProxyError::OverBudget { .. } => (429, "insufficient_quota", "insufficient_quota"),
        ProxyError::QueueFull { .. } => (503, "server_error", "queue_full"),
        ProxyError::TooLate { .. } => (503, "server_error", "queue_too_long"),
        ProxyError::WaitedTooLong { .. } => (503, "server_error", "queue_timeout"),
        ProxyError::Leaving => (503, "server_error", "replica_leaving"),
        ProxyError::Starting => (503, "server_error", "replica_starting"),
        ProxyError::NoneHealthy => (503, "server_error", "no_healthy_backend"),
        ProxyError::NoneOffered | ProxyError::NoEndpoint => {
            (503, "server_error", "no_endpoint_offered")
        }
        ProxyError::NoneSelected => (503, "server_error", "no_backend_selected"),
        ProxyError::NoneIsolating => (503, "server_error", "no_isolating_backend"),
        ProxyError::NotSeparable => (400, "invalid_request_error", "needs_whole_backend"),
        ProxyError::NoPrefill => (503, "server_error", "no_prefill_backend"),
        ProxyError::PathNotIsolated => (403, "invalid_request_error", "path_not_isolated"),
        ProxyError::OutOfConnections => (503, "server_error", "out_of_connections"),
        ProxyError::Unreachable => (503, "server_error", "backend_unreachable"),
        ProxyError::Refused => (503, "server_error", "backends_refuse"),
        ProxyError::Overloaded => (503, "server_error", "overloaded"),
        ProxyError::EngineBroke | ProxyError::EngineBrokeOff { .. } => {
            (502, "server_error", "backend_broke")
        }
        ProxyError::NotResumable { .. } => (409, "invalid_request_error", "stream_not_resumable"),
        ProxyError::TakenOver => (409, "invalid_request_error", "stream_taken_over"),
        ProxyError::Unconfirmed => (503, "server_error", "stream_unconfirmed"),
        ProxyError::Redirected => (502, "server_error", "backend_redirects"),
        ProxyError::RefusedCredentials => (502, "server_error", "backend_refuses_credentials"),
        ProxyError::EngineTimeout => (504, "server_error", "backend_timeout"),
    };
    ErrorResponse {
        status: StatusCode::from_u16(status).expect("the codes above are valid"),
        type_,
        code,
        retry_after_s: retry_after_s(failure),
        should_retry: is_final(failure).then_some(false),
    }
}

/// Whether the same request cannot succeed, or would be charged again.
fn is_final(failure: &ProxyError) -> bool {
    matches!(
        failure,
        ProxyError::EngineBroke
            | ProxyError::EngineBrokeOff { .. }
            | ProxyError::EngineTimeout
            | ProxyError::NotResumable { .. }
            | ProxyError::TakenOver
            | ProxyError::BreaksBackends
            | ProxyError::KeepsNothing { .. }
            | ProxyError::NoWebsockets
    )
}

/// Returns the seconds after which a retry makes sense; `None` if never or at once.
fn retry_after_s(failure: &ProxyError) -> Option<u32> {
    match failure {
        ProxyError::NoneHealthy
        | ProxyError::NoneOffered
        | ProxyError::NoEndpoint
        | ProxyError::NoneSelected
        | ProxyError::NoneIsolating
        | ProxyError::NoPrefill
        | ProxyError::OutOfConnections
        | ProxyError::Unreachable
        | ProxyError::Refused
        | ProxyError::Overloaded
        | ProxyError::AddressAtLimit
        | ProxyError::UserAtLimit
        | ProxyError::Starting
        | ProxyError::StaleKeys
        | ProxyError::Unconfirmed
        | ProxyError::Leaving => Some(UNAVAILABLE_RETRY_AFTER_S),
        ProxyError::OverLimit { retry_after_ms, .. }
        | ProxyError::OverBudget { retry_after_ms, .. }
        | ProxyError::QueueFull { retry_after_ms }
        | ProxyError::TooLate { retry_after_ms, .. }
        | ProxyError::WaitedTooLong { retry_after_ms } => {
            let seconds = u32::try_from(retry_after_ms.div_ceil(1000));
            Some(seconds.unwrap_or(u32::MAX).max(1))
        }
        _ => None,
    }
}

/// Returns OpenAI's error object for a failure.
#[must_use]
pub fn openai_body(failure: &ProxyError) -> Bytes {
    #[derive(Serialize)]
    struct Body<'a> {
        error: Error<'a>,
    }
    #[derive(Serialize)]
    struct Error<'a> {
        message: String,
        #[serde(rename = "type")]
        type_: &'a str,
        param: Option<&'a str>,
        code: &'a str,
    }
    let answer = rescue(failure);
    let param = match failure {
        ProxyError::BadRequest { param, .. } => param.as_deref(),
        ProxyError::UnknownModel { .. } | ProxyError::ModelNotAllowed { .. } => Some("model"),
        _ => None,
    };
    let error = Error {
        message: failure.to_string(),
        type_: answer.type_,
        param,
        code: answer.code,
    };
    serde_json::to_vec(&Body { error })
        .expect("strings serialise")
        .into()
}

/// Returns a complete error response in OpenAI's form.
#[must_use]
pub fn openai_response(failure: &ProxyError) -> http::Response<Bytes> {
    let answer = rescue(failure);
    let mut response = http::Response::new(openai_body(failure));
    *response.status_mut() = answer.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = answer.retry_after_s {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(should_retry) = answer.should_retry {
        let value = if should_retry { "true" } else { "false" };
        headers.insert(SHOULD_RETRY, HeaderValue::from_static(value));
    }
    if let ProxyError::WrongMethod { allowed } = failure {
        headers.insert(ALLOW, HeaderValue::from_static(allowed));
    }
    if let ProxyError::HttpOnly = failure {
        // RFC 9110, 15.5.22.
        headers.insert(UPGRADE, HeaderValue::from_static("HTTP/1.1"));
    }
    if let ProxyError::UnsupportedEncoding { .. } = failure {
        // RFC 9110, 15.5.16.
        headers.insert(
            ACCEPT_ENCODING,
            HeaderValue::from_static("gzip, zstd, identity"),
        );
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_openais_fields_in_openais_order() {
        let failure = ProxyError::UnknownModel { model: "m".into() };
        assert_eq!(
            openai_body(&failure),
            r#"{"error":{"message":"the model `m` does not exist","type":"invalid_request_error","param":"model","code":"model_not_found"}}"#
        );
    }

    #[test]
    fn a_503_has_retry_after_and_a_charged_failure_forbids_retry() {
        let response = openai_response(&ProxyError::NoneHealthy);
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()[RETRY_AFTER], "1");
        assert!(!response.headers().contains_key(SHOULD_RETRY));
        let response = openai_response(&ProxyError::EngineTimeout);
        assert_eq!(response.status(), 504);
        assert_eq!(response.headers()[SHOULD_RETRY], "false");
        let response = openai_response(&ProxyError::NoWebsockets);
        assert_eq!(response.headers()[SHOULD_RETRY], "false");
    }

    #[test]
    fn a_problem_has_extension_members_besides_the_standard_ones() {
        let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no-quorum", "no quorum")
            .detail("replica 2 is alone")
            .member("outcome", "unknown");
        assert_eq!(
            serde_json::to_string(&problem).expect("serialises"),
            r#"{"type":"/problems/no-quorum","title":"no quorum","status":503,"detail":"replica 2 is alone","outcome":"unknown"}"#
        );
    }
}
