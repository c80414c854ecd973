//! Checks of `[routing]`, and its conversion to the settings of a new cluster and of this replica.

use std::collections::BTreeMap;

use api::routing::SelectSettings;
use state::command::Rejection;
use state::policy::{MODEL_POLICIES_MAX, PolicyConfig, RoutingSettings};

use super::file::ConfigFile;
use super::read::Settings;

/// Checks the settings of each policy.
pub(super) fn check_policies(policies: &[PolicyConfig], found: &mut Settings) {
    for policy in policies {
        let table = format!("routing.{}", policy.name());
        if let Err(Rejection::Invalid { field, expected }) = policy.validate()
            && found.is_sound(&table)
        {
            found.refuse_value(&format!("{table}.{field}"), &expected);
        }
    }
}

/// Returns the policy called `name`, which must be one of `policies`.
pub(super) fn named(policies: &[PolicyConfig], name: &str) -> PolicyConfig {
    let policy = policies.iter().find(|policy| policy.name() == name);
    let policy = policy.expect("the schema has the names of all policies and no others");
    policy.clone()
}

/// Returns the routing settings of a new cluster other than the general policy.
pub(super) fn settings(
    file: &ConfigFile,
    policies: &[PolicyConfig],
    found: &mut Settings,
) -> RoutingSettings {
    let mut models = BTreeMap::new();
    for (nth, model) in file.models.iter().enumerate() {
        let path = format!("models[{nth}].policy");
        let Some(policy) = &model.policy else {
            continue;
        };
        if model.name == "*" {
            let message = "a policy is set for the model \"*\"".to_owned();
            let expected = "routing.policy for models without one of their own";
            found.refuse(&path, message, expected);
            continue;
        }
        models.insert(model.name.clone(), named(policies, policy));
        if models.len() > MODEL_POLICIES_MAX {
            let message = format!("more than {MODEL_POLICIES_MAX} models have policies");
            found.refuse(&path, message, &format!("at most {MODEL_POLICIES_MAX}"));
            break;
        }
    }
    RoutingSettings {
        models,
        learn: file.routing.learn,
        tiers: file.routing.tiers,
        ..RoutingSettings::default()
    }
}

/// Returns the labels that backends must have, by model. A model without labels is included,
/// because it precedes a later `*`.
pub(super) fn select(file: &ConfigFile) -> SelectSettings {
    let models = file.models.iter().map(|model| {
        let labels = model.select.clone().into_iter().collect();
        (model.name.clone(), labels)
    });
    SelectSettings {
        allow: file.routing.allow_override,
        models: models.collect(),
    }
}
