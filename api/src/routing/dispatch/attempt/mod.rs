//! Tracks one dispatch: the resources it holds from its start, and its charge.
//!
//! Charging: a dispatch charges its estimated prompt in advance, and under `vtc-pred` its predicted
//! output too, so that it counts at once in the order of waiting users. Prompt tokens are settled
//! when the engine reports how many were cached, at the latest at the end. Output tokens are
//! settled as they are reported, in steps of [`OUTPUT_STEP_TOKENS`], so that a client that
//! disconnects has paid for its output. Counters never fall: an unused advance becomes the user's
//! credit ([`state::admission::CreditLedger`]). Output without a report is estimated at the end:
//! from its bytes, or from the elapsed time if the response is visible only at its end
//! ([`HiddenOutput`]). Without a report, the believed prefix counts as cached. An attempt that
//! never ran costs nothing. A failed one may have run, so it costs its prompt and that estimate.

mod carried;
mod charges;
mod handover;
mod progress;
mod release;
mod report;
mod stages;

use std::sync::Arc;

use state::Registry;
use state::admission::{Advance, Order, Pricing, TokenDelta};
use state::command::{Charge, LeaseOutcome};
use state::ids::{ApiKeyId, AttemptId, BackendRef, LogIndex, ModelKey, SourceKey, UserKey};
use state::prefix::model_key;
use state::streams::CarriedStream;
use state::usage::{UsageSource, source_key};
use tokio::time::Instant;

pub(crate) use self::carried::ResumedStream;
pub(in crate::routing) use self::carried::TAKE_OVERS_PENDING_MAX;
pub(crate) use self::handover::EarlierAttempt;
pub use self::handover::{EarlierAttempts, EarlierCharge};
use self::progress::ResponseProgress;
use self::stages::{PrefillStage, Stages};
use super::Dispatcher;
use super::hidden_output::HiddenOutput;
use super::output_lengths::ExpectedOutput;
use super::prompt_size::PromptSize;
use super::reply::ReplyChain;
use super::samples::AttemptTimer;
use crate::engines::backends::{AnswerForm, HalfOpenProbe};
use crate::model_names::OTHER_MODEL;
use crate::routing::decide::decision_record::DecisionRecord;
use crate::routing::learnt::LearntBlocks;
use crate::routing::load::{Load, LoadGuard};
use crate::routing::metrics::BackendMeter;
use crate::routing::outbox::{ChargeCommit, Outbox};
use crate::routing::{AttemptEnd, Decision, PlacedRequest, RoutingRequest, Usage, UserPermit};
use crate::sessions::NamedSession;
use crate::traces::AttemptTrace;

/// Maximum number of reported output tokens left uncharged while the response streams.
const OUTPUT_STEP_TOKENS: u64 = 32;

/// A dispatch in flight. It counts as running, holds a lease and owes a charge. Dropping it without
/// [`Attempt::end`] counts as [`AttemptEnd::ClientLeft`]. Only the drop reads the clock; all other
/// methods receive the time.
pub struct Attempt {
    dispatcher: Arc<Dispatcher>,
    id: AttemptId,
    user: UserKey,
    /// Resources of the attempt; `None` after its end. Boxed because attempts are moved often.
    pub(in crate::routing) open: Option<Box<OpenAttempt>>,
}

