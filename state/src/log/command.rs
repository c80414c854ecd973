//! Commands of the log, their origin, and their replies.
//!
//! All types in this module are part of the log format. Appending a variant to an enum makes a new
//! format version; existing variants never change.

use bincode::{Decode, Encode};

use crate::capacity::DemandReport;
use crate::discovery::Discovery;
use crate::ids::{
    AgentSessionKey, ApiKeyId, AttemptId, BackendRef, BlockHash, LogIndex, ModelKey, ReplicaId,
    RestoreId, SessionId, UserKey,
};
use crate::keys::{ApiKeySpec, SecretHash};
use crate::kv_events::KvBatch;
use crate::policy::{PolicyConfig, RoutingSettings};
use crate::prefix::HashSecret;
use crate::pricing::FairnessSettings;
use crate::ratios::TextSample;
use crate::reader_assignment::Assignment;
use crate::service::{BeliefSample, ServiceSample};
use crate::settings::AdmissionSettings;
use crate::streams::StreamCharge;
use crate::trees::{NewSession, SessionRef, SessionTurn};
use crate::usage::UsageSource;

pub use crate::backends::{BackendRole, BackendSpec, EngineFacts};
pub use crate::bounds::{
    BACKENDS_MAX, BLOCKS_PER_ITEM_MAX, LIST_BYTES_MAX, NAME_BYTES_MAX, OUTPUTS_PER_ITEM_MAX,
    RESTORE_BYTES_MAX, RESTORE_PART_BYTES, USERS_MAX,
};
pub use crate::charge::Charge;
pub use crate::reject::Rejection;
pub use crate::users::{UserDefaults, UserSettings};

/// Content of one log entry: a command and its origin.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
pub struct Envelope {
    /// Proposer of the command. An envelope with an origin (replica, session, lane and number) seen
    /// before is answered but not applied again.
    pub origin: Origin,
    /// Proposer's estimate of Unix time, in milliseconds. A retry carries a new estimate.
    pub proposed_at_ms: u64,
    /// The command itself.
    pub command: Command,
}

/// Origin of a command. A replica has at most one command outstanding per lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Origin {
    /// Replica that proposed the command.
    pub replica: ReplicaId,
    /// Session (run) of the replica.
    pub session: SessionId,
    /// Command sequence in which `seq` counts.
    pub lane: Lane,
    /// Number in the sequence, ascending from 1. Gaps are allowed. A number at or below the last
    /// one applied is a repeat.
    pub seq: u64,
}

/// One of the two independent command sequences of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub enum Lane {
    /// Batches from the outbox ([`Command::Batch`]).
    Outbox,
    /// Every other command: admin writes and the leader's own commands.
    Admin,
}

