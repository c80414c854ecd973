//! Configuration. Reads the file, environment variables and flags into a checked [`Config`], and
//! reports all errors together.
//!
//! `file`, `traffic`, `admission` and `tls` define the keys, as structs, beside the settings of the
//! code that uses them. `schema` derives
//! from them which values a key takes, `read` merges the layers, and `check` validates what
//! involves several keys. `import` makes a config from that of another router, by the tables of
//! `others`.

mod admission;
mod certificates;
mod check;
mod cluster;
mod discovery;
mod engines;
mod error;
mod file;
mod foreign_names;
mod form;
mod founding;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod identity;
pub(crate) mod import;
pub(crate) mod key_file;
mod models;
mod names;
mod others;
mod prices;
mod print;
mod read;
#[cfg(test)]
mod reference;
mod requests;
mod routing;
mod schema;
#[cfg(test)]
mod tests;
mod tls;
pub(crate) mod tokens_file;
mod traffic;

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use admin::AdminTokens;
use api::engines::backends::{EngineAddressRules, EngineKeys};
use api::engines::discovery::SourceSettings;
use api::model_names::ModelNames;
use api::prompt::ModelSettings;
use api::proxy::ApiKeys;
use api::routing::SelectSettings;
use api::settings::FileSettings;
use serde_json::Value;
use state::command::BackendSpec;
use state::ids::ReplicaId;
use state::policy::{POLICY_NAMES, PolicyConfig, RoutingSettings};

use self::read::{Layers, Settings};

pub use error::{ConfigError, ConfigErrors, Place};
pub use file::{ClusterConfig, ConfigFile, ListenConfig, NodeConfig, StatefulSetConfig};
pub(crate) use form::LogFilter;
pub use identity::IdSource;
pub use import::{ImportKind, Imported, import};
pub use print::{print, print_basic};
pub use schema::schema;
pub use tls::{
    AdminTlsConfig, BackendsTlsConfig, DataTlsConfig, PeerTlsConfig, PickerTlsConfig, TlsConfig,
};
pub use traffic::{
    AdminConfig, CorsConfig, DecisionsConfig, DrainConfig, LogConfig, LogFormat, RequestsConfig,
    SessionHeadersConfig, SessionsConfig, TracingConfig, UsageConfig, UsersConfig,
};

/// The checked configuration of `quorate serve`: the file's sections, through `Deref`, and what was
/// made of those that need more than reading.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The file's sections. Use the fields below for what they are made into.
    pub sections: ConfigFile,
    /// This replica's id.
    pub id: ReplicaId,
    /// How the replica finds its cluster at the first start.
    pub formation: Formation,
    /// The secret that the replicas of the cluster share; `None` if none is configured.
    pub secret: Option<raft::Secret>,
    /// Tokenizers and block sizes. The first entry that matches a model applies.
    pub models: Vec<ModelSettings>,
    /// Aliases, fallbacks and splits of models.
    pub names: ModelNames,
    /// Backends to register at start if they are missing.
    pub backends: Vec<BackendSpec>,
    /// Where further engines come from.
    pub discovery: Vec<SourceSettings>,
    /// Policy of a new cluster.
    pub policy: PolicyConfig,
    /// Policies that a request may choose. Empty: it may not choose.
    pub policy_overrides: Vec<PolicyConfig>,
    /// Other routing settings of a new cluster.
    pub routing: RoutingSettings,
    /// Labels that a backend must have.
    pub select: SelectSettings,
    /// Names in the certificates of engines, by URL, where it is not the host of the URL.
    pub server_names: BTreeMap<String, String>,
    /// Which addresses engines may have.
    pub engine_addresses: EngineAddressRules,
    /// API keys of the engines; never printed.
    pub engine_keys: EngineKeys,
    /// Accepted API keys; `None`: any.
    pub api_keys: Option<ApiKeys>,
    /// Accepted tokens of operators; `None`: everybody may do everything.
    pub admin_tokens: Option<AdminTokens>,
    /// Files that contain keys.
    pub secret_files: Vec<PathBuf>,
    /// Values of the replicated settings as configured, which `quorate config diff` compares with the
    /// cluster's.
    pub file: FileSettings,
}

impl Deref for Config {
    type Target = ConfigFile;

    fn deref(&self) -> &ConfigFile {
        &self.sections
    }
}

impl DerefMut for Config {
    fn deref_mut(&mut self) -> &mut ConfigFile {
        &mut self.sections
    }
}

/// How a replica without data finds its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Formation {
    /// It forms a cluster of one.
    Alone,
    /// It forms a cluster with these peers.
    Peers {
        /// Peer listeners, each `host:port`.
        peers: Vec<String>,
        /// Number of replicas, this one included, that must answer first.
        expect: usize,
    },
    /// It forms a cluster with the peers that a DNS name resolves to.
    Dns {
        /// Name and port, as `host:port`.
        name: String,
        /// Number of replicas, this one included, that must answer first.
        expect: usize,
    },
    /// It joins an existing cluster through any of these peer listeners.
    Join(Vec<String>),
}

/// Where a config is read from.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// Path of the file; `None` to use only environment variables and flags.
    pub file: Option<PathBuf>,
    /// Values of `--set`, each `section.key=value`.
    pub flags: Vec<String>,
    /// Environment variables, as pairs of name and value.
    pub variables: Vec<(String, String)>,
    /// URLs of backends in addition to those in the file.
    pub backends: Vec<String>,
}

impl Origin {
    /// Returns the origin with this file, if there is one, these flags and the environment of this
    /// process. Ignores variables that are not UTF-8.
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
            backends: Vec::new(),
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

/// Returns the environment variables of this process that another router reads, each with what takes
/// its place here.
#[must_use]
pub fn foreign_variables() -> Vec<(String, String)> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names
        .filter_map(|name| others::variable(&name).map(|ours| (name, ours)))
        .collect()
}

/// A checked config together with the values it was made from.
#[derive(Debug)]
pub struct Loaded {
    /// The config.
    pub config: Config,
    /// Name of the file.
    pub file: String,
    /// Text of the file.
    text: String,
    /// Every value, by section and key.
    pub(crate) values: Value,
    /// Where values that are set come from, by path.
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
        backends: &origin.backends,
    };
    read(&file, &layers)
}

/// Reads and checks the layers of a config in the file `name`.
fn read(name: &str, layers: &Layers<'_>) -> Result<Loaded, ConfigErrors> {
    let (file, text) = (name.to_owned(), layers.file.to_owned());
    let (settings, (values, mut config)) = Settings::read(layers, |settings| {
        let tree = Value::Object(settings.tree.clone());
        let file = serde_json::from_value(tree).unwrap_or_else(|error| {
            let expected = "values as in `quorate config schema`";
            settings.refuse("", error.to_string(), expected);
            ConfigFile::default()
        });
        let values = serde_json::to_value(&file).expect("keys are texts");
        (values, check::check(file, settings))
    });
    if !settings.errors.is_empty() {
        return Err(ConfigErrors::new(file, text, settings.errors));
    }
    config.file = founding::file_settings(&config, &values, &settings.places);
    Ok(Loaded {
        config,
        file,
        text,
        values,
        places: settings.places,
    })
}
