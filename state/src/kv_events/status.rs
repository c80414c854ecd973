//! Status of followed engines, for readers, operators and metrics.

use schemars::JsonSchema;
use serde::Serialize;

use crate::ids::{BackendRef, BlockHash, EngineHash};
use crate::kv_events::entries::CachedBlocks;
use crate::kv_events::tiers::LowerTierBlocks;
use crate::kv_events::{KvRejection, KvUncertainty};

/// Source of a backend's ownership.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KvMode {
    /// The engine's events, all of which are applied up to the newest one known to the reader.
    Exact,
    /// The engine's events, of which some may be missing. The known state stays in use.
    Degraded,
    /// Leases: the engine's events are unknown or not used.
    Lease,
}

impl KvMode {
    /// Returns the name used by the admin API and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Degraded => "degraded",
            Self::Lease => "lease",
        }
    }
}

/// Reason why a backend is not exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KvReason {
    /// The known state may be out of date.
    Doubt(KvUncertainty),
    /// Blocks were stored behind an unknown one, so the engine caches more than is known.
    UnknownParent,
    /// The engine's events contradict each other. The contradicting blocks are left out.
    Contradiction,
    /// The engine's events cannot be used.
    Refused(KvRejection),
    /// Messages were lost for good.
    Lost,
    /// The engine reports more blocks than the limit.
    TooManyBlocks,
}

impl std::fmt::Display for KvReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            Self::Doubt(KvUncertainty::Gap) => "messages are missing and being replayed",
            Self::Doubt(KvUncertainty::Unreachable) => "its publisher cannot be reached",
            Self::Doubt(KvUncertainty::Behind) => "its reader does not keep up",
            Self::Doubt(KvUncertainty::Handover) => "its next reader has not caught up",
            Self::UnknownParent => "blocks came behind an unknown one",
            Self::Contradiction => "its events contradict each other",
            Self::Refused(KvRejection::BlockSize { engine, router })
                if engine.is_multiple_of(*router) =>
            {
                return write!(f, "the blocks of its model had {router} tokens before");
            }
            Self::Refused(KvRejection::BlockSize { engine, router }) => {
                return write!(f, "its blocks have {engine} tokens, the router's {router}");
            }
            Self::Refused(KvRejection::Tokenizer) => "the router does not know its token ids",
            Self::Refused(KvRejection::Models) => "it serves several models",
            Self::Refused(KvRejection::Unreadable) => "what it publishes cannot be decoded",
            Self::Lost => "messages were lost",
            Self::TooManyBlocks => "it reports more blocks than are kept",
        };
        f.write_str(text)
    }
}

/// Mode and reason of a followed backend, as published in the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct KvCondition {
    /// Source of the ownership.
    pub mode: KvMode,
    /// Why it is not exact; `None` if it is.
    pub reason: Option<KvReason>,
}

impl KvCondition {
    /// Condition of an exact backend, which has no reason.
    pub const EXACT: Self = Self {
        mode: KvMode::Exact,
        reason: None,
    };

    pub(super) fn new(mode: KvMode, reason: KvReason) -> Self {
        Self {
            mode,
            reason: Some(reason),
        }
    }
}

/// Status of a followed backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct KvStatus {
    /// Backend that is followed.
    pub backend: BackendRef,
    /// Condition of its worst rank.
    #[serde(flatten)]
    pub condition: KvCondition,
    /// Number of blocks owned because the engine reports them. A block held by two ranks counts
    /// once.
    pub reported_blocks: u64,
    /// Number of blocks owned because of leases and not confirmed by any event.
    pub unconfirmed_blocks: u64,
    /// Status by rank.
    pub ranks: Vec<KvRankStatus>,
}

/// Status of one rank of a followed backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct KvRankStatus {
    /// Data-parallel rank.
    pub rank: u16,
    /// Run that is followed.
    pub publisher: u64,
    /// Condition of this rank.
    #[serde(flatten)]
    pub condition: KvCondition,
    /// Last message applied completely; `None` before the first.
    pub last_seq: Option<u64>,
    /// Number of blocks in its cache. A block with several copies counts once.
    pub blocks: u32,
    /// Number of these that are not owned, because another block has the same tokens or a block
    /// before them is gone.
    pub unowned_blocks: u32,
    /// Number of blocks left out since the run began or was cleared, because the block before them
    /// is unknown.
    pub unrooted_blocks: u64,
    /// Number of blocks on each tier below the GPU. A block on two tiers counts on both.
    pub lower_tier_blocks: LowerTierBlocks,
    /// Number of blocks left out on these tiers since the run began or was cleared, because the
    /// engine only named them and they are unknown, or because there are too many.
    pub lower_tier_blocks_left_out: u64,
}

/// Image of one rank's blocks, which maps the engine's hashes to the router's. Cheap to take, and
/// unaffected by later events.
pub struct KvMap {
    pub(super) entries: CachedBlocks,
}

impl KvMap {
    /// Iterates over all known blocks, in no particular order. Some may be gone and are kept only
    /// because others follow them.
    pub fn iter(&self) -> impl Iterator<Item = (EngineHash, BlockHash)> {
        let entries = self.entries.iter();
        entries.map(|(_, entry)| (entry.engine, entry.router))
    }
}

impl std::fmt::Debug for KvMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvMap").finish_non_exhaustive()
    }
}
