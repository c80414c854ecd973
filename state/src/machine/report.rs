//! Read access to the state, as plain values for the admin API.

use serde::Serialize;

use super::{AuditEntry, RouterState};
use crate::backends::Backend;
use crate::ids::{
    AttemptId, BackendRef, BlockHash, EngineHash, LogIndex, ReplicaId, SessionId, Slot, UserKey,
};
use crate::kv_events::{KvMap, KvPosition, KvRankStatus, KvStatus};
use crate::ownership::OwnedBlock;
use crate::prefix::user_key;
use crate::users::UserView;

/// Current session of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SessionView {
    /// Replica that runs the session.
    pub replica: ReplicaId,
    /// Id of the session.
    pub session: SessionId,
    /// Number of open leases of the replica.
    pub open_leases: usize,
    /// Last applied sequence number of the outbox lane; 0 before the first.
    pub outbox_seq: u64,
    /// Last applied sequence number of the admin lane; 0 before the first.
    pub admin_seq: u64,
}

/// An open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseView {
    /// Replica that holds the lease.
    pub replica: ReplicaId,
    /// Dispatch for which the lease is held.
    pub attempt: AttemptId,
    /// Backend whose blocks are leased.
    pub backend: BackendRef,
    /// Deepest block of the lease; `None` if it holds no block.
    pub tip: Option<BlockHash>,
}

