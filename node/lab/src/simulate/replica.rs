//! A replica as the simulator has it: the production state, view, outbox, overlay, load table and
//! policies, with a driver that takes the time as an argument.
//!
//! What stands here in place of `api::routing::Router` is only what that does around those parts:
//! gathering a candidate's figures, and telling outbox and load what became of a request.

use std::sync::Arc;
use std::time::Duration;

use api::ports::ProposeError;
use api::routing::{LoadGuard, LoadReporter, LoadTable, Outbox, OutboxSettings, Overlay};
use state::admission::{
    Advance, Counters, CreditLedger, Order, PendingCharges, Pricing, TokenDelta, UserFigures,
};
use state::command::{
    Charge, Command, Committed, Envelope, Item, Lane, LeaseOutcome, Origin, Reply,
};
use state::ids::{
    AttemptId, BackendRef, BlockHash, LogIndex, ModelKey, ReplicaId, SessionId, UserKey,
};
use state::policy::{self, Candidate, PolicyConfig, PolicyRequest};
use state::prefix::{continue_bytes, model_key};
use state::{RouterState, StateView};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::clock::{EPOCH_MS, SimClock, unix_ms};
use super::engine::ProbedFigures;
use super::events::Micros;
use super::plan::BLOCK_TOKENS;
use super::samples::{DispatchConditions, EndedSample, SimSamples};
use super::workload::{HASH_SEED, MODEL, SimPrompt};
use crate::engine::text::{TOKEN_BYTES, words};

/// Output tokens that are charged at a time, as the proxy does while an answer streams.
const OUTPUT_STEP_TOKENS: u64 = 32;

/// What is the same for all replicas of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunSettings {
    /// Simulated time.
    pub clock: SimClock,
    /// Least time between two batches.
    pub flush: Micros,
    /// What tokens cost.
    pub pricing: Pricing,
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
    /// What it has learnt and not seen applied.
    pub outbox: Outbox,
    overlay: Arc<Overlay>,
    /// Who is busy.
    pub load: LoadTable,
    /// When peers are told.
    pub reporter: LoadReporter,
    ledger: CreditLedger,
    pricing: Pricing,
    model: ModelKey,
    samples: SimSamples,
    clock: SimClock,
    last_attempt: u64,
    turn: u64,
    candidates: Vec<Candidate>,
}

/// A request as a decision sees it.
#[derive(Debug, Clone, Copy)]
pub struct SimRequest<'a> {
    /// Its number, whose hash breaks ties.
    pub number: usize,
    /// Its prompt.
    pub prompt: &'a SimPrompt,
    /// Who sends it.
    pub user: UserKey,
}

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimDecision {
    /// The backend.
    pub backend: BackendRef,
    /// Leading blocks it is believed to hold.
    pub matched: u32,
    /// Requests there, all replicas.
    running: u32,
    /// Uncached tokens pending there, all replicas.
    pending_prefill_tokens: u64,
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

/// What a dispatch is made with.
#[derive(Debug, Clone, Copy)]
pub struct SimDispatch<'a> {
    /// Name of who pays.
    pub user: &'a str,
    /// The queue's order, which says what is charged ahead.
    pub order: Order,
    /// Output tokens as predicted.
    pub predicted_output: u32,
    /// Whether it waited.
    pub was_queued: bool,
    /// When.
    pub at: Micros,
}

/// A request under way at an engine.
pub struct InFlight {
    /// Where.
    pub backend: BackendRef,
    attempt: AttemptId,
    underway: LoadGuard,
    user: UserKey,
    advance: Advance,
    before: DispatchConditions,
    /// Prompt tokens predicted to be cached.
    predicted: u32,
    charged_output: u64,
    /// When the first token came, and how many prompt tokens were cached.
    first: Option<(Micros, u32)>,
}

impl SimReplica {
    /// A replica with `state`, in its run number `session`.
    #[must_use]
    pub fn new(id: u8, session: u64, state: RouterState, run: &RunSettings) -> Self {
        let overlay = Arc::new(Overlay::default());
        let settings = OutboxSettings {
            flush_interval: Duration::from_micros(run.flush),
            ..OutboxSettings::default()
        };
        let (id, session) = (ReplicaId(id), SessionId(session));
        Self {
            id,
            session,
            view: state.view(),
            state,
            outbox: Outbox::new(id, session, settings, Arc::clone(&overlay)),
            overlay,
            load: LoadTable::default(),
            reporter: LoadReporter::default(),
            ledger: CreditLedger::default(),
            pricing: run.pricing,
            model: model_key(HASH_SEED, MODEL),
            samples: SimSamples::default(),
            clock: run.clock,
            last_attempt: 0,
            turn: u64::from(id.0),
            candidates: Vec::new(),
        }
    }

