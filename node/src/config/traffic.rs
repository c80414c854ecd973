//! The keys of a config file, continued: traffic of clients and engines, shutdown, log.

use std::path::PathBuf;
use std::time::Duration;

use api::engines::backends::AllowedEngines;
use api::proxy::{
    Charges, Expose, IdentifyBy, IpPrefix, LoggedRequests, REFUSED_FIELDS, STRIPPED_FIELDS,
    STRIPPED_HEADERS, UsageRequest,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use state::command::UserDefaults;

use super::form::{
    As, AsList, AsOption, DiskSpace, EngineRule, EngineUrl, HeaderField, HostName, Identity,
    LogFilter, Origin, PlainName, Prefix, RoutedPath, SampleForm, SpanOrZero,
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
    #[serde(with = "AsList::<HostName>")]
    pub hosts: Vec<String>,
    /// Engines that this replica connects to: addresses, prefixes such as `10.0.0.0/8`, host names
    /// such as `gpu-1` or `*.engines.internal`, Unix sockets of KV events such as
    /// `ipc:///run/vllm/*`. A name is allowed if it is listed, or resolves to a listed address.
    /// Default: all. Link-local addresses (`169.254.0.0/16`, `fe80::/10`) and other addresses of
    /// metadata services (docs/guide/security.md) must always be listed as addresses.
    #[serde(with = "AsList::<EngineRule>")]
    pub backends_allow: Vec<AllowedEngines>,
    /// Number of newest requests whose decisions this replica keeps in memory; 0: none, and none on
    /// disk. They take at most 64 MiB, and the blocks of their prompts at most 32 MiB.
    #[schemars(range(max = 1_000_000))]
    #[default(10_000)]
    pub decisions: u32,
}

/// Keys of `[decisions]`: what is kept of past decisions.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DecisionsConfig {
    /// Disk space for the decisions of all replicas, in `decisions` of the data directory, for `GET
    /// /admin/v1/decisions`; `0`: none. A decision takes about 0.2 KB plus 40 bytes per backend.
    #[serde(with = "As::<DiskSpace>")]
    #[default(256 << 20)]
    pub disk_max: u64,
}

/// Keys of `[requests]`: which paths are routed, and what is refused or removed on the way to an
/// engine.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RequestsConfig {
    /// Paths to which a POST with a JSON `model` is routed, in addition to those in
    /// docs/guide/security.md. Engines' control routes stay closed.
    #[serde(with = "AsList::<RoutedPath>")]
    pub extra_paths: Vec<String>,
    /// Top-level body fields that make a request fail with a 400.
    #[serde(with = "AsList::<PlainName>")]
    #[default(list(&REFUSED_FIELDS))]
    pub refuse_fields: Vec<String>,
    /// Top-level body fields that are removed before a request goes to an engine; all other bytes
    /// stay as they are. Without `priority` here and `x-vllm-priority` in `strip_headers`, clients'
    /// requests may overtake all others in engines.
    #[serde(with = "AsList::<PlainName>")]
    #[default(list(&STRIPPED_FIELDS))]
    pub strip_fields: Vec<String>,
    /// Headers that are not forwarded to engines. A trailing `*` matches any suffix.
    #[serde(with = "AsList::<PlainName>")]
    #[default(list(&STRIPPED_HEADERS))]
    pub strip_headers: Vec<String>,
}

/// Keys of `[cors]`: which web pages may call this replica from a browser.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CorsConfig {
    /// Origins of web pages that may use this replica from a browser; `*`: any. Default: none;
    /// responses then carry only the CORS headers that engines set.
    #[serde(with = "AsList::<Origin>")]
    pub allow_origins: Vec<String>,
}