impl RouterState {
    /// Returns the index of the last log entry that was applied.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        self.applied
    }

    /// Returns replicated time, in milliseconds. It starts as Unix time, advances at the rate of
    /// the proposers' clocks and never falls. It is ahead of Unix time by the amount by which the
    /// clocks have been set back since.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.time.now_ms
    }

    /// Returns the stamp for a command of `session` of `replica` while the replica's clock shows
    /// `clock_ms`. If the clock was set back, its time could make a session's first command look
    /// like a late one of an earlier session. In that case, returns the smallest stamp that does
    /// not.
    #[must_use]
    pub fn stamp_ms(&self, replica: ReplicaId, session: SessionId, clock_ms: u64) -> u64 {
        self.sessions.stamp_ms(replica, session, clock_ms)
    }

    /// Iterates over all backends, in ascending order of slots.
    pub fn backends(&self) -> impl Iterator<Item = &Backend> {
        self.backends.iter()
    }

    /// Returns the backend with the id `name`, if any.
    #[must_use]
    pub fn backend(&self, name: &str) -> Option<&Backend> {
        self.backends.named(name)
    }

    /// Returns the number of blocks believed to be cached by the backend in `slot`.
    #[must_use]
    pub fn owned_blocks(&self, slot: Slot) -> u64 {
        self.ownership.owned(slot)
    }

    /// Iterates over the blocks that the backend in `slot` owns, in no particular order.
    pub fn owned(&self, slot: Slot) -> impl Iterator<Item = OwnedBlock> {
        self.ownership.blocks(slot)
    }

    /// Returns the number of owned blocks, summed over all backends.
    #[must_use]
    pub fn owned_blocks_all(&self) -> u64 {
        self.backends
            .iter()
            .map(|backend| self.ownership.owned(backend.handle.slot))
            .sum()
    }

    /// Returns the status of the followed KV events of the backend in `slot`, if any.
    #[must_use]
    pub fn kv_status(&self, slot: Slot) -> Option<KvStatus> {
        self.exact.status(slot, &self.ownership)
    }

    /// Returns the applied position in the stream of each rank of the engine in `slot`. A reader
    /// continues from there.
    #[must_use]
    pub fn kv_positions(&self, slot: Slot) -> Vec<KvPosition> {
        let slots = self.backends.rank_slots(slot).into_iter();
        slots.flat_map(|it| self.exact.positions(it)).collect()
    }

    /// Returns the status of the streams of all ranks of the engine behind `backend`. Empty if
    /// `backend` is not a current incarnation.
    #[must_use]
    pub fn kv_ranks(&self, backend: BackendRef) -> Vec<KvRankStatus> {
        if !self.backends.is_live(backend) {
            return Vec::new();
        }
        let slots = self.backends.rank_slots(backend.slot).into_iter();
        let known = slots.filter_map(|slot| self.kv_status(slot));
        known.flat_map(|it| it.ranks).collect()
    }

    /// Returns the router's hash of a block that a rank of the engine in `slot` stored, if known.
    #[must_use]
    pub fn kv_router_hash(&self, slot: Slot, rank: u16, block: EngineHash) -> Option<BlockHash> {
        let own = self.rank_slot(slot, rank)?;
        self.exact.router_hash(own, rank, block)
    }

    /// Returns an image of all blocks of rank `rank` of the engine in `slot` by both hashes, for a
    /// reader's mirror; `None` if the rank's KV events are not followed. Takes microseconds;
    /// another thread can read the image.
    #[must_use]
    pub fn kv_map(&self, slot: Slot, rank: u16) -> Option<KvMap> {
        self.exact.map(self.rank_slot(slot, rank)?, rank)
    }

    /// Returns the slot of rank `rank` of the engine in `slot`: `slot` itself if the engine's ranks
    /// are unknown. `None` if the engine has fewer ranks.
    #[must_use]
    pub fn rank_slot(&self, slot: Slot, rank: u16) -> Option<Slot> {
        let backend = self.backends.in_slot(slot)?.handle;
        Some(self.backends.rank_of(backend, rank)?.slot)
    }

    /// Returns the heap size of the KV-event state, in bytes, without the owned blocks themselves.
    #[must_use]
    pub fn kv_memory_bytes(&self) -> u64 {
        self.exact.memory_bytes() + self.tiers.memory_bytes()
    }

    /// Returns at most `limit` users with keys above `after`, in ascending order of keys. `None`
    /// starts at the first user.
    #[must_use]
    pub fn users(&self, after: Option<UserKey>, limit: usize) -> Vec<UserView> {
        self.users
            .views(after, self.time.now_ms)
            .take(limit)
            .map(|user| self.dated(user))
            .collect()
    }

    /// Returns the user with this key, if any.
    #[must_use]
    pub fn user(&self, key: UserKey) -> Option<UserView> {
        let user = self.users.get(key, self.time.now_ms)?;
        Some(self.dated(user))
    }

    /// Converts the times in `user` from replicated time to calendar time.
    fn dated(&self, user: UserView) -> UserView {
        UserView {
            last_charge_ms: user
                .last_charge_ms
                .saturating_sub(self.time.ahead_of_calendar_ms()),
            ..user
        }
    }

    /// Returns the user with this name, if any.
    #[must_use]
    pub fn user_named(&self, name: &str) -> Option<UserView> {
        self.user(user_key(self.config.hash_seed, name))
    }

    /// Returns the number of known users.
    #[must_use]
    pub fn users_len(&self) -> usize {
        self.users.len()
    }

    /// Returns the number of API keys.
    #[must_use]
    pub fn api_keys_len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the number of revoked API keys that are remembered.
    #[must_use]
    pub fn revoked_api_keys_len(&self) -> usize {
        self.keys.revoked().len()
    }

    /// Returns the number of users with requests in flight.
    #[must_use]
    pub fn users_backlogged(&self) -> usize {
        self.users.backlogged_len()
    }

    /// Returns the number of users with requests waiting for admission.
    #[must_use]
    pub fn users_waiting(&self) -> usize {
        self.users.waiting_len()
    }

    /// Returns the number of priced tokens ever charged to all users, saturating.
    #[must_use]
    pub fn users_charged(&self) -> u64 {
        self.users.charged()
    }

    /// Returns the virtual time of the fair order, in milli-tokens: the counter to which an
    /// arriving user is lifted. See [`crate::users`].
    #[must_use]
    pub fn virtual_time_milli_tokens(&self) -> u64 {
        self.users.virtual_time()
    }

    /// Returns the current session of every replica that has ever proposed a command.
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

    /// Iterates over all open leases, in no particular order.
    pub fn leases(&self) -> impl Iterator<Item = LeaseView> {
        self.leases.iter().map(|(holder, lease)| LeaseView {
            replica: holder.replica,
            attempt: holder.attempt,
            backend: lease.backend,
            tip: lease.tip,
        })
    }

    /// Returns the number of open leases of all replicas.
    #[must_use]
    pub fn open_leases(&self) -> usize {
        self.leases.len()
    }

    /// Iterates over the audit entries that are kept, newest first.
    pub fn audit(&self) -> impl Iterator<Item = &AuditEntry> {
        self.audit.iter().rev()
    }
}
