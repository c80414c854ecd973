//! A simulated replica: the replicated state and the product's [`Router`] over it, with simulated
//! time.
//!
//! Filters, decisions, dispatches, charges, leases, samples and the outbox are the product's own.
//! This module does the part of sockets, probes and the log in production: it says when an engine
//! answered, what engines are doing, and which log entry arrived.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use api::backends::{Backends, Health, ProbeSettings};
use api::clock::Clock;
use api::prompt::{ChainTail, ModelSettings, PromptIdentity};
use api::routing::{
    AfterProposal, Attempt, AttemptEnd, Decision, DispatchTerms, FilterVerdict, LoadReporter,
    LoadTable, OutboxSettings, PrefillAttempt, RequestStages, Router, RouterParts,
    RoutingRejection, RoutingRequest, SelectSettings, SharedOutbox, Usage, UserName,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use state::admission::{Counters, PendingCharges, Pricing, UserFigures};
use state::command::{Command, Committed, Envelope, Lane, Origin, Reply};
use state::ids::{BackendRef, LogIndex, ModelKey, ReplicaId, SessionId, Slot, UserKey};
use state::policy::PairSettings;
use state::prefix::model_key;
use state::ratios::TokenRatio;
use state::{RouterState, StateView};
use tokio::time::Instant;

use super::clock::{EPOCH_MS, SimClock, unix_ms};
use super::engine::ProbedFigures;
use super::events::Micros;
use super::literal_policies::{AsWritten, WrittenCandidate, WrittenRouter};
use super::workload::{HASH_SEED, MODEL, SimPrompt};
use crate::engine::text::{TOKEN_BYTES, words};

/// Names the session of a request for the policies that look at it.
const SESSION: HeaderName = HeaderName::from_static("x-quorate-session");

/// What is the same for all replicas of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunSettings {
    /// Simulated time.
    pub clock: SimClock,
    /// Least time between two batches.
    pub flush: Micros,
    /// What tokens cost.
    pub pricing: Pricing,
    /// A source's pseudo-code that decides.
    pub as_written: Option<AsWritten>,
    /// When prompts go through engines that compute them for others.
    pub pairs: PairSettings,
    /// Prompts are not cut here; whoever reads requests wants to know all the same.
    pub block_tokens: u32,
}

/// One replica.
pub struct SimReplica {
    /// Who it is; the first is 1.
    pub id: ReplicaId,
    /// Its run.
    pub session: SessionId,
    /// What the log has brought it.
    pub state: RouterState,
    view: Arc<StateView>,
    backends: Arc<Backends>,
    router: Router,
    /// When peers are told its load.
    reporter: LoadReporter,
    /// Bytes per token, as engines have counted.
    ratio: TokenRatio,
    pricing: Pricing,
    model: ModelKey,
    clock: SimClock,
    /// Decides in the policy's place.
    written: Option<RefCell<WrittenRouter>>,
}

/// Who sends requests: a user with a session of its own.
pub struct SimSender {
    name: UserName,
    headers: HeaderMap,
}

/// A request as a decision sees it.
pub struct SimRequest<'a> {
    id: String,
    number: usize,
    prompt: &'a SimPrompt,
    identity: PromptIdentity,
    sender: &'a SimSender,
}

/// What an engine tells of a request.
#[derive(Debug, Clone, Copy)]
pub struct EngineUsage {
    /// When.
    pub at: Micros,
    /// Output tokens so far.
    pub output: u32,
    /// Prompt tokens found in the cache.
    pub cached: u32,
}

/// A request under way at an engine.
pub struct InFlight {
    /// Where.
    pub backend: BackendRef,
    /// Prompt tokens that its user is charged for if the engine never tells of any.
    pub uncached_tokens: u32,
    attempt: Attempt,
    has_first_token: bool,
    /// The engine that computes the prompt for the other; `None`: it is one engine.
    prefill: Option<PrefillFlight>,
}

/// A prompt under way at the engine that computes it.
struct PrefillFlight {
    engine: usize,
    /// `None` once it is computed.
    attempt: Option<PrefillAttempt>,
    /// Prompt tokens that it had cached.
    cached: u32,
}

impl InFlight {
    /// The engine that computes the prompt for the other.
    #[must_use]
    pub fn prefill_engine(&self) -> Option<usize> {
        self.prefill.as_ref().map(|prefill| prefill.engine)
    }

    /// Whether `engine` computes the prompt for another at present.
    #[must_use]
    pub fn is_prefilled_by(&self, engine: usize) -> bool {
        let prefill = self.prefill.as_ref();
        prefill.is_some_and(|it| it.engine == engine && it.attempt.is_some())
    }

