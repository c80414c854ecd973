//! The keys of a config file: one struct per section. The comment of a field is the key's
//! description in the reference and the schema, so write it for operators.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use api::engines::backends::{CircuitSettings, ProbeSettings};
use api::engines::discovery::{EngineScheme, KubernetesAccess};
use api::model_names::SplitBy;
use api::prompt::TokenizerSpec;
use api::proxy::picker::PickerSettings;
use api::proxy::{ProxyLimits, ProxyTimeouts, RetrySettings, StreamSettings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use state::command::BackendRole;
use state::ids::ReplicaId;
use state::policy::{
    Disaggregate, POLICY_NAMES, PairSettings, PolicyTables, RoutingSettings, VisibleTiers,
};

use super::admission::AdmissionConfig;
use super::form::{
    Address, As, AsList, AsOption, ClusterName, EngineUrl, FractionForm, Host, HostPort, NodeId,
    Span, SpanRange, TokenizerName,
};
use super::identity::IdSource;
use super::prices::PriceConfig;
use super::tls::TlsConfig;
use super::traffic::{
    AdminConfig, CorsConfig, DecisionsConfig, DrainConfig, LogConfig, RequestsConfig,
    SessionsConfig, TracingConfig, UsageConfig, UsersConfig,
};

/// A config file of a replica.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ConfigFile {
    /// Start even if a listener that others can reach is not protected: `listen.admin` off loopback
    /// without `admin.tokens_file` or `tls.admin.client_ca_file`, or without `[tls.admin]` or
    /// `tls.admin.terminated_upstream`, or `listen.peer` without `[tls.peer]` or
    /// `cluster.secret_file`. The log, `/readyz`, `quorate status` and the metric
    /// `quorate_insecure` then say so. The same as `quorate serve --insecure`.
    pub insecure: bool,
    /// Identity and storage of this replica.
    pub node: NodeConfig,
    /// Addresses that this replica listens on.
    pub listen: ListenConfig,
    /// The cluster that this replica belongs to, and its replication.
    pub cluster: ClusterConfig,
    /// How backends are chosen. `PUT /admin/v1/policy` and `/admin/v1/routing` change a running
    /// cluster.
    pub routing: RoutingConfig,
    /// Gateways that ask for endpoints, at `listen.picker`.
    pub picker: PickerSettings,
    /// Certificates of the listeners, and of connections to other replicas and engines.
    pub tls: TlsConfig,
    /// Queueing and fairness between users. See docs/guide/admission.md.
    pub admission: AdmissionConfig,
    /// The admin API: who may use it, and what it may do.
    pub admin: AdminConfig,
    /// What is kept of past decisions.
    pub decisions: DecisionsConfig,
    /// Which requests are routed, and what is removed from them first.
    pub requests: RequestsConfig,
    /// Web pages that may use this replica from a browser.
    pub cors: CorsConfig,
    /// Who a request's user is, which API keys are accepted, and what responses tell.
    pub users: UsersConfig,
    /// Sessions of agents and chats, and how requests name them. See docs/guide/agents.md.
    pub sessions: SessionsConfig,
    /// What clients may take of this replica's connections, requests and memory.
    pub limits: ProxyLimits,
    /// Usage reports that are requested from engines.
    pub usage: UsageConfig,
    /// How long clients and engines may take.
    pub timeouts: ProxyTimeouts,
    /// Health probes of backends.
    pub probes: ProbeSettings,
    /// Circuit breakers: a backend that keeps failing gets no requests for a while.
    pub circuit: CircuitSettings,
    /// Retries on other backends.
    pub retry: RetrySettings,
    /// What happens to a stream whose backend fails. See docs/guide/streams.md.
    pub streams: StreamSettings,
    /// What happens between SIGTERM and the end of the process.
    pub drain: DrainConfig,
    /// The log of the process, and the access log.
    pub log: LogConfig,
    /// Traces of requests, exported to an OpenTelemetry collector. See docs/guide/tracing.md.
    pub tracing: TracingConfig,
    /// Tokenizer, block size and policy of models. The first entry that matches a model applies.
    pub models: Vec<ModelConfig>,
    /// Names that are divided among models by weight. See docs/guide/models.md.
    #[schemars(length(max = 256))]
    pub splits: Vec<SplitConfig>,
    /// Backends to register at start. Later changes go through the admin API.
    pub backends: Vec<BackendConfig>,
    /// What tokens cost, by model. See docs/guide/usage.md.
    pub prices: Vec<PriceConfig>,
    /// Sources that add and remove backends while the cluster runs. See docs/guide/discovery.md.
    pub discovery: Vec<DiscoveryConfig>,
}

