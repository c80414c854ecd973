//! Output lengths of one model: the histogram, the bins computed from it, and when to recompute
//! them.

use bincode::{Decode, Encode};

use super::boundaries::Boundaries;
use super::histogram::Histogram;

/// Number of outputs after which the bins are always recomputed.
const OUTPUTS_PER_REBIN: u32 = 256;
/// Number of outputs after which the bins are recomputed if their masses have drifted apart.
const OUTPUTS_PER_LOOK: u32 = 64;

/// Output lengths of one model, and the bins that follow from them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct ModelOutputs {
    histogram: Histogram,
    boundaries: Boundaries,
    /// Number of outputs in each bin since the bins were computed; empty if there were none.
    since: Vec<u32>,
    /// Number of all outputs ever observed.
    seen: u64,
    /// Value of the observation count (`Outputs::clock`) at the last output.
    heard_at: u64,
}

impl ModelOutputs {
    pub(super) fn observe(&mut self, tokens: &[u32], bins: u16, at: u64) {
        self.heard_at = at;
        for tokens in tokens {
            self.seen = self.seen.saturating_add(1);
            self.histogram.add(*tokens);
            if bins > 1 {
                self.count(*tokens, bins);
            }
        }
    }

    /// Recomputes `bins` bins, with effect from the log index being applied.
    pub(super) fn rebin(&mut self, bins: u16) {
        self.boundaries = if bins > 1 {
            Boundaries::equal_mass(&self.histogram, bins)
        } else {
            Boundaries::default()
        };
        self.since = Vec::new();
    }

    fn count(&mut self, tokens: u32, bins: u16) {
        self.since.resize(self.boundaries.bins().into(), 0);
        self.since[usize::from(self.boundaries.bin_of(tokens))] += 1;
        let outputs: u32 = self.since.iter().sum();
        if outputs >= OUTPUTS_PER_REBIN || outputs >= OUTPUTS_PER_LOOK && self.has_drifted(bins) {
            self.rebin(bins);
        }
    }

    /// Whether the share of one bin exceeds the equal share `1/K` by more than half of the rest.
    fn has_drifted(&self, bins: u16) -> bool {
        let outputs: u64 = self.since.iter().map(|it| u64::from(*it)).sum();
        let most = u64::from(self.since.iter().max().copied().unwrap_or(0));
        let bins = u64::from(bins);
        // The largest share is above 1/K + (1 - 1/K) / 2.
        most * 2 * bins > outputs * (bins + 1)
    }

    /// Returns the histogram of lengths.
    #[must_use]
    pub fn histogram(&self) -> &Histogram {
        &self.histogram
    }

    /// Returns the boundaries of the bins.
    #[must_use]
    pub fn boundaries(&self) -> &Boundaries {
        &self.boundaries
    }

    /// Returns the number of all outputs ever observed.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.seen
    }

    pub(super) fn heard_at(&self) -> u64 {
        self.heard_at
    }

    pub(super) fn is_sound(&self) -> bool {
        let bins = usize::from(self.boundaries.bins());
        let fits = self.since.is_empty() || self.since.len() == bins;
        let is_fresh = |outputs: &u32| *outputs < OUTPUTS_PER_REBIN;
        self.histogram.is_sound()
            && self.boundaries.is_sound()
            && fits
            && self.since.iter().all(is_fresh)
    }
}
