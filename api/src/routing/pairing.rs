//! What decisions about requests on two backends are made of.

use std::sync::Arc;

use state::ids::BackendRef;
use state::policy::{PairSettings, WholeReason};
use tokio::time::Instant;

use super::RoutingRequest;
use super::fleet::RoutingTable;
use super::record::{DecisionBasis, PrefillRecord, PrefillView};
use crate::prompt::ModelSettings;

/// When prompts go through a prefill backend, by model; the first match counts.
pub(super) struct PairRules(Vec<(String, PairSettings)>);

impl PairRules {
    pub(super) fn of(models: &[ModelSettings]) -> Self {
        let rule = |model: &ModelSettings| (model.name.clone(), model.pairs);
        Self(models.iter().map(rule).collect())
    }

    pub(super) fn settings(&self, model: &str) -> PairSettings {
        let mut rules = self.0.iter();
        let found = rules.find(|(name, _)| name == model || name == "*");
        found.map_or_else(PairSettings::default, |(_, settings)| *settings)
    }
}

/// A request with its whole choice, for which two backends may be better.
pub(super) struct WholeDecision<'a> {
    pub(super) fleet: &'a RoutingTable,
    pub(super) ask: &'a RoutingRequest<'a>,
    pub(super) basis: DecisionBasis<'a>,
    pub(super) now: Instant,
}

/// A request on one backend or two.
pub(super) struct SettledDecision<'a> {
    /// What the one that answers was chosen by.
    pub(super) basis: DecisionBasis<'a>,
    /// The one that computes the prompt, or why it is the same.
    pub(super) prefill: Result<PrefillRecord, Option<WholeReason>>,
}

impl SettledDecision<'_> {
    /// Shows the prefill side, or why there is none.
    pub(super) fn view(
        &self,
        names: impl Fn(BackendRef) -> Option<Arc<str>>,
    ) -> (Option<PrefillView>, Option<WholeReason>) {
        match &self.prefill {
            Ok(prefill) => (Some(prefill.view(names)), None),
            Err(why) => (None, *why),
        }
    }
}
