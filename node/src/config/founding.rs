//! Founding keys: settings that only a new cluster takes from the config. Afterwards, the cluster's
//! replicated values apply, and the config's are only compared with them, except that backends that
//! the cluster does not know are registered.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use api::settings::{FileSettings, LocalSetting, ReplicatedSettings, SettingKey, SettingValues};
use serde_json::{Value, json};
use state::admission::AdmissionSettings;
use state::command::BackendSpec;
use state::policy::RoutingSettings;

use super::error::Place;
use super::prices;
use super::schema::{Section, join, sections};
use super::{Config, POLICY_NAMES};

/// Names of the replicated keys, by section.
struct FoundingKeys {
    routing: BTreeSet<String>,
    admission: BTreeSet<String>,
    backends: BTreeSet<String>,
}

static KEYS: LazyLock<FoundingKeys> = LazyLock::new(|| {
    let names = |settings: Value| match settings {
        Value::Object(fields) => fields.into_iter().map(|(name, _)| name).collect(),
        _ => BTreeSet::new(),
    };
    let spec = json!({ "id": "a", "url": "http://a:1" });
    let spec = serde_json::from_value::<BackendSpec>(spec).expect("these two fields suffice");
    let of = |settings: serde_json::Result<Value>| names(settings.expect("keys are texts"));
    FoundingKeys {
        routing: of(serde_json::to_value(RoutingSettings::default())),
        admission: of(serde_json::to_value(AdmissionSettings::default())),
        backends: of(serde_json::to_value(spec)),
    }
});

/// Whether a new cluster takes the key `name` from the config. `section` is the path of its table
/// or list of tables.
pub(super) fn founds(section: &str, name: &str) -> bool {
    let (area, below) = section.split_once('.').unwrap_or((section, ""));
    match area {
        "routing" if below.is_empty() => name == "policy" || KEYS.routing.contains(name),
        "routing" => POLICY_NAMES.contains(&below),
        "models" => name == "policy",
        "admission" => KEYS.admission.contains(name),
        "users" => below == "defaults" || below.starts_with("defaults."),
        "backends" => name != "id" && KEYS.backends.contains(name),
        _ => false,
    }
}

/// Returns the replicated settings that the config sets, and all settings of this replica alone.
/// `config` was made from `values` and `places`.
pub(super) fn file_settings(
    config: &Config,
    values: &Value,
    places: &BTreeMap<String, Place>,
) -> FileSettings {
    let founding = ReplicatedSettings {
        policy: &config.policy,
        routing: &config.routing,
        admission: &config.admission.founding,
        user_defaults: &config.users.defaults,
    };
    let founding = founding.values(config.backends.iter());
    let is_stated = |key: &SettingKey| {
        let path = path_of(key, values);
        path.is_some_and(|path| places.contains_key(&path))
    };
    let stated = founding.into_iter().filter(|(key, _)| is_stated(key));
    FileSettings {
        stated: stated.collect::<SettingValues>(),
        local: local(values, places),
        prices: prices::table(&config.sections.prices),
    }
}

/// Returns the path of a setting in the config; `None` if it belongs to a list entry that does not
/// exist.
fn path_of(key: &SettingKey, values: &Value) -> Option<String> {
    let entry = |list: &str, name: &str, of: &str| {
        let entries = values[list].as_array()?;
        let nth = entries.iter().position(|entry| entry[name] == of)?;
        Some(format!("{list}[{nth}]"))
    };
    Some(match key {
        SettingKey::Policy
        | SettingKey::Routing(_)
        | SettingKey::Admission(_)
        | SettingKey::UserDefault(_) => key.to_string(),
        SettingKey::PolicySetting { policy, name }
        | SettingKey::ModelSetting { policy, name, .. } => format!("routing.{policy}.{name}"),
        SettingKey::ModelPolicy(model) => join(&entry("models", "name", model)?, "policy"),
        SettingKey::Backend { id, name } => join(&entry("backends", "id", id)?, name),
    })
}

/// Keys that name the entries of lists, the first one that an entry has.
const ENTRY_NAMES: [&str; 5] = ["id", "name", "model", "session", "kind"];

/// Returns the settings of this replica alone, by path. Entries of lists have their names in it, and
/// their positions if they have none or share it.
fn local(values: &Value, places: &BTreeMap<String, Place>) -> BTreeMap<String, LocalSetting> {
    let mut local = BTreeMap::new();
    let mut add = |section: &Section, (shown, path): (&str, &str), table: &Value| {
        for (name, _) in &section.keys {
            if !founds(&section.path, name) {
                let setting = LocalSetting {
                    value: table[name.as_str()].clone(),
                    is_set: places.contains_key(&join(path, name)),
                };
                local.insert(join(shown, name), setting);
            }
        }
    };
    for section in sections() {
        let table = section.table(values);
        let Value::Array(entries) = table else {
            add(&section, (&section.path, &section.path), table);
            continue;
        };
        let mut taken = BTreeSet::new();
        for (nth, entry) in entries.iter().enumerate() {
            let path = format!("{}[{nth}]", section.path);
            let name = ENTRY_NAMES.iter().find_map(|key| entry[*key].as_str());
            let shown = match name.filter(|name| taken.insert(*name)) {
                Some(name) => join(&section.path, name),
                None => path.clone(),
            };
            add(&section, (&shown, &path), entry);
        }
    }
    local
}
