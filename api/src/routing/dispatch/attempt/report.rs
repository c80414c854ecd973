//! Reports the outcome of an attempt: to its decision record, the trace, the metrics and the
//! samples.

use std::time::Duration;

use state::trees::TurnUsage;
use tokio::time::Instant;

use super::{Attempt, OpenAttempt};
use crate::routing::AttemptEnd;
use crate::routing::decide::decision_record::AttemptReport;
use crate::routing::dispatch::Dispatcher;
use crate::routing::dispatch::predictions::Prediction;
use crate::routing::dispatch::reply::ReplyEnd;
use crate::routing::dispatch::samples::{EndedRequest, RunningRequests};
use crate::traces::TracedEnd;

/// Minimum time after which a client that leaves without any output shows that the engine may hang.
const SUSPICIOUS_WAIT: Duration = Duration::from_secs(1);
/// Number of times that such a client must have waited as long as the engine usually takes.
const USUAL_WAITS: u32 = 2;

impl Attempt {
    /// Reports an attempt that ends without an answer to the circuit of its backend: a timeout, or a
    /// client that has left. Clients leave for many reasons, so they count only if they have waited
    /// for clearly longer than usual while the engine had no output for anyone and another one had.
    /// An engine that hangs is noticed thus although no client waits until the timeout.
    pub(super) fn is_left_unanswered(&self, end: AttemptEnd, now: Instant) {
        let Some(open) = self.open.as_ref().filter(|open| !open.progress.is_answered) else {
            return;
        };
        let backends = &self.dispatcher.backends;
        if end == AttemptEnd::ClientLeft {
            let waited = open.stopwatch.elapsed(now);
            let usual = open.usual_time(&self.dispatcher, now);
            let is_long = waited >= SUSPICIOUS_WAIT && waited >= usual.saturating_mul(USUAL_WAITS);
            let since = now - waited;
            let is_single = open.prefill.is_none();
            if !is_long || !is_single || !backends.is_outdone(open.backend.slot, since) {
                return;
            }
        }
        backends.report_no_answer(open.backend, Some(self.user), now);
    }
}

impl OpenAttempt {
    /// Returns how the response ended, with its token count if the engine's count covers all of it.
    pub(super) fn reply_end(&self, end: AttemptEnd) -> ReplyEnd {
        let usage = self.usage.filter(|_| self.unreported_bytes == 0);
        let tokens = usage.map(|usage| usage.completion_tokens);
        ReplyEnd {
            is_whole: end == AttemptEnd::Finished,
            tokens: tokens
                .and_then(|tokens| usize::try_from(tokens).ok())
                .filter(|tokens| *tokens > 0),
        }
    }

    /// Remembers the form of a response that reports cached tokens. If a finished response reports
    /// none although earlier ones of its form did, sets the count to 0.
    pub(super) fn settle_cached(&mut self, dispatcher: &Dispatcher, end: AttemptEnd) {
        let (Some(usage), Some(form)) = (&mut self.usage, self.form) else {
            return;
        };
        if self.prefill.is_some() || self.prompt.is_miscounted {
            return;
        }
        let backends = &dispatcher.backends;
        if usage.cached_tokens.is_some() {
            backends.note_cached_report(self.backend, form);
        } else if end == AttemptEnd::Finished
            && usage.prompt_tokens > 0
            && backends.reports_cached(self.backend, form)
        {
            usage.cached_tokens = Some(0);
        }
    }

    /// Adds the time between tokens to the samples. `tokens` is the number of output tokens so far.
    pub(super) fn count_gaps(&mut self, dispatcher: &Dispatcher, tokens: u64, now: Instant) {
        let requests = dispatcher.load.cluster(self.backend, now).running;
        let limit = dispatcher.view.limit(self.backend.slot);
        let running = RunningRequests {
            requests,
            is_at_limit: limit.is_some_and(|limit| requests >= limit),
        };
        let stopwatch = &mut self.stopwatch;
        let count = |sample: &mut _| stopwatch.count(tokens, running, sample);
        dispatcher.samples.add(self.backend, now, count);
    }

