//! A simulated replica: the replicated state and the product's [`Router`] over it, with simulated
//! time.
//!
//! Production code implements filters, decisions, dispatches, charges, leases, samples and the
//! outbox. This module replaces sockets, probes and the log: it reports the engines' progress and
//! figures, and delivers log entries.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use api::base::clock::Clock;
use api::engines::backends::{Backends, Health, ProbeSettings};
use api::prompt::{ModelSettings, PromptIdentity};
use api::routing::{
    AfterProposal, Attempt, AttemptEnd, Decision, DispatchTerms, FilterVerdict, LoadReporter,
    LoadTable, OutboxSettings, PrefillAttempt, RequestStages, Router, RouterParts,
    RoutingRejection, RoutingRequest, SelectSettings, SharedOutbox, Usage, UserName,
};
use api::sessions::{NamedSession, SessionRules};
use http::{HeaderMap, HeaderName, HeaderValue};
use state::admission::{Counters, PendingCharges, Pricing, UserFigures};
use state::command::{Command, Committed, Envelope, Lane, Origin, Reply};
use state::ids::{
    AgentSessionKey, BackendRef, LogIndex, ModelKey, ReplicaId, SessionId, Slot, UserKey,
};
use state::policy::PairSettings;
use state::prefix::model_key;
use state::{RouterState, StateView};
use tokio::time::Instant;

use super::clock::{EPOCH_MS, SimClock, unix_ms};
use super::engine::{EngineUsage, ProbedFigures};
use super::events::Micros;
use super::literal_policies::{ReferenceCandidate, ReferencePolicy, ReferenceRouter};
use super::workload::{HASH_SEED, MODEL, SimPrompt};
use crate::engine::text::TOKEN_BYTES;

/// Header with the session of a request, for policies that use it.
const SESSION: HeaderName = HeaderName::from_static("x-quorate-session");
/// Header with the session that started that of a request.
const PARENT: HeaderName = HeaderName::from_static("x-quorate-parent-session");

/// Settings shared by all replicas of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunSettings {
    /// Clock that converts simulated time.
    pub clock: SimClock,
    /// Minimum time between two batches of a replica.
    pub flush: Micros,
    /// Prices of tokens, by which users are charged.
    pub pricing: Pricing,
    /// Reference policy that decides instead of the configured one, if any.
    pub reference_policy: Option<ReferencePolicy>,
    /// Conditions under which requests are disaggregated.
    pub pairs: PairSettings,
    /// Number of tokens per block. The router needs it, although prompts are split elsewhere.
    pub block_tokens: u32,
    /// Whether replicas follow the engines' KV events.
    pub is_exact: bool,
}

/// A simulated replica.
pub struct SimReplica {
    /// Id of the replica, counted from 1.
    pub id: ReplicaId,
    /// Session of the replica, new after each restart.
    pub session: SessionId,
    /// Replicated state after the applied log entries.
    pub state: RouterState,
    view: Arc<StateView>,
    backends: Arc<Backends>,
    router: Router,
    /// Schedule of load reports to peers.
    reporter: LoadReporter,
    pricing: Pricing,
    model: ModelKey,
    clock: SimClock,
    /// Whether prompts are identified by the hashes of the engines' events.
    is_exact: bool,
    /// Router that decides instead of the policy, if any.
    written: Option<RefCell<ReferenceRouter>>,
}

/// A user or session that sends requests, with the headers of the session.
pub struct SimSender {
    name: UserName,
    headers: HeaderMap,
    session: Option<NamedSession>,
}

/// A request as input of a decision.
pub struct SimRequest<'a> {
    id: String,
    number: usize,
    prompt: &'a SimPrompt,
    identity: PromptIdentity,
    sender: &'a SimSender,
}

/// A request in flight at an engine.
pub struct InFlight {
    /// Backend that serves the request.
    pub backend: BackendRef,
    /// Number of prompt tokens that the user is charged for if the engine never reports usage.
    pub uncached_tokens: u32,
    attempt: Attempt,
    has_first_token: bool,
    /// Prefill of the prompt at another engine; `None` if one engine serves the whole request.
    prefill: Option<PrefillFlight>,
}

