//! The replicated settings by key, and the differences between a config file and a cluster.
//!
//! A config file only sets the initial settings of a cluster; afterwards the cluster's own values
//! apply. A setting differs if the file sets it to another value than the cluster has. Settings
//! that the file leaves out never differ.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::prices::PriceTable;
use arc_swap::ArcSwap;
use serde_json::Value;
use state::Registry;
use state::admission::AdmissionSettings;
use state::command::{BackendSpec, UserDefaults};
use state::policy::{PolicyConfig, RoutingSettings};

/// Key of a replicated setting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SettingKey {
    /// `routing.policy`.
    Policy,
    /// A setting of the policy: `routing.POLICY.NAME`.
    PolicySetting {
        /// Name of the policy.
        policy: String,
        /// Name of the setting.
        name: String,
    },
    /// Another key of `[routing]`, by name.
    Routing(String),
    /// `policy` of a model, by the model's name.
    ModelPolicy(String),
    /// A setting of a model's own policy: `models.MODEL.POLICY.NAME`.
    ModelSetting {
        /// Name of the model.
        model: String,
        /// Name of the policy.
        policy: String,
        /// Name of the setting.
        name: String,
    },
    /// A key of `[admission]`, as a path: `max_wait`.
    Admission(String),
    /// A key of `[users.defaults]`, as a path: `limits.requests`.
    UserDefault(String),
    /// A key of a backend.
    Backend {
        /// Id of the backend.
        id: String,
        /// Name of the key.
        name: String,
    },
}

/// Formats the key as a path in a config file. Names and ids stand for the entries of lists:
/// `backends.ID.url`.
impl fmt::Display for SettingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy => f.write_str("routing.policy"),
            Self::PolicySetting { policy, name } => write!(f, "routing.{policy}.{name}"),
            Self::Routing(name) => write!(f, "routing.{name}"),
            Self::ModelPolicy(model) => write!(f, "models.{model}.policy"),
            Self::ModelSetting {
                model,
                policy,
                name,
            } => write!(f, "models.{model}.{policy}.{name}"),
            Self::Admission(path) => write!(f, "admission.{path}"),
            Self::UserDefault(path) => write!(f, "users.defaults.{path}"),
            Self::Backend { id, name } => write!(f, "backends.{id}.{name}"),
        }
    }
}

/// Settings by key.
pub type SettingValues = BTreeMap<SettingKey, Value>;

/// The replicated settings of a cluster except its backends, or those with which a config would
/// found one.
#[derive(Debug, Clone, Copy)]
pub struct ReplicatedSettings<'a> {
    /// Policy of the models without their own.
    pub policy: &'a PolicyConfig,
    /// The other routing settings.
    pub routing: &'a RoutingSettings,
    /// Admission settings.
    pub admission: &'a AdmissionSettings,
    /// Defaults of users.
    pub user_defaults: &'a UserDefaults,
}

impl ReplicatedSettings<'_> {
    /// Returns these settings and those of `backends` by key.
    #[must_use]
    pub fn values<'a>(&self, backends: impl Iterator<Item = &'a BackendSpec>) -> SettingValues {
        let mut values = SettingValues::new();
        for (name, value) in fields(self.policy) {
            let key = match name.as_str() {
                "policy" => SettingKey::Policy,
                _ => SettingKey::PolicySetting {
                    policy: self.policy.name().to_owned(),
                    name,
                },
            };
            values.insert(key, value);
        }
        for (name, value) in fields(self.routing) {
            if name != "models" {
                values.insert(SettingKey::Routing(name), value);
            }
        }
        for (model, policy) in &self.routing.models {
            for (name, value) in fields(policy) {
                let key = match name.as_str() {
                    "policy" => SettingKey::ModelPolicy(model.clone()),
                    _ => SettingKey::ModelSetting {
                        model: model.clone(),
                        policy: policy.name().to_owned(),
                        name,
                    },
                };
                values.insert(key, value);
            }
        }
        let admission = leaves(self.admission);
        values.extend(admission.map(|(path, value)| (SettingKey::Admission(path), value)));
        let defaults = leaves(self.user_defaults);
        values.extend(defaults.map(|(path, value)| (SettingKey::UserDefault(path), value)));
        for spec in backends {
            for (name, value) in fields(spec) {
                let id = spec.id.clone();
                if name != "id" {
                    values.insert(SettingKey::Backend { id, name }, value);
                }
            }
        }
        values
    }
}

fn fields(settings: &impl serde::Serialize) -> serde_json::map::IntoIter {
    let fields = match serde_json::to_value(settings) {
        Ok(Value::Object(fields)) => fields,
        // Settings are structs with names for keys.
        Ok(_) | Err(_) => serde_json::Map::new(),
    };
    fields.into_iter()
}

