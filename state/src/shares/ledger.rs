//! [`ShareLedger`]: one replica's shares of all limits, and its knowledge of others' shares.

use std::collections::BTreeMap;

use super::members::{Members, epoch_of};
use super::split::{ReplicaShare, Transfer, apportion, split, transfers};
use super::{Demand, Epoch, EpochMembers, PlaceReport, RECENT_MS, Run, SILENT_MS, ShareReport};
use crate::ids::{BackendRef, ReplicaId, SessionId};

/// State of one backend's limit and of this replica's share of it.
#[derive(Debug, Clone, Default)]
struct LimitShare {
    /// Current limit; `None` if there is none. `given` is kept meanwhile, because other replicas
    /// count it.
    limit: Option<u32>,
    /// Number of places handed to each replica since the epoch began.
    given: BTreeMap<ReplicaId, u64>,
    /// Maximum number of running requests until all members are known to be in this epoch. `None`
    /// if only the share bounds them.
    cap: Option<u32>,
    demand: Demand,
    /// Number of requests started since this replica began, as of the last
    /// [`ShareLedger::set_demand`].
    started: u64,
    /// Number of requests started in the current interval of [`RECENT_MS`].
    started_now: u32,
    /// Number of requests started in the previous interval of [`RECENT_MS`].
    started_before: u32,
}

/// Parts that make up a replica's share of a limit, as far as known.
#[derive(Debug, Clone, Copy, Default)]
struct ShareParts {
    /// Even part of the limit, in places.
    base: i64,
    /// Number of places received from other replicas since the epoch began.
    received: i64,
    /// Number of places handed to other replicas since the epoch began.
    given: i64,
}

impl ShareParts {
    fn share(self) -> i64 {
        self.base
            .saturating_add(self.received)
            .saturating_sub(self.given)
    }
}

/// Transfers that this replica should make at one backend.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TransferPlan {
    /// Number of places to hand to each replica.
    pub gifts: Vec<(ReplicaId, u32)>,
    /// Whether this replica should hand over the next place that becomes free here.
    pub hands_over_next: bool,
}

/// One replica's shares of all backends' limits; see the module documentation.
#[derive(Debug, Clone)]
pub struct ShareLedger {
    me: ReplicaId,
    run: Run,
    number: u64,
    members: Members,
    /// Members of the epoch other than this replica, with their runs.
    others: BTreeMap<ReplicaId, Run>,
    epoch: Epoch,
    /// Time at which the caps took effect, in awake milliseconds; `None` if there are none.
    capped_ms: Option<u64>,
    /// Whether the last [`ShareLedger::advance_time`] expected any other replica.
    is_expecting: bool,
    recent_since_ms: u64,
    backends: BTreeMap<BackendRef, LimitShare>,
}

impl ShareLedger {
    /// Creates the ledger of a replica that has not heard any other replica yet.
    #[must_use]
    pub fn new(me: ReplicaId, session: SessionId) -> Self {
        let run = Run {
            session,
            generation: 0,
        };
        Self {
            me,
            run,
            number: 0,
            members: Members::default(),
            others: BTreeMap::new(),
            epoch: epoch_of(&BTreeMap::from([(me, run)])),
            capped_ms: None,
            is_expecting: false,
            recent_since_ms: 0,
            backends: BTreeMap::new(),
        }
    }

    /// Updates the time and `expected`, the other replicas of the cluster that can report shares. A
    /// replica that starts among others waits for their reports before it uses its share.
    pub fn advance_time(&mut self, now_ms: u64, expected: &[ReplicaId]) {
        self.members.advance_time(now_ms, expected);
        if !self.is_expecting && !expected.is_empty() {
            self.cap();
        }
        self.is_expecting = !expected.is_empty();
        self.follow_members(None);
        self.members.forget_silent();
        self.release();
        if self.members.awake_ms() - self.recent_since_ms >= RECENT_MS {
            self.recent_since_ms = self.members.awake_ms();
            for share in self.backends.values_mut() {
                share.started_before = std::mem::take(&mut share.started_now);
            }
        }
    }