    /// Chooses a backend among those that `has_room` lets pass; `None`: none of them has any.
    pub fn decide(
        &mut self,
        ask: &SimRequest<'_>,
        probed: &[ProbedFigures],
        now: Micros,
        has_room: impl Fn(BackendRef, u32) -> bool,
    ) -> Option<SimDecision> {
        let registry = self.view.registry();
        let instant = self.clock.at(now);
        let service = self.view.service();
        let learns = registry.routing.as_ref().is_none_or(|it| it.learn);
        self.candidates.clear();
        for backend in &registry.backends {
            let slot = backend.handle.slot;
            let load = self.load.cluster(backend.handle, instant);
            if !has_room(backend.handle, load.running) {
                continue;
            }
            let figures = probed[usize::from(slot.0)];
            let owned = self.view.blocks.owned(slot);
            let served = service.get(slot).filter(|it| it.backend == backend.handle);
            let capacity = served.map_or(backend.capacity_blocks(), |it| it.capacity_blocks);
            let prices = served.filter(|_| learns).and_then(|it| it.learnt?.prices());
            self.candidates.push(Candidate {
                slot,
                running: load.running,
                pending_prefill_tokens: load.pending_prefill_tokens,
                waiting: figures.waiting,
                kv_usage_permille: figures.kv_usage_permille,
                free_blocks: capacity.map_or(u32::MAX, |it| it.saturating_sub(owned)),
                prices,
                ..Candidate::default()
            });
        }
        drop(service);
        if self.candidates.is_empty() {
            return None;
        }
        let chain = matchable(ask.prompt);
        self.match_blocks(chain);
        let request = self.request(&registry.policy, ask);
        let choice = policy::choose(&registry.policy, &request, &self.candidates)?;
        let chosen = |it: &&Candidate| it.slot == choice.slot;
        let candidate = self.candidates.iter().find(chosen);
        let candidate = candidate.expect("a policy chooses among the candidates");
        let mut backends = registry.backends.iter();
        let backend = backends.find(|it| it.handle.slot == choice.slot);
        Some(SimDecision {
            backend: backend.expect("candidates are registered").handle,
            matched: choice.matched,
            running: candidate.running,
            pending_prefill_tokens: candidate.pending_prefill_tokens,
        })
    }

    fn match_blocks(&mut self, chain: &[BlockHash]) {
        let candidates = &mut self.candidates;
        self.view.blocks.match_prefix(chain, |slot, blocks| {
            if let Ok(at) = candidates.binary_search_by_key(&slot, |it| it.slot) {
                candidates[at].matched = blocks;
            }
        });
        if self.overlay.is_empty() {
            return;
        }
        let registry = self.view.registry();
        let matches = self.candidates.iter_mut().map(|candidate| {
            let backend = registry.backend(candidate.slot);
            let backend = backend.expect("candidates are registered");
            (backend.handle, &mut candidate.matched)
        });
        self.overlay.extend(chain, matches);
    }

    fn request(&mut self, config: &PolicyConfig, ask: &SimRequest<'_>) -> PolicyRequest {
        let needs = config.needs();
        let chain = &ask.prompt.chain;
        let prefix_key = needs.prefix_blocks.map_or(0, |blocks| {
            let first = chain.get(..blocks as usize).unwrap_or(chain);
            first.last().map_or(ask.number as u64, |last| last.0)
        });
        let turn = self.turn;
        self.turn += u64::from(needs.turn);
        PolicyRequest {
            jitter: xxh3_64(&ask.number.to_le_bytes()),
            blocks: ask.prompt.matchable,
            tokens: ask.prompt.tokens,
            tokens_per_block: BLOCK_TOKENS,
            prefix_key,
            session: needs.session.map(|_| ask.user.0),
            turn,
            user: if needs.user_tokens {
                self.view.user_tokens(ask.user)
            } else {
                policy::UserTokens::default()
            },
        }
    }

