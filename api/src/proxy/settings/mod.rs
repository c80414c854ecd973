//! Settings of the data plane, from the config.

pub(super) mod cors;
pub(super) mod keys;
pub(super) mod reserved_fields;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::{HeaderName, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::admission::RetryAllowance;
use state::ids::ReplicaId;

use self::cors::AllowedOrigins;
use self::keys::ApiKeys;
use self::reserved_fields::{FieldRules, HeaderRules};
use crate::engines::backends::pool::PoolSettings;
use crate::net::ip_prefix::IpPrefix;
use crate::traces::Tracer;
use crate::users::api_keys::KeyRules;
use crate::users::isolation::WhenUnsalted;

/// Default number of requests whose decisions are kept.
pub const DECISIONS_MAX: usize = 10_000;

/// Settings of one replica's data plane.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// Id of this replica, for `x-quorate-replica`.
    pub replica: ReplicaId,
    /// Response headers about routing that clients receive.
    pub expose: Expose,
    /// Whether the end of a response waits until its charge is committed.
    pub charges: Charges,
    /// Limits on what clients may send and hold.
    pub limits: ProxyLimits,
    /// Timeouts for clients and engines.
    pub timeouts: ProxyTimeouts,
    /// Sources of the user's name, in order. A user that none of them names is `anonymous`.
    pub identify_by: Vec<IdentifyBy>,
    /// Addresses that speak for many clients, such as load balancers. They may name users, and
    /// limits per client address do not apply to them.
    pub trusted_proxies: Vec<IpPrefix>,
    /// The only valid keys in addition to the cluster's; engines never see them. `None` if other
    /// keys are not checked. They are then forwarded to the engine, which may check them.
    pub api_keys: Option<ApiKeys>,
    /// Rules for validating the cluster's keys.
    pub keys: KeyRules,
    /// Treatment of requests whose prompts no engine can isolate from other users'.
    pub when_unsalted: WhenUnsalted,
    /// Body fields that are refused or stripped.
    pub fields: FieldRules,
    /// Headers that do not reach engines.
    pub strip_headers: HeaderRules,
    /// Response statuses that mean that the engine did not run the request. They send the request
    /// to the next candidate.
    pub retry_statuses: Vec<StatusCode>,
    /// Maximum number of backends tried for one request.
    pub attempts_max: usize,
    /// Maximum number of requests that may be retries after a refusal, relative to the model's
    /// requests in flight.
    pub retry_allowance: RetryAllowance,
    /// Highest priority that a request may have. Higher priorities are capped.
    pub priority_max: i16,
    /// Usage reports requested on a client's behalf.
    pub usage_splice: UsageRequest,
    /// Additional paths to which a POST with a JSON `model` is routed. They match exactly, without
    /// the query. Engine control paths stay closed even if listed here.
    pub extra_paths: Vec<String>,
    /// Maximum number of requests in the [`DecisionLog`](super::DecisionLog); 0 for none.
    pub decisions_max: usize,
    /// Web origins that may use this replica from a browser.
    pub cors: AllowedOrigins,
    /// Requests that get a line in the access log.
    pub logged_requests: LoggedRequests,
    /// Tracer of requests; `None` without tracing.
    pub tracer: Option<Tracer>,
    /// Settings of the connections to engines.
    pub pool: PoolSettings,
}

/// Which headers are added to responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Expose {
    /// No `x-quorate-*` header and no `x-request-id`.
    None,
    /// `x-request-id` and `x-quorate-replica`, and `x-quorate-ignored` if it applies.
    #[default]
    Basic,
    /// These and, on successful responses, the decision: `x-quorate-backend`, `-prefill`,
    /// `-policy`, `-prefix` and `-index`. For clients that may learn what other users sent.
    Full,
}

/// Which usage reports are requested on a client's behalf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UsageRequest {
    /// Usage so far in every chunk, and a final chunk.
    #[default]
    Continuous,
    /// A final chunk only, for engines that reject `continuous_usage_stats`.
    Final,
    /// None: `stream_options` stays as the client sent it.
    Off,
}

