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
use smart_default::SmartDefault;
use state::admission::RetryAllowance;
use state::form::{As, AsList, AsOption, Span};
use state::ids::ReplicaId;

use self::cors::AllowedOrigins;
use self::keys::ApiKeys;
use self::reserved_fields::{FieldRules, HeaderRules};
use crate::engines::backends::pool::PoolSettings;
use crate::files::ring::RingSettings;
use crate::model_names::ModelNames;
use crate::net::ip_prefix::IpPrefix;
use crate::sessions::SessionRules;
use crate::settings::{Size, Status};
use crate::traces::Tracer;
use crate::users::api_keys::KeyRules;

/// Default number of requests whose decisions are kept.
pub const DECISIONS_MAX: usize = 10_000;

/// Default of [`ProxySettings::min_index_wait`].
pub const MIN_INDEX_WAIT: Duration = Duration::from_millis(50);

/// Settings of one replica's data plane.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// Id of this replica, for `x-quorate-replica`.
    pub replica: ReplicaId,
    /// Response headers about routing that clients receive.
    pub expose: Expose,
    /// Whether the end of a response waits until its charge is committed.
    pub charges: Charges,
    /// Longest wait until this replica has applied the index in `x-quorate-min-index`, and then
    /// until the log has the request's own prompt.
    pub min_index_wait: Duration,
    /// Limits on what clients may send and hold.
    pub limits: ProxyLimits,
    /// Timeouts for clients and engines.
    pub timeouts: ProxyTimeouts,
    /// Sources of the user's name, in order. A user that none of them names is `anonymous`.
    pub identify_by: Vec<IdentifyBy>,
    /// Rules by which requests name their sessions.
    pub sessions: SessionRules,
    /// Aliases, fallbacks and splits of models.
    pub names: ModelNames,
    /// Addresses that speak for many clients, such as load balancers. They may name users, and
    /// limits per client address do not apply to them.
    pub trusted_proxies: Vec<IpPrefix>,
    /// The only valid keys in addition to the cluster's; engines never see them. `None` if other
    /// keys are not checked. They are then forwarded to the engine, which may check them.
    pub api_keys: Option<ApiKeys>,
    /// Rules for validating the cluster's keys.
    pub keys: KeyRules,
    /// Body fields that are refused or stripped.
    pub fields: FieldRules,
    /// Headers that do not reach engines.
    pub strip_headers: HeaderRules,
    /// Retries on other backends.
    pub retry: RetrySettings,
    /// Streams whose backend fails.
    pub streams: StreamSettings,
    /// Highest priority that a request may have. Higher priorities are capped.
    pub priority_max: i16,
    /// Usage reports requested on a client's behalf.
    pub usage_splice: UsageRequest,
    /// Additional paths to which a POST with a JSON `model` is routed. They match exactly, without
    /// the query. Engine control paths stay closed even if listed here.
    pub extra_paths: Vec<String>,
    /// Archive of the [`DecisionLog`](super::DecisionLog); `None` for none.
    pub archive: Option<RingSettings>,
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
    /// `x-request-id` and `x-quorate-replica`, and `x-quorate-ignored` and `x-quorate-model` if they
    /// apply.
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

