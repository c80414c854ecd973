//! Requests on two backends: one computes the prompt, the other answers.
//!
//! Whether and which is decided by [`state::policy`]; here its candidates are gathered. The prefill
//! side passes the same filters as any backend. Backends of that side get no whole requests while
//! others can take them.

use std::cell::RefCell;
use std::sync::Arc;

use serde::Serialize;
use state::command::BackendRole;
use state::ids::BackendRef;
use state::policy::{
    self, Choice, Disaggregate, PairSettings, PolicyConfig, PolicyRequest, Reason, WholeReason,
};
use tokio::time::Instant;

use super::decide::Decider;
use super::fleet::{DecisionScratch, RoutingTable, matchable};
use super::record::{DecisionBasis, SeenBackendView, SeenCandidates};
use super::{PrefillDecision, RoutingRequest};
use crate::backends::BreakerState;
use crate::prompt::ModelSettings;
use crate::routing::fleet::user_of;

/// When prompts go through a prefill backend, by model; the first match counts.
pub(super) struct PairRules(Vec<(String, PairSettings)>);

impl PairRules {
    pub(super) fn of(models: &[ModelSettings]) -> Self {
        let rule = |model: &ModelSettings| (model.name.clone(), model.pairs);
        Self(models.iter().map(rule).collect())
    }

    fn settings(&self, model: &str) -> PairSettings {
        let mut rules = self.0.iter();
        let found = rules.find(|(name, _)| name == model || name == "*");
        found.map_or_else(PairSettings::default, |(_, settings)| *settings)
    }
}

/// A request with its whole choice, for which two backends may be better.
pub(super) struct WholeDecision<'a> {
    pub(super) fleet: &'a RoutingTable,
    pub(super) ask: &'a RoutingRequest<'a>,
    pub(super) basis: &'a DecisionBasis<'a>,
    pub(super) now: Instant,
}

/// Two backends for a request.
pub(super) struct PairDecision {
    pub(super) decode: Choice,
    pub(super) prefill: PrefillRecord,
}

/// The prefill side of a decision as it was made.
#[derive(Debug)]
pub(super) struct PrefillRecord {
    pub(super) backend: BackendRef,
    pub(super) name: Arc<str>,
    pub(super) choice: Choice,
    seen: SeenCandidates,
}

/// The prefill side of a decision with the numbers that it went by.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefillView {
    /// Id of the backend that computes the prompt.
    pub choice: String,
    /// Blocks it was believed to hold.
    pub matched: u32,
    /// Why it was chosen.
    pub reason: Reason,
    /// The candidates; at most 64, the best.
    pub backends: Vec<SeenBackendView>,
}

impl PrefillRecord {
    /// Shows it, its backends by the names that `names` has.
    pub(super) fn view(&self, names: impl Fn(BackendRef) -> Option<Arc<str>>) -> PrefillView {
        PrefillView {
            choice: self.name.to_string(),
            matched: self.choice.matched,
            reason: self.choice.reason,
            backends: self.seen.view(names),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.seen.bytes()
    }
}

thread_local! {
    /// Candidates of the prefill side.
    static PREFILL_SCRATCH: RefCell<DecisionScratch> = RefCell::default();
}

impl Decider {
    /// Whether two backends are better for a request than one, and which. If so, `scratch` is left
    /// with those that decode, and `out` hears of the others.
    ///
    /// # Errors
    /// Why not; `None`: no backend computes prompts for others.
    pub(super) fn pair(
        &self,
        whole: &WholeDecision<'_>,
        scratch: &mut DecisionScratch,
        out: impl FnMut(usize),
    ) -> Result<PairDecision, Option<WholeReason>> {
        let WholeDecision {
            fleet, ask, basis, ..
        } = *whole;
        if !fleet.has_prefill() {
            return Err(None);
        }
        let settings = self.pairs.settings(ask.model);
        if !ask.is_separable && settings.disaggregate != Disaggregate::Off {
            return Err(Some(WholeReason::NotSeparable));
        }
        policy::is_worth_two(&settings, basis.request, basis.choice)?;
        let decodes = |at: &usize| fleet.role(*at) == BackendRole::Decode;
        if !scratch.places.iter().any(decodes) {
            return Err(Some(WholeReason::NoDecode));
        }
        let paired = PREFILL_SCRATCH
            .with_borrow_mut(|prefill| self.pair_among(whole, prefill, scratch, out));
        Ok(paired?)
    }

    fn pair_among(
        &self,
        whole: &WholeDecision<'_>,
        prefill: &mut DecisionScratch,
        scratch: &mut DecisionScratch,
        out: impl FnMut(usize),
    ) -> Result<PairDecision, WholeReason> {
        let WholeDecision {
            fleet,
            ask,
            basis,
            now,
        } = *whole;
        let config: &PolicyConfig = basis.policy;
        let request: &PolicyRequest = basis.request;
        let needs = config.needs();
        let admitted = self.admit_prefill(fleet, ask, now, prefill);
        admitted.map_err(|_| WholeReason::NoPrefill)?;
        self.match_applied(matchable(ask), needs.match_by, prefill);
        self.match_overlay(fleet, matchable(ask), prefill);
        self.supplement(fleet, &needs, prefill);
        keep_decoding(fleet, scratch, out);
        let (computing, decoding) = (&prefill.candidates, &scratch.candidates);
        let pair = policy::choose_pair(config, request, computing, decoding)?;
        let at = prefill.place(pair.prefill);
        let basis = DecisionBasis {
            choice: pair.prefill,
            ..*basis
        };
        Ok(PairDecision {
            decode: pair.decode,
            prefill: PrefillRecord {
                backend: fleet.registry.backends[at].handle,
                name: Arc::clone(fleet.name(at)),
                choice: pair.prefill,
                seen: SeenCandidates::of(fleet, &basis, prefill),
            },
        })
    }

    /// The prefill backend of a decision; `None`: its circuit has opened meanwhile.
    pub(super) fn enter_prefill(
        &self,
        whole: &WholeDecision<'_>,
        prefill: &PrefillRecord,
    ) -> Option<PrefillDecision> {
        let user = || user_of(whole.fleet, whole.ask);
        let trial = match self.backends.enter(prefill.backend, user, whole.now) {
            BreakerState::Closed => None,
            BreakerState::HalfOpen(trial) => Some(Arc::new(trial)),
            BreakerState::Open => return None,
        };
        Some(PrefillDecision {
            backend: prefill.backend,
            name: Arc::clone(&prefill.name),
            matched: prefill.choice.matched,
            reason: prefill.choice.reason,
            trial,
        })
    }
}

/// Leaves the backends that decode in `scratch`; `out` hears of the others.
fn keep_decoding(fleet: &RoutingTable, scratch: &mut DecisionScratch, mut out: impl FnMut(usize)) {
    let mut kept = Vec::with_capacity(scratch.places.len());
    let mut places = scratch.places.iter();
    scratch.candidates.retain(|_| {
        let at = *places.next().expect("each candidate has its place");
        let stays = fleet.role(at) == BackendRole::Decode;
        if stays {
            kept.push(at);
        } else {
            out(at);
        }
        stays
    });
    scratch.places = kept;
}