/// Keys of `[node]`: the replica's id and its data directory.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// This replica's id, unique in the cluster; or `from-hostname`: the number after the last `-`
    /// of the host name, plus one, for the pods of a StatefulSet (`quorate-0` is 1).
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "As::<NodeId>")]
    #[default(IdSource::Number(ReplicaId(0)))]
    pub id: IdSource,
    /// Directory for the log, the vote, the snapshots and past decisions.
    #[schemars(extend("x-basic" = true))]
    #[default("/var/lib/quorate".into())]
    pub data_dir: PathBuf,
}

/// Keys of `[listen]`: an address per kind of caller, and the host that other replicas use.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ListenConfig {
    /// Listener for clients.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "As::<Address>")]
    #[default(loopback(8080))]
    pub data: SocketAddr,
    /// Listener for the admin API, metrics and readiness checks.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "As::<Address>")]
    #[default(loopback(8081))]
    pub admin: SocketAddr,
    /// Listener for other replicas.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "As::<Address>")]
    #[default(loopback(8082))]
    pub peer: SocketAddr,
    /// Listener for scrapers and orchestrators, which serves only `/metrics`, `/livez` and `/readyz`,
    /// as plain HTTP and without a token, also to others than this host. Default: none; the admin
    /// listener serves them too.
    #[serde(with = "AsOption::<Address>")]
    pub metrics: Option<SocketAddr>,
    /// Listener for gateways that ask which engine a request goes to: an endpoint picker of the
    /// Gateway API Inference Extension, over gRPC, usually on port 9002. Default: none. See
    /// docs/guide/gateways.md.
    #[serde(with = "AsOption::<Address>")]
    pub picker: Option<SocketAddr>,
    /// Listener for KEDA, which asks how many engines each model needs: an external scaler, over gRPC.
    /// Uses TLS if `[tls.admin]` has a certificate. Default: none. See docs/guide/kubernetes.md.
    #[serde(with = "AsOption::<Address>")]
    pub scaler: Option<SocketAddr>,
    /// Host under which other replicas reach this one, without a port. Default: the address of
    /// `listen.peer`.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "AsOption::<Host>")]
    pub advertise: Option<String>,
}

/// Keys of `[cluster]`: how the replica finds the others, who may vote, and how often they
/// replicate and take snapshots.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Name of the cluster. Replicas with different names refuse each other.
    #[serde(with = "As::<ClusterName>")]
    #[default("quorate".to_owned())]
    pub name: String,
    /// Peer listeners of all replicas that form the cluster. Without `peers`, `peers_dns` and
    /// `join` this replica forms a cluster of one.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "AsList::<HostPort>")]
    pub peers: Vec<String>,
    /// DNS name that resolves to the peer listeners of all replicas; instead of `peers`.
    #[serde(with = "AsOption::<HostPort>")]
    pub peers_dns: Option<String>,
    /// Number of replicas, this one included, that must answer before a new cluster is formed: more
    /// than half of `peers`. Required with `peers_dns`. Default: all of `peers`.
    #[schemars(range(min = 1))]
    pub bootstrap_expect: Option<u8>,
    /// Join an existing cluster through any of these; instead of `peers`.
    #[serde(with = "AsList::<HostPort>")]
    pub join: Vec<String>,
    /// Let a replica that lost its data directory rejoin under its id: the leader removes the old
    /// member, unless that one still runs, and adds the new one. Set it on all replicas, and only
    /// if something, such as a StatefulSet, keeps two replicas from running under one id.
    pub replace_lost: bool,
    /// Let the leader promote learners to voters automatically, keeping the number of voters odd
    /// and at most five. Without it, use `quorate member promote`. Set it on all replicas, and only
    /// with `secret_file` or `[tls.peer]`: any replica that may join becomes a voter.
    pub auto_promote: bool,
    /// How long a learner must keep up with the log before it is promoted.
    #[serde(skip)]
    #[default(Duration::from_secs(10))]
    pub promote_after: Duration,
    /// Maximum number of voters under `auto_promote`. Further replicas serve as learners. Five
    /// tolerate two failures, and every voter beyond makes a majority slower.
    #[serde(skip)]
    #[default(5)]
    pub voters_max: u8,
    /// File with a shared secret of at least 32 bytes. Replicas authenticate each other with it and
    /// encrypt their traffic. Without it, anybody who reaches `listen.peer` is trusted.
    #[schemars(extend("x-basic" = true))]
    pub secret_file: Option<PathBuf>,
    /// Also talk to replicas that cannot authenticate yet. Only for adding `secret_file` or
    /// `[tls.peer]` to a running cluster (docs/guide/security.md). With `[tls.peer]`, replicas
    /// without a certificate then need the secret, if `secret_file` is set.
    pub authentication_optional: bool,
    /// Interval at which a replica proposes what it learned to the log while requests are many. It
    /// proposes at once while nothing is under way.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_millis(20))]
    pub flush_interval: Duration,
    /// Interval of the leader's heartbeats. Must exceed a round trip between replicas: an
    /// unanswered heartbeat is dropped after it.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_millis(50))]
    pub heartbeat: Duration,
    /// Range from which election timeouts are drawn.
    #[serde(with = "As::<SpanRange>")]
    #[default(Duration::from_millis(150)..Duration::from_millis(300))]
    pub election_timeout: Range<Duration>,
    /// Log entries between snapshots; 256 MiB of them cause one earlier.
    #[schemars(range(min = 1))]
    #[default(50_000)]
    pub snapshot_every: u32,
    /// Log bytes between snapshots; whichever limit is reached first.
    #[serde(skip)]
    #[default(256 << 20)]
    pub snapshot_every_bytes: u64,
    /// The StatefulSet whose pods the replicas are.
    pub statefulset: StatefulSetConfig,
}

