//! The inputs of a decision, kept as numbers, so that it can be shown later as it was made.
//!
//! A record holds what the policy saw: the request, the candidates and the policy itself. Nothing
//! is formatted and no score is computed until somebody asks; the scores then come from the same
//! pure function over the same numbers, so they are those of the decision and not of today (I72).
//! Where more than [`SEEN_MAX`] backends are registered only the best candidates are kept, with
//! their scores, since a score may depend on candidates that are not kept.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::HeaderMap;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::{BackendRef, LogIndex};
use state::policy::{
    self, Candidate, Choice, Handover, PolicyConfig, PolicyInputs, PolicyRequest, Prices, Reason,
    Score, UserTokens, WholeReason,
};

use super::routing_table::{DecisionScratch, PolicySource, RoutingTable};
use super::verdict::{FilterCounts, FilterVerdict};
use super::{AttemptEnd, Usage, session};

/// Most backends kept of one decision.
pub const SEEN_MAX: usize = 64;
/// Longest text kept of why there was no answer, in bytes.
const DETAIL_BYTES_MAX: usize = 200;

/// One decision as it was made, and what came of its attempt.
#[derive(Debug)]
pub struct DecisionRecord {
    /// Applied index it was made at.
    pub index: LogIndex,
    /// Id of the chosen backend.
    pub name: Arc<str>,
    policy: Arc<PolicyConfig>,
    policy_source: PolicySource,
    request: PolicyRequest,
    choice: Choice,
    is_panic: bool,
    filtered: FilterCounts,
    candidates: u32,
    seen: Box<[SeenBackend]>,
    /// Of the candidates in `seen`, where there were others; `None`: all are there.
    scores: Option<Box<[Score]>>,
    /// The backend that computes the prompt, or why it is the same.
    prefill: Result<PrefillRecord, Option<WholeReason>>,
    /// What came of the prompt at the backend that computes it.
    prefilled: OnceLock<&'static str>,
    /// Status of the engine's answer; 0: none came.
    status: AtomicU16,
    /// Why there was no answer.
    failure: OnceLock<&'static str>,
    /// What the operating system or the protocol said of that.
    detail: OnceLock<Box<str>>,
    report: OnceLock<AttemptReport>,
}

/// The best candidates of a decision with their scores.
#[derive(Debug)]
pub(super) struct SeenCandidates {
    seen: Box<[SeenBackend]>,
    scores: Box<[Score]>,
}

/// The prefill side of a decision as it was made.
#[derive(Debug)]
pub(super) struct PrefillRecord {
    pub(super) backend: BackendRef,
    pub(super) name: Arc<str>,
    pub(super) handover: Handover,
    pub(super) choice: Choice,
    pub(super) seen: SeenCandidates,
}

/// The prefill side of a decision with the numbers that it went by.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct PrefillView {
    /// Id of the backend that computes the prompt.
    pub choice: String,
    /// How the prompt gets to the backend that answers: `answer` or `room`.
    pub handover: Handover,
    /// Blocks it was believed to hold.
    pub matched: u32,
    /// Why it was chosen.
    pub reason: Reason,
    /// The candidates; at most 64, the best.
    pub backends: Vec<SeenBackendView>,
}

/// A backend as a decision saw it.
#[derive(Debug, Clone, Copy)]
struct SeenBackend {
    handle: BackendRef,
    verdict: FilterVerdict,
    /// Zeros where the filters took it out.
    numbers: Candidate,
}

/// A decision with all that its policy saw.
#[derive(Debug, Clone)]
pub struct SeenDecision<'a> {
    /// The policy.
    pub policy: &'a PolicyConfig,
    /// The request; what this policy does not look at is left out.
    pub request: PolicyRequest,
    /// The candidates.
    pub handles: Vec<BackendRef>,
    /// Their numbers, in the same order.
    pub candidates: Vec<Candidate>,
    /// What it chose.
    pub choice: Choice,
}

/// What an attempt came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptReport {
    /// How it ended.
    pub end: AttemptEnd,
    /// What the engine reported.
    pub usage: Option<Usage>,
    /// What the user was charged: prompt tokens not cached, cached, output tokens.
    pub charged: [u64; 3],
    /// From the dispatch to the answer's first byte.
    pub first_byte: Option<Duration>,
    /// From the dispatch to the end.
    pub duration: Duration,
}

