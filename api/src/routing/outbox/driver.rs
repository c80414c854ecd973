//! Proposes the outbox to the log, and backs off while the log makes no progress.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use state::command::{Charge, Committed, EngineFacts, Envelope, Item};
use state::ids::{BackendRef, LogIndex, UserKey};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::outcome::AfterProposal;
use super::{Outbox, OutboxStatus};
use crate::base::clock::Clock;
use crate::ports::{Propose, ProposeError};

/// First pause before an envelope is proposed again. Each further pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Divisor of the flush interval: the quotient is the minimum time between two urgent envelopes.
const URGENT_PART: u32 = 4;
/// Number of envelopes that may follow each other at once after a pause.
const BURST: u32 = 8;
/// Longest pause before an envelope is proposed again.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The outbox, shared by its writers and the driver. The lock is held only briefly.
pub struct SharedOutbox {
    outbox: Mutex<Outbox>,
    /// Notified when the queue stops being empty, so that an idle driver can sleep.
    queued: Notify,
    full: Notify,
    urgent: Notify,
}

/// Metrics of the outbox driver.
#[derive(Debug, Clone, Default)]
pub(in crate::routing) struct DriverMetrics {
    /// Number of envelopes that were committed and not rejected.
    pub(in crate::routing) flushes: prometheus_client::metrics::counter::Counter,
    /// Number of repeated proposals.
    pub(in crate::routing) retries: prometheus_client::metrics::counter::Counter,
}

impl SharedOutbox {
    pub(in crate::routing) fn new(outbox: Outbox) -> Self {
        Self {
            outbox: Mutex::new(outbox),
            queued: Notify::new(),
            full: Notify::new(),
            urgent: Notify::new(),
        }
    }

    /// Applies `change`. Wakes the driver if the queue stops being empty or can fill an envelope.
    pub(in crate::routing) fn with<R>(&self, change: impl FnOnce(&mut Outbox) -> R) -> R {
        let mut outbox = self.lock();
        let was_empty = outbox.is_empty();
        let result = change(&mut outbox);
        if was_empty && !outbox.is_empty() {
            self.queued.notify_one();
        }
        if outbox.is_full() {
            self.full.notify_one();
        }
        result
    }

    /// Queues the facts that an engine reported. Later facts about a backend replace earlier ones.
    pub fn observe(&self, backend: BackendRef, facts: EngineFacts) {
        self.with(|outbox| outbox.observe(backend, facts));
    }

    /// Queues an independent item behind earlier ones. Drops it and returns `false` without room.
    pub fn note(&self, item: Item) -> bool {
        self.with(|outbox| outbox.note(item))
    }

    /// Returns this replica's charges to `user` that are not applied as of index `applied`.
    pub(in crate::routing) fn unapplied(&self, user: UserKey, applied: LogIndex) -> Charge {
        self.with(|outbox| {
            outbox.settle(applied);
            outbox.unapplied(user)
        })
    }

    /// Makes the driver propose the queue before the flush interval has passed, because it affects
    /// the predictions of other replicas.
    pub fn flush_soon(&self) {
        self.urgent.notify_one();
    }

    /// Returns the envelope to propose: the outstanding one, else a new one. `None` if the queue is
    /// empty. `applied` is the log index applied here.
    #[must_use]
    pub fn envelope(&self, applied: LogIndex, now: Instant, unix_ms: u64) -> Option<Envelope> {
        let mut outbox = self.lock();
        outbox.settle(applied);
        if let Some(envelope) = outbox.outstanding() {
            return Some(envelope.clone());
        }
        outbox.cut(now, unix_ms).cloned()
    }

    /// Handles the outcome of the outstanding envelope and returns what to do next.
    pub fn handle_outcome(
        &self,
        outcome: Result<Committed, ProposeError>,
        applied: LogIndex,
    ) -> AfterProposal {
        self.with(|outbox| {
            let next = outbox.handle_outcome(outcome);
            outbox.settle(applied);
            next
        })
    }

    /// Calls [`Outbox::settle`].
    pub fn settle(&self, applied: LogIndex) {
        self.lock().settle(applied);
    }

