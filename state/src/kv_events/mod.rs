//! Exact ownership from KV events: what engines report, instead of what leases imply.
//!
//! A reader reports one publisher's stream in [`KvBatch`]es. Each rank's messages are applied once
//! and in order (`stream`). Together they yield that rank's cache (`tree`). The blocks that can be
//! reached from a first block are owned; [`crate::ownership`] receives them as *reports*.
//!
//! # Between dispatch and event
//! Leases add blocks before the engine reports them. These count as owned at once, and a report
//! confirms them. A block that a released lease added and no report confirmed within
//! [`KV_CONFIRM_MS_MAX`] fades: it was never cached, or no longer is. When a report ends, its block
//! is removed at once, even if a lease pins it, and leases that end there are closed. While a
//! backend is degraded nothing fades, because no reports arrive. In lease mode there are no
//! reports, and everything works as for an engine without events.
//!
//! # Meaning of exact
//! `exact` means that every message up to the newest one known to the reader is applied, that the
//! run is known from an empty cache on, and that nothing in it was left out. It requires that a
//! reader has sent [`KvUpdate::Current`]. Permanently lost messages end it: the engine then holds
//! unknown blocks, so ownership follows from leases until the engine empties its cache once
//! (`AllBlocksCleared`) or another run begins.
//!
//! # Readers that know too little
//! A reader computes a block's hash from the hash of the block before it, which it looks up in the
//! state of its replica. If that state is wrong, the reader leaves out the block and says so
//! ([`KvEvent::LeftOut`]). A message that leaves out blocks behind one that is known here is not
//! applied. The rank then lacks a message until a reader reports it again.
//!
//! # Blocks that only look alike
//! Events of engines up to vLLM 0.12 do not show which blocks are salted, so the same tokens appear
//! under two of the engine's hashes. The first one is treated as the block. A later one is
//! *foreign*: it is kept, so that its removal is not mistaken for the other's, but never owned, and
//! neither is anything that follows it. The events do not show which one came first in the cache;
//! such engines should not be given salted requests in precise mode.
//!
//! # Bounds
//! If a rank's blocks exceed [`KV_ENTRIES_PER_BACKEND_MAX`] or [`KV_ENTRIES_MAX`], its backend
//! falls back to leases until the rank is cleared. A batch beyond [`KV_RANKS_MAX`] or
//! [`KV_BLOCKS_PER_BATCH_MAX`] is dropped.

mod entries;
mod followed;
mod image;
mod predicted_evictions;
mod status;
mod stream;
pub(crate) mod tiers;
mod tree;

#[cfg(all(test, not(loom)))]
mod tests;

use bincode::{Decode, Encode};
use schemars::JsonSchema;

pub(crate) use followed::FollowedBackends;
pub(crate) use image::FollowedImage;
pub(crate) use predicted_evictions::CacheFill;
pub use predicted_evictions::{ComingEvictions, EvictionsView};
pub use status::{KvCondition, KvMap, KvMode, KvRankStatus, KvReason, KvStatus};
pub use tiers::{LOWER_TIERS, LowerTier, LowerTierBlocks};

use crate::ids::{BackendRef, BlockHash, EngineHash};

/// Maximum number of blocks kept for one backend, in all ranks together.
pub const KV_ENTRIES_PER_BACKEND_MAX: u64 = 4_000_000;
/// Maximum number of blocks kept for all backends together.
pub const KV_ENTRIES_MAX: u64 = 8_000_000;
/// Maximum number of followed ranks of one backend.
pub const KV_RANKS_MAX: usize = 64;
/// Time for which a released block stays owned without a report, in milliseconds of replicated
/// time. Far longer than an event takes from the engine through the log.
pub const KV_CONFIRM_MS_MAX: u64 = 5_000;

/// Maximum number of blocks in one batch, so that a batch with the hashes of both sides fits an
/// envelope. A larger message is split into parts.
pub const KV_BLOCKS_PER_BATCH_MAX: usize = 2048;

/// News of one data-parallel rank from the reader of an engine's stream.
///
/// Encoded by hand in [`crate::codec`], because in precise mode it makes up most of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvBatch {
    /// Backend that publishes the stream.
    pub backend: BackendRef,
    /// Data-parallel rank that the news is of. Each rank has its own cache and sequence numbers.
    pub rank: u16,
    /// Id of the publisher's run, assigned by the reader that first saw it. A later run has a
    /// greater number (a time stamp, and at least one more than the followed run), so that news of
    /// an earlier run is recognised as outdated.
    pub publisher: u64,
    /// News that the reader observed.
    pub news: KvUpdate,
}

impl KvBatch {
    /// Returns the number of blocks that the batch names.
    #[must_use]
    pub fn blocks(&self) -> usize {
        let KvUpdate::Message(message) = &self.news else {
            return 0;
        };
        let blocks = message.events.iter().map(|event| match event {
            KvEvent::Stored { blocks, .. } => blocks.len(),
            KvEvent::TierStored { blocks, .. } => blocks.len(),
            KvEvent::Removed { blocks }
            | KvEvent::TierCopied { blocks, .. }
            | KvEvent::TierRemoved { blocks, .. } => blocks.len(),
            KvEvent::LeftOut { .. } => 1,
            KvEvent::Cleared => 0,
        });
        blocks.sum()
    }
}

