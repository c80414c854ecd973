//! Requests on two backends: one computes the prompt, the other answers.
//!
//! [`state::policy`] decides whether to use two backends, and which; this module gathers the
//! candidates. Prefill candidates pass the same filters as other backends. Prefill backends receive
//! no whole requests while other backends can take them. Engines that meet in SGLang's bootstrap
//! rooms receive no whole requests that have a prompt to compute: if no other backend can take such
//! a request, it needs two of these engines or is rejected.

use std::cell::RefCell;
use std::sync::Arc;

use state::Backend;
use state::command::BackendRole;
use state::policy::{
    self, Candidate, Choice, Disaggregate, Handover, PairSettings, PairSides, PolicyConfig,
    PolicyRequest, WholeReason,
};

use super::Decider;
use super::decision_record::{PrefillRecord, SeenCandidates};
use super::pairing::{PairRejection, SettledDecision, WholeDecision};
use super::routing_table::{DecisionScratch, RoutingTable};
use crate::engines::backends::BreakerState;
use crate::routing::decide::routing_table::user_of;
use crate::routing::{PrefillDecision, RequestStages, RoutingRejection, RoutingRequest};

/// The backend that answers a request and the one that computes its prompt.
struct PairDecision {
    decode: Choice,
    prefill: PrefillRecord,
}

thread_local! {
    /// Working data for choosing a prefill backend, kept between decisions to avoid allocations.
    pub(super) static PREFILL_SCRATCH: RefCell<DecisionScratch> = RefCell::default();
}

impl Decider {
    /// Returns how the backend's engine hands over or receives prompts.
    pub(in crate::routing) fn handover(&self, backend: &Backend) -> Handover {
        match self.backends.meets_in_rooms(backend) {
            true => Handover::Room,
            false => Handover::Answer,
        }
    }

    /// Whether the backend's engine needs another engine to serve this request.
    pub(super) fn needs_another(&self, backend: &Backend, ask: &RoutingRequest<'_>) -> bool {
        ask.stages != RequestStages::Nothing && self.backends.meets_in_rooms(backend)
    }