/// Returns the fields of a struct, by path. A field that is a table is replaced by its fields;
/// deeper tables are not split.
fn leaves<T: serde::Serialize>(settings: &T) -> impl Iterator<Item = (String, Value)> + use<T> {
    fields(settings).flat_map(|(name, value)| match value {
        Value::Object(table) => {
            let below = table.into_iter();
            let below = below.map(|(below, value)| (format!("{name}.{below}"), value));
            below.collect::<Vec<_>>()
        }
        value => vec![(name, value)],
    })
}

/// Returns the settings in effect in a cluster. Of an engine's ranks, it includes only the first.
#[must_use]
pub fn in_effect(registry: &Registry) -> SettingValues {
    let settings = ReplicatedSettings {
        policy: &registry.policy,
        routing: &registry.routing,
        admission: &registry.admission,
        user_defaults: &registry.user_defaults,
    };
    let put = registry.backends.iter().filter(|it| !it.is_further_rank());
    settings.values(put.map(|backend| &backend.spec))
}

/// A setting that has different values in a config file and in the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Key of the setting.
    pub key: SettingKey,
    /// Value in the file.
    pub file: Value,
    /// Value in effect in the cluster; null if there is none.
    pub cluster: Value,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Value| match value {
            Value::Null => "nothing".to_owned(),
            value => value.to_string(),
        };
        let (file, cluster) = (shown(&self.file), shown(&self.cluster));
        write!(f, "{}: file {file}, cluster {cluster}", self.key)
    }
}

/// Returns the settings in `stated` that differ from the cluster's. `cluster` returns the cluster's
/// value of a key, or null if there is none. A policy's settings are compared only if both sides
/// use this policy. Of a backend that the cluster lacks, only the URL is reported.
#[must_use]
pub fn differences(
    stated: &SettingValues,
    cluster: impl Fn(&SettingKey) -> Value,
) -> Vec<Difference> {
    let is_same = |key: &SettingKey, policy: &String| cluster(key) == *policy;
    let is_comparable = |key: &SettingKey| match key {
        // If the policy differs, or the backend is missing, only that is reported.
        SettingKey::PolicySetting { policy, .. } => is_same(&SettingKey::Policy, policy),
        SettingKey::ModelSetting { model, policy, .. } => {
            is_same(&SettingKey::ModelPolicy(model.clone()), policy)
        }
        SettingKey::Backend { id, name } => name == "url" || !cluster(&url_of(id)).is_null(),
        SettingKey::Policy
        | SettingKey::Routing(_)
        | SettingKey::ModelPolicy(_)
        | SettingKey::Admission(_)
        | SettingKey::UserDefault(_) => true,
    };
    let stated = stated.iter().filter(|(key, _)| is_comparable(key));
    let differing = stated.filter_map(|(key, file)| {
        let cluster = cluster(key);
        (cluster != *file).then(|| Difference {
            key: key.clone(),
            file: file.clone(),
            cluster,
        })
    });
    differing.collect()
}

/// Returns the key of a backend's URL.
#[must_use]
pub fn url_of(id: &str) -> SettingKey {
    SettingKey::Backend {
        id: id.to_owned(),
        name: "url".to_owned(),
    }
}

/// Settings of a replica's config: those to compare with the cluster's, and its own.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FileSettings {
    /// Replicated settings that the config sets.
    pub stated: SettingValues,
    /// Settings that concern only this replica, by key.
    pub local: BTreeMap<String, LocalSetting>,
    /// Prices of tokens by model, from `[[prices]]`.
    pub prices: PriceTable,
}

/// The [`FileSettings`] of a replica, replaced when its config is reloaded. All clones share one
/// value.
#[derive(Debug, Clone, Default)]
pub struct SharedFileSettings(Arc<ArcSwap<FileSettings>>);

impl SharedFileSettings {
    /// Creates a shared value that contains `settings`.
    #[must_use]
    pub fn new(settings: FileSettings) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(settings)))
    }

    /// Returns the current settings.
    #[must_use]
    pub fn now(&self) -> Arc<FileSettings> {
        self.0.load_full()
    }

    /// Replaces the settings for all clones.
    pub fn replace(&self, settings: FileSettings) {
        self.0.store(Arc::new(settings));
    }
}

/// A setting that concerns only one replica.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalSetting {
    /// Value in effect.
    pub value: Value,
    /// Whether the config sets it; `false`: the value is the default.
    pub is_set: bool,
}