/// Keys of `[limits]`: what clients may send and hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProxyLimits {
    /// Largest request body.
    #[serde(rename = "max_body", with = "As::<Size>")]
    #[default(32 << 20)]
    pub body_bytes_max: u64,
    /// Maximum number of client connections; beyond it, the longest idle ones are closed, first
    /// those of addresses with more than an equal share: half of all, except for
    /// `users.trusted_proxies`. Lowered at start if the process has too few file descriptors.
    #[serde(rename = "max_connections")]
    #[schemars(range(min = 1))]
    #[default(16_384)]
    pub connections_max: u32,
    /// Maximum number of requests in flight, counted once their bodies have been received; as many
    /// more may still be uploading. One client address (IPv6: /64), except for
    /// `users.trusted_proxies`, and one user may have half of them. Lowered like `max_connections`.
    #[serde(rename = "max_requests")]
    #[schemars(range(min = 1))]
    #[default(16_384)]
    pub requests_max: u32,
    /// Maximum total size of request bodies held in memory, from their first byte to the head of
    /// the response; a body takes up to three times its length. Default: a quarter of the cgroup's
    /// (container's) memory limit, at least `max_body` and at most 1 GiB.
    #[serde(rename = "max_held_bodies", with = "AsOption::<Size>")]
    pub held_bytes_max: Option<u64>,
    /// Maximum number of response bytes read ahead of a slow client. They count as held bytes.
    #[serde(skip)]
    #[default(1 << 20)]
    pub read_ahead_bytes_max: u64,
    /// Maximum length of a request head, in bytes; 431 beyond (400 through the endpoint picker).
    /// hyper requires at least 8192.
    #[serde(skip)]
    #[default(64 * 1024)]
    pub head_bytes_max: usize,
    /// Maximum number of header fields; 431 beyond (400 through the endpoint picker).
    #[serde(skip)]
    #[default(100)]
    pub headers_max: usize,
    /// Maximum number of connections from one client address, closed beyond; `None`: half of all.
    #[serde(skip)]
    pub connections_per_address_max: Option<u32>,
    /// Maximum number of requests whose body is arriving; 503 beyond. From half of it,
    /// [`ProxyTimeouts::body_idle_crowded`] applies. `None`: [`Self::requests_max`].
    #[serde(skip)]
    pub reading_max: Option<u32>,
    /// Maximum number of requests from one client address, arriving or in flight; 429 beyond.
    /// `None`: half of all.
    #[serde(skip)]
    pub requests_per_address_max: Option<u32>,
    /// Maximum number of requests in flight of one user; 429 beyond. `None`: half of all.
    #[serde(skip)]
    pub requests_per_user_max: Option<u32>,
    /// Maximum number of concurrent streams on one HTTP/2 connection.
    #[serde(skip)]
    #[default(100)]
    pub streams_per_connection_max: u32,
}

impl ProxyLimits {
    /// Returns the maximum number of bytes held, of requests and of responses that are read ahead.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes_max.unwrap_or(1 << 30)
    }

    /// Returns the maximum number of requests in flight.
    pub(super) fn requests(&self) -> usize {
        self.requests_max as usize
    }

    /// Returns the maximum number of requests whose body is arriving.
    pub(super) fn reading(&self) -> usize {
        self.reading_max.unwrap_or(self.requests_max) as usize
    }

    /// Returns the maximum numbers of connections and requests from one client address.
    pub(super) fn per_address(&self) -> (usize, usize) {
        let connections = self.connections_per_address_max;
        let requests = self.requests_per_address_max;
        (
            connections.unwrap_or(self.connections_max.div_ceil(2)) as usize,
            requests.unwrap_or(self.requests_max.div_ceil(2)) as usize,
        )
    }

    /// Returns the maximum number of requests in flight of one user.
    pub(super) fn per_user(&self) -> usize {
        let half = self.requests_max.div_ceil(2);
        self.requests_per_user_max.unwrap_or(half) as usize
    }
}

/// Keys of `[timeouts]`: how long clients and engines may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProxyTimeouts {
    /// Timeout for connecting to a backend, including its TLS handshake.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(2))]
    pub connect: Duration,
    /// Longest pause while receiving a request body; `1s` while more than half of the allowed
    /// uploads are in progress.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(30))]
    pub body_idle: Duration,
    /// Timeout for the beginning of a backend's response, which comments and white space are not.
    /// Without `stream`, engines respond only when they are done.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(600))]
    pub first_byte: Duration,
    /// Longest pause within a backend's response. Comments do not end a pause.
    #[serde(rename = "idle", with = "As::<Span>")]
    #[default(Duration::from_secs(300))]
    pub answer_idle: Duration,
    /// Longest time that a client may stop reading a response. Data in socket buffers counts as
    /// read. If it blocks the backend meanwhile, it may do so for 10 s in all.
    #[serde(rename = "client_idle", with = "As::<Span>")]
    #[default(Duration::from_secs(60))]
    pub untaken: Duration,
    /// Maximum total time for which a client may block an engine during a response. After that it
    /// counts as gone.
    #[serde(skip)]
    #[default(Duration::from_secs(10))]
    pub held_back: Duration,
    /// Maximum time from a connection to its first request.
    #[serde(skip)]
    #[default(Duration::from_secs(30))]
    pub first_request: Duration,
    /// Maximum time until the head of a connection's next request is complete. Covers idle
    /// keep-alive connections too. An HTTP/2 connection gets a GOAWAY after one to two times this
    /// time without a new request, and its streams continue.
    #[serde(skip)]
    #[default(Duration::from_secs(75))]
    pub next_request: Duration,
    /// Maximum time between two pieces of a request body while many are arriving; 408 beyond.
    #[serde(skip)]
    #[default(Duration::from_secs(1))]
    pub body_idle_crowded: Duration,
    /// Maximum time for a whole request body; 408 beyond. A tenth of it while many are arriving.
    #[serde(skip)]
    #[default(Duration::from_secs(300))]
    pub body: Duration,
    /// Time for which a refused request's body is still read, so that its sender sees the response.
    /// A pause may take a quarter of it. Meanwhile the request counts neither as reading nor in
    /// flight.
    #[serde(skip)]
    #[default(Duration::from_secs(1))]
    pub refused_body: Duration,
    /// Interval of keep-alive probes to clients, over TCP and HTTP/2. A vanished client is noticed
    /// after about ten of them (HTTP/2: after one). For engines see [`PoolSettings::keep_alive`].
    #[serde(skip)]
    #[default(Duration::from_secs(20))]
    pub keep_alive: Duration,
}

