//! Tracks the load of each backend from this replica and its peers: requests and pending prefill.
//!
//! Load goes directly from replica to replica, never through the log: it is useful for half a
//! second and harmful later. A router that acts on load one second old does worse than one that
//! knows only its own. So a peer's report is ignored once it is older than [`EXPIRY`].
//!
//! One [`BackendLoad`] per incarnation of a backend counts the requests from this replica. Each
//! request holds the gauge that counts it and leaves that gauge when it ends. So a reused slot
//! starts at zero, and the earlier incarnation's numbers still return to zero.

use schemars::JsonSchema;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, Incarnation, ReplicaId, Slot};
use tokio::time::Instant;

use crate::sync::{ArcSwap, Mutex, MutexGuard, Notify};

mod gauge;

pub(crate) use gauge::ReserveRejection;
use gauge::{BackendLoad, LoadDropSignal};
pub use gauge::{LoadGuard, ReservedPlace, SeekGuard};

/// Time after its arrival for which a peer's report counts.
pub const EXPIRY: Duration = Duration::from_millis(500);
/// Interval at which a replica repeats an unchanged report, well below [`EXPIRY`].
pub const KEEPALIVE: Duration = Duration::from_millis(100);
/// Version of the report format, the first byte of a report.
const REPORT_VERSION: u8 = 1;

/// Load of one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, JsonSchema)]
pub struct Load {
    /// Number of requests dispatched and not ended.
    pub running: u32,
    /// Number of these without output so far.
    pub waiting: u32,
    /// Estimated number of uncached prompt tokens of the latter.
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

/// Reason why a load report or share report is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LoadReportError {
    /// The version byte is not supported.
    #[error("load report has version {0}, expected {REPORT_VERSION}")]
    Version(u8),
    /// The report is truncated, has a number out of range, or has slots that do not ascend.
    #[error("load report is malformed")]
    Malformed,
}

/// Last load report of one peer.
struct PeerLoad {
    replica: ReplicaId,
    received: Instant,
    /// Load of each busy backend, in ascending slot order.
    entries: Vec<(BackendRef, Load)>,
}

/// The load of every backend, as far as this replica knows it.
pub struct LoadTable {
    /// Gauges by slot. The vector is replaced when a new incarnation begins, so that a decision
    /// loads all gauges at once.
    gauges: ArcSwap<Vec<Option<Arc<BackendLoad>>>>,
    /// Number of possible slots.
    slots: usize,
    /// Last report of each peer. Each report replaces the vector, so that readers never wait.
    peers: ArcSwap<Vec<Arc<PeerLoad>>>,
    /// Lock held while `peers` or `gauges` is replaced.
    writing: Mutex<()>,
    less: Arc<LoadDropSignal>,
}

/// The gauges of all backends, by slot.
#[derive(Clone, Copy)]
pub(super) struct Gauges<'a>(&'a [Option<Arc<BackendLoad>>]);

