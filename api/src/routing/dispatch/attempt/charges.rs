//! What an attempt charges: the part of a usage that is not charged yet, and estimates of what no
//! report covers.

use state::admission::TokenDelta;
use state::command::Charge;
use state::service::LearntPrices;
use tokio::time::Instant;

use super::OpenAttempt;
use crate::routing::dispatch::Dispatcher;
use crate::routing::dispatch::hidden_output::{BackendPace, HiddenOutput};
use crate::routing::dispatch::output_lengths::ExpectedOutput;
use crate::routing::dispatch::priced_total::LargestRequest;
use crate::routing::outbox::Outbox;
use crate::routing::{AttemptEnd, Usage};

impl OpenAttempt {
    /// Charges the tokens of `counts` to their user, using the advance first.
    pub(super) fn charge(&mut self, dispatcher: &Dispatcher, outbox: &mut Outbox, counts: Charge) {
        let used = TokenDelta {
            input_uncached: counts.input_uncached,
            input_cached: counts.input_cached,
            output: counts.output,
        };
        let settled = outbox
            .ledger
            .settle(counts.user, &mut self.advance, &used, &self.pricing);
        let charge = Charge {
            source: self.charged.source,
            started: counts.started,
            ended: counts.ended,
            ..settled
        };
        dispatcher.priced.add(self.pricing.due(&charge));
        outbox.charge_for(self.carried, charge);
    }

    /// Charges more output in advance if all expected output was produced.
    pub(super) fn expect_more(&mut self, dispatcher: &Dispatcher, outbox: &mut Outbox) {
        let (user, produced) = (self.charged.user, self.charged.output);
        let expected = self.expected.as_mut();
        let more = expected.map_or(0, |expected| expected.outgrown(produced, &dispatcher.view));
        if more > 0 {
            let (ledger, pricing) = (&mut outbox.ledger, &self.pricing);
            let charge = Charge {
                source: self.charged.source,
                ..ledger.raise(user, &mut self.advance, more, pricing)
            };
            dispatcher.priced.add(pricing.due(&charge));
            outbox.charge_for(self.carried, charge);
        }
    }

    /// Returns the price of all tokens charged, and of the output among them.
    pub(super) fn price(&self) -> LargestRequest {
        let charged = &self.charged;
        let input = self
            .pricing
            .input(charged.input_uncached, charged.input_cached);
        let output = self.pricing.output(charged.output);
        LargestRequest {
            request: input + output,
            output,
        }
    }

    pub(super) fn usage_or_estimate(
        &self,
        dispatcher: &Dispatcher,
        end: AttemptEnd,
        now: Instant,
    ) -> Usage {
        let mut usage = self.usage.unwrap_or_default();
        // What earlier attempts estimated is output of this answer too.
        let estimated = self.earlier.map_or(0, |earlier| earlier.charged.output);
        usage.completion_tokens = usage.completion_tokens.max(estimated);
        if usage.prompt_tokens == 0 {
            usage.prompt_tokens = self.prompt.tokens;
        }
        let unreported = u64::from(self.prompt.ratio.tokens(self.unreported_bytes));
        usage.completion_tokens = usage.completion_tokens.saturating_add(unreported);
        if usage.completion_tokens == 0 && self.usage.is_none() {
            usage.completion_tokens = self.hidden_output(dispatcher, end, now);
        }
        usage
    }

    /// Estimates the tokens of invisible output from the elapsed time. An engine that failed may
    /// have been stuck all the time, so the estimate is then capped at the expected output.
    pub(super) fn hidden_output(
        &self,
        dispatcher: &Dispatcher,
        end: AttemptEnd,
        now: Instant,
    ) -> u64 {
        let Some(hidden) = self.hidden.filter(|_| !self.waits_for_prompt()) else {
            return 0;
        };
        let made_by = self.progress.began.filter(|_| hidden.is_whole_at_once);
        let elapsed = self.at_work(made_by.unwrap_or(now));
        let tokens = hidden.tokens(elapsed, &self.pace(dispatcher, now));
        match end {
            AttemptEnd::Finished
            | AttemptEnd::ClientLeft
            | AttemptEnd::NotRun
            | AttemptEnd::Moved => tokens,
            AttemptEnd::Broken | AttemptEnd::Failed => {
                let usual = self.usual_output(dispatcher, hidden);
                tokens.min(usual.saturating_mul(hidden.choices.max(1).into()))
            }
        }
    }

    /// Returns the number of output tokens that a choice of such a request usually has.
    pub(super) fn usual_output(&self, dispatcher: &Dispatcher, hidden: HiddenOutput) -> u64 {
        let user = self.charged.user;
        ExpectedOutput::of(&dispatcher.view, user, self.model, hidden.tokens_max).tokens()
    }

    /// Returns the learned prices of the backend; `None` before enough was measured.
    pub(super) fn learnt(&self, dispatcher: &Dispatcher) -> Option<LearntPrices> {
        let service = dispatcher.view.service();
        let served = service.get(self.backend.slot);
        served
            .filter(|served| served.backend == self.backend)?
            .learnt
    }

    /// Returns the pace of the backend for this request, as learned so far.
    pub(super) fn pace(&self, dispatcher: &Dispatcher, now: Instant) -> BackendPace {
        let running = dispatcher.load.cluster(self.backend, now).running;
        let learnt = self.learnt(dispatcher);
        self.stopwatch.pace(learnt.as_ref(), running)
    }

    /// Returns the part of `usage` that is not charged yet. If the engine reports no cached tokens,
    /// the predicted ones count, if trusted. A later report of cached tokens never charges more
    /// prompt tokens than the prompt has.
    pub(super) fn due(&self, usage: Usage) -> Charge {
        let cached = usage
            .cached_tokens
            .unwrap_or(self.prompt.predicted)
            .min(self.cached_max.unwrap_or(u64::MAX))
            .min(usage.prompt_tokens);
        let uncached = usage.prompt_tokens - cached;
        let charged = &self.charged;
        let room = usage
            .prompt_tokens
            .saturating_sub(charged.input_uncached + charged.input_cached);
        let input_uncached = uncached.saturating_sub(charged.input_uncached).min(room);
        let input_cached = cached.saturating_sub(charged.input_cached);
        Charge {
            user: charged.user,
            input_uncached,
            input_cached: input_cached.min(room - input_uncached),
            output: usage.completion_tokens.saturating_sub(self.charged.output),
            started: 0,
            ended: 0,
            ..Charge::default()
        }
    }

    pub(super) fn note_charged(&mut self, charge: Charge) {
        self.charged.input_uncached += charge.input_uncached;
        self.charged.input_cached += charge.input_cached;
        self.charged.output += charge.output;
    }
}