/// Keys of `[retry]`: how often and after which failures a request is tried on another backend.
#[derive(Debug, Clone, PartialEq, Eq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetrySettings {
    /// Maximum number of backends a request is tried on. Of a model's requests in flight, at most a
    /// fifth may be retries after a refusal, and three always may.
    #[schemars(range(min = 1, max = 16))]
    #[default(3)]
    pub attempts: u32,
    /// Retry budget: percentage of a model's requests in flight that may be retries after a
    /// refusal. The default is that of Envoy and of Linkerd.
    #[serde(skip)]
    #[default(20)]
    pub budget_percent: u32,
    /// Statuses of a backend on which a request is retried on the next one. They must mean that it
    /// did not run the request.
    #[serde(with = "AsList::<Status>")]
    #[default(vec![503])]
    pub statuses: Vec<u16>,
    /// Number of concurrent retries that are always allowed.
    #[serde(skip)]
    #[default(3)]
    pub concurrency_min: u32,
}

/// Keys of `[streams]`: what happens to a stream whose backend fails in the middle of it. See
/// docs/guide/streams.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StreamSettings {
    /// Whether another backend goes on with the stream.
    pub resume: StreamResume,
    /// Maximum number of output tokens of which the text is kept. A longer stream does not go on
    /// elsewhere.
    #[schemars(range(min = 1, max = 1_048_576))]
    #[default(65_536)]
    pub resume_max_tokens: u32,
    /// Whether clients that ask for it with `x-quorate-resumable: 1` get event ids, with which they go
    /// on at another replica if theirs fails. Needs `resume = "auto"`.
    pub resumable: bool,
    /// Longest pause within the output after which another backend goes on with the stream, if that
    /// is possible. Default: `timeouts.idle`.
    #[serde(with = "AsOption::<Span>")]
    pub stall: Option<Duration>,
}

/// Which streams go on at another backend if theirs fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StreamResume {
    /// None.
    Off,
    /// Those that another backend continues exactly.
    #[default]
    Auto,
}

impl RetrySettings {
    /// Whether a request is retried on this status of a response.
    pub(super) fn takes(&self, status: StatusCode) -> bool {
        self.statuses.contains(&status.as_u16())
    }

    /// Returns the retry budget.
    pub(super) fn allowance(&self) -> RetryAllowance {
        RetryAllowance {
            percent: self.budget_percent,
            concurrency_min: self.concurrency_min,
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
            min_index_wait: MIN_INDEX_WAIT,
            limits: ProxyLimits::default(),
            timeouts: ProxyTimeouts::default(),
            identify_by: IdentifyBy::defaults(),
            sessions: SessionRules::default(),
            names: ModelNames::default(),
            trusted_proxies: IpPrefix::LOOPBACK.to_vec(),
            api_keys: None,
            keys: KeyRules::default(),
            fields: FieldRules::default(),
            strip_headers: HeaderRules::default(),
            retry: RetrySettings::default(),
            streams: StreamSettings::default(),
            priority_max: 0,
            usage_splice: UsageRequest::default(),
            extra_paths: Vec::new(),
            archive: None,
            decisions_max: DECISIONS_MAX,
            cors: AllowedOrigins::default(),
            logged_requests: LoggedRequests::default(),
            tracer: None,
            pool: PoolSettings::default(),
        }
    }
}

impl ProxySettings {
    /// Returns the settings of the connections to engines.
    pub(super) fn pool(&self) -> PoolSettings {
        PoolSettings {
            connect_timeout: self.timeouts.connect,
            ..self.pool
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

impl IdentifyBy {
    /// Returns the sources of users' names if none are configured.
    #[must_use]
    pub fn defaults() -> Vec<Self> {
        vec![
            Self::ApiKey,
            Self::Header(HeaderName::from_static("x-quorate-user")),
            Self::BodyUser,
        ]
    }
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
