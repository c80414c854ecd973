//! Settings of the data plane, from the config.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::{HeaderName, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::admission::RetryAllowance;
use state::ids::ReplicaId;

use super::cors::AllowedOrigins;
use super::expose::Expose;
use super::keys::ApiKeys;
use super::reserved_fields::{FieldRules, HeaderRules};
use super::usage_options::UsageRequest;
use crate::api_keys::KeyRules;
use crate::backends::pool::PoolSettings;
use crate::ip_prefix::IpPrefix;
use crate::isolation::WhenUnsalted;
use crate::traces::Tracer;

/// Requests whose decisions are kept, unless the config says otherwise.
pub const DECISIONS_MAX: usize = 10_000;

/// Settings of one replica's data plane.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// This replica, for `x-quorate-replica`.
    pub replica: ReplicaId,
    /// What clients are told beside answers.
    pub expose: Expose,
    /// Whether the end of an answer waits for its charge.
    pub charges: Charges,
    /// Limits of what clients may send and hold.
    pub limits: ProxyLimits,
    /// How long to wait for clients and engines.
    pub timeouts: ProxyTimeouts,
    /// Where the user's name is looked for, in this order; nobody found is `anonymous`.
    pub identify_by: Vec<IdentifyBy>,
    /// Addresses that speak for many clients, such as load balancers: what they say of users is
    /// believed, and limits per client address do not hold for them.
    pub trusted_proxies: Vec<IpPrefix>,
    /// The only keys that are served beside the cluster's; they stay here. `None`: other keys are
    /// not checked, and go on to the engine, which may check them.
    pub api_keys: Option<ApiKeys>,
    /// How keys of the cluster are judged.
    pub keys: KeyRules,
    /// What becomes of requests whose prompts no engine can keep apart from other users'.
    pub when_unsalted: WhenUnsalted,
    /// Fields of bodies that are refused or stripped.
    pub fields: FieldRules,
    /// Headers that do not reach engines.
    pub strip_headers: HeaderRules,
    /// Engine answers that send a request to the next candidate: statuses by which an engine says
    /// that it did not run it.
    pub retry_statuses: Vec<StatusCode>,
    /// Most backends one request is tried on.
    pub attempts_max: usize,
    /// How many requests may be on a further backend after a refusal, of those under way for the
    /// model.
    pub retry_allowance: RetryAllowance,
    /// Highest priority that a request may ask for; what is higher counts as this.
    pub priority_max: i16,
    /// Which usage reports are asked for on a client's behalf.
    pub usage_splice: UsageRequest,
    /// Paths beyond the built-in ones to which a POST with a JSON `model` is routed. Exact, without
    /// a query. Engine control paths stay closed even when they stand here.
    pub extra_paths: Vec<String>,
    /// Most requests whose decisions are kept, see [`DecisionLog`](super::DecisionLog); 0: none.
    pub decisions_max: usize,
    /// Which web pages may use this replica from a browser.
    pub cors: AllowedOrigins,
    /// Which requests leave a line in the log.
    pub logged_requests: LoggedRequests,
    /// Makes their traces; `None`: they have none.
    pub tracer: Option<Tracer>,
    /// Connections to the engines.
    pub pool: PoolSettings,
}

/// When the end of an answer reaches its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Charges {
    /// At once: its charge is committed a moment later, or lost with this replica.
    #[default]
    Asynchronous,
    /// Once its charge is committed.
    Durable,
}

/// Which requests leave a line in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LoggedRequests {
    /// None.
    Off,
    /// Those that were answered with an error, or whose answer broke off.
    #[default]
    Errors,
    /// All.
    All,
}

/// Limits of what clients may send and hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyLimits {
    /// Longest request body, in bytes: 413 beyond.
    pub body_bytes_max: u64,
    /// Most bytes of request bodies held at once, from their first byte to the head of the answer:
    /// 503 beyond. A body takes up to three times its length meanwhile.
    pub held_bytes_max: u64,
    /// How much of an answer is read ahead of a client that does not take it, in bytes; counts
    /// among the bytes held.
    pub read_ahead_bytes_max: u64,
    /// Longest request head, in bytes: 431 beyond. At least 8192.
    pub head_bytes_max: usize,
    /// Most header fields: 431 beyond.
    pub headers_max: usize,
    /// Most connections: beyond, the longest idle ones are closed, and further ones wait in the
    /// listener's backlog until one is gone.
    pub connections_max: usize,
    /// Of these, most from one client address: closed beyond.
    pub connections_per_address_max: usize,
    /// Most requests under way, their body here: 503 beyond.
    pub requests_max: usize,
    /// Most requests whose body is on its way: 503 beyond. From half of it on bodies have to hurry:
    /// [`ProxyTimeouts::body_idle_crowded`].
    pub reading_max: usize,
    /// Of both kinds together, most from one client address: 429 beyond.
    pub requests_per_address_max: usize,
    /// Most requests of one user under way: 429 beyond.
    pub requests_per_user_max: usize,
    /// Most streams of one h2c connection.
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

/// How long to wait for clients and engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyTimeouts {
    /// From a connection to its first request.
    pub first_request: Duration,
    /// For a connection's next request: its head must be complete when this is over. Covers idle
    /// keep-alive connections too. An h2 connection without a new request for this to twice this
    /// time gets a GOAWAY; its streams go on.
    pub next_request: Duration,
    /// Between two pieces of a request body: 408.
    pub body_idle: Duration,
    /// The same while many bodies are on their way.
    pub body_idle_crowded: Duration,
    /// For a whole request body: 408. A tenth of it while many are on their way.
    pub body: Duration,
    /// How long the body of a refused request is read on, so that its sender gets to see the answer.
    /// A quarter of it is the longest pause. The request counts nowhere meanwhile.
    pub refused_body: Duration,
    /// From forwarding a request to the first byte of the answer's body: 504. Engines answer
    /// requests without `stream` only when they are done.
    pub first_byte: Duration,
    /// Between two pieces of an answer: the engine counts as broken.
    pub answer_idle: Duration,
    /// How long a client may take nothing of an answer that waits for it: it counts as gone then,
    /// and the engine's request ends with it. What sockets buffer counts as taken.
    pub untaken: Duration,
    /// How long a client may keep an engine waiting with its answer, over the whole answer: then it
    /// counts as gone.
    pub held_back: Duration,
    /// Between keep-alive probes to clients, TCP and h2: one that vanished without a word is
    /// noticed after about ten of them (h2: after one). For engines see
    /// [`PoolSettings::keep_alive`].
    pub keep_alive: Duration,
}

impl Default for ProxyTimeouts {
    fn default() -> Self {
        Self {
            first_request: Duration::from_secs(10),
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
    /// The defaults, for this replica.
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

/// A place where a user's name may stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentifyBy {
    /// The key in `authorization: Bearer` or `x-api-key`. The user is named after a hash of it, or
    /// as [`ApiKeys`] says.
    ApiKey,
    /// A header's value.
    Header(HeaderName),
    /// The body's `user` field.
    BodyUser,
}

/// Text that names no place of a user's name.
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
    fn places_of_a_users_name_read_and_write_alike() {
        for text in ["api_key", "header:x-user", "body:user"] {
            assert_eq!(text.parse::<IdentifyBy>().unwrap().to_string(), text);
        }
        assert_eq!("cookie".parse::<IdentifyBy>(), Err(IdentifyByError));
        assert_eq!("header:".parse::<IdentifyBy>(), Err(IdentifyByError));
    }
}
