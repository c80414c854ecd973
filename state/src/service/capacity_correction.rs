//! Early correction of a capacity that an engine reported, based on which predictions fail rather
//! than on the size of the error.
//!
//! A capacity that is a few per cent off makes few predictions fail, far fewer than the bound of
//! [`super::Accuracy`] requires. But each failure covers most of its prediction: a conversation
//! predicted to be cached is gone, or the reverse. Replicas count failed and correct predictions.
//! Each failure is a step of a random walk; each direction has its own walk:
//!
//! - a *lost* prediction adds [`FAILURE`] to the walk towards less, and subtracts twice that from
//!   the walk towards more;
//! - a *found* one does the reverse;
//! - one that *held* subtracts 1 from both, so that an occasional failure is no evidence.
//!
//! A walk that reaches [`EVIDENCE`] moves the capacity by 1/32. This is a sequential probability
//! ratio test of "failures go both ways alike" against "four in five go this way".
//!
//! Other causes must not move the capacity. If an engine has lost its cache, or tokenises
//! differently, more than half of the predictions fail; a slightly wrong capacity never causes
//! that. Then nothing counts until the engine has computed as many blocks as it holds, because by
//! then all earlier predictions are dropped or true again. Only a capacity that bounds the
//! prediction is corrected.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use super::CapacityObservation;
use crate::ids::{BackendRef, Slot};

/// Weight of a failed prediction, in predictions that held. One failure in this many is no
/// evidence.
const FAILURE: u32 = 96;
/// Level at which a walk moves the capacity: six failures in one direction, net of everything else.
const EVIDENCE: u32 = 6 * FAILURE;
/// Minimum and maximum number of recent predictions that are checked together for other causes.
const WINDOW: (u32, u32) = (8, 32);
/// Inverse step of the capacity: it moves by one part in this many.
const STEP_PART: u32 = 32;
/// Minimum and maximum of the correction, in thousandths of the engine's value. [`super::Accuracy`]
/// detects larger errors.
pub(super) const BELIEF_PERMILLE: (u32, u32) = (700, 1400);
/// Maximum number of requests of each kind in a report.
const REQUESTS_MAX: u32 = 1 << 24;
/// Maximum number of computed blocks in a report.
const BLOCKS_MAX: u64 = 1 << 40;

/// Counts of correct and failed predictions that one replica made for one backend since its last
/// report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct BeliefSample {
    /// Backend that predictions were made for.
    pub backend: BackendRef,
    /// Number of requests that were neither lost nor found.
    pub held: u32,
    /// Number of requests with less than half of their predicted blocks cached.
    pub lost: u32,
    /// Number of requests with less than half of their cached blocks predicted.
    pub found: u32,
    /// Number of prompt blocks that were not cached.
    pub computed_blocks: u64,
}

impl BeliefSample {
    /// Whether the sample counts no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held == 0 && self.lost == 0 && self.found == 0
    }

    /// Whether a replica can have counted the numbers in this sample.
    pub(crate) fn is_plausible(&self) -> bool {
        let counts = [self.held, self.lost, self.found];
        counts.iter().all(|count| *count <= REQUESTS_MAX) && self.computed_blocks <= BLOCKS_MAX
    }
}

/// Correction of the capacity that one engine reported, with the evidence for the next step.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
struct CapacityCorrection {
    /// Level of the walk towards less capacity.
    towards_less: u32,
    /// Level of the walk towards more capacity.
    towards_more: u32,
    /// Number of recent predictions. Both counts are halved when it exceeds the maximum of
    /// `WINDOW`.
    judged: u32,
    /// Number of `judged` predictions that failed.
    failed: u32,
    /// Number of blocks that the engine must compute before evidence counts again.
    rest_blocks: u64,
    /// Correction factor, as an offset from 1000 thousandths.
    offset_permille: i32,
}

impl CapacityCorrection {
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
        // Checks this sample alone and the recent predictions together.
        let fail_mostly =
            is_most(failed, judged, WINDOW.0 / 2) || is_most(self.failed, self.judged, WINDOW.0);
        if fail_mostly {
            self.forget_evidence(capacity.into());
            return;
        }
        while self.judged > WINDOW.1 {
            (self.judged, self.failed) = (self.judged / 2, self.failed / 2);
        }
        // As for assumed capacities: below this, blocks are lost for other reasons.
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
        // Predictions from before the correction do not reflect it.
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

/// Whether more than half of the `judged` predictions failed, given at least `enough` of them.
fn is_most(failed: u32, judged: u32, enough: u32) -> bool {
    judged >= enough && failed > judged / 2
}

/// Returns the level of a walk from `at` after failures `towards` its direction, failures `against`
/// it, and predictions that held.
fn walk(at: u32, towards: u32, against: u32, held: u32) -> u32 {
    let down = against.saturating_mul(2 * FAILURE).saturating_add(held);
    let up = at.saturating_add(towards.saturating_mul(FAILURE));
    up.saturating_sub(down)
}

/// Corrections by slot. Contains only backends whose engine reported a capacity and whose
/// predictions were counted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct CapacityCorrections(BTreeMap<Slot, CapacityCorrection>);

impl CapacityCorrections {
    /// Adds a plausible sample. `holding` describes the backend's current capacity.
    pub(crate) fn observe(&mut self, sample: &BeliefSample, holding: CapacityObservation) {
        if holding.capacity.is_some() {
            let belief = self.0.entry(sample.backend.slot).or_default();
            belief.observe(sample, holding);
        }
    }

    /// Returns the correction factor for the backend in `slot`, in thousandths.
    pub(crate) fn permille(&self, slot: Slot) -> u32 {
        self.0.get(&slot).map_or(1000, CapacityCorrection::permille)
    }

    /// Forgets the correction for a backend that was removed or starts a new incarnation.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.0.remove(&slot);
    }

    /// Iterates over the slots with a correction, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.0.keys().copied()
    }
}
