//! This replica's shares of the backends' limits, and its part in the protocol of
//! [`state::shares`].
//!
//! The protocol is a [`ShareLedger`]; the places that requests take are in the [`LoadTable`], one
//! word per backend. This module connects them. After every change (20 ms passed, a peer reported,
//! requests began to wait, a place that peers want became free) it updates the ledger, withdraws
//! from the table the free places that it hands over, and sets how many requests may run. A
//! starting request uses only the table.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use state::StateView;
use state::admission::Batching;
use state::ids::{BackendRef, ReplicaId, SessionId};
use state::policy::Handover;
use state::shares::{Demand, EpochMembers, ShareLedger};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::load::{LoadTable, ReserveRejection, ReservedPlace};
use super::metrics::ShareMetrics;
use super::{
    Decider, Decision, LoadReportError, Room, RoutingMetrics, RoutingRejection, RoutingRequest,
};
use crate::planted::{self, Bug};

pub mod wire;

/// Number of requests that wait for places at a backend, and their longest wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitingForPlace {
    /// Number of waiting requests.
    pub requests: u32,
    /// Time that the longest-waiting request has waited, in milliseconds.
    pub waited_ms: u32,
}

/// Requests that wait for places at this replica, by backend.
pub type WantedPlaces = BTreeMap<BackendRef, WaitingForPlace>;

/// A routing decision with the reserved places at its backends.
#[derive(Debug)]
pub struct PlacedRequest {
    /// Routing decision.
    pub decision: Decision,
    /// Place at the chosen backend. Dropping it without a dispatch returns it.
    pub place: ReservedPlace,
    /// Place at the prefill backend, if the decision names one.
    pub prefill: Option<ReservedPlace>,
}

/// Reason why a request has no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceRejection {
    /// No backend can take the request. It is [`RoutingRejection::AtLimit`] if other requests took
    /// the places in the meantime.
    Refused(RoutingRejection),
    /// The chosen backend has room, and the place is a peer's.
    AtPeer(PeerPlace),
}

/// A place that a peer holds, at the backend that a request should take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerPlace {
    /// Backend with the place.
    pub backend: BackendRef,
    /// Time after which the request should take a place of this replica elsewhere.
    pub patience: Duration,
}

/// Maximum number of decisions per request before it is rejected because places were taken.
const PLACE_TRIES: usize = 4;

/// This replica's shares of the backends' limits.
pub struct Shares {
    view: Arc<StateView>,
    load: Arc<LoadTable>,
    inner: Mutex<Inner>,
    /// Signal that another epoch has begun.
    epoch_changed: Notify,
    /// Time at which the ledger's clock, in milliseconds, reads 0.
    epoch: Instant,
    metrics: ShareMetrics,
}

/// The group of replicas that share limits, as this replica knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareStatus {
    /// Identifier of the set of members: replicas in the same epoch agree on it.
    pub epoch: u64,
    /// Number of members, including this replica.
    pub members: usize,
    /// Whether all members have joined this epoch or had enough time to join it. Until then, this
    /// replica may use no more places of a backend than at the end of the previous epoch.
    pub is_settled: bool,
}

struct Inner {
    book: ShareLedger,
    wanted: WantedPlaces,
}

