//! Sums up measurements of attempts per backend. Once a second, the sums of enough events, or of
//! the last five seconds, go to the log as samples.
//!
//! Only streams and prefill stages are timed: the first byte of any other response, which arrives
//! as a whole, does not indicate when its first token was generated. Each event is clamped when it
//! is added, so that neither a clock jump nor an invalid report from an engine produces a sample
//! that the log would reject.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, UserKey};
use state::service::{
    BeliefSample, FIRST_TOKEN_US_MAX, GAP_US_MAX, LearntPrices, RUNNING_MAX, ServiceSample,
};
use tokio::time::Instant;

use super::hidden_output::BackendPace;
use super::predictions::{Prediction, Predictions};
use super::prompt_size::PromptWork;
use crate::routing::Load;

/// Minimum number of ended requests or of first tokens for a sample to be due. [`GAPS_MIN`] gaps
/// between tokens suffice too.
const EVENTS_MIN: u32 = 8;
const GAPS_MIN: u64 = 256;
/// Time since its first event after which a sample is due regardless of the number of events.
const AGE_MAX: Duration = Duration::from_secs(5);
/// Maximum number of tokens counted for one event.
const TOKENS_MAX: u64 = 1 << 24;

/// Sums of all backends, by slot.
pub(in crate::routing) struct ServiceSamples(Box<[Mutex<BackendSamples>]>);

/// Sums of one backend since its last sample.
#[derive(Default)]
struct BackendSamples {
    /// The backend that the sums belong to; `None` before the first event.
    backend: Option<BackendRef>,
    sum: Option<PendingSample>,
    predictions: Predictions,
}

struct PendingSample {
    since: Instant,
    sample: ServiceSample,
}

impl Default for ServiceSamples {
    fn default() -> Self {
        Self((0..BACKENDS_MAX).map(|_| Mutex::default()).collect())
    }
}

impl ServiceSamples {
    /// Applies `event` to the sample of `backend`, unless a later incarnation of it has events.
    pub(in crate::routing) fn add(
        &self,
        backend: BackendRef,
        now: Instant,
        event: impl FnOnce(&mut ServiceSample),
    ) {
        self.with(backend, now, |sample, _| event(sample));
    }

    /// Records how much of a request's prompt was predicted to be cached and how much was cached.
    pub(super) fn predict(
        &self,
        backend: BackendRef,
        user: UserKey,
        prediction: Prediction,
        now: Instant,
    ) {
        self.with(backend, now, |_, predictions| {
            predictions.add(user, prediction, now);
        });
    }

    fn with(
        &self,
        backend: BackendRef,
        now: Instant,
        event: impl FnOnce(&mut ServiceSample, &mut Predictions),
    ) {
        let Some(place) = self.0.get(usize::from(backend.slot.0)) else {
            return;
        };
        let mut place = lock(place);
        let is_later = |known: BackendRef| known.incarnation > backend.incarnation;
        if place.backend.is_some_and(is_later) {
            return;
        }
        if place.backend.replace(backend) != Some(backend) {
            (place.sum, place.predictions) = Default::default();
        }
        let BackendSamples {
            sum, predictions, ..
        } = &mut *place;
        let sum = sum.get_or_insert_with(|| PendingSample {
            since: now,
            sample: ServiceSample::empty(backend),
        });
        event(&mut sum.sample, predictions);
    }

    /// Removes and returns the samples that are due at `now`, with evidence about capacities.
    pub(in crate::routing) fn take(
        &self,
        now: Instant,
    ) -> Vec<(ServiceSample, Option<BeliefSample>)> {
        let is_due = |sum: &mut PendingSample| {
            let sample = &sum.sample;
            sample.ended.max(sample.first_tokens) >= EVENTS_MIN
                || sample.gaps >= GAPS_MIN
                || now.saturating_duration_since(sum.since) >= AGE_MAX
        };
        let taken = self.0.iter().filter_map(|place| {
            let mut place = lock(place);
            let mut sample = place.sum.take_if(is_due)?.sample;
            let predictions = place.predictions.take(now);
            predictions.count(&mut sample);
            Some((sample, predictions.belief(sample.backend)))
        });
        taken.collect()
    }
}

fn lock(place: &Mutex<BackendSamples>) -> MutexGuard<'_, BackendSamples> {
    // Partly added sums are harmless.
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measures the time to first token and between tokens of one attempt.
pub(super) struct AttemptTimer {
    dispatched: Instant,
    /// Load of the backend from all replicas just before the dispatch.
    before: Load,
    /// Work on the prompt, by what was believed to be cached.
    work: PromptWork,
    /// Time and number of output tokens at the last count; `None` before the first token.
    counted: Option<(Instant, u64)>,
    /// Time of the last output; of the dispatch before any output.
    last_output: Instant,
    /// Number of output tokens that earlier attempts generated.
    generated: u64,
}

