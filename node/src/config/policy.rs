//! Reads `[routing.NAME]` tables into policies, with the settings' own deserialization and
//! validation: a new policy needs no code here.

use serde_json::{Map, json};
use state::command::Rejection;
use state::policy::{POLICY_NAMES, PolicyConfig};

use super::fault::Fault;
use super::key::Absent;
use super::keys::KEYS;
use super::layers::Values;
use super::read::refuse;
use super::value::Value;

/// All policies with the settings of their tables; those whose settings are wrong are among the
/// faults.
pub(super) fn policies(values: &Values, faults: &mut Vec<Fault>) -> Vec<PolicyConfig> {
    let policy = |name: &&str| policy(name, values, faults);
    POLICY_NAMES.iter().filter_map(policy).collect()
}

/// The one called `name`.
pub(super) fn named(policies: &[PolicyConfig], name: &str) -> Option<PolicyConfig> {
    let found = policies.iter().find(|policy| policy.name() == name);
    found.cloned()
}

fn policy(name: &str, values: &Values, faults: &mut Vec<Fault>) -> Option<PolicyConfig> {
    let table = format!("routing.{name}");
    let mut settings = Map::new();
    settings.insert("policy".to_owned(), json!(name));
    let mut is_complete = true;
    for key in KEYS.iter().filter(|key| key.split().0 == table) {
        match values.get(key.path).map(|setting| &setting.value) {
            Some(Value::Integer(number)) => {
                settings.insert(key.split().1.to_owned(), json!(number));
            }
            Some(Value::Text(text)) => {
                settings.insert(key.split().1.to_owned(), json!(text));
            }
            // Wrong as such, or not set and without a default.
            _ => is_complete &= key.absent == Absent::Unset,
        }
    }
    if !is_complete {
        return None;
    }
    let policy: PolicyConfig = serde_json::from_value(settings.into())
        .expect("the key table names the settings' fields and their types");
    match policy.validate() {
        Ok(()) => Some(policy),
        Err(Rejection::Invalid { field, expected }) => {
            let path = format!("{table}.{field}");
            let found = values.get(path.as_str()).map(|setting| &setting.value);
            let found = found.map_or_else(String::new, ToString::to_string);
            refuse(
                values,
                &path,
                format!("{path} is {found}"),
                &expected,
                faults,
            );
            None
        }
        Err(other) => unreachable!("settings are invalid or not, this is {other}"),
    }
}
