//! Requests: arrival, waiting, dispatch, progress and end.

use std::sync::Arc;

use api::routing::AttemptEnd;
use state::Backend;
use state::admission::{Batching, QueueRejection, QueuedRequest};
use state::command::BackendRole;
use state::ids::{BackendRef, Slot, Ticket};

use super::{Micros, ReplicaPlace, RequestStage, RequestState, SimEvent, SimWorld};
use crate::engine::offload::TierTokens;
use crate::simulate::clock::unix_ms;
use crate::simulate::engine::{EngineUsage, ServedStep};
use crate::simulate::plan::EngineModel;
use crate::simulate::sim_queue::{NextAdmission, WaitingRequest};
use crate::simulate::workload::SimPrompt;

impl SimWorld<'_> {
    pub(super) fn arrive_next(&mut self) {
        let sent = &self.workload.arrivals[self.next_arrival];
        self.next_arrival += 1;
        if let Some(next) = self.workload.arrivals.get(self.next_arrival) {
            self.events.plan(next.at, SimEvent::Arrive);
        }
        let prompt = Arc::clone(&sent.prompt);
        let (output_tokens, replica) = (sent.output_tokens, sent.replica);
        let of_session = |session| self.workload.users.len() + session;
        let sender = sent.session.map_or(sent.user, of_session);
        let request = self.arrive((sent.user, sender), prompt, output_tokens);
        self.requests[request].pinned = replica;
        self.admit(request);
    }

    /// Sends the backlog of a user, who starts or returns. The requests arrive over about a second,
    /// so that the first user does not take all engines.
    pub(super) fn come_back(&mut self, user: usize) {
        let backlog = self.workload.users[user].backlog;
        if self.sends_one(user) {
            let gap = self.rngs[user].gap_us(f64::from(backlog));
            self.events.plan(self.now + gap, SimEvent::Return(user));
        }
    }

    /// Sends the next request of a user with a backlog, if one is due. Returns whether one was due.
    fn sends_one(&mut self, user: usize) -> bool {
        let spec = &self.workload.users[user];
        let is_due = self.now < self.plan.horizon
            && spec.sends_at(self.now)
            && self.open_by_user[user] < spec.backlog;
        if is_due {
            let rng = &mut self.rngs[user];
            let (prompt, output_tokens) = self.workload.shape.draw_request(rng);
            let request = self.arrive((user, user), prompt, output_tokens);
            self.admit(request);
        }
        is_due
    }

    /// Adds a request of a user and sender, given by their indices. Returns the request's number.
    pub(super) fn arrive(
        &mut self,
        (user, sender): (usize, usize),
        prompt: Arc<SimPrompt>,
        output_tokens: u32,
    ) -> usize {
        self.tally.arrived += 1;
        self.open += 1;
        self.open_by_user[user] += 1;
        let request = self.requests.len();
        let priced = self.tally.service.price(prompt.tokens, output_tokens);
        self.tally.largest_priced = self.tally.largest_priced.max(priced);
        self.requests.push(RequestState {
            user,
            sender,
            turn: None,
            output_tokens,
            arrived: self.now,
            sent: self.now,
            replica: 0,
            predicted_output: output_tokens,
            stage: RequestStage::Waiting,
            has_first_token: false,
            first_token: 0,
            pinned: None,
            tries: 0,
            ticket: Ticket::default(),
            computed: 0,
            expected: TierTokens::default(),
            served_output: 0,
            prompt,
        });
        request
    }

    /// Delivers a new request to a replica, or refuses it if no engine could ever serve it.
    pub(super) fn admit(&mut self, request: usize) {
        let asked = &self.requests[request];
        let tokens = asked.prompt.tokens.saturating_add(asked.output_tokens);
        if self.engines[0].fits(tokens) {
            self.enter(request);
        } else {
            self.refuse(request);
        }
    }

    fn refuse(&mut self, request: usize) {
        self.requests[request].stage = RequestStage::Ended;
        self.tally.refused += 1;
        self.close(request);
    }

    /// Delivers a request to a replica, for the first time or for a retry.
    pub(super) fn enter(&mut self, request: usize) {
        self.begin_try(request);
        let user = self.requests[request].user;
        let drawn = self.spread.below(self.plan.replicas.into());
        let pinned = self.workload.users[user].replica;
        let place = match pinned.or(self.requests[request].pinned) {
            Some(pinned) => usize::from(pinned % self.plan.replicas),
            None => usize::try_from(drawn).expect("below the number of replicas"),
        };
        let asked = &mut self.requests[request];
        asked.replica = place;
        asked.stage = RequestStage::Waiting;
        if !self.plan.oracle {
            asked.predicted_output = self.places[place].replica.predict(self.keys[user]);
        }
        let here = &self.places[place];
        let goes_at_once = !self.is_batching()
            && here.queue.is_empty()
            && !here.queue.is_contended(self.now)
            && self.has_room(place);
        if goes_at_once {
            self.send(place, request, false);
        } else {
            self.wait(place, request);
        }
    }

    fn wait(&mut self, place: usize, request: usize) {
        let user = self.requests[request].user;
        let guest = self.guest(place, request);
        self.tally.held += u64::from(guest.waiting.hold_ms.is_some());
        let ReplicaPlace { replica, queue, .. } = &mut self.places[place];
        let pushed = queue.push(guest, &replica.counters());
        let drain_ms = queue.drain_ms(self.now);
        match pushed {
            Ok(ticket) => self.requests[request].ticket = ticket,
            Err(QueueRejection::TooLate { wait_ms, .. }) => {
                return self.turn_away(request, wait_ms);
            }
            Err(QueueRejection::Full) => return self.turn_away(request, drain_ms),
        }
        let sender = &self.senders[self.requests[request].sender];
        let payer = self.places[place].replica.begin_wait(sender);
        debug_assert_eq!(payer, self.keys[user], "few users are charged");
        self.tally.service.waits(user);
        if self.places[place].queue.len() == 1 {
            self.report_demand(place, false);
        }
        self.changed(place);
        self.pump(place);
        self.look_again(place);
    }

    /// Returns for how long a request that arrives at `place` waits for a first engine, in milliseconds;
    /// `None` if it does not.
    fn hold_ms(&self, place: usize) -> Option<u64> {
        let scaling = self.plan.scaling.as_ref()?;
        let is_at_zero = !self.takes_requests(place, |_| true);
        let is_held = is_at_zero || self.places[place].queue.holds_any();
        is_held.then_some(scaling.hold / 1000)
    }

    fn guest(&self, place: usize, request: usize) -> WaitingRequest {
        let asked = &self.requests[request];
        let replica = &self.places[place].replica;
        let ask = replica.request(request, &asked.prompt, &self.senders[asked.sender]);
        let matched_blocks = replica.best_match(&ask);
        let cached = matched_blocks * self.plan.block_tokens;
        WaitingRequest {
            request,
            waiting: QueuedRequest {
                ticket: Default::default(),
                user: self.keys[asked.user],
                tree: replica.tree(&self.senders[asked.sender]),
                priority: 0,
                arrived_ms: unix_ms(self.now),
                input_tokens: asked.prompt.tokens.saturating_sub(cached),
                predicted_output: asked.predicted_output,
                bin: replica.bin_of(asked.predicted_output),
                matched_blocks,
                due_ms: None,
                hold_ms: self.hold_ms(place),
                is_selective: false,
            },
            price: self
                .tally
                .service
                .price(asked.prompt.tokens, asked.output_tokens),
        }
    }

    /// Dispatches the requests at `place` that can be admitted.
    pub(super) fn pump(&mut self, place: usize) {
        if self.is_batching() {
            self.pump_batches(place);
            return;
        }
        self.expire(place);
        while !self.places[place].queue.is_empty() {
            let has_room = self.has_room(place);
            let ReplicaPlace { replica, queue, .. } = &mut self.places[place];
            let turn = queue.next(self.now, replica, has_room);
            match turn {
                NextAdmission::Go(request) => self.send(place, request, true),
                NextAdmission::Held(after) => {
                    self.wake_in(place, after);
                    return;
                }
                NextAdmission::Nobody => return,
            }
        }
    }

    /// Forms a batch for each idle engine from the requests that wait at `place`.
    fn pump_batches(&mut self, place: usize) {
        let EngineModel::Static(times) = self.plan.engine else {
            return;
        };
        self.expire(place);
        let registry = self.places[place].replica.state.view().registry();
        for backend in &registry.backends {
            let engine = usize::from(backend.handle.slot.0);
            let here = &mut self.places[place];
            if here.replica.running_at(backend.handle, self.now) > 0 {
                continue;
            }
            let limit = here.replica.limit(backend.handle).unwrap_or(u32::MAX);
            let requests = times.batch_max.min(limit);
            here.queue.begin_batch();
            for _ in 0..requests {
                let ReplicaPlace { replica, queue, .. } = &mut self.places[place];
                match queue.next(self.now, replica, true) {
                    NextAdmission::Go(request) => {
                        self.hand_over(place, request, true, Some(backend.handle.slot));
                    }
                    NextAdmission::Held(after) => {
                        self.wake_in(place, after);
                        break;
                    }
                    NextAdmission::Nobody => break,
                }
            }
            self.begin_step(engine);
        }
    }

    fn is_batching(&self) -> bool {
        self.plan.admission.batching == Batching::Static
    }

    fn has_room(&self, place: usize) -> bool {
        self.takes_requests(place, |backend| self.is_below_limit(place, backend))
    }

    /// Returns whether `backend` may get another request from the replica at `place`.
    pub(super) fn is_below_limit(&self, place: usize, backend: BackendRef) -> bool {
        let replica = &self.places[place].replica;
        let limit = replica.limit(backend);
        limit.is_none_or(|limit| replica.running_at(backend, self.now) < limit)
    }

    /// Returns whether the replica at `place` knows of a backend that answers new requests and for which
    /// `is_right` holds.
    fn takes_requests(&self, place: usize, is_right: impl Fn(BackendRef) -> bool) -> bool {
        let registry = self.places[place].replica.state.view().registry();
        let answers = |it: &&Backend| it.spec.role != BackendRole::Prefill && !it.draining;
        let mut answering = registry.backends.iter().filter(answers);
        answering.any(|it| is_right(it.handle))
    }

    fn send(&mut self, place: usize, request: usize, was_queued: bool) {
        let engine = self.hand_over(place, request, was_queued, None);
        self.begin_step(engine);
    }

    /// Dispatches a request to slot `only`, or to the policy's choice if it is `None`.
    /// Returns the engine.
    fn hand_over(
        &mut self,
        place: usize,
        request: usize,
        was_queued: bool,
        only: Option<Slot>,
    ) -> usize {
        let only = only.or_else(|| self.chosen_by_all_knowing(request));
        let asked = &mut self.requests[request];
        let replica = &self.places[place].replica;
        let ask = replica.request(request, &asked.prompt, &self.senders[asked.sender]);
        let decision = replica
            .decide(&ask, only, self.now)
            .expect("room was there a moment ago");
        let is_turn = asked.turn.is_some();
        let expected = is_turn.then(|| replica.expected(&ask, decision.backend, self.now));
        let tokens_max = self.plan.oracle.then_some(asked.output_tokens);
        let flight = replica.dispatch(&ask, &decision, tokens_max, self.now);
        self.places[place].started += 1;
        let replica = &self.places[place].replica;
        if was_queued {
            replica.end_wait(self.keys[asked.user]);
        }
        if was_queued {
            self.tally.service.waits_no_more(asked.user);
        }
        let prefill = decision.prefill.as_ref();
        let matched = prefill.map_or(decision.matched, |it| it.matched);
        self.tally.predicted_tokens += u64::from(matched) * u64::from(self.plan.block_tokens);
        self.tally.promised(asked.user, asked.output_tokens);
        let (engine, output_tokens) = match flight.prefill_engine() {
            Some(computing) => (computing, 1),
            None => (usize::from(decision.backend.slot.0), asked.output_tokens),
        };
        if let Some(expected) = expected {
            self.reaches(request, engine, expected);
        }
        let asked = &mut self.requests[request];
        asked.expected = TierTokens {
            gpu: decision.on_gpu() * self.plan.block_tokens,
            cpu: decision.loaded.cpu * self.plan.block_tokens,
            disk: decision.loaded.disk * self.plan.block_tokens,
            peer: 0,
        };
        self.engines[engine].submit(request, &asked.prompt, output_tokens);
        asked.stage = RequestStage::Running(Box::new(flight));
        self.changed(place);
        engine
    }

    /// Submits a request to its decode engine after the transfer of its blocks, if it is still in
    /// the try `tries`.
    pub(super) fn fetched(&mut self, request: usize, tries: u32) {
        let asked = &self.requests[request];
        let RequestStage::Running(flight) = &asked.stage else {
            return;
        };
        if asked.tries != tries {
            return;
        }
        let engine = usize::from(flight.backend.slot.0);
        self.engines[engine].submit_fetched(request, &asked.prompt, asked.output_tokens);
        self.begin_step(engine);
    }

    pub(super) fn begin_step(&mut self, engine: usize) {
        if let Some(took) = self.engines[engine].begin_step() {
            self.events.plan(self.now + took, SimEvent::Step(engine));
        }
    }

    pub(super) fn step_over(&mut self, engine: usize) {
        let mut touched = vec![false; self.places.len()];
        let progress = self.engines[engine].finish_step();
        self.publish(engine);
        for served in progress {
            let place = self.requests[served.request].replica;
            touched[place] = true;
            self.served(engine, place, &served);
        }
        self.begin_step(engine);
        for (place, _) in touched.into_iter().enumerate().filter(|(_, is)| *is) {
            self.changed(place);
            self.pump(place);
        }
    }

    fn served(&mut self, engine: usize, place: usize, served: &ServedStep) {
        let request = &mut self.requests[served.request];
        let RequestStage::Running(flight) = &mut request.stage else {
            return; // Cut off, and sent again since.
        };
        let replica = &self.places[place].replica;
        let (user, prompt) = (request.user, Arc::clone(&request.prompt));
        let told = EngineUsage {
            at: self.now,
            output: served.output_tokens,
            cached: served.cached_tokens,
        };
        if flight.is_prefilled_by(engine) {
            replica.prefilled(flight, &prompt, &told);
            let after = self.plan.disaggregation.transfer_us(prompt.tokens);
            let fetched = SimEvent::Fetched {
                request: served.request,
                tries: request.tries,
            };
            self.events.plan(self.now + after, fetched);
            return;
        }
        replica.served(flight, &prompt, &told);
        let mut uncached = 0;
        if !request.has_first_token {
            request.has_first_token = true;
            request.first_token = self.now;
            let cached = flight.cached(served.cached_tokens);
            uncached = prompt.tokens - cached.min(prompt.tokens);
            let waited = self.now - request.arrived;
            self.tally
                .first_token(self.now, waited, prompt.tokens, cached);
            self.tally.found(served.found, request.expected);
            request.computed = uncached;
        }
        let output = served.output_tokens.saturating_sub(request.served_output);
        request.served_output += output;
        self.tally.kept(user, output);
        self.tally.served(self.now, user, uncached, output);
        if served.is_done {
            self.ended(engine, place, served.request, &told);
        }
    }

    fn ended(&mut self, engine: usize, place: usize, request: usize, told: &EngineUsage) {
        let asked = &mut self.requests[request];
        let RequestStage::Running(flight) =
            std::mem::replace(&mut asked.stage, RequestStage::Ended)
        else {
            return;
        };
        let (user, took): (usize, Micros) = (asked.user, self.now - asked.arrived);
        let since = self.now - asked.first_token;
        let waited = asked.first_token - asked.arrived;
        let made = (since, asked.output_tokens);
        self.tally.judged(self.now, &self.plan.goal, waited, made);
        if let Some(turn) = asked.turn {
            let (arrived, sent) = (asked.arrived, asked.sent);
            self.note_watched(turn, arrived, sent);
        }
        let asked = &self.requests[request];
        let replica = &self.places[place].replica;
        replica.end(*flight, &asked.prompt, told, AttemptEnd::Finished);
        self.tally.ended(self.now, took, engine);
        self.close(request);
        self.sends_one(user);
    }

    pub(super) fn close(&mut self, request: usize) {
        self.open -= 1;
        self.open_by_user[self.requests[request].user] -= 1;
        if let Some(turn) = self.requests[request].turn {
            self.end_turn(turn);
        }
    }
}