impl<'a> Gauges<'a> {
    fn of(self, backend: BackendRef) -> Option<&'a Arc<BackendLoad>> {
        let gauge = self.0.get(usize::from(backend.slot.0))?.as_ref()?;
        (gauge.backend == backend).then_some(gauge)
    }

    /// Whether this replica may have a free place at `backend`. True if its places under `limit`
    /// are unknown, which `LoadTable::reserve` detects.
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

    /// Counts a request with `pending_prefill_tokens` at `backend`, even beyond its limit.
    pub fn begin(&self, backend: BackendRef, pending_prefill_tokens: u64) -> LoadGuard {
        self.take(backend).into_guard(pending_prefill_tokens)
    }

    /// Takes a place at `backend`, even beyond its limit.
    pub fn take(&self, backend: BackendRef) -> ReservedPlace {
        ReservedPlace::beyond(self.gauge(backend))
    }

    /// Counts a request that waits for a place at `backend` that a peer holds.
    #[must_use]
    pub fn seek(&self, backend: BackendRef) -> SeekGuard {
        SeekGuard::of(self.gauge(backend))
    }

    /// Takes one of this replica's places at `backend` under `limit`; `None` means no limit.
    ///
    /// # Errors
    /// Returns a [`ReserveRejection`] if no place is free or another limit was divided.
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

    /// Calls `read` with one consistent view of all gauges.
    pub(super) fn with_gauges<R>(&self, read: impl FnOnce(Gauges<'_>) -> R) -> R {
        read(Gauges(&self.gauges.load()))
    }

    /// Returns the numbers of this replica's free places and of all its places at `backend`; `None`
    /// if they are unknown under `limit`.
    #[must_use]
    pub fn places(&self, backend: BackendRef, limit: u32) -> Option<(u32, u32)> {
        let places = |gauge: &BackendLoad| {
            let places = (gauge.free(), gauge.allowed());
            gauge.is_divided(limit).then_some(places)
        };
        self.with_gauge(backend, places).flatten()
    }

    /// Sets how many places this replica has at `backend` under `limit`, and whether the next place
    /// that becomes free is handed over. Returns whether a waiting request can use an added place.
    pub(super) fn set_places(
        &self,
        backend: BackendRef,
        limit: u32,
        allowed: u32,
        hands_over_next: bool,
    ) -> bool {
        self.gauge(backend)
            .set_places(limit, allowed, hands_over_next)
    }

    /// Reduces this replica's places at `backend` to `allowed` if at most `share` of its requests
    /// run. Returns whether it did.
    pub(super) fn withdraw(&self, backend: BackendRef, share: u32, allowed: u32) -> bool {
        self.gauge(backend).withdraw(share, allowed)
    }

    /// Returns how many requests this replica has started at `backend` in total.
    pub(super) fn started(&self, backend: BackendRef) -> u64 {
        self.with_gauge(backend, BackendLoad::started)
            .unwrap_or_default()
    }

    /// Allows the task that reports to the peers to poll rarely, because nothing runs.
    /// [`LoadTable::report_due`] then also fires when a request starts, here or at a peer. A start
    /// that races with this call may be reported one poll later.
    pub fn set_idle(&self) {
        self.less.set_idle(true);
    }

    /// Whether no requests run from this replica or from a peer whose report has not expired.
    #[must_use]
    pub fn is_idle(&self, now: Instant) -> bool {
        let gauges = self.gauges.load();
        let peers = self.peers.load();
        let is_busy = |peer: &Arc<PeerLoad>| is_fresh(peer, now) && !peer.entries.is_empty();
        gauges.iter().flatten().all(|gauge| gauge.load().is_zero()) && !peers.iter().any(is_busy)
    }

    /// Returns the signal that the peers need a report at once: a place that they wait for became
    /// free or was handed over, more requests wait here, or the idle state ended.
    #[must_use]
    pub fn report_due(&self) -> &Arc<Notify> {
        &self.less.report_due
    }

    /// Removes the limit on this replica's requests at `backend`.
    pub(super) fn clear_limit(&self, backend: BackendRef) {
        self.with_gauge(backend, BackendLoad::clear_limit);
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

    /// Returns the signal that a backend may be less busy: a request ended here, a peer reported,
    /// or this replica gained a place.
    #[must_use]
    pub fn less(&self) -> &Arc<Notify> {
        &self.less.load_dropped
    }

    /// Returns the gauge of `backend`, which is created if needed. A gauge of an earlier
    /// incarnation than the stored one is not stored.
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

    /// Returns the load at `backend` from this replica.
    #[must_use]
    pub fn here(&self, backend: BackendRef) -> Load {
        self.with_gauge(backend, BackendLoad::load)
            .unwrap_or_default()
    }

    /// Returns the load at `backend` from this replica and all peers with a fresh report.
    #[must_use]
    pub fn cluster(&self, backend: BackendRef, now: Instant) -> Load {
        let mut load = Load::default();
        self.add_each(now, 1, |_| backend, |_, part| load.add(part));
        load
    }

    /// Calls `add(i, load)` with the load from this replica, including requests that wait for a place
    /// that a peer holds, and from each peer at the `i`th of
    /// `count` backends. `backend` must return the backends in ascending slot order.
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
                    add(i, gauge.expected());
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

    /// Returns the report of this replica's load for its peers. A version byte is followed by five
    /// LEB128 numbers for each busy backend, in ascending slot order: slot delta, incarnation,
    /// running, waiting, pending prefill tokens.
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

    /// Replaces the earlier report of the peer `from` and removes expired reports of other peers.
    ///
    /// # Errors
    /// Returns a [`LoadReportError`] if `report` is invalid, and keeps the earlier report.
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
        self.less.load_dropped.notify_one();
        Ok(())
    }

    /// Returns the number of peers whose reports have not expired.
    #[must_use]
    pub fn peers_heard(&self, now: Instant) -> usize {
        let peers = self.peers.load();
        peers.iter().filter(|peer| is_fresh(peer, now)).count()
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

/// Decides when to report the load to the peers: after a change, else every [`KEEPALIVE`].
#[derive(Debug, Default)]
pub struct LoadReporter {
    last: Option<(Instant, Vec<u8>)>,
}

impl LoadReporter {
    /// Returns the report to send at `now`; `None` if none is due. Call this every 20 ms.
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
