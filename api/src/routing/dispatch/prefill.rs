//! The prefill stage of a request on two backends: the resources held at the prefill backend.
//!
//! The stage counts as running at that backend and holds a lease, like any attempt. The charge and
//! the response belong to the [`Attempt`](crate::routing::Attempt) at the other backend. The lease lasts
//! until the response begins: until then the other backend may still fetch the blocks. Cache
//! statistics of the engine are learnt here, because the prompt is computed here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use state::Registry;
use state::command::LeaseOutcome;
use state::ids::{AttemptId, BackendRef, UserKey};
use tokio::time::Instant;

use super::Dispatcher;
use super::predictions::Prediction;
use super::prompt_size::PromptSize;
use super::samples::{AttemptTimer, EndedRequest};
use crate::engines::backends::HalfOpenProbe;
use crate::routing::learnt::LearntBlocks;
use crate::routing::load::LoadGuard;
use crate::routing::metrics::BackendMeter;
use crate::routing::{AttemptEnd, PrefillDecision, ReservedPlace, RoutingRequest, Usage};

/// A prompt in flight at its prefill backend. Dropping it ends the attempt: as finished if the
/// engine answered, as abandoned by the client if the prompt was sent, else as not run.
pub struct PrefillAttempt {
    dispatcher: Arc<Dispatcher>,
    id: AttemptId,
    user: UserKey,
    backend: BackendRef,
    is_sent: AtomicBool,
    /// `None` once the attempt has ended.
    open: Option<OpenPrefill>,
}

struct OpenPrefill {
    stopwatch: AttemptTimer,
    /// Keeps other requests away from a half-open backend until the engine answers or the attempt
    /// ends.
    trial: Option<Arc<HalfOpenProbe>>,
    underway: LoadGuard,
    meter: Arc<BackendMeter>,
    prompt: PromptSize,
    /// Whence the blocks that the backend is believed to hold are known.
    learnt: LearntBlocks,
    is_touching: bool,
    is_answered: bool,
}

impl Dispatcher {
    /// Records the dispatch of the prompt to `chosen`: counts it as running and queues its lease.
    pub(super) fn begin_prefill(
        self: &Arc<Self>,
        (chosen, place): (&PrefillDecision, ReservedPlace),
        touch: state::policy::Touch,
        ask: &RoutingRequest<'_>,
        (registry, now): (&Registry, Instant),
    ) -> PrefillAttempt {
        let id = self.next_attempt();
        let (backend, chain) = (chosen.backend, &ask.identity.chain);
        let prompt = PromptSize::of(ask.identity, chosen.matched, chosen.loaded);
        let work = prompt.work();
        let mut before = self.load.cluster(backend, now);
        before.running = before.running.saturating_sub(1);
        let open = OpenPrefill {
            stopwatch: AttemptTimer::start(before, work, now),
            trial: chosen.trial.clone(),
            underway: place.into_guard(work.computed),
            meter: self.fleet.meter(backend, &chosen.name),
            prompt,
            learnt: self.known.sent(backend, chain, chosen.matched),
            is_touching: touch.is_due(self.session, id),
            is_answered: false,
        };
        self.backends.sent(backend.slot, ask.model);
        let held = self.held(backend, chain, chosen.on_gpu());
        self.outbox
            .with(|outbox| outbox.acquire(id, backend, chain, held));
        PrefillAttempt {
            dispatcher: Arc::clone(self),
            id,
            user: ask.user.key(registry.hash_seed),
            backend,
            is_sent: AtomicBool::new(false),
            open: Some(open),
        }
    }
}

impl PrefillAttempt {
    /// Returns the prefill backend.
    #[must_use]
    pub fn backend(&self) -> BackendRef {
        self.backend
    }

    /// Returns the user of the request.
    #[must_use]
    pub fn user(&self) -> UserKey {
        self.user
    }

    /// Records that the prompt is being sent over a connection.
    pub fn sent(&self) {
        self.is_sent.store(true, Relaxed);
    }

    /// Whether the engine may have received the prompt.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        self.is_sent.load(Relaxed)
    }

    /// Records that the engine computed the prompt and reported `usage`, if any.
    pub fn answered(&mut self, usage: Option<Usage>, now: Instant) {
        let Some(open) = &mut self.open else { return };
        let dispatcher = &self.dispatcher;
        open.is_answered = true;
        open.underway.first_token();
        open.trial = None;
        dispatcher
            .backends
            .report_answer(self.backend, self.user, now);
        let (samples, stopwatch) = (&dispatcher.samples, &mut open.stopwatch);
        samples.add(self.backend, now, |sample| {
            stopwatch.first_token(now, sample);
        });
        if let Some(usage) = usage {
            open.learn(dispatcher, (self.backend, self.user), usage, now);
        }
    }

    /// Ends the attempt and releases its lease and its place. `end` determines whether the leased
    /// blocks are kept.
    pub fn end(mut self, end: AttemptEnd) {
        self.close(end);
    }

    fn close(&mut self, end: AttemptEnd) {
        let Some(open) = self.open.take() else { return };
        open.meter.count_end(end);
        let outcome = match (end, open.is_touching) {
            (AttemptEnd::NotRun | AttemptEnd::Failed, _) => LeaseOutcome::Discarded,
            (
                AttemptEnd::Finished
                | AttemptEnd::Broken
                | AttemptEnd::ClientLeft
                | AttemptEnd::Moved,
                is_touching,
            ) => match is_touching {
                true => LeaseOutcome::Kept,
                false => LeaseOutcome::KeptUntouched,
            },
        };
        self.dispatcher
            .outbox
            .with(|outbox| outbox.release(self.id, outcome));
    }
}

impl Drop for PrefillAttempt {
    fn drop(&mut self) {
        let is_answered = self.open.as_ref().is_some_and(|open| open.is_answered);
        let end = match (is_answered, self.is_sent()) {
            (true, _) => AttemptEnd::Finished,
            (false, true) => AttemptEnd::ClientLeft,
            (false, false) => AttemptEnd::NotRun,
        };
        self.close(end);
    }
}

impl OpenPrefill {
    /// Adds the engine's `usage` to the samples, the metrics and the predictions.
    fn learn(
        &self,
        dispatcher: &Dispatcher,
        (backend, user): (BackendRef, UserKey),
        usage: Usage,
        now: Instant,
    ) {
        let (prompt, tokens) = (&self.prompt, usage.prompt_tokens);
        let ended = EndedRequest {
            prompt_tokens: tokens,
            cached_tokens: usage.cached_tokens.unwrap_or(prompt.predicted),
            output_tokens: usage.completion_tokens,
            block_tokens: prompt.block_tokens,
        };
        dispatcher
            .samples
            .add(backend, now, |sample| ended.count(sample));
        let Some(cached) = usage.cached_tokens.filter(|_| prompt.uses_cache) else {
            return;
        };
        let predicted = prompt.predicted_of(tokens);
        let learnt = self.learnt.tokens(predicted);
        self.meter.count_prefix(tokens, learnt, cached);
        dispatcher.found_cached(backend, user, prompt, (predicted, cached));
        let prediction = Prediction::of(tokens, predicted, cached, prompt.block_tokens);
        dispatcher.samples.predict(backend, user, prediction, now);
    }
}
