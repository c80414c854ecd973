//! Types for a waiting request, its state and its outcome.

use std::sync::Arc;
use std::time::Duration;

use state::ids::{BackendRef, ModelKey, Slot, Ticket, UserKey};
use state::quotas::LimitRejection;
use state::streams::CarriedStream;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Admission;
use crate::routing::{
    Attempt, AttemptEnd, Decision, DispatchTerms, Dispatcher, EarlierCharge, LoadTable, PeerPlace,
    PermitCell, Room, RoutingRejection, RoutingRequest, SeekGuard, UserName,
};

/// A request as admission sees it, ready for a decision at any time.
pub trait AdmissionRequest: Send + Sync + 'static {
    /// Returns the request as routing sees it, without the backends in `excluded`.
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a>;

    /// Returns where the request keeps its permit.
    fn permit(&self) -> &PermitCell;

    /// Returns the priority of the request. Higher priorities go first.
    fn priority(&self) -> i16;

    /// Returns the maximum number of output tokens, from the request; `None` if it sets none.
    fn tokens_max(&self) -> Option<u32>;

    /// Whether only some of the model's backends can take the request; others may then overtake it.
    fn is_selective(&self) -> bool;

    /// Whether [`Admitted::decided`] records the times of the decision.
    fn is_traced(&self) -> bool {
        false
    }

    /// Returns what earlier attempts charged for the answer that this request continues; `None` if
    /// it begins one.
    fn earlier(&self) -> Option<EarlierCharge> {
        None
    }

    /// Returns the resumable stream that the request carries, if it does.
    fn carried(&self) -> Option<CarriedStream> {
        None
    }

    /// Returns the terms of its dispatch.
    fn terms(&self) -> DispatchTerms {
        DispatchTerms {
            tokens_max: self.tokens_max(),
            earlier: self.earlier(),
            carried: self.carried(),
        }
    }

    /// Returns the longest wait after which the client still gets a response that takes `service`;
    /// `None` if the client sets no deadline.
    fn wait_max(&self, service: Duration) -> Option<Duration> {
        let _unused = service;
        None
    }
}

/// Which try of a request asks for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionTry {
    /// The first one: limits are checked, and the request joins the end of its user's queue.
    First,
    /// A retry after a backend did not run the request, which has had its turn.
    Again,
    /// A request that runs elsewhere, and stays there unless another backend has room at once.
    Now,
}

/// An admitted request, which has a backend and counts as running there. Dropping it ends its
/// attempt as not run.
pub struct Admitted {
    decision: Decision,
    /// The attempt in flight; `None` once taken.
    attempt: Option<Attempt>,
    decided: Option<DecisionTimes>,
}

/// Times at which the decision on a request began and ended.
#[derive(Debug, Clone, Copy)]
pub struct DecisionTimes {
    /// Time at which the decision began.
    pub began: Instant,
    /// Time at which the request had a backend.
    pub ended: Instant,
}

impl DecisionTimes {
    /// Returns the times of a decision that began at `began` and ends now; `None` without `began`.
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

    /// Returns the times of the decision if the request [is traced](AdmissionRequest::is_traced).
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
    /// Ends the attempt as not run if it was not taken: the client left before anything was sent.
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt.take() {
            attempt.end(AttemptEnd::NotRun, Instant::now());
        }
    }
}

/// Reason why a request is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmissionRejection {
    /// No backend can take the request, now or after a wait.
    NoBackend(RoutingRejection),
    /// The user has reached a limit.
    OverLimit(LimitRejection),
    /// Too many requests wait for the model.
    QueueFull {
        /// Predicted time until the waiting requests have gone, in milliseconds.
        retry_after_ms: u64,
    },
    /// The request would wait for too long.
    TooLate {
        /// Predicted wait, in milliseconds.
        wait_ms: u64,
        /// Longest useful wait, in milliseconds.
        wait_ms_max: u64,
    },
    /// The request has waited for too long.
    WaitedTooLong {
        /// Predicted time until the waiting requests have gone, in milliseconds.
        retry_after_ms: u64,
    },
    /// The replica is leaving the cluster.
    Leaving,
}

/// A waiting request with its state.
pub(super) struct Waiter {
    pub(super) candidate: Arc<dyn AdmissionRequest>,
    /// Slots of backends that were already tried.
    pub(super) excluded: Vec<Slot>,
    pub(super) since: Instant,
    /// Makes the request count as waiting; `None` after its first turn.
    pub(super) wait: Option<UserWaitGuard>,
    /// The place at a peer for which the request waits; `None` if it waits for any.
    pub(super) seeking: Option<Seeking>,
    /// Maximum wait of a request that waits for the first engine of its model, in milliseconds; `None`
    /// if it waits like others.
    pub(super) hold_ms: Option<u64>,
    pub(super) answer: oneshot::Sender<Result<Admitted, AdmissionRejection>>,
}

/// A wait for a place that a peer holds.
pub(super) struct Seeking {
    pub(super) backend: BackendRef,
    /// Time from which the request takes a place of this replica at any backend.
    pub(super) until: Instant,
    /// Counts the request at the backend; `None` while it is decided again.
    pub(super) guard: Option<SeekGuard>,
}

impl Waiter {
    pub(super) fn ask(&self) -> RoutingRequest<'_> {
        self.candidate.ask(&self.excluded)
    }

    /// Returns the request as routing sees it at `now`, as one of `waiting` requests for its model.
    pub(super) fn ask_among(&self, waiting: usize, now: Instant) -> RoutingRequest<'_> {
        let is_patient = self.seeking.as_ref().is_none_or(|it| now < it.until);
        RoutingRequest {
            waiting_here: u32::try_from(waiting).unwrap_or(u32::MAX),
            room: if is_patient {
                Room::Cluster
            } else {
                Room::Here
            },
            ..self.ask()
        }
    }

    /// Waits for the `place` of a peer from `now` on, or goes on with the wait for one.
    pub(super) fn seek(&mut self, place: PeerPlace, load: &LoadTable, now: Instant) {
        let until = self.seeking.as_ref().map(|it| it.until);
        self.seeking = Some(Seeking {
            backend: place.backend,
            until: until.unwrap_or(now + place.patience),
            guard: Some(load.seek(place.backend)),
        });
    }

    /// Whether the request goes on waiting if it cannot go because of `why`.
    pub(super) fn outwaits(&self, why: RoutingRejection) -> bool {
        why == RoutingRejection::AtLimit || self.hold_ms.is_some() && why.is_at_zero()
    }

    pub(super) fn model(&self) -> Arc<str> {
        Arc::from(self.ask().model)
    }

    /// Whether other requests may overtake this one.
    pub(super) fn is_selective(&self) -> bool {
        !self.excluded.is_empty() || self.candidate.is_selective()
    }
}

/// Makes a user's request count as waiting, at all replicas, until dropped.
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

/// A place in the queue. Dropping it removes the request from the queue.
pub(super) struct QueueTicket {
    pub(super) admission: Arc<Admission>,
    pub(super) model: ModelKey,
    pub(super) ticket: Ticket,
    pub(super) turn: oneshot::Receiver<Result<Admitted, AdmissionRejection>>,
}

impl QueueTicket {
    pub(super) async fn turn(&mut self) -> Result<Admitted, AdmissionRejection> {
        // Every request is answered before its sender is dropped, if a task serves the queues.
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
