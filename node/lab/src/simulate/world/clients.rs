//! Clients with limited patience: departures, rejections and retries.

use api::routing::AttemptEnd;

use super::{Micros, RequestStage, SimEvent, SimWorld};
use crate::simulate::engine::EngineUsage;

/// Interval at which a replica checks its queue, in microseconds: the longest one in production.
const LOOK_EVERY: Micros = 20_000;
/// First pause before a retry, in microseconds. It doubles up to `BACK_OFF_MAX`, as in SDKs.
const BACK_OFF: Micros = 500_000;
const BACK_OFF_MAX: Micros = 8_000_000;
/// Minimum and maximum time for which a rejected client is asked to wait, as in production, before
/// jitter, in milliseconds.
const RETRY_AFTER_MS: (u64, u64) = (1000, 60_000);

impl SimWorld<'_> {
    /// Begins a try of a request, and plans the departure of its client.
    pub(super) fn begin_try(&mut self, request: usize) {
        let asked = &mut self.requests[request];
        asked.tries += 1;
        if let Some((least, most)) = self.plan.clients.patience {
            let tries = asked.tries;
            let patience = least + self.patience_rng.below(most - least + 1);
            let leave = SimEvent::Leave { request, tries };
            self.events.plan(self.now + patience, leave);
        }
    }

    /// Handles the departure of a client, if its request's try number `tries` is still open.
    pub(super) fn leave(&mut self, request: usize, tries: u32) {
        let asked = &mut self.requests[request];
        if asked.tries != tries {
            return;
        }
        let (place, user) = (asked.replica, asked.user);
        match std::mem::replace(&mut asked.stage, RequestStage::Ended) {
            RequestStage::Ended => return,
            RequestStage::Waiting => {
                let ticket = asked.ticket;
                self.places[place].queue.left(ticket, self.now);
                self.waits_no_more(place, user);
            }
            RequestStage::Running(flight) => {
                let told = EngineUsage {
                    at: self.now,
                    output: asked.served_output,
                    cached: asked.prompt.tokens - asked.computed,
                };
                let wasted = u64::from(asked.computed) + u64::from(asked.served_output);
                self.tally.wasted_tokens += wasted;
                if !asked.has_first_token {
                    // The user is charged for the prompt, so the prompt counts as service.
                    let service = &mut self.tally.service;
                    service.served(user, flight.uncached_tokens, 0);
                }
                let rest = asked.output_tokens - asked.served_output;
                self.tally.kept(user, rest);
                self.engines[usize::from(flight.backend.slot.0)].abort(request);
                if let Some(computing) = flight.prefill_engine() {
                    self.engines[computing].abort(request);
                }
                let here = &mut self.places[place];
                let left = AttemptEnd::ClientLeft;
                here.replica.end(*flight, &asked.prompt, &told, left);
            }
        }
        self.changed(place);
        self.tally.departures += 1;
        if self.may_try_again(request) {
            let after = self.back_off(request);
            self.events.plan(self.now + after, SimEvent::Again(request));
        } else {
            self.tally.abandoned += 1;
            self.close(request);
        }
        self.pump(place);
    }

    /// Rejects a request that the queue does not accept. Its client retries after about `wait_ms`
    /// if it has tries left.
    pub(super) fn turn_away(&mut self, request: usize, wait_ms: u64) {
        let asked = &mut self.requests[request];
        asked.stage = RequestStage::Ended;
        self.tally.refusals += 1;
        if self.may_try_again(request) {
            let wait_ms = wait_ms.clamp(RETRY_AFTER_MS.0, RETRY_AFTER_MS.1);
            let jittered_ms = wait_ms + self.patience_rng.below(wait_ms / 2);
            // The header `retry-after` is in whole seconds.
            let after = jittered_ms.div_ceil(1000) * 1_000_000;
            self.events.plan(self.now + after, SimEvent::Again(request));
        } else {
            self.tally.refused += 1;
            self.close(request);
        }
    }

    fn may_try_again(&self, request: usize) -> bool {
        let is_in_time = self.now < self.plan.horizon;
        is_in_time && self.requests[request].tries <= self.plan.clients.retries
    }

    fn back_off(&mut self, request: usize) -> Micros {
        let doublings = self.requests[request].tries.saturating_sub(1).min(8);
        let most = (BACK_OFF << doublings).min(BACK_OFF_MAX);
        most - self.patience_rng.below(most / 4)
    }

    /// Sends a request again, as a new try.
    pub(super) fn try_again(&mut self, request: usize) {
        let asked = &mut self.requests[request];
        asked.arrived = self.now;
        asked.has_first_token = false;
        (asked.computed, asked.served_output) = (0, 0);
        self.enter(request);
    }

    /// Rejects the requests at `place` that have waited too long.
    pub(super) fn expire(&mut self, place: usize) {
        if !self.plan.bounds_waits() {
            return;
        }
        let here = &mut self.places[place];
        let running = || here.replica.running_here();
        here.queue.measure(self.now, running);
        let drain_ms = here.queue.drain_ms(self.now);
        let expired = here.queue.expire(self.now);
        if expired.is_empty() {
            return;
        }
        for request in expired {
            self.waits_no_more(place, self.requests[request].user);
            self.turn_away(request, drain_ms);
        }
        self.changed(place);
    }

    fn waits_no_more(&mut self, place: usize, user: usize) {
        self.places[place].replica.end_wait(self.keys[user]);
        self.tally.service.waits_no_more(user);
    }

    /// Plans the next check of the queue at `place` if requests wait there.
    pub(super) fn look_again(&mut self, place: usize) {
        if self.plan.bounds_waits() && !self.places[place].queue.is_empty() {
            self.wake_in(place, LOOK_EVERY);
        }
    }
}