/// Resources that an attempt holds until its end.
pub(in crate::routing) struct OpenAttempt {
    backend: BackendRef,
    stopwatch: AttemptTimer,
    /// Keeps other requests away from a half-open backend until the engine answers or the attempt
    /// ends.
    trial: Option<Arc<HalfOpenProbe>>,
    /// Record of the decision, which receives the outcome; `None` if decisions are not recorded.
    record: Option<Arc<DecisionRecord>>,
    /// Span of the attempt; `None` if it is not traced.
    trace: Option<AttemptTrace>,
    /// Permit of the request; `None` if its user has no limit on concurrent requests.
    permit: Option<UserPermit>,
    progress: ResponseProgress,
    /// Properties of output that is not visible while it is generated; `None` if all is visible.
    hidden: Option<HiddenOutput>,
    /// Whether the lease renews the age of all its blocks, not only of those it added.
    pub(in crate::routing) is_touching: bool,
    underway: LoadGuard,
    meter: Arc<BackendMeter>,
    /// Chain of blocks that the response continues; `None` if output cannot continue the prompt.
    reply: Option<ReplyChain>,
    prompt: PromptSize,
    /// Whence the blocks that the backend is believed to hold are known.
    learnt: LearntBlocks,
    /// The stage at the prefill backend; `None` if this backend computes the prompt.
    prefill: Option<PrefillStage>,
    /// Session of which the request is a turn, if any.
    session: Option<NamedSession>,
    /// Maximum number of prompt tokens charged as cached: those that a prefill backend found cached
    /// when it computed the prompt without handing it over. `None` if no backend did.
    cached_max: Option<u64>,
    usage: Option<Usage>,
    /// Form of the response; `None` before it begins.
    form: Option<AnswerForm>,
    /// Number of output bytes that no usage report covers.
    unreported_bytes: usize,
    /// Tokens charged so far for the answer, without counts of requests.
    charged: Charge,
    /// What earlier attempts charged for the answer that this one continues; `None` if it begins
    /// one.
    earlier: Option<EarlierCharge>,
    /// The resumable stream that the attempt carries, if it does.
    carried: Option<CarriedStream>,
    /// Whether the attempt charges nothing: the one that goes on does, or whoever keeps the earlier
    /// ones.
    owes: bool,
    model: ModelKey,
    pricing: Pricing,
    /// Charge made in advance.
    advance: Advance,
    /// Expected output; `None` if none is charged in advance.
    expected: Option<ExpectedOutput>,
}

/// Terms of a dispatch that its charge depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DispatchTerms {
    /// Maximum number of output tokens, from the request; `None` if it sets none.
    pub tokens_max: Option<u32>,
    /// What earlier attempts charged for the answer that this one continues; `None` if it begins
    /// one. Nothing is charged in advance then.
    pub earlier: Option<EarlierCharge>,
    /// The resumable stream that the request carries; `None` if its client cannot go on elsewhere.
    pub carried: Option<CarriedStream>,
}

/// Returns the token prices in `registry`, and which tokens are charged.
pub(crate) fn pricing_of(registry: &Registry) -> Pricing {
    Pricing {
        prices: registry.fairness,
        charge: registry.admission.charge,
    }
}

impl Dispatcher {
    /// Dispatches a request as decided, even beyond the limits of its backends. See
    /// [`Dispatcher::dispatch_to`].
    pub fn dispatch(
        self: &Arc<Self>,
        decision: &Decision,
        ask: &RoutingRequest<'_>,
        terms: DispatchTerms,
        now: Instant,
    ) -> Attempt {
        let prefill = decision.prefill.as_ref();
        let placed = PlacedRequest {
            decision: decision.clone(),
            place: self.load.take(decision.backend),
            prefill: prefill.map(|prefill| self.load.take(prefill.backend)),
        };
        self.dispatch_to(placed, ask, terms, now)
    }