/// When the end of a response reaches its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Charges {
    /// At once. The charge is committed a moment later, and lost if this replica dies before.
    #[default]
    Asynchronous,
    /// Once its charge is committed.
    Durable,
}

/// Which requests are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LoggedRequests {
    /// No requests.
    Off,
    /// Requests with a status of 4xx or 5xx, and those whose response broke off. At most 20 lines
    /// per second for 4xx, and as many for the others.
    #[default]
    Errors,
    /// All requests.
    All,
}

/// Limits on what clients may send and hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyLimits {
    /// Maximum length of a request body, in bytes; 413 beyond.
    pub body_bytes_max: u64,
    /// Maximum total length of request bodies held, from their first byte to the head of the
    /// response; 503 beyond. Meanwhile a body occupies up to three times its length.
    pub held_bytes_max: u64,
    /// Maximum number of response bytes read ahead of a slow client. They count as held bytes.
    pub read_ahead_bytes_max: u64,
    /// Maximum length of a request head, in bytes; 431 beyond (400 through the endpoint picker).
    /// hyper requires at least 8192.
    pub head_bytes_max: usize,
    /// Maximum number of header fields; 431 beyond (400 through the endpoint picker).
    pub headers_max: usize,
    /// Maximum number of connections. Beyond it, the longest idle ones are closed, and new ones
    /// wait in the listener's backlog until there is room.
    pub connections_max: usize,
    /// Maximum number of connections from one client address; closed beyond.
    pub connections_per_address_max: usize,
    /// Maximum number of requests in flight, with a complete body; 503 beyond.
    pub requests_max: usize,
    /// Maximum number of requests whose body is arriving; 503 beyond. From half of it,
    /// [`ProxyTimeouts::body_idle_crowded`] applies.
    pub reading_max: usize,
    /// Maximum number of requests from one client address, arriving or in flight; 429 beyond.
    pub requests_per_address_max: usize,
    /// Maximum number of requests in flight of one user; 429 beyond.
    pub requests_per_user_max: usize,
    /// Maximum number of concurrent streams on one HTTP/2 connection.
    pub streams_per_connection_max: u32,
}

impl Default for ProxyLimits {
    fn default() -> Self {
        Self {
            body_bytes_max: 32 * 1024 * 1024,
            held_bytes_max: 1024 * 1024 * 1024,
            read_ahead_bytes_max: 1024 * 1024,
            head_bytes_max: 64 * 1024,
            headers_max: 100,
            connections_max: 16_384,
            connections_per_address_max: 8_192,
            requests_max: 16_384,
            reading_max: 16_384,
            requests_per_address_max: 8_192,
            requests_per_user_max: 8_192,
            streams_per_connection_max: 100,
        }
    }
}

/// Timeouts for clients and engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyTimeouts {
    /// Maximum time from a connection to its first request.
    pub first_request: Duration,
    /// Maximum time until the head of a connection's next request is complete. Covers idle
    /// keep-alive connections too. An HTTP/2 connection gets a GOAWAY after one to two times this
    /// time without a new request, and its streams continue.
    pub next_request: Duration,
    /// Maximum time between two pieces of a request body; 408 beyond.
    pub body_idle: Duration,
    /// Maximum time between two pieces of a request body while many are arriving; 408 beyond.
    pub body_idle_crowded: Duration,
    /// Maximum time for a whole request body; 408 beyond. A tenth of it while many are arriving.
    pub body: Duration,
    /// Time for which a refused request's body is still read, so that its sender sees the response.
    /// A pause may take a quarter of it. Meanwhile the request counts neither as reading nor in
    /// flight.
    pub refused_body: Duration,
    /// Maximum time from forwarding a request to the first byte of the response body; 504 beyond.
    /// Without `stream`, engines respond only when they are done.
    pub first_byte: Duration,
    /// Maximum time between two pieces of a response. Beyond it, the engine counts as broken.
    pub answer_idle: Duration,
    /// Maximum time for which a client may receive nothing of a waiting response. After that it
    /// counts as gone, and the engine's request ends. Data in socket buffers counts as received.
    pub untaken: Duration,
    /// Maximum total time for which a client may block an engine during a response. After that it
    /// counts as gone.
    pub held_back: Duration,
    /// Interval of keep-alive probes to clients, over TCP and HTTP/2. A vanished client is noticed
    /// after about ten of them (HTTP/2: after one). For engines see [`PoolSettings::keep_alive`].
    pub keep_alive: Duration,
}

