//! Serves the queues: decides which requests go now, and to which backends.

use std::time::Duration;

use state::admission::{
    AdmissionSettings, Batching, CODEL_INTERVAL_MS, Counters, DispatchVerdict, Expired,
    ExpiryReason, Forecast, Gate, Next, Order, PendingCharges, Pricing, QueueSettings,
    QueuedRequest, UserFigures, bound, slack_tokens,
};
use state::ids::{ModelKey, Ticket, UserKey};
use tokio::time::Instant;

use super::metrics::LeaveReason;
use super::model_queue::ModelQueue;
use super::waiter::{AdmissionRejection, DecisionTimes, Waiter};
use super::{Admission, ModelQueues};
use crate::routing::{
    LargestRequest, PlaceRejection, PlacedRequest, Room, RoutingRejection, RoutingRequest,
    WantedPlaces, pricing_of,
};

/// Usual maximum age of the replicas' knowledge about each other's dispatches, in milliseconds: an
/// update waits 20 ms for its flush, then for its commit; reports are sent every 20 ms.
const LAG_MS: u64 = 60;
/// Window over which the service rate is measured. The largest request is remembered for one more
/// window.
const PACE_WINDOW: Duration = Duration::from_secs(10);
/// Minimum age of a window from which a rate is computed.
const PACE_LEAST: Duration = Duration::from_millis(200);

/// Service rate of this replica, from which the gate's slack follows.
#[derive(Debug, Default)]
pub(super) struct ServiceRate {
    window: Option<RateWindow>,
    /// Largest prices of requests in the previous window.
    largest_before: LargestRequest,
    rate_before: Option<u64>,
    peak: Peak,
}

/// Maximum values since something began to wait, here or at a peer.
#[derive(Debug, Default)]
struct Peak {
    /// Number of requests in flight of a user who was served while requests waited.
    in_flight: u32,
    /// Difference between the counter of a served user and the least waiting counter, in
    /// thousandths of a priced token.
    gap_milli: u64,
    /// Upper bound of that difference, in priced tokens.
    bound: u64,
}

#[derive(Debug)]
struct RateWindow {
    since: Instant,
    priced: u64,
}

impl ServiceRate {
    /// Returns the rate of priced tokens per second; `priced` is the total charged here. At the end
    /// of a window, stores the result of `largest`: the largest request since the previous call.
    fn look(&mut self, priced: u64, largest: impl Fn() -> LargestRequest, now: Instant) -> u64 {
        let window = self.window.get_or_insert(RateWindow { since: now, priced });
        let age = now.saturating_duration_since(window.since);
        let served = priced.saturating_sub(window.priced);
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = served.saturating_mul(1000) / age_ms;
        if age >= PACE_WINDOW {
            self.window = Some(RateWindow { since: now, priced });
            self.rate_before = Some(rate);
            self.largest_before = largest();
        }
        if age < PACE_LEAST {
            self.rate_before.unwrap_or_default()
        } else {
            rate
        }
    }
}

/// Inputs of one scan of the queues.
pub(super) struct QueueScan {
    pub(super) settings: AdmissionSettings,
    rules: QueueSettings,
    pub(super) pricing: Pricing,
    pub(super) now: Instant,
    /// `now` on the queues' clock.
    pub(super) now_ms: u64,
    /// Slack `G` of the gates, in priced tokens.
    slack: u64,
}

impl QueueScan {
    fn is_static(&self) -> bool {
        self.settings.batching == Batching::Static
    }
}

/// A request with its reserved places and the times of its decision, if they are recorded.
pub(super) type Placed = (PlacedRequest, Option<DecisionTimes>);

impl Admission {
    /// Returns the settings of the queues and the token prices.
    pub(super) fn rules(&self) -> (QueueSettings, Pricing) {
        let registry = self.view.registry();
        let pricing = pricing_of(&registry);
        (self.rules_of(&registry.admission, pricing), pricing)
    }

    fn rules_of(&self, settings: &AdmissionSettings, pricing: Pricing) -> QueueSettings {
        QueueSettings {
            target_ms: self.target_ms,
            ..QueueSettings::of(settings, pricing)
        }
    }

    /// Whether backends receive requests only in batches.
    pub(super) fn is_batching(&self) -> bool {
        self.view.registry().admission.batching == Batching::Static
    }