    /// Dispatches a request to the backends where it has places. Load, overlay and outbox are up to
    /// date when this returns.
    pub fn dispatch_to(
        self: &Arc<Self>,
        PlacedRequest {
            decision,
            place,
            prefill,
        }: PlacedRequest,
        ask: &RoutingRequest<'_>,
        terms: DispatchTerms,
        now: Instant,
    ) -> Attempt {
        let (id, registry) = (self.next_attempt(), self.view.registry());
        let (backend, identity) = (decision.backend, ask.identity);
        let (hash_seed, pricing) = (registry.hash_seed, pricing_of(&registry));
        let model = model_key(hash_seed, ask.model);
        let Stages {
            prompt,
            prefill,
            work_here,
        } = self.begin_stages((&decision, prefill), ask, (&registry, now));
        let begins = terms.earlier.is_none();
        let expected = (begins && registry.admission.order == Order::VtcPred).then(|| {
            let user = ask.user.key(hash_seed);
            ExpectedOutput::of(&self.view, user, model, terms.tokens_max)
        });
        let estimate = estimate(begins, &prompt, expected);
        let generated = terms.earlier.map_or(0, |earlier| earlier.output());
        let stopwatch =
            AttemptTimer::start(self.load_before(backend, now), work_here, now).after(generated);
        let underway = place.into_guard(work_here.computed);
        self.backends.sent(backend.slot, ask.model);
        let held = self.held(backend, &identity.chain, decision.on_gpu());
        let source = self.source_of(hash_seed, ask.user.api_key(), ask.model);
        let (user, advance, carried) = self.outbox.with(|outbox| {
            outbox.follow_names(registry.names_since);
            let user = outbox.payer(hash_seed, ask.user.as_str());
            let (advance, charge) = started(outbox, (user, source), &estimate, &pricing);
            self.priced.add(pricing.due(&charge));
            let carried = terms.carried.and_then(|it| outbox.admits(user, it));
            outbox.charge_for(carried, charge);
            outbox.acquire(id, backend, &identity.chain, held);
            self.begin_turn(outbox, ask.session, (user, model), backend);
            (user, advance, carried)
        });
        self.flush_soon_for(backend);
        let open = OpenAttempt {
            backend,
            stopwatch,
            trial: decision.trial,
            record: decision.record,
            trace: None,
            permit: None,
            progress: ResponseProgress::default(),
            hidden: None,
            is_touching: decision.touch.is_due(self.session, id),
            underway,
            meter: self.fleet.meter(backend, &decision.name),
            reply: ReplyChain::of(identity),
            prompt,
            learnt: self.known.sent(backend, &identity.chain, decision.matched),
            prefill,
            session: ask.session.filter(|_| begins),
            cached_max: None,
            usage: terms.earlier.and_then(|earlier| earlier.usage),
            form: None,
            unreported_bytes: 0,
            charged: charged_before(terms.earlier, (user, source)),
            earlier: terms.earlier,
            carried,
            owes: !begins,
            model,
            pricing,
            advance,
            expected,
        };
        Attempt {
            dispatcher: Arc::clone(self),
            id,
            user,
            open: Some(Box::new(open)),
        }
    }

    /// Returns the source of a request in the usage, and queues its name if the state lacks it. All
    /// models that no backend names are one, because clients can send any name.
    fn source_of(&self, hash_seed: u64, key: Option<ApiKeyId>, model: &str) -> SourceKey {
        let usage = self.view.usage();
        let mut source = source_key(hash_seed, key, model);
        if usage.knows(source) {
            return source;
        }
        let is_named = self.view.registry().names_model(model);
        let model = if is_named { model } else { OTHER_MODEL };
        source = source_key(hash_seed, key, model);
        if !usage.knows(source) {
            let model = model.to_owned();
            (self.outbox).with(|outbox| outbox.name_source(source, UsageSource { key, model }));
        }
        source
    }

    /// Returns the load of `backend` without the request that has just taken a place there.
    fn load_before(&self, backend: BackendRef, now: Instant) -> Load {
        let mut load = self.load.cluster(backend, now);
        load.running = load.running.saturating_sub(1);
        load
    }

    /// Returns how many leading blocks of `chain` the `backend` holds or will hold: at least
    /// `matched`. Unlike a match, it counts blocks beyond the matchable ones, to find a lease's
    /// tip.
    pub(in crate::routing) fn held(
        &self,
        backend: BackendRef,
        chain: &[state::ids::BlockHash],
        matched: u32,
    ) -> usize {
        let blocks = &self.view.blocks;
        let applied = blocks.match_from(chain, backend.slot, matched);
        let mut held = matched.max(applied);
        self.overlay
            .extend(chain, std::iter::once((backend, &mut held)));
        chain.len().min(held as usize)
    }
}

impl Attempt {
    /// Returns the user charged for the attempt.
    #[must_use]
    pub fn user(&self) -> UserKey {
        self.user
    }

    /// Sets the span that records the attempt's outcome; `None` if it is not traced.
    pub(crate) fn traces(&mut self, trace: Option<AttemptTrace>) {
        if let Some(open) = &mut self.open {
            open.trace = trace;
        }
    }

    /// Returns the attempt's span; `None` if it is not traced or has ended.
    pub(crate) fn trace(&mut self) -> Option<&mut AttemptTrace> {
        self.open.as_mut()?.trace.as_mut()
    }

