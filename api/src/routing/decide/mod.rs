//! Decides on a backend: filter, match, weigh, choose. This is the router's hot path.
//!
//! A [`Decider`] reads the published state, the load and the overlay, and changes none of them:
//! code that holds only a decider cannot dispatch, charge or write to the log (I69). A decider
//! changes only local state: the round-robin counter, its metrics, the models known to be in panic
//! mode, and the trial of a half-open circuit, which the [`Decision`] holds.

pub(super) mod adapters;
pub(super) mod capacity;
pub(super) mod decision_record;
pub(super) mod endpoints;
pub(super) mod explain;
pub(super) mod filters;
pub(super) mod load_reader;
pub(super) mod pairing;
pub(super) mod pairs;
pub(super) mod panic;
pub(super) mod predicted_evictions;
pub(super) mod preferences;
pub(super) mod request_stages;
pub(super) mod routing_table;
pub(super) mod select;
pub(super) mod session;
pub(super) mod stored_decision;
pub(super) mod tiers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use state::StateView;
use state::ids::{BackendRef, BlockHash, LogIndex, Slot};
use state::policy::{
    Choice, CostSettings, MatchBy, PolicyConfig, PolicyInputs, PolicyRequest, UserTokens,
};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use self::decision_record::DecisionRecord;
use self::load_reader::LoadReader;
use self::pairing::{PairRules, SettledDecision, WholeDecision};
use self::panic::PanicModes;
use self::routing_table::{
    DecisionScratch, Fleet, RoutingTable, SCRATCH, matchable, policy_of, user_of,
};
use self::select::SelectSettings;
use super::metrics::RoutingMetrics;
use super::outbox::Overlay;
use super::verdict::FilterVerdict;
use super::{
    Decision, OutboxStatus, PolicySource, PrefillDecision, RoutingRejection, RoutingRequest,
};
use crate::engines::backends::{Backends, BreakerState, Doubt};
use crate::sessions::NamedSession;

/// Chooses backends for requests. Each replica has one.
pub struct Decider {
    pub(super) view: Arc<StateView>,
    pub(crate) backends: Arc<Backends>,
    pub(super) load: LoadReader,
    pub(super) overlay: Arc<Overlay>,
    pub(super) fleet: Arc<Fleet>,
    /// Round-robin counter.
    pub(super) turn: AtomicU64,
    /// Policies that a request may select.
    pub(super) overrides: Vec<Arc<PolicyConfig>>,
    pub(super) select: SelectSettings,
    /// Rules for when a request uses two backends.
    pub(super) pairs: PairRules,
    /// Whether decisions record their inputs.
    pub(super) is_recording: bool,
    pub(super) metrics: RoutingMetrics,
    pub(super) panics: PanicModes,
}

/// Purpose of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DecisionUse {
    /// The request is dispatched to the chosen backend.
    Dispatch,
    /// The backend is a fallback behind the chosen one. Round-robin and metrics do not advance.
    Alternative,
}

/// A request and the policy that routes it.
struct AskedDecision<'a> {
    purpose: DecisionUse,
    fleet: &'a RoutingTable,
    ask: &'a RoutingRequest<'a>,
    index: LogIndex,
    config: &'a Arc<PolicyConfig>,
    policy_source: PolicySource,
    now: Instant,
}

/// A choice of backends, before the circuit of the chosen backend admits the request.
struct Chosen {
    choice: Choice,
    /// Registry index of the chosen backend.
    at: usize,
    are_circuits_kept: bool,
    doubt: Doubt,
    /// The backend that computes the prompt; `None` if it is the chosen one.
    prefill: Option<PrefillDecision>,
    record: Option<Arc<DecisionRecord>>,
}

impl AskedDecision<'_> {
    /// Whether the policy sees blocks on tiers below the GPU.
    fn shows_lower_tiers(&self) -> bool {
        let routing = &self.fleet.registry.routing;
        routing.shows_lower_tiers(self.config)
    }
}

impl Decider {
    /// Chooses a backend for `ask` as of `now`. Uses only local memory and does no I/O.
    ///
    /// # Errors
    /// Returns a [`RoutingRejection`] if no backend can take the request.
    pub fn decide(
        &self,
        ask: &RoutingRequest<'_>,
        now: Instant,
    ) -> Result<Decision, RoutingRejection> {
        self.decide_for(DecisionUse::Dispatch, ask, now)
    }

