//! Admits requests. A request waits here while every backend is at its limit, or while it is the
//! turn of others. No other module queues requests for a backend.
//!
//! Each model has one [`Queue`](state::admission::Queue). By default it is fair over the whole
//! cluster: ordered by replicated counters, behind a gate that knows what waits at other replicas
//! (docs/internals/fairness.md). While nothing waits anywhere, a request skips the queues after one
//! atomic load.
//!
//! One loop, [`Admission::run`], serves the queues: when a request ends here, a peer reports its
//! load or backlog, or a request begins to wait. While something waits it also runs every 20 ms, to
//! find changes without a signal (a new limit, a recovered backend, a silent peer). It decides *and
//! dispatches* each request before it considers the next one. So one request goes per free place,
//! none is woken in vain, and no signal is lost between decision and dispatch.
//!
//! A request whose backend did not run it has had its turn. It waits ahead of requests that have
//! not, in order of its return, until another backend has room. So does a request whose backend has
//! room, but at a place that a peer holds: the peer hands the place over, or the request takes
//! another backend once the wait costs more than the prefix is worth.
//!
//! With `batching = "static"`, every request is queued. A backend receives requests only while it
//! runs none, and then a batch from one bin of predicted output length at once.

pub mod backlog;
mod demand;
mod hold;
mod metrics;
mod model_queue;
mod preview;
mod quota;
mod serve;
mod static_batch;
mod summaries;
mod waiter;
mod wanted_places;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use state::StateView;
use state::admission::{CODEL_TARGET_MS, Gate, Overload, QueueRejection, QueuedRequest};
use state::ids::{ModelKey, ReplicaId, Slot, Ticket};
use state::prefix::model_key;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use demand::{DemandSchedule, wants_first};
pub use hold::HoldAtZero;
pub use metrics::AdmissionMetrics;
pub use model_queue::{ModelQueueView, WaitingSummary, WaitingUser};
pub use preview::{AdmissionPreview, LimitPreview};
pub(crate) use quota::LimitsLeft;
pub use waiter::{AdmissionRejection, AdmissionRequest, AdmissionTry, Admitted, DecisionTimes};

use crate::base::clock::{Clock, LogTime};
use crate::routing::{
    Attempt, Decider, Decision, Dispatcher, LoadReportError, LoadTable, PeerPlace, Permits,
    PlaceRejection, PlacedRequest, Router, RoutingRejection, Shares, WantedPlaces,
};
use demand::DemandMeter;
use metrics::LeaveReason;
use model_queue::ModelQueue;
use waiter::{QueueTicket, UserWaitGuard, Waiter};

/// Interval at which queues are served while something waits and no signal arrives.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Maximum number of models whose overload statistics are kept after their queues are empty.
const LEARNT_MAX: usize = 64;

/// The queues of one replica, and the parts that admit their requests.
pub struct Admission {
    view: Arc<StateView>,
    decider: Arc<Decider>,
    dispatcher: Arc<Dispatcher>,
    load: Arc<LoadTable>,
    shares: Arc<Shares>,
    permits: Arc<Permits>,
    queues: Mutex<ModelQueues>,
    /// Whether a request waits for any model, here or at a peer. Read by the fast path.
    is_contended: AtomicBool,
    is_leaving: AtomicBool,
    last_ticket: AtomicU64,
    /// Signal that the first request of a model has begun to wait, or that the last one is gone.
    waiting_changed: Notify,
    /// Time at which the queues' clock, in milliseconds, reads 0.
    epoch: Instant,
    /// Maximum wait in overload, in milliseconds.
    target_ms: u64,
    metrics: AdmissionMetrics,
    /// For how long requests for models without engines wait.
    holds: HoldAtZero,
    demand: DemandMeter,
    /// Clock by which the users' rate limits are checked.
    log_time: LogTime,
    /// Wall clock by which the users' budgets are checked.
    clock: Clock,
}

/// Returns the time after which a response is of no use to the client, on the queues' clock, if
/// responses take `service_ms`; `None` if the client sets no deadline.
fn due_ms(candidate: &dyn AdmissionRequest, service_ms: u64, now_ms: u64) -> Option<u64> {
    let wait_max = candidate.wait_max(Duration::from_millis(service_ms))?;
    let wait_ms_max = u64::try_from(wait_max.as_millis()).unwrap_or(u64::MAX);
    Some(now_ms.saturating_add(wait_ms_max))
}

