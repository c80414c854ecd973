//! A waiting request: its state and its outcome.

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

/// A request as admission sees it, ready for a decision at any time.
pub trait AdmissionRequest: Send + Sync + 'static {
    /// Returns the request as routing sees it.
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a>;

    /// Returns the priority; higher goes first.
    fn priority(&self) -> i16;

    /// Returns the maximum number of output tokens, from the request.
    fn tokens_max(&self) -> Option<u32>;

    /// Whether only some of the model's backends can take it, so that others may overtake it.
    fn is_selective(&self) -> bool;

    /// Whether [`Admitted::decided`] is wanted.
    fn is_traced(&self) -> bool {
        false
    }

    /// Returns the longest wait after which the client still gets a response that takes `service`;
    /// `None` if the client sets no deadline.
    fn wait_max(&self, service: Duration) -> Option<Duration> {
        let _unused = service;
        None
    }
}

/// A request that has a backend and counts as running there.
pub struct Admitted {
    decision: Decision,
    /// `None` once taken.
    attempt: Option<Attempt>,
    decided: Option<DecisionTimes>,
}

/// When the decision on a request was made.
#[derive(Debug, Clone, Copy)]
pub struct DecisionTimes {
    /// When its turn came.
    pub began: Instant,
    /// When it had a backend.
    pub ended: Instant,
}

impl DecisionTimes {
    /// Returns the times of a decision that began at `began` and ends now.
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

    /// Returns when the decision was made, if the request [is traced](AdmissionRequest::is_traced).
    #[must_use]
    pub fn decided(&self) -> Option<DecisionTimes> {
        self.decided
    }

    /// Returns the decision and the attempt, which the caller must end.
    #[must_use]
    pub fn into_parts(mut self) -> (Decision, Attempt) {
        let attempt = self.attempt.take();
        let attempt = attempt.expect("it is taken here only, and this takes all");
        (self.decision.clone(), attempt)
    }
}

impl Drop for Admitted {
    /// Ends the attempt if nobody took it: the client left in the meantime. Nothing was sent.
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt.take() {
            attempt.end(AttemptEnd::NotRun, Instant::now());
        }
    }
}

/// Why a request gets no backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionRejection {
    /// No backend can take the request, now or soon.
    NoBackend(RoutingRejection),
    /// The user has reached a limit.
    OverLimit(LimitRejection),
    /// Too many requests wait for the model.
    QueueFull {
        /// When the requests that wait will have gone, in milliseconds.
        retry_after_ms: u64,
    },
    /// The request would not have gone in time.
    TooLate {
        /// Predicted wait, in milliseconds.
        wait_ms: u64,
        /// Longest useful wait, in milliseconds.
        wait_ms_max: u64,
    },
    /// The request has waited for the maximum time.
    WaitedTooLong {
        /// When the requests that wait will have gone, in milliseconds.
        retry_after_ms: u64,
    },
    /// The replica is leaving.
    Leaving,
}

/// State of a waiting request.
pub(super) struct Waiter {
    pub(super) ticket: Ticket,
    pub(super) candidate: Arc<dyn AdmissionRequest>,
    /// Backends that were tried.
    pub(super) excluded: Vec<Slot>,
    pub(super) since: Instant,
    /// `None` after its turn: the request no longer counts as waiting.
    pub(super) wait: Option<UserWaitGuard>,
    /// When it was last proposed to the log; `None` if never.
    pub(super) told: Option<Instant>,
    /// Priced tokens that the log charged with the grant; `None` without a grant.
    pub(super) granted: Option<u64>,
    pub(super) answer: oneshot::Sender<Result<Admitted, AdmissionRejection>>,
}

impl Waiter {
    pub(super) fn ask(&self) -> RoutingRequest<'_> {
        self.candidate.ask(&self.excluded)
    }

    /// Returns [`Self::ask`] as one of `waiting` requests.
    pub(super) fn ask_among(&self, waiting: usize) -> RoutingRequest<'_> {
        RoutingRequest {
            waiting_here: u32::try_from(waiting).unwrap_or(u32::MAX),
            ..self.ask()
        }
    }

    pub(super) fn model(&self) -> Arc<str> {
        Arc::from(self.ask().model)
    }

    /// Whether others may overtake the request.
    pub(super) fn is_selective(&self) -> bool {
        !self.excluded.is_empty() || self.candidate.is_selective()
    }
}

/// Makes a user's request count as waiting, on all replicas, until dropped.
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

/// A place in the queue; dropping it removes the request.
pub(super) struct QueueTicket {
    pub(super) admission: Arc<Admission>,
    pub(super) model: ModelKey,
    pub(super) ticket: Ticket,
    pub(super) turn: oneshot::Receiver<Result<Admitted, AdmissionRejection>>,
}

impl QueueTicket {
    pub(super) async fn turn(&mut self) -> Result<Admitted, AdmissionRejection> {
        // Every request is answered before its sender is dropped; otherwise no task serves.
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