impl FileSettings {
    /// Returns the settings of this config that differ from those in effect in the cluster.
    #[must_use]
    pub fn differences(&self, registry: &Registry) -> Vec<Difference> {
        let cluster = in_effect(registry);
        differences(&self.stated, |key| {
            cluster.get(key).cloned().unwrap_or_default()
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use state::RouterState;
    use state::policy::{CostSettings, LmetricSettings};

    use super::*;

    fn spec(id: &str, url: &str) -> BackendSpec {
        serde_json::from_value(json!({ "id": id, "url": url })).unwrap()
    }

    fn registry() -> Registry {
        let mut registry = Registry::clone(&RouterState::new().view().registry());
        registry.policy = PolicyConfig::Cost(CostSettings::default());
        let lmetric = PolicyConfig::Lmetric(LmetricSettings::default());
        registry.routing = RoutingSettings {
            models: BTreeMap::from([("m".to_owned(), lmetric)]),
            ..RoutingSettings::default()
        };
        registry
    }

    fn told(stated: &[(SettingKey, Value)]) -> Vec<String> {
        let file = FileSettings {
            stated: stated.iter().cloned().collect(),
            ..FileSettings::default()
        };
        let differences = file.differences(&registry());
        differences.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn differences_between_file_and_cluster_are_listed() {
        let setting = |policy: &str, name: &str| SettingKey::PolicySetting {
            policy: policy.to_owned(),
            name: name.to_owned(),
        };
        let model = |policy: &str, name: &str| SettingKey::ModelSetting {
            model: "m".to_owned(),
            policy: policy.to_owned(),
            name: name.to_owned(),
        };
        let backend = |name: &str| SettingKey::Backend {
            id: "gpu-1".to_owned(),
            name: name.to_owned(),
        };
        assert_eq!(told(&[]), Vec::<String>::new());
        let same = [
            (SettingKey::Policy, json!("cost")),
            (setting("cost", "prefill_ns_per_token"), json!(100_000)),
            (SettingKey::Admission("max_wait".to_owned()), json!("10s")),
            (SettingKey::Routing("learn".to_owned()), json!(true)),
        ];
        assert_eq!(told(&same), Vec::<String>::new());
        let other = [
            (setting("cost", "prefill_ns_per_token"), json!(5)),
            // The policy `lmetric` is not in use.
            (setting("lmetric", "base_tokens"), json!(5)),
            (model("lmetric", "base_tokens"), json!(7)),
            (SettingKey::ModelPolicy("n".to_owned()), json!("random")),
            (SettingKey::Admission("bins".to_owned()), json!(2)),
            (SettingKey::UserDefault("budget.day".to_owned()), json!(9)),
            (SettingKey::UserDefault("cache".to_owned()), json!("shared")),
            (backend("url"), json!("http://a:1")),
            // The cluster lacks this backend.
            (backend("capacity_blocks"), json!(5)),
        ];
        let expected = [
            "routing.cost.prefill_ns_per_token: file 5, cluster 100000",
            "models.n.policy: file \"random\", cluster nothing",
            "models.m.lmetric.base_tokens: file 7, cluster 256",
            "admission.bins: file 2, cluster 1",
            "users.defaults.budget.day: file 9, cluster nothing",
            "backends.gpu-1.url: file \"http://a:1\", cluster nothing",
        ];
        assert_eq!(told(&other), expected);
        let policy = [
            (SettingKey::Policy, json!("lmetric")),
            (setting("lmetric", "base_tokens"), json!(5)),
        ];
        let expected = ["routing.policy: file \"lmetric\", cluster \"cost\""];
        assert_eq!(told(&policy), expected);
    }

    #[test]
    fn every_setting_has_a_key() {
        let mut registry = registry();
        registry.backends = vec![state::Backend {
            handle: state::ids::BackendRef {
                slot: state::ids::Slot(0),
                incarnation: state::ids::Incarnation(1),
            },
            spec: spec("gpu-1", "http://a:1"),
            draining: false,
            moves_streams: false,
            facts: state::command::EngineFacts::default(),
        }];
        let values = in_effect(&registry);
        let keys: Vec<String> = values.keys().map(ToString::to_string).collect();
        for key in [
            "routing.policy",
            "routing.cost.prefill_ns_per_token",
            "routing.prediction_off_permille",
            "models.m.policy",
            "models.m.lmetric.base_tokens",
            "admission.max_queue",
            "admission.inter_token",
            "users.defaults.weight_milli",
            "users.defaults.limits.window",
            "users.defaults.budget.month",
            "backends.gpu-1.url",
            "backends.gpu-1.capacity_blocks",
        ] {
            assert!(keys.iter().any(|it| it == key), "{key} in {keys:?}");
        }
        let is_table = |value: &Value| value.as_object().is_some_and(|it| !it.is_empty());
        assert!(!values.values().any(is_table), "{values:?}");
    }
}
