//! Explains a decision: takes the steps of a decision, without side effects, and keeps all reasons.

use std::sync::atomic::Ordering::Relaxed;

use schemars::JsonSchema;
use serde::Serialize;
use state::Backend;
use state::command::EngineFacts;
use state::ids::{BackendRef, LogIndex};
use state::kv_events::LowerTierBlocks;
use state::policy::{self, Candidate, PolicyConfig, Prices, Reason, Score, WholeReason};
use state::service::BackendServiceView;
use tokio::time::Instant;

use super::Decider;
use super::decision_record::{ExplainedRequest, PrefillView};
use super::pairing::WholeDecision;
use super::routing_table::{DecisionScratch, PolicySource, RoutingTable, matchable, policy_of};
use crate::engines::backends::CircuitView;
use crate::routing::verdict::FilterVerdict;
use crate::routing::{Load, OutboxStatus, RoutingRejection, RoutingRequest};

/// Maximum number of block hashes shown.
const SHOWN_BLOCKS_MAX: usize = 64;

/// A decision as it would be made now, with all its inputs.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Explanation {
    /// Applied index at which it was made.
    pub index: LogIndex,
    /// Model that serves the request.
    pub model: String,
    /// Estimated number of prompt tokens.
    pub tokens: u32,
    /// Estimated number of tokens per block.
    pub tokens_per_block: u32,
    /// Number of full blocks of the prompt.
    pub blocks_total: usize,
    /// Number of these that an engine can have cached: it always computes the last token.
    pub blocks_matchable: usize,
    /// Hashes of the first blocks, 16 hex digits each.
    pub blocks: Vec<String>,
    /// Number of runs of blocks in this replica's overlay, over all backends.
    pub overlay_runs: usize,
    /// Status of this replica's outbox, which carries them to the log.
    pub outbox: OutboxStatus,
    /// Policy that decides, with its settings.
    pub policy: PolicyConfig,
    /// What selected that policy.
    pub policy_source: PolicySource,
    /// Further inputs of the policy from the request.
    pub request: ExplainedRequest,
    /// Whether panic mode is on, in which unhealthy backends may be candidates.
    pub is_panic: bool,
    /// All registered backends, by slot.
    pub backends: Vec<ExplainedBackend>,
    /// Id of the chosen backend; `null`: none was chosen.
    pub choice: Option<String>,
    /// Number of leading blocks that it is believed to hold; `null`: none was chosen.
    pub matched: Option<u32>,
    /// Why it was chosen; `null`: none was.
    pub reason: Option<Reason>,
    /// Backend that computes the prompt; absent: the chosen one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillView>,
    /// Why a single backend takes the request, although some compute prompts for others; absent if
    /// two take it, if none compute prompts for others, or if no backend was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeReason>,
    /// Why routing chooses no backend; `null`: it chooses one.
    pub no_choice: Option<RoutingRejection>,
}