    /// Notes that a request begins to wait.
    pub fn queued(&mut self, user: &str) {
        let payer = self.outbox.payer(HASH_SEED, user);
        self.outbox.charge(Charge {
            user: payer,
            queued: 1,
            ..Charge::default()
        });
    }

    /// Notes that a request waits no more and does not go.
    pub fn unqueued(&mut self, user: &str) {
        let payer = self.outbox.payer(HASH_SEED, user);
        self.outbox.charge(Charge {
            user: payer,
            dequeued: 1,
            ..Charge::default()
        });
    }

    /// Requests from here that run.
    #[must_use]
    pub fn running_here(&self) -> u64 {
        let registry = self.view.registry();
        let backends = registry.backends.iter();
        let running = backends.map(|it| u64::from(self.load.here(it.handle).running));
        running.sum()
    }

    /// Notes that a request goes to the decided backend: load, overlay and outbox know it.
    pub fn dispatch(
        &mut self,
        ask: &SimRequest<'_>,
        decision: SimDecision,
        sent: &SimDispatch<'_>,
    ) -> InFlight {
        self.last_attempt += 1;
        let attempt = AttemptId(self.last_attempt);
        let prompt_tokens = u64::from(ask.prompt.tokens);
        let cached = (u64::from(decision.matched) * u64::from(BLOCK_TOKENS)).min(prompt_tokens);
        let uncached = prompt_tokens - cached;
        let underway = self.load.begin(decision.backend, uncached);
        let held = self.held(decision, &ask.prompt.chain);
        let user = self.outbox.payer(HASH_SEED, sent.user);
        let is_output_ahead = sent.order == Order::VtcPred;
        let estimate = TokenDelta {
            input_uncached: uncached,
            input_cached: cached,
            output: u64::from(sent.predicted_output) * u64::from(is_output_ahead),
        };
        let (advance, ahead) = self.ledger.open(user, &estimate, &self.pricing);
        self.outbox.charge(Charge {
            started: 1,
            dequeued: u32::from(sent.was_queued),
            ..ahead
        });
        self.outbox
            .acquire(attempt, decision.backend, &ask.prompt.chain, held);
        InFlight {
            backend: decision.backend,
            attempt,
            underway,
            user,
            advance,
            before: DispatchConditions {
                at: sent.at,
                running: decision.running,
                prefill_tokens: decision.pending_prefill_tokens + uncached,
            },
            predicted: u32::try_from(cached).unwrap_or(u32::MAX),
            charged_output: 0,
            first: None,
        }
    }

    /// Leading blocks the backend holds or is about to, beyond what a match may count.
    fn held(&self, decision: SimDecision, chain: &[BlockHash]) -> usize {
        let mut held = decision.matched;
        while chain
            .get(held as usize)
            .is_some_and(|block| self.view.blocks.owns(decision.backend.slot, *block))
        {
            held += 1;
        }
        self.overlay
            .extend(chain, std::iter::once((decision.backend, &mut held)));
        chain.len().min(held as usize)
    }

    /// What the engine has told so far. Answers what that was charged, in priced tokens.
    pub fn served(&mut self, flight: &mut InFlight, prompt: &SimPrompt, told: &EngineUsage) -> u64 {
        flight.underway.first_byte();
        let mut used = TokenDelta::default();
        if flight.first.is_none() {
            flight.first = Some((told.at, told.cached));
            used.input_cached = u64::from(told.cached.min(prompt.tokens));
            used.input_uncached = u64::from(prompt.tokens) - used.input_cached;
            self.samples
                .first_token(flight.backend, &flight.before, told.at);
        }
        let due = u64::from(told.output).saturating_sub(flight.charged_output);
        if due < OUTPUT_STEP_TOKENS && used == TokenDelta::default() {
            return 0;
        }
        used.output = due;
        flight.charged_output += due;
        self.settle(flight, &used, 0)
    }

    fn settle(&mut self, flight: &mut InFlight, used: &TokenDelta, ended: u32) -> u64 {
        let (user, advance) = (flight.user, &mut flight.advance);
        let charge = self.ledger.settle(user, advance, used, &self.pricing);
        self.outbox.charge(Charge { ended, ..charge });
        self.pricing.input(used.input_uncached, used.input_cached)
            + self.pricing.output(used.output)
    }