    /// Records a report of `peer`. Returns whether it is newer than the peer's last one.
    pub fn record_report(&mut self, peer: ReplicaId, report: ShareReport) -> bool {
        if peer == self.me || self.members.is_late(peer, &report) {
            return false;
        }
        self.follow_members(Some((peer, &report)));
        self.members.record_report(peer, report);
        self.release();
        true
    }

    /// Sets the backends and their limits. Forgets all backends that `limits` lacks.
    pub fn set_limits(&mut self, limits: &BTreeMap<BackendRef, Option<u32>>) {
        self.backends
            .retain(|backend, _| limits.contains_key(backend));
        for (backend, limit) in limits {
            self.set_limit(*backend, *limit);
        }
    }

    /// Sets the limit of one backend; `None` if it has none.
    pub fn set_limit(&mut self, backend: BackendRef, limit: Option<u32>) {
        if limit.is_none() && !self.backends.contains_key(&backend) {
            return;
        }
        let cap = self.capped_ms.map(|_| 0);
        let new = || LimitShare {
            cap,
            ..LimitShare::default()
        };
        self.backends.entry(backend).or_insert_with(new).limit = limit;
    }

    /// Sets this replica's demand at a backend: requests `running` and `waiting` now, the wait so
    /// far (`waited_ms`), and the number of requests `started` since the replica began.
    pub fn set_demand(&mut self, backend: BackendRef, demand: Demand, started: u64) {
        let Some(share) = self.backends.get_mut(&backend) else {
            return;
        };
        let new = started.saturating_sub(share.started);
        share.started = started;
        share.started_now = share
            .started_now
            .saturating_add(u32::try_from(new).unwrap_or(u32::MAX));
        share.demand = Demand {
            recent: share.started_now.saturating_add(share.started_before),
            ..demand
        };
    }

    /// Iterates over the backends with a limit.
    pub fn backends(&self) -> impl Iterator<Item = BackendRef> {
        let limited = self.backends.iter().filter(|(_, it)| it.limit.is_some());
        limited.map(|(backend, _)| *backend)
    }

    /// Returns a backend's current limit; `None` if it has none.
    #[must_use]
    pub fn limit(&self, backend: BackendRef) -> Option<u32> {
        self.backends.get(&backend)?.limit
    }

    /// Returns how many requests this replica may run at a backend; `None` if no limit is known.
    #[must_use]
    pub fn allowed(&self, backend: BackendRef) -> Option<u32> {
        let share = self.backends.get(&backend)?;
        let limit = share.limit?;
        let own = self.parts_of(backend, limit, self.me);
        // Places that some members lack are among those that others received, but it is unknown
        // from whom. Until they are handed back, no receiver uses that many.
        let unused = match own.received {
            0 => 0,
            received => self.total_deficit(backend, limit).min(received),
        };
        let places = own.share().saturating_sub(unused);
        let places = u32::try_from(places.max(0)).unwrap_or(u32::MAX);
        Some(share.cap.map_or(places, |cap| cap.min(places)))
    }

    /// Returns the number of places that this replica holds at a backend in the current epoch.
    /// Negative if a limit fell below what was handed over. `None` if no limit is known.
    #[must_use]
    pub fn share(&self, backend: BackendRef) -> Option<i64> {
        let limit = self.backends.get(&backend)?.limit?;
        Some(self.share_of(backend, limit, self.me))
    }

    fn share_of(&self, backend: BackendRef, limit: u32, replica: ReplicaId) -> i64 {
        self.parts_of(backend, limit, replica).share()
    }

    /// Returns the sum of the members' negative shares, as a positive number.
    fn total_deficit(&self, backend: BackendRef, limit: u32) -> i64 {
        let members = self.members().into_iter();
        let shares = members.map(|replica| self.share_of(backend, limit, replica));
        shares.fold(0, |total_deficit, share| {
            total_deficit.saturating_add(share.min(0).saturating_neg())
        })
    }

