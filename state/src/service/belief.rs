//! Early correction of a capacity that an engine reported: by which predictions fail, not by how
//! much.
//!
//! A capacity that is a few per cent off makes few predictions fail, far less than the bound of
//! [`super::Accuracy`], but those fail by most of what was predicted: a conversation believed to be
//! cached is gone, or one believed to be gone is cached. Replicas count such requests, and those
//! that held. Each failure is a step of a random walk, of which there is one in each direction:
//!
//! - a *lost* prediction counts [`FAILURE`] towards less, and twice that against more;
//! - a *found* one the other way round;
//! - one that *held* counts 1 against both, so that a failure now and then says nothing.
//!
//! A walk that reaches [`EVIDENCE`] moves the capacity by a thirty-second. That is a sequential
//! probability ratio test of "failures go both ways alike" against "four in five go this way".
//!
//! Other causes must not move it. If an engine has lost its cache, or tokens differ from the
//! engine's, more than half of the predictions fail; with a slightly wrong capacity they do not. In
//! that case nothing counts until the engine has computed as many blocks as it holds: by then all
//! earlier beliefs are forgotten or true again. Only a capacity that bounds the belief is
//! corrected.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use super::CapacityObservation;
use crate::ids::{BackendRef, Slot};

/// What a failure counts, in requests that held: one in so many is no evidence.
const FAILURE: u32 = 96;
/// What moves the capacity: so many failures in one direction beyond what held.
const EVIDENCE: u32 = 6 * FAILURE;
/// Judged requests that are looked at together for other causes, at least and at most.
const WINDOW: (u32, u32) = (8, 32);
/// Part by which a step moves the capacity.
const STEP_PART: u32 = 32;
/// Bounds of the correction, in thousandths of the engine's value. What is further off shows in
/// [`super::Accuracy`].
pub(super) const BELIEF_PERMILLE: (u32, u32) = (700, 1400);
/// Maximum number of requests of each kind in a report.
const REQUESTS_MAX: u32 = 1 << 24;
/// Maximum number of computed blocks in a report.
const BLOCKS_MAX: u64 = 1 << 40;

/// One replica's count of predictions for one backend since its last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct BeliefSample {
    /// Backend that predictions were made for.
    pub backend: BackendRef,
    /// Requests of whose prediction at least half was cached, and the other way round.
    pub held: u32,
    /// Requests of whose prediction less than half was cached.
    pub lost: u32,
    /// Requests of which less than half of what was cached was predicted.
    pub found: u32,
    /// Blocks of prompts that were not cached.
    pub computed_blocks: u64,
}

impl BeliefSample {
    /// Whether it counts anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held == 0 && self.lost == 0 && self.found == 0
    }

    /// Whether a replica can have counted so many.
    pub(crate) fn is_plausible(&self) -> bool {
        let counts = [self.held, self.lost, self.found];
        counts.iter().all(|count| *count <= REQUESTS_MAX) && self.computed_blocks <= BLOCKS_MAX
    }
}

/// What is believed of the capacity that one engine told.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
struct Belief {
    /// The walk towards less.
    towards_less: u32,
    /// The walk towards more.
    towards_more: u32,
    /// Judged requests lately, and those of them that failed.
    judged: u32,
    failed: u32,
    /// Blocks that the engine computes until evidence counts again.
    rest_blocks: u64,
    /// Correction as an offset from 1000 thousandths.
    offset_permille: i32,
}

impl Belief {
    fn observe(&mut self, sample: &BeliefSample, holding: CapacityObservation) {
        if self.rest_blocks > 0 {
            self.rest_blocks = self.rest_blocks.saturating_sub(sample.computed_blocks);
            return;
        }
        let Some(capacity) = holding.capacity else {
            return;
        };
        let failed = sample.lost + sample.found;
        let judged = failed + sample.held;
        (self.judged, self.failed) = (self.judged + judged, self.failed + failed);
        // At once, and over the last requests.
        let fail_mostly =
            is_most(failed, judged, WINDOW.0 / 2) || is_most(self.failed, self.judged, WINDOW.0);
        if fail_mostly {
            self.forget_evidence(capacity.into());
            return;
        }
        while self.judged > WINDOW.1 {
            (self.judged, self.failed) = (self.judged / 2, self.failed / 2);
        }
        // As for assumed capacities: below, what goes goes for other reasons.
        if holding.owned * 16 < u64::from(capacity) * 15 {
            (self.towards_less, self.towards_more) = (0, 0);
            return;
        }
        self.towards_less = walk(self.towards_less, sample.lost, sample.found, sample.held);
        self.towards_more = walk(self.towards_more, sample.found, sample.lost, sample.held);
        if self.judged < WINDOW.0 {
            return;
        }
        let now = self.permille();
        let next = if self.towards_less >= EVIDENCE {
            now - now / STEP_PART
        } else if self.towards_more >= EVIDENCE {
            now + now / STEP_PART
        } else {
            return;
        };
        let (least, most) = BELIEF_PERMILLE;
        // Between 700 and 1400.
        self.offset_permille = next.clamp(least, most) as i32 - 1000;
        // Predictions from before it say nothing about it.
        self.forget_evidence(u64::from(capacity) / 8);
    }

    fn forget_evidence(&mut self, rest_blocks: u64) {
        *self = Self {
            rest_blocks,
            offset_permille: self.offset_permille,
            ..Self::default()
        };
    }

    fn permille(&self) -> u32 {
        let permille = u32::try_from(1000_i32.saturating_add(self.offset_permille));
        permille
            .unwrap_or(0)
            .clamp(BELIEF_PERMILLE.0, BELIEF_PERMILLE.1)
    }
}

/// Whether most of so many requests failed, if there are enough to tell.
fn is_most(failed: u32, judged: u32, enough: u32) -> bool {
    judged >= enough && failed > judged / 2
}

/// One direction's walk after so many failures in it, so many against it, and so many that held.
fn walk(at: u32, towards: u32, against: u32, held: u32) -> u32 {
    let down = against.saturating_mul(2 * FAILURE).saturating_add(held);
    let up = at.saturating_add(towards.saturating_mul(FAILURE));
    up.saturating_sub(down)
}

/// Beliefs by slot; only of backends whose engine told a capacity and whose predictions were
/// counted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Beliefs(BTreeMap<Slot, Belief>);

impl Beliefs {
    /// Adds a plausible sample.
    pub(crate) fn observe(&mut self, sample: &BeliefSample, holding: CapacityObservation) {
        if holding.capacity.is_some() {
            let belief = self.0.entry(sample.backend.slot).or_default();
            belief.observe(sample, holding);
        }
    }

    /// Returns the correction for the backend in `slot`, in thousandths.
    pub(crate) fn permille(&self, slot: Slot) -> u32 {
        self.0.get(&slot).map_or(1000, Belief::permille)
    }

    /// Forgets a backend that was removed or starts a new incarnation.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.0.remove(&slot);
    }

    /// Iterates over the slots with a belief, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.0.keys().copied()
    }
}
