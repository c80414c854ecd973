//! Keeps the inputs of a decision as numbers, so that it can be shown later as it was made.
//!
//! A record holds what the policy saw: the request, the candidates and the policy itself. Nothing
//! is formatted or scored until the record is read. A pure function then computes the scores from
//! the same numbers, so they equal those of the decision (I72). With more than [`SEEN_MAX`]
//! registered backends, only the best candidates are kept, with their scores, because a score may
//! depend on candidates that are not kept.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use state::ids::{BackendRef, LogIndex};
use state::kv_events::LowerTierBlocks;
use state::policy::{
    self, Candidate, Choice, Handover, PolicyConfig, PolicyInputs, PolicyRequest, Prices, Reason,
    Score, UserTokens, WholeReason,
};

use super::routing_table::{DecisionScratch, PolicySource, RoutingTable};
use super::session::{self, SessionParts};
use crate::routing::verdict::{FilterCounts, FilterVerdict};
use crate::routing::{AttemptEnd, Usage};

/// Maximum number of backends kept per decision.
pub const SEEN_MAX: usize = 64;
/// Maximum length of a kept error text, in bytes.
const DETAIL_BYTES_MAX: usize = 200;

/// A decision as it was made, and the outcome of its attempt.
#[derive(Debug)]
pub struct DecisionRecord {
    /// Log index applied when the decision was made.
    pub index: LogIndex,
    /// Id of the chosen backend.
    pub name: Arc<str>,
    pub(super) policy: Arc<PolicyConfig>,
    pub(super) policy_source: PolicySource,
    pub(super) request: PolicyRequest,
    pub(super) choice: Choice,
    pub(super) is_panic: bool,
    pub(super) filtered: FilterCounts,
    pub(super) candidates: u32,
    pub(super) seen: Box<[SeenBackend]>,
    /// Scores of the backends in `seen` if it omits some candidates; `None` if it holds all.
    pub(super) scores: Option<Box<[Score]>>,
    /// The backend that computes the prompt, or why the chosen backend computes it. `Err(None)` if
    /// no backend computes prompts for others.
    pub(super) prefill: Result<PrefillRecord, Option<WholeReason>>,
    /// Outcome of the prefill at the backend that computes the prompt.
    pub(super) prefilled: OnceLock<&'static str>,
    /// Status of the engine's response; 0 if none arrived.
    pub(super) status: AtomicU16,
    /// Reason why no response arrived.
    pub(super) failure: OnceLock<&'static str>,
    /// Error text of the operating system or the protocol.
    pub(super) detail: OnceLock<Box<str>>,
    pub(super) report: OnceLock<AttemptReport>,
}

/// The best candidates of a decision, at most [`SEEN_MAX`], with their scores.
#[derive(Debug, bincode::Encode, bincode::Decode)]
pub(super) struct SeenCandidates {
    seen: Box<[SeenBackend]>,
    scores: Box<[Score]>,
}

/// The choice of a prefill backend as it was made.
#[derive(Debug, bincode::Encode, bincode::Decode)]
pub(super) struct PrefillRecord {
    pub(in crate::routing) backend: BackendRef,
    pub(in crate::routing) name: Arc<str>,
    pub(in crate::routing) handover: Handover,
    pub(in crate::routing) choice: Choice,
    pub(in crate::routing) seen: SeenCandidates,
}

/// The prefill part of a decision, with its inputs.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PrefillView {
    /// Id of the backend that computes the prompt.
    pub choice: String,
    /// How the KV cache of the prompt reaches the backend that responds: `answer` or `room`.
    pub handover: Handover,
    /// Number of leading blocks that it was believed to hold.
    pub matched: u32,
    /// Why it was chosen.
    pub reason: Reason,
    /// Candidates: the best 64 at most.
    pub backends: Vec<SeenBackendView>,
}

/// A backend as a decision saw it.
#[derive(Debug, Clone, Copy, bincode::Encode, bincode::Decode)]
pub(super) struct SeenBackend {
    handle: BackendRef,
    verdict: FilterVerdict,
    /// Inputs of the policy; zeros if a filter excluded the backend.
    numbers: Candidate,
}

