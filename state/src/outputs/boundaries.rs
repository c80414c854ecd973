//! Bins of equal mass: Algorithm 6 computes them from a histogram, Algorithm 4 finds a request's
//! bin.
//!
//! The original algorithms have two faults. Their bin 0 starts at the shortest observed length, so
//! a shorter prediction matches no bin and falls through to the last, which has the longest
//! outputs. And equal quantiles produce bins that cannot hold anything. Here bin 0 starts at 0, the
//! last bin is open, and equal edges merge, so that there are `K_eff <= K` bins and each of them
//! has mass.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::histogram::Histogram;

/// Upper bounds of all bins but the last, which is unbounded. Ascending, the first above 0.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct Boundaries {
    edges: Vec<u32>,
}

impl Boundaries {
    /// Returns `bins` bins of equal mass, fewer where lengths repeat (Algorithm 6). Each edge is
    /// the smallest end of a bucket up to which the mass reaches the share of the next quantile.
    #[must_use]
    pub fn equal_mass(histogram: &Histogram, bins: u16) -> Self {
        let total = u64::from(histogram.total());
        let bins = u64::from(bins);
        let mut edges = Vec::new();
        let (mut below, mut quantile) = (0, 1);
        for bucket in histogram.buckets() {
            below += u64::from(bucket.weight);
            if below == total {
                // No length lies beyond, so an edge here would bound an empty bin.
                break;
            }
            if below * bins >= quantile * total {
                edges.push(bucket.end);
                // Quantiles that fall on the same edge are merged.
                quantile = below * bins / total + 1;
            }
        }
        Self { edges }
    }

    /// Returns bins with the given upper ends, to replay known bins.
    ///
    /// # Errors
    /// If the edges do not ascend from above 0.
    pub fn from_edges(edges: Vec<u32>) -> Result<Self, &'static str> {
        let boundaries = Self { edges };
        boundaries
            .is_sound()
            .then_some(boundaries)
            .ok_or("edges of bins do not ascend from above 0")
    }

    /// Returns the number of bins, at least 1.
    #[must_use]
    pub fn bins(&self) -> u16 {
        u16::try_from(self.edges.len() + 1).expect("bins are counted in 16 bits")
    }

    /// Returns the bin of an output of `tokens` tokens (Algorithm 4).
    #[must_use]
    pub fn bin_of(&self, tokens: u32) -> u16 {
        let bin = self.edges.partition_point(|edge| *edge <= tokens);
        u16::try_from(bin).expect("bins are counted in 16 bits")
    }

    /// Returns the upper ends of all bins but the last, which is unbounded.
    #[must_use]
    pub fn edges(&self) -> &[u32] {
        &self.edges
    }

    pub(super) fn is_sound(&self) -> bool {
        self.edges.len() < usize::from(u16::MAX)
            && self.edges.first().is_none_or(|edge| *edge > 0)
            && self.edges.is_sorted_by(|a, b| a < b)
    }
}