/// A prompt in flight at a prefill engine.
struct PrefillFlight {
    engine: usize,
    /// Attempt at the prefill engine; `None` once the prompt is computed.
    attempt: Option<PrefillAttempt>,
    /// Number of prompt tokens that the prefill engine had cached.
    cached: u32,
}

impl InFlight {
    /// Returns the index of the prefill engine, if there is one.
    #[must_use]
    pub fn prefill_engine(&self) -> Option<usize> {
        self.prefill.as_ref().map(|prefill| prefill.engine)
    }

    /// Returns whether `engine` is currently prefilling this request.
    #[must_use]
    pub fn is_prefilled_by(&self, engine: usize) -> bool {
        let prefill = self.prefill.as_ref();
        prefill.is_some_and(|it| it.engine == engine && it.attempt.is_some())
    }

    /// Returns the number of cached prompt tokens: that of the prefill engine if there is one,
    /// otherwise `told`.
    #[must_use]
    pub fn cached(&self, told: u32) -> u32 {
        self.prefill.as_ref().map_or(told, |prefill| prefill.cached)
    }
}

impl SimSender {
    /// Creates the sender with the name `name` for the user with the number `number`. Its requests
    /// are no turns of sessions; the policy `session` alone takes them for those of one.
    #[must_use]
    pub fn user(name: &str, number: usize) -> Self {
        Self {
            name: UserName::bounded(name),
            headers: HeaderMap::from_iter([(SESSION, HeaderValue::from(number))]),
            session: None,
        }
    }

    /// Creates the sender of the session with the number `session`, which belongs to the user with
    /// the name `name` and was started by the session `parent`, if any.
    #[must_use]
    pub fn agent(name: &str, session: usize, parent: Option<usize>) -> Self {
        let parent = parent.map(|parent| (PARENT, HeaderValue::from(parent)));
        let mut sender = Self::user(name, session);
        sender.headers.extend(parent);
        let names = SessionRules::default().names(&sender.headers, None, |_| {});
        let user = sender.name.key(HASH_SEED);
        sender.session = names.map(|names| names.hashed(HASH_SEED, user));
        sender
    }

    /// Returns the root of the tree of the sender's session, as `view` shows it.
    fn tree(&self, view: &StateView) -> Option<AgentSessionKey> {
        let session = self.session?;
        Some(view.trees().root_of(session.key, session.parent))
    }
}

impl SimRequest<'_> {
    fn routed<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            model: MODEL,
            identity: &self.identity,
            request_id: &self.id,
            user: &self.sender.name,
            session: self.sender.session,
            headers: Some(&self.sender.headers),
            policy: None,
            labels: &[],
            excluded,
            waiting_here: 0,
            client: None,
            endpoints: None,
            stages: RequestStages::Disaggregatable,
            room: Default::default(),
        }
    }
}

impl SimReplica {
    /// Creates a replica with `state`, in its run `run_number`. Backends are healthy and idle.
    #[must_use]
    pub fn new(id: u8, run_number: u64, state: RouterState, run: &RunSettings) -> Self {
        // Replicas have distinct sessions, as in production, and so start at distinct turns.
        let session = SessionId(run_number << 8 | u64::from(id));
        let (id, view) = (ReplicaId(id), state.view());
        let backends = Arc::new(Backends::new(ProbeSettings::default()));
        let router = Router::new(RouterParts {
            view: Arc::clone(&view),
            backends: Arc::clone(&backends),
            models: vec![ModelSettings {
                pairs: run.pairs,
                ..ModelSettings::characters("*", run.block_tokens * TOKEN_BYTES as u32)
            }],
            replica: id,
            session,
            outbox: OutboxSettings {
                flush_interval: Duration::from_micros(run.flush),
                ..OutboxSettings::default()
            },
            overrides: Vec::new(),
            select: SelectSettings::default(),
            clock: Clock::default(),
        });
        let replica = Self {
            id,
            session,
            state,
            view,
            backends,
            router,
            reporter: LoadReporter::default(),
            pricing: run.pricing,
            model: model_key(HASH_SEED, MODEL),
            clock: run.clock,
            is_exact: run.is_exact,
            written: run
                .reference_policy
                .map(|it| RefCell::new(ReferenceRouter::new(it))),
        };
        replica.probed(|_| ProbedFigures::default());
        replica
    }