/// A decision with all inputs of its policy.
#[derive(Debug, Clone)]
pub struct SeenDecision<'a> {
    /// The policy that decided.
    pub policy: &'a PolicyConfig,
    /// The request, without inputs that the policy ignores.
    pub request: PolicyRequest,
    /// Candidates among which the policy chose.
    pub handles: Vec<BackendRef>,
    /// Inputs of the policy for each backend in `handles`, in the same order.
    pub candidates: Vec<Candidate>,
    /// The choice that the policy made.
    pub choice: Choice,
}

/// Outcome of an attempt, with its usage and durations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AttemptReport {
    /// How the attempt ended.
    pub end: AttemptEnd,
    /// Token usage that the engine reported, if any.
    pub usage: Option<Usage>,
    /// Numbers of tokens charged to the user: uncached prompt, cached prompt, output.
    pub charged: [u64; 3],
    /// Time from the dispatch to a stream's first output; `None` without one.
    pub first_token: Option<Duration>,
    /// Time from the dispatch to the end of the attempt.
    pub duration: Duration,
}

/// Inputs from a request that only some policies use; `null`: not used, or not present.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ExplainedRequest {
    /// Hash of the first blocks of the prompt.
    pub prefix_key: Option<u64>,
    /// Hash of the session's name.
    pub session: Option<u64>,
    /// Source of that name: `header:NAME` or `cookie:NAME`; always `null` in recorded decisions.
    pub session_source: Option<String>,
    /// Value of this replica's round-robin counter, which starts at an arbitrary number.
    pub turn: Option<u64>,
    /// Weighted tokens of the user and of all users within the window.
    pub user_tokens: Option<UserTokens>,
}

impl ExplainedRequest {
    /// Returns the inputs from `request` that a policy with `needs` uses. `parts` give the source
    /// of the session's name.
    pub(in crate::routing) fn of(
        request: &PolicyRequest,
        needs: &PolicyInputs<'_>,
        parts: SessionParts<'_>,
    ) -> Self {
        Self {
            prefix_key: needs.prefix_blocks.map(|_| request.prefix_key),
            session: request.session,
            session_source: needs
                .session
                .and_then(|names| session::source(names, parts)),
            turn: needs.turn.then_some(request.turn),
            user_tokens: needs.user_tokens.then_some(request.user),
        }
    }
}

/// A decision with its inputs.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct DecisionView {
    /// Applied index at which it was made.
    pub index: LogIndex,
    /// Policy that decided, with its settings.
    pub policy: PolicyConfig,
    /// What selected that policy.
    pub policy_source: PolicySource,
    /// Estimated number of prompt tokens.
    pub tokens: u32,
    /// Estimated number of tokens per block.
    pub tokens_per_block: u32,
    /// Number of blocks that an engine could have cached.
    pub blocks_matchable: u32,
    /// Further inputs of the policy from the request.
    pub request: ExplainedRequest,
    /// Whether panic mode was on.
    pub is_panic: bool,
    /// Number of backends that passed the filters; `backends` contains the best 64 of them at most.
    pub candidates: u32,
    /// Number of backends that each filter excluded.
    pub filtered: BTreeMap<&'static str, u32>,
    /// Backends, by slot: all if there are at most 64, else candidates only.
    pub backends: Vec<SeenBackendView>,
    /// Id of the chosen backend.
    pub choice: String,
    /// Number of leading blocks that it was believed to hold.
    pub matched: u32,
    /// Why it was chosen.
    pub reason: Reason,
    /// Backend that computes the prompt; absent: the chosen one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillView>,
    /// Why a single backend took the request, although some compute prompts for others; absent if
    /// two took it, or if none compute prompts for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeReason>,
}

