//! Shares of the backends' limits: this replica's part of the protocol of [`state::shares`].
//!
//! The protocol is a [`ShareLedger`]; the places that requests take are in the [`LoadTable`], one
//! word per backend. This module connects them: after every change (20 ms passed, a peer reported,
//! requests began to wait, a place that peers want became free) it updates the book, withdraws the
//! places to hand over from the table, if they are free there, and sets how many requests may run.
//! A starting request looks only at the table.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use state::StateView;
use state::admission::Batching;
use state::ids::{BackendRef, ReplicaId, SessionId};
use state::policy::Handover;
use state::shares::{Demand, ShareLedger};
use tokio::time::Instant;

use super::load::{LoadTable, ReserveRejection, ReservedPlace};
use super::metrics::ShareMetrics;
use super::{Decider, Decision, LoadReportError, RoutingMetrics, RoutingRejection, RoutingRequest};
use crate::planted::{self, Bug};

pub mod wire;

/// Requests that wait for places at a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitingForPlace {
    /// How many.
    pub requests: u32,
    /// How long the one that has waited longest has waited, in milliseconds.
    pub waited_ms: u32,
}

/// What waits here, by backend.
pub type WantedPlaces = BTreeMap<BackendRef, WaitingForPlace>;

/// Where a request goes, and the place it has there.
#[derive(Debug)]
pub struct PlacedRequest {
    /// The decision.
    pub decision: Decision,
    /// Given back if the request is not dispatched.
    pub place: ReservedPlace,
    /// The place at the backend that computes the prompt, where the decision names one.
    pub prefill: Option<ReservedPlace>,
}

/// Decisions until a request whose places others take is at the limit.
const PLACE_TRIES: usize = 4;

/// This replica's shares.
pub struct Shares {
    view: Arc<StateView>,
    load: Arc<LoadTable>,
    inner: Mutex<Inner>,
    /// What the book's milliseconds count from.
    epoch: Instant,
    metrics: ShareMetrics,
}

/// With whom a replica shares limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareStanding {
    /// Names them: others in the same epoch know the same.
    pub epoch: u64,
    /// How many they are, this replica included.
    pub members: usize,
    /// Whether they are known to agree; until then no more runs here than before.
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
            epoch: Instant::now(),
            metrics: metrics.shares.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses a backend for a request and takes a place there.
    ///
    /// # Errors
    /// [`RoutingRejection`]; at the limit, if others took the places meanwhile.
    pub fn place(
        &self,
        decider: &Decider,
        ask: &RoutingRequest<'_>,
        now: Instant,
    ) -> Result<PlacedRequest, RoutingRejection> {
        for further in (0..PLACE_TRIES).rev() {
            let mut decision = decider.decide(ask, now)?;
            let Some(place) = self.reserve(decision.backend) else {
                continue;
            };
            let chosen = decision.prefill.as_ref();
            let is_needed = chosen.is_some_and(|prefill| prefill.handover == Handover::Room);
            let prefill = chosen.and_then(|prefill| self.reserve(prefill.backend));
            if prefill.is_none() && is_needed {
                continue;
            }
            if prefill.is_none() && decision.prefill.take().is_some() && further > 0 {
                continue;
            }
            return Ok(PlacedRequest {
                decision,
                place,
                prefill,
            });
        }
        Err(RoutingRejection::AtLimit)
    }

    /// Takes a place at a backend of those that this replica has; `None`: all are taken.
    fn reserve(&self, backend: BackendRef) -> Option<ReservedPlace> {
        if planted::is(Bug::ShareIgnored) {
            return Some(self.load.take(backend));
        }
        let limit = self.view.limit(backend.slot);
        match self.load.reserve(backend, limit) {
            Ok(place) => Some(place),
            Err(ReserveRejection::Full) => None,
            // It is new, or another limit has been applied this moment.
            Err(ReserveRejection::OtherLimit) => {
                let mut inner = self.lock();
                inner.book.set_limit(backend, limit);
                self.balance(&mut inner, backend);
                drop(inner);
                self.load.reserve(backend, limit).ok()
            }
        }
    }

    /// Takes in that it is `now`, what backends and limits there are, and who else is in the
    /// cluster and knows of shares; hands over what others need more. Call it every 20 ms, and
    /// when [`LoadTable::news`] says so.
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
        inner.book.pass(now_ms, expected);
        inner.book.set_limits(&limits);
        for (backend, _) in limits.iter().filter(|(_, limit)| limit.is_none()) {
            self.load.undivide(*backend);
        }
        self.balance_all(&mut inner);
        self.show(&inner.book);
    }

    /// Takes in what waits here for places, all of which nothing here can take; hands over those
    /// that are free all the same and that others wait for.
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
            // Who tells the peers takes the rest in.
            self.load.news().notify_one();
        }
    }

    /// Takes in what a peer reports.
    ///
    /// # Errors
    /// [`LoadReportError`]; what it reported before then stands.
    pub fn hear(&self, peer: ReplicaId, report: &[u8]) -> Result<(), LoadReportError> {
        let report = wire::decode(report)?;
        let mut inner = self.lock();
        if inner.book.hear(peer, report) && self.balance_all(&mut inner) {
            self.load.news().notify_one();
        }
        Ok(())
    }

    /// With whom limits are shared.
    #[must_use]
    pub fn standing(&self) -> ShareStanding {
        let inner = self.lock();
        ShareStanding {
            epoch: inner.book.epoch().0,
            members: inner.book.members_len(),
            is_settled: !inner.book.is_unsettled(),
        }
    }

    /// What the peers are told; see [`wire`].
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

    /// Answers whether anything was handed over.
    fn balance_all(&self, inner: &mut Inner) -> bool {
        let backends = inner.book.backends().collect();
        self.balance_each(inner, backends)
    }

    /// As [`Shares::balance_all`], at these backends.
    fn balance_each(&self, inner: &mut Inner, backends: Vec<BackendRef>) -> bool {
        let balanced = backends.into_iter().map(|it| self.balance(inner, it));
        balanced.fold(false, |is_any, gave| is_any | gave)
    }

    /// Hands over what the book says, as far as nothing runs there, and says what may run here.
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
        let settings = registry.admission.as_ref();
        let is_whole = settings.is_some_and(|it| it.batching == Batching::Static);
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
        let is_owing = plan.is_owing && !is_whole;
        if self.load.set_places(backend, limit, allowed, is_owing) {
            self.load.less().notify_one();
        }
        gave
    }
}
