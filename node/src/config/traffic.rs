//! The keys of a config file, continued: traffic of clients and engines, shutdown, log.

use std::path::PathBuf;

use api::proxy::{
    Charges, Expose, IpPrefix, LoggedRequests, REFUSED_FIELDS, STRIPPED_FIELDS, STRIPPED_HEADERS,
    UsageRequest,
};
use api::settings::UserDefaultsForm;
use api::users::api_keys::WhenStale;
use api::users::isolation::WhenUnsalted;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

use super::form::{
    EngineRule, EngineUrl, Form, HostName, Identity, LogFilter, Origin, Parsed, PlainName, Prefix,
    RoutedPath, SampleForm, Size, Span, SpanOrZero, Status, UrlPath, ms,
};

/// Keys of `[admin]`: who may use the admin API, and which engines it may register.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdminConfig {
    /// File with operators' tokens, one line `name:role:sha256-hex` each; the roles are `viewer`,
    /// `operator` and `admin`. `quorate token create` makes a token and its line. Reloaded when it
    /// changes. Without it, anybody who reaches the listener may do anything; a listener off
    /// loopback then does not start unless `insecure` is set.
    #[schemars(extend("x-basic" = true))]
    pub tokens_file: Option<PathBuf>,
    /// Answer `GET /metrics` without a token.
    pub metrics_public: bool,
    /// Additional host names of the admin listener. IP addresses, `localhost`, the host of
    /// `listen.advertise` and the machine's name are always accepted; requests to any other name
    /// get a 421 (docs/guide/security.md).
    pub hosts: Vec<Parsed<HostName>>,
    /// Engines that this replica connects to: addresses, prefixes such as `10.0.0.0/8`, host names
    /// such as `gpu-1` or `*.engines.internal`, Unix sockets of KV events such as
    /// `ipc:///run/vllm/*`. A name is allowed if it is listed, or resolves to a listed address.
    /// Default: all. Link-local addresses (`169.254.0.0/16`, `fe80::/10`) and other addresses of
    /// metadata services (docs/guide/security.md) must always be listed as addresses.
    pub backends_allow: Vec<Parsed<EngineRule>>,
    /// Number of newest requests whose decisions this replica keeps in memory for `GET
    /// /admin/v1/decisions`; 0: none. They take at most 64 MiB, and the blocks of their prompts at
    /// most 32 MiB.
    #[schemars(range(max = 1_000_000))]
    #[default(10_000)]
    pub decisions: u32,
}

/// Keys of `[requests]`: which paths are routed, and what is refused or removed on the way to an
/// engine.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RequestsConfig {
    /// Paths to which a POST with a JSON `model` is routed, in addition to those in
    /// docs/guide/security.md. Engines' control routes stay closed.
    pub extra_paths: Vec<Parsed<RoutedPath>>,
    /// Top-level body fields that make a request fail with a 400.
    #[default(list(&REFUSED_FIELDS))]
    pub refuse_fields: Vec<Parsed<PlainName>>,
    /// Top-level body fields that are removed before a request goes to an engine; all other bytes
    /// stay as they are.
    #[default(list(&STRIPPED_FIELDS))]
    pub strip_fields: Vec<Parsed<PlainName>>,
    /// Headers that are not forwarded to engines. A trailing `*` matches any suffix.
    #[default(list(&STRIPPED_HEADERS))]
    pub strip_headers: Vec<Parsed<PlainName>>,
}

/// Keys of `[cors]`: which web pages may call this replica from a browser.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CorsConfig {
    /// Origins of web pages that may use this replica from a browser; `*`: any. Default: none;
    /// responses then carry only the CORS headers that engines set.
    pub allow_origins: Vec<Parsed<Origin>>,
}