/// A change to the replicated state.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
pub enum Command {
    /// Founds a cluster. Rejected if the cluster is already founded. Carries all settings of the
    /// founder's config, so that no config read later can be the first to set one.
    Found(Box<Founding>),
    /// Applies what a replica has learned since its last flush, in order.
    Batch {
        /// Base of the attempt ids. `items` contain offsets from it, which are short.
        base_attempt: AttemptId,
        /// Items of the batch, at most 64 KiB encoded. The outbox splits larger batches.
        items: Vec<Item>,
    },
    /// Closes what the session of a silent replica left open: releases its leases and ends its
    /// requests, waiting and in flight. If the replica returns, it continues in the same session.
    ExpireSession {
        /// Replica whose session expires.
        replica: ReplicaId,
        /// Session of the replica as last seen; a newer one is left alone.
        session: SessionId,
    },
    /// Adds or updates a backend. A new URL starts a new incarnation.
    PutBackend(BackendSpec),
    /// Removes a backend and everything that it owns.
    DeleteBackend {
        /// Id of the backend.
        name: String,
    },
    /// Turns draining of a backend on or off. A draining backend gets no new requests.
    SetDraining {
        /// Id of the backend.
        name: String,
        /// Whether the backend drains.
        draining: bool,
        /// Whether its streams go on at other backends, as far as they can. Has no effect without
        /// `draining`.
        moves_streams: bool,
    },
    /// Registers, changes or removes a backend on behalf of a discovery source.
    Discover(Box<Discovery>),
    /// Sets the number of data-parallel ranks of a backend's engine, as reported by the engine.
    /// Each rank has its own slot and starts with an empty cache. Proposed by the leader when the
    /// number changes.
    SetRanks {
        /// Backend of the engine's first rank.
        backend: BackendRef,
        /// Number of ranks, from 1 to [`RANKS_MAX`](crate::RANKS_MAX).
        ranks: u16,
    },
    /// Replaces the assignment of KV-event readers to backends. A backend that is not listed has no
    /// reader.
    AssignReaders(Vec<Assignment>),
    /// Replaces the routing policy from this log index on.
    PutPolicy(PolicyConfig),
    /// Replaces the routing settings other than the live policy, from this log index on.
    PutRouting(RoutingSettings),
    /// Replaces the admission settings from this log index on.
    PutAdmission(AdmissionSettings),
    /// Replaces the defaults of users without their own settings, from this log index on.
    PutUserDefaults(Box<UserDefaults>),
    /// Replaces everything that an operator sets for a user, at once. A user without any settings
    /// follows the defaults.
    ConfigureUser {
        /// Name of the user.
        name: String,
        /// New settings of the user.
        settings: Box<UserSettings>,
    },
    /// Resets a user's usage of limits and budgets. The user's charges and counter stay.
    ForgiveUser {
        /// Name of the user.
        name: String,
    },
    /// Deletes a user with its counters and settings. Rejected while requests of the user wait or
    /// are in flight. A later user of this name is a new one.
    DeleteUser {
        /// Name of the user.
        name: String,
    },
    /// Adds an API key. Rejected if the table is full and no key has expired.
    CreateKey(Box<ApiKeySpec>),
    /// Gives an API key a new secret.
    RotateKey {
        /// Id of the key.
        id: ApiKeyId,
        /// Hash of the new secret.
        secret: SecretHash,
        /// Time for which the current secret stays valid, in milliseconds, at most
        /// [`GRACE_MS_MAX`](crate::keys::GRACE_MS_MAX).
        grace_ms: u64,
    },
    /// Removes an API key: its secrets are rejected from this log index on, and no restore brings
    /// it back.
    RevokeKey {
        /// Id of the key.
        id: ApiKeyId,
    },
    /// Starts a restore from a backup, see `state/src/machine/restoring.rs`. Rejected while another
    /// restore is in progress, and, unless `force` is set, when the cluster has users or blocks.
    /// Revoked API keys and replaced secrets of the current state stay invalid.
    BeginRestore {
        /// Id of the restore.
        restore: RestoreId,
        /// Whether to replace a state that is not empty.
        force: bool,
    },
    /// Adds one part of the backed-up state. Parts may arrive in any order and more than once.
    RestorePart {
        /// Id of the restore.
        restore: RestoreId,
        /// Number of the part, from 0.
        number: u32,
        /// Contents of the part: [`RESTORE_PART_BYTES`] bytes, fewer in the last part.
        bytes: Vec<u8>,
    },
    /// Completes a restore: the backed-up state replaces the current one.
    FinishRestore {
        /// Id of the restore.
        restore: RestoreId,
        /// Total length of all parts, in bytes.
        bytes: u64,
    },
    /// Abandons a restore and discards its parts.
    AbortRestore {
        /// Id of the restore. Any other restore is left alone.
        restore: RestoreId,
    },
    /// Ends all sessions of the tree with this root.
    EndTree {
        /// Root of the tree.
        root: AgentSessionKey,
    },
}

impl Command {
    /// Returns the command that replaces the settings of the user called `name`.
    #[must_use]
    pub fn configure_user(name: impl Into<String>, settings: UserSettings) -> Self {
        Self::ConfigureUser {
            name: name.into(),
            settings: Box::new(settings),
        }
    }
}

/// Initial settings of a cluster, which its founder proposes.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
pub struct Founding {
    /// Seed of the user hashes and of the first link of each chain. Random, so that no client can
    /// construct collisions.
    pub hash_seed: u64,
    /// Secret under which every block is hashed.
    pub hash_secret: HashSecret,
    /// Initial routing policy.
    pub policy: PolicyConfig,
    /// Initial token prices.
    pub fairness: FairnessSettings,
    /// Initial routing settings other than the policy.
    pub routing: RoutingSettings,
    /// Initial admission settings.
    pub admission: AdmissionSettings,
    /// Initial defaults of users.
    pub user_defaults: UserDefaults,
}

impl Founding {
    /// Returns the founding of a cluster for tests and simulations: with default settings, and a
    /// secret that follows from the seed.
    #[must_use]
    pub fn of_seed(hash_seed: u64, policy: PolicyConfig) -> Self {
        Self {
            hash_seed,
            hash_secret: HashSecret::of_number(hash_seed),
            policy,
            fairness: FairnessSettings::default(),
            routing: RoutingSettings::default(),
            admission: AdmissionSettings::default(),
            user_defaults: UserDefaults::default(),
        }
    }

    /// Checks the bounds of every setting.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        self.policy.validate()?;
        self.fairness.validate()?;
        self.routing.validate()?;
        self.admission.validate()?;
        self.user_defaults.validate()
    }
}

impl From<Founding> for Command {
    fn from(founding: Founding) -> Self {
        Self::Found(Box::new(founding))
    }
}

