//! Requests that wait at one replica for an engine, with the queue and the gate of production code.
//!
//! This module replaces only the code of `api::admission` around those parts: it assigns tickets,
//! and measures the inputs of the gate's slack.

use std::collections::BTreeMap;

use state::admission::{
    Backlog, Batching, CODEL_INTERVAL_MS, Counters, DispatchVerdict, Expired, Gate, Next, Pricing,
    Queue, QueueRejection, QueueSettings, QueuedRequest, slack_tokens,
};
use state::capacity::ModelDemand;
use state::ids::{ReplicaId, Ticket};

use super::clock::unix_ms;
use super::events::Micros;
use super::plan::SimPlan;
use super::replica::SimReplica;

/// Maximum age of the replicas' knowledge of each other's dispatches, beyond the simulated lags: a
/// flush interval plus a report interval, in milliseconds.
const LAG_MS: u64 = 40;
/// Period over which the rate of service is measured, in microseconds.
const RATE_WINDOW: Micros = 10_000_000;

/// Queue of the requests that wait at one replica.
pub struct SimQueue {
    /// Number of bins.
    bins: u16,
    lag_ms: u64,
    replicas: u64,
    queue: Queue,
    /// Numbers of the waiting requests by ticket.
    requests: BTreeMap<Ticket, usize>,
    /// First request of the static batch that is being formed; `None` between batches.
    batch: Option<QueuedRequest>,
    is_static: bool,
    gate: Gate,
    last_ticket: u64,
    /// Highest price of a request that arrived at this replica.
    largest: u64,
    /// Start of the current measuring window, and the number of priced tokens by then.
    window: (Micros, u64),
    /// Number of priced tokens per second in the previous window.
    rate: u64,
    /// Highest slack so far.
    slack_most: u64,
    /// Whether the gate was closed at the last call.
    is_held: bool,
    /// Time at which the response time is measured next.
    next_measure: Micros,
}

/// A request that enters the queue.
#[derive(Debug, Clone, Copy)]
pub struct WaitingRequest {
    /// Number of the request.
    pub request: usize,
    /// Sort key in the queue, without its ticket, which [`SimQueue::push`] sets.
    pub waiting: QueuedRequest,
    /// Price of the request's prompt and output tokens, as known at arrival.
    pub price: u64,
}

/// Decision on which request is admitted next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextAdmission {
    /// The request with this number is admitted.
    Go(usize),
    /// A request at another replica has precedence. Retry after this many microseconds.
    Held(Micros),
    /// No request is admitted.
    Nobody,
}

impl SimQueue {
    /// Creates the empty queue of a replica. `lag` is the delay of its peers' reports.
    #[must_use]
    pub fn new(plan: &SimPlan, pricing: Pricing, lag: Micros) -> Self {
        let settings = &plan.admission;
        let rules = QueueSettings {
            target_ms: u64::try_from(plan.codel_target.as_millis()).unwrap_or(u64::MAX),
            ..QueueSettings::of(settings, pricing)
        };
        Self {
            bins: settings.bins,
            lag_ms: LAG_MS + lag / 1000,
            replicas: plan.replicas.into(),
            queue: Queue::new(rules),
            requests: BTreeMap::new(),
            batch: None,
            is_static: settings.batching == Batching::Static,
            gate: Gate::default(),
            last_ticket: 0,
            largest: 0,
            window: (0, 0),
            rate: 0,
            slack_most: 0,
            is_held: false,
            next_measure: 0,
        }
    }

    /// Queues a request and returns its ticket.
    ///
    /// # Errors
    /// If the queue is full, or the request would wait too long.
    pub fn push(
        &mut self,
        guest: WaitingRequest,
        counters: &impl Counters,
    ) -> Result<Ticket, QueueRejection> {
        self.largest = self.largest.max(guest.price);
        let now_ms = guest.waiting.arrived_ms;
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        let waiting = QueuedRequest {
            ticket,
            ..guest.waiting
        };
        self.queue.push(waiting, now_ms, counters, &self.gate)?;
        self.requests.insert(ticket, guest.request);
        Ok(ticket)
    }

    /// Removes a request whose client has left.
    pub fn left(&mut self, ticket: Ticket, now: Micros) {
        self.queue.left(ticket, unix_ms(now));
        self.requests.remove(&ticket);
    }

    /// Removes the requests that have waited too long and returns their numbers.
    pub fn expire(&mut self, now: Micros) -> Vec<usize> {
        let expired = self.queue.expire(unix_ms(now)).into_iter();
        let mut request = |it: Expired| self.requests.remove(&it.waiting.ticket);
        expired
            .map(|it| request(it).expect("who waits is known"))
            .collect()
    }