    /// Prompt tokens that were cached where it was computed, as the engine that answers says.
    #[must_use]
    pub fn cached(&self, told: u32) -> u32 {
        self.prefill.as_ref().map_or(told, |prefill| prefill.cached)
    }
}

impl SimSender {
    /// The user `name`, the `number`th of the workload.
    #[must_use]
    pub fn new(name: &str, number: usize) -> Self {
        Self {
            name: UserName::bounded(name),
            headers: HeaderMap::from_iter([(SESSION, HeaderValue::from(number))]),
        }
    }
}

impl SimRequest<'_> {
    fn routed<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            model: MODEL,
            identity: &self.identity,
            request_id: &self.id,
            user: &self.sender.name,
            headers: Some(&self.sender.headers),
            policy: None,
            labels: &[],
            excluded,
            waiting_here: 0,
            endpoints: None,
            stages: RequestStages::Apart,
        }
    }
}

impl SimReplica {
    /// A replica with `state`, in its run number `run_number`. All backends are healthy and idle.
    #[must_use]
    pub fn new(id: u8, run_number: u64, state: RouterState, run: &RunSettings) -> Self {
        // Replicas' sessions differ, as they do in production, and so do the turns they begin with.
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
            ratio: TokenRatio::default(),
            pricing: run.pricing,
            model: model_key(HASH_SEED, MODEL),
            clock: run.clock,
            written: run
                .as_written
                .map(|it| RefCell::new(WrittenRouter::new(it))),
        };
        replica.probed(|_| ProbedFigures::default());
        replica
    }

    /// Takes in what probes have read of the engines.
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

    /// The `number`th request of the run, as this replica sees it.
    #[must_use]
    pub fn request<'a>(
        &self,
        number: usize,
        prompt: &'a SimPrompt,
        sender: &'a SimSender,
    ) -> SimRequest<'a> {
        let identity = prompt.identity.clone();
        let tail = ChainTail {
            ratio: self.ratio,
            ..identity.tail
        };
        SimRequest {
            id: number.to_string(),
            number,
            prompt,
            identity: PromptIdentity { tail, ..identity },
            sender,
        }
    }

    /// Chooses a backend, or looks whether `only` can take the request.
    ///
    /// # Errors
    /// As in production.
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

    /// The choice of a source's pseudo-code among the backends that the filters leave; `None`: the
    /// policy chooses, or nobody can take it.
    fn choose_as_written(&self, ask: &SimRequest<'_>, now: Micros) -> Option<Slot> {
        let written = self.written.as_ref()?;
        let (decider, outbox) = (self.router.decider(), self.outbox().status());
        let explained = decider.explain(&ask.routed(&[]), outbox, self.clock.at(now));
        let left = explained.backends.iter();
        let left = left.filter(|it| it.verdict == FilterVerdict::Candidate);
        let candidates: Vec<WrittenCandidate> = left
            .map(|it| WrittenCandidate {
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

    /// A request of `sender` begins to wait. Returns whom it is charged to.
    pub fn begin_wait(&self, sender: &SimSender) -> UserKey {
        self.router.dispatcher().begin_wait(&sender.name)
    }

    /// A request of `user` waits no more, whichever way.
    pub fn end_wait(&self, user: UserKey) {
        self.router.dispatcher().end_wait(user);
    }

    /// Requests from here that run.
    #[must_use]
    pub fn running_here(&self) -> u64 {
        self.router.decider().running_here(MODEL)
    }

    /// Sends a request to the decided backend. `tokens_max` bounds its output.
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
            granted_tokens: None,
        };
        if let Some(written) = &self.written {
            let slot = decision.backend.slot;
            written.borrow_mut().dispatched(&ask.prompt.positions, slot);
        }
        let (ask, now) = (ask.routed(&[]), self.clock.at(now));
        let dispatcher = self.router.dispatcher();
        let identity = ask.identity;
        // As attempts do: only where blocks cannot be forged, those found count as cached.
        let prefill = decision.prefill.as_ref();
        let matched = prefill.map_or(decision.matched, |it| it.matched);
        let cached_tokens = match self.view.registry().hash_secret {
            Some(_) => matched.saturating_mul(identity.tail.tokens_per_block),
            None => 0,
        };
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

    /// The prompt is computed at the engine that does it for the other.
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

    /// The engine has told how far it is.
    pub fn served(&self, flight: &mut InFlight, prompt: &SimPrompt, told: &EngineUsage) {
        let now = self.clock.at(told.at);
        if !std::mem::replace(&mut flight.has_first_token, true) {
            flight.attempt.first_byte(now);
            flight.attempt.first_token(now);
        }
        flight.attempt.usage(usage(prompt, told), now);
    }

    /// The request is over.
    pub fn end(
        &self,
        mut flight: InFlight,
        prompt: &SimPrompt,
        told: &EngineUsage,
        end: AttemptEnd,
    ) {
        let now = self.clock.at(told.at);
        if flight.has_first_token {
            let answer = words(prompt.sequence.voice(), 0, told.output);
            flight.attempt.output(&answer, now);
            flight.attempt.usage(usage(prompt, told), now);
        }
        flight.attempt.end(end, now);
    }

    /// Priced tokens charged here since the start.
    #[must_use]
    pub fn priced_tokens(&self) -> u64 {
        self.router.dispatcher().priced_tokens()
    }

    /// Tells the log what was measured of the engines.
    pub fn tell_samples(&self, now: Micros) {
        self.router.dispatcher().tell_samples(self.clock.at(now));
    }

    /// Tells the log how long outputs became.
    pub fn tell_lengths(&self) {
        self.router.dispatcher().tell_lengths();
    }

    /// The users' figures, with what this replica has charged on top.
    pub fn counters(&self) -> impl Counters {
        |user: UserKey| -> UserFigures {
            let mut pending = PendingCharges::default();
            pending.add(&self.router.dispatcher().unapplied(user), &self.pricing);
            pending.on_top(user, self.view.user_figures(user))
        }
    }

    /// What a user was ever charged over its weight, as far as applied here; in milli-tokens.
    #[must_use]
    pub fn charged_milli(&self, user: UserKey) -> u64 {
        self.view.user_figures(user).served_milli
    }

    /// Output tokens that a request of `user` is expected to make.
    #[must_use]
    pub fn predict(&self, user: UserKey) -> u32 {
        self.view.outputs().predict(user, self.model, None).tokens
    }

    /// The bin of an output of so many tokens.
    #[must_use]
    pub fn bin_of(&self, tokens: u32) -> u16 {
        self.view.outputs().bin_of(self.model, tokens)
    }

    /// Upper ends of the bins but the last.
    #[must_use]
    pub fn bin_edges(&self) -> Vec<u32> {
        self.view.outputs().bins(self.model).edges().to_vec()
    }

    /// How many requests a backend is given at once; `None`: as many as come.
    #[must_use]
    pub fn limit(&self, backend: BackendRef) -> Option<u32> {
        self.view.limit(backend.slot)
    }

    /// Requests that run at a backend, from all replicas.
    #[must_use]
    pub fn running_at(&self, backend: BackendRef, now: Micros) -> u32 {
        self.load().cluster(backend, self.clock.at(now)).running
    }

    /// Most blocks of a prompt that one backend is believed to hold.
    #[must_use]
    pub fn best_match(&self, ask: &SimRequest<'_>) -> u32 {
        self.router.decider().best_match(&ask.routed(&[]))
    }

    /// Who is busy.
    #[must_use]
    pub fn load(&self) -> &LoadTable {
        self.router.load()
    }

    /// What peers are to be told of the load, if anything is due.
    pub fn due_report(&mut self, now: Micros) -> Option<Vec<u8>> {
        self.reporter.due(self.router.load(), self.clock.at(now))
    }

    /// What it has learnt and not seen applied.
    #[must_use]
    pub fn outbox(&self) -> &SharedOutbox {
        self.router.outbox()
    }

    /// Whether all that was routed here is applied.
    #[must_use]
    pub fn is_overlay_empty(&self) -> bool {
        self.router.is_overlay_empty()
    }

    /// The next batch for the log, if something waits.
    #[must_use]
    pub fn cut(&self, now: Micros) -> Option<Envelope> {
        let applied = self.view.applied();
        self.outbox()
            .envelope(applied, self.clock.at(now), unix_ms(now))
    }

    /// Applies an entry of the log; what is applied already is passed over.
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
        let next = self.outbox().fate(Ok(Committed { index, reply }), applied);
        // A simulated log refuses no session and loses nothing.
        debug_assert_eq!(next, AfterProposal::GoOn, "{}", self.id);
    }

    /// The moment as production code has it.
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

/// The commands a cluster begins with, all of one origin.
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

/// A state that publishes what admission reads.
#[must_use]
pub fn empty_state() -> RouterState {
    let state = RouterState::new();
    state.view().want_users();
    state
}

/// A state that has applied `entries` from index 1 on.
///
/// # Panics
/// When one is refused: the commands a simulation begins with are checked before.
#[must_use]
pub fn state_of(entries: &[Envelope]) -> RouterState {
    let mut state = empty_state();
    for (place, entry) in entries.iter().enumerate() {
        let reply = state.apply(LogIndex(place as u64 + 1), entry.clone());
        assert_eq!(reply, Reply::Applied, "setup command {place}");
    }
    state
}