    /// Records the figures of all engines, as probes do.
    pub fn probed(&self, figures: impl Fn(Slot) -> ProbedFigures) {
        for backend in &self.view.registry().backends {
            let slot = backend.handle.slot;
            let figures = figures(slot);
            let health = Health {
                is_healthy: true,
                detail: None,
                waiting: figures.waiting,
                running: figures.running,
                kv_usage_permille: figures.kv_usage_permille,
                adapters: None,
            };
            self.backends.assume(slot, &health);
        }
    }

    /// Returns the request with the number `number`, as this replica identifies its prompt.
    #[must_use]
    pub fn request<'a>(
        &self,
        number: usize,
        prompt: &'a SimPrompt,
        sender: &'a SimSender,
    ) -> SimRequest<'a> {
        SimRequest {
            id: number.to_string(),
            number,
            prompt,
            identity: match self.is_exact {
                true => prompt.exact_identity(),
                false => prompt.identity.clone(),
            },
            sender,
        }
    }

    /// Chooses a backend for a request; with `only`, checks whether that backend can take it.
    ///
    /// # Errors
    /// The router's rejection, as in production.
    pub fn decide(
        &self,
        ask: &SimRequest<'_>,
        only: Option<Slot>,
        now: Micros,
    ) -> Result<Decision, RoutingRejection> {
        let decider = self.router.decider();
        let only = only.or_else(|| self.choose_as_written(ask, now));
        let excluded = only.map_or_else(Vec::new, |slot| decider.slots_but(slot));
        decider.decide(&ask.routed(&excluded), self.clock.at(now))
    }

    /// Returns the reference policy's choice among the candidates. Returns `None` if there is no
    /// reference policy or no candidate.
    fn choose_as_written(&self, ask: &SimRequest<'_>, now: Micros) -> Option<Slot> {
        let written = self.written.as_ref()?;
        let (decider, outbox) = (self.router.decider(), self.outbox().status());
        let explained = decider.explain(&ask.routed(&[]), outbox, self.clock.at(now));
        let left = explained.backends.iter();
        let left = left.filter(|it| it.verdict == FilterVerdict::Candidate);
        let candidates: Vec<ReferenceCandidate> = left
            .map(|it| ReferenceCandidate {
                slot: it.backend.slot,
                matched: it.matched,
                running: it.cluster.running,
            })
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let mut written = written.borrow_mut();
        Some(written.choose(&candidates, &ask.prompt.positions, ask.number, now))
    }

    /// Returns how many leading blocks of a prompt the replica expects at the engine `chosen`, and at
    /// the engine where it expects most.
    #[must_use]
    pub fn expected(&self, ask: &SimRequest<'_>, chosen: BackendRef, now: Micros) -> (u32, u32) {
        let (decider, outbox) = (self.router.decider(), self.outbox().status());
        let explained = decider.explain(&ask.routed(&[]), outbox, self.clock.at(now));
        let backends = || explained.backends.iter();
        let here = backends().find(|it| it.backend == chosen);
        let most = backends().map(|it| it.matched).max();
        (here.map_or(0, |it| it.matched), most.unwrap_or_default())
    }

    /// Records that a request of `sender` waits. Returns the key of the user that is charged.
    pub fn begin_wait(&self, sender: &SimSender) -> UserKey {
        self.router.dispatcher().begin_wait(&sender.name)
    }

    /// Records that a request of `user` no longer waits, for any reason.
    pub fn end_wait(&self, user: UserKey) {
        self.router.dispatcher().end_wait(user);
    }

    /// Returns the number of running requests that this replica dispatched.
    #[must_use]
    pub fn running_here(&self) -> u64 {
        self.router.decider().running_here(MODEL)
    }

    /// Dispatches a request to the backend of `decision`, with at most `tokens_max` output tokens;
    /// `None` if the request sets no limit.
    #[must_use]
    pub fn dispatch(
        &self,
        ask: &SimRequest<'_>,
        decision: &Decision,
        tokens_max: Option<u32>,
        now: Micros,
    ) -> InFlight {
        let terms = DispatchTerms {
            tokens_max,
            ..DispatchTerms::default()
        };
        if let Some(written) = &self.written {
            let slot = decision.backend.slot;
            written.borrow_mut().dispatched(&ask.prompt.positions, slot);
        }
        let (ask, now) = (ask.routed(&[]), self.clock.at(now));
        let dispatcher = self.router.dispatcher();
        let identity = ask.identity;
        let prefill = decision.prefill.as_ref();
        let matched = prefill.map_or(decision.matched, |it| it.matched);
        let cached_tokens = matched.saturating_mul(identity.tail.tokens_per_block);
        let mut attempt = dispatcher.dispatch(decision, &ask, terms, now);
        let prefill = attempt.take_prefill().map(|attempt| {
            attempt.sent();
            PrefillFlight {
                engine: usize::from(attempt.backend().slot.0),
                attempt: Some(attempt),
                cached: 0,
            }
        });
        InFlight {
            prefill,
            backend: decision.backend,
            uncached_tokens: identity.tokens.saturating_sub(cached_tokens),
            attempt,
            has_first_token: false,
        }
    }

    /// Records that the prefill engine has computed the prompt of `flight`.
    pub fn prefilled(&self, flight: &mut InFlight, prompt: &SimPrompt, told: &EngineUsage) {
        let now = self.clock.at(told.at);
        let Some(prefill) = &mut flight.prefill else {
            return;
        };
        if let Some(mut attempt) = prefill.attempt.take() {
            let usage = Some(usage(prompt, told));
            attempt.answered(usage, now);
            flight.attempt.prefilled(attempt, usage, now);
            prefill.cached = told.cached;
        }
    }

    /// Records progress of `flight` that the engine reported.
    pub fn served(&self, flight: &mut InFlight, prompt: &SimPrompt, told: &EngineUsage) {
        let now = self.clock.at(told.at);
        if !std::mem::replace(&mut flight.has_first_token, true) {
            flight.attempt.first_byte(now);
            flight.attempt.first_token(now);
        }
        flight.attempt.usage(usage(prompt, told), now);
    }

    /// Records the end of `flight`, with the last report of the engine.
    pub fn end(
        &self,
        mut flight: InFlight,
        prompt: &SimPrompt,
        told: &EngineUsage,
        end: AttemptEnd,
    ) {
        let now = self.clock.at(told.at);
        if flight.has_first_token {
            let answer = prompt.sequence.output().text(0, told.output);
            flight.attempt.output(&answer, now);
            flight.attempt.usage(usage(prompt, told), now);
        }
        flight.attempt.end(end, now);
    }

    /// Returns the number of priced tokens that this replica has charged since its start.
    #[must_use]
    pub fn priced_tokens(&self) -> u64 {
        self.router.dispatcher().priced_tokens()
    }

    /// Queues measurements of the engines in the outbox, for the log.
    pub fn queue_samples(&self, now: Micros) {
        self.router.dispatcher().queue_samples(self.clock.at(now));
    }

    /// Queues output lengths in the outbox, for the log.
    pub fn queue_output_lengths(&self) {
        self.router.dispatcher().queue_output_lengths();
    }

    /// Returns the figures of users, including this replica's unapplied charges.
    pub fn counters(&self) -> impl Counters {
        |user: UserKey| -> UserFigures {
            let mut pending = PendingCharges::default();
            pending.add(&self.router.dispatcher().unapplied(user), &self.pricing);
            pending.on_top(user, self.view.user_figures(user))
        }
    }

    /// Returns the total charges of `user` divided by its weight, as applied here, in thousandths
    /// of a priced token.
    #[must_use]
    pub fn charged_milli(&self, user: UserKey) -> u64 {
        self.view.user_figures(user).served_milli
    }

    /// Returns the predicted number of output tokens of a request of `user`.
    #[must_use]
    pub fn predict(&self, user: UserKey) -> u32 {
        self.view.outputs().predict(user, self.model, None).tokens
    }

    /// Returns the bin for an output of `tokens` tokens.
    #[must_use]
    pub fn bin_of(&self, tokens: u32) -> u16 {
        self.view.outputs().bin_of(self.model, tokens)
    }

    /// Returns the upper bounds of all output-length bins but the last.
    #[must_use]
    pub fn bin_edges(&self) -> Vec<u32> {
        self.view.outputs().bins(self.model).edges().to_vec()
    }

    /// Returns the concurrency limit of a backend; `None` if it has none.
    #[must_use]
    pub fn limit(&self, backend: BackendRef) -> Option<u32> {
        self.view.limit(backend.slot)
    }

    /// Returns the number of running requests at a backend, over all replicas.
    #[must_use]
    pub fn running_at(&self, backend: BackendRef, now: Micros) -> u32 {
        self.load().cluster(backend, self.clock.at(now)).running
    }

    /// Returns the root of the tree to which a request of `sender` belongs, if it is a turn.
    #[must_use]
    pub fn tree(&self, sender: &SimSender) -> Option<AgentSessionKey> {
        sender.tree(&self.view)
    }

    /// Returns the longest match of a prompt at any backend, in blocks.
    #[must_use]
    pub fn best_match(&self, ask: &SimRequest<'_>) -> u32 {
        self.router.decider().best_match(&ask.routed(&[]))
    }

    /// Returns the table with the load of all backends.
    #[must_use]
    pub fn load(&self) -> &LoadTable {
        self.router.load()
    }

    /// Returns the load report for peers, if one is due.
    pub fn due_report(&mut self, now: Micros) -> Option<Vec<u8>> {
        self.reporter.due(self.router.load(), self.clock.at(now))
    }

    /// Returns the outbox, with the items to propose.
    #[must_use]
    pub fn outbox(&self) -> &SharedOutbox {
        self.router.outbox()
    }

    /// Returns whether all that this replica routed is applied to the replicated state.
    #[must_use]
    pub fn is_overlay_empty(&self) -> bool {
        self.router.is_overlay_empty()
    }

    /// Cuts the next batch for the log from the outbox; `None` if it has no items.
    #[must_use]
    pub fn cut(&self, now: Micros) -> Option<Envelope> {
        let applied = self.view.applied();
        self.outbox()
            .envelope(applied, self.clock.at(now), unix_ms(now))
    }

    /// Applies an entry of the log, unless it is already applied.
    pub fn apply(&mut self, index: LogIndex, envelope: &Envelope) {
        if index <= self.state.applied() {
            return;
        }
        let reply = self.state.apply(index, envelope.clone());
        let (origin, applied) = (envelope.origin, self.view.applied());
        let is_own = origin.replica == self.id && origin.session == self.session;
        if !is_own || origin.lane != Lane::Outbox {
            return self.outbox().settle(applied);
        }
        let next = self
            .outbox()
            .handle_outcome(Ok(Committed { index, reply }), applied);
        // A simulated log rejects no session and loses nothing.
        debug_assert_eq!(next, AfterProposal::Continue, "{}", self.id);
    }

    /// Converts a simulated time to an [`Instant`] of production code.
    #[must_use]
    pub fn instant(&self, now: Micros) -> Instant {
        self.clock.at(now)
    }
}

