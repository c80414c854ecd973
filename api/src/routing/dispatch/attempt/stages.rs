//! Tracks the prefill stage of attempts on two backends.
//!
//! Usage is charged as for a single request. The prefill backend's report of cached tokens counts,
//! because to the decode backend the whole fetched prompt looks cached.

use std::sync::Arc;
use std::time::Duration;

use state::Registry;
use tokio::time::Instant;

use super::{Attempt, OpenAttempt};
use crate::routing::dispatch::Dispatcher;
use crate::routing::dispatch::prefill::PrefillAttempt;
use crate::routing::dispatch::prompt_size::{PromptSize, PromptWork};
use crate::routing::{AttemptEnd, Decision, ReservedPlace, RoutingRequest, Usage};

/// The prefill stage of an attempt.
pub(super) struct PrefillStage {
    /// The attempt at the prefill backend; `None` while another task drives it, and after its end.
    pub(super) attempt: Option<PrefillAttempt>,
    /// Size of the prompt, with the cached part predicted at the backend that answers.
    pub(super) fetched: PromptSize,
    /// Number of cached tokens that the prefill backend reported; `None` before, or if it reports
    /// none.
    pub(super) cached_tokens: Option<u64>,
    /// Time at which the prompt was computed; `None` before.
    pub(super) ended: Option<Instant>,
}

/// Stages of an attempt at its start.
pub(super) struct Stages {
    /// Size of the prompt, with the cached part predicted at the backend that computes it.
    pub(super) prompt: PromptSize,
    /// The prefill stage at another backend; `None` with a single backend.
    pub(super) prefill: Option<PrefillStage>,
    /// Work on the prompt at the backend that answers.
    pub(super) work_here: PromptWork,
}

impl Dispatcher {
    /// Returns the stages of an attempt. Starts the prefill stage if the decision has one.
    pub(super) fn begin_stages(
        self: &Arc<Self>,
        (decision, place): (&Decision, Option<ReservedPlace>),
        ask: &RoutingRequest<'_>,
        (registry, now): (&Registry, Instant),
    ) -> Stages {
        let size = |matched, loaded| PromptSize {
            // Each answer but the first finds the prompt in the cache, even if it was computed. SGLang
            // reports that, and vLLM reports the answer that ends last.
            is_miscounted: ask.identity.tail.has_samples,
            ..PromptSize::of(ask.identity, matched, loaded)
        };
        let here = size(decision.matched, decision.loaded);
        let Some((chosen, place)) = decision.prefill.as_ref().zip(place) else {
            return Stages {
                work_here: here.work(),
                prompt: here,
                prefill: None,
            };
        };
        let attempt = self.begin_prefill((chosen, place), decision.touch, ask, (registry, now));
        Stages {
            prompt: size(chosen.matched, chosen.loaded),
            prefill: Some(PrefillStage {
                attempt: Some(attempt),
                fetched: here,
                cached_tokens: None,
                ended: None,
            }),
            work_here: PromptWork::default(),
        }
    }
}

impl Attempt {
    /// Takes the attempt at the prefill backend, to drive it; `None` if there is none.
    pub fn take_prefill(&mut self) -> Option<PrefillAttempt> {
        self.open.as_mut()?.prefill.as_mut()?.attempt.take()
    }

    /// Records that the prompt was computed, and takes its attempt back. Its blocks stay leased
    /// until the response begins.
    pub fn prefilled(&mut self, attempt: PrefillAttempt, usage: Option<Usage>, now: Instant) {
        self.prompt_computed(usage, now);
        let stage = self.open.as_mut().and_then(|open| open.prefill.as_mut());
        if let Some(stage) = stage {
            stage.attempt = Some(attempt);
        }
    }

    /// Records that the prompt was computed at `at`, while the caller still drives the stage.
    pub fn prompt_computed(&mut self, usage: Option<Usage>, at: Instant) {
        let stage = self.open.as_mut().and_then(|open| open.prefill.as_mut());
        if let Some(stage) = stage {
            stage.ended = Some(at);
            stage.cached_tokens = usage.and_then(|usage| usage.cached_tokens);
        }
    }

    /// Records that the prefill backend computed the prompt, reported `usage`, and did not hand the
    /// prompt over. This attempt's backend computes it too, or finds it in a shared cache. The
    /// prompt is charged once, with the lower count of cached tokens. If the prefill backend
    /// reports no count, the prediction applies, if trusted: vLLM omits a count of 0.
    pub fn kept(&mut self, usage: Option<Usage>) {
        let Some(open) = &mut self.open else { return };
        let reported = usage.and_then(|usage| usage.cached_tokens);
        open.cached_max = Some(reported.unwrap_or(open.prompt.predicted));
        self.fall_back_to_single_backend();
    }

    /// Makes this attempt's backend compute the prompt, because no other backend handed it over.
    pub fn fall_back_to_single_backend(&mut self) {
        let Some(open) = &mut self.open else { return };
        if let Some(stage) = open.prefill.take() {
            open.prompt = stage.fetched;
            let uncached = open.prompt.tokens - open.prompt.predicted;
            open.underway.computes(uncached);
        }
    }
}

impl OpenAttempt {
    /// Ends the prefill stage, because no blocks are fetched after the response begins.
    pub(super) fn end_prefill(&mut self) {
        let stage = self.prefill.as_mut();
        if let Some(attempt) = stage.and_then(|stage| stage.attempt.take()) {
            attempt.end(AttemptEnd::Finished);
        }
    }

    /// Whether another backend still computes the prompt, so that no output exists yet.
    pub(super) fn waits_for_prompt(&self) -> bool {
        let stage = self.prefill.as_ref();
        stage.is_some_and(|stage| stage.ended.is_none())
    }

    /// Returns the time for which the attempt's backend has worked on the request at `now`.
    pub(super) fn at_work(&self, now: Instant) -> Duration {
        let stage = self.prefill.as_ref();
        match stage.and_then(|stage| stage.ended) {
            Some(ended) => now.saturating_duration_since(ended),
            None => self.stopwatch.elapsed(now),
        }
    }

    /// Returns `usage` with the cached tokens of the backend that computed the prompt, if it counts
    /// them correctly.
    pub(super) fn believed(&self, usage: Usage) -> Usage {
        let stage = self.prefill.as_ref();
        let cached = stage.map_or(usage.cached_tokens, |stage| stage.cached_tokens);
        Usage {
            cached_tokens: cached.filter(|_| !self.prompt.is_miscounted),
            ..usage
        }
    }
}