    fn parts_of(&self, backend: BackendRef, limit: u32, replica: ReplicaId) -> ShareParts {
        let members = self.members();
        let Ok(place) = members.binary_search(&replica) else {
            return ShareParts::default();
        };
        let rotation = usize::from(backend.slot.0);
        let base = apportion(i64::from(limit), &vec![1; members.len()], rotation)[place];
        let own = self.backends.get(&backend).map(|it| &it.given);
        let own_to = |to: &ReplicaId| own.and_then(|it| it.get(to)).copied().unwrap_or(0);
        let own_total = || own.map_or(0, |it| it.values().sum::<u64>());
        let mut received = if replica == self.me {
            0
        } else {
            own_to(&replica)
        };
        let mut given = if replica == self.me { own_total() } else { 0 };
        for (id, report) in self.in_epoch() {
            let Some(place) = report.place(backend) else {
                continue;
            };
            received += place.given_to(replica);
            if id == replica {
                given = place.given.iter().map(|(_, places)| *places).sum();
            }
        }
        let signed = |places: u64| i64::try_from(places).unwrap_or(i64::MAX);
        ShareParts {
            base,
            received: signed(received),
            given: signed(given),
        }
    }

    fn members(&self) -> Vec<ReplicaId> {
        let mut members: Vec<ReplicaId> = self.others.keys().copied().collect();
        let at = members.partition_point(|id| *id < self.me);
        members.insert(at, self.me);
        members
    }

    /// Iterates over the reports of the members that are in this replica's epoch.
    fn in_epoch(&self) -> impl Iterator<Item = (ReplicaId, &ShareReport)> {
        let heard = self.members.heard();
        heard.filter(|(_, report)| report.epoch == self.epoch)
    }

    /// Plans which places to hand over at a backend; [`ShareLedger::give`] then does it. If
    /// `gather_spare`, gathers the unused places at one replica.
    #[must_use]
    pub fn plan(&self, backend: BackendRef, gather_spare: bool) -> TransferPlan {
        let (Some(own), Some(share)) = (self.backends.get(&backend), self.share(backend)) else {
            return TransferPlan::default();
        };
        let limit = own.limit.unwrap_or_default();
        let mut replica_shares = vec![ReplicaShare {
            replica: self.me,
            share,
            demand: own.demand,
        }];
        // A replica that does not hear this one would not receive what it is given.
        let peers = self.in_epoch().filter(|(_, it)| it.has_heard(self.me));
        replica_shares.extend(peers.map(|(replica, report)| {
            ReplicaShare {
                replica,
                share: self.share_of(backend, limit, replica),
                demand: report
                    .place(backend)
                    .map_or_else(Demand::default, |it| it.demand),
            }
        }));
        if replica_shares.len() == 1 {
            return TransferPlan::default();
        }
        replica_shares.sort_unstable_by_key(|it| it.replica);
        let me = replica_shares.partition_point(|it| it.replica < self.me);
        let places: i64 = replica_shares.iter().map(|it| it.share).sum();
        let rotation = usize::from(backend.slot.0);
        let split = split(places.max(0), &replica_shares, rotation, gather_spare);
        let own_gifts = transfers(&replica_shares, &split.targets)
            .into_iter()
            .filter(|it| it.from == me);
        let gift = |it: Transfer| {
            let places = u32::try_from(it.places).unwrap_or(u32::MAX);
            (replica_shares[it.to].replica, places)
        };
        let running = i64::from(own.demand.running);
        let is_over = |it: &ReplicaShare| i64::from(it.demand.running) > it.share;
        let mut peers = replica_shares.iter().filter(|it| it.replica != self.me);
        TransferPlan {
            gifts: own_gifts.map(gift).collect(),
            hands_over_next: peers.any(is_over)
                || split.fair.is_some_and(|fair| running > fair[me]),
        }
    }

