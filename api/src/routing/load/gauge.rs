//! Counts the requests that one replica has in flight at one backend, and how many it may have.
//!
//! Both numbers share one word, so that a place is taken or withdrawn only while it is free: two
//! requests never take the same last place, and no request takes a place that is handed to a peer.

use std::sync::Arc;

use state::ids::BackendRef;

use super::Load;
use crate::sync::{
    AtomicU32, AtomicU64, Notify,
    Ordering::{Acquire, Relaxed, Release},
};

/// Limit or number of allowed requests that means: no limit, or one that is not divided yet.
const UNDIVIDED: u32 = u32::MAX;

/// Load from this replica at one incarnation of a backend.
#[derive(Debug)]
pub(super) struct BackendLoad {
    pub(super) backend: BackendRef,
    /// Number of running requests in the low half, number of allowed requests in the high half.
    places: AtomicU64,
    /// Limit from which the number of allowed requests was derived.
    limit: AtomicU32,
    /// Nonzero if the next place that becomes free is handed to a peer.
    hand_over_next_free: AtomicU32,
    started: AtomicU64,
    /// Number of requests here that wait for a place that a peer holds.
    sought: AtomicU32,
    waiting: AtomicU32,
    pending_prefill_tokens: AtomicU64,
    less: Arc<LoadDropSignal>,
}

/// Signals for tasks that wait until a backend may be less busy.
#[derive(Debug, Default)]
pub(super) struct LoadDropSignal {
    pub(super) load_dropped: Arc<Notify>,
    /// Wakes the task that reports to the peers.
    pub(super) report_due: Arc<Notify>,
    /// Nonzero if the task that reports to the peers polls rarely because nothing runs.
    is_idle: AtomicU32,
}

impl LoadDropSignal {
    pub(super) fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(u32::from(is_idle), Relaxed);
    }

    /// Ends the idle state because a request runs here or at a peer. Every dispatch reads the flag,
    /// and only the first one writes it.
    pub(super) fn busy(&self) {
        if self.is_idle.load(Relaxed) != 0 && self.is_idle.swap(0, Relaxed) != 0 {
            self.report_due.notify_one();
        }
    }
}

/// Reason why no place was reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReserveRejection {
    /// All places of this replica are taken.
    Full,
    /// The places were derived from another limit.
    OtherLimit,
}

/// Splits the word [`BackendLoad::places`] into the numbers of running and allowed requests.
fn halves(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    let (running, allowed) = ([a, b, c, d], [e, f, g, h]);
    (u32::from_le_bytes(running), u32::from_le_bytes(allowed))
}

fn word(running: u32, allowed: u32) -> u64 {
    u64::from(allowed) << 32 | u64::from(running)
}

impl BackendLoad {
    pub(super) fn new(backend: BackendRef, less: Arc<LoadDropSignal>) -> Self {
        Self {
            backend,
            less,
            places: AtomicU64::new(word(0, UNDIVIDED)),
            limit: AtomicU32::new(UNDIVIDED),
            hand_over_next_free: AtomicU32::new(0),
            started: AtomicU64::new(0),
            sought: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            pending_prefill_tokens: AtomicU64::new(0),
        }
    }

    pub(super) fn load(&self) -> Load {
        Load {
            running: halves(self.places.load(Relaxed)).0,
            waiting: self.waiting.load(Relaxed),
            pending_prefill_tokens: self.pending_prefill_tokens.load(Relaxed),
        }
    }

    /// Returns [`BackendLoad::load`] as it is once the sought places have arrived, so that no more
    /// requests seek a place than are free.
    pub(super) fn expected(&self) -> Load {
        let (load, sought) = (self.load(), self.sought.load(Relaxed));
        Load {
            running: load.running.saturating_add(sought),
            waiting: load.waiting.saturating_add(sought),
            ..load
        }
    }

    pub(super) fn is_divided(&self, limit: u32) -> bool {
        self.limit.load(Acquire) == limit
    }

    pub(super) fn allowed(&self) -> u32 {
        halves(self.places.load(Relaxed)).1
    }

    pub(super) fn free(&self) -> u32 {
        let (running, allowed) = halves(self.places.load(Relaxed));
        allowed.saturating_sub(running)
    }

    pub(super) fn started(&self) -> u64 {
        self.started.load(Relaxed)
    }

    /// Implements [`LoadTable::set_places`](super::LoadTable::set_places).
    pub(super) fn set_places(&self, limit: u32, allowed: u32, hands_over_next: bool) -> bool {
        self.hand_over_next_free
            .store(u32::from(hands_over_next), Relaxed);
        let (running, before) = self.change(|running, _| Some((running, allowed)));
        // A reader of this limit also sees these places, or later ones.
        self.limit.store(limit, Release);
        allowed > before && allowed > running
    }

    pub(super) fn clear_limit(&self) {
        if !self.is_divided(UNDIVIDED) {
            self.set_places(UNDIVIDED, UNDIVIDED, false);
        }
    }

    /// Implements [`LoadTable::withdraw`](super::LoadTable::withdraw).
    pub(super) fn withdraw(&self, share: u32, allowed: u32) -> bool {
        let withdrawn = self.places.fetch_update(Relaxed, Relaxed, |places| {
            let (running, before) = halves(places);
            (running <= share).then(|| word(running, before.min(allowed)))
        });
        withdrawn.is_ok()
    }