/// A backend and its part in a decision. Fields for candidates only are `null` for other backends.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ExplainedBackend {
    /// Id of the backend.
    pub id: String,
    /// Slot and incarnation of the backend.
    pub backend: BackendRef,
    /// Facts that its engine reported.
    pub facts: EngineFacts,
    /// `candidate` if it may take the request, else the filter that excludes it.
    pub verdict: FilterVerdict,
    /// Leading blocks that it holds according to the log, whether or not it may take the request.
    pub matched_applied: u32,
    /// Leading blocks that it is expected to find: `matched_applied`, extended by this replica's
    /// overlay, without the last block if its engine computes that again (`drops_last_block`). For
    /// candidates, this is the number that the policy uses, without the blocks that requests in
    /// flight will evict.
    pub matched: u32,
    /// Leading blocks that it is expected to load from tiers below the GPU, behind those on the GPU.
    /// Part of `matched`, unless the policy sees the GPU only.
    pub loaded: LowerTierBlocks,
    /// Load from this replica.
    pub here: Load,
    /// Load from all replicas heard recently: the one that the policy uses.
    pub cluster: Load,
    /// Number of requests in the engine's own queue, 0 if unknown; `null` until this replica probes
    /// it.
    pub engine_waiting: Option<u32>,
    /// Number of requests running in the engine, 0 if unknown; `null` until this replica probes it.
    pub engine_running: Option<u32>,
    /// KV cache usage, in thousandths, 0 if unknown; per cent in JSON. `null` until this replica
    /// probes it.
    #[serde(
        rename = "kv_usage_percent",
        serialize_with = "state::readable::percent"
    )]
    #[schemars(with = "Option<f64>")]
    pub kv_usage_permille: Option<u32>,
    /// Number of blocks that it can take without evicting any; `null` while its capacity is
    /// unknown. Candidates only.
    pub free_blocks: Option<u32>,
    /// Whether the engine lists the requested model itself. Candidates only.
    pub is_model_listed: Option<bool>,
    /// Its circuit breaker at this replica.
    pub circuit: CircuitView,
    /// Limit, capacity, learned prices and accuracy, as replicated; `null` until they are
    /// published.
    pub service: Option<BackendServiceView>,
    /// Learned prices that the policy uses; `null`: it uses none, or none are known. Candidates
    /// only.
    pub prices: Option<Prices>,
    /// Preference tier that the policy assigned, from 0; lower tiers win. Candidates only.
    pub tier: Option<u8>,
    /// Score within its tier, lower is better. Candidates only.
    pub score: Option<u64>,
    /// Tie-breaker among equal scores, lower is better. Candidates only.
    pub then: Option<u64>,
    /// Reason that would be given if it were clearly the best. Candidates only.
    pub would_be: Option<Reason>,
}

impl Explanation {
    /// Removes the choice, because the request is refused before it would be routed.
    pub fn refused(&mut self) {
        (self.choice, self.matched, self.reason) = (None, None, None);
        (self.prefill, self.whole) = (None, None);
    }
}

impl ExplainedBackend {
    /// Fills in the inputs and the result of the policy for a candidate.
    fn competes(&mut self, candidate: &Candidate, score: &Score, shows_lower_tiers: bool) {
        self.matched = candidate.matched;
        if shows_lower_tiers {
            self.loaded = candidate.loaded;
        }
        self.free_blocks = (candidate.free_blocks != u32::MAX).then_some(candidate.free_blocks);
        self.is_model_listed = Some(candidate.is_model_listed);
        self.prices = candidate.prices;
        self.tier = Some(score.tier);
        self.score = Some(score.score);
        self.then = Some(score.then);
        self.would_be = Some(score.reason);
    }
}

