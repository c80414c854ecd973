//! Load per backend: requests and pending prefill, here and on the other replicas.
//!
//! Load goes from replica to replica directly, never through the log: it is worth something for
//! half a second only, and worth less than nothing later (a router that acts on load one second
//! old does worse than one that knows its own only). So a peer's report counts until
//! [`EXPIRY`] after it came, and counts as nothing then.
//!
//! What runs here is counted in one [`BackendLoad`] per life of a backend. Whoever counted
//! something in holds that gauge and counts it out there, so a slot that changes hands in between
//! starts at zero, and the old life's numbers still end at zero.

use schemars::JsonSchema;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, Incarnation, ReplicaId, Slot};
use tokio::time::Instant;

use crate::sync::{ArcSwap, Mutex, MutexGuard, Notify};

mod gauge;

pub(crate) use gauge::ReserveRejection;
use gauge::{BackendLoad, LessLoadSignal};
pub use gauge::{LoadGuard, ReservedPlace};

/// How long a peer's report counts.
pub const EXPIRY: Duration = Duration::from_millis(500);
/// A replica whose load does not change says so this often, well within [`EXPIRY`].
pub const KEEPALIVE: Duration = Duration::from_millis(100);
/// First byte of a report.
const REPORT_VERSION: u8 = 1;

/// Load of one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, JsonSchema)]
pub struct Load {
    /// Requests dispatched and not over.
    pub running: u32,
    /// Of these, requests whose first byte has not come.
    pub waiting: u32,
    /// Uncached prompt tokens of the waiting ones, estimated.
    pub pending_prefill_tokens: u64,
}

impl Load {
    fn add(&mut self, other: Load) {
        self.running = self.running.saturating_add(other.running);
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.pending_prefill_tokens = self
            .pending_prefill_tokens
            .saturating_add(other.pending_prefill_tokens);
    }

    fn is_zero(self) -> bool {
        self == Self::default()
    }
}

/// A report that is none; says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LoadReportError {
    /// Its version byte.
    #[error("load report has version {0}, expected {REPORT_VERSION}")]
    Version(u8),
    /// It ends early, goes on too long, or its slots do not ascend below the limit.
    #[error("load report is malformed")]
    Malformed,
}

/// What one peer reported last.
struct PeerLoad {
    replica: ReplicaId,
    received: Instant,
    /// By slot, ascending.
    entries: Vec<(BackendRef, Load)>,
}

/// The load of every backend, as far as known here.
pub struct LoadTable {
    /// By slot. Replaced as a whole when a backend's life begins, so that a decision takes hold of
    /// all of them at once.
    gauges: ArcSwap<Vec<Option<Arc<BackendLoad>>>>,
    /// How many slots there can be.
    slots: usize,
    /// Replaced as a whole by each report; readers never wait.
    peers: ArcSwap<Vec<Arc<PeerLoad>>>,
    /// Held by those who replace `peers` or a gauge.
    writing: Mutex<()>,
    less: Arc<LessLoadSignal>,
}

/// The gauges of all backends, by slot.
#[derive(Clone, Copy)]
pub(super) struct Gauges<'a>(&'a [Option<Arc<BackendLoad>>]);

impl<'a> Gauges<'a> {
    fn of(self, backend: BackendRef) -> Option<&'a Arc<BackendLoad>> {
        let gauge = self.0.get(usize::from(backend.slot.0))?.as_ref()?;
        (gauge.backend == backend).then_some(gauge)
    }

    /// Whether this replica has a free place at `backend`; true where it is not known how many it
    /// has under this limit, which `LoadTable::reserve` finds out.
    pub(super) fn may_have_place(self, backend: BackendRef, limit: u32) -> bool {
        self.of(backend)
            .is_none_or(|gauge| !gauge.is_divided(limit) || gauge.free() > 0)
    }
}

impl Default for LoadTable {
    fn default() -> Self {
        Self::of_slots(BACKENDS_MAX)
    }
}

