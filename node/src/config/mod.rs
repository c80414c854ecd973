//! Config: read once from file, environment and flags into a checked [`Config`]; everything that is wrong
//! is told at once.
//!
//! `file`, `traffic` and `admission` have the keys, as structs. `schema` says what fits a key, `read`
//! lays the layers over each other by it, `check` looks at what depends on more than one key.

mod admission;
mod check;
mod cluster;
mod engines;
mod error;
mod file;
mod form;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub(crate) mod key_file;
mod models;
mod print;
mod read;
#[cfg(test)]
mod reference;
mod requests;
mod routing;
mod schema;
#[cfg(test)]
mod tests;
mod traffic;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::backends::{CircuitSettings, EngineKeys};
use api::prompt::ModelSettings;
use api::proxy::{ApiKeys, FieldRules, HeaderRules};
use api::routing::SelectSettings;
use serde_json::Value;
use state::admission::AdmissionSettings;
use state::command::BackendSpec;
use state::policy::{PolicyConfig, RoutingSettings};

use self::read::{Layers, Settings};

pub use error::{ConfigError, ConfigErrors, Place};
pub use file::{ClusterConfig, ConfigFile, ListenConfig, NodeConfig};
pub use form::Parsed;
pub(crate) use form::values;
pub use print::print;
pub use schema::schema;
pub use traffic::{
    AdminConfig, DrainConfig, LimitsConfig, LogConfig, LogFormat, ProbesConfig, RetryConfig,
    TimeoutsConfig, UsageConfig, UsersConfig,
};

/// Everything `quorate serve` is told. Checked: what stands here can be acted on.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// `[node]`.
    pub node: NodeConfig,
    /// `[listen]`.
    pub listen: ListenConfig,
    /// `[cluster]`.
    pub cluster: ClusterConfig,
    /// How the cluster is found at the first start.
    pub formation: Formation,
    /// What the cluster's replicas share.
    pub secret: Option<raft::Secret>,
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
    /// Paths that are routed beside the built-in ones.
    pub extra_paths: Vec<String>,
    /// What becomes of fields of bodies.
    pub fields: FieldRules,
    /// Headers that do not reach engines.
    pub strip_headers: HeaderRules,
    /// Keys that engines want; show themselves nowhere.
    pub engine_keys: EngineKeys,
    /// Accepted API keys; `None`: any.
    pub api_keys: Option<ApiKeys>,
    /// Files that hold keys.
    pub secret_files: Vec<PathBuf>,
    /// How a new cluster admits requests.
    pub admission: AdmissionSettings,
    /// Longest wait in overload.
    pub codel_target: Duration,
    /// Highest priority that a request may ask for.
    pub priority_max: i16,
    /// `[admin]`.
    pub admin: AdminConfig,
    /// `[users]`.
    pub users: UsersConfig,
    /// `[limits]`.
    pub limits: LimitsConfig,
    /// `[usage]`.
    pub usage: UsageConfig,
    /// `[timeouts]`.
    pub timeouts: TimeoutsConfig,
    /// `[probes]`.
    pub probes: ProbesConfig,
    /// `[retry]`.
    pub retry: RetryConfig,
    /// `[drain]`.
    pub drain: DrainConfig,
    /// `[log]`.
    pub log: LogConfig,
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

    fn text(&self) -> Result<(String, String), ConfigErrors> {
        let Some(path) = &self.file else {
            let name = "environment and flags (no --config FILE)";
            return Ok((name.to_owned(), String::new()));
        };
        let name = path.display().to_string();
        match read_file(path) {
            Ok(text) => Ok((name, text)),
            Err(error) => Err(ConfigErrors::new(name, String::new(), vec![error])),
        }
    }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    let bytes = std::fs::read(path).map_err(|error| ConfigError {
        message: format!("read {}: {error}", path.display()),
        expected: "a config file in TOML".to_owned(),
        place: Place::Nowhere,
    })?;
    String::from_utf8(bytes).map_err(|error| ConfigError {
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
    /// The file's name.
    pub file: String,
    /// What stands in it.
    text: String,
    /// Every value, by section and key.
    values: Value,
    /// Where those came from that are no defaults.
    places: BTreeMap<String, Place>,
}

/// Reads and checks a config.
///
/// # Errors
/// All [`ConfigErrors`] at once.
pub fn load(origin: &Origin) -> Result<Loaded, ConfigErrors> {
    let (file, text) = origin.text()?;
    let layers = Layers {
        file: &text,
        variables: &origin.variables,
        flags: &origin.flags,
    };
    read(&file, &layers)
}

/// Reads and checks the layers of a config in the file `name`.
fn read(name: &str, layers: &Layers<'_>) -> Result<Loaded, ConfigErrors> {
    let (file, text) = (name.to_owned(), layers.file.to_owned());
    let (settings, (values, config)) = Settings::read(layers, |settings| {
        let tree = Value::Object(settings.tree.clone());
        let file: ConfigFile = serde_json::from_value(tree).expect("what fits the schema is read");
        let values = serde_json::to_value(&file).expect("keys are texts");
        (values, check::check(file, settings))
    });
    if !settings.errors.is_empty() {
        return Err(ConfigErrors::new(file, text, settings.errors));
    }
    Ok(Loaded {
        config,
        file,
        text,
        values,
        places: settings.places,
    })
}
