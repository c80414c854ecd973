//! Config: read once from file, environment and flags into a checked [`Config`]; every fault is
//! told at once.

mod admission;
mod admission_keys;
mod checks;
mod cluster;
mod engines;
mod fault;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod key;
pub(crate) mod key_file;
mod keys;
mod layers;
mod listener_keys;
mod models;
mod policy;
mod policy_keys;
mod print;
mod read;
mod requests;
mod routing;
mod schema;
mod traffic;
mod traffic_keys;
mod value;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::backends::{CircuitSettings, EngineKeys};
use api::prompt::ModelSettings;
use api::proxy::{ApiKeys, Expose, FieldRules, HeaderRules, IdentifyBy, IpPrefix, UsageRequest};
use api::routing::SelectSettings;
use state::admission::AdmissionSettings;
use state::command::BackendSpec;
use state::ids::ReplicaId;
use state::policy::{PolicyConfig, RoutingSettings};

pub use fault::{Fault, Faults, Place};
pub use layers::{Layers, Settings};
pub use print::print;
pub use schema::schema;

/// Everything `quorate serve` is told. Checked: what stands here can be acted on.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Who this replica is.
    pub node: Node,
    /// Where it listens.
    pub listen: Listen,
    /// How it finds and keeps its cluster.
    pub cluster: Cluster,
    /// How prompts become blocks; the first entry that matches a model counts.
    pub models: Vec<ModelSettings>,
    /// Backends to register at start when the registry does not know them.
    pub backends: Vec<BackendSpec>,
    /// Policy of a new cluster.
    pub policy: PolicyConfig,
    /// Policies that a request may ask for; none: requests may not ask.
    pub policy_overrides: Vec<PolicyConfig>,
    /// What routing of a new cluster follows beside its policy.
    pub routing: RoutingSettings,
    /// Labels that backends must have.
    pub select: SelectSettings,
    /// When backends that fail are passed over.
    pub circuit: CircuitSettings,
    /// What of requests reaches engines.
    pub requests: Requests,
    /// Keys that engines want; show themselves nowhere.
    pub engine_keys: EngineKeys,
    /// Files that hold keys.
    pub secret_files: Vec<PathBuf>,
    /// The admin listener.
    pub admin: AdminListener,
    /// How a new cluster admits requests.
    pub admission: AdmissionSettings,
    /// Longest wait in overload.
    pub codel_target: Duration,
    /// Highest priority that a request may ask for.
    pub priority_max: i16,
    /// How requests are charged.
    pub users: Users,
    /// Bounds on what clients send.
    pub limits: Limits,
    /// Which usage reports are asked of engines.
    pub usage_splice: UsageRequest,
    /// Patience with backends.
    pub timeouts: Timeouts,
    /// How backends are probed.
    pub probes: Probes,
    /// Second tries.
    pub retry: Retry,
    /// How the replica leaves.
    pub drain: Drain,
    /// What is logged and how.
    pub log: Log,
}

/// `[node]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `1..=255`.
    pub id: ReplicaId,
    /// Log, vote and snapshots live below it.
    pub data_dir: PathBuf,
}

/// `[listen]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// Clients.
    pub data: SocketAddr,
    /// Admin API.
    pub admin: SocketAddr,
    /// Other replicas.
    pub peer: SocketAddr,
    /// Host that others are told, IPv6 in brackets; the ports are those really bound.
    pub advertise: String,
}

/// `[admin]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AdminListener {
    /// Host names it goes by, beside addresses, `localhost` and what the replica is known as.
    pub hosts: Vec<String>,
}

/// `[requests]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requests {
    /// Paths that are routed beside the built-in ones.
    pub extra_paths: Vec<String>,
    /// What becomes of fields of bodies.
    pub fields: FieldRules,
    /// Headers that do not reach engines.
    pub strip_headers: HeaderRules,
}

/// `[cluster]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// What it is called.
    pub name: String,
    /// What its replicas share.
    pub secret: Option<raft::Secret>,
    /// Whether replicas without it are spoken to as well.
    pub is_secret_optional: bool,
    /// How the cluster is found at the first start.
    pub formation: Formation,
    /// Longest wait of a learnt fact.
    pub flush_interval: Duration,
    /// Leader's heartbeat interval.
    pub heartbeat: Duration,
    /// Range an election timeout is drawn from.
    pub election_timeout: Range<Duration>,
    /// Log entries between snapshots.
    pub snapshot_every_entries: u64,
    /// Log bytes between snapshots.
    pub snapshot_every_bytes: u64,
}

/// How a replica without data finds its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Formation {
    /// It is the whole cluster.
    Alone,
    /// With these peers, once so many answer.
    Peers {
        /// Peer listeners.
        peers: Vec<String>,
        /// How many begin.
        expect: usize,
    },
    /// With the peers a name resolves to, once so many answer.
    Dns {
        /// `host:port`.
        name: String,
        /// How many begin.
        expect: usize,
    },
    /// Through any of these members of an existing cluster.
    Join(Vec<String>),
}