    fn decide_for(
        &self,
        purpose: DecisionUse,
        ask: &RoutingRequest<'_>,
        now: Instant,
    ) -> Result<Decision, RoutingRejection> {
        let fleet = self.fleet.table();
        let index = self.view.applied();
        let (config, policy_source) = policy_of(&fleet, ask);
        let needs = config.needs();
        let turn = match (needs.turn, purpose) {
            (false, _) => 0,
            (true, DecisionUse::Dispatch) => self.turn.fetch_add(1, Relaxed),
            (true, DecisionUse::Alternative) => self.turn.load(Relaxed),
        };
        let asked = AskedDecision {
            purpose,
            fleet: &fleet,
            ask,
            index,
            config,
            policy_source,
            now,
        };
        let chosen = SCRATCH.with_borrow_mut(|scratch| self.choose(&asked, turn, scratch));
        if purpose == DecisionUse::Dispatch {
            let refusal = chosen.as_ref().err().copied();
            self.metrics.decided(config.name(), refusal);
        }
        let Chosen {
            choice,
            at,
            are_circuits_kept,
            doubt,
            prefill,
            record,
        } = chosen?;
        let choice = self.with_lower_tiers((&fleet, ask), config, (choice, at));
        let backend = fleet.handle(at);
        let user = || user_of(&fleet, ask);
        let entered = match doubt {
            Doubt::Nobody | Doubt::Answering => self.backends.enter(backend, user, now),
            Doubt::Tried => self.backends.enter_doubted(backend, user, now),
        };
        let trial = match entered {
            BreakerState::Closed => None,
            BreakerState::HalfOpen(trial) => Some(Arc::new(trial)),
            // Another request has become the trial in the meantime, so the decision is repeated.
            BreakerState::Open if are_circuits_kept => {
                return self.decide_for(purpose, ask, now);
            }
            BreakerState::Open => None,
        };
        Ok(Decision {
            trial,
            backend,
            name: Arc::clone(fleet.name(at)),
            matched: choice.matched,
            loaded: choice.loaded,
            total: u32::try_from(ask.identity.chain.len()).unwrap_or(u32::MAX),
            reason: choice.reason,
            policy: config.name(),
            touch: needs.touch,
            prefill,
            index,
            record,
        })
    }

    /// Returns a decision to use if a gateway cannot reach the chosen backend; `None` if there is
    /// none. The decision is not counted. Backends with a half-open circuit are not returned.
    #[must_use]
    pub fn alternative(&self, ask: &RoutingRequest<'_>, now: Instant) -> Option<Decision> {
        let decided = self.decide_for(DecisionUse::Alternative, ask, now).ok()?;
        decided.trial.is_none().then_some(decided)
    }

    /// Filters the backends, matches the prompt, adds the load and lets the policy choose.
    fn choose(
        &self,
        asked: &AskedDecision<'_>,
        turn: u64,
        scratch: &mut DecisionScratch,
    ) -> Result<Chosen, RoutingRejection> {
        let AskedDecision {
            fleet,
            ask,
            config,
            now,
            ..
        } = *asked;
        let needs = config.needs();
        let mut verdicts = self.verdicts(fleet, scratch);
        let admitted = self.admit(fleet, ask, now, scratch, |at, verdict| {
            if let Some(kept) = verdicts.get_mut(at) {
                *kept = verdict;
            }
        });
        if asked.purpose == DecisionUse::Dispatch {
            self.metrics.filtered(&scratch.tally);
        }
        let (registry, is_panic) = (&fleet.registry, scratch.is_panic);
        self.panics.note(registry, ask.model, is_panic);
        if let Err(refusal) = admitted {
            scratch.verdicts = verdicts;
            return Err(refusal);
        }
        let match_how = (needs.match_by, asked.shows_lower_tiers());
        self.match_blocks(fleet, ask, match_how, scratch);
        self.supplement(fleet, &needs, scratch);
        let request = self.request(fleet, ask, &needs, turn);
        let whole = WholeDecision {
            fleet,
            ask,
            index: asked.index,
            policy: config,
            policy_source: asked.policy_source,
            request,
            choice: self.choose_whole((fleet, ask), (config, &request), scratch),
            now,
        };
        let settled = self.settle(&whole, scratch, |at| {
            if let Some(kept) = verdicts.get_mut(at) {
                *kept = FilterVerdict::OtherRole;
            }
        });
        scratch.verdicts = verdicts;
        let SettledDecision { basis, prefill } = settled?;
        let computing = prefill.as_ref().ok();
        let entered = computing.and_then(|computing| self.enter_prefill(&whole, computing));
        let kept = || Arc::new(DecisionRecord::of(fleet, &basis, prefill, scratch));
        Ok(Chosen {
            choice: basis.choice,
            at: scratch.registry_index(basis.choice),
            are_circuits_kept: scratch.are_circuits_kept,
            doubt: scratch.doubt,
            record: self.is_recording.then(kept),
            prefill: entered,
        })
    }