/// A backend as a decision saw it. Numbers are given for candidates; others have 0.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SeenBackendView {
    /// Id of the backend; `null`: it was removed long ago.
    pub id: Option<String>,
    /// Slot and incarnation of the backend.
    pub backend: BackendRef,
    /// `candidate` if it could take the request, else the filter that excluded it.
    pub verdict: FilterVerdict,
    /// Number of leading blocks that it was believed to hold.
    pub matched: u32,
    /// Part of `matched` that its engine would load from tiers below the GPU.
    pub loaded: LowerTierBlocks,
    /// Number of requests in flight from all replicas heard recently.
    pub running: u32,
    /// Number of these without output so far.
    pub pending: u32,
    /// Number of uncached prompt tokens of the latter.
    pub pending_prefill_tokens: u64,
    /// Number of requests in the engine's own queue.
    pub engine_waiting: u32,
    /// KV cache usage, in thousandths; per cent in JSON.
    #[serde(
        rename = "kv_usage_percent",
        serialize_with = "state::readable::percent"
    )]
    #[schemars(with = "f64")]
    pub kv_usage_permille: u32,
    /// Number of blocks that it could take without evicting any; `null`: its capacity was unknown.
    pub free_blocks: Option<u32>,
    /// Whether the engine listed the requested model itself.
    pub is_model_listed: bool,
    /// Learned prices that the policy used; `null`: it used none, or none were known.
    pub prices: Option<Prices>,
    /// Preference tier that the policy assigned, from 0; lower tiers win. This and the following
    /// fields are `null` for backends that were no candidates.
    pub tier: Option<u8>,
    /// Score within its tier, lower is better.
    pub score: Option<u64>,
    /// Tie-breaker among equal scores, lower is better.
    pub then: Option<u64>,
    /// Reason that would have been given if it had been clearly the best.
    pub would_be: Option<Reason>,
}

/// Inputs of a decision other than the candidates.
#[derive(Clone, Copy)]
pub(in crate::routing) struct DecisionBasis<'a> {
    pub(in crate::routing) index: LogIndex,
    pub(in crate::routing) policy: &'a Arc<PolicyConfig>,
    pub(in crate::routing) policy_source: PolicySource,
    pub(in crate::routing) request: PolicyRequest,
    pub(in crate::routing) choice: Choice,
}

impl DecisionRecord {
    /// Records a decision among the candidates of `scratch`, which contains the verdicts.
    pub(super) fn of(
        fleet: &RoutingTable,
        basis: &DecisionBasis<'_>,
        prefill: Result<PrefillRecord, Option<WholeReason>>,
        scratch: &DecisionScratch,
    ) -> Self {
        let backends = &fleet.registry.backends;
        let is_whole = backends.len() <= SEEN_MAX;
        let (seen, scores) = match is_whole {
            true => (all(fleet, scratch), None),
            false => {
                let (seen, scores) = best(fleet, basis, scratch);
                (seen, Some(scores))
            }
        };
        Self {
            index: basis.index,
            name: Arc::clone(fleet.name(scratch.registry_index(basis.choice))),
            policy: Arc::clone(basis.policy),
            policy_source: basis.policy_source,
            request: basis.request,
            choice: basis.choice,
            is_panic: scratch.is_panic,
            filtered: scratch.tally,
            candidates: u32::try_from(scratch.candidates.len()).unwrap_or(u32::MAX),
            seen,
            scores,
            prefill,
            prefilled: OnceLock::new(),
            status: AtomicU16::new(0),
            failure: OnceLock::new(),
            detail: OnceLock::new(),
            report: OnceLock::new(),
        }
    }

