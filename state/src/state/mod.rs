//! [`RouterState`]: everything replicated, and `apply`.
//!
//! `apply` is the only way the state changes. It looks at nothing but the state and the command,
//! answers every command and panics on none. What readers on other threads need is published
//! through [`View`] as it goes.

mod admin;
mod audit;
mod batch;
mod check;
mod leases;
mod published;
mod report;
mod sessions;
mod snapshot;

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use crate::backends::{Backend, Backends, Effect};
use crate::codec;
use crate::command::{Command, Envelope, Origin, Reject, Reply};
use crate::ids::{LogIndex, ReplicaId, Slot};
use crate::ownership::Ownership;
use crate::policy::{CostSettings, PolicyConfig};
use crate::users::{self, FairnessSettings, Users};

use audit::Audit;
pub use audit::{AUDIT_ENTRIES_MAX, AuditAction, AuditEntry};
pub use check::Broken;
use leases::Leases;
pub use published::{Registry, View};
pub use report::SessionView;
use sessions::{Admission, Sessions};
pub use snapshot::{CorruptSnapshot, Frozen, SNAPSHOT_VERSION};

/// Most that one command moves the replicated time, milliseconds. A clock that is far ahead then
/// bends the time as long as it speaks, and not for good; an hour lets a cluster that idled over
/// night catch up within some ten commands.
pub const TIME_STEP_MS_MAX: u64 = 60 * 60 * 1000;

/// A log entry that is not a command this build knows.
#[derive(Debug, thiserror::Error)]
#[error("decode log entry: {0}")]
pub struct Undecodable(pub String);

/// The whole replicated state of a replica.
pub struct RouterState {
    applied: LogIndex,
    /// Unix milliseconds: see [`RouterState::now_ms`].
    now_ms: u64,
    config: Config,
    backends: Backends,
    ownership: Ownership,
    sessions: Sessions,
    leases: Leases,
    users: Users,
    audit: Audit,
    /// Hash of config, backends and audit: they change rarely.
    cold_digest: u128,
    /// Whether a command changed any of these, so that their hash and the published registry follow
    /// once it is applied: one batch may tell of a thousand engines.
    is_cold_changed: bool,
    view: Arc<View>,
}

/// Replicated settings.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
struct Config {
    initialised: bool,
    hash_seed: u64,
    policy: PolicyConfig,
    fairness: FairnessSettings,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            initialised: false,
            hash_seed: 0,
            policy: PolicyConfig::Cost(CostSettings::default()),
            fairness: FairnessSettings::default(),
        }
    }
}

impl Config {
    /// Checks what `apply` relies on; says what is wrong.
    fn validate(&self) -> Result<(), String> {
        let settings = self.policy.validate();
        settings
            .and_then(|()| self.fairness.validate())
            .map_err(|reject| reject.to_string())
    }
}

impl Default for RouterState {
    fn default() -> Self {
        Self::new()
    }
}

impl RouterState {
    /// An empty state at index 0.
    #[must_use]
    pub fn new() -> Self {
        let ownership = Ownership::new();
        let config = Config::default();
        let backends = Backends::default();
        let view = Arc::new(View::new(
            ownership.view(),
            Registry::of(&config, &backends),
        ));
        let mut state = Self {
            applied: LogIndex(0),
            now_ms: 0,
            config,
            backends,
            ownership,
            sessions: Sessions::default(),
            leases: Leases::new(),
            users: Users::new(),
            audit: Audit::default(),
            cold_digest: 0,
            is_cold_changed: false,
            view,
        };
        state.cold_digest = state.hash_cold();
        state
    }

    /// Applies one command. Total: any command is answered, none panics.
    ///
    /// # Panics
    /// When `index` is not above the last one: the log is then broken, not the command.
    pub fn apply(&mut self, index: LogIndex, envelope: Envelope) -> Reply {
        self.advance(index);
        let origin = envelope.origin;
        let reply = match self.admit(&origin, envelope.proposed_at_ms) {
            Some(answer) => answer,
            None => {
                self.pass_time(envelope.proposed_at_ms);
                let reply = self.run(&origin, envelope.command);
                self.sessions.answer(&origin, reply.clone());
                reply
            }
        };
        if std::mem::take(&mut self.is_cold_changed) {
            self.cold_changed();
        }
        self.publish_for_policies();
        self.view.publish_applied(index);
        reply
    }

    /// Moves to `index` without a change: for log entries that carry no command.
    ///
    /// # Panics
    /// As [`RouterState::apply`].
    pub fn skip(&mut self, index: LogIndex) {
        self.advance(index);
        self.view.publish_applied(index);
    }