/// Keys of `[users]`: how users are identified, which API keys are accepted, and what their
/// responses carry.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UsersConfig {
    /// Where a request's user comes from: the first of these that applies, else `anonymous`. Names
    /// that clients give themselves become `header:NAME` (unless sent by `trusted_proxies`) or
    /// `body:NAME`, and count only if no keys are checked.
    #[default(list(&["api_key", "header:x-quorate-user", "body:user"]))]
    pub identify_by: Vec<Parsed<Identity>>,
    /// Addresses of load balancers and other proxies. They may name users in a header, and limits
    /// per client address do not apply to them.
    #[schemars(extend("x-basic" = true))]
    #[default(IpPrefix::LOOPBACK.map(Parsed).into())]
    pub trusted_proxies: Vec<Parsed<Prefix>>,
    /// File with the accepted API keys, one per line, optionally followed by the user the key
    /// belongs to. Keys are not forwarded to engines. Reloaded when it changes. Without it, any key
    /// is accepted and forwarded to the engine, which may check it, unless `require_key` is set.
    /// Keys of the cluster (`quorate key create`, `qk-...`) are accepted as well.
    pub api_keys_file: Option<PathBuf>,
    /// Refuse requests without a key of the cluster or of `api_keys_file`.
    #[schemars(extend("x-basic" = true))]
    pub require_key: bool,
    /// What to do with requests with a key of the cluster while this replica has been cut off from
    /// the cluster for longer than `stale_after`: `serve` or `refuse` (503, and the replica is not
    /// ready).
    pub when_stale: WhenStale,
    /// How long this replica may be cut off before its list of the cluster's keys is stale. After a
    /// restart it is stale until the replica has heard from the cluster.
    #[default(ms(10_000))]
    pub stale_after: Parsed<SpanOrZero>,
    /// What to do with requests of isolated users (docs/guide/security.md) if no engine can isolate
    /// them: `refuse`, or `serve` by an engine whose cache all users share.
    pub when_unsalted: WhenUnsalted,
    /// When the end of a response reaches its client: `asynchronous`, at once (a replica that dies
    /// loses the charges of its last `cluster.flush_interval`), or `durable`, once its charge is
    /// committed (docs/guide/admission.md).
    pub charges: Charges,
    /// Which headers responses carry: `none`, `basic` (`x-request-id`, `x-quorate-replica`, and
    /// `x-quorate-ignored` with the request's headers that had no effect) or `full` (also the
    /// decision, unless the request was refused: `x-quorate-backend`, `-prefill`, `-policy`,
    /// `-prefix`, `-index`). `full` lets clients learn what others asked (docs/guide/security.md).
    pub expose: Expose,
    /// Forward a client's `x-vllm-priority` header and `priority` field to engines, whatever
    /// `requests` says. Such requests overtake all others there.
    pub forward_priority: bool,
    /// Defaults of users.
    pub defaults: UserDefaultsForm,
}

/// Keys of `[limits]`: how many connections, requests and bytes this replica holds at a time.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Largest request body.
    #[default(Parsed(32 << 20))]
    pub max_body: Parsed<Size>,
    /// Maximum number of client connections; beyond it, the longest idle ones are closed, first
    /// those of addresses with more than an equal share. Lowered at start if the process has too
    /// few file descriptors (docs/adr/0035).
    #[schemars(range(min = 1))]
    #[default(16_384)]
    pub max_connections: u32,
    /// Maximum number of connections per client address (IPv6: per /64). Default: half of
    /// `max_connections`. Does not apply to `users.trusted_proxies`.
    #[schemars(range(min = 1))]
    pub max_connections_per_address: Option<u32>,
    /// Maximum number of requests in flight, counted once their bodies have been received; as many
    /// more may still be uploading. Lowered like `max_connections`.
    #[schemars(range(min = 1))]
    #[default(16_384)]
    pub max_requests: u32,
    /// Maximum number of requests per client address (IPv6: per /64), uploads included. Default:
    /// half of `max_requests`. Does not apply to `users.trusted_proxies`.
    #[schemars(range(min = 1))]
    pub max_requests_per_address: Option<u32>,
    /// Maximum number of requests in flight per user at this replica. Default: half of
    /// `max_requests`.
    #[schemars(range(min = 1))]
    pub max_requests_per_user: Option<u32>,
    /// Maximum total size of request bodies held in memory, from their first byte to the head of
    /// the response; a body takes up to three times its length. Default: a quarter of the cgroup's
    /// (container's) memory limit, at least `max_body` and at most 1 GiB.
    pub max_held_bodies: Option<Parsed<Size>>,
    /// How much of a response is buffered for a slow client; counts towards `max_held_bodies`.
    #[default(Parsed(1 << 20))]
    pub read_ahead: Parsed<Size>,
    /// Maximum number of concurrent streams per HTTP/2 connection.
    #[schemars(range(min = 1))]
    #[default(100)]
    pub max_streams: u32,
}

