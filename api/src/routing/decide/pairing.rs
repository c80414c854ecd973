//! Types for deciding whether a request uses two backends.

use std::sync::Arc;

use state::ids::{BackendRef, LogIndex};
use state::policy::{Choice, PairSettings, PolicyConfig, PolicyRequest, WholeReason};
use tokio::time::Instant;

use super::decision_record::{DecisionBasis, PrefillRecord, PrefillView};
use super::routing_table::{PolicySource, RoutingTable};
use crate::prompt::ModelSettings;
use crate::routing::{RoutingRejection, RoutingRequest};

/// Settings for prefill backends by model. The first entry that names the model or `*` applies.
pub(in crate::routing) struct PairRules(Vec<(String, PairSettings)>);

impl PairRules {
    pub(in crate::routing) fn of(models: &[ModelSettings]) -> Self {
        let rule = |model: &ModelSettings| (model.name.clone(), model.pairs);
        Self(models.iter().map(rule).collect())
    }

    pub(in crate::routing) fn settings(&self, model: &str) -> PairSettings {
        let mut rules = self.0.iter();
        let found = rules.find(|(name, _)| name == model || name == "*");
        found.map_or_else(PairSettings::default, |(_, settings)| *settings)
    }
}

/// A request and the choice of a single backend for it, to compare with serving it on a pair.
pub(in crate::routing) struct WholeDecision<'a> {
    pub(in crate::routing) fleet: &'a RoutingTable,
    pub(in crate::routing) ask: &'a RoutingRequest<'a>,
    pub(in crate::routing) index: LogIndex,
    pub(in crate::routing) policy: &'a Arc<PolicyConfig>,
    pub(in crate::routing) policy_source: PolicySource,
    pub(in crate::routing) request: PolicyRequest,
    /// The backend that would serve the whole request; `None` if none can.
    pub(in crate::routing) choice: Option<Choice>,
    pub(in crate::routing) now: Instant,
}

impl<'a> WholeDecision<'a> {
    /// Returns the inputs of the decision, with `choice` as its result.
    pub(super) fn basis(&self, choice: Choice) -> DecisionBasis<'a> {
        DecisionBasis {
            index: self.index,
            policy: self.policy,
            policy_source: self.policy_source,
            request: self.request,
            choice,
        }
    }
}

/// Why a request does not use two backends.
#[derive(Debug, Clone, Copy)]
pub(super) struct PairRejection {
    /// Why a single backend serves the request; `None` if no backend computes prompts for others.
    pub(in crate::routing) whole: Option<WholeReason>,
    /// Rejection to return if no backend can serve the whole request.
    pub(in crate::routing) none: RoutingRejection,
}

impl From<WholeReason> for PairRejection {
    fn from(why: WholeReason) -> Self {
        let none = match why {
            WholeReason::NotSeparable => RoutingRejection::NotSeparable,
            WholeReason::NoPrefill | WholeReason::PrefillBusy => RoutingRejection::NoPrefill,
            WholeReason::Off | WholeReason::Short | WholeReason::NoDecode => {
                RoutingRejection::NoneHealthy
            }
        };
        let whole = Some(why);
        Self { whole, none }
    }
}

impl PairRejection {
    /// Returns the rejection for a prompt that no prefill backend can compute.
    pub(super) fn without_prefill(why: RoutingRejection) -> Self {
        let none = match why {
            RoutingRejection::UnknownModel | RoutingRejection::NoneHealthy => {
                RoutingRejection::NoPrefill
            }
            why => why,
        };
        let whole = Some(WholeReason::NoPrefill);
        Self { whole, none }
    }
}

/// A decision that uses one backend or two.
pub(super) struct SettledDecision<'a> {
    /// Inputs of the choice of the backend that answers.
    pub(super) basis: DecisionBasis<'a>,
    /// The backend that computes the prompt, or why the same backend computes it.
    pub(in crate::routing) prefill: Result<PrefillRecord, Option<WholeReason>>,
}

impl SettledDecision<'_> {
    /// Returns the prefill part of the decision for display, or why there is none; neither if no
    /// backend computes prompts for others. `names` resolves backends to their ids, if still known.
    pub(in crate::routing) fn view(
        &self,
        names: impl Fn(BackendRef) -> Option<Arc<str>>,
    ) -> (Option<PrefillView>, Option<WholeReason>) {
        match &self.prefill {
            Ok(prefill) => (Some(prefill.view(names)), None),
            Err(why) => (None, *why),
        }
    }
}