#[derive(Default)]
struct ModelQueues {
    /// Queues of the models with requests that wait here.
    by_model: BTreeMap<ModelKey, ModelQueue>,
    /// Gates of the models with requests that wait here or at a peer.
    gates: BTreeMap<ModelKey, Gate>,
    /// Model that was served first in the last scan. The next scan starts after it.
    served_first: ModelKey,
    pace: serve::ServiceRate,
    /// Requests that wait for places, by backend, collected during a scan.
    wanted: WantedPlaces,
    /// Overload statistics of models without a queue.
    learnt: BTreeMap<ModelKey, Overload>,
}

impl ModelQueues {
    fn is_contended(&self, now_ms: u64) -> bool {
        !self.by_model.is_empty() || self.gates.values().any(|gate| gate.users(now_ms) > 0)
    }

    /// Removes the empty queues and keeps their statistics. Returns whether any was removed.
    fn forget_empty(&mut self) -> bool {
        let empty = self.by_model.extract_if(.., |_, line| line.is_empty());
        let mut is_any = false;
        for (model, line) in empty {
            is_any = true;
            if self.learnt.len() >= LEARNT_MAX {
                self.learnt.pop_first();
            }
            self.learnt.insert(model, line.queue.into_overload());
        }
        is_any
    }
}

impl Admission {
    /// Creates an instance with empty queues that dispatches requests through `router`.
    #[must_use]
    pub fn new(router: &Router) -> Self {
        Self {
            view: Arc::clone(router.view()),
            decider: Arc::clone(router.decider()),
            dispatcher: Arc::clone(router.dispatcher()),
            load: Arc::clone(router.load()),
            shares: Arc::clone(router.shares()),
            permits: Arc::clone(router.permits()),
            queues: Mutex::default(),
            is_contended: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            last_ticket: AtomicU64::new(0),
            waiting_changed: Notify::new(),
            epoch: Instant::now(),
            target_ms: CODEL_TARGET_MS,
            metrics: AdmissionMetrics::default(),
            holds: HoldAtZero::default(),
            demand: DemandMeter::default(),
            log_time: LogTime::default(),
            clock: router.clock().clone(),
        }
    }

    /// Replaces the maximum wait in overload, `CODEL_TARGET_MS` by default.
    #[must_use]
    pub fn codel_target(mut self, target: Duration) -> Self {
        self.target_ms = u64::try_from(target.as_millis()).unwrap_or(u64::MAX);
        self
    }

    /// Returns the admission metrics. Register them once.
    #[must_use]
    pub fn metrics(&self) -> &AdmissionMetrics {
        &self.metrics
    }

    /// Finds a backend for a request and dispatches it, after a wait if there is no room.
    /// `excluded` lists backends that cannot run it, or did not when tried. Cancel safe: dropping
    /// the future removes the request from the queue.
    ///
    /// # Errors
    /// Returns an [`AdmissionRejection`] if the user exceeds a limit, no backend can take the
    /// request, the queue is full, the wait is or was too long, or this replica is leaving.
    pub async fn admit<C: AdmissionRequest>(
        self: &Arc<Self>,
        candidate: &Arc<C>,
        (excluded, which): (&[Slot], AdmissionTry),
    ) -> Result<Admitted, AdmissionRejection> {
        let ask = candidate.ask(excluded);
        if which == AdmissionTry::First {
            self.take_permit(&**candidate).await.map_err(|over| {
                self.metrics.left(LeaveReason::OverLimit);
                AdmissionRejection::OverLimit(over)
            })?;
        }
        let now = Instant::now();
        let may_go = !self.is_contended.load(Ordering::Acquire)
            || which == AdmissionTry::Again
            || self.is_free(ask.model, now);
        let mut sought = None;
        if may_go && !self.is_batching() {
            let began = candidate.is_traced().then(Instant::now);
            match self.shares.place(&self.decider, &ask, now) {
                Ok(placed) => {
                    let placed = (placed, DecisionTimes::since(began));
                    return Ok(self.dispatch(placed, &**candidate, now));
                }
                Err(PlaceRejection::AtPeer(place)) => sought = Some(place),
                Err(PlaceRejection::Refused(RoutingRejection::AtLimit)) => {}
                Err(PlaceRejection::Refused(why)) if self.is_held(&ask, which, why) => {}
                Err(PlaceRejection::Refused(why)) => {
                    return Err(AdmissionRejection::NoBackend(why));
                }
            }
        }
        if which == AdmissionTry::Now {
            return Err(AdmissionRejection::NoBackend(RoutingRejection::AtLimit));
        }
        let mut place = self.queue(candidate, (excluded, which), sought, now)?;
        place.turn().await
    }