    /// Returns a function from users to their figures, including this replica's unapplied charges.
    pub(super) fn counters(&self, pricing: Pricing) -> impl Counters {
        move |user: UserKey| -> UserFigures {
            // Order matters: charges applied in between count twice for a moment, never zero times.
            let unapplied = self.dispatcher.unapplied(user);
            let mut pending = PendingCharges::default();
            pending.add(&unapplied, &pricing);
            pending.on_top(user, self.view.user_figures(user))
        }
    }

    /// Dispatches every waiting request that can go as of `now`. Returns the time until a request
    /// gives up its wait for a peer's place.
    pub(super) fn serve(&self, now: Instant) -> Duration {
        let registry = self.view.registry();
        let settings = registry.admission.clone();
        let pricing = pricing_of(&registry);
        let now_ms = self.ms_of(now);
        let mut queues = self.lock();
        let slack = self.slack(&mut queues, now);
        let look = QueueScan {
            rules: self.rules_of(&settings, pricing),
            settings,
            pricing,
            now,
            now_ms,
            slack,
        };
        let first = queues.served_first;
        let later = queues.by_model.keys().filter(|model| **model > first);
        let earlier = queues.by_model.keys().filter(|model| **model <= first);
        let models: Vec<ModelKey> = later.chain(earlier).copied().collect();
        queues.served_first = models.first().copied().unwrap_or_default();
        for model in models {
            self.serve_model(&mut queues, model, &look);
        }
        self.shares.want(std::mem::take(&mut queues.wanted));
        self.tidy(&mut queues, &look);
        let seeking = queues.by_model.values().flat_map(ModelQueue::seeking);
        let next = seeking
            .map(|it| it.until)
            .filter(|until| *until > now)
            .min();
        next.map_or(Duration::MAX, |until| until - now)
    }

    /// Returns `G`, computed from the service rate. Updates the gauges for `G` and
    /// the fairness bound.
    fn slack(&self, queues: &mut ModelQueues, now: Instant) -> u64 {
        let (dispatcher, now_ms) = (&self.dispatcher, self.ms_of(now));
        let rate = queues.pace.look(
            dispatcher.priced_tokens(),
            || dispatcher.take_largest_request(),
            now,
        );
        let largest = dispatcher.largest_request().max(queues.pace.largest_before);
        let replicas = self.load.peers_heard(now) as u64 + 1;
        let rate = rate.saturating_mul(replicas);
        let here = queues.by_model.values().map(|line| line.queue.users_len());
        let elsewhere = queues.gates.values().map(|gate| gate.users(now_ms));
        let users = u32::try_from(here.sum::<usize>()).unwrap_or(u32::MAX);
        let users = elsewhere.fold(users, u32::saturating_add);
        let slack = slack_tokens(largest.request, rate, LAG_MS, users);
        let lagging = rate.saturating_mul(LAG_MS) / 1000;
        let peak = &mut queues.pace.peak;
        let to_make = u64::from(peak.in_flight).saturating_mul(largest.output);
        let uncharged = to_make.saturating_add(lagging);
        peak.bound = peak.bound.max(bound(largest.request, uncharged, slack));
        show(&self.metrics.slack_tokens, slack);
        show(&self.metrics.bound_tokens, peak.bound);
        slack
    }

    fn serve_model(&self, queues: &mut ModelQueues, model: ModelKey, look: &QueueScan) {
        let ModelQueues {
            by_model,
            gates,
            pace,
            wanted,
            ..
        } = queues;
        let Some(line) = by_model.get_mut(&model) else {
            return;
        };
        line.queue.set_rules(look.rules);
        self.measure(line, look.now_ms);
        self.expire(line, look);
        self.serve_again(line, look);
        let gate = gates.entry(model).or_default();
        gate.set_slack(look.slack);
        self.serve_queue(line, (gate, pace), wanted, look);
        self.want_again(line, wanted, look);
    }

    /// Dispatches the requests that have not had their turn, as far as they have room.
    fn serve_queue(
        &self,
        line: &mut ModelQueue,
        (gate, pace): (&mut Gate, &mut ServiceRate),
        wanted: &mut WantedPlaces,
        look: &QueueScan,
    ) {
        loop {
            let (next, asked) = self.next(line, gate, look);
            match next {
                Next::Go(waiting) => {
                    self.observe_gap(line, (gate, pace), &waiting, look);
                    self.go(line, (gate, pace), &waiting, asked, look);
                }
                Next::Held { .. } => {
                    self.metrics.gate_closed.inc();
                    return;
                }
                Next::NoRoom => {
                    self.want_next(line, gate, wanted, look);
                    return;
                }
                Next::Empty => return,
            }
        }
    }