    /// Returns the time that the backend usually takes to show something of the response: the first
    /// token of a stream, or else the last one, as far as its pace was measured.
    fn usual_time(&self, dispatcher: &Dispatcher, now: Instant) -> Duration {
        let pace = self.pace(dispatcher, now);
        let is_measured = self
            .learnt(dispatcher)
            .is_some_and(|learnt| learnt.gaps > 0);
        let hidden = self.hidden.filter(|_| is_measured);
        let tokens = hidden.map_or(0, |hidden| self.usual_output(dispatcher, hidden));
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        pace.first_token
            .saturating_add(pace.gap.saturating_mul(tokens))
    }

    /// Records the end of a turn of the request's session, if it has one.
    pub(super) fn end_turn(&self, dispatcher: &Dispatcher) {
        let Some(session) = self.session else { return };
        let charged = &self.charged;
        let used = TurnUsage {
            input_uncached: charged.input_uncached,
            input_cached: charged.input_cached,
            output: charged.output,
        };
        let payer = (charged.user, self.carried);
        (dispatcher.outbox).with(|outbox| dispatcher.end_turn(outbox, session, used, payer));
    }

    /// Writes the outcome of the attempt to the decision's record.
    pub(super) fn note_end(&self, end: AttemptEnd, now: Instant) {
        let Some(record) = &self.record else { return };
        record.report(AttemptReport {
            end,
            usage: self.usage,
            charged: self.own_charge(),
            first_token: self
                .progress
                .first_token
                .map(|at| self.stopwatch.elapsed(at)),
            duration: self.stopwatch.elapsed(now),
        });
    }

    /// Writes the outcome of the attempt to its span and ends the span.
    pub(super) fn end_trace(&mut self, end: AttemptEnd, at: Instant) {
        let Some(trace) = self.trace.take() else {
            return;
        };
        let charged = &self.charged;
        let known = self.usage.map(|usage| {
            let cached = usage.cached_tokens.unwrap_or(charged.input_cached);
            [usage.prompt_tokens, cached, usage.completion_tokens]
        });
        trace.end(&TracedEnd {
            outcome: end.label(),
            is_whole: end == AttemptEnd::Finished,
            is_failure: matches!(end, AttemptEnd::Broken | AttemptEnd::Failed),
            tokens: known,
            at,
        });
    }

    /// Adds the outcome of the attempt to the metrics, samples and predictions.
    pub(super) fn report(&mut self, dispatcher: &Dispatcher, end: AttemptEnd, now: Instant) {
        self.meter.count_end(end);
        let Some(usage) = self.usage else { return };
        self.count_gaps(dispatcher, usage.completion_tokens, now);
        if end != AttemptEnd::NotRun {
            let ended = EndedRequest {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: match &self.prefill {
                    // Fetched tokens take up room like computed ones.
                    Some(stage) => stage.fetched.predicted,
                    None => usage.cached_tokens.unwrap_or(self.prompt.predicted),
                },
                output_tokens: usage.completion_tokens,
                block_tokens: self.prompt.block_tokens,
            };
            dispatcher
                .samples
                .add(self.backend, now, |sample| ended.count(sample));
        }
        let (bytes, tokens) = (self.prompt.bytes, usage.prompt_tokens);
        dispatcher.texts.add(self.model, bytes, tokens);
        let is_whole = self.prefill.is_none() && self.earlier.is_none();
        let is_informative = self.prompt.uses_cache && is_whole;
        if let Some(cached) = usage.cached_tokens.filter(|_| is_informative) {
            let predicted = self.prompt.predicted_of(usage.prompt_tokens);
            let learnt = self.learnt.tokens(predicted);
            self.meter.count_prefix(usage.prompt_tokens, learnt, cached);
            let block_tokens = self.prompt.block_tokens;
            let prediction = Prediction::of(usage.prompt_tokens, predicted, cached, block_tokens);
            let user = self.charged.user;
            dispatcher.found_cached(self.backend, user, &self.prompt, (predicted, cached));
            dispatcher
                .samples
                .predict(self.backend, user, prediction, now);
        }
    }
}