    /// Measures the response time of the engines by Little's law, if due. `running` returns the
    /// number of this replica's running requests.
    pub fn measure(&mut self, now: Micros, running: impl FnOnce() -> u64) {
        if now < self.next_measure {
            return;
        }
        self.next_measure = now + CODEL_INTERVAL_MS * 1000;
        if let Some(rate_milli @ 1..) = self.queue.forecast(unix_ms(now)).rate_milli {
            self.queue
                .set_service_ms(running() * 1_000_000 / rate_milli);
        }
    }

    /// Returns the expected time until the queue is empty, in milliseconds.
    #[must_use]
    pub fn drain_ms(&self, now: Micros) -> u64 {
        self.queue.forecast(unix_ms(now)).drain_ms
    }

    /// Begins a static batch: [`SimQueue::next`] then admits requests of one bin.
    pub fn begin_batch(&mut self) {
        self.batch = None;
    }

    /// Admits the next request if an engine has room and no other replica has precedence. With static
    /// batching, the next one of the batch.
    pub fn next(&mut self, now: Micros, replica: &SimReplica, has_room: bool) -> NextAdmission {
        if !has_room && !self.is_held {
            return NextAdmission::Nobody; // Nothing to tell the gate either.
        }
        let slack = self.slack(now, replica.priced_tokens());
        self.gate.set_slack(slack);
        self.slack_most = self.slack_most.max(slack);
        let verdict = if has_room {
            DispatchVerdict::Go
        } else {
            DispatchVerdict::Stop
        };
        let (now_ms, counters, gate) = (unix_ms(now), replica.counters(), &mut self.gate);
        let next = match &self.batch {
            Some(first) => {
                let next = (self.queue).next_alike(first, now_ms, &counters, gate, |_| verdict);
                next.map_or(Next::NoRoom, Next::Go)
            }
            None => self.queue.next(now_ms, &counters, gate, |_| verdict),
        };
        self.is_held = matches!(next, Next::Held { .. });
        match next {
            Next::Go(waiting) => {
                if self.is_static {
                    self.batch.get_or_insert(waiting);
                }
                let request = self.requests.remove(&waiting.ticket);
                NextAdmission::Go(request.expect("who waits is known"))
            }
            Next::Held { retry_ms } => NextAdmission::Held(retry_ms * 1000),
            Next::NoRoom | Next::Empty => NextAdmission::Nobody,
        }
    }

    /// Returns the gate's slack `G`, measured as in production from the tokens that this replica
    /// priced in the last window.
    fn slack(&mut self, now: Micros, priced: u64) -> u64 {
        let (since, before) = self.window;
        let age = now.saturating_sub(since);
        if age >= RATE_WINDOW {
            self.rate = (priced - before) * 1_000_000 / age;
            self.window = (now, priced);
        }
        let users = u32::try_from(self.queue.users_len()).unwrap_or(u32::MAX);
        let users = users.saturating_add(self.gate.users(unix_ms(now)));
        slack_tokens(self.largest, self.rate * self.replicas, self.lag_ms, users)
    }

    /// Returns the highest slack of the gate so far.
    #[must_use]
    pub fn slack_most(&self) -> u64 {
        self.slack_most
    }

    /// Returns the backlog to report to peers, if requests wait.
    pub fn backlog(&mut self, now: Micros, counters: &impl Counters) -> Option<Backlog> {
        self.queue.backlog(unix_ms(now), counters)
    }

    /// Records the backlog that a peer reported; `None` if nothing waits there.
    pub fn told(&mut self, peer: ReplicaId, backlog: Option<Backlog>, now: Micros) {
        self.gate.record_report(peer, backlog, unix_ms(now));
    }

    /// Returns whether users wait at other replicas and may have precedence.
    #[must_use]
    pub fn is_contended(&self, now: Micros) -> bool {
        self.gate.users(unix_ms(now)) > 0
    }

    /// Returns what waits, as replicas report it to the log.
    #[must_use]
    pub fn demand(&self) -> ModelDemand {
        let tokens = self.queue.iter().map(|it| u64::from(it.input_tokens));
        ModelDemand {
            waiting: u32::try_from(self.len()).unwrap_or(u32::MAX),
            running: 0,
            waiting_tokens: tokens.sum(),
        }
    }

    /// Returns whether a request waits for an engine that is being started.
    #[must_use]
    pub fn holds_any(&self) -> bool {
        self.queue.holds_any()
    }

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of waiting requests by bin.
    #[must_use]
    pub fn by_bin(&self) -> Vec<usize> {
        let bins = self.queue.bins();
        let waiting = |bin| bins.get(&bin).copied().unwrap_or_default();
        (0..self.bins).map(waiting).collect()
    }
}