/// Keys of `[cluster.statefulset]`: the StatefulSet whose size decides which replicas are members.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct StatefulSetConfig {
    /// Name of the StatefulSet whose pods the replicas are, with `node.id = "from-hostname"`. A
    /// replica beyond its `replicas` leaves the cluster for good when it is stopped, or is removed
    /// when it has been absent for a minute, and a removed replica within them asks to rejoin. Not
    /// set: operators do both.
    pub name: Option<String>,
    /// How long a member beyond `replicas` must be absent before the leader removes it.
    #[serde(skip)]
    #[default(Duration::from_secs(60))]
    pub remove_absent_after: Duration,
    /// Namespace and API server; by default those of the pod.
    #[serde(skip)]
    pub access: KubernetesAccess,
}

/// Keys of `[routing]`: the policy of a new cluster, what requests may override, and a table of
/// settings per policy.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RoutingConfig {
    /// Routing policy of a new cluster. Later use `PUT /admin/v1/policy`.
    #[schemars(extend("enum" = POLICY_NAMES))]
    #[default("cost".to_owned())]
    pub policy: String,
    /// Let requests choose a policy with `x-quorate-policy`, which uses the settings below, and
    /// select backends by label with `x-quorate-select: key=value,...`.
    pub allow_override: bool,
    /// Longest queue at which a request for a LoRA adapter is restricted to the engines that have
    /// it in memory.
    #[serde(skip)]
    #[default(api::engines::backends::QUEUEING_THRESHOLD_LORA)]
    pub queueing_threshold_lora: u32,
    /// Longest wait until the replica has applied the index in a request's `x-quorate-min-index`.
    #[serde(with = "As::<Span>")]
    #[default(api::proxy::MIN_INDEX_WAIT)]
    pub min_index_wait: Duration,
    /// Let `cost` use prices learned per backend instead of its settings. Read when a cluster is
    /// created; later use `PUT /admin/v1/routing`.
    #[default(RoutingSettings::default().learn)]
    pub learn: bool,
    /// Cache tiers of engines that policies see. Without it, `cost` sees all, because it knows what
    /// loading from a tier costs, and other policies see the GPU. Read when a cluster is created;
    /// later use `PUT /admin/v1/routing`.
    pub tiers: Option<VisibleTiers>,
    /// Settings of the policies.
    #[serde(flatten)]
    pub policies: PolicyTables,
}