    /// Returns the buffer for the verdict on each backend; empty unless decisions are recorded.
    fn verdicts(&self, fleet: &RoutingTable, scratch: &mut DecisionScratch) -> Vec<FilterVerdict> {
        let mut verdicts = std::mem::take(&mut scratch.verdicts);
        verdicts.clear();
        if self.is_recording {
            verdicts.resize(fleet.registry.backends.len(), FilterVerdict::OtherModel);
        }
        verdicts
    }

    /// Returns how long `ask` should wait for a place at the backend that was `chosen` before it
    /// takes the `other` one. Without an `other` one, this is the longest wait of the policy.
    pub(in crate::routing) fn patience(
        &self,
        ask: &RoutingRequest<'_>,
        chosen: &Decision,
        other: Option<&Decision>,
    ) -> Duration {
        let fleet = self.fleet.table();
        let affinity = policy_of(&fleet, ask).0.needs().affinity;
        let matched = other.map_or(0, |other| other.matched);
        let missing = u64::from(chosen.matched.saturating_sub(matched));
        let tokens = missing * u64::from(ask.identity.tail.tokens_per_block);
        let service = self.view.service();
        let learnt = service
            .get(chosen.backend.slot)
            .and_then(|it| it.learnt?.trusted());
        let price = learnt.map(|prices| prices.prefill_ns_per_token);
        let price = price.unwrap_or(CostSettings::default().prefill_ns_per_token);
        Duration::from_micros(affinity.patience_us(tokens, price))
    }

    /// Returns the id of a backend that is registered or was until recently.
    #[must_use]
    pub fn name_of(&self, backend: BackendRef) -> Option<Arc<str>> {
        self.fleet.name_of(backend)
    }

    /// Updates the routing gauges, including those of models without requests, and drops the series
    /// of removed backends. Call this before a scrape.
    pub fn refresh_metrics(&self, outbox: &OutboxStatus) {
        self.metrics.show_outbox(outbox);
        let panicking = self.backends.panicking(&self.view.registry());
        self.panics.note_all(&panicking);
        self.metrics.forget_removed(|| self.view.registry());
    }

    /// Matches the prompt against the applied state. Extends the matches with blocks that this
    /// replica has routed and not applied yet, and subtracts blocks about to be evicted and those
    /// that engines compute again.
    pub(super) fn match_blocks(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        (match_by, shows_lower_tiers): (MatchBy, bool),
        scratch: &mut DecisionScratch,
    ) {
        self.match_applied(matchable(ask), match_by, scratch);
        self.match_overlay(fleet, matchable(ask), scratch);
        if shows_lower_tiers {
            self.match_lower_tiers(matchable(ask), &mut scratch.candidates);
        }
        for (candidate, at) in scratch.candidates.iter_mut().zip(&scratch.places) {
            let matched = candidate.matched;
            fleet.leave_out_dropped(*at, ask, &mut candidate.matched);
            candidate.loaded.shorten(matched - candidate.matched);
        }
    }

    /// Matches the prompt's `chain` against the applied state.
    fn match_applied(&self, chain: &[BlockHash], match_by: MatchBy, scratch: &mut DecisionScratch) {
        let blocks = &self.view.blocks;
        if match_by == MatchBy::Position {
            for candidate in &mut scratch.candidates {
                candidate.matched = blocks.match_by_position(chain, candidate.slot);
            }
            return;
        }
        tiers::each_match(
            blocks,
            chain,
            &mut scratch.candidates,
            |candidate, found| {
                candidate.matched = found;
            },
        );
    }