/// Keys of `[usage]`: whether engines are asked to report the usage of streams.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UsageConfig {
    /// Which usage reports to request from engines for streams, in addition to those the client
    /// requests.
    pub splice: UsageRequest,
}

/// Keys of `[timeouts]`: how long clients and engines may take for each part of a request.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TimeoutsConfig {
    /// Timeout for connecting to a backend.
    #[default(ms(2_000))]
    pub connect: Parsed<Span>,
    /// Longest pause while receiving a request body; `1s` while more than half of the allowed
    /// uploads are in progress.
    #[default(ms(30_000))]
    pub body_idle: Parsed<Span>,
    /// Timeout for the first byte of a backend's response.
    #[default(ms(600_000))]
    pub first_byte: Parsed<Span>,
    /// Longest pause within a backend's response.
    #[default(ms(300_000))]
    pub idle: Parsed<Span>,
    /// Longest time that a client may stop reading a response.
    #[default(ms(60_000))]
    pub untaken: Parsed<Span>,
    /// Longest time in total that a slow client may keep a backend waiting during one response.
    #[default(ms(10_000))]
    pub held_back: Parsed<Span>,
}

/// Keys of `[probes]`: how often engines are probed, and what counts as healthy.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProbesConfig {
    /// Interval between health probes of a backend. Two failures in a row make it unhealthy, one
    /// success makes it healthy.
    #[default(ms(1_000))]
    pub interval: Parsed<Span>,
    /// Timeout of a probe.
    #[default(ms(2_000))]
    pub timeout: Parsed<Span>,
    /// Interval at which a backend's model list is refreshed.
    #[default(ms(10_000))]
    pub models_interval: Parsed<Span>,
    /// Path to probe. Default: the first of `/ready`, `/health` and `/v1/models` that the engine
    /// serves.
    pub health_path: Option<Parsed<UrlPath>>,
    /// Panic threshold, as in Envoy: when the share of healthy backends of a model, in percent, is
    /// below this, those that served a request recently are used even if their probes time out or
    /// get bad responses; if there were no requests recently, those that once did are tried with
    /// single requests. Backends that refuse connections are never used. 0 disables it.
    #[schemars(range(max = 100))]
    #[default(50)]
    pub panic_threshold_percent: u32,
    /// File with an API key for probes, sent as `authorization: Bearer KEY` to the backends in this
    /// file that have no `api_key_file` themselves. Default: none is sent.
    pub api_key_file: Option<PathBuf>,
}

/// Keys of `[circuit]`: when a failing backend gets no more requests, and when it is tried again.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CircuitConfig {
    /// Number of failures among the last 20 attempts (no connection, broken or timed out before the
    /// first byte, or a 5xx) that opens a backend's circuit; 0 disables it. Failures of a single
    /// user do not count while others are answered.
    #[default(5)]
    pub failures: u32,
    /// Minimum share of failures among these attempts, in percent.
    #[schemars(range(min = 1, max = 100))]
    #[default(50)]
    pub failure_percent: u32,
    /// Maximum share of a model's backends, in percent, that open circuits may exclude at a time;
    /// always at least one, never all.
    #[schemars(range(max = 100))]
    #[default(50)]
    pub max_ejection_percent: u32,
    /// How long an open circuit rejects requests before a single trial request is allowed. Doubles
    /// with each failed trial.
    #[default(ms(1_000))]
    pub backoff: Parsed<Span>,
    /// Upper bound of that backoff.
    #[default(ms(30_000))]
    pub max_backoff: Parsed<Span>,
}