    /// What readers on other threads hold: always the same handle, also after a restore.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view)
    }

    /// The digest of everything replicated, as of the applied index; the index itself is no part
    /// of it. The big tables keep theirs as they change, so that this costs microseconds.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let [users, users_rest] = self.users.digest();
        let parts = [
            u128::from(self.now_ms),
            self.cold_digest,
            self.ownership.digest(),
            self.leases.digest(),
            users,
            users_rest,
            xxh3_128(&codec::to_bytes(&self.sessions)),
        ];
        let mut bytes = [0; 7 * 16];
        for (place, part) in bytes.chunks_exact_mut(16).zip(parts) {
            place.copy_from_slice(&part.to_le_bytes());
        }
        xxh3_128(&bytes)
    }

    fn advance(&mut self, index: LogIndex) {
        let applied = self.applied;
        assert!(
            index > applied,
            "log applied out of order: {index} after {applied}"
        );
        self.applied = index;
    }

    /// Moves the replicated time to a proposer's, forwards only. The first command sets it.
    fn pass_time(&mut self, proposed_at_ms: u64) {
        let latest = match self.now_ms {
            0 => u64::MAX,
            now_ms => now_ms.saturating_add(TIME_STEP_MS_MAX),
        };
        self.now_ms = self.now_ms.max(proposed_at_ms.min(latest));
    }

    /// Answers a command that is not to be applied.
    fn admit(&mut self, origin: &Origin, proposed_at_ms: u64) -> Option<Reply> {
        let replica = origin.replica;
        if origin.seq == 0 {
            let (field, expected) = ("origin.seq".to_owned(), "at least 1".to_owned());
            return Some(Reply::Rejected(Reject::Invalid { field, expected }));
        }
        match self.sessions.admit(origin, proposed_at_ms) {
            Admission::Fresh => None,
            Admission::FreshRun => {
                self.close_replica(replica);
                None
            }
            Admission::Repeated(reply) => Some(Reply::Repeated(Box::new(reply))),
            Admission::Stale => Some(Reply::Rejected(Reject::StaleSession { replica })),
        }
    }

    /// The only branch on commands.
    fn run(&mut self, origin: &Origin, command: Command) -> Reply {
        let result = match command {
            Command::InitCluster {
                hash_seed,
                policy,
                fairness,
            } => self.init_cluster(origin, hash_seed, policy, fairness),
            _ if !self.config.initialised => Err(Reject::NotInitialised),
            Command::Batch {
                base_attempt,
                items,
            } => {
                return Reply::Batch(self.batch(origin.replica, base_attempt, items));
            }
            Command::PutBackend(spec) => self.put_backend(origin, spec),
            Command::DeleteBackend { name } => self.delete_backend(origin, name),
            Command::SetDraining { name, draining } => self.set_draining(origin, name, draining),
            Command::PutUser(spec) => self.put_user(origin, spec),
            Command::PutPolicy(policy) => self.put_policy(origin, policy),
            Command::ExpireSession { replica, session } => {
                self.expire_session(origin, replica, session)
            }
        };
        result.map_or_else(Reply::Rejected, |()| Reply::Applied)
    }

    /// Ends what a replica has open: a run that is over keeps nothing.
    fn close_replica(&mut self, replica: ReplicaId) {
        for lease in self.leases.close_replica(replica) {
            // The engines went on without the replica: what they computed is cached.
            self.ownership.release(lease.lease(), true);
        }
        self.users.close_replica(replica);
    }

    /// Lets ownership and leases follow a change of a backend.
    fn follow(&mut self, effect: Effect) {
        match effect {
            Effect::Unchanged => {}
            Effect::Resized(slot) => {
                let capacity = self.capacity_blocks(slot);
                self.ownership.set_capacity(slot, capacity);
            }
            Effect::Begun(slot) => {
                self.leases.forget_slot(slot);
                self.ownership.remove_backend(slot);
                let capacity = self.capacity_blocks(slot);
                self.ownership.add_backend(slot, capacity);
            }
        }
    }

    fn capacity_blocks(&self, slot: Slot) -> Option<u32> {
        self.backends
            .in_slot(slot)
            .and_then(Backend::capacity_blocks)
    }

    /// Publishes what the live policy looks at beside registry and blocks.
    fn publish_for_policies(&mut self) {
        let needs = self.config.policy.needs();
        let wants_all = self.view.wants_all();
        if wants_all || needs.user_tokens {
            let settings = self.config.policy.vtc_basic().unwrap_or_default();
            let lately = self.users.lately(self.now_ms, &settings);
            self.view.publish_lately(Some(lately));
        } else if self.view.publishes_lately() {
            self.users.forget_lately();
            self.view.publish_lately(None);
        }
    }

    /// After every change of config, backends or audit.
    fn cold_changed(&mut self) {
        let window_ms = self.config.policy.vtc_basic().map_or(
            users::WINDOW_BUCKETS as u64 * users::WINDOW_BUCKET_MS,
            |settings| settings.window_ms(),
        );
        self.users.set_window_ms(window_ms);
        self.cold_digest = self.hash_cold();
        self.view
            .publish_registry(Registry::of(&self.config, &self.backends));
    }

    fn hash_cold(&self) -> u128 {
        xxh3_128(&codec::to_bytes(&(
            &self.config,
            &self.backends,
            &self.audit,
        )))
    }
}