/// One fact in a batch. Attempts are offsets from the `base_attempt` of the batch.
///
/// Encoded by hand in [`crate::codec`], because items make up most of the log.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// A request was dispatched to a backend. Its prompt blocks count as present there and in use
    /// until the release.
    Acquire {
        /// Attempt (dispatch) that takes the lease.
        attempt: u32,
        /// Backend to which the request was sent.
        backend: BackendRef,
        /// Deepest block of the prompt that the backend is believed to own, which `new` follows.
        /// `None` if `new` starts at the prompt's first block. If the backend does not own the tip,
        /// the item changes nothing, and [`BatchReply::missing_tip`] lists the attempt.
        tip: Option<BlockHash>,
        /// Blocks after `tip`, in order.
        new: Vec<BlockHash>,
    },
    /// The output of a request completed further blocks of its sequence.
    Materialize {
        /// Attempt (dispatch) with an open lease.
        attempt: u32,
        /// Blocks after the lease's deepest one, in order.
        new: Vec<BlockHash>,
    },
    /// A request has ended at its backend.
    Release {
        /// Attempt (dispatch) with an open lease.
        attempt: u32,
        /// Effect of the attempt on the engine's cache.
        outcome: LeaseOutcome,
    },
    /// A user has this name. Sent for users who may not be known yet. Repeats are harmless.
    DefineUser {
        /// Key of the user: the hash of `name`.
        key: UserKey,
        /// Name of the user, at most `NAME_BYTES_MAX` bytes.
        name: String,
    },
    /// Usage of one user since the replica's last flush. Token counts are capped at
    /// [`CHARGE_TOKENS_MAX`](crate::users::CHARGE_TOKENS_MAX).
    Charge(Charge),
    /// An engine reported facts about itself. Repeats are harmless.
    ObserveEngine {
        /// Backend that was probed.
        backend: BackendRef,
        /// Facts that the engine reported.
        facts: EngineFacts,
    },
    /// KV events of one engine's rank, as numbered by one publisher.
    KvEvents(KvBatch),
    /// Measurements of a backend since the last report of the replica.
    ObserveService(Box<ServiceSample>),
    /// Output lengths of finished requests of one user and model.
    ObserveOutputs {
        /// User whose requests have finished.
        user: UserKey,
        /// Model that served the requests.
        model: ModelKey,
        /// Number of output tokens of each request, in the order in which they ended. At most
        /// [`OUTPUTS_PER_ITEM_MAX`] requests.
        tokens: Vec<u32>,
    },
    /// Text and token counts of finished requests.
    ObserveText(TextSample),
    /// An engine reported its tokens per block. Repeats are harmless.
    ObserveBlockSize {
        /// Backend that was probed.
        backend: BackendRef,
        /// Number of tokens per block of the engine's cache.
        tokens: u32,
    },
    /// Outcomes of predictions that a backend has prompts cached.
    ObserveBelief(BeliefSample),
    /// A session begins, with its first turn. If it exists, it moves.
    BeginSession(NewSession),
    /// A turn of a session went to another backend than the one before it.
    MoveSession {
        /// The session.
        session: SessionRef,
        /// Backend of the turn.
        home: BackendRef,
    },
    /// A turn of a session ended.
    EndTurn(SessionTurn),
    /// A session's last turn ended.
    EndSession(SessionRef),
    /// Usage of a resumable stream since its carrier's last flush, or a take-over of the stream.
    ChargeStream(Box<StreamCharge>),
    /// Charges name requests of this API key and model by the hash of both. Repeats are harmless.
    DefineSource(UsageSource),
    /// Demand of the replica for a model. Repeats are harmless: a report replaces the earlier one.
    ObserveDemand(Box<DemandReport>),
}

/// Effect of an ended attempt on the engine's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub enum LeaseOutcome {
    /// The engine ran the request. Its full blocks stay cached, even if the client left.
    Kept,
    /// The engine never ran the request (no connection, or an error before the first byte). Blocks
    /// that only this attempt brought are dropped.
    Discarded,
    /// The engine ran the request, but the blocks that the attempt found cached keep their age.
    KeptUntouched,
}

/// Result of applying a command. It is part of the log format and equal on every replica.
///
/// Encoded by hand in [`crate::codec`], because a derived decoder would recurse to any depth that
/// the input encodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The command was applied, and there is nothing to report.
    Applied,
    /// A batch was applied.
    Batch(BatchReply),
    /// The command repeats one applied earlier, whose reply this contains. Only the reply to the
    /// last sequence number is kept; older ones are answered with [`Reply::Applied`]. Never nested.
    Repeated(Box<Reply>),
    /// The command was rejected, and nothing changed.
    Rejected(Rejection),
}

/// Items of a batch that did not take effect.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct BatchReply {
    /// Attempts (absolute ids) whose `tip` the backend did not own. The proposer sends them again
    /// with the whole chain.
    pub missing_tip: Vec<AttemptId>,
    /// Number of items that named an earlier incarnation of a backend or an unknown attempt, or
    /// exceeded a bound.
    pub dropped: u32,
}

/// A committed command as seen by its proposer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Log index of the command.
    pub index: LogIndex,
    /// Reply to the command.
    pub reply: Reply,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{CostSettings, EppSettings};

    #[test]
    fn settings_out_of_bounds_are_named() {
        let heavy = EppSettings {
            kv_weight: 1001,
            ..EppSettings::default()
        };
        assert!(PolicyConfig::Epp(heavy).validate().is_err());
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
        let weightless = UserSettings::of_weight(0);
        assert!(weightless.validate().is_err());
    }
}
