//! Cache tiers below the GPU, to which engines copy blocks before they evict them.
//!
//! A prompt's blocks are read from the GPU as far as they are there, and then from the fastest tier
//! that holds the next one. So what counts is a *level*: a tier with all faster ones. At a level, an
//! engine holds the blocks that are on any of its tiers, along with every block before them. Level 0
//! is the GPU alone, whose blocks are in the ordinary index; [`TierIndexes`] has one for each further
//! level, with reports only.
//!
//! A level begins with the first block that an engine reports on its tier. Until then the engine has
//! no blocks there, not even those of its GPU, so engines without tiers cost nothing.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::InvariantError;
use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::view::BlockView;

/// Number of tiers below the GPU.
pub const LOWER_TIERS: usize = 3;
/// Number of levels: the GPU, and one for each tier below it.
pub(super) const LEVELS: usize = 1 + LOWER_TIERS;

/// A cache tier below the GPU, fastest first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode, Serialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum LowerTier {
    /// Memory of the engine's host.
    Cpu,
    /// Storage of the engine's host.
    Disk,
    /// A store that several engines share.
    Store,
}

impl LowerTier {
    /// All tiers below the GPU, fastest first.
    pub const ALL: [Self; LOWER_TIERS] = [Self::Cpu, Self::Disk, Self::Store];

    /// Returns the name used by the admin API and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Disk => "disk",
            Self::Store => "store",
        }
    }

    /// Returns the tier's place in arrays of lower tiers.
    #[must_use]
    pub fn at(self) -> usize {
        self as usize
    }
}

/// Number of blocks on each tier below the GPU.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
pub struct LowerTierBlocks {
    /// In memory of the engine's host.
    pub cpu: u32,
    /// In storage of the engine's host.
    pub disk: u32,
    /// In a store that several engines share.
    pub store: u32,
}

impl From<[u32; LOWER_TIERS]> for LowerTierBlocks {
    fn from([cpu, disk, store]: [u32; LOWER_TIERS]) -> Self {
        Self { cpu, disk, store }
    }
}

impl LowerTierBlocks {
    /// Returns the numbers, fastest tier first.
    #[must_use]
    pub fn all(self) -> [u32; LOWER_TIERS] {
        [self.cpu, self.disk, self.store]
    }

    /// Adds to `matched` leading blocks of a prompt those that follow up to `found`, as blocks of
    /// `tier`.
    pub fn extend(&mut self, matched: &mut u32, tier: LowerTier, found: u32) {
        let more = found.saturating_sub(*matched);
        *matched += more;
        match tier {
            LowerTier::Cpu => self.cpu += more,
            LowerTier::Disk => self.disk += more,
            LowerTier::Store => self.store += more,
        }
    }

    /// Removes the last `count` blocks, slowest tier first.
    pub fn shorten(&mut self, mut count: u32) {
        for blocks in [&mut self.store, &mut self.disk, &mut self.cpu] {
            let less = count.min(*blocks);
            *blocks -= less;
            count -= less;
        }
    }

    /// Returns the number of blocks on all tiers together.
    #[must_use]
    pub fn total(self) -> u32 {
        self.all().into_iter().fold(0, u32::saturating_add)
    }
}

/// Indexes of the levels below the GPU; see the module documentation.
pub(crate) struct TierIndexes([Ownership; LOWER_TIERS]);

impl Default for TierIndexes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Ownership::new()))
    }
}

impl TierIndexes {
    /// Returns the readers' handles, which stay valid, even after a restore.
    pub(crate) fn views(&self) -> [BlockView; LOWER_TIERS] {
        self.0.each_ref().map(Ownership::view)
    }

    /// Returns the index of a level above 0, with an empty backend in `slot` if there is none.
    pub(super) fn begin(&mut self, level: usize, slot: Slot) {
        if !self.0[level - 1].has(slot) {
            self.0[level - 1].add_backend(slot, None);
        }
    }

    /// Returns the index of a level above 0.
    pub(super) fn at(&mut self, level: usize) -> &mut Ownership {
        &mut self.0[level - 1]
    }

    /// Removes all blocks of `slot`.
    pub(super) fn clear(&mut self, slot: Slot) {
        self.0
            .iter_mut()
            .for_each(|it| it.clear(slot, &mut Vec::new()));
    }

    /// Forgets the backend in `slot`.
    pub(crate) fn remove_backend(&mut self, slot: Slot) {
        self.0.iter_mut().for_each(|it| it.remove_backend(slot));
    }

    /// Returns the heap size in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.0.iter().map(Ownership::memory_bytes).sum()
    }

    /// Replaces the content with that of `fresh`. Readers keep their handles.
    pub(crate) fn adopt(&mut self, fresh: Self) {
        for (shown, fresh) in self.0.iter_mut().zip(fresh.0) {
            shown.adopt(fresh);
        }
    }

    /// Checks that each level is sound and holds exactly the blocks that `reports` lists for a level
    /// and a slot, once per rank.
    ///
    /// # Errors
    /// Describes the first violation.
    pub(crate) fn check(
        &self,
        reports: &dyn Fn(usize, Slot) -> Vec<BlockHash>,
    ) -> Result<(), InvariantError> {
        for (level, index) in (1..).zip(&self.0) {
            index.check([])?;
            let of_level = |slot| reports(level, slot);
            let held = index.check_reports(&of_level);
            held.map_err(|what| InvariantError {
                number: "I176",
                detail: format!("level {level}: {what}"),
            })?;
        }
        Ok(())
    }
}