    /// Returns the size of the record in memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let scores = self.scores.as_ref().map_or(0, |it| size_of_val(&**it));
        let prefill = self.prefill.as_ref().map_or(0, PrefillRecord::bytes);
        size_of::<Self>() + size_of_val(&*self.seen) + scores + prefill
    }

    /// Returns the name of the policy that decided.
    #[must_use]
    pub fn policy_name(&self) -> &'static str {
        self.policy.name()
    }

    /// Returns why the backend was chosen.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.choice.reason
    }

    /// Returns the number of backends that passed the filters.
    #[must_use]
    pub fn candidates(&self) -> u32 {
        self.candidates
    }

    /// Returns the inputs and the choice of the policy; `None` if some candidates are not kept or
    /// the decision chose two backends.
    #[must_use]
    pub fn as_seen(&self) -> Option<SeenDecision<'_>> {
        if self.scores.is_some() || self.prefill.is_ok() {
            return None;
        }
        let seen = self.seen.iter();
        let seen = seen.filter(|seen| seen.verdict == FilterVerdict::Candidate);
        let (handles, candidates) = seen.map(|seen| (seen.handle, seen.numbers)).unzip();
        Some(SeenDecision {
            policy: &self.policy,
            request: self.request,
            handles,
            candidates,
            choice: self.choice,
        })
    }

    /// Returns the number of leading blocks that the chosen backend was believed to hold.
    #[must_use]
    pub fn matched(&self) -> u32 {
        self.choice.matched
    }

    /// Returns the id of the backend that computes the prompt; `None` if it is the chosen one.
    #[must_use]
    pub fn prefill_name(&self) -> Option<&Arc<str>> {
        self.prefill.as_ref().ok().map(|prefill| &prefill.name)
    }

    /// Records the outcome of the prefill at the backend that computes the prompt. Later calls have
    /// no effect.
    pub fn prefilled(&self, outcome: &'static str) {
        self.prefilled.get_or_init(|| outcome);
    }

    /// Returns the outcome of the prefill at the backend that computes the prompt; `None` if
    /// unknown.
    #[must_use]
    pub fn prefill_outcome(&self) -> Option<&'static str> {
        self.prefilled.get().copied()
    }

    /// Records the status of the engine's response.
    pub fn answered(&self, status: u16) {
        self.status.store(status, Relaxed);
    }

    /// Records `why` no response arrived. Later calls have no effect.
    pub fn failed(&self, why: &'static str) {
        // An attempt has at most one failure.
        self.failure.get_or_init(|| why);
    }

    /// Records `why` no response arrived, with the truncated text of `error`.
    pub fn failed_with(&self, why: &'static str, error: &dyn Error) {
        self.failed(why);
        self.detail.get_or_init(|| {
            let text = error.to_string();
            text[..text.floor_char_boundary(DETAIL_BYTES_MAX)].into()
        });
    }

    /// Records the outcome of the attempt.
    pub(in crate::routing) fn report(&self, report: AttemptReport) {
        self.report.get_or_init(|| report);
    }

    /// Returns the status of the engine's response; `None` if none has arrived.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        Some(self.status.load(Relaxed)).filter(|status| *status != 0)
    }

    /// Returns why no response arrived; `None` if one did or is still expected.
    #[must_use]
    pub fn failure(&self) -> Option<&'static str> {
        self.failure.get().copied()
    }

    /// Returns the error text that explains why no response arrived, if any.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        self.detail.get().map(|detail| &**detail)
    }

    /// Returns the outcome of the attempt; `None` before it has ended.
    #[must_use]
    pub fn outcome(&self) -> Option<&AttemptReport> {
        self.report.get()
    }

    /// Returns the decision for display; `names` resolves backends to their ids, if still known.
    #[must_use]
    pub fn view(&self, names: impl Fn(BackendRef) -> Option<Arc<str>>) -> DecisionView {
        let candidates: Vec<Candidate> = (self.seen.iter())
            .filter(|seen| seen.verdict == FilterVerdict::Candidate)
            .map(|seen| seen.numbers)
            .collect();
        let computed;
        let scores = match &self.scores {
            Some(kept) => &**kept,
            None => {
                computed = policy::scores(&self.policy, &self.request, &candidates);
                &computed
            }
        };
        let view = |seen: &SeenBackend| {
            let is_candidate = seen.verdict == FilterVerdict::Candidate;
            let mut found = scores.iter().filter(|_| is_candidate);
            let score = found.find(|score| score.slot == seen.handle.slot);
            seen.view(score, names(seen.handle))
        };
        let (needs, request) = (self.policy.needs(), &self.request);
        let filtered = FilterVerdict::FILTERS.iter().zip(self.filtered.counts());
        DecisionView {
            index: self.index,
            policy: (*self.policy).clone(),
            policy_source: self.policy_source,
            tokens: request.tokens,
            tokens_per_block: request.tokens_per_block,
            blocks_matchable: request.blocks,
            request: ExplainedRequest::of(request, &needs, SessionParts::default()),
            is_panic: self.is_panic,
            candidates: self.candidates,
            filtered: filtered.map(|((_, name), count)| (*name, *count)).collect(),
            backends: self.seen.iter().map(view).collect(),
            choice: self.name.to_string(),
            matched: self.choice.matched,
            reason: self.choice.reason,
            prefill: self.prefill.as_ref().ok().map(|it| it.view(&names)),
            whole: self.prefill.as_ref().err().copied().flatten(),
        }
    }
}