    /// Measures the service time if due, by Little's law: running requests divided by the rate.
    fn measure(&self, line: &mut ModelQueue, now_ms: u64) {
        let is_due = |at: u64| now_ms.saturating_sub(at) >= CODEL_INTERVAL_MS;
        if !line.measured_ms.is_none_or(is_due) {
            return;
        }
        line.measured_ms = Some(now_ms);
        if let Some(rate_milli @ 1..) = line.queue.forecast(now_ms).rate_milli {
            let running = self.decider.running_here(line.model());
            line.queue.set_service_ms(running * 1_000_000 / rate_milli);
        }
    }

    fn expire(&self, line: &mut ModelQueue, look: &QueueScan) {
        let retry_after_ms = line.queue.forecast(look.now_ms).drain_ms;
        let too_long = AdmissionRejection::WaitedTooLong { retry_after_ms };
        for Expired { waiting, why } in line.queue.expire(look.now_ms) {
            let left = match why {
                ExpiryReason::TooLong => LeaveReason::WaitedTooLong,
                ExpiryReason::Deadline => LeaveReason::Deadline,
                ExpiryReason::Overload => LeaveReason::Overload,
            };
            if let Some(entry) = line.entries.remove(&waiting.ticket) {
                self.refuse_overdue(entry, (too_long, left));
            }
        }
        let wait_max = |entry: &Waiter| {
            let hold_ms = entry.hold_ms.unwrap_or_default();
            Duration::from_millis(hold_ms.max(look.rules.wait_ms_max))
        };
        let is_over = |line: &ModelQueue, ticket: &Ticket| {
            let entry = line.entries.get(ticket);
            let waited = |entry: &Waiter| look.now.saturating_duration_since(entry.since);
            entry.is_none_or(|entry| waited(entry) >= wait_max(entry))
        };
        while line
            .again
            .front()
            .is_some_and(|ticket| is_over(line, ticket))
        {
            let ticket = line.again.pop_front();
            if let Some(entry) = ticket.and_then(|ticket| line.entries.remove(&ticket)) {
                self.refuse(entry, too_long, LeaveReason::WaitedTooLong);
            }
        }
    }

    /// Refuses a request that has waited for as long as it may: for lack of an engine, if it waits for
    /// one.
    fn refuse_overdue(&self, entry: Waiter, (too_long, left): (AdmissionRejection, LeaveReason)) {
        let lacking = entry.hold_ms.and_then(|_| self.lack(entry.ask().model));
        match lacking.map(AdmissionRejection::NoBackend) {
            Some(why) => self.refuse(entry, why, LeaveReason::NoBackend),
            None => self.refuse(entry, too_long, left),
        }
    }

    /// Dispatches the requests that have had their turn, as far as they have room.
    fn serve_again(&self, line: &mut ModelQueue, look: &QueueScan) {
        let again = std::mem::take(&mut line.again);
        for ticket in again {
            let Some(mut entry) = line.entries.remove(&ticket) else {
                continue;
            };
            if let Some(seeking) = &mut entry.seeking {
                // The request is no load to itself.
                seeking.guard = None;
            }
            match self.ask((&entry, line.entries.len() + 1), look) {
                Err(PlaceRejection::AtPeer(place)) => {
                    line.seek((ticket, entry), place, &self.load, look.now);
                }
                Err(PlaceRejection::Refused(why)) if entry.outwaits(why) => {
                    entry.seeking = entry.seeking.filter(|it| it.until <= look.now);
                    line.again.push_back(ticket);
                    line.entries.insert(ticket, entry);
                }
                Err(PlaceRejection::Refused(why)) => self.settle(entry, Err(why), look.now),
                Ok(placed) => self.settle(entry, Ok(placed), look.now),
            }
        }
    }

    /// Decides whether there is room for `entry`, one of `waiting` requests, and reserves it.
    pub(super) fn ask(
        &self,
        (entry, waiting): (&Waiter, usize),
        look: &QueueScan,
    ) -> Result<Placed, PlaceRejection> {
        let began = entry.candidate.is_traced().then(Instant::now);
        let placed = self.place((entry, waiting), look)?;
        Ok((placed, DecisionTimes::since(began)))
    }