impl Shares {
    pub(super) fn new(
        (view, load): (&Arc<StateView>, &Arc<LoadTable>),
        (replica, session): (ReplicaId, SessionId),
        metrics: &RoutingMetrics,
    ) -> Self {
        let inner = Inner {
            book: ShareLedger::new(replica, session),
            wanted: WantedPlaces::new(),
        };
        Self {
            view: Arc::clone(view),
            load: Arc::clone(load),
            inner: Mutex::new(inner),
            epoch_changed: Notify::new(),
            epoch: Instant::now(),
            metrics: metrics.shares.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses the backends for the request `ask` and reserves a place at each. The backend is chosen
    /// by the load of the whole cluster, unless `ask` counts this replica's places only. If this
    /// replica has no free place there, takes another one only if the policy loses nothing by it.
    ///
    /// # Errors
    /// Returns a [`PlaceRejection`] if no backend can take the request or the place is a peer's.
    pub fn place(
        &self,
        decider: &Decider,
        ask: &RoutingRequest<'_>,
        now: Instant,
    ) -> Result<PlacedRequest, PlaceRejection> {
        let refused = PlaceRejection::Refused;
        if ask.room == Room::Here {
            return self.place_here(decider, ask, now).map_err(refused);
        }
        let chosen = decider.decide(ask, now).map_err(refused)?;
        let (chosen, backend) = match self.reserve_both(chosen, true) {
            Ok(placed) => return Ok(placed),
            Err(without_place) => *without_place,
        };
        let ask = RoutingRequest {
            room: Room::Here,
            ..*ask
        };
        let here = match self.place_here(decider, &ask, now) {
            Ok(placed) => Some(placed),
            Err(RoutingRejection::AtLimit) => None,
            Err(why) => return Err(refused(why)),
        };
        let other = here.as_ref().map(|placed| &placed.decision);
        let patience = decider.patience(&ask, &chosen, other);
        match here {
            Some(placed) if patience.is_zero() => Ok(placed),
            _ => Err(PlaceRejection::AtPeer(PeerPlace { backend, patience })),
        }
    }

    /// Chooses among the backends at which this replica has a free place, and reserves it.
    fn place_here(
        &self,
        decider: &Decider,
        ask: &RoutingRequest<'_>,
        now: Instant,
    ) -> Result<PlacedRequest, RoutingRejection> {
        for further in (0..PLACE_TRIES).rev() {
            let decision = decider.decide(ask, now)?;
            if let Ok(placed) = self.reserve_both(decision, further > 0) {
                return Ok(placed);
            }
        }
        Err(RoutingRejection::AtLimit)
    }

    /// Reserves a place at the backend of `decision` and at its prefill backend. If there is none at
    /// the latter, the request goes without it, unless it needs it or `needs_all` places.
    ///
    /// # Errors
    /// Returns the decision and the backend at which this replica has no free place.
    fn reserve_both(
        &self,
        mut decision: Decision,
        needs_all: bool,
    ) -> Result<PlacedRequest, Box<(Decision, BackendRef)>> {
        let Some(place) = self.reserve(decision.backend) else {
            let backend = decision.backend;
            return Err(Box::new((decision, backend)));
        };
        let mut prefill = None;
        if let Some(chosen) = &decision.prefill {
            let backend = chosen.backend;
            prefill = self.reserve(backend);
            if prefill.is_none() {
                if needs_all || chosen.handover == Handover::Room {
                    return Err(Box::new((decision, backend)));
                }
                decision.prefill = None;
            }
        }
        Ok(PlacedRequest {
            decision,
            place,
            prefill,
        })
    }

    /// Reserves one of this replica's places at `backend`; `None` if all are taken.
    fn reserve(&self, backend: BackendRef) -> Option<ReservedPlace> {
        if planted::is(Bug::ShareIgnored) {
            return Some(self.load.take(backend));
        }
        let limit = self.view.limit(backend.slot);
        match self.load.reserve(backend, limit) {
            Ok(place) => Some(place),
            Err(ReserveRejection::Full) => None,
            // The backend is new, or another limit has just been applied.
            Err(ReserveRejection::OtherLimit) => {
                let mut inner = self.lock();
                inner.book.set_limit(backend, limit);
                self.balance(&mut inner, backend);
                drop(inner);
                self.load.reserve(backend, limit).ok()
            }
        }
    }

    /// Advances the ledger to `now` with the current backends and limits. `expected` are the other
    /// replicas that support shares. Hands over places that those need more. Call this every 20 ms
    /// and when [`LoadTable::report_due`] is notified.
    pub fn turn(&self, now: Instant, expected: &[ReplicaId]) {
        let passed = now.saturating_duration_since(self.epoch);
        let now_ms = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
        let registry = self.view.registry();
        let service = self.view.service();
        let backends = registry.backends.iter().map(|it| it.handle);
        let limits: BTreeMap<BackendRef, Option<u32>> = backends
            .map(|backend| (backend, service.limit(backend.slot)))
            .collect();
        let mut inner = self.lock();
        self.in_epoch(&mut inner, |book| book.advance_time(now_ms, expected));
        inner.book.set_limits(&limits);
        for (backend, _) in limits.iter().filter(|(_, limit)| limit.is_none()) {
            self.load.clear_limit(*backend);
        }
        self.balance_all(&mut inner);
        self.show(&inner.book);
    }

    /// Replaces the record of requests that wait here for places. None of them can use a free place
    /// of this replica, so free places that other replicas wait for are handed over.
    pub fn want(&self, wanted: WantedPlaces) {
        let mut inner = self.lock();
        let is_more = wanted.iter().any(|(backend, now)| {
            let before = inner.wanted.get(backend).copied().unwrap_or_default();
            now.requests > before.requests
        });
        inner.wanted = wanted;
        let wanted_elsewhere: Vec<BackendRef> = inner.book.wanted_elsewhere().collect();
        let gave = self.balance_each(&mut inner, wanted_elsewhere);
        if is_more || gave {
            // The task that reports to the peers does the rest.
            self.load.report_due().notify_one();
        }
    }

    /// Applies a peer's report.
    ///
    /// # Errors
    /// Returns a [`LoadReportError`] and keeps the peer's earlier report.
    pub fn hear(&self, peer: ReplicaId, report: &[u8]) -> Result<(), LoadReportError> {
        let report = wire::decode(report)?;
        let mut inner = self.lock();
        let is_new = self.in_epoch(&mut inner, |book| book.record_report(peer, report));
        if is_new && self.balance_all(&mut inner) {
            self.load.report_due().notify_one();
        }
        Ok(())
    }

    /// Changes the ledger, and tells of an epoch that begins with it.
    fn in_epoch<T>(&self, inner: &mut Inner, change: impl FnOnce(&mut ShareLedger) -> T) -> T {
        let before = inner.book.epoch();
        let changed = change(&mut inner.book);
        if inner.book.epoch() != before {
            self.epoch_changed.notify_one();
        }
        changed
    }

    /// Waits for the next epoch, or returns at once if one has begun since the last call. Only one
    /// task may wait.
    pub(super) async fn epoch_changed(&self) {
        self.epoch_changed.notified().await;
    }

    /// Returns the members of the epoch.
    pub(super) fn epoch_members(&self) -> EpochMembers {
        self.lock().book.epoch_members()
    }

    /// Returns the group of replicas that share limits.
    #[must_use]
    pub fn status(&self) -> ShareStatus {
        let inner = self.lock();
        ShareStatus {
            epoch: inner.book.epoch().0,
            members: inner.book.members_len(),
            is_settled: !inner.book.is_unsettled(),
        }
    }

    /// Returns this replica's encoded report for its peers; [`wire`] describes the format.
    #[must_use]
    pub fn report(&self) -> Vec<u8> {
        wire::encode(&self.lock().book.report())
    }

    fn show(&self, book: &ShareLedger) {
        let (mut held, mut over) = (0, 0);
        for backend in book.backends() {
            let allowed = book.allowed(backend).unwrap_or_default();
            let running = self.load.here(backend).running;
            held += i64::from(allowed);
            over += i64::from(running.saturating_sub(allowed));
        }
        self.metrics.held.set(held);
        self.metrics.over.set(over);
    }

    /// Calls [`Shares::balance`] for all backends. Returns whether any place was handed over.
    fn balance_all(&self, inner: &mut Inner) -> bool {
        let backends = inner.book.backends().collect();
        self.balance_each(inner, backends)
    }

    /// Calls [`Shares::balance`] for each of `backends`. Returns whether any place was handed over.
    fn balance_each(&self, inner: &mut Inner, backends: Vec<BackendRef>) -> bool {
        let balanced = backends.into_iter().map(|it| self.balance(inner, it));
        balanced.fold(false, |is_any, gave| is_any | gave)
    }

    /// Hands over free places at `backend` as the ledger plans, and sets how many requests may run
    /// here. Returns whether any place was handed over.
    fn balance(&self, inner: &mut Inner, backend: BackendRef) -> bool {
        let Some(limit) = inner.book.limit(backend) else {
            return false;
        };
        let wanted = inner.wanted.get(&backend).copied().unwrap_or_default();
        let demand = Demand {
            running: self.load.here(backend).running,
            waiting: wanted.requests,
            waited_ms: wanted.waited_ms,
            recent: 0,
        };
        let started = self.load.started(backend);
        inner.book.set_demand(backend, demand, started);
        let registry = self.view.registry();
        let is_whole = registry.admission.batching == Batching::Static;
        let plan = inner.book.plan(backend, is_whole);
        let mut gave = false;
        for (to, places) in plan.gifts {
            let share = inner.book.share(backend).unwrap_or_default();
            let Ok(left) = u32::try_from(share - i64::from(places)) else {
                continue;
            };
            if self.load.withdraw(backend, left, left) {
                inner.book.give(backend, to, places);
                self.metrics.handed_over.inc_by(u64::from(places));
                gave = true;
            }
        }
        let allowed = inner.book.allowed(backend).unwrap_or_default();
        let hands_over_next = plan.hands_over_next && !is_whole;
        if self
            .load
            .set_places(backend, limit, allowed, hands_over_next)
        {
            self.load.less().notify_one();
        }
        gave
    }
}