    /// Extends the matches with the overlay, then subtracts blocks about to be evicted.
    fn match_overlay(
        &self,
        fleet: &RoutingTable,
        chain: &[BlockHash],
        scratch: &mut DecisionScratch,
    ) {
        let handles = scratch.places.iter().map(|&at| fleet.handle(at));
        let matches = scratch
            .candidates
            .iter_mut()
            .map(|candidate| &mut candidate.matched);
        self.overlay.extend(chain, handles.zip(matches));
        self.leave_out_evicted(fleet, chain, scratch);
    }

    /// Adds the load from this replica and its peers to the candidates.
    pub(super) fn weigh(&self, fleet: &RoutingTable, now: Instant, scratch: &mut DecisionScratch) {
        let DecisionScratch {
            candidates, places, ..
        } = scratch;
        self.load.add_each(
            now,
            candidates.len(),
            |i| fleet.handle(places[i]),
            |i, load| {
                let candidate = &mut candidates[i];
                candidate.running = candidate.running.saturating_add(load.running);
                candidate.pending = candidate.pending.saturating_add(load.waiting);
                candidate.pending_prefill_tokens = candidate
                    .pending_prefill_tokens
                    .saturating_add(load.pending_prefill_tokens);
            },
        );
    }

    /// Adds free blocks, and learned prices if the policy uses them, to the candidates.
    pub(super) fn supplement(
        &self,
        fleet: &RoutingTable,
        needs: &PolicyInputs<'_>,
        scratch: &mut DecisionScratch,
    ) {
        let service = self.view.service();
        let learns = needs.learnt && fleet.registry.routing.learn;
        for candidate in &mut scratch.candidates {
            let served = service.get(candidate.slot);
            let capacity = served.and_then(|served| served.capacity_blocks);
            let owned = self.view.blocks.owned(candidate.slot);
            candidate.free_blocks =
                capacity.map_or(u32::MAX, |capacity| capacity.saturating_sub(owned));
            if learns {
                candidate.prices = served.and_then(|served| served.learnt?.trusted());
            }
        }
    }

    /// Returns the backend of the last turn of `session`, or of its parent if it begins, and the
    /// number of tokens of the session's own last turn. There is no backend without either, or if it
    /// is gone.
    fn home(&self, fleet: &RoutingTable, session: Option<NamedSession>) -> (Option<Slot>, u64) {
        let Some(session) = session else {
            return (None, 0);
        };
        let trees = self.view.trees();
        let own = trees.session(session.key);
        let parent = || trees.session(session.parent?);
        let is_home = |home: BackendRef| {
            let registered = fleet.registry.backend(home.slot);
            registered.is_some_and(|it| it.handle == home)
        };
        let home = own.or_else(parent).map(|it| it.home);
        let home = home.filter(|home| is_home(*home));
        (home.map(|it| it.slot), own.map_or(0, |it| it.tokens))
    }

    /// Returns the request as a policy sees it. `turn` is the round-robin counter.
    pub(super) fn request(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        needs: &PolicyInputs<'_>,
        turn: u64,
    ) -> PolicyRequest {
        let (home, continued_tokens) = self.home(fleet, ask.session);
        PolicyRequest {
            jitter: xxh3_64(ask.request_id.as_bytes()),
            blocks: u32::try_from(matchable(ask).len()).unwrap_or(u32::MAX),
            tokens: ask.identity.tokens,
            tokens_per_block: ask.identity.tail.tokens_per_block,
            prefix_key: needs
                .prefix_blocks
                .map_or(0, |blocks| prefix_key(ask, blocks)),
            session: needs
                .session
                .and_then(|names| session::hash(names, ask.session_parts())),
            home,
            continued_tokens,
            turn,
            user: if needs.user_tokens {
                let key = ask.user.key(fleet.registry.hash_seed);
                self.view.user_tokens(key)
            } else {
                UserTokens::default()
            },
        }
    }
}

/// Returns a key for the prompt's first `blocks` blocks, or for as many as it has. A prompt shorter
/// than a block is keyed by all its bytes.
fn prefix_key(ask: &RoutingRequest<'_>, blocks: u32) -> u64 {
    let identity = ask.identity;
    let first = identity.chain.get(..blocks as usize);
    match first.unwrap_or(&identity.chain).last() {
        Some(last) => last.0,
        None => identity.root.partial(&identity.tail.bytes),
    }
}
