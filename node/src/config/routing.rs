//! Routing settings other than the live policy: policies and labels of models, circuit breakers,
//! and what requests may choose.

use std::collections::BTreeMap;

use api::backends::CircuitSettings;
use api::routing::SelectSettings;
use state::policy::{MODEL_POLICIES_MAX, PolicyConfig, RoutingSettings};

use super::fault::Fault;
use super::layers::{Entry, Values};
use super::policy;
use super::read::{count, duration, flag, refuse, text};
use super::value::Value;

/// What routing of a new cluster follows beside its policy.
pub(super) fn settings(
    values: &Values,
    models: &[Entry],
    policies: &[PolicyConfig],
    faults: &mut Vec<Fault>,
) -> Option<RoutingSettings> {
    let mut of_models = BTreeMap::new();
    for entry in models {
        let (name, Some(policy)) = (text(&entry.values, "name")?, text(&entry.values, "policy"))
        else {
            continue;
        };
        if name == "*" {
            let message = "a policy is set for the model \"*\"".to_owned();
            let expected = "routing.policy for models without one of their own";
            refuse(&entry.values, "policy", message, expected, faults);
            continue;
        }
        of_models.insert(name, policy::named(policies, &policy)?);
        if of_models.len() > MODEL_POLICIES_MAX {
            let message = format!("more than {MODEL_POLICIES_MAX} models have policies");
            let expected = format!("at most {MODEL_POLICIES_MAX}");
            refuse(&entry.values, "policy", message, &expected, faults);
            return None;
        }
    }
    Some(RoutingSettings {
        models: of_models,
        learn: flag(values, "routing.learn")?,
        prediction_off_permille: count(values, "routing.prediction_off_permille")?,
    })
}

/// Labels that backends must have.
pub(super) fn select(values: &Values, models: &[Entry]) -> Option<SelectSettings> {
    let labels = |entry: &Entry| match &entry.values.get("select")?.value {
        Value::Labels(labels) => {
            let labels = labels.clone().into_iter().collect();
            Some((text(&entry.values, "name")?, labels))
        }
        _ => None,
    };
    // An entry without labels stands before a later `*` all the same.
    let models = models.iter().filter_map(|entry| {
        let name = text(&entry.values, "name")?;
        Some(labels(entry).unwrap_or_else(|| (name, Vec::new())))
    });
    Some(SelectSettings {
        allow: flag(values, "routing.allow_select")?,
        models: models.collect(),
    })
}

/// `[circuit]`.
pub(super) fn circuit(values: &Values, faults: &mut Vec<Fault>) -> Option<CircuitSettings> {
    let settings = CircuitSettings {
        failures: count(values, "circuit.failures")?,
        failure_percent: count(values, "circuit.failure_percent")?,
        ejection_percent_max: count(values, "circuit.max_ejection_percent")?,
        backoff: duration(values, "circuit.backoff")?,
        backoff_max: duration(values, "circuit.max_backoff")?,
    };
    if settings.backoff > settings.backoff_max {
        let shown = humantime::format_duration(settings.backoff_max);
        let message = format!("circuit.max_backoff is {shown}");
        let expected = "at least circuit.backoff";
        refuse(values, "circuit.max_backoff", message, expected, faults);
    }
    Some(settings)
}