/// What only some policies look at of a request; `None`: this one does not, or there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ExplainedRequest {
    /// Hash of the prompt's first blocks.
    pub prefix_key: Option<u64>,
    /// Hash of the session's name.
    pub session: Option<u64>,
    /// Where that name stands: `header:NAME` or `cookie:NAME`.
    pub session_source: Option<String>,
    /// Requests that this replica's round-robin has decided, from an arbitrary start.
    pub turn: Option<u64>,
    /// Weighted tokens of the user and of all users within the window.
    pub user_tokens: Option<UserTokens>,
}

impl ExplainedRequest {
    /// What a policy with these needs looks at; `headers` name the session's place.
    pub(super) fn of(
        request: &PolicyRequest,
        needs: &PolicyInputs<'_>,
        headers: Option<&HeaderMap>,
    ) -> Self {
        let named = needs.session.zip(headers);
        Self {
            prefix_key: needs.prefix_blocks.map(|_| request.prefix_key),
            session: request.session,
            session_source: named.and_then(|(names, headers)| session::source(names, headers)),
            turn: needs.turn.then_some(request.turn),
            user_tokens: needs.user_tokens.then_some(request.user),
        }
    }
}

/// A decision with the numbers that it went by.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct DecisionView {
    /// Applied index it was made at.
    pub index: LogIndex,
    /// The policy that decided, with its settings.
    pub policy: PolicyConfig,
    /// Who named it.
    pub policy_source: PolicySource,
    /// Prompt tokens, estimated.
    pub tokens: u32,
    /// Tokens of one block, estimated.
    pub tokens_per_block: u32,
    /// Blocks that an engine could have cached.
    pub blocks_matchable: u32,
    /// What else the policy looked at of the request.
    pub request: ExplainedRequest,
    /// Whether probes were doubted.
    pub is_panic: bool,
    /// Backends that passed the filters; `backends` has at most 64 of them, the best.
    pub candidates: u32,
    /// Backends that each filter took out.
    pub filtered: BTreeMap<&'static str, u32>,
    /// The backends, by slot: all of them when there are at most 64, else candidates only.
    pub backends: Vec<SeenBackendView>,
    /// Id of the chosen backend.
    pub choice: String,
    /// Blocks it was believed to hold.
    pub matched: u32,
    /// Why it was chosen.
    pub reason: Reason,
    /// The backend that computes the prompt; `None`: the chosen one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillView>,
    /// Why it is one backend, where there are some that compute prompts for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeReason>,
}

/// A backend as a decision saw it. Numbers are those of candidates; 0 for others.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SeenBackendView {
    /// Its id; `None`: it was removed long ago.
    pub id: Option<String>,
    /// How commands name it.
    pub backend: BackendRef,
    /// Whether it might take the request.
    pub verdict: FilterVerdict,
    /// Leading blocks it was believed to hold.
    pub matched: u32,
    /// Under way from all replicas heard from.
    pub running: u32,
    /// Of these, requests whose first byte had not come.
    pub pending: u32,
    /// Uncached prompt tokens under way to it whose first byte had not come.
    pub pending_prefill_tokens: u64,
    /// Requests in the engine's own queue.
    pub engine_waiting: u32,
    /// KV cache in use, thousandths.
    pub kv_usage_permille: u32,
    /// Blocks it could take before it evicted any; `None`: its capacity was unknown.
    pub free_blocks: Option<u32>,
    /// Whether the engine listed the model itself.
    pub is_model_listed: bool,
    /// Learnt prices that the policy counted with.
    pub prices: Option<Prices>,
    /// Step of the policy it counted in; candidates only, as those below.
    pub tier: Option<u8>,
    /// What the policy compared within the tier, lower is better.
    pub score: Option<u64>,
    /// What it compared among equal scores.
    pub then: Option<u64>,
    /// What a clear choice of it would have been explained by.
    pub would_be: Option<Reason>,
}

/// What a decision was made by, beside the candidates.
#[derive(Clone, Copy)]
pub(super) struct DecisionBasis<'a> {
    pub(super) index: LogIndex,
    pub(super) policy: &'a Arc<PolicyConfig>,
    pub(super) policy_source: PolicySource,
    pub(super) request: PolicyRequest,
    pub(super) choice: Choice,
}

impl DecisionRecord {
    /// Keeps a decision among the candidates of `scratch`, whose verdicts are filled in.
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
            name: Arc::clone(fleet.name(scratch.place(basis.choice))),
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

