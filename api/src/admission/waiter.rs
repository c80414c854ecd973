//! A request while it waits: what is kept of it, and what becomes of it.

use std::sync::Arc;
use std::time::Duration;

use state::ids::{ModelKey, Slot, Ticket, UserKey};
use state::quotas::LimitRejection;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Admission;
use crate::routing::{
    Attempt, AttemptEnd, Decision, Dispatcher, RoutingRejection, RoutingRequest, UserName,
};

/// A request as admission sees it: it can be decided about at any time.
pub trait AdmissionRequest: Send + Sync + 'static {
    /// The request as routing sees it.
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a>;

    /// Higher goes first.
    fn priority(&self) -> i16;

    /// Output tokens it asks for at most.
    fn tokens_max(&self) -> Option<u32>;

    /// Whether it goes to some of its model's backends only, so that others may go while it cannot.
    fn is_selective(&self) -> bool;

    /// Whether it is to be told since when it was decided about.
    fn is_traced(&self) -> bool {
        false
    }

    /// Longest wait after which its client still gets an answer that takes `service`; `None`: the
    /// client does not tell.
    fn wait_max(&self, service: Duration) -> Option<Duration> {
        let _unused = service;
        None
    }
}

/// A request that has its backend and counts as running there.
pub struct Admitted {
    decision: Decision,
    /// `None` once it is taken over.
    attempt: Option<Attempt>,
    decided: Option<DecisionTimes>,
}

/// When a request was decided about.
#[derive(Debug, Clone, Copy)]
pub struct DecisionTimes {
    /// Its turn came.
    pub began: Instant,
    /// It had its backend.
    pub ended: Instant,
}

impl DecisionTimes {
    /// It has its backend, after it was decided about since then.
    pub(super) fn since(began: Option<Instant>) -> Option<Self> {
        let began = began?;
        let ended = Instant::now();
        Some(Self { began, ended })
    }
}

impl Admitted {
    pub(super) fn new(
        decision: Decision,
        attempt: Attempt,
        decided: Option<DecisionTimes>,
    ) -> Self {
        Self {
            decision,
            attempt: Some(attempt),
            decided,
        }
    }

    /// When it was decided about, if it [is traced](AdmissionRequest::is_traced).
    #[must_use]
    pub fn decided(&self) -> Option<DecisionTimes> {
        self.decided
    }

    /// The decision, and the attempt to be ended by whoever takes it.
    #[must_use]
    pub fn into_parts(mut self) -> (Decision, Attempt) {
        let attempt = self.attempt.take();
        let attempt = attempt.expect("it is taken here only, and this takes all");
        (self.decision.clone(), attempt)
    }
}

impl Drop for Admitted {
    /// Nobody took it: the client left while it was told. Nothing was sent.
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt.take() {
            attempt.end(AttemptEnd::NotRun, Instant::now());
        }
    }
}

/// Why a request has no backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionRejection {
    /// No backend can take it, now or soon.
    NoBackend(RoutingRejection),
    /// The user has used what the limits allow.
    OverLimit(LimitRejection),
    /// Too many wait for the model.
    QueueFull {
        /// When those who wait will have gone.
        retry_after_ms: u64,
    },
    /// It would not have gone in time.
    TooLate {
        /// Its predicted wait.
        wait_ms: u64,
        /// The wait that is of use.
        wait_ms_max: u64,
    },
    /// It has waited for as long as it may.
    WaitedTooLong {
        /// When those who wait will have gone.
        retry_after_ms: u64,
    },
    /// The replica leaves.
    Leaving,
}

/// What is kept of a request that waits.
pub(super) struct Waiter {
    pub(super) ticket: Ticket,
    pub(super) candidate: Arc<dyn AdmissionRequest>,
    /// Backends that were tried.
    pub(super) excluded: Vec<Slot>,
    pub(super) since: Instant,
    /// `None`: it has had its turn before, and does not count as waiting.
    pub(super) wait: Option<UserWaitGuard>,
    /// When the log was last told of it; `None`: never.
    pub(super) told: Option<Instant>,
    /// Priced tokens that the log has charged with its grant; `None`: it has none.
    pub(super) granted: Option<u64>,
    pub(super) answer: oneshot::Sender<Result<Admitted, AdmissionRejection>>,
}

impl Waiter {
    pub(super) fn ask(&self) -> RoutingRequest<'_> {
        self.candidate.ask(&self.excluded)
    }

    /// The same as one of `waiting` requests.
    pub(super) fn ask_among(&self, waiting: usize) -> RoutingRequest<'_> {
        RoutingRequest {
            waiting_here: u32::try_from(waiting).unwrap_or(u32::MAX),
            ..self.ask()
        }
    }

    pub(super) fn model(&self) -> Arc<str> {
        Arc::from(self.ask().model)
    }

    /// Whether others may go while it cannot.
    pub(super) fn is_selective(&self) -> bool {
        !self.excluded.is_empty() || self.candidate.is_selective()
    }
}

/// A user's request counts as waiting, for everybody, until this is dropped.
pub(super) struct UserWaitGuard {
    dispatcher: Arc<Dispatcher>,
    user: UserKey,
}

impl UserWaitGuard {
    pub(super) fn begin(dispatcher: &Arc<Dispatcher>, user: &UserName) -> Self {
        Self {
            dispatcher: Arc::clone(dispatcher),
            user: dispatcher.begin_wait(user),
        }
    }
}

impl Drop for UserWaitGuard {
    fn drop(&mut self) {
        self.dispatcher.end_wait(self.user);
    }
}

/// A place in the queue, given up when dropped.
pub(super) struct QueueTicket {
    pub(super) admission: Arc<Admission>,
    pub(super) model: ModelKey,
    pub(super) ticket: Ticket,
    pub(super) turn: oneshot::Receiver<Result<Admitted, AdmissionRejection>>,
}

impl QueueTicket {
    pub(super) async fn turn(&mut self) -> Result<Admitted, AdmissionRejection> {
        // Answers go out before their sender is dropped; without one nobody serves any more.
        (&mut self.turn)
            .await
            .unwrap_or(Err(AdmissionRejection::Leaving))
    }
}

impl Drop for QueueTicket {
    fn drop(&mut self) {
        self.admission.leave(self.model, self.ticket);
    }
}
