//! An attempt on two backends: what it keeps of the prefill stage.
//!
//! The usage is that of one request. The prefill backend reports how much of the prompt was cached:
//! to the decode backend the whole prompt looks cached, because it fetched it.

use std::sync::Arc;
use std::time::Duration;

use state::Registry;
use tokio::time::Instant;

use super::{Attempt, OpenAttempt};
use crate::routing::dispatch::Dispatcher;
use crate::routing::prefill::PrefillAttempt;
use crate::routing::prompt_size::PromptSize;
use crate::routing::{AttemptEnd, Decision, ReservedPlace, RoutingRequest, Usage};

/// The prefill stage of an attempt.
pub(super) struct PrefillStage {
    /// `None`: somebody drives it, or it is over.
    pub(super) attempt: Option<PrefillAttempt>,
    /// The prompt as the backend that answers has it.
    pub(super) fetched: PromptSize,
    /// What the prefill backend said it had cached.
    pub(super) cached_tokens: Option<u64>,
    /// When the prompt was computed; `None`: it is not.
    pub(super) ended: Option<Instant>,
}

/// What an attempt begins with.
pub(super) struct Stages {
    /// The prompt where it is computed.
    pub(super) prompt: PromptSize,
    /// The stage at another backend; `None`: it is one backend.
    pub(super) prefill: Option<PrefillStage>,
    /// Prompt tokens to be computed at the backend that answers.
    pub(super) computed_here: u64,
}

impl Dispatcher {
    /// Begins the prefill stage, if there is one.
    pub(super) fn begin_stages(
        self: &Arc<Self>,
        (decision, place): (&Decision, Option<ReservedPlace>),
        ask: &RoutingRequest<'_>,
        (registry, now): (&Registry, Instant),
    ) -> Stages {
        let here = PromptSize::of(ask.identity, decision.matched, registry);
        let Some((chosen, place)) = decision.prefill.as_ref().zip(place) else {
            return Stages {
                computed_here: here.tokens - here.predicted,
                prompt: here,
                prefill: None,
            };
        };
        let attempt = self.begin_prefill((chosen, place), decision.touch, ask, (registry, now));
        Stages {
            prompt: PromptSize::of(ask.identity, chosen.matched, registry),
            prefill: Some(PrefillStage {
                attempt: Some(attempt),
                fetched: here,
                cached_tokens: None,
                ended: None,
            }),
            computed_here: 0,
        }
    }
}

impl Attempt {
    /// The prefill stage, for whoever drives it; `None`: there is none.
    pub fn take_prefill(&mut self) -> Option<PrefillAttempt> {
        self.open.as_mut()?.prefill.as_mut()?.attempt.take()
    }

    /// The prompt was computed, with this report. Its blocks stay held until the answer begins.
    pub fn prefilled(&mut self, attempt: PrefillAttempt, usage: Option<Usage>, now: Instant) {
        self.prompt_computed(usage, now);
        let stage = self.open.as_mut().and_then(|open| open.prefill.as_mut());
        if let Some(stage) = stage {
            stage.attempt = Some(attempt);
        }
    }

    /// The prompt was computed at `at`, with this report, by who drives its stage still.
    pub fn prompt_computed(&mut self, usage: Option<Usage>, at: Instant) {
        let stage = self.open.as_mut().and_then(|open| open.prefill.as_mut());
        if let Some(stage) = stage {
            stage.ended = Some(at);
            stage.cached_tokens = usage.and_then(|usage| usage.cached_tokens);
        }
    }

    /// The prefill backend computed the prompt, with this report, and did not hand it over. This
    /// attempt's backend computes it too, or finds it in a cache that both share. The prompt is
    /// charged once, as the backend that had less of it cached reports.
    pub fn kept(&mut self, usage: Option<Usage>) {
        self.computes_alone();
        if let Some(open) = &mut self.open {
            open.cached_max = usage.and_then(|usage| usage.cached_tokens);
        }
    }

    /// The prompt was not computed elsewhere: this attempt's backend computes it.
    pub fn computes_alone(&mut self) {
        let Some(open) = &mut self.open else { return };
        if let Some(stage) = open.prefill.take() {
            open.prompt = stage.fetched;
            let uncached = open.prompt.tokens - open.prompt.predicted;
            open.underway.computes(uncached);
        }
    }
}

impl OpenAttempt {
    /// The answer begins: nothing is fetched any more.
    pub(super) fn end_prefill(&mut self) {
        let stage = self.prefill.as_mut();
        if let Some(attempt) = stage.and_then(|stage| stage.attempt.take()) {
            attempt.end(AttemptEnd::Finished);
        }
    }

    /// Whether another backend computes the prompt still, so that nothing is made of the answer.
    pub(super) fn waits_for_prompt(&self) -> bool {
        let stage = self.prefill.as_ref();
        stage.is_some_and(|stage| stage.ended.is_none())
    }

    /// How long the attempt's backend has been at work, at `now`.
    pub(super) fn at_work(&self, now: Instant) -> Duration {
        let stage = self.prefill.as_ref();
        match stage.and_then(|stage| stage.ended) {
            Some(ended) => now.saturating_duration_since(ended),
            None => self.stopwatch.elapsed(now),
        }
    }

    /// A report as far as it counts.
    pub(super) fn believed(&self, usage: Usage) -> Usage {
        let stage = self.prefill.as_ref();
        stage.map_or(usage, |stage| Usage {
            cached_tokens: stage.cached_tokens,
            ..usage
        })
    }
}