    /// The request is over: its lease ends, what it owes is settled. Answers what that was charged.
    pub fn end(&mut self, mut flight: InFlight, prompt: &SimPrompt, told: &EngineUsage) -> u64 {
        self.outbox
            .extend(flight.attempt, output_blocks(prompt, told.output));
        self.outbox.release(flight.attempt, LeaseOutcome::Kept);
        let used = TokenDelta {
            output: u64::from(told.output).saturating_sub(flight.charged_output),
            ..TokenDelta::default()
        };
        let priced = self.settle(&mut flight, &used, 1);
        self.ledger.close(flight.user, flight.advance);
        let instant = self.clock.at(told.at);
        let running = self.load.cluster(flight.backend, instant).running;
        if let Some((first, cached)) = flight.first {
            let limit = self.limit(flight.backend);
            let ended = EndedSample {
                tokens_between: (first, told.at),
                prompt: prompt.tokens,
                cached,
                predicted: flight.predicted,
                output: told.output,
                running,
                is_at_limit: limit.is_some_and(|limit| running >= limit),
            };
            self.samples.ended(flight.backend, &ended);
        }
        priced
    }

    /// Tells the log what was measured of the engines.
    pub fn tell_samples(&mut self) {
        for sample in self.samples.take() {
            self.outbox.note(Item::ObserveService(Box::new(sample)));
        }
    }

    /// Tells the log how long an output became.
    pub fn tell_length(&mut self, user: UserKey, tokens: u32) {
        self.outbox.note(Item::ObserveOutputs {
            user,
            model: self.model,
            tokens: vec![tokens],
        });
    }

    /// The users' figures, with what this replica has charged on top.
    pub fn counters(&self) -> impl Counters {
        |user: UserKey| -> UserFigures {
            let mut pending = PendingCharges::default();
            pending.add(&self.outbox.unapplied(user), &self.pricing);
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

    /// Most blocks of a prompt that one backend is believed to hold.
    #[must_use]
    pub fn longest_match(&self, prompt: &SimPrompt) -> u32 {
        let mut longest = 0;
        self.view
            .blocks
            .match_prefix(matchable(prompt), |_, blocks| longest = longest.max(blocks));
        longest
    }

    /// The next batch for the log, if none is outstanding and something waits.
    pub fn cut(&mut self, now: Micros) -> Option<Envelope> {
        self.outbox.settle(self.view.applied());
        self.outbox.cut(self.clock.at(now), unix_ms(now)).cloned()
    }

    /// Applies an entry of the log; what is applied already is passed over.
    pub fn apply(&mut self, index: LogIndex, envelope: &Envelope) {
        if index <= self.state.applied() {
            return;
        }
        let reply = self.state.apply(index, envelope.clone());
        let origin = envelope.origin;
        let is_own = origin.replica == self.id && origin.session == self.session;
        if is_own && origin.lane == Lane::Outbox {
            self.told(Ok(Committed { index, reply }));
        }
        self.outbox.settle(self.view.applied());
    }

    fn told(&mut self, fate: Result<Committed, ProposeError>) {
        // Nothing to be done about any answer: a simulated log refuses no session and loses nothing.
        let next = self.outbox.fate(fate);
        debug_assert_eq!(next, api::routing::AfterProposal::GoOn, "{}", self.id);
    }

    /// Whether a batch should be cut now or at the next flush.
    #[must_use]
    pub fn wants_flush(&self) -> bool {
        self.outbox.outstanding().is_none() && !self.outbox.is_empty()
    }

    /// The moment as the load table has it.
    #[must_use]
    pub fn instant(&self, now: Micros) -> Instant {
        self.clock.at(now)
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

fn matchable(prompt: &SimPrompt) -> &[BlockHash] {
    &prompt.chain[..prompt.chain.len().min(prompt.matchable as usize)]
}

/// Blocks behind the prompt's that its output fills.
fn output_blocks(prompt: &SimPrompt, output: u32) -> Vec<BlockHash> {
    let mut bytes = prompt.tail.clone();
    bytes.extend(words(prompt.sequence.voice(), 0, output).as_bytes());
    let mut blocks = Vec::new();
    continue_bytes(
        &prompt.root,
        prompt.chain.last().copied(),
        &bytes,
        BLOCK_TOKENS as usize * TOKEN_BYTES,
        &mut blocks,
    );
    blocks
}