    fn place(
        &self,
        (entry, waiting): (&Waiter, usize),
        look: &QueueScan,
    ) -> Result<PlacedRequest, PlaceRejection> {
        if !look.is_static() {
            let ask = entry.ask_among(waiting, look.now);
            return self.shares.place(&self.decider, &ask, look.now);
        }
        let mut excluded = self.decider.busy_slots(look.now);
        excluded.extend(self.decider.divided_slots());
        excluded.extend(&entry.excluded);
        let ask = RoutingRequest {
            room: Room::Here,
            ..entry.candidate.ask(&excluded)
        };
        match self.shares.place(&self.decider, &ask, look.now) {
            // Some excluded backends will have room later.
            Err(PlaceRejection::Refused(RoutingRejection::AllTried)) => {
                let alone = self.decider.decide(&entry.ask(), look.now);
                let why = alone.err().unwrap_or(RoutingRejection::AtLimit);
                Err(PlaceRejection::Refused(why))
            }
            decided => decided,
        }
    }

    /// Removes the next request that may go from the queue, and returns it with its decision.
    fn next(
        &self,
        line: &mut ModelQueue,
        gate: &mut Gate,
        look: &QueueScan,
    ) -> (Next, Option<Result<Placed, PlaceRejection>>) {
        let ModelQueue { queue, entries, .. } = line;
        let mut asked = None;
        let counters = self.counters(look.pricing);
        let next = queue.next(look.now_ms, &counters, gate, |waiting| {
            let entry = entries.get(&waiting.ticket);
            let entry = entry.expect("who stands in the queue has an entry");
            match self.ask((entry, entries.len()), look) {
                Err(PlaceRejection::Refused(why)) if entry.outwaits(why) => {
                    if entry.is_selective() {
                        DispatchVerdict::Skip
                    } else {
                        DispatchVerdict::Stop
                    }
                }
                answered => {
                    asked = Some(answered);
                    DispatchVerdict::Go
                }
            }
        });
        (next, asked)
    }

    /// Returns the least counter of users who wait at the priority of `going`, here or at a peer;
    /// `u64::MAX` if there are none.
    fn least(
        &self,
        line: &mut ModelQueue,
        gate: &Gate,
        going: &QueuedRequest,
        look: &QueueScan,
    ) -> u64 {
        let here = line
            .queue
            .backlog(look.now_ms, &self.counters(look.pricing));
        let here = here.filter(|backlog| backlog.priority == going.priority);
        let here = here.map(|backlog| backlog.least_milli);
        let elsewhere = gate.least(going.priority, look.now_ms);
        here.into_iter().chain(elsewhere).min().unwrap_or(u64::MAX)
    }

    /// Records how far the user of `waiting`, whose request goes, is ahead of those who wait.
    pub(super) fn observe_gap(
        &self,
        line: &mut ModelQueue,
        (gate, pace): (&Gate, &mut ServiceRate),
        waiting: &QueuedRequest,
        look: &QueueScan,
    ) {
        let least = self.least(line, gate, waiting, look);
        let figures = self.counters(look.pricing).figures(waiting.user);
        // The order uses this figure, as does `least`.
        let own_milli = match look.rules.order {
            Order::Lcf => figures.served_milli,
            Order::Vtc
            | Order::VtcMaxFair
            | Order::VtcPred
            | Order::Dlpm
            | Order::Rpm
            | Order::Fcfs => figures.counter_milli,
        };
        let peak = &mut pace.peak;
        peak.gap_milli = peak.gap_milli.max(own_milli.saturating_sub(least));
        peak.in_flight = peak.in_flight.max(figures.in_flight);
    }