impl PrefillRecord {
    /// Returns the record for display; `names` resolves backends to their ids, if still known.
    pub(in crate::routing) fn view(
        &self,
        names: impl Fn(BackendRef) -> Option<Arc<str>>,
    ) -> PrefillView {
        PrefillView {
            handover: self.handover,
            choice: self.name.to_string(),
            matched: self.choice.matched,
            reason: self.choice.reason,
            backends: self.seen.view(names),
        }
    }

    pub(in crate::routing) fn bytes(&self) -> usize {
        size_of::<Self>() + self.seen.bytes()
    }
}

impl SeenCandidates {
    /// Returns the best candidates of `scratch`, including the chosen one.
    pub(in crate::routing) fn of(
        fleet: &RoutingTable,
        basis: &DecisionBasis<'_>,
        scratch: &DecisionScratch,
    ) -> Self {
        let (seen, scores) = best(fleet, basis, scratch);
        Self { seen, scores }
    }

    pub(in crate::routing) fn bytes(&self) -> usize {
        size_of_val(&*self.seen) + size_of_val(&*self.scores)
    }

    /// Returns the candidates for display; `names` resolves backends to their ids, if still known.
    pub(in crate::routing) fn view(
        &self,
        names: impl Fn(BackendRef) -> Option<Arc<str>>,
    ) -> Vec<SeenBackendView> {
        let both = self.seen.iter().zip(&self.scores);
        both.map(|(seen, score)| seen.view(Some(score), names(seen.handle)))
            .collect()
    }
}

impl SeenBackend {
    fn view(&self, score: Option<&Score>, name: Option<Arc<str>>) -> SeenBackendView {
        let Candidate {
            slot: _,
            matched,
            loaded,
            evicts_to: _,
            running,
            pending,
            waiting,
            pending_prefill_tokens,
            kv_usage_permille,
            free_blocks,
            is_model_listed,
            prices,
        } = self.numbers;
        SeenBackendView {
            id: name.map(|name| name.to_string()),
            backend: self.handle,
            verdict: self.verdict,
            matched,
            loaded,
            running,
            pending,
            pending_prefill_tokens,
            engine_waiting: waiting,
            kv_usage_permille,
            free_blocks: (free_blocks != u32::MAX).then_some(free_blocks),
            is_model_listed,
            prices,
            tier: score.map(|score| score.tier),
            score: score.map(|score| score.score),
            then: score.map(|score| score.then),
            would_be: score.map(|score| score.reason),
        }
    }
}

/// Returns all registered backends with the verdict on each, in registry order.
fn all(fleet: &RoutingTable, scratch: &DecisionScratch) -> Box<[SeenBackend]> {
    let mut candidates = scratch.candidates.iter().zip(&scratch.places).peekable();
    let registered = fleet.registry.backends.iter().zip(&scratch.verdicts);
    let seen = registered.enumerate().map(|(at, (backend, verdict))| {
        // Candidates are in registry order.
        let numbers = candidates.next_if(|(_, place)| **place == at);
        SeenBackend {
            handle: backend.handle,
            verdict: *verdict,
            numbers: numbers.map_or_else(Candidate::default, |(candidate, _)| *candidate),
        }
    });
    seen.collect()
}

/// Returns the best candidates, including the chosen one, and their scores, ordered by slot.
fn best(
    fleet: &RoutingTable,
    basis: &DecisionBasis<'_>,
    scratch: &DecisionScratch,
) -> (Box<[SeenBackend]>, Box<[Score]>) {
    let scores = policy::scores(basis.policy, &basis.request, &scratch.candidates);
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let key = |at: &usize| {
        let score = &scores[*at];
        let is_chosen = score.slot == basis.choice.slot;
        (!is_chosen, score.tier, score.score, score.then, score.slot)
    };
    if order.len() > SEEN_MAX {
        order.select_nth_unstable_by_key(SEEN_MAX - 1, key);
        order.truncate(SEEN_MAX);
        order.sort_unstable();
    }
    let seen = |at: &usize| SeenBackend {
        handle: fleet.handle(scratch.places[*at]),
        verdict: FilterVerdict::Candidate,
        numbers: scratch.candidates[*at],
    };
    let kept = order.iter().map(seen).collect();
    (kept, order.iter().map(|at| scores[*at]).collect())
}