    fn dispatch(
        &self,
        (placed, decided): (PlacedRequest, Option<DecisionTimes>),
        candidate: &dyn AdmissionRequest,
        now: Instant,
    ) -> Admitted {
        let ask = candidate.ask(&[]);
        self.demand.started(ask.model);
        let terms = candidate.terms();
        let decision = placed.decision.clone();
        let mut attempt = self.dispatcher.dispatch_to(placed, &ask, terms, now);
        attempt.holds(candidate.permit().get().cloned());
        Admitted::new(decision, attempt, decided)
    }

    /// Whether no request waits for `model`, here or at a peer.
    fn is_free(&self, model: &str, now: Instant) -> bool {
        let key = self.model_key(model);
        let queues = self.lock();
        let users = |gate: &Gate| gate.users(self.ms_of(now));
        !queues.by_model.contains_key(&key) && queues.gates.get(&key).map_or(0, users) == 0
    }

    fn model_key(&self, model: &str) -> ModelKey {
        model_key(self.view.registry().hash_seed, model)
    }

    fn lock(&self) -> MutexGuard<'_, ModelQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `now` on the queues' clock, in milliseconds.
    fn ms_of(&self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.epoch);
        u64::try_from(passed.as_millis()).unwrap_or(u64::MAX)
    }

    fn queue<C: AdmissionRequest>(
        self: &Arc<Self>,
        candidate: &Arc<C>,
        (excluded, which): (&[Slot], AdmissionTry),
        sought: Option<PeerPlace>,
        now: Instant,
    ) -> Result<QueueTicket, AdmissionRejection> {
        let ticket = Ticket(self.last_ticket.fetch_add(1, Ordering::Relaxed) + 1);
        let ask = candidate.ask(excluded);
        let hold_ms = (which == AdmissionTry::First).then(|| self.hold_ms(ask.model));
        let hold_ms = hold_ms.flatten();
        // Clients must not create queues for unknown models.
        if hold_ms.is_none() && !self.view.registry().is_served(ask.model) {
            return Err(AdmissionRejection::NoBackend(
                RoutingRejection::UnknownModel,
            ));
        }
        // Those who come while an engine is started for others are waiting for it too.
        let is_at_zero = hold_ms.is_some() && self.lack(ask.model).is_some();
        let model = self.model_key(ask.model);
        let (answer, turn) = oneshot::channel();
        let mut entry = Waiter {
            candidate: Arc::clone(candidate) as Arc<dyn AdmissionRequest>,
            excluded: excluded.to_vec(),
            since: now,
            wait: None,
            seeking: None,
            hold_ms,
            answer,
        };
        if let Some(place) = sought {
            entry.seek(place, &self.load, now);
        }
        if which == AdmissionTry::First && sought.is_none() {
            let waiting = self.waiting(ticket, model, &**candidate, self.ms_of(now));
            self.join(model, waiting, (entry, is_at_zero))?;
        } else {
            self.rejoin(model, ticket, entry)?;
        }
        self.is_contended.store(true, Ordering::Release);
        self.load.less().notify_one();
        Ok(QueueTicket {
            admission: Arc::clone(self),
            model,
            ticket,
            turn,
        })
    }

    /// Returns the request as the queue orders it.
    fn waiting(
        &self,
        ticket: Ticket,
        model: ModelKey,
        candidate: &dyn AdmissionRequest,
        now_ms: u64,
    ) -> QueuedRequest {
        let ask = candidate.ask(&[]);
        let user = ask.user.key(self.view.registry().hash_seed);
        let matched_blocks = self.decider.best_match(&ask);
        let cached = matched_blocks.saturating_mul(ask.identity.tail.tokens_per_block);
        let outputs = self.view.outputs();
        let predicted = outputs.predict(user, model, candidate.tokens_max());
        QueuedRequest {
            ticket,
            user,
            tree: self.root(ask.session),
            priority: candidate.priority(),
            arrived_ms: now_ms,
            input_tokens: ask.identity.tokens.saturating_sub(cached),
            predicted_output: predicted.tokens,
            bin: outputs.bin_of(model, predicted.tokens),
            matched_blocks,
            due_ms: None,
            hold_ms: None,
            is_selective: candidate.is_selective(),
        }
    }

    fn join(
        &self,
        model: ModelKey,
        mut waiting: QueuedRequest,
        (mut entry, is_at_zero): (Waiter, bool),
    ) -> Result<(), AdmissionRejection> {
        let (rules, pricing) = self.rules();
        let now_ms = waiting.arrived_ms;
        let mut queues = self.lock();
        if self.is_leaving.load(Ordering::Acquire) {
            self.metrics.left(LeaveReason::Leaving);
            return Err(AdmissionRejection::Leaving);
        }
        let ModelQueues {
            by_model,
            gates,
            learnt,
            ..
        } = &mut *queues;
        let gate = gates.entry(model).or_default();
        let line = by_model.entry(model).or_insert_with(|| {
            let learnt = learnt.remove(&model).unwrap_or_default();
            ModelQueue::new(entry.model(), rules, learnt)
        });
        waiting.due_ms = due_ms(&*entry.candidate, line.queue.service_ms(), now_ms);
        entry.hold_ms = entry
            .hold_ms
            .filter(|_| is_at_zero || line.queue.holds_any());
        waiting.hold_ms = entry.hold_ms;
        let counters = self.counters(pricing);
        match line.queue.push(waiting, now_ms, &counters, gate) {
            Ok(()) => {
                let wait = UserWaitGuard::begin(&self.dispatcher, entry.ask().user);
                entry.wait = Some(wait);
                line.entries.insert(waiting.ticket, entry);
                self.metrics.waiting.inc();
                if line.queue.len() == 1 {
                    // Order matters: a woken reporter sends nothing while `is_contended` is false.
                    self.is_contended.store(true, Ordering::Release);
                    self.waiting_changed.notify_one();
                    self.demand.begins();
                }
                Ok(())
            }
            Err(QueueRejection::Full) => {
                self.metrics.left(LeaveReason::QueueFull);
                let retry_after_ms = line.queue.forecast(now_ms).drain_ms;
                Err(AdmissionRejection::QueueFull { retry_after_ms })
            }
            Err(QueueRejection::TooLate {
                wait_ms,
                wait_ms_max,
            }) => {
                self.metrics.left(LeaveReason::TooLate);
                Err(AdmissionRejection::TooLate {
                    wait_ms,
                    wait_ms_max,
                })
            }
        }
    }

    /// Queues a request that has had its turn, or whose place is a peer's, ahead of those that have
    /// not.
    fn rejoin(
        &self,
        model: ModelKey,
        ticket: Ticket,
        entry: Waiter,
    ) -> Result<(), AdmissionRejection> {
        let (rules, _) = self.rules();
        let mut queues = self.lock();
        if self.is_leaving.load(Ordering::Acquire) {
            self.metrics.left(LeaveReason::Leaving);
            return Err(AdmissionRejection::Leaving);
        }
        let ModelQueues {
            by_model, learnt, ..
        } = &mut *queues;
        let line = by_model.entry(model).or_insert_with(|| {
            let learnt = learnt.remove(&model).unwrap_or_default();
            ModelQueue::new(entry.model(), rules, learnt)
        });
        line.again.push_back(ticket);
        line.entries.insert(ticket, entry);
        self.metrics.waiting.inc();
        Ok(())
    }

    /// Removes a request whose client has left. Has no effect if it no longer waits.
    fn leave(&self, model: ModelKey, ticket: Ticket) {
        let now = Instant::now();
        let mut queues = self.lock();
        let Some(line) = queues.by_model.get_mut(&model) else {
            return;
        };
        if line.left(ticket, self.ms_of(now)).is_some() {
            self.metrics.waiting.dec();
            self.metrics.left(LeaveReason::ClientGone);
            if queues.forget_empty() {
                self.waiting_changed.notify_one();
            }
        }
    }

    /// Rejects all waiting requests, because this replica leaves. Later requests are not queued.
    pub fn reject_all(&self) {
        self.is_leaving.store(true, Ordering::Release);
        let mut queues = self.lock();
        for (_, mut line) in std::mem::take(&mut queues.by_model) {
            for (_, entry) in std::mem::take(&mut line.entries) {
                self.refuse(entry, AdmissionRejection::Leaving, LeaveReason::Leaving);
            }
        }
        self.waiting_changed.notify_one();
    }

    fn refuse(&self, entry: Waiter, why: AdmissionRejection, left: LeaveReason) {
        self.metrics.waiting.dec();
        self.metrics.left(left);
        // The receiver may have been dropped.
        let _gone = entry.answer.send(Err(why));
    }

    /// Serves the queues until `stop` is cancelled. Call this once per instance.
    pub async fn run(&self, stop: CancellationToken) {
        let less = Arc::clone(self.load.less());
        let mut look_in = LOOK_EVERY;
        loop {
            let is_contended = self.is_contended.load(Ordering::Acquire);
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = less.notified() => {}
                () = tokio::time::sleep(look_in), if is_contended => {}
            }
            if self.is_contended.load(Ordering::Acquire) {
                look_in = self.serve(Instant::now()).min(LOOK_EVERY);
            }
        }
    }

    /// Replaces what is known of the backlog at `peer`. [`backlog::encode`] describes the report.
    ///
    /// # Errors
    /// Returns a [`LoadReportError`] if `report` is invalid, and keeps the earlier report.
    pub fn apply_peer_report(&self, peer: ReplicaId, report: &[u8]) -> Result<(), LoadReportError> {
        if report.is_empty() && !self.is_contended.load(Ordering::Acquire) {
            return Ok(());
        }
        let told = backlog::decode(report)?;
        let now_ms = self.ms_of(Instant::now());
        let mut queues = self.lock();
        let mut is_news = false;
        for (model, gate) in &mut queues.gates {
            if told
                .binary_search_by_key(model, |(model, _)| *model)
                .is_err()
            {
                is_news |= gate.record_report(peer, None, now_ms);
            }
        }
        for (model, backlog) in told {
            let gate = queues.gates.entry(model).or_default();
            is_news |= gate.record_report(peer, Some(backlog), now_ms);
        }
        if is_news {
            let is_contended = queues.is_contended(now_ms);
            self.is_contended.store(is_contended, Ordering::Release);
            self.load.less().notify_one();
        }
        Ok(())
    }

    /// Returns this replica's backlog report for its peers, as encoded by [`backlog::encode`].
    #[must_use]
    pub fn report(&self) -> Vec<u8> {
        if !self.is_contended.load(Ordering::Acquire) {
            return Vec::new();
        }
        let (_, pricing) = self.rules();
        let counters = self.counters(pricing);
        let now_ms = self.ms_of(Instant::now());
        let mut queues = self.lock();
        let backlogs: Vec<_> = queues
            .by_model
            .iter_mut()
            .filter_map(|(model, line)| Some((*model, line.queue.backlog(now_ms, &counters)?)))
            .collect();
        backlog::encode(&backlogs)
    }

    /// Waits until the first request of a model begins to wait or the last one is gone.
    pub async fn waiting_changed(&self) {
        self.waiting_changed.notified().await;
    }

    /// Dispatches an admitted request to another backend, even beyond its limit. A gateway sent the
    /// request there at `then`, because it could not reach the first backend.
    pub(crate) fn redispatch(
        &self,
        decision: &Decision,
        candidate: &dyn AdmissionRequest,
        then: Instant,
    ) -> Attempt {
        let terms = candidate.terms();
        let ask = candidate.ask(&[]);
        let mut attempt = self.dispatcher.dispatch(decision, &ask, terms, then);
        attempt.holds(candidate.permit().get().cloned());
        attempt
    }
}
