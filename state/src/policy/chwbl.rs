//! `chwbl`: consistent hashing with bounded loads over the prompt's first blocks.
//!
//! Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018, as
//! KubeAI uses it for prompts. The request goes to the first backend on the ring after its key
//! whose load, including this request, is at most `ceil(factor * (total + 1) / n)` requests.
//!
//! The ring is never built. It has `virtual_nodes` equal parts. Each backend has one virtual node
//! in each part, at an offset hashed from its slot and the part, so two hashes find a backend's
//! first virtual node after any key. Compared with virtual nodes at random positions, the same keys
//! move when a backend is added or removed, and the shares are more even.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{Affinity, Policy, PolicyInputs, Rank, Ranks, load_bound, mix};
use super::{Candidate, PolicyRequest, Reason};
use crate::ids::Slot;
use crate::reject::Rejection;
use crate::validate::{at_least, at_most};

/// Maximum load factor, in thousandths.
const FACTOR_MILLI_MAX: u32 = 1_000_000;
/// Maximum number of virtual nodes per backend.
const VIRTUAL_NODES_MAX: u32 = 65_536;

/// Settings of the `chwbl` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ChwblSettings {
    /// Number of leading blocks that make up the hash key; all blocks of a shorter prompt.
    #[schemars(range(min = 1))]
    pub prefix_blocks: u32,
    /// Virtual nodes of each backend on the hash ring.
    #[schemars(range(min = 1, max = VIRTUAL_NODES_MAX))]
    pub virtual_nodes: u32,
    /// Largest load of a backend, in thousandths of the average.
    #[schemars(range(min = 1000, max = FACTOR_MILLI_MAX))]
    pub load_factor_milli: u32,
}

impl Default for ChwblSettings {
    fn default() -> Self {
        Self {
            prefix_blocks: 1,
            virtual_nodes: 256,
            load_factor_milli: 1250,
        }
    }
}

impl Policy for ChwblSettings {
    fn validate(&self) -> Result<(), Rejection> {
        at_least("prefix_blocks", self.prefix_blocks, 1)?;
        at_least("virtual_nodes", self.virtual_nodes, 1)?;
        at_most("virtual_nodes", self.virtual_nodes, VIRTUAL_NODES_MAX)?;
        at_least("load_factor_milli", self.load_factor_milli, 1000)?;
        at_most(
            "load_factor_milli",
            self.load_factor_milli,
            FACTOR_MILLI_MAX,
        )
    }

    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs {
            prefix_blocks: Some(self.prefix_blocks),
            affinity: Affinity::Pinned,
            ..PolicyInputs::default()
        }
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        Chwbl {
            key: RingKey::of(request.prefix_key, self.virtual_nodes),
            load_max: load_bound(self.load_factor_milli, candidates),
        }
    }
}

/// Position of a request's key on the ring.
struct RingKey {
    /// Number of equal parts of the ring.
    parts: u64,
    /// Part of the ring that contains the key, from 0 to `parts - 1`.
    part: u64,
    /// Offset of the key within its part, in units of 2^-64 parts.
    offset: u64,
}

impl RingKey {
    fn of(hash: u64, virtual_nodes: u32) -> Self {
        let parts = u64::from(virtual_nodes.max(1));
        // Prompt hashes and slots are mixed the same way; without the constant, a key could
        // coincide with its own virtual node.
        let place = u128::from(mix(hash ^ 0x5851_f42d_4c95_7f2d)) * u128::from(parts);
        Self {
            parts,
            part: (place >> 64) as u64,
            offset: place as u64,
        }
    }

    /// Returns the distance from the key to the next virtual node of `slot`, in units of 2^-63
    /// parts.
    fn distance(&self, slot: Slot) -> u64 {
        let here = virtual_node(slot, self.part);
        if here >= self.offset {
            return (here - self.offset) >> 1;
        }
        let next = virtual_node(slot, (self.part + 1) % self.parts);
        let distance = (1_u128 << 64) - u128::from(self.offset) + u128::from(next);
        // Below 2^65, because `next` is below 2^64 and the offset above 0.
        (distance >> 1) as u64
    }
}

/// Returns the offset of the virtual node of `slot` within a part of the ring.
fn virtual_node(slot: Slot, part: u64) -> u64 {
    let seed = mix((u64::from(slot.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mix(seed.wrapping_add(part.wrapping_mul(0xd1b5_4a32_d192_ed03)))
}

struct Chwbl {
    key: RingKey,
    load_max: u64,
}

impl Ranks for Chwbl {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let has_room = u64::from(candidate.running) < self.load_max;
        if has_room {
            Rank::first(self.key.distance(candidate.slot), Reason::Ring)
        } else {
            Rank::without_prefix(candidate.running.into())
        }
    }
}