impl LoadTable {
    pub(super) fn of_slots(slots: usize) -> Self {
        Self {
            gauges: ArcSwap::default(),
            slots,
            peers: ArcSwap::default(),
            writing: Mutex::new(()),
            less: Arc::default(),
        }
    }

    /// Counts in one request of `pending_prefill_tokens` at `backend`, whether or not it may run
    /// there.
    pub fn begin(&self, backend: BackendRef, pending_prefill_tokens: u64) -> LoadGuard {
        self.take(backend).into_guard(pending_prefill_tokens)
    }

    /// Takes a place at `backend`, whether or not there is one.
    pub fn take(&self, backend: BackendRef) -> ReservedPlace {
        ReservedPlace::beyond(self.gauge(backend))
    }

    /// Takes a place at `backend`, of those that this replica has under this limit.
    ///
    /// # Errors
    /// [`ReserveRejection`].
    pub(super) fn reserve(
        &self,
        backend: BackendRef,
        limit: Option<u32>,
    ) -> Result<ReservedPlace, ReserveRejection> {
        let gauge = self.gauge(backend);
        match limit {
            None => Ok(ReservedPlace::beyond(gauge)),
            Some(limit) => ReservedPlace::within(gauge, limit),
        }
    }

    /// Runs `read` on all gauges, which are taken hold of once.
    pub(super) fn with_gauges<R>(&self, read: impl FnOnce(Gauges<'_>) -> R) -> R {
        read(Gauges(&self.gauges.load()))
    }

    /// Free places of this replica at `backend`, and all it has; `None`: not known under this
    /// limit.
    #[must_use]
    pub fn places(&self, backend: BackendRef, limit: u32) -> Option<(u32, u32)> {
        let places = |gauge: &BackendLoad| {
            let places = (gauge.free(), gauge.allowed());
            gauge.is_divided(limit).then_some(places)
        };
        self.with_gauge(backend, places).flatten()
    }

    /// Says how many places this replica has at `backend`, and whether one that falls free is to
    /// be handed over. Answers whether there are more free ones than before.
    pub(super) fn set_places(
        &self,
        backend: BackendRef,
        limit: u32,
        allowed: u32,
        is_owing: bool,
    ) -> bool {
        self.gauge(backend).set_places(limit, allowed, is_owing)
    }

    /// Takes places from this replica until `allowed` are left, if no more than `share` run.
    pub(super) fn withdraw(&self, backend: BackendRef, share: u32, allowed: u32) -> bool {
        self.gauge(backend).withdraw(share, allowed)
    }

    /// Requests started at `backend` from here, in all.
    pub(super) fn started(&self, backend: BackendRef) -> u64 {
        self.with_gauge(backend, BackendLoad::started)
            .unwrap_or_default()
    }

    /// Nothing runs anywhere, so who tells the peers looks seldom: [`LoadTable::news`] then also
    /// says when something begins, here or at a peer. What begins at this very moment may be told
    /// one look later.
    pub fn set_idle(&self) {
        self.less.set_idle(true);
    }

    /// Whether nothing runs, here or at a peer heard from lately.
    #[must_use]
    pub fn is_idle(&self, now: Instant) -> bool {
        let gauges = self.gauges.load();
        let peers = self.peers.load();
        let is_busy = |peer: &Arc<PeerLoad>| is_fresh(peer, now) && !peer.entries.is_empty();
        gauges.iter().flatten().all(|gauge| gauge.load().is_zero()) && !peers.iter().any(is_busy)
    }

    /// Told when the peers should be told at once: a place that they wait for fell free, or was
    /// handed over.
    #[must_use]
    pub fn news(&self) -> &Arc<Notify> {
        &self.less.news
    }

    /// The backend has no limit any more.
    pub(super) fn undivide(&self, backend: BackendRef) {
        self.with_gauge(backend, BackendLoad::undivide);
    }

    fn with_gauge<R>(
        &self,
        backend: BackendRef,
        read: impl FnOnce(&BackendLoad) -> R,
    ) -> Option<R> {
        self.with_gauges(|gauges| gauges.of(backend).map(|gauge| read(gauge)))
    }

    fn gauge(&self, backend: BackendRef) -> Arc<BackendLoad> {
        if usize::from(backend.slot.0) >= self.slots {
            return Arc::new(self.new_gauge(backend));
        }
        let found = self.with_gauges(|gauges| gauges.of(backend).cloned());
        found.unwrap_or_else(|| self.replace_gauge(backend))
    }

    fn new_gauge(&self, backend: BackendRef) -> BackendLoad {
        BackendLoad::new(backend, Arc::clone(&self.less))
    }

    /// Told when a backend may have become less busy: a request ended here, or a peer reported.
    #[must_use]
    pub fn less(&self) -> &Arc<Notify> {
        &self.less.told
    }

    /// Requests that ended here since the start.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.less.ended()
    }

