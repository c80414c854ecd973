//! Hold at zero: requests for a model without engines that are up wait in its queue, longer than
//! others, because an engine is being started for them.

use std::collections::BTreeSet;
use std::time::Duration;

use state::{Backend, Registry};

use super::{Admission, AdmissionTry};
use crate::model_names::ModelHealth;
use crate::routing::{RoutingRejection, RoutingRequest};

/// For how long requests for a model without engines wait, by model: the first entry that matches a
/// name counts. An entry called `"*"` holds requests for models that some backend names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HoldAtZero {
    /// Names of models with their times; `None` if requests are not held.
    entries: Vec<(String, Option<Duration>)>,
}

impl HoldAtZero {
    /// Creates the rules from the entries of a config, in order.
    #[must_use]
    pub fn new(entries: Vec<(String, Option<Duration>)>) -> Self {
        Self { entries }
    }

    /// Returns for how long a request for `model` waits, in milliseconds; `None` if it does not.
    fn of(&self, model: &str, registry: &Registry) -> Option<u64> {
        let mut entries = self.entries.iter();
        let (name, time) = entries.find(|(name, _)| name == model || name == "*")?;
        let time = (*time)?;
        // Clients must not create queues for models that they make up.
        let is_known = name != "*" || registry.names_model(model);
        is_known.then(|| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns the names of the models whose requests are held.
    fn names(&self) -> impl Iterator<Item = &str> {
        let held = self.entries.iter().filter(|(_, time)| time.is_some());
        held.map(|(name, _)| &**name).filter(|name| *name != "*")
    }
}

impl Admission {
    /// Sets for how long requests for models without engines wait. Default: not at all.
    #[must_use]
    pub fn hold_at_zero(mut self, holds: HoldAtZero) -> Self {
        self.holds = holds;
        self
    }

    /// Returns for how long a request for `model` waits while no engine of the model is up, in
    /// milliseconds; `None` if it does not.
    pub(super) fn hold_ms(&self, model: &str) -> Option<u64> {
        if self.holds.entries.is_empty() {
            return None;
        }
        self.holds.of(model, &self.view.registry())
    }

    /// Whether a request for a model without engines waits instead of being refused with `why`.
    pub(super) fn is_held(
        &self,
        ask: &RoutingRequest<'_>,
        which: AdmissionTry,
        why: RoutingRejection,
    ) -> bool {
        which == AdmissionTry::First && why.is_at_zero() && self.hold_ms(ask.model).is_some()
    }

    /// Returns why no engine can serve `model`; `None` if one is up.
    pub(super) fn lack(&self, model: &str) -> Option<RoutingRejection> {
        let is_served = || self.view.registry().is_served(model);
        let is_down = self.decider.model_health(model, None) == ModelHealth::Down;
        is_down.then(|| match is_served() {
            true => RoutingRejection::NoneHealthy,
            false => RoutingRejection::UnknownModel,
        })
    }

    /// Whether the config or a backend names `model`, as far as this replica knows.
    #[must_use]
    pub fn knows_model(&self, model: &str) -> bool {
        self.holds.names().any(|held| held == model) || self.view.registry().names_model(model)
    }

    /// Returns the models that the config or a backend of `registry` names.
    pub(super) fn known_models<'a>(&'a self, registry: &'a Registry) -> BTreeSet<&'a str> {
        let named = registry.backends.iter().flat_map(Backend::named_models);
        named.chain(self.holds.names()).collect()
    }
}