/// Requests that run at a backend while tokens arrive, and whether they reach its limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunningRequests {
    pub(in crate::routing) requests: u32,
    pub(super) is_at_limit: bool,
}

impl AttemptTimer {
    pub(in crate::routing) fn start(before: Load, work: PromptWork, now: Instant) -> Self {
        Self {
            dispatched: now,
            before,
            work,
            counted: None,
            last_output: now,
            generated: 0,
        }
    }

    /// Counts on from the `generated` output tokens of earlier attempts.
    pub(super) fn after(self, generated: u64) -> Self {
        Self { generated, ..self }
    }

    /// Returns the time from the dispatch to `now`.
    pub(super) fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.dispatched)
    }

    /// Returns the estimated pace of the attempt, given `running` requests at the backend.
    pub(super) fn pace(&self, learnt: Option<&LearntPrices>, running: u32) -> BackendPace {
        BackendPace::of(learnt, self.before, self.work.computed, running)
    }

    /// Adds the first token of a stream, at `now`, to `sample`. Later calls have no effect.
    pub(in crate::routing) fn first_token(&mut self, now: Instant, sample: &mut ServiceSample) {
        if self.counted.is_some() {
            return;
        }
        self.counted = Some((now, self.generated + 1));
        self.last_output = now;
        sample.first_tokens += 1;
        let took_us = micros(self.dispatched, now).min(FIRST_TOKEN_US_MAX);
        sample.first_token_us += took_us;
        sample.prefill_tokens += self
            .work
            .computed
            .saturating_add(self.before.pending_prefill_tokens)
            .min(TOKENS_MAX);
        for (sum, tokens) in sample.loaded_tokens.iter_mut().zip(self.work.loaded) {
            *sum += tokens.min(TOKENS_MAX);
        }
        let running = u64::from(self.before.running).min(RUNNING_MAX);
        sample.first_running += running;
        if self.work.loaded.iter().any(|tokens| *tokens > 0) && self.before.waiting == 0 {
            let loading = &mut sample.loading;
            loading.requests += 1;
            loading.first_token_us += took_us;
            loading.prefill_tokens += self.work.computed.min(TOKENS_MAX);
            loading.running += running;
            for (sum, tokens) in loading.loaded_tokens.iter_mut().zip(self.work.loaded) {
                *sum += tokens.min(TOKENS_MAX);
            }
        }
    }

    /// Records output at `now`.
    pub(in crate::routing) fn output(&mut self, now: Instant) {
        self.last_output = now;
    }

    /// Whether `tokens` exceed the last count by at least `step`.
    pub(super) fn is_due(&self, tokens: u64, step: u64) -> bool {
        self.counted
            .is_some_and(|(_, counted)| tokens.saturating_sub(counted) >= step)
    }

    /// Adds the gaps between tokens since the last count to `sample`. `tokens` is the number of
    /// output tokens so far.
    pub(in crate::routing) fn count(
        &mut self,
        tokens: u64,
        running: RunningRequests,
        sample: &mut ServiceSample,
    ) {
        let Some((at, counted)) = self.counted else {
            return;
        };
        let gaps = tokens.saturating_sub(counted).min(TOKENS_MAX);
        if gaps == 0 {
            return;
        }
        self.counted = Some((self.last_output, tokens));
        let requests = u64::from(running.requests).min(RUNNING_MAX);
        sample.gaps += gaps;
        sample.gap_us += micros(at, self.last_output).min(gaps * GAP_US_MAX);
        sample.gap_running += gaps * requests;
        sample.gaps_at_limit += if running.is_at_limit { gaps } else { 0 };
    }
}

fn micros(from: Instant, to: Instant) -> u64 {
    let span = to.saturating_duration_since(from).as_micros();
    u64::try_from(span).unwrap_or(u64::MAX)
}

/// Token counts of a request that ended.
pub(super) struct EndedRequest {
    pub(in crate::routing) prompt_tokens: u64,
    /// Number of cached prompt tokens as the engine reported, or else as predicted.
    pub(in crate::routing) cached_tokens: u64,
    pub(super) output_tokens: u64,
    /// Number of tokens per block.
    pub(super) block_tokens: u32,
}

impl EndedRequest {
    pub(in crate::routing) fn count(&self, sample: &mut ServiceSample) {
        let (prompt, output) = (
            self.prompt_tokens.min(TOKENS_MAX),
            self.output_tokens.min(TOKENS_MAX),
        );
        let added = prompt - self.cached_tokens.min(prompt) + output;
        sample.ended += 1;
        sample.prompt_tokens += prompt;
        sample.output_tokens += output;
        sample.added_tokens += added;
        sample.added_squared = sample.added_squared.saturating_add(added * added);
        sample.block_tokens = self.block_tokens;
    }
}