/// Keys of an entry of `[[models]]`: how a model's prompts are cut into blocks and routed.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Model id, or `*` for any model; the first match is used.
    pub name: String,
    /// How prompts are tokenized: `character` (not at all), `tiktoken:cl100k_base`,
    /// `tiktoken:o200k_base`, `huggingface:FILE` with the path of a `tokenizer.json`, `engine` (by
    /// the engine's `/tokenize`), or `engine:FILE` (by that file, compared with the engine). See
    /// docs/guide/tokenizers.md.
    #[serde(with = "As::<TokenizerName>")]
    #[default(TokenizerSpec::Character)]
    pub tokenizer: TokenizerSpec,
    /// Chat template for `huggingface` and `engine:FILE`. Default: `chat_template.jinja`, else
    /// `tokenizer_config.json`, in the tokenizer's directory.
    pub chat_template: Option<PathBuf>,
    /// Block size in tokens, or in bytes for `character`. Default: as the model's engines report,
    /// 16 until one has; 128 for `character`. With `kv_events` it must divide the engine's.
    #[schemars(range(min = 1, max = 65_536))]
    pub block_size: Option<u32>,
    /// Routing policy of this model, with the settings of its `[routing.NAME]` table. Default:
    /// `routing.policy`. Read when a cluster is created; later use `PUT
    /// /admin/v1/policy?model=NAME`.
    #[schemars(extend("enum" = POLICY_NAMES))]
    pub policy: Option<String>,
    /// Other names of this model: a request for one of them is a request for the model. Each replica
    /// has its own setting. See docs/guide/models.md.
    pub aliases: Vec<String>,
    /// Model that serves the requests while no engine of this one can: none is registered, up and
    /// not drained. Busy engines are waited for. Users who are not allowed the fallback do not get
    /// it. Each replica has its own setting.
    pub fallback: Option<String>,
    /// Time for which requests wait while no engine of this model is up, because one is being started
    /// for them. Default: they get an error at once. Each replica has its own setting.
    #[serde(with = "AsOption::<Span>")]
    pub hold_at_zero: Option<Duration>,
    /// Labels that a backend must have to serve this model.
    pub select: BTreeMap<String, String>,
    /// Whether prompts go through a backend with `role = "prefill"` first: `off`, `always`, or
    /// `auto`, if more than `disaggregate_above_tokens` of their tokens are not cached. Without
    /// such backends it has no effect. Each replica has its own setting.
    pub disaggregate: Disaggregate,
    /// Uncached prompt tokens above which `auto` uses two backends.
    #[default(PairSettings::ABOVE_TOKENS_DEFAULT)]
    pub disaggregate_above_tokens: u32,
}

/// Keys of an entry of `[[splits]]`: a name that is divided among models. Replicas with the same
/// setting choose the same model.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SplitConfig {
    /// The name; no model and no alias may have it.
    pub model: String,
    /// What stays with one model: `user`, `session` (else the user), or `request`, nothing. Requests
    /// without a user are divided one by one.
    pub by: SplitBy,
    /// The models with their shares.
    #[schemars(length(min = 1, max = 64))]
    pub to: Vec<SplitTargetConfig>,
}

/// Keys of an entry of `to`: a model and its share of a split.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SplitTargetConfig {
    /// Name or alias of the model.
    pub model: String,
    /// Share of the model, in proportion to the sum of all weights, which is at most 1000.
    #[default(1)]
    #[schemars(range(min = 1, max = 1000))]
    pub weight: u32,
}

/// Keys of an entry of `[[backends]]`: an engine, its credentials, and where it publishes KV
/// events.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BackendConfig {
    /// Id of the backend: letters, digits, `.`, `_`, `-`. Backends listed here that are missing are
    /// registered at every start, unless they were removed through the admin API; differences in
    /// known ones are reported (`quorate config diff`), not applied.
    #[schemars(extend("x-basic" = true))]
    pub id: String,
    /// Address of the engine: `http://host:port` or `https://host:port`, with a path prefix if its
    /// API has one. The port is 80 or 443 by default. A host name is resolved again every 30 s.
    #[schemars(extend("x-basic" = true))]
    #[serde(with = "As::<EngineUrl>")]
    pub url: String,
    /// Model ids it serves; `*`: those the engine lists.
    #[schemars(length(min = 1))]
    #[default(vec!["*".to_owned()])]
    pub models: Vec<String>,
    /// Labels of the backend, matched by a model's `select` and the header `x-quorate-select`.
    pub labels: BTreeMap<String, String>,
    /// File with the engine's API key, sent as `authorization: Bearer KEY` with probes and requests
    /// instead of the client's key. It stays on this replica and is sent only to this `id` at this
    /// `url`, never to a backend registered elsewhere through the admin API. Default: see
    /// `probes.api_key_file` and `users.api_keys_file`.
    pub api_key_file: Option<PathBuf>,
    /// File with headers, one `name: value` per line, sent to the engine with probes and requests
    /// in place of the client's key and of headers with these names; instead of `api_key_file`,
    /// with the same rules.
    pub headers_file: Option<PathBuf>,
    /// Name that the engine's certificate must be for. It applies to this replica and this `url`
    /// only. Default: the host of the URL.
    #[serde(with = "AsOption::<Host>")]
    pub server_name: Option<String>,
    /// Capacity of its cache, of each rank if it has several, in blocks of the model's `block_size`.
    /// Default: as the engine reports, corrected by its responses.
    #[schemars(range(min = 1))]
    pub capacity_blocks: Option<u32>,
    /// Endpoint of its KV events: `tcp://host:port` or `ipc:///path` if the engine listens,
    /// `bind:tcp://address:port` if the engine connects to the replica, or `auto` to ask the
    /// engine. Append `?ranks=N` for N data-parallel ranks. Default: none, ownership is tracked by
    /// leases.
    pub kv_events: Option<String>,
    /// Replay endpoint of its KV events: `tcp://host:port`. Without it, any missed message ends
    /// exact ownership.
    pub kv_replay: Option<String>,
    /// Stage of requests that it computes: `both`, `prefill` (prompts, for backends that decode) or
    /// `decode` (answers). See docs/guide/disaggregation.md.
    pub role: BackendRole,
}

