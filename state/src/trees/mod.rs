//! Sessions of agents and chats, and the trees that they form.
//!
//! A *session* is one chain of turns: each turn's prompt continues the one before it. A session may
//! name its *parent*, the session that started it. A *tree* is a root with its descendants. A
//! session's root is fixed when it begins: the root of its parent, or the parent itself if that is
//! unknown. So children stay together when their parent is forgotten; but if a parent in the middle
//! begins after its children, or is forgotten and begins again, its tree is another one.
//!
//! The log carries little: one item when a session begins or changes its home, and one of about ten
//! bytes per turn. Sessions that idle for [`SESSION_IDLE_MS`] end in `apply`, within a minute after. If
//! there are [`SESSIONS_MAX`], one makes room for another: the one idle for longest, to the minute, or
//! if a user holds a sixteenth of them or more, that of the user who holds the most. A tree ends with
//! its last session.
//! Ending a tree or user ends a bounded number of sessions per command, from that command on.
//!
//! Names are hashed together with their user, so a client can only name sessions of its own user.

mod image;
mod map;
mod orders;
mod published;
mod table;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bounds::CHARGE_TOKENS_MAX;
use crate::ids::{AgentSessionKey, BackendRef, ModelKey, UserKey};

pub(crate) use image::TreesImage;
pub use published::TreesView;
pub(crate) use table::Trees;

/// Maximum number of sessions in a cluster.
pub const SESSIONS_MAX: usize = 200_000;
/// Time without a turn after which a session ends, in milliseconds: 30 minutes.
pub const SESSION_IDLE_MS: u64 = 30 * 60 * 1000;
/// Number of bits of a session's key that a place in the log repeats.
const CHECK_BITS: u32 = 10;

/// Returns the key of the session called `name` of `user`: `xxh3_64` of key and name, seeded with
/// the cluster's `hash_seed`.
#[must_use]
pub fn session_key(hash_seed: u64, user: UserKey, name: &[u8]) -> AgentSessionKey {
    let named = [user.0.to_le_bytes().as_slice(), name].concat();
    AgentSessionKey(xxh3_64_with_seed(&named, hash_seed))
}

/// A session as the log names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionRef {
    /// By its place in the table, in at most four bytes.
    Place(SessionPlace),
    /// By its key, for a proposer that has not applied the session's beginning.
    Key(AgentSessionKey),
}

/// Place of a session in the table, and some bits of its key. They tell the sessions apart that have
/// the place one after another, or after a restore: a late item finds another session in one of
/// 1024 cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionPlace(pub u32);

impl SessionPlace {
    fn new(number: u32, key: AgentSessionKey) -> Self {
        // The lowest bits of a hash are as good as any.
        let check = key.0 as u32 & ((1 << CHECK_BITS) - 1);
        Self(number << CHECK_BITS | check)
    }

    fn number(self) -> u32 {
        self.0 >> CHECK_BITS
    }
}

/// A session that begins, with its first turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSession {
    /// Key of the session.
    pub key: AgentSessionKey,
    /// Session that started it; `None` for a root.
    pub parent: Option<AgentSessionKey>,
    /// User who pays for the session.
    pub user: UserKey,
    /// Model of the first turn.
    pub model: ModelKey,
    /// Backend of the first turn.
    pub home: BackendRef,
}

/// One turn of a session that has ended, as its engine reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionTurn {
    /// The session.
    pub session: SessionRef,
    /// Usage of the turn.
    pub usage: TurnUsage,
}

/// Token counts of turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize)]
pub struct TurnUsage {
    /// Number of prompt tokens that engines computed.
    pub input_uncached: u64,
    /// Number of prompt tokens that engines found in their prefix caches.
    pub input_cached: u64,
    /// Number of output tokens.
    pub output: u64,
}

impl TurnUsage {
    /// Returns the number of prompt tokens.
    #[must_use]
    pub fn input(&self) -> u64 {
        self.input_uncached.saturating_add(self.input_cached)
    }

    /// Returns the number of all tokens.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.input().saturating_add(self.output)
    }

    /// Returns the usage within the bounds of a charge.
    pub(crate) fn bounded(&self) -> Self {
        Self {
            input_uncached: self.input_uncached.min(CHARGE_TOKENS_MAX),
            input_cached: self.input_cached.min(CHARGE_TOKENS_MAX),
            output: self.output.min(CHARGE_TOKENS_MAX),
        }
    }

    /// Returns what is left without `other`, saturating.
    fn without(&self, other: &Self) -> Self {
        Self {
            input_uncached: self.input_uncached.saturating_sub(other.input_uncached),
            input_cached: self.input_cached.saturating_sub(other.input_cached),
            output: self.output.saturating_sub(other.output),
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.input_uncached = self.input_uncached.saturating_add(other.input_uncached);
        self.input_cached = self.input_cached.saturating_add(other.input_cached);
        self.output = self.output.saturating_add(other.output);
    }
}

/// A session, as of one applied index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct AgentSession {
    place: u32,
    /// Session that started it; `None` for a root.
    pub parent: Option<AgentSessionKey>,
    /// Root of its tree; its own key for a root.
    pub root: AgentSessionKey,
    /// User who pays for it.
    pub user: UserKey,
    /// Model of its first turn.
    pub model: ModelKey,
    /// Backend of its last turn. The backend may have been removed since.
    pub home: BackendRef,
    /// Time of its first turn, in replicated milliseconds.
    pub begun_ms: u64,
    /// Time at which a turn last began or ended, in replicated milliseconds.
    pub used_ms: u64,
    /// Number of turns that ended.
    pub turns: u32,
    /// Number of tokens of its last turn: prompt and output.
    pub tokens: u64,
    /// Usage of all its turns.
    pub usage: TurnUsage,
}

impl AgentSession {
    /// Returns the place in the table of the session, which has this key.
    #[must_use]
    pub fn place(&self, key: AgentSessionKey) -> SessionPlace {
        SessionPlace::new(self.place, key)
    }
}

/// A tree of sessions, as of one applied index. Its figures include sessions that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct SessionTree {
    /// User who pays for it.
    pub user: UserKey,
    /// Number of its sessions that have not ended, at least 1.
    pub sessions: u32,
    /// Time of its first turn, in replicated milliseconds.
    pub begun_ms: u64,
    /// Number of turns that ended.
    pub turns: u64,
    /// Usage of all its turns.
    pub usage: TurnUsage,
}
