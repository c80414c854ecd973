//! The log's commands, their origin, and the replies to them.
//!
//! Everything here is part of the log format. Adding a variant at the end of an enum is a new
//! format version; changing one is not possible.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::exact::KvBatch;
use crate::grants::Wait;
use crate::ids::{
    AttemptId, BackendRef, BlockHash, LogIndex, ModelKey, ReplicaId, RestoreId, SessionId, Ticket,
    UserKey,
};
use crate::policy::{PolicyConfig, RoutingSettings};
use crate::prefix::HashSecret;
use crate::pricing::FairnessSettings;
use crate::readers::Assignment;
use crate::service::ServiceSample;
use crate::settings::{AdmissionSettings, UserLimits};
use crate::validate::{ensure, is_name};

pub use crate::backends::{BackendSpec, EngineFacts};
pub use crate::bounds::{
    BACKENDS_MAX, BLOCKS_PER_ITEM_MAX, LIST_BYTES_MAX, NAME_BYTES_MAX, OUTPUTS_PER_ITEM_MAX,
    RESTORE_BYTES_MAX, RESTORE_PART_BYTES, USERS_MAX,
};
pub use crate::charge::Charge;
pub use crate::reject::Rejection;

/// A command with its origin: what one log entry holds.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
pub struct Envelope {
    /// Who proposed it. A repeated `(replica, lane, session, seq)` is answered, not applied again.
    pub origin: Origin,
    /// Unix time in milliseconds at the proposer, as far as it knows. What is proposed again is stamped
    /// anew.
    pub proposed_at_ms: u64,
    /// What to do.
    pub command: Command,
}

/// Where a command comes from. One origin has at most one command outstanding per lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Origin {
    /// The proposing replica.
    pub replica: ReplicaId,
    /// Its run.
    pub session: SessionId,
    /// Which of the replica's two sequences `seq` counts in.
    pub lane: Lane,
    /// From 1, ascending without gaps that matter: a seq at or below the last applied is a repeat.
    pub seq: u64,
}

/// The two independent sequences of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub enum Lane {
    /// The outbox: one [`Command::Batch`] after the other.
    Outbox,
    /// Everything else: admin writes and what the leader decides.
    Admin,
}

/// A change of the replicated state.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
pub enum Command {
    /// The first command of a cluster: fixes what cannot change later. A second one is rejected. Of
    /// earlier builds: this one founds with [`Command::FoundCluster`].
    InitCluster {
        /// Seed of every block and user hash; random, so that no tenant can build collisions.
        hash_seed: u64,
        /// The first routing policy.
        policy: PolicyConfig,
        /// What tokens cost.
        fairness: FairnessSettings,
    },
    /// What a replica learnt since its last flush, in order.
    Batch {
        /// Attempts in `items` are offsets from this, which keeps them short.
        base_attempt: AttemptId,
        /// At most 64 KiB when encoded; the outbox splits what is more.
        items: Vec<Item>,
    },
    /// Adds a backend, or changes one. A changed URL starts a new incarnation.
    PutBackend(BackendSpec),
    /// Removes a backend and all it owns.
    DeleteBackend {
        /// The backend's id.
        name: String,
    },
    /// Stops or resumes giving new requests to a backend.
    SetDraining {
        /// The backend's id.
        name: String,
        /// Whether it drains.
        draining: bool,
    },
    /// Sets a user's weight.
    PutUser(UserSpec),
    /// Replaces the routing policy from this log index on.
    PutPolicy(PolicyConfig),
    /// Closes what a replica left open that is not heard from: its leases are released, its
    /// requests in flight end. Should that run come back, it goes on with the same session.
    ExpireSession {
        /// The replica that is gone.
        replica: ReplicaId,
        /// Its run, as last seen; a newer one is left alone.
        session: SessionId,
    },
    /// Replaces what routing follows beside the live policy, from this log index on.
    PutRouting(RoutingSettings),
    /// Replaces how requests are admitted, from this log index on.
    PutAdmission(AdmissionSettings),
    /// Sets what a user may use; `limits` without any bound removes what was set.
    PutUserLimits {
        /// The user's name.
        name: String,
        /// The bounds.
        limits: UserLimits,
    },
    /// Replaces which replica reads which backend's KV events. What it does not name has no reader.
    AssignReaders(Vec<Assignment>),
    /// Begins to bring in a backup, see `state/src/machine/restoring.rs`. Refused while another is being
    /// brought in, and unless `force` is set when the cluster has users or blocks.
    BeginRestore {
        /// Names it.
        restore: RestoreId,
        /// Whether what the cluster has may go.
        force: bool,
    },
    /// One part of the state in the backup. Parts may come in any order, and twice.
    RestorePart {
        /// Which restore.
        restore: RestoreId,
        /// Which part, from 0.
        number: u32,
        /// [`RESTORE_PART_BYTES`], or what is left of the last part.
        bytes: Vec<u8>,
    },
    /// All parts are there: the state in the backup takes the place of the present one.
    FinishRestore {
        /// Which restore.
        restore: RestoreId,
        /// Length of all parts together.
        bytes: u64,
    },
    /// Gives a restore up: its parts are forgotten.
    AbortRestore {
        /// Which restore; of another one nothing is forgotten.
        restore: RestoreId,
    },
    /// The first command of a cluster, as [`Command::InitCluster`], of one that hashes its blocks under
    /// a secret.
    FoundCluster {
        /// Seed of user hashes and of the beginnings of chains.
        hash_seed: u64,
        /// What every block is hashed under.
        hash_secret: HashSecret,
        /// The first routing policy.
        policy: PolicyConfig,
        /// What tokens cost.
        fairness: FairnessSettings,
    },
    /// Forgets what a user has used of its limits per window. What was charged stays.
    ForgiveUser {
        /// The user's name.
        name: String,
    },
    /// From this log index on replicated time is paced, see `state/src/machine/time.rs`, and users who were
    /// never charged are forgotten first, see `state/src/users/forgettable.rs`. Of version 4; given once,
    /// as soon as all members know it.
    PaceTime,
    /// [`Command::PutUser`] and [`Command::PutUserLimits`] in one: both take effect, or neither. Of
    /// version 4.
    SetUser {
        /// The user and the weight.
        user: UserSpec,
        /// The bounds; without any, those of all users hold.
        limits: UserLimits,
    },
}