    /// A dispatch to a life that is over gets a gauge that nobody reads.
    fn replace_gauge(&self, backend: BackendRef) -> Arc<BackendLoad> {
        let _writing = self.lock();
        let gauges = self.gauges.load();
        let slot = usize::from(backend.slot.0);
        let present = gauges.get(slot).and_then(Option::as_ref);
        if let Some(present) = present.filter(|gauge| gauge.backend == backend) {
            return Arc::clone(present);
        }
        let gauge = Arc::new(self.new_gauge(backend));
        if present.is_none_or(|present| present.backend.incarnation < backend.incarnation) {
            let mut replaced = gauges.to_vec();
            replaced.resize(replaced.len().max(slot + 1), None);
            replaced[slot] = Some(Arc::clone(&gauge));
            self.gauges.store(Arc::new(replaced));
        }
        gauge
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What runs at `backend` from here.
    #[must_use]
    pub fn here(&self, backend: BackendRef) -> Load {
        self.with_gauge(backend, BackendLoad::load)
            .unwrap_or_default()
    }

    /// What runs at `backend` from all replicas heard from lately.
    #[must_use]
    pub fn cluster(&self, backend: BackendRef, now: Instant) -> Load {
        let mut load = Load::default();
        self.add_each(now, 1, |_| backend, |_, part| load.add(part));
        load
    }

    /// Calls `add(i, load)` for what runs here and at each peer at the `i`th of `count` backends,
    /// which `backend` names in ascending order of slot. One merge, no search per backend.
    pub fn add_each(
        &self,
        now: Instant,
        count: usize,
        backend: impl Fn(usize) -> BackendRef,
        mut add: impl FnMut(usize, Load),
    ) {
        self.with_gauges(|gauges| {
            for i in 0..count {
                if let Some(gauge) = gauges.of(backend(i)) {
                    add(i, gauge.load());
                }
            }
        });
        for peer in self.peers.load().iter().filter(|peer| is_fresh(peer, now)) {
            let mut entries = peer.entries.iter().peekable();
            for i in 0..count {
                let wanted = backend(i);
                while entries.next_if(|(at, _)| at.slot < wanted.slot).is_some() {}
                if let Some((_, load)) = entries.next_if(|(at, _)| *at == wanted) {
                    add(i, *load);
                }
            }
        }
    }

    /// This replica's load as its peers are told: a version byte, then for each busy backend, in
    /// ascending order, five LEB128 numbers: slot less the one before, incarnation, running,
    /// waiting, pending prefill tokens.
    #[must_use]
    pub fn local_report(&self) -> Vec<u8> {
        let mut report = vec![REPORT_VERSION];
        let mut previous = 0;
        for gauge in self.gauges.load().iter().flatten() {
            let load = gauge.load();
            if load.is_zero() {
                continue;
            }
            let slot = gauge.backend.slot.0;
            put_number(&mut report, u64::from(slot - previous));
            put_number(&mut report, u64::from(gauge.backend.incarnation.0));
            put_number(&mut report, u64::from(load.running));
            put_number(&mut report, u64::from(load.waiting));
            put_number(&mut report, load.pending_prefill_tokens);
            previous = slot;
        }
        report
    }

    /// Takes in a peer's report in place of its earlier one; forgets peers not heard from.
    ///
    /// # Errors
    /// [`LoadReportError`]; the earlier report then stands.
    pub fn merge_report(
        &self,
        from: ReplicaId,
        report: &[u8],
        now: Instant,
    ) -> Result<(), LoadReportError> {
        let entries = read_report(report)?;
        if !entries.is_empty() {
            self.less.busy();
        }
        let _writing = self.lock();
        let mut peers: Vec<_> = self
            .peers
            .load()
            .iter()
            .filter(|peer| peer.replica != from && is_fresh(peer, now))
            .cloned()
            .collect();
        peers.push(Arc::new(PeerLoad {
            replica: from,
            received: now,
            entries,
        }));
        self.peers.store(Arc::new(peers));
        self.less.told.notify_one();
        Ok(())
    }

    /// Peers heard from lately.
    #[must_use]
    pub fn peers_heard(&self, now: Instant) -> usize {
        let peers = self.peers.load();
        peers.iter().filter(|peer| is_fresh(peer, now)).count()
    }

    /// Milliseconds since each known peer's last report, those that count as nothing included.
    #[must_use]
    pub fn peer_ages_ms(&self, now: Instant) -> BTreeMap<ReplicaId, u64> {
        let age = |peer: &Arc<PeerLoad>| {
            let age = now.saturating_duration_since(peer.received).as_millis();
            (peer.replica, u64::try_from(age).unwrap_or(u64::MAX))
        };
        self.peers.load().iter().map(age).collect()
    }
}

fn is_fresh(peer: &PeerLoad, now: Instant) -> bool {
    now.saturating_duration_since(peer.received) <= EXPIRY
}

pub(crate) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

pub(crate) fn take_number(bytes: &mut &[u8]) -> Result<u64, LoadReportError> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(LoadReportError::Malformed)?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return Err(LoadReportError::Malformed);
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(LoadReportError::Malformed)
}