impl Decider {
    /// Returns what [`Decider::decide`] would return at `now`, and why, with the status of the
    /// `outbox`. Changes nothing and counts nothing.
    #[must_use]
    pub fn explain(
        &self,
        ask: &RoutingRequest<'_>,
        outbox: OutboxStatus,
        now: Instant,
    ) -> Explanation {
        let fleet = self.fleet.table();
        let index = self.view.applied();
        let mut scratch = DecisionScratch::default();
        let registered = fleet.registry.backends.iter();
        let mut backends: Vec<_> = registered.map(|it| self.seen(it, now)).collect();
        let admitted = self.admit(&fleet, ask, now, &mut scratch, |at, verdict| {
            backends[at].verdict = verdict;
        });
        if admitted.is_err() {
            scratch.clear();
        }
        let (config, policy_source) = policy_of(&fleet, ask);
        let needs = config.needs();
        self.show_matches(&fleet, ask, &mut backends);
        let shows_lower_tiers = fleet.registry.routing.shows_lower_tiers(config);
        let match_how = (needs.match_by, shows_lower_tiers);
        self.match_blocks(&fleet, ask, match_how, &mut scratch);
        self.supplement(&fleet, &needs, &mut scratch);
        let mut request = self.request(&fleet, ask, &needs, self.turn.load(Relaxed));
        let whole = WholeDecision {
            fleet: &fleet,
            ask,
            index,
            policy: config,
            policy_source,
            request,
            choice: self.choose_whole((&fleet, ask), (config, &request), &scratch),
            now,
        };
        let settled = admitted.and_then(|()| {
            let out = |at: usize| backends[at].verdict = FilterVerdict::OtherRole;
            self.settle(&whole, &mut scratch, out)
        });
        let choice = settled.as_ref().ok().map(|settled| {
            request = settled.basis.request;
            settled.basis.choice
        });
        let scores = policy::scores(config, &request, &scratch.candidates);
        let competing = scratch.candidates.iter().zip(&scores).zip(&scratch.places);
        for ((candidate, score), at) in competing {
            backends[*at].competes(candidate, score, shows_lower_tiers);
        }
        let no_choice = settled.as_ref().err().copied();
        let stages = settled.map(|settled| settled.view(|it| self.fleet.name_of(it)));
        let (prefill, whole) = stages.unwrap_or_default();
        let shown = ask.identity.chain.iter().take(SHOWN_BLOCKS_MAX);
        Explanation {
            index,
            model: ask.model.to_owned(),
            tokens: ask.identity.tokens,
            tokens_per_block: ask.identity.tail.tokens_per_block,
            blocks_total: ask.identity.chain.len(),
            blocks_matchable: matchable(ask).len(),
            blocks: shown.map(ToString::to_string).collect(),
            overlay_runs: self.overlay.len(),
            outbox,
            policy: (**config).clone(),
            policy_source,
            request: ExplainedRequest::of(&request, &needs, ask.session_parts()),
            is_panic: scratch.is_panic,
            backends,
            choice: choice.map(|choice| fleet.name(scratch.registry_index(choice)).to_string()),
            matched: choice.map(|choice| choice.matched),
            reason: choice.map(|choice| choice.reason),
            whole,
            prefill,
            no_choice,
        }
    }

    /// Fills in how many leading blocks of the prompt each backend holds, and how many its engine
    /// will find, including excluded backends.
    fn show_matches(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        backends: &mut [ExplainedBackend],
    ) {
        let chain = matchable(ask);
        self.view.blocks.match_prefix(chain, |slot, matched| {
            let at = backends.partition_point(|it| it.backend.slot < slot);
            if let Some(shown) = backends.get_mut(at).filter(|it| it.backend.slot == slot) {
                (shown.matched_applied, shown.matched) = (matched, matched);
            }
        });
        let matches = backends.iter_mut().map(|it| (it.backend, &mut it.matched));
        self.overlay.extend(chain, matches);
        for (at, shown) in backends.iter_mut().enumerate() {
            shown.loaded = self.loaded_behind(chain, shown.backend.slot, shown.matched, |_| {});
            let matched = shown.matched + shown.loaded.total();
            shown.matched = matched;
            fleet.leave_out_dropped(at, ask, &mut shown.matched);
            shown.loaded.shorten(matched - shown.matched);
        }
    }

    /// Returns the data about a backend that does not depend on the decision.
    fn seen(&self, backend: &Backend, now: Instant) -> ExplainedBackend {
        let flags = self.backends.health_flags(backend.handle.slot);
        ExplainedBackend {
            id: backend.spec.id.clone(),
            backend: backend.handle,
            facts: backend.facts.clone(),
            verdict: FilterVerdict::OtherModel,
            matched_applied: 0,
            matched: 0,
            loaded: LowerTierBlocks::default(),
            here: self.load.here(backend.handle),
            cluster: self.load.cluster(backend.handle, now),
            engine_waiting: flags.map(|flags| flags.waiting),
            engine_running: flags.map(|flags| flags.running),
            kv_usage_permille: flags.map(|flags| flags.kv_usage_permille),
            free_blocks: None,
            is_model_listed: None,
            circuit: self.backends.circuit(backend.handle, now),
            service: self.view.service().get(backend.handle.slot).copied(),
            prices: None,
            tier: None,
            score: None,
            then: None,
            would_be: None,
        }
    }
}