/// One thing a replica learnt. Attempts are offsets from the batch's `base_attempt`.
///
/// Encoded by hand, in [`crate::codec`]: items are most of the log.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// A request went to a backend: its prompt blocks are there, and in use until released.
    Acquire {
        /// The dispatch that holds the lease.
        attempt: u32,
        /// Where it went.
        backend: BackendRef,
        /// Deepest block of the prompt believed owned by the backend; `new` follows it. `None`:
        /// `new` starts at the prompt's first block. When it is not owned (any more) the item
        /// changes nothing and the attempt is listed in [`BatchReply::missing_tip`].
        tip: Option<BlockHash>,
        /// The blocks after `tip`, in order.
        new: Vec<BlockHash>,
    },
    /// Output completed further blocks of the sequence.
    Materialize {
        /// A dispatch with an open lease.
        attempt: u32,
        /// The blocks after the lease's deepest one, in order.
        new: Vec<BlockHash>,
    },
    /// The request is over at the backend.
    Release {
        /// A dispatch with an open lease.
        attempt: u32,
        /// Whether the blocks stay in the engine's cache.
        outcome: LeaseOutcome,
    },
    /// Names a user the state may not know. Repeats are harmless.
    DefineUser {
        /// `UserKey` of `name`.
        key: UserKey,
        /// At most `NAME_BYTES_MAX` bytes.
        name: String,
    },
    /// What a user used since the replica's last flush. Token counts above
    /// [`CHARGE_TOKENS_MAX`](crate::users::CHARGE_TOKENS_MAX) are taken as that.
    Charge(Charge),
    /// What an engine said about itself. Repeats are harmless.
    ObserveEngine {
        /// The backend that was asked.
        backend: BackendRef,
        /// What it said.
        facts: EngineFacts,
    },
    /// KV events of one engine, as one publisher numbered them.
    KvEvents(KvBatch),
    /// What a replica measured of a backend since its last report.
    ObserveService(Box<ServiceSample>),
    /// Output lengths of finished requests.
    ObserveOutputs {
        /// Whose requests.
        user: UserKey,
        /// Of which model.
        model: ModelKey,
        /// Output tokens of each, in the order they ended; at most [`OUTPUTS_PER_ITEM_MAX`].
        tokens: Vec<u32>,
    },
    /// A request waits for a grant (`grants = "log"`).
    Wait(Wait),
    /// A waiting request of this replica left, or gave its grant back.
    Leave {
        /// Its ticket.
        ticket: Ticket,
    },
    /// There is room: the next waiting requests of a model are granted, in fair order.
    Grant {
        /// Of which model.
        model: ModelKey,
        /// How many.
        count: u32,
    },
}

/// How an attempt ended, as far as the engine's cache is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum LeaseOutcome {
    /// The engine ran it: full blocks stay cached, also when the client left.
    Kept,
    /// The engine never ran it (no connection, an error before the first byte): blocks that only
    /// this attempt brought are given back.
    Discarded,
    /// As kept, but the age of blocks that the attempt found cached is not renewed.
    KeptUntouched,
}

/// A user as an operator describes one.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserSpec {
    /// The user's name.
    pub name: String,
    /// Share of service against others, in thousandths: 1000 is one share. At least 1.
    pub weight_milli: u32,
}

impl UserSpec {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(is_name(&self.name), "name", "1 to 256 bytes")?;
        ensure(self.weight_milli > 0, "weight_milli", "at least 1")
    }
}

/// What applying a command answers. Part of the log contract: the same on every replica.
///
/// Encoded by hand, in [`crate::codec`]: a derived decoder would recurse as deep as the bytes say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Done, nothing to tell.
    Applied,
    /// A batch was applied.
    Batch(BatchReply),
    /// Seen before and applied then; the reply of that time. Of a sequence number before the last
    /// one only that it was applied is remembered: [`Reply::Applied`]. Never nested.
    Repeated(Box<Reply>),
    /// Refused; nothing changed.
    Rejected(Rejection),
}

/// What of a batch did not take effect.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct BatchReply {
    /// Attempts (absolute) whose `tip` the backend did not own: to be sent again with the whole
    /// chain.
    pub missing_tip: Vec<AttemptId>,
    /// Items that named a backend's earlier incarnation, an unknown attempt, or broke a bound.
    pub dropped: u32,
}

/// A committed command as its proposer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Where in the log it stands.
    pub index: LogIndex,
    /// What applying it answered.
    pub reply: Reply,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::CostSettings;

    #[test]
    fn settings_have_bounds() {
        let near = CostSettings {
            near_permille: 1001,
            ..CostSettings::default()
        };
        assert!(PolicyConfig::Cost(near).validate().is_err());
        assert_eq!(
            PolicyConfig::Cost(CostSettings::default()).validate(),
            Ok(())
        );
        assert!(
            FairnessSettings {
                input_price: 1,
                output_price: 1001
            }
            .validate()
            .is_err()
        );
        assert_eq!(FairnessSettings::default().validate(), Ok(()));
        let weightless = UserSpec {
            name: "a".to_owned(),
            weight_milli: 0,
        };
        assert!(weightless.validate().is_err());
    }
}