/// Keys of an entry of `[[discovery]]`: a DNS name, a file or a Kubernetes selector that lists
/// engines.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoveryConfig {
    /// Id of the source, and the prefix of its backends' ids: letters, digits, `.`, `_`, `-`. The
    /// cluster stores it, so a source with a new id is a new source, and the backends of the old
    /// one stay until an operator removes them. Default: the kind.
    pub id: Option<String>,
    /// Kind of source: `dns`, `file` or `kubernetes`. See docs/guide/discovery.md.
    #[schemars(extend("enum" = ["dns", "file", "kubernetes"]))]
    pub kind: String,
    /// `dns`: the name of the engines with their port, such as `engines.prod.svc:8000`, whose A
    /// records are looked up, or AAAA if there are none; or a name of SRV records, which begins
    /// with `_` and has no port.
    pub name: Option<String>,
    /// `dns`: longest time between two lookups. A shorter TTL shortens it, down to 1 s.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(10))]
    pub interval: Duration,
    /// `dns`: name server to ask. Default: the system's.
    #[serde(with = "AsOption::<Address>")]
    pub resolver: Option<SocketAddr>,
    /// `file`: the file, read again within 2 s of a change: a list of tables with the keys of
    /// `[[backends]]`, as TOML, or as JSON if its name ends in `.json`.
    pub path: Option<PathBuf>,
    /// `kubernetes`: namespace of the pods. Default: that of this replica's pod.
    pub namespace: Option<String>,
    /// `kubernetes`: labels of the pods, such as `app=vllm,tier in (gpu)`.
    pub selector: Option<String>,
    /// `kubernetes`: name of an `InferencePool` that selects the pods; instead of `selector`.
    pub inference_pool: Option<String>,
    /// `kubernetes`: port of the engines. Default: the target ports of the pool, with an engine at
    /// each.
    #[schemars(range(min = 1))]
    pub port: Option<u16>,
    /// `dns` and `kubernetes`: scheme of the engines' URLs: `http` or `https`, which needs
    /// certificates for addresses.
    pub scheme: EngineScheme,
    /// `dns` and `kubernetes`: port of the engines' KV events, at the same address.
    #[schemars(range(min = 1))]
    pub kv_events_port: Option<u16>,
    /// `dns` and `kubernetes`: port of the replay endpoint for missed KV events.
    #[schemars(range(min = 1))]
    pub kv_replay_port: Option<u16>,
    /// Model ids that the engines serve; `*`: those that they list.
    #[schemars(length(min = 1))]
    #[default(vec!["*".to_owned()])]
    pub models: Vec<String>,
    /// Labels of the backends; they override those from the source.
    pub labels: BTreeMap<String, String>,
    /// Stage of requests that the engines compute, as in `[[backends]]`. A pod's label
    /// `quorate.role` and a file's entry override it.
    pub role: BackendRole,
    /// How long a backend that its source no longer lists drains before it is removed.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(30))]
    pub remove_after: Duration,
    /// Largest fraction of a source's backends that may drain at once because the source no longer
    /// lists them, or says that they are not ready. The others stay until those are gone.
    #[serde(with = "As::<FractionForm>")]
    #[schemars(extend("anyOf" = [{ "type": "number", "exclusiveMinimum": 0, "maximum": 1 }, { "type": "string" }]))]
    #[default(500)]
    pub max_remove_fraction: u32,
}

impl ListenConfig {
    /// Returns the host under which others reach this replica, IPv6 in brackets.
    #[must_use]
    pub fn host(&self) -> String {
        match (&self.advertise, self.peer.ip()) {
            (Some(host), _) => host.clone(),
            (None, peer) if peer.is_ipv6() => format!("[{peer}]"),
            (None, peer) => peer.to_string(),
        }
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}