/// `[users]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Users {
    /// Where a user is looked for, in order.
    pub identify_by: Vec<IdentifyBy>,
    /// Who speaks for many clients.
    pub trusted_proxies: Vec<IpPrefix>,
    /// Accepted API keys; `None`: any.
    pub api_keys: Option<ApiKeys>,
    /// Where they are read again when it changes.
    pub api_keys_file: Option<PathBuf>,
    /// What clients are told beside answers.
    pub expose: Expose,
}

/// `[limits]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Largest request body.
    pub body_bytes_max: u64,
    /// Most client connections.
    pub connections_max: u32,
    /// Most of one address.
    pub connections_per_address_max: u32,
    /// Most requests under way.
    pub requests_max: u32,
    /// Most of one address.
    pub requests_per_address_max: u32,
    /// Most of one user.
    pub requests_per_user_max: u32,
    /// Most bytes of bodies held; `None`: by the memory there is.
    pub held_bytes_max: Option<u64>,
    /// Most bytes of an answer read ahead.
    pub read_ahead_bytes_max: u64,
    /// Most streams of an h2 connection.
    pub streams_max: u32,
}

/// `[timeouts]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeouts {
    /// Until a connection is open.
    pub connect: Duration,
    /// Between two pieces of a request's body.
    pub body_idle: Duration,
    /// Until the answer begins.
    pub first_byte: Duration,
    /// Between two pieces of an answer.
    pub idle: Duration,
    /// Of an answer that nobody takes.
    pub untaken: Duration,
    /// Of a backend that a client keeps waiting.
    pub held_back: Duration,
}

/// `[probes]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probes {
    /// From one health probe to the next.
    pub interval: Duration,
    /// Of one probe.
    pub timeout: Duration,
    /// From one model list to the next.
    pub models_interval: Duration,
    /// What is probed; `None`: found out.
    pub health_path: Option<String>,
    /// Below which share of healthy backends probes are doubted.
    pub panic_threshold_percent: u32,
}

/// `[retry]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retry {
    /// Most backends tried.
    pub attempts: u32,
    /// Retries per hundred requests under way.
    pub budget_percent: u32,
    /// Retries whatever is under way.
    pub concurrency_min: u32,
    /// Statuses that send a request on.
    pub statuses: Vec<u16>,
}

/// `[drain]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// How long new connections are still taken.
    pub dns_ttl: Duration,
    /// How long requests may then go on.
    pub deadline: Duration,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// Whether lines are JSON.
    pub is_json: bool,
    /// A `tracing` filter.
    pub filter: String,
}

/// Where a config is read from.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// The file; `None`: environment and flags only.
    pub file: Option<PathBuf>,
    /// `section.key=value` each.
    pub flags: Vec<String>,
    /// Environment variables.
    pub variables: Vec<(String, String)>,
}

impl Origin {
    /// This file and these flags over this process's environment. Variables that are not UTF-8 are
    /// no setting's.
    #[must_use]
    pub fn of_process(file: Option<PathBuf>, flags: Vec<String>) -> Self {
        let variables = std::env::vars_os()
            .filter_map(|(name, text)| Some((name.into_string().ok()?, text.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("QUORATE_"))
            .collect();
        Self {
            file,
            flags,
            variables,
        }
    }

    fn text(&self) -> Result<(String, String), Faults> {
        let Some(path) = &self.file else {
            let name = "environment and flags (no --config FILE)";
            return Ok((name.to_owned(), String::new()));
        };
        let name = path.display().to_string();
        match read_file(path) {
            Ok(text) => Ok((name, text)),
            Err(fault) => Err(Faults::new(name, String::new(), vec![fault])),
        }
    }
}

fn read_file(path: &Path) -> Result<String, Fault> {
    let bytes = std::fs::read(path).map_err(|error| Fault {
        message: format!("read {}: {error}", path.display()),
        expected: "a config file in TOML".to_owned(),
        place: Place::Nowhere,
    })?;
    String::from_utf8(bytes).map_err(|error| Fault {
        message: format!(
            "{} is not UTF-8 from byte {}",
            path.display(),
            error.utf8_error().valid_up_to()
        ),
        expected: "a config file in TOML".to_owned(),
        place: Place::Nowhere,
    })
}

/// A checked config together with the settings it came from.
#[derive(Debug)]
pub struct Loaded {
    /// What to act on.
    pub config: Config,
    /// Where every value came from.
    pub settings: Settings,
    /// The file's name, for [`print()`].
    pub file: String,
}

/// Reads and checks a config.
///
/// # Errors
/// All [`Faults`] at once.
pub fn load(origin: &Origin) -> Result<Loaded, Faults> {
    let (file, text) = origin.text()?;
    let layers = Layers {
        file: &text,
        variables: &origin.variables,
        flags: &origin.flags,
    };
    read(&file, &layers)
}

/// Reads and checks the layers of a config in the file `name`.
fn read(name: &str, layers: &Layers<'_>) -> Result<Loaded, Faults> {
    let mut settings = Settings::read(layers);
    let file = name.to_owned();
    match checks::check(&mut settings) {
        Some(config) if settings.faults.is_empty() => Ok(Loaded {
            config,
            settings,
            file,
        }),
        _ => Err(Faults::new(file, layers.file.to_owned(), settings.faults)),
    }
}
