//! Status of followed engines, for readers, operators and metrics.

use serde::Serialize;

use crate::exact::entries::CachedBlocks;
use crate::exact::{KvDoubt, KvRefusal};
use crate::ids::{BackendRef, BlockHash, EngineHash};

/// How a backend's ownership is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvMode {
    /// From the engine's events, all of which are applied up to the newest that its reader knows.
    Exact,
    /// From the engine's events; some may be missing. What is known stays in use.
    Degraded,
    /// From leases: what the engine says is not known, or not in use.
    Lease,
}

impl KvMode {
    /// As in the admin API and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Degraded => "degraded",
            Self::Lease => "lease",
        }
    }
}

/// Why a backend is not exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvReason {
    /// What is known may be out of date.
    Doubt(KvDoubt),
    /// Blocks came behind one that is not known: more is cached than is known.
    UnknownParent,
    /// The engine's events contradict each other: what they contradict each other in is left out.
    Contradiction,
    /// Its events cannot be used.
    Refused(KvRefusal),
    /// Messages are lost that nobody has any more.
    Lost,
    /// It reports more blocks than are kept.
    TooManyBlocks,
}

impl std::fmt::Display for KvReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            Self::Doubt(KvDoubt::Gap) => "messages are missing and being replayed",
            Self::Doubt(KvDoubt::Unreachable) => "its publisher cannot be reached",
            Self::Doubt(KvDoubt::Behind) => "its reader does not keep up",
            Self::Doubt(KvDoubt::Handover) => "its next reader has not caught up",
            Self::UnknownParent => "blocks came behind an unknown one",
            Self::Contradiction => "its events contradict each other",
            Self::Refused(KvRefusal::BlockSize { engine, router }) => {
                return write!(f, "its blocks have {engine} tokens, the router's {router}");
            }
            Self::Refused(KvRefusal::Tokenizer) => "the router does not know its token ids",
            Self::Refused(KvRefusal::Models) => "it serves several models",
            Self::Refused(KvRefusal::Unreadable) => "what it publishes cannot be read",
            Self::Lost => "messages were lost",
            Self::TooManyBlocks => "it reports more blocks than are kept",
        };
        f.write_str(text)
    }
}

/// Mode and reason of a followed backend: what readers of the registry see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvCondition {
    /// How ownership is known.
    pub mode: KvMode,
    /// Why it is not exact; `None` while it is.
    pub reason: Option<KvReason>,
}

impl KvCondition {
    /// Nothing is missing.
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

/// A followed backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KvStatus {
    /// The backend.
    pub backend: BackendRef,
    /// That of its worst rank.
    #[serde(flatten)]
    pub condition: KvCondition,
    /// Blocks owned because the engine says so; a block that two ranks hold counts once.
    pub reported_blocks: u64,
    /// Blocks owned because of leases that no event has confirmed.
    pub unconfirmed_blocks: u64,
    /// By rank.
    pub ranks: Vec<KvRankStatus>,
}

/// One rank of a followed backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvRankStatus {
    /// The rank.
    pub rank: u16,
    /// The run that is followed.
    pub publisher: u64,
    /// Its own condition.
    #[serde(flatten)]
    pub condition: KvCondition,
    /// The last message applied as a whole; `None`: none yet.
    pub last_seq: Option<u64>,
    /// Blocks in its cache, each counted once however many copies there are.
    pub blocks: u32,
    /// Of these, how many are kept and not owned, because another block looks alike or one before
    /// them is gone.
    pub unowned_blocks: u32,
    /// Blocks left out since the run began or was cleared, because the one before them is unknown.
    pub unrooted_blocks: u64,
}

/// An image of one rank's blocks: the engine's hashes with the router's. Cheap to take; later
/// events do not touch it.
pub struct KvMap {
    pub(super) entries: CachedBlocks,
}

impl KvMap {
    /// All blocks that are known by name, in no particular order; some may be gone while others that
    /// follow them are not.
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