    /// Changes `places` to the numbers that `to` returns, if any. Returns the previous numbers of
    /// running and allowed requests.
    fn change(&self, to: impl Fn(u32, u32) -> Option<(u32, u32)>) -> (u32, u32) {
        let changed = self.places.fetch_update(Relaxed, Relaxed, |places| {
            let (running, allowed) = halves(places);
            to(running, allowed).map(|(running, allowed)| word(running, allowed))
        });
        halves(changed.unwrap_or_else(|places| places))
    }

    /// Gives back an unused place. It stays with this replica, and no waiter is notified: the
    /// waiter might reserve and give back the same place again.
    fn put_back(&self) {
        self.change(|running, allowed| Some((running.saturating_sub(1), allowed)));
    }

    /// Ends a request. If peers wait for its place, the place leaves this replica at once, before a
    /// request here can take it. The task that reports to the peers then assigns it.
    fn end(&self) {
        let hands_over_next = self.hand_over_next_free.load(Relaxed) != 0;
        self.change(|running, allowed| {
            let is_place = hands_over_next && running <= allowed && allowed != UNDIVIDED;
            Some((
                running.saturating_sub(1),
                allowed.saturating_sub(u32::from(is_place)),
            ))
        });
        if hands_over_next {
            self.less.report_due.notify_one();
        }
    }
}

/// A reserved place at a backend, not used by a request yet. Dropping it gives the place back.
#[derive(Debug)]
pub struct ReservedPlace {
    /// Gauge that counts the place; `None` once a request uses it.
    gauge: Option<Arc<BackendLoad>>,
}

impl ReservedPlace {
    /// Takes a place regardless of any limit.
    pub(super) fn beyond(gauge: Arc<BackendLoad>) -> Self {
        // Overflow into the high half would take four billion requests.
        gauge.places.fetch_add(1, Relaxed);
        Self { gauge: Some(gauge) }
    }

    /// Takes one of this replica's places under `limit`, if one is free.
    pub(super) fn within(gauge: Arc<BackendLoad>, limit: u32) -> Result<Self, ReserveRejection> {
        if !gauge.is_divided(limit) {
            return Err(ReserveRejection::OtherLimit);
        }
        let taken = gauge.places.fetch_update(Relaxed, Relaxed, |places| {
            let (running, allowed) = halves(places);
            (running < allowed).then(|| word(running + 1, allowed))
        });
        match taken {
            Ok(_) => Ok(Self { gauge: Some(gauge) }),
            Err(_) => Err(ReserveRejection::Full),
        }
    }

    /// Starts a request with `pending_prefill_tokens` in this place.
    pub fn into_guard(mut self, pending_prefill_tokens: u64) -> LoadGuard {
        let gauge = self.gauge.take();
        let gauge = gauge.expect("it is taken here only, and this takes all");
        gauge.started.fetch_add(1, Relaxed);
        gauge.waiting.fetch_add(1, Relaxed);
        gauge
            .pending_prefill_tokens
            .fetch_add(pending_prefill_tokens, Relaxed);
        gauge.less.busy();
        LoadGuard {
            gauge,
            pending_prefill_tokens: Some(pending_prefill_tokens),
        }
    }
}

impl Drop for ReservedPlace {
    fn drop(&mut self) {
        if let Some(gauge) = self.gauge.take() {
            gauge.put_back();
        }
    }
}

/// A request that waits for a place that a peer holds, counted from creation to drop.
#[derive(Debug)]
pub struct SeekGuard(Arc<BackendLoad>);

impl SeekGuard {
    pub(super) fn of(gauge: Arc<BackendLoad>) -> Self {
        gauge.sought.fetch_add(1, Relaxed);
        Self(gauge)
    }
}

impl Drop for SeekGuard {
    fn drop(&mut self) {
        self.0.sought.fetch_sub(1, Relaxed);
    }
}

/// One request in flight, counted from creation to drop.
#[derive(Debug)]
pub struct LoadGuard {
    gauge: Arc<BackendLoad>,
    /// Prompt tokens counted as pending; `None` after the first token.
    pending_prefill_tokens: Option<u64>,
}

impl LoadGuard {
    /// Replaces the number of pending prompt tokens. Has no effect after the first token.
    pub fn computes(&mut self, pending_prefill_tokens: u64) {
        if let Some(tokens) = &mut self.pending_prefill_tokens {
            let gauge = &self.gauge.pending_prefill_tokens;
            gauge.fetch_add(pending_prefill_tokens, Relaxed);
            gauge.fetch_sub(std::mem::replace(tokens, pending_prefill_tokens), Relaxed);
        }
    }

    /// Marks the prefill as done: the request counts only as running.
    pub fn first_token(&mut self) {
        if let Some(tokens) = self.pending_prefill_tokens.take() {
            self.gauge.waiting.fetch_sub(1, Relaxed);
            self.gauge.pending_prefill_tokens.fetch_sub(tokens, Relaxed);
        }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.first_token();
        self.gauge.end();
        self.gauge.less.load_dropped.notify_one();
    }
}