fn usage(prompt: &SimPrompt, told: &EngineUsage) -> Usage {
    Usage {
        prompt_tokens: prompt.tokens.into(),
        cached_tokens: Some(told.cached.min(prompt.tokens).into()),
        completion_tokens: told.output.into(),
    }
}

/// Wraps a cluster's first commands in envelopes with one origin.
#[must_use]
pub fn setup(commands: Vec<Command>) -> Vec<Envelope> {
    let envelope = |(place, command)| Envelope {
        origin: Origin {
            replica: ReplicaId(u8::MAX),
            session: SessionId(1),
            lane: Lane::Admin,
            seq: place as u64 + 1,
        },
        proposed_at_ms: EPOCH_MS,
        command,
    };
    commands.into_iter().enumerate().map(envelope).collect()
}

/// Returns a replicated state that has applied `entries` from index 1 on.
///
/// # Panics
/// If an entry is rejected.
#[must_use]
pub fn state_of(entries: &[Envelope]) -> RouterState {
    let mut state = RouterState::new();
    for (place, entry) in entries.iter().enumerate() {
        let reply = state.apply(LogIndex(place as u64 + 1), entry.clone());
        let is_applied = match &reply {
            Reply::Batch(reply) => reply.missing_tip.is_empty(),
            reply => *reply == Reply::Applied,
        };
        assert!(is_applied, "setup command {place}: {reply:?}");
    }
    state
}
