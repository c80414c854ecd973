//! Requests on two backends: one computes the prompt, the other answers.
//!
//! Whether and which is decided by [`state::policy`]; here its candidates are gathered. The prefill
//! side passes the same filters as any backend. Backends of that side get no whole requests while
//! others can take them.

use std::cell::RefCell;
use std::sync::Arc;

use state::command::BackendRole;
use state::policy::{
    self, Candidate, Choice, Disaggregate, PairSettings, PolicyConfig, PolicyRequest, WholeReason,
};

use super::PrefillDecision;
use super::decide::Decider;
use super::fleet::{DecisionScratch, RoutingTable, matchable};
use super::pairing::{SettledDecision, WholeDecision};
use super::record::{DecisionBasis, PrefillRecord, SeenCandidates};
use crate::backends::BreakerState;
use crate::routing::fleet::user_of;

/// Two backends for a request.
struct PairDecision {
    decode: Choice,
    prefill: PrefillRecord,
}

thread_local! {
    /// Candidates of the prefill side.
    static PREFILL_SCRATCH: RefCell<DecisionScratch> = RefCell::default();
}

impl Decider {
    /// Whether a request goes to two backends, and which. If so, `scratch` is left with those that
    /// decode, and `out` hears of the others.
    pub(super) fn settle<'a>(
        &self,
        whole: &WholeDecision<'a>,
        scratch: &mut DecisionScratch,
        out: impl FnMut(usize),
    ) -> SettledDecision<'a> {
        let mut basis = whole.basis;
        let prefill = self.pair(whole, scratch, out).map(|pair| {
            (basis.choice, basis.request) = (pair.decode, basis.request.fetched());
            pair.prefill
        });
        SettledDecision { basis, prefill }
    }

    /// # Errors
    /// Why it is one; `None`: no backend computes prompts for others.
    fn pair(
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
        policy::is_worth_two(&settings, &basis.request, basis.choice)?;
        let decodes = |at: &usize| fleet.role(*at) == BackendRole::Decode;
        if !scratch.places.iter().any(decodes) {
            return Err(Some(WholeReason::NoDecode));
        }
        let paired = PREFILL_SCRATCH
            .with_borrow_mut(|prefill| self.pair_among((whole, &settings), prefill, scratch))?;
        keep_decoding(fleet, scratch, out);
        Ok(paired)
    }

    fn pair_among(
        &self,
        (whole, settings): (&WholeDecision<'_>, &PairSettings),
        prefill: &mut DecisionScratch,
        scratch: &DecisionScratch,
    ) -> Result<PairDecision, WholeReason> {
        let WholeDecision {
            fleet,
            ask,
            basis,
            now,
        } = *whole;
        let config: &PolicyConfig = basis.policy;
        let request: &PolicyRequest = &basis.request;
        let needs = config.needs();
        let admitted = self.admit_prefill(fleet, ask, now, prefill);
        admitted.map_err(|_| WholeReason::NoPrefill)?;
        self.match_applied(matchable(ask), needs.match_by, prefill);
        self.match_overlay(fleet, matchable(ask), prefill);
        self.supplement(fleet, &needs, prefill);
        let found = scratch.candidates.iter().zip(&scratch.places);
        let decodes = found.filter(|(_, at)| fleet.role(**at) == BackendRole::Decode);
        let decoding: Vec<Candidate> = decodes.map(|(candidate, _)| *candidate).collect();
        let mut alone = scratch.candidates.iter();
        let alone = alone.find(|it| it.slot == basis.choice.slot);
        let alone = alone.expect("a policy chooses among the candidates");
        let (terms, computing) = ((settings, alone), &prefill.candidates);
        let pair = policy::choose_pair(config, request, terms, computing, &decoding)?;
        let at = prefill.place(pair.prefill);
        let basis = DecisionBasis {
            choice: pair.prefill,
            ..basis
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