/// Keys of `[retry]`: how often and after which failures a request is tried on another backend.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RetryConfig {
    /// Maximum number of backends a request is tried on.
    #[schemars(range(min = 1, max = 16))]
    #[default(3)]
    pub attempts: u32,
    /// Retry budget: percentage of a model's requests in flight that may be retries after a
    /// refusal.
    #[schemars(range(max = 100))]
    #[default(20)]
    pub budget_percent: u32,
    /// Number of concurrent retries that are always allowed.
    #[default(3)]
    pub min_concurrency: u32,
    /// Statuses of a backend on which a request is retried on the next one.
    #[default(vec![Parsed(503)])]
    pub statuses: Vec<Parsed<Status>>,
}

/// Keys of `[drain]`: how long a replica that stops still takes connections and finishes requests.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DrainConfig {
    /// After SIGTERM: how long new connections are still accepted, until DNS no longer leads here.
    #[default(ms(5_000))]
    pub dns_ttl: Parsed<SpanOrZero>,
    /// After `dns_ttl`: how long requests in flight may take to finish.
    #[default(ms(30_000))]
    pub deadline: Parsed<SpanOrZero>,
}

/// Keys of `[log]`: level and format of the log, and the access log.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Format of the log on stderr.
    pub format: LogFormat,
    /// Log level, or a filter such as `info,raft=debug`.
    #[default(Parsed("info".to_owned()))]
    pub level: Parsed<LogFilter>,
    /// Access log: `off`, `errors` (a line per request that got a 4xx or 5xx or whose response
    /// broke off, at most 20 of either kind per second) or `all` (a line per request). Its target
    /// is `quorate::access`, its fields are in docs/reference/access-log.md.
    pub access: LoggedRequests,
    /// File for the access log; without it, the access log goes to stderr with the rest of the log.
    /// Lines are appended, and SIGHUP and `quorate config reload` reopen the file, so that it can
    /// be rotated. `/dev/stdout` works if stdout is a terminal, a pipe or a file.
    pub access_file: Option<PathBuf>,
    /// Format of the lines of `access_file`.
    pub access_format: AccessFormat,
}

/// Keys of `[tracing]`: where spans are exported to, and for which requests.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// URL of the gRPC listener of an OTLP collector that receives requests' spans, such as
    /// `http://127.0.0.1:4317`. Without it, there are no spans.
    pub otlp_endpoint: Option<Parsed<EngineUrl>>,
    /// Fraction of requests without a `traceparent` to trace; a request with one is traced if its
    /// `sampled` flag is set.
    #[default(Parsed(1_000_000))]
    pub sample: Parsed<SampleForm>,
}

/// Format of lines of the access log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AccessFormat {
    /// One JSON object per line, as on stderr with `format = "json"`.
    #[default]
    Json,
    /// Pairs of `key=value`, quoted where necessary.
    Logfmt,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text.
    #[default]
    Human,
    /// One JSON object per line.
    Json,
}

impl LimitsConfig {
    /// Maximum number of connections per address; by default one address leaves half to others.
    #[must_use]
    pub fn connections_per_address_max(&self) -> u32 {
        let half = self.max_connections.div_ceil(2);
        self.max_connections_per_address.unwrap_or(half)
    }

    /// Maximum number of requests per address.
    #[must_use]
    pub fn requests_per_address_max(&self) -> u32 {
        let half = self.max_requests.div_ceil(2);
        self.max_requests_per_address.unwrap_or(half)
    }

    /// Maximum number of requests per user.
    #[must_use]
    pub fn requests_per_user_max(&self) -> u32 {
        let half = self.max_requests.div_ceil(2);
        self.max_requests_per_user.unwrap_or(half)
    }
}

fn list<F: Form>(texts: &[&str]) -> Vec<Parsed<F>> {
    let read = |text: &&str| F::read(text).expect("a default has its key's form");
    texts.iter().map(read).map(Parsed).collect()
}