    /// What it takes up, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let scores = self.scores.as_ref().map_or(0, |it| size_of_val(&**it));
        let prefill = self.prefill.as_ref().map_or(0, PrefillRecord::bytes);
        size_of::<Self>() + size_of_val(&*self.seen) + scores + prefill
    }

    /// Name of the policy that decided.
    #[must_use]
    pub fn policy_name(&self) -> &'static str {
        self.policy.name()
    }

    /// Why its backend was chosen.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.choice.reason
    }

    /// Backends that passed the filters.
    #[must_use]
    pub fn candidates(&self) -> u32 {
        self.candidates
    }

    /// What the policy saw and what it chose; `None`: not all candidates are kept, or it chose two
    /// backends.
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

    /// Blocks that its backend was believed to hold.
    #[must_use]
    pub fn matched(&self) -> u32 {
        self.choice.matched
    }

    /// Id of the backend that computes the prompt; `None`: the same.
    #[must_use]
    pub fn prefill_name(&self) -> Option<&Arc<str>> {
        self.prefill.as_ref().ok().map(|prefill| &prefill.name)
    }

    /// This came of the prompt at the backend that computes it.
    pub fn prefilled(&self, outcome: &'static str) {
        self.prefilled.get_or_init(|| outcome);
    }

    /// What came of the prompt at the backend that computes it, once that is known.
    #[must_use]
    pub fn prefill_outcome(&self) -> Option<&'static str> {
        self.prefilled.get().copied()
    }

    /// The engine's answer came, with this status.
    pub fn answered(&self, status: u16) {
        self.status.store(status, Relaxed);
    }

    /// No answer came.
    pub fn failed(&self, why: &'static str) {
        // The first failure counts; an attempt has one.
        self.failure.get_or_init(|| why);
    }

    /// No answer came, for a reason that has a text of its own.
    pub fn failed_with(&self, why: &'static str, error: &dyn Error) {
        self.failed(why);
        self.detail.get_or_init(|| {
            let text = error.to_string();
            text[..text.floor_char_boundary(DETAIL_BYTES_MAX)].into()
        });
    }

    /// The attempt is over.
    pub(super) fn report(&self, report: AttemptReport) {
        self.report.get_or_init(|| report);
    }

    /// Status of the engine's answer, once there is one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        Some(self.status.load(Relaxed)).filter(|status| *status != 0)
    }

    /// Why there was no answer.
    #[must_use]
    pub fn failure(&self) -> Option<&'static str> {
        self.failure.get().copied()
    }

    /// What else is known of why there was no answer.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        self.detail.get().map(|detail| &**detail)
    }

    /// What the attempt came to, once it is over.
    #[must_use]
    pub fn outcome(&self) -> Option<&AttemptReport> {
        self.report.get()
    }

    /// Shows the decision, its backends by the names that `names` has.
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
            request: ExplainedRequest::of(request, &needs, None),
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
    /// Shows it, its backends by the names that `names` has.
    pub(super) fn view(&self, names: impl Fn(BackendRef) -> Option<Arc<str>>) -> PrefillView {
        PrefillView {
            handover: self.handover,
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

impl SeenCandidates {
    /// Keeps the best candidates of `scratch`, the chosen one among them.
    pub(super) fn of(
        fleet: &RoutingTable,
        basis: &DecisionBasis<'_>,
        scratch: &DecisionScratch,
    ) -> Self {
        let (seen, scores) = best(fleet, basis, scratch);
        Self { seen, scores }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.seen) + size_of_val(&*self.scores)
    }

    /// Shows them by the names that `names` has.
    pub(super) fn view(
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

/// All registered backends, with the verdict on each.
fn all(fleet: &RoutingTable, scratch: &DecisionScratch) -> Box<[SeenBackend]> {
    let mut candidates = scratch.candidates.iter().zip(&scratch.places).peekable();
    let registered = fleet.registry.backends.iter().zip(&scratch.verdicts);
    let seen = registered.enumerate().map(|(at, (backend, verdict))| {
        // Candidates stand in the registry's order.
        let numbers = candidates.next_if(|(_, place)| **place == at);
        SeenBackend {
            handle: backend.handle,
            verdict: *verdict,
            numbers: numbers.map_or_else(Candidate::default, |(candidate, _)| *candidate),
        }
    });
    seen.collect()
}

/// The best candidates by score, the chosen one among them, by slot.
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