/// News of one publisher's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvUpdate {
    /// The publisher's run is known from its beginning: nothing is cached, and message 0 is next.
    /// Repeating it for a run that is followed already has no effect. The run is not exact before
    /// the first `Current`, because the engine may have published much already.
    Begin,
    /// A message of the stream, or one part of a message.
    Message(KvMessage),
    /// The newest message is `seq`. If that is the last one applied, nothing is missing and any
    /// doubt ends. A reader sends this when it has caught up, and whenever it finds the stream that
    /// it follows in doubt.
    Current {
        /// Sequence number of the newest message; `None` if the run has no message yet.
        seq: Option<u64>,
    },
    /// The known state may be out of date until a `Current` clears the doubt. Messages alone do not
    /// clear it: each may be one of many that are still to be replayed.
    Doubt(KvUncertainty),
    /// The engine's events cannot be used. Ownership follows from leases until the `Begin` of
    /// another run.
    Refuse(KvRejection),
}

/// One message of an engine's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvMessage {
    /// Sequence number assigned by the engine.
    pub seq: u64,
    /// Fingerprint of the message as received. By it, the next reader recognises the same run of
    /// the engine when the message is replayed.
    pub mark: u64,
    /// Number of the part, from 0. Every reader splits a message in the same way, and `seq` counts
    /// as applied with the last part.
    pub part: u16,
    /// Whether this is the last part of the message.
    pub is_last: bool,
    /// Whether messages before this one are permanently lost. The known state of the rank is then
    /// dropped, and later messages are not used until its cache has been emptied once. Also set on
    /// the first message of a run that is not known from its beginning (its `publisher` is new).
    /// Only valid with part 0. Has no effect if nothing before this message is missing here.
    pub is_after_loss: bool,
    /// Events in order, with at most [`KV_BLOCKS_PER_BATCH_MAX`] blocks in total.
    pub events: Vec<KvEvent>,
}

/// Reason why the known state may be out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, serde::Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KvUncertainty {
    /// Messages are missing and are being replayed.
    Gap,
    /// The publisher cannot be reached.
    Unreachable,
    /// The reader cannot keep up.
    Behind,
    /// Another replica takes over as the reader and has not caught up.
    Handover,
}

/// Reason why an engine's events cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, serde::Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(rename = "KvRefusal")]
pub enum KvRejection {
    /// The engine's block size differs from the router's.
    BlockSize {
        /// Tokens per block at the engine.
        engine: u32,
        /// Tokens per block at the router.
        router: u32,
    },
    /// The router does not know the token ids of its prompts (tokenizer `character`).
    Tokenizer,
    /// The engine serves several models, and events do not say which one a block belongs to.
    Models,
    /// The events cannot be decoded.
    Unreadable,
}

/// One event of an engine's cache, with the router's hashes next to the engine's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks were added to the cache.
    Stored {
        /// Block before the first of `blocks`; `None` if that one starts a prompt.
        parent: Option<EngineHash>,
        /// Blocks in order, each with the engine's and the router's hash.
        blocks: Vec<(EngineHash, BlockHash)>,
    },
    /// One copy of each block was removed. The event may name blocks that were never stored here:
    /// salted ones, or those of other groups and media.
    Removed {
        /// Engine's hashes of the removed blocks.
        blocks: Vec<EngineHash>,
    },
    /// All blocks were removed from the cache.
    Cleared,
    /// Blocks were added behind one that the reader does not know, so it could not compute their
    /// hashes. The block before them may be one that no reader reports, such as a salted one.
    LeftOut {
        /// Block before the first of those left out.
        parent: EngineHash,
    },
    /// Blocks were stored on a tier below the GPU. Unlike [`Self::TierCopied`], the engine described
    /// them, so that they need not be known.
    TierStored {
        /// Tier that holds the blocks.
        tier: LowerTier,
        /// Block before the first of `blocks`; `None` if that one starts a prompt.
        parent: Option<EngineHash>,
        /// Blocks in order, each with the engine's and the router's hash.
        blocks: Vec<(EngineHash, BlockHash)>,
    },
    /// Blocks were copied to a tier below the GPU. The engine only named them, as vLLM's
    /// `OffloadingConnector` does by default; unknown ones are left out.
    TierCopied {
        /// Tier that holds the blocks.
        tier: LowerTier,
        /// Engine's hashes of the blocks.
        blocks: Vec<EngineHash>,
    },
    /// Blocks were removed from a tier below the GPU.
    TierRemoved {
        /// Tier that held the blocks.
        tier: LowerTier,
        /// Engine's hashes of the removed blocks.
        blocks: Vec<EngineHash>,
    },
}

/// Position up to which a rank's stream is applied, where its next reader continues. See
/// `RouterState::kv_positions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPosition {
    /// Data-parallel rank of the stream.
    pub rank: u16,
    /// Id of the publisher's run that is followed.
    pub publisher: u64,
    /// Sequence number and mark of the last message applied completely; `None` before the first.
    pub last: Option<(u64, u64)>,
}