fn read_report(report: &[u8]) -> Result<Vec<(BackendRef, Load)>, LoadReportError> {
    let (&version, mut rest) = report.split_first().ok_or(LoadReportError::Malformed)?;
    if version != REPORT_VERSION {
        return Err(LoadReportError::Version(version));
    }
    let mut entries: Vec<(BackendRef, Load)> = Vec::new();
    let small = |number: u64| u32::try_from(number).map_err(|_| LoadReportError::Malformed);
    while !rest.is_empty() {
        let step = take_number(&mut rest)?;
        let slot = match entries.last() {
            None => step,
            Some(_) if step == 0 => return Err(LoadReportError::Malformed),
            Some((last, _)) => step.saturating_add(u64::from(last.slot.0)),
        };
        if slot >= BACKENDS_MAX as u64 {
            return Err(LoadReportError::Malformed);
        }
        let slot = Slot(u16::try_from(slot).map_err(|_| LoadReportError::Malformed)?);
        let incarnation = Incarnation(small(take_number(&mut rest)?)?);
        let load = Load {
            running: small(take_number(&mut rest)?)?,
            waiting: small(take_number(&mut rest)?)?,
            pending_prefill_tokens: take_number(&mut rest)?,
        };
        entries.push((BackendRef { slot, incarnation }, load));
    }
    Ok(entries)
}

/// Decides when peers are told: at once when the load changed, else every [`KEEPALIVE`].
#[derive(Debug, Default)]
pub struct LoadReporter {
    last: Option<(Instant, Vec<u8>)>,
}

impl LoadReporter {
    /// The report to send at `now`, if one is due. Call it every 20 ms.
    pub fn due(&mut self, table: &LoadTable, now: Instant) -> Option<Vec<u8>> {
        let report = table.local_report();
        let is_silent = self.last.as_ref().is_some_and(|(sent, last)| {
            *last == report && now.saturating_duration_since(*sent) < KEEPALIVE
        });
        if is_silent {
            return None;
        }
        self.last = Some((now, report.clone()));
        Some(report)
    }
}

#[cfg(test)]
mod tests;