    /// Iterates over the limited backends for which other replicas last reported waiting requests.
    pub fn wanted_elsewhere(&self) -> impl Iterator<Item = BackendRef> {
        let is_wanted = |backend: &BackendRef| {
            let mut reported = self.in_epoch().filter_map(|(_, it)| it.place(*backend));
            reported.any(|it| it.demand.waiting > 0)
        };
        self.backends().filter(is_wanted)
    }

    /// Hands `places` at a backend over to the replica `to`. The caller must ensure that this
    /// replica does not use them.
    pub fn give(&mut self, backend: BackendRef, to: ReplicaId, places: u32) {
        if let Some(share) = self.backends.get_mut(&backend) {
            *share.given.entry(to).or_default() += u64::from(places);
        }
    }

    /// Returns the next report to send to the other replicas.
    pub fn report(&mut self) -> ShareReport {
        self.number += 1;
        let places = self.backends.iter().map(|(backend, share)| PlaceReport {
            backend: *backend,
            demand: share.demand,
            given: share.given.iter().map(|(to, it)| (*to, *it)).collect(),
        });
        let is_told = |it: &PlaceReport| it.demand != Demand::default() || !it.given.is_empty();
        ShareReport {
            run: self.run,
            number: self.number,
            epoch: self.epoch,
            heard: self.members.heard().map(|(id, it)| (id, it.run)).collect(),
            places: places.filter(is_told).collect(),
        }
    }

    /// Returns the members of this replica's epoch.
    #[must_use]
    pub fn epoch_members(&self) -> EpochMembers {
        EpochMembers {
            epoch: self.epoch,
            members: self.members(),
            is_settled: !self.is_unsettled(),
            awake_ms: self.members.awake_ms(),
        }
    }

    /// Returns the current epoch of this replica.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the number of replicas in the epoch, including this one.
    #[must_use]
    pub fn members_len(&self) -> usize {
        self.others.len() + 1
    }

    /// Whether some members are not known yet to be in this replica's epoch.
    #[must_use]
    pub fn is_unsettled(&self) -> bool {
        self.capped_ms.is_some()
    }

    /// Starts another epoch if the members have changed. `next` is a report about to be recorded,
    /// which already counts.
    fn follow_members(&mut self, next: Option<(ReplicaId, &ShareReport)>) {
        let others = self.members.others(self.me, next);
        if others == self.others {
            return;
        }
        // Must precede all changes, because the caps come from the epoch that ends.
        self.cap();
        let sessions = |members: &BTreeMap<ReplicaId, Run>| -> Vec<(ReplicaId, SessionId)> {
            members.iter().map(|(id, run)| (*id, run.session)).collect()
        };
        if sessions(&others) != sessions(&self.others) {
            self.run.generation += 1;
        }
        self.others = others;
        let mut members = self.others.clone();
        members.insert(self.me, self.run);
        self.epoch = epoch_of(&members);
        for share in self.backends.values_mut() {
            share.given.clear();
        }
    }

    /// Caps the running requests at each backend at the number allowed now.
    fn cap(&mut self) {
        let allowed: Vec<Option<u32>> = self
            .backends
            .keys()
            .map(|backend| self.allowed(*backend))
            .collect();
        for (share, allowed) in self.backends.values_mut().zip(allowed) {
            share.cap = allowed.or(share.cap);
        }
        self.capped_ms.get_or_insert(self.members.awake_ms());
    }

    /// Lifts the caps once all members are in this epoch, or have had enough time to join it.
    fn release(&mut self) {
        let Some(since) = self.capped_ms else { return };
        let is_over = self.members.awake_ms().saturating_sub(since) > SILENT_MS;
        let agreed = self.in_epoch().count() == self.others.len();
        if is_over || (agreed && !self.members.lacks_any()) {
            self.capped_ms = None;
            self.backends.values_mut().for_each(|it| it.cap = None);
        }
    }
}
