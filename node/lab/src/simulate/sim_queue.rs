//! Requests that wait at one replica for an engine, in the order of production code: with its queue
//! and gate for continuous batching, with its bins for static batching.
//!
//! This module replaces only the code of `api::admission` around those parts: it assigns tickets,
//! and measures the inputs of the gate's slack.

use std::collections::BTreeMap;

use state::admission::{
    AdmissionSettings, Backlog, Batching, CODEL_INTERVAL_MS, Counters, DispatchVerdict, Expired,
    Gate, Next, Pricing, Queue, QueueRejection, QueueSettings, QueuedRequest, slack_tokens,
};
use state::ids::{ReplicaId, Ticket};
use state::outputs::batch::{BatchRoom, BinQueues, BinnedRequest, SelectionRule};

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
    settings: AdmissionSettings,
    lag_ms: u64,
    replicas: u64,
    line: QueueKind,
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

enum QueueKind {
    Ordered {
        queue: Box<Queue>,
        /// Numbers of the waiting requests by ticket.
        requests: BTreeMap<Ticket, usize>,
    },
    Batches(BinQueues<usize>),
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
        let line = match settings.batching {
            Batching::Continuous => QueueKind::Ordered {
                queue: Box::new(Queue::new(rules)),
                requests: BTreeMap::new(),
            },
            Batching::Static => QueueKind::Batches(BinQueues::new(settings.bins)),
        };
        Self {
            settings: settings.clone(),
            lag_ms: LAG_MS + lag / 1000,
            replicas: plan.replicas.into(),
            line,
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
        match &mut self.line {
            QueueKind::Ordered { queue, requests } => {
                let waiting = QueuedRequest {
                    ticket,
                    ..guest.waiting
                };
                queue.push(waiting, now_ms, counters, &self.gate)?;
                requests.insert(ticket, guest.request);
            }
            QueueKind::Batches(bins) => {
                let QueuedRequest {
                    input_tokens,
                    predicted_output,
                    bin,
                    ..
                } = guest.waiting;
                let candidate = BinnedRequest {
                    arrived_ms: now_ms,
                    tokens: u64::from(input_tokens) + u64::from(predicted_output),
                    item: guest.request,
                };
                bins.push(bin, candidate);
            }
        }
        Ok(ticket)
    }

    /// Removes a request whose client has left.
    pub fn left(&mut self, ticket: Ticket, now: Micros) {
        if let QueueKind::Ordered { queue, requests } = &mut self.line {
            queue.left(ticket, unix_ms(now));
            requests.remove(&ticket);
        }
    }

    /// Removes the requests that have waited too long and returns their numbers.
    pub fn expire(&mut self, now: Micros) -> Vec<usize> {
        let QueueKind::Ordered { queue, requests } = &mut self.line else {
            return Vec::new();
        };
        let expired = queue.expire(unix_ms(now)).into_iter();
        let mut request = |it: Expired| requests.remove(&it.waiting.ticket);
        expired
            .map(|it| request(it).expect("who waits is known"))
            .collect()
    }

    /// Measures the response time of the engines by Little's law, if due. `running` returns the
    /// number of this replica's running requests.
    pub fn measure(&mut self, now: Micros, running: impl FnOnce() -> u64) {
        let QueueKind::Ordered { queue, .. } = &mut self.line else {
            return;
        };
        if now < self.next_measure {
            return;
        }
        self.next_measure = now + CODEL_INTERVAL_MS * 1000;
        if let Some(rate_milli @ 1..) = queue.forecast(unix_ms(now)).rate_milli {
            queue.set_service_ms(running() * 1_000_000 / rate_milli);
        }
    }

    /// Returns the expected time until the queue is empty, in milliseconds; 0 for static batching.
    #[must_use]
    pub fn drain_ms(&self, now: Micros) -> u64 {
        match &self.line {
            QueueKind::Ordered { queue, .. } => queue.forecast(unix_ms(now)).drain_ms,
            QueueKind::Batches(_) => 0,
        }
    }

    /// Admits the next request if an engine has room and no other replica has precedence. Supports
    /// only continuous batching.
    pub fn next(&mut self, now: Micros, replica: &SimReplica, has_room: bool) -> NextAdmission {
        if !has_room && !self.is_held {
            return NextAdmission::Nobody; // Nothing to tell the gate either.
        }
        let slack = self.slack(now, replica.priced_tokens());
        let QueueKind::Ordered { queue, requests } = &mut self.line else {
            return NextAdmission::Nobody;
        };
        self.gate.set_slack(slack);
        self.slack_most = self.slack_most.max(slack);
        let verdict = if has_room {
            DispatchVerdict::Go
        } else {
            DispatchVerdict::Stop
        };
        let next = queue.next(unix_ms(now), &replica.counters(), &mut self.gate, |_| {
            verdict
        });
        self.is_held = matches!(next, Next::Held { .. });
        match next {
            Next::Go(waiting) => {
                let request = requests.remove(&waiting.ticket);
                NextAdmission::Go(request.expect("who waits is known"))
            }
            Next::Held { retry_ms } => NextAdmission::Held(retry_ms * 1000),
            Next::NoRoom | Next::Empty => NextAdmission::Nobody,
        }
    }

    /// Forms a batch of at most `requests` requests for an idle engine, as production code does
    /// ([`BinQueues::form`]). Supports only static batching.
    pub fn form_batch(&mut self, now: Micros, requests: u32) -> Vec<usize> {
        let QueueKind::Batches(bins) = &mut self.line else {
            return Vec::new();
        };
        let rule = SelectionRule {
            selection: self.settings.bin_selection,
            age_ms_max: self.settings.bin_max_age_ms,
        };
        let room = BatchRoom {
            requests,
            tokens: None,
        };
        let batch = bins.form(unix_ms(now), &rule, &room);
        let candidates = batch.into_iter().flat_map(|batch| batch.candidates);
        candidates.map(|candidate| candidate.item).collect()
    }

    /// Reassigns waiting requests to the bins that `bin_of` returns.
    pub fn rebin(&mut self, bin_of: impl Fn(&usize) -> u16) {
        if let QueueKind::Batches(bins) = &mut self.line {
            bins.rebin(self.settings.bins, bin_of);
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
        let here = match &self.line {
            QueueKind::Ordered { queue, .. } => queue.users_len(),
            QueueKind::Batches(_) => 0,
        };
        let users = u32::try_from(here).unwrap_or(u32::MAX);
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
        match &mut self.line {
            QueueKind::Ordered { queue, .. } => queue.backlog(unix_ms(now), counters),
            QueueKind::Batches(_) => None,
        }
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

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.line {
            QueueKind::Ordered { queue, .. } => queue.len(),
            QueueKind::Batches(bins) => bins.waiting().iter().sum(),
        }
    }

    /// Returns whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of waiting requests by bin.
    #[must_use]
    pub fn by_bin(&self) -> Vec<usize> {
        match &self.line {
            QueueKind::Ordered { queue, .. } => queue.bins().into_values().collect(),
            QueueKind::Batches(bins) => bins.waiting(),
        }
    }
}