    /// Whether the queue can fill an envelope.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.lock().is_full()
    }

    /// Whether an envelope is outstanding.
    #[must_use]
    pub fn is_outstanding(&self) -> bool {
        self.lock().outstanding().is_some()
    }

    /// Whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Whether nothing is queued, outstanding, or committed but not applied here.
    fn is_idle(&self) -> bool {
        let outbox = self.lock();
        outbox.is_empty() && outbox.outstanding().is_none() && outbox.is_settled()
    }

    /// Returns how far the log lags behind this replica.
    #[must_use]
    pub fn status(&self) -> OutboxStatus {
        self.lock().status(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Proposes the outbox's envelopes to the log, one at a time.
pub(in crate::routing) struct OutboxDriver<'a> {
    pub(in crate::routing) outbox: &'a SharedOutbox,
    pub(in crate::routing) propose: &'a dyn Propose,
    /// Function that returns the log index applied here.
    pub(in crate::routing) applied: &'a (dyn Fn() -> LogIndex + Send + Sync),
    pub(in crate::routing) metrics: DriverMetrics,
    pub(in crate::routing) flush_interval: Duration,
    /// Clock that stamps the envelopes.
    pub(in crate::routing) clock: Clock,
}

impl OutboxDriver<'_> {
    /// Proposes envelopes until `stop`, then until the queue is empty or `drain_max` has passed.
    /// Returns the final status of the outbox.
    pub(in crate::routing) async fn run(
        &self,
        stop: CancellationToken,
        drain_max: Duration,
    ) -> OutboxStatus {
        let has_stopped = tokio::select! {
            biased;
            () = stop.cancelled() => false,
            () = self.flush_on_time() => true,
        };
        if !has_stopped && tokio::time::timeout(drain_max, self.drain()).await.is_err() {
            tracing::warn!("could not flush the outbox before stopping");
        }
        self.outbox.status()
    }

    /// Flushes as soon as items are queued and no envelope is under way: what is queued in the
    /// meantime gathers (group commit). Under load, flushes at most one and a half times per flush
    /// interval, or more often if an envelope is full or an item is urgent. Returns only when the
    /// replica stops.
    async fn flush_on_time(&self) {
        let mut interval = tokio::time::interval(self.flush_interval);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pace = FlushPace::new(self.flush_interval, Instant::now());
        let mut flushed = Instant::now();
        let mut is_idle = false;
        loop {
            let at_once = async {
                self.outbox.queued.notified().await;
                tokio::time::sleep_until(pace.next()).await;
            };
            let urgent = async {
                self.outbox.urgent.notified().await;
                tokio::time::sleep_until(flushed + self.flush_interval / URGENT_PART).await;
            };
            tokio::select! {
                biased;
                () = self.outbox.full.notified() => {}
                _ = interval.tick(), if !is_idle => {}
                () = urgent => {}
                () = at_once => {}
            }
            flushed = Instant::now();
            pace.flushed(flushed);
            interval.reset();
            match self.flush().await {
                FlushResult::One => is_idle = false,
                FlushResult::Nothing => is_idle = self.outbox.is_idle(),
                FlushResult::Stopped => return,
            }
            if !self.outbox.is_empty() {
                self.outbox.queued.notify_one();
            }
        }
    }

    async fn drain(&self) {
        loop {
            match self.flush().await {
                FlushResult::One => {}
                FlushResult::Nothing | FlushResult::Stopped => return,
            }
        }
    }

    /// Proposes one envelope until its outcome is known. Cancel safe: the next call proposes an
    /// outstanding envelope again.
    async fn flush(&self) -> FlushResult {
        let mut pause = PAUSE_MIN;
        loop {
            let (now, unix_ms) = (Instant::now(), self.clock.unix_ms());
            let envelope = self.outbox.envelope((self.applied)(), now, unix_ms);
            let Some(envelope) = envelope else {
                return FlushResult::Nothing;
            };
            let seq = envelope.origin.seq;
            let outcome = self.propose.propose(envelope).await;
            match self.outbox.handle_outcome(outcome, (self.applied)()) {
                AfterProposal::Continue => {
                    self.metrics.flushes.inc();
                    return FlushResult::One;
                }
                AfterProposal::Refused(because) => {
                    tracing::error!(seq, because, "outbox batch was rejected");
                    return FlushResult::One;
                }
                AfterProposal::Stop => return FlushResult::Stopped,
                AfterProposal::Renewed => {
                    tracing::error!(seq, "another session of this replica's id exists");
                }
                AfterProposal::Retry(because) if pause == PAUSE_MAX => {
                    tracing::warn!(seq, because, "outbox stalled");
                }
                AfterProposal::Retry(because) => {
                    tracing::debug!(seq, because, "proposing outbox batch again");
                }
            }
            self.metrics.retries.inc();
            tokio::time::sleep(pause).await;
            pause = PAUSE_MAX.min(pause * 2);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FlushResult {
    One,
    Nothing,
    Stopped,
}

/// Paces flushes by the generic cell rate algorithm (ITU-T I.371): [`BURST`] may follow each other
/// at once, and in the long run three start in two flush intervals.
struct FlushPace {
    /// Time between two flushes in the long run.
    period: Duration,
    /// Time at which the next flush would start at that rate.
    due: Instant,
}

impl FlushPace {
    fn new(flush_interval: Duration, now: Instant) -> Self {
        Self {
            period: flush_interval * 2 / 3,
            due: now,
        }
    }

    /// Returns the earliest time of the next flush.
    fn next(&self) -> Instant {
        let early = self.period * (BURST - 1);
        self.due.checked_sub(early).unwrap_or(self.due)
    }

    fn flushed(&mut self, now: Instant) {
        self.due = self.due.max(now) + self.period;
    }
}