    /// Sets the properties of output that is not visible while it is generated; `None` if all is
    /// visible.
    pub fn set_hidden_output(&mut self, hidden: Option<HiddenOutput>) {
        if let Some(open) = &mut self.open {
            open.hidden = hidden;
        }
    }

    /// Sets the form of the response. Engines may report cached tokens in some forms only.
    pub fn set_response_form(&mut self, form: AnswerForm) {
        if let Some(open) = &mut self.open {
            open.form = Some(form);
        }
    }

    /// Records the engine's latest usage report and charges what is due. The highest counts apply.
    pub fn usage(&mut self, usage: Usage, now: Instant) {
        let Some(open) = &mut self.open else { return };
        let usage = open.believed(usage);
        let mut known = open.usage.unwrap_or_default();
        known.prompt_tokens = known.prompt_tokens.max(usage.prompt_tokens);
        known.cached_tokens = known.cached_tokens.max(usage.cached_tokens);
        known.completion_tokens = known.completion_tokens.max(usage.completion_tokens);
        open.usage = Some(known);
        if usage.completion_tokens > 0 {
            open.unreported_bytes = 0;
            open.stopwatch.output(now);
            self.dispatcher.backends.note_output(open.backend.slot, now);
        }
        if open
            .stopwatch
            .is_due(known.completion_tokens, OUTPUT_STEP_TOKENS)
        {
            open.count_gaps(&self.dispatcher, known.completion_tokens, now);
        }
        let due = open.due(known);
        let is_input_due =
            known.cached_tokens.is_some() && due.input_uncached + due.input_cached > 0;
        if !is_input_due && due.output < OUTPUT_STEP_TOKENS {
            return;
        }
        let charge = if known.cached_tokens.is_some() {
            due
        } else {
            Charge {
                input_uncached: 0,
                input_cached: 0,
                ..due
            }
        };
        open.note_charged(charge);
        let dispatcher = &self.dispatcher;
        dispatcher.outbox.with(|outbox| {
            open.charge(dispatcher, outbox, charge);
            open.expect_more(dispatcher, outbox);
        });
    }

    /// Records output that does not continue the prompt, such as further choices, reasoning or tool
    /// calls. Has no effect if `bytes` is 0.
    pub fn other_output(&mut self, bytes: usize, now: Instant) {
        if let Some(open) = self.open.as_mut().filter(|_| bytes > 0) {
            self.dispatcher.backends.note_output(open.backend.slot, now);
            open.unreported_bytes = open.unreported_bytes.saturating_add(bytes);
            if let Some(reply) = &mut open.reply {
                reply.interrupt();
            }
        }
    }

    /// Records streamed output text, whose complete blocks extend the lease at the end. Call this
    /// before [`Attempt::usage`] with the report that covers the text.
    pub fn output(&mut self, text: &str, now: Instant) {
        let Some(open) = &mut self.open else { return };
        open.unreported_bytes = open.unreported_bytes.saturating_add(text.len());
        open.stopwatch.output(now);
        self.dispatcher.backends.note_output(open.backend.slot, now);
        if let Some(reply) = &mut open.reply {
            reply.push(text);
        }
    }

    /// Returns the log index at which the attempt's prompt is known to every replica that has
    /// applied it.
    ///
    /// # Errors
    /// Returns a receiver for the index if the log does not have the prompt yet.
    pub fn known_at(&self) -> Result<LogIndex, ChargeCommit> {
        let carried = self.open.as_ref().and_then(|open| open.carried);
        // The prompt is queued together with the first charge.
        (self.dispatcher.outbox).with(|outbox| match outbox.commit_of(self.user, carried) {
            Some(commit) => Err(commit),
            None => Ok(outbox.committed_to()),
        })
    }

    /// Ends the attempt: releases the lease and settles the charge.
    pub fn end(mut self, end: AttemptEnd, now: Instant) {
        let _ = self.close(end, now);
    }