    fn go(
        &self,
        line: &mut ModelQueue,
        (gate, pace): (&mut Gate, &mut ServiceRate),
        waiting: &QueuedRequest,
        asked: Option<Result<Placed, PlaceRejection>>,
        look: &QueueScan,
    ) {
        let asked = asked.expect("only who was asked about goes");
        let Some(entry) = line.entries.remove(&waiting.ticket) else {
            return;
        };
        let asked = match asked {
            Err(PlaceRejection::AtPeer(place)) => {
                line.seek((waiting.ticket, entry), place, &self.load, look.now);
                return;
            }
            Err(PlaceRejection::Refused(why)) => Err(why),
            Ok(placed) => Ok(placed),
        };
        let batch = asked.as_ref().ok().filter(|_| look.is_static());
        let backend = batch.map(|(placed, _)| placed.decision.backend);
        let tokens_per_block = entry.ask().identity.tail.tokens_per_block;
        self.settle(entry, asked, look.now);
        if let Some(backend) = backend {
            let to = (backend.slot, tokens_per_block);
            self.fill(line, (gate, pace), waiting, to, look);
        }
    }

    pub(super) fn settle(
        &self,
        entry: Waiter,
        asked: Result<Placed, RoutingRejection>,
        now: Instant,
    ) {
        match asked {
            // The client has just left, so no engine receives the request.
            Ok(_) if entry.answer.is_closed() => {
                self.metrics.waiting.dec();
                self.metrics.left(LeaveReason::ClientGone);
            }
            Ok(placed) => {
                let admitted = self.dispatch(placed, &*entry.candidate, now);
                self.metrics.waiting.dec();
                let waited = now.saturating_duration_since(entry.since);
                self.metrics.waited(waited.as_secs_f64());
                // The wait ends after the dispatch, so that the user is never idle in between.
                drop(entry.wait);
                // If the receiver is gone, the drop ends the attempt.
                let _gone = entry.answer.send(Ok(admitted));
            }
            Err(why) => self.refuse(
                entry,
                AdmissionRejection::NoBackend(why),
                LeaveReason::NoBackend,
            ),
        }
    }

    /// Removes empty queues and unused gates, and updates the gauges and whether anything waits.
    fn tidy(&self, queues: &mut ModelQueues, look: &QueueScan) {
        if queues.forget_empty() {
            self.waiting_changed.notify_one();
        }
        self.show_load(queues, look.now_ms);
        let ModelQueues {
            by_model, gates, ..
        } = queues;
        gates.retain(|model, gate| by_model.contains_key(model) || gate.users(look.now_ms) > 0);
        let users = queues.by_model.values().map(|line| line.queue.users_len());
        show(&self.metrics.waiting_users, users.sum::<usize>() as u64);
        show(&self.metrics.gap_tokens, queues.pace.peak.gap_milli / 1000);
        let is_contended = queues.is_contended(look.now_ms);
        if !is_contended {
            // The gauges keep their last values.
            queues.pace.peak = Peak::default();
        }
        self.is_contended
            .store(is_contended, std::sync::atomic::Ordering::Release);
    }
}

impl Admission {
    fn show_load(&self, queues: &ModelQueues, now_ms: u64) {
        let seconds = |ms: u64| Duration::from_millis(ms).as_secs_f64();
        let queues = queues.by_model.values().map(|line| &line.queue);
        let forecasts: Vec<Forecast> = queues.map(|queue| queue.forecast(now_ms)).collect();
        let overloaded = forecasts.iter().filter(|it| it.is_overloaded).count();
        let wait = forecasts.iter().map(|it| it.drain_ms).max();
        let wait_max = forecasts.iter().map(|it| it.wait_ms_max).min();
        let metrics = &self.metrics;
        show(&metrics.overloaded, overloaded as u64);
        metrics.predicted_wait.set(seconds(wait.unwrap_or(0)));
        metrics.wait_max.set(seconds(wait_max.unwrap_or(0)));
    }
}

fn show(gauge: &prometheus_client::metrics::gauge::Gauge, number: u64) {
    gauge.set(i64::try_from(number).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_rate_covers_one_window() {
        let mut pace = ServiceRate::default();
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let none = LargestRequest::default;
        let some = LargestRequest {
            request: 77,
            output: 7,
        };
        assert_eq!(pace.look(500, none, at(0)), 0);
        assert_eq!(pace.look(900, none, at(100)), 0, "too short to tell");
        assert_eq!(pace.look(2500, none, at(1000)), 2000);
        assert_eq!(pace.look(20_500, || some, at(10_000)), 2000);
        assert_eq!(pace.largest_before, some, "of the window that is over");
        assert_eq!(
            pace.look(20_500, none, at(10_100)),
            2000,
            "of the one before"
        );
        assert_eq!(pace.look(20_500, none, at(11_000)), 0);
    }
}