impl Default for ProxyTimeouts {
    fn default() -> Self {
        Self {
            first_request: Duration::from_secs(30),
            next_request: Duration::from_secs(75),
            body_idle: Duration::from_secs(30),
            body_idle_crowded: Duration::from_secs(1),
            body: Duration::from_secs(300),
            refused_body: Duration::from_secs(1),
            first_byte: Duration::from_secs(600),
            answer_idle: Duration::from_secs(300),
            untaken: Duration::from_secs(60),
            held_back: Duration::from_secs(10),
            keep_alive: Duration::from_secs(20),
        }
    }
}

impl ProxySettings {
    /// Creates the default settings for this replica.
    #[must_use]
    pub fn new(replica: ReplicaId) -> Self {
        Self {
            replica,
            expose: Expose::default(),
            charges: Charges::default(),
            limits: ProxyLimits::default(),
            timeouts: ProxyTimeouts::default(),
            identify_by: vec![
                IdentifyBy::ApiKey,
                IdentifyBy::Header(HeaderName::from_static("x-quorate-user")),
                IdentifyBy::BodyUser,
            ],
            trusted_proxies: IpPrefix::LOOPBACK.to_vec(),
            api_keys: None,
            keys: KeyRules::default(),
            when_unsalted: WhenUnsalted::default(),
            fields: FieldRules::default(),
            strip_headers: HeaderRules::default(),
            retry_statuses: vec![StatusCode::SERVICE_UNAVAILABLE],
            attempts_max: 3,
            retry_allowance: RetryAllowance {
                percent: 20,
                concurrency_min: 3,
            },
            priority_max: 0,
            usage_splice: UsageRequest::default(),
            extra_paths: Vec::new(),
            decisions_max: DECISIONS_MAX,
            cors: AllowedOrigins::default(),
            logged_requests: LoggedRequests::default(),
            tracer: None,
            pool: PoolSettings::default(),
        }
    }
}

/// Source of a user's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentifyBy {
    /// The key in `authorization: Bearer`, `x-api-key` or `api-key`. The name comes from
    /// [`ApiKeys`], or from a hash of the key.
    ApiKey,
    /// The value of a header.
    Header(HeaderName),
    /// The body's `user` field.
    BodyUser,
}

/// Error for text that is not a source of a user's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected api_key, header:NAME or body:user")]
pub struct IdentifyByError;

impl FromStr for IdentifyBy {
    type Err = IdentifyByError;

    fn from_str(text: &str) -> Result<Self, IdentifyByError> {
        match text {
            "api_key" => Ok(Self::ApiKey),
            "body:user" => Ok(Self::BodyUser),
            _ => {
                let name = text.strip_prefix("header:").ok_or(IdentifyByError)?;
                name.parse().map(Self::Header).map_err(|_| IdentifyByError)
            }
        }
    }
}

impl fmt::Display for IdentifyBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ApiKey => f.write_str("api_key"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::BodyUser => f.write_str("body:user"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identify_by_round_trips() {
        for text in ["api_key", "header:x-user", "body:user"] {
            assert_eq!(text.parse::<IdentifyBy>().unwrap().to_string(), text);
        }
        assert_eq!("cookie".parse::<IdentifyBy>(), Err(IdentifyByError));
        assert_eq!("header:".parse::<IdentifyBy>(), Err(IdentifyByError));
    }
}