    /// Ends the attempt like [`Attempt::end`]. Returns a receiver for the commit of its charge;
    /// `None` if it is already committed.
    pub fn end_durably(mut self, end: AttemptEnd, now: Instant) -> Option<ChargeCommit> {
        let carried = self.open.as_ref().and_then(|open| open.carried);
        self.close(end, now);
        let outbox = &self.dispatcher.outbox;
        outbox.with(|outbox| outbox.commit_of(self.user, carried))
    }

    /// Ends the attempt, and returns what was charged for the answer; `None` if it had ended.
    fn close(&mut self, end: AttemptEnd, now: Instant) -> Option<EarlierCharge> {
        match end {
            AttemptEnd::Finished => self.answered(now),
            AttemptEnd::Broken | AttemptEnd::ClientLeft | AttemptEnd::Moved => {
                self.is_left_unanswered(end, now);
            }
            AttemptEnd::NotRun | AttemptEnd::Failed => {}
        }
        let is_lost = self.is_taken_over();
        let mut open = self.open.take()?;
        if is_lost {
            open.is_lost();
        }
        open.settle_cached(&self.dispatcher, end);
        let has_run =
            end != AttemptEnd::NotRun || open.earlier.is_some_and(|earlier| earlier.has_run);
        let mut charge = match has_run && !open.owes {
            true => open.due(open.usage_or_estimate(&self.dispatcher, end, now)),
            false => nothing(self.user),
        };
        charge.ended = 1;
        let outcome = match end {
            AttemptEnd::NotRun | AttemptEnd::Failed => LeaseOutcome::Discarded,
            AttemptEnd::Finished
            | AttemptEnd::Broken
            | AttemptEnd::ClientLeft
            | AttemptEnd::Moved
                if open.is_touching =>
            {
                LeaseOutcome::Kept
            }
            AttemptEnd::Finished
            | AttemptEnd::Broken
            | AttemptEnd::ClientLeft
            | AttemptEnd::Moved => LeaseOutcome::KeptUntouched,
        };
        let reply = open
            .reply
            .take()
            .filter(|_| outcome != LeaseOutcome::Discarded);
        self.release(&open, reply, (open.reply_end(end), outcome));
        self.dispatcher.outbox.with(|outbox| {
            open.charge(&self.dispatcher, outbox, charge);
            open.close_advance(outbox);
        });
        if has_run {
            open.note_charged(charge);
            open.end_turn(&self.dispatcher);
            self.dispatcher.priced.request(open.price());
        }
        if end == AttemptEnd::Finished {
            let tokens = open.charged.output;
            self.dispatcher.ended_with(self.user, open.model, tokens);
        }
        open.report(&self.dispatcher, end, now);
        open.note_end(end, now);
        open.end_trace(end, now);
        Some(EarlierCharge {
            charged: open.charged,
            usage: open.usage,
            has_run,
        })
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.close(AttemptEnd::ClientLeft, Instant::now());
    }
}

/// Returns the advance and the initial charge of a dispatch.
fn started(
    outbox: &mut Outbox,
    (user, source): (UserKey, SourceKey),
    estimate: &TokenDelta,
    pricing: &Pricing,
) -> (Advance, Charge) {
    let (advance, ahead) = outbox.ledger.open(user, estimate, pricing);
    let charge = Charge {
        source,
        started: 1,
        ..ahead
    };
    (advance, charge)
}

/// Returns what an attempt that begins an answer is expected to use; nothing for one that goes on.
fn estimate(begins: bool, prompt: &PromptSize, expected: Option<ExpectedOutput>) -> TokenDelta {
    if !begins {
        return TokenDelta::default();
    }
    TokenDelta {
        input_uncached: prompt.tokens - prompt.predicted,
        input_cached: prompt.predicted,
        output: expected.map_or(0, |expected| expected.tokens()),
    }
}

/// Returns what earlier attempts have charged, from now on for this source.
fn charged_before(earlier: Option<EarlierCharge>, (user, source): (UserKey, SourceKey)) -> Charge {
    Charge {
        source,
        ..earlier.map_or(nothing(user), |it| it.charged)
    }
}

/// Returns a charge of `user` without tokens.
fn nothing(user: UserKey) -> Charge {
    Charge {
        user,
        ..Charge::default()
    }
}
