//! Exact ownership from KV events: what engines say they hold, instead of what leases imply.
//!
//! A reader tells of one publisher's stream in [`KvBatch`]es. Each rank's messages are applied in
//! order, each once (`stream`); what they add up to is that rank's cache (`tree`), of which what can
//! be reached from a first block is owned, as [`crate::ownership`] is told in *reports*.
//!
//! # Between dispatch and event
//! Leases bring blocks before the engine reports them. They count as owned at once; a report confirms
//! them. What a released lease brought and no report confirmed within [`KV_CONFIRM_MS_MAX`] fades: it
//! was never cached, or is not any more. A report that ends takes its block at once, whoever pins it:
//! leases that end there are over. While a backend is degraded nothing fades, as no reports come; while
//! it is in lease mode there are no reports, and everything is as for an engine without events.
//!
//! # What is exact
//! `exact` says: every message up to the newest that the reader knows is applied, the run is known
//! from an empty cache on, and nothing in it was left out. It is claimed only after a reader said
//! [`KvNews::Current`]. Messages that are lost for good end it: the engine holds blocks from before of
//! which nothing is known, so ownership goes by leases until the cache is empty once
//! (`AllBlocksCleared`) or another run begins.
//!
//! # Blocks that only look alike
//! Engines up to vLLM 0.12 do not say in their events which blocks are salted: the same tokens then
//! come under two hashes of the engine's. The first of them is taken for the block, a later one is
//! *foreign*: kept, because its removal must not be taken for the other's, and never owned, like all
//! that follows it. Which came first cannot be told from the events; such engines should not be
//! given salted requests in precise mode.
//!
//! # Bounds
//! [`KV_ENTRIES_PER_BACKEND_MAX`], [`KV_ENTRIES_MAX`], [`KV_RANKS_MAX`], [`KV_BLOCKS_PER_BATCH_MAX`]. A
//! rank that reports more goes by leases until it is cleared.

mod entries;
mod followed;
mod image;
mod status;
mod stream;
mod tree;

#[cfg(all(test, not(loom)))]
mod tests;

use bincode::{Decode, Encode};

pub(crate) use followed::FollowedBackends;
pub(crate) use image::FollowedImage;
pub use status::{KvCondition, KvMap, KvMode, KvRankStatus, KvReason, KvStatus};

use crate::ids::{BackendRef, BlockHash, EngineHash};

/// Most blocks of one backend that are kept, all ranks together.
pub const KV_ENTRIES_PER_BACKEND_MAX: u64 = 4_000_000;
/// Most blocks of all backends that are kept.
pub const KV_ENTRIES_MAX: u64 = 8_000_000;
/// Most ranks of one backend that are followed.
pub const KV_RANKS_MAX: usize = 64;
/// Longest that a released block stays owned without a report, in replicated milliseconds: well above
/// what an event needs from the engine through the log.
pub const KV_CONFIRM_MS_MAX: u64 = 5_000;

/// Most blocks that one batch names: with the hashes of both sides it fits an envelope. A message of
/// more comes in parts.
pub const KV_BLOCKS_PER_BATCH_MAX: usize = 2048;

/// What the reader of an engine's stream found, for one data-parallel rank.
///
/// Encoded by hand, in [`crate::codec`]: in precise mode it is most of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvBatch {
    /// The backend.
    pub backend: BackendRef,
    /// Data-parallel rank: each has its own cache and its own sequence.
    pub rank: u16,
    /// Names the run of the publisher, drawn by the reader that first saw it. A later run has a
    /// greater number (a time stamp, and at least one more than the run that is followed), so that
    /// what a reader tells of an earlier run is known for old news.
    pub publisher: u64,
    /// What is told of it.
    pub news: KvNews,
}

impl KvBatch {
    /// Blocks that it names.
    #[must_use]
    pub fn blocks(&self) -> usize {
        let KvNews::Message(message) = &self.news else {
            return 0;
        };
        let blocks = message.events.iter().map(|event| match event {
            KvEvent::Stored { blocks, .. } => blocks.len(),
            KvEvent::Removed { blocks } => blocks.len(),
            KvEvent::Cleared => 0,
        });
        blocks.sum()
    }
}

/// What a reader tells of one publisher's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvNews {
    /// A run of the publisher that is known from its beginning: nothing is cached, message 0 is
    /// next. Of a run that is followed already it is a repeat. Not exact before the first `Current`:
    /// the engine may have said much already.
    Begin,
    /// A message, or a part of one.
    Message(KvMessage),
    /// The newest message is `seq`: if that is the last one applied, nothing is missing, and what
    /// was in doubt is not. `None`: there has been no message in this run. Said by a reader that
    /// caught up, and whenever it finds what it follows in doubt.
    Current {
        /// Its sequence number.
        seq: Option<u64>,
    },
    /// What is known may be out of date until a `Current` says that it is not. Messages alone do not
    /// say so: each of them may be one of many that are still to be replayed.
    Doubt(KvDoubt),
    /// Events of this engine cannot be used: ownership goes by leases until the next `Begin` of
    /// another run.
    Refuse(KvRefusal),
}

/// One message of an engine's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvMessage {
    /// The engine's sequence number.
    pub seq: u64,
    /// Fingerprint of the message as it came: by it the next reader knows that it meets the same run
    /// of the engine when the message is replayed.
    pub mark: u64,
    /// Which part of the message this is, from 0. Every reader cuts a message alike; `seq` counts as
    /// applied with its last part.
    pub part: u16,
    /// Whether no further part follows.
    pub is_last: bool,
    /// Messages before this one are lost for good: what was known of this rank goes, and what follows
    /// is not used until its cache is empty once. Also the first message of a run that is not known
    /// from its beginning (`publisher` is then another one). Only with part 0. Where nothing is missing
    /// here before this message it is taken as any other.
    pub is_after_loss: bool,
    /// What it says, in order; at most [`KV_BLOCKS_PER_BATCH_MAX`] blocks.
    pub events: Vec<KvEvent>,
}

/// Why what is known may be out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvDoubt {
    /// Messages are missing and are being replayed.
    Gap,
    /// The publisher cannot be reached.
    Unreachable,
    /// The reader does not keep up.
    Behind,
    /// Another replica is to read; it has not caught up.
    Handover,
}

/// Why an engine's events cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvRefusal {
    /// Its blocks are not of the size the router hashes by.
    BlockSize {
        /// Tokens of the engine's blocks.
        engine: u32,
        /// Tokens of the router's.
        router: u32,
    },
    /// The router does not know the token ids of its prompts (tokenizer `character`).
    Tokenizer,
    /// It serves several models, and events do not say which one a block is of.
    Models,
    /// What it publishes cannot be read.
    Unreadable,
}

/// One event with router hashes beside the engine's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks are in the cache.
    Stored {
        /// The block before the first; `None`: a prompt's first block.
        parent: Option<EngineHash>,
        /// In order, each with its hash here.
        blocks: Vec<(EngineHash, BlockHash)>,
    },
    /// One copy each is gone. May name blocks that were never stored here: salted ones, other
    /// groups' and other media's.
    Removed {
        /// Which blocks.
        blocks: Vec<EngineHash>,
    },
    /// All are gone.
    Cleared,
}

/// How far a rank's stream is applied: where its next reader goes on. See
/// `RouterState::kv_positions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPosition {
    /// The rank.
    pub rank: u16,
    /// The run that is followed.
    pub publisher: u64,
    /// Sequence number and mark of the last message applied as a whole; `None`: none yet.
    pub last: Option<(u64, u64)>,
}
