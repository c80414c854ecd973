//! What one replica has in flight at one backend, and how much it may have.
//!
//! Both are in one word, so that a place is taken or withdrawn only while it is free: two requests
//! never take the last one, and none takes a place that is being handed to a peer.

use std::sync::Arc;

use state::ids::BackendRef;

use super::Load;
use crate::sync::{
    AtomicU32, AtomicU64, Notify,
    Ordering::{Acquire, Relaxed, Release},
};

/// Stands for no limit, and for one that is not divided yet.
const UNDIVIDED: u32 = u32::MAX;

/// What this replica has under way at one life of a backend.
#[derive(Debug)]
pub(super) struct BackendLoad {
    pub(super) backend: BackendRef,
    /// Requests that run, and in the high half how many may.
    places: AtomicU64,
    /// The limit that the number of places follows from.
    limit: AtomicU32,
    /// Whether a place that falls free is to be handed to a peer: not 0.
    owing: AtomicU32,
    started: AtomicU64,
    waiting: AtomicU32,
    pending_prefill_tokens: AtomicU64,
    less: Arc<LessLoadSignal>,
}

/// Who is told when a backend may have become less busy.
#[derive(Debug, Default)]
pub(super) struct LessLoadSignal {
    pub(super) told: Arc<Notify>,
    /// Requests that ended here.
    ended: AtomicU64,
    /// Who tells the peers.
    pub(super) news: Arc<Notify>,
    /// Whether who tells the peers looks seldom, as nothing runs: not 0.
    is_idle: AtomicU32,
}

impl LessLoadSignal {
    pub(super) fn set_idle(&self, is_idle: bool) {
        self.is_idle.store(u32::from(is_idle), Relaxed);
    }

    /// Something runs from here on, here or at a peer. Read by all who dispatch, and written only
    /// by the first of them.
    pub(super) fn busy(&self) {
        if self.is_idle.load(Relaxed) != 0 && self.is_idle.swap(0, Relaxed) != 0 {
            self.news.notify_one();
        }
    }

    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }
}

/// Why no place was reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReserveRejection {
    /// All that this replica has are taken.
    Full,
    /// The limit is another than the one that was divided.
    OtherLimit,
}

/// The two halves of [`BackendLoad::places`].
fn halves(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    let (running, allowed) = ([a, b, c, d], [e, f, g, h]);
    (u32::from_le_bytes(running), u32::from_le_bytes(allowed))
}

fn word(running: u32, allowed: u32) -> u64 {
    u64::from(allowed) << 32 | u64::from(running)
}

impl BackendLoad {
    pub(super) fn new(backend: BackendRef, less: Arc<LessLoadSignal>) -> Self {
        Self {
            backend,
            less,
            places: AtomicU64::new(word(0, UNDIVIDED)),
            limit: AtomicU32::new(UNDIVIDED),
            owing: AtomicU32::new(0),
            started: AtomicU64::new(0),
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

    /// See [`LoadTable::set_places`](super::LoadTable::set_places).
    pub(super) fn set_places(&self, limit: u32, allowed: u32, is_owing: bool) -> bool {
        self.owing.store(u32::from(is_owing), Relaxed);
        let (running, before) = self.change(|running, _| Some((running, allowed)));
        // Who sees this limit sees these places, or later ones.
        self.limit.store(limit, Release);
        allowed > before && allowed > running
    }

    pub(super) fn undivide(&self) {
        if !self.is_divided(UNDIVIDED) {
            self.set_places(UNDIVIDED, UNDIVIDED, false);
        }
    }

    /// See [`LoadTable::withdraw`](super::LoadTable::withdraw).
    pub(super) fn withdraw(&self, share: u32, allowed: u32) -> bool {
        let withdrawn = self.places.fetch_update(Relaxed, Relaxed, |places| {
            let (running, before) = halves(places);
            (running <= share).then(|| word(running, before.min(allowed)))
        });
        withdrawn.is_ok()
    }

    /// Changes the word; answers what it was.
    fn change(&self, to: impl Fn(u32, u32) -> Option<(u32, u32)>) -> (u32, u32) {
        let changed = self.places.fetch_update(Relaxed, Relaxed, |places| {
            let (running, allowed) = halves(places);
            to(running, allowed).map(|(running, allowed)| word(running, allowed))
        });
        halves(changed.unwrap_or_else(|places| places))
    }

    /// A place that was reserved is not used after all. Nothing ended, so it stays here, and nobody
    /// is told: whoever is told looks at the queue again, which may reserve it and not use it again.
    fn put_back(&self) {
        self.change(|running, allowed| Some((running.saturating_sub(1), allowed)));
    }

    /// A request is over. Where peers wait for the place it goes out of this replica's hands at
    /// once, before anything here can take it; whoever tells the peers then says whose it is.
    fn end(&self) {
        let is_owing = self.owing.load(Relaxed) != 0;
        self.change(|running, allowed| {
            let is_place = is_owing && running <= allowed && allowed != UNDIVIDED;
            Some((
                running.saturating_sub(1),
                allowed.saturating_sub(u32::from(is_place)),
            ))
        });
        if is_owing {
            self.less.news.notify_one();
        }
    }
}

/// A place at a backend that nothing runs at yet. Given back when dropped.
#[derive(Debug)]
pub struct ReservedPlace {
    /// `None` once it is used.
    gauge: Option<Arc<BackendLoad>>,
}

impl ReservedPlace {
    /// One that is there in any case.
    pub(super) fn beyond(gauge: Arc<BackendLoad>) -> Self {
        // A carry into the high half would take four billion requests.
        gauge.places.fetch_add(1, Relaxed);
        Self { gauge: Some(gauge) }
    }

    /// One of those that this replica has under `limit`.
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

    /// A request of `pending_prefill_tokens` runs there.
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

/// One request under way: counted in when made, counted out when dropped.
#[derive(Debug)]
pub struct LoadGuard {
    gauge: Arc<BackendLoad>,
    /// What is still counted as pending; `None` once the first byte came.
    pending_prefill_tokens: Option<u64>,
}

impl LoadGuard {
    /// So many prompt tokens are to be computed, not what was thought before.
    pub fn computes(&mut self, pending_prefill_tokens: u64) {
        if let Some(tokens) = &mut self.pending_prefill_tokens {
            let gauge = &self.gauge.pending_prefill_tokens;
            gauge.fetch_add(pending_prefill_tokens, Relaxed);
            gauge.fetch_sub(std::mem::replace(tokens, pending_prefill_tokens), Relaxed);
        }
    }

    /// The prefill is done: the request counts as running only.
    pub fn first_byte(&mut self) {
        if let Some(tokens) = self.pending_prefill_tokens.take() {
            self.gauge.waiting.fetch_sub(1, Relaxed);
            self.gauge.pending_prefill_tokens.fetch_sub(tokens, Relaxed);
        }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.first_byte();
        self.gauge.end();
        self.gauge.less.ended.fetch_add(1, Relaxed);
        self.gauge.less.told.notify_one();
    }
}