    /// Returns the backend that would serve the whole request; `None` if no candidate can.
    pub(super) fn choose_whole(
        &self,
        (fleet, ask): (&RoutingTable, &RoutingRequest<'_>),
        (config, request): (&PolicyConfig, &PolicyRequest),
        scratch: &DecisionScratch,
    ) -> Option<Choice> {
        if !scratch.has_rooms {
            return policy::choose(config, request, &scratch.candidates);
        }
        let is_able = |at: usize| !self.needs_another(&fleet.registry.backends[at], ask);
        let able: Vec<Candidate> = scratch.candidates_where(is_able).collect();
        policy::choose(config, request, &able)
    }

    /// Decides whether a request uses two backends, and which. Leaves the candidates that competed
    /// for the answer in `scratch` and passes the registry indexes of the others to `out`.
    ///
    /// # Errors
    /// Returns a [`RoutingRejection`] if neither a pair nor a single backend can serve the request.
    pub(super) fn settle<'a>(
        &self,
        whole: &WholeDecision<'a>,
        scratch: &mut DecisionScratch,
        out: impl FnMut(usize),
    ) -> Result<SettledDecision<'a>, RoutingRejection> {
        let (fleet, ask) = (whole.fleet, whole.ask);
        match (self.pair(whole, scratch), whole.choice) {
            (Ok(PairDecision { decode, prefill }), _) => {
                let by = prefill.handover;
                keep(scratch, |at| self.decodes(fleet, at, by), out);
                let mut basis = whole.basis(decode);
                basis.request = basis.request.fetched();
                let prefill = Ok(prefill);
                Ok(SettledDecision { basis, prefill })
            }
            (Err(why), Some(choice)) => {
                if scratch.has_rooms {
                    let is_able =
                        |at: usize| !self.needs_another(&fleet.registry.backends[at], ask);
                    keep(scratch, is_able, out);
                }
                let (basis, prefill) = (whole.basis(choice), Err(why.whole));
                Ok(SettledDecision { basis, prefill })
            }
            (Err(why), None) => Err(why.none),
        }
    }

    /// Whether the backend at registry index `at` is a decode backend with the handover `by`.
    fn decodes(&self, fleet: &RoutingTable, at: usize, by: Handover) -> bool {
        let backend = &fleet.registry.backends[at];
        backend.spec.role == BackendRole::Decode && self.handover(backend) == by
    }

    /// Chooses two backends for the request, or returns why one backend must serve all of it.
    fn pair(
        &self,
        whole: &WholeDecision<'_>,
        scratch: &DecisionScratch,
    ) -> Result<PairDecision, PairRejection> {
        let WholeDecision { fleet, ask, .. } = *whole;
        if !fleet.has_prefill() {
            return Err(PairRejection {
                whole: None,
                none: RoutingRejection::NoPrefill,
            });
        }
        let settings = self.pairs.settings(ask.model);
        let is_apart = |by: Handover| {
            let decodes = |at: &usize| self.decodes(fleet, *at, by);
            ask.stages.are_handed_over(by) && scratch.places.iter().any(decodes)
        };
        let ways = [Handover::Answer, Handover::Room].map(is_apart);
        if let Some(choice) = whole.choice {
            let is_any = ask.stages == RequestStages::Disaggregatable || ways.contains(&true);
            if !is_any && settings.disaggregate != Disaggregate::Off {
                return Err(WholeReason::NotSeparable.into());
            }
            policy::is_worth_two(&settings, &whole.request, choice)?;
        }
        if !ways.contains(&true) {
            return Err(WholeReason::NoDecode.into());
        }
        PREFILL_SCRATCH
            .with_borrow_mut(|prefill| self.pair_among((whole, &settings), prefill, scratch))
    }

    fn pair_among(
        &self,
        (whole, settings): (&WholeDecision<'_>, &PairSettings),
        prefill: &mut DecisionScratch,
        scratch: &DecisionScratch,
    ) -> Result<PairDecision, PairRejection> {
        let WholeDecision {
            fleet, ask, now, ..
        } = *whole;
        let (config, request) = (&**whole.policy, &whole.request);
        let needs = config.needs();
        let needed = whole.choice.is_none().then_some(Handover::Room);
        let admitted = self.admit_prefill(fleet, ask, now, needed, prefill);
        admitted.map_err(PairRejection::without_prefill)?;
        let shows_lower_tiers = fleet.registry.routing.shows_lower_tiers(config);
        self.match_blocks(fleet, ask, (needs.match_by, shows_lower_tiers), prefill);
        self.supplement(fleet, &needs, prefill);
        let alone = whole.choice.map(|choice| {
            let mut alone = scratch.candidates.iter();
            let alone = alone.find(|it| it.slot == choice.slot);
            alone.expect("a policy chooses among the candidates")
        });
        let ways = [Handover::Answer, Handover::Room];
        let computing = ways.map(|by| {
            let hands_over = |at: usize| self.handover(&fleet.registry.backends[at]) == by;
            prefill.candidates_where(hands_over).collect::<Vec<_>>()
        });
        let decoding = ways.map(|by| match ask.stages.are_handed_over(by) {
            true => scratch
                .candidates_where(|at| self.decodes(fleet, at, by))
                .collect(),
            false => Vec::new(),
        });
        let sides = [0, 1].map(|way| PairSides {
            handover: ways[way],
            prefill: &computing[way],
            decode: &decoding[way],
        });
        let pair = policy::choose_pair(config, request, (settings, alone), &sides)?;
        let at = prefill.registry_index(pair.prefill);
        let seen = SeenCandidates::of(fleet, &whole.basis(pair.prefill), prefill);
        Ok(PairDecision {
            decode: pair.decode,
            prefill: PrefillRecord {
                backend: fleet.handle(at),
                name: Arc::clone(fleet.name(at)),
                handover: pair.handover,
                choice: pair.prefill,
                seen,
            },
        })
    }

    /// Admits the request to the circuit of the chosen prefill backend. Returns `None` if the
    /// circuit has opened in the meantime and the prompt is not handed over through a room.
    pub(super) fn enter_prefill(
        &self,
        whole: &WholeDecision<'_>,
        prefill: &PrefillRecord,
    ) -> Option<PrefillDecision> {
        let user = || user_of(whole.fleet, whole.ask);
        let trial = match self.backends.enter(prefill.backend, user, whole.now) {
            BreakerState::Closed => None,
            BreakerState::HalfOpen(trial) => Some(Arc::new(trial)),
            // No alternative: another request has become the trial in the meantime.
            BreakerState::Open if prefill.handover == Handover::Room => None,
            BreakerState::Open => return None,
        };
        let at = whole.fleet.registry.place(prefill.backend.slot)?;
        let (fleet, choice) = (whole.fleet, (prefill.choice, at));
        let choice = self.with_lower_tiers((fleet, whole.ask), whole.policy, choice);
        Some(PrefillDecision {
            backend: prefill.backend,
            name: Arc::clone(&prefill.name),
            handover: prefill.handover,
            matched: choice.matched,
            loaded: choice.loaded,
            reason: choice.reason,
            trial,
        })
    }
}

/// Keeps the candidates in `scratch` for whose registry index `stays` returns true, and passes the
/// indexes of the others to `out`.
fn keep(scratch: &mut DecisionScratch, stays: impl Fn(usize) -> bool, mut out: impl FnMut(usize)) {
    let mut kept = Vec::with_capacity(scratch.places.len());
    let mut places = scratch.places.iter();
    scratch.candidates.retain(|_| {
        let at = *places.next().expect("each candidate has its place");
        let stays = stays(at);
        if stays {
            kept.push(at);
        } else {
            out(at);
        }
        stays
    });
    scratch.places = kept;
}