/// Keys of `[users]`: how users are identified, which API keys are accepted, and what their
/// responses carry.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UsersConfig {
    /// Where a request's user comes from: the first of these that applies, else `anonymous`. Names
    /// that clients give themselves become `header:NAME` (unless sent by `trusted_proxies`) or
    /// `body:NAME`, and count only if no keys are checked.
    #[serde(with = "AsList::<Identity>")]
    #[default(IdentifyBy::defaults())]
    pub identify_by: Vec<IdentifyBy>,
    /// Addresses of load balancers and other proxies. They may name users in a header, and limits
    /// per client address do not apply to them.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "AsList::<Prefix>")]
    #[default(IpPrefix::LOOPBACK.to_vec())]
    pub trusted_proxies: Vec<IpPrefix>,
    /// File with the accepted API keys, one per line, optionally followed by the user the key
    /// belongs to. Keys are not forwarded to engines. Reloaded when it changes. Without it, any key
    /// is accepted and forwarded to the engine, which may check it, unless `require_key` is set.
    /// Keys of the cluster (`quorate key create`, `qk-...`) are accepted as well.
    pub api_keys_file: Option<PathBuf>,
    /// Refuse requests without a key of the cluster or of `api_keys_file`.
    #[schemars(extend("x-basic" = true))]
    pub require_key: bool,
    /// How long this replica may be cut off from the cluster before it refuses requests with a key
    /// of the cluster (503, and the replica is not ready), because the key may have been revoked
    /// meanwhile. After a restart, it refuses them until it has heard from the cluster. `0s`: it
    /// serves them however long it is cut off.
    #[serde(with = "As::<SpanOrZero>")]
    pub refuse_stale_keys_after: Duration,
    /// When the end of a response reaches its client: `asynchronous`, at once (a replica that dies
    /// loses the charges of its last `cluster.flush_interval`), or `durable`, once its charge is
    /// committed (docs/guide/admission.md).
    pub charges: Charges,
    /// Which headers responses carry: `none`, `basic` (`x-request-id`, `x-quorate-replica`, and
    /// `x-quorate-ignored` with the request's headers that had no effect) or `full` (also the
    /// decision, unless the request was refused: `x-quorate-backend`, `-prefill`, `-policy`,
    /// `-prefix`, `-index`). `full` lets clients learn what others asked (docs/guide/security.md).
    pub expose: Expose,
    /// Defaults of users.
    pub defaults: UserDefaults,
}

/// Keys of `[sessions]`: whether requests belong to sessions, and which headers name them.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SessionsConfig {
    /// Recognise the sessions of agents and chats, and the trees that they form.
    #[default(true)]
    pub enabled: bool,
    /// Headers that name sessions, after those of known clients and before the body; the first
    /// entry that a request has counts. At most 16.
    pub headers: Vec<SessionHeadersConfig>,
}

/// Keys of an entry of `[[sessions.headers]]`: the headers of one kind of client. The first entry
/// whose `session` header a request has counts, after the headers of known clients
/// (docs/guide/agents.md) and before the body.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SessionHeadersConfig {
    /// Header with the name of the session.
    #[serde(with = "As::<HeaderField>")]
    pub session: String,
    /// Header with the name of the session that started it. Default: sessions have no parent.
    #[serde(with = "AsOption::<HeaderField>")]
    pub parent: Option<String>,
}

/// Keys of `[usage]`: whether engines are asked to report the usage of streams.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UsageConfig {
    /// Which usage reports to request from engines for streams, in addition to those the client
    /// requests.
    pub splice: UsageRequest,
}

/// Keys of `[drain]`: how long a replica that stops still takes connections and finishes requests.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DrainConfig {
    /// After SIGTERM: how long new connections are still accepted, until DNS no longer leads here.
    #[serde(with = "As::<SpanOrZero>")]
    #[default(Duration::from_secs(5))]
    pub dns_ttl: Duration,
    /// After `dns_ttl`: how long requests in flight may take to finish.
    #[serde(with = "As::<SpanOrZero>")]
    #[default(Duration::from_secs(30))]
    pub deadline: Duration,
}

/// Keys of `[log]`: level and format of the log, and the access log.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Format of the log on stderr, access log included: lines of text, or of JSON.
    pub format: LogFormat,
    /// Log level, or a filter such as `info,raft=debug`.
    #[serde(with = "As::<LogFilter>")]
    #[default("info".to_owned())]
    pub level: String,
    /// Access log: `off`, `errors` (a line per request that got a 4xx or 5xx or whose response
    /// broke off, at most 20 of either kind per second) or `all` (a line per request). Its target
    /// is `quorate::access`, its fields are in docs/reference/access-log.md.
    pub access: LoggedRequests,
}

/// Keys of `[tracing]`: where spans are exported to, and for which requests.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TracingConfig {
    /// URL of the gRPC listener of an OTLP collector that receives requests' spans, such as
    /// `http://127.0.0.1:4317`. Without it, there are no spans.
    #[serde(with = "AsOption::<EngineUrl>")]
    pub otlp_endpoint: Option<String>,
    /// Fraction of requests without a `traceparent` to trace; a request with one is traced if its
    /// `sampled` flag is set.
    #[serde(with = "As::<SampleForm>")]
    #[default(1_000_000)]
    pub sample: u32,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

fn list(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}
