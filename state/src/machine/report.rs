//! The state as the admin API reads it: plain values.

use serde::Serialize;

use super::{AuditEntry, RouterState};
use crate::backends::Backend;
use crate::exact::{KvMap, KvPosition, KvStatus};
use crate::ids::{
    AttemptId, BackendRef, BlockHash, EngineHash, LogIndex, ReplicaId, SessionId, Slot, UserKey,
};
use crate::ownership::OwnedBlock;
use crate::prefix::user_key;
use crate::users::UserView;

/// What is known of a replica's present run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SessionView {
    /// The replica.
    pub replica: ReplicaId,
    /// Its run.
    pub session: SessionId,
    /// Leases it holds open.
    pub open_leases: usize,
    /// Last sequence number of its outbox; 0 before the first.
    pub outbox_seq: u64,
    /// Last sequence number of its admin lane; 0 before the first.
    pub admin_seq: u64,
}

/// An open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseView {
    /// Which replica holds it.
    pub replica: ReplicaId,
    /// For which dispatch.
    pub attempt: AttemptId,
    /// On which backend.
    pub backend: BackendRef,
    /// Deepest block it holds; `None`: none.
    pub tip: Option<BlockHash>,
}

impl RouterState {
    /// Index up to which the state is applied.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        self.applied
    }

    /// Replicated time, milliseconds: never falls, and goes as fast as the clocks of those who
    /// propose. It began as Unix time and is ahead of it by what the clocks were set back since.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.time.now_ms
    }

    /// What of the replicated time is ahead of the calendar, milliseconds.
    #[must_use]
    pub fn time_lead_ms(&self) -> u64 {
        self.time.lead_ms()
    }

    /// Whether the replicated time goes by [`Command::PaceTime`](crate::command::Command::PaceTime).
    #[must_use]
    pub fn is_time_paced(&self) -> bool {
        self.time.paced.is_some()
    }

    /// The stamp for a command of a replica's run whose clock shows `clock_ms`. Where that would have
    /// the first command of a run taken for a late one of the run before, it is the least that does
    /// not: the machine's clock was set back in between.
    #[must_use]
    pub fn stamp_ms(&self, replica: ReplicaId, session: SessionId, clock_ms: u64) -> u64 {
        self.sessions.stamp_ms(replica, session, clock_ms)
    }

    /// All backends, by slot.
    pub fn backends(&self) -> impl Iterator<Item = &Backend> {
        self.backends.iter()
    }

    /// The backend with this id.
    #[must_use]
    pub fn backend(&self, name: &str) -> Option<&Backend> {
        self.backends.named(name)
    }

    /// Blocks believed to be in the cache of the backend in `slot`.
    #[must_use]
    pub fn owned_blocks(&self, slot: Slot) -> u64 {
        self.ownership.owned(slot)
    }

    /// What the backend in `slot` owns, in no particular order.
    pub fn owned(&self, slot: Slot) -> impl Iterator<Item = OwnedBlock> {
        self.ownership.blocks(slot)
    }

    /// Blocks owned by all backends, each backend's counted.
    #[must_use]
    pub fn owned_blocks_all(&self) -> u64 {
        self.backends
            .iter()
            .map(|backend| self.ownership.owned(backend.handle.slot))
            .sum()
    }

    /// What is known of the cache in `slot` from its engine's KV events; `None`: nobody reads them.
    #[must_use]
    pub fn kv_status(&self, slot: Slot) -> Option<KvStatus> {
        self.exact.status(slot, &self.ownership)
    }

    /// How far the streams of each rank of the engine in `slot` are applied: where a reader goes on.
    #[must_use]
    pub fn kv_positions(&self, slot: Slot) -> Vec<KvPosition> {
        self.exact.positions(slot)
    }

    /// The router's hash of a block that a rank of the engine in `slot` stored.
    #[must_use]
    pub fn kv_router_hash(&self, slot: Slot, rank: u16, block: EngineHash) -> Option<BlockHash> {
        self.exact.router_hash(slot, rank, block)
    }

    /// All blocks of a rank by both hashes, for a reader's mirror: an image that takes microseconds
    /// and can be read elsewhere.
    #[must_use]
    pub fn kv_map(&self, slot: Slot, rank: u16) -> Option<KvMap> {
        self.exact.map(slot, rank)
    }

    /// Heap bytes of what is known from KV events, without the owned blocks themselves.
    #[must_use]
    pub fn kv_memory_bytes(&self) -> u64 {
        self.exact.memory_bytes()
    }

    /// At most `limit` users with keys after `after`, ascending by key.
    #[must_use]
    pub fn users(&self, after: Option<UserKey>, limit: usize) -> Vec<UserView> {
        let limits = self.terms().limits;
        self.users
            .views(after, self.time.now_ms, limits)
            .take(limit)
            .map(|user| self.dated(user))
            .collect()
    }

    /// The user with this key.
    #[must_use]
    pub fn user(&self, key: UserKey) -> Option<UserView> {
        let limits = self.terms().limits;
        let user = self.users.get(key, self.time.now_ms, &limits)?;
        Some(self.dated(user))
    }

    /// With dates as people read them.
    fn dated(&self, user: UserView) -> UserView {
        UserView {
            last_charge_ms: user.last_charge_ms.saturating_sub(self.time.lead_ms()),
            ..user
        }
    }

    /// The user with this name.
    #[must_use]
    pub fn user_named(&self, name: &str) -> Option<UserView> {
        self.user(user_key(self.config.hash_seed, name))
    }

    /// How many users are known.
    #[must_use]
    pub fn users_len(&self) -> usize {
        self.users.len()
    }

    /// How many users have requests in flight.
    #[must_use]
    pub fn users_backlogged(&self) -> usize {
        self.users.backlogged_len()
    }

    /// How many users have requests that wait for admission.
    #[must_use]
    pub fn users_waiting(&self) -> usize {
        self.users.waiting_len()
    }

    /// Virtual time of the fair order, in milli-tokens: what the counter of a user who comes is
    /// lifted to. See [`crate::users`].
    #[must_use]
    pub fn virtual_time_milli_tokens(&self) -> u64 {
        self.users.virtual_time()
    }

    /// The present run of every replica that ever proposed anything.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionView> {
        let view = |(replica, session, [outbox_seq, admin_seq]): (_, _, [u64; 2])| SessionView {
            replica,
            session,
            open_leases: self.leases.of_replica(replica),
            outbox_seq,
            admin_seq,
        };
        self.sessions.iter().map(view).collect()
    }

    /// Every open lease, in no particular order.
    pub fn leases(&self) -> impl Iterator<Item = LeaseView> {
        self.leases.iter().map(|(holder, lease)| LeaseView {
            replica: holder.replica,
            attempt: holder.attempt,
            backend: lease.backend,
            tip: lease.tip,
        })
    }

    /// Leases open, all replicas.
    #[must_use]
    pub fn open_leases(&self) -> usize {
        self.leases.len()
    }

    /// The last administrative writes, newest first.
    pub fn audit(&self) -> impl Iterator<Item = &AuditEntry> {
        self.audit.iter().rev()
    }
}
