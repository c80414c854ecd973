//! [`RouterState`]: everything replicated, and `apply`.
//!
//! `apply` is the only way the state changes. It looks at nothing but the state and the command,
//! answers every command and panics on none. What readers on other threads need is published
//! through [`StateView`] as it goes.

mod admin;
mod audit;
mod batch;
mod check;
mod leases;
mod live;
mod published;
mod report;
mod restoring;
mod sessions;
mod snapshot;
mod time;

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use crate::backends::{Backends, SlotChange};
use crate::command::{Command, Envelope, Origin, Reply};
use crate::encoding;
use crate::ids::{LogIndex, ReplicaId, Slot};
use crate::ownership::Ownership;
use crate::planted::{self, Bug};
use crate::policy::{CostSettings, PolicyConfig, VtcBasicSettings};
use crate::prefix::{BlockHasher, HashSecret};
use crate::pricing::FairnessSettings;
use crate::reject::Rejection;
use crate::users::{self, Users};

use crate::exact::FollowedBackends;
use crate::grants::WaitingList;
use crate::outputs::Outputs;
use crate::readers::Readers;
use crate::service::ServiceStats;
use audit::Audit;
pub use audit::{AUDIT_ENTRIES_MAX, AuditAction, AuditEntry};
use leases::Leases;
use live::LiveSettings;
pub use published::{Registry, StateView};
pub use report::{LeaseView, SessionView};
use restoring::StagedRestore;
pub use restoring::{RESTORE_IDLE_MS_MAX, ReadBackup, RestoreView, StagedBackup};
use sessions::{Dedup, Sessions};
pub use snapshot::{FrozenState, SNAPSHOT_VERSION};
use time::ReplicatedTime;
pub use time::{STAMP_AHEAD_MS_MAX, STAMP_LATE_MS_MAX, TIME_STEP_MS_MAX, UNANIMOUS_MS};

/// The whole replicated state of a replica.
pub struct RouterState {
    applied: LogIndex,
    time: ReplicatedTime,
    config: ClusterConfig,
    /// What blocks are hashed under; `None`: the cluster was founded before there was a secret.
    hash_secret: Option<HashSecret>,
    backends: Backends,
    ownership: Ownership,
    sessions: Sessions,
    leases: Leases,
    users: Users,
    audit: Audit,
    settings: LiveSettings,
    readers: Readers,
    service: ServiceStats,
    outputs: Outputs,
    waiting: WaitingList,
    exact: FollowedBackends,
    /// A backup that is being brought in.
    staged: Option<StagedRestore>,
    /// A backup that was read ahead of the command that switches to it. No part of the state: what
    /// is in it follows from `staged`.
    prepared: Option<ReadBackup>,
    /// Hash of config, backends, audit, settings and readers: they change rarely.
    cold_digest: u128,
    /// Whether a command changed any of these, so that their hash and the published registry follow
    /// once it is applied: one batch may tell of a thousand engines.
    is_cold_changed: bool,
    /// Whether a command changed what readers see of service.
    is_service_changed: bool,
    /// Whether a command changed what readers see of output lengths.
    is_outputs_changed: bool,
    /// Whether a command changed who waits for grants.
    is_waiting_changed: bool,
    view: Arc<StateView>,
}

/// Replicated settings.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
struct ClusterConfig {
    initialised: bool,
    hash_seed: u64,
    policy: PolicyConfig,
    fairness: FairnessSettings,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            initialised: false,
            hash_seed: 0,
            policy: PolicyConfig::Cost(CostSettings::default()),
            fairness: FairnessSettings::default(),
        }
    }
}

impl ClusterConfig {
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
        let config = ClusterConfig::default();
        let backends = Backends::default();
        let view = Arc::new(StateView::new(
            ownership.view(),
            Registry::of(
                &config,
                &backends,
                &LiveSettings::default(),
                (&FollowedBackends::default(), &Readers::default()),
            ),
        ));
        let mut state = Self {
            applied: LogIndex(0),
            time: ReplicatedTime::default(),
            config,
            hash_secret: None,
            backends,
            ownership,
            sessions: Sessions::default(),
            leases: Leases::new(),
            users: Users::new(),
            audit: Audit::default(),
            settings: LiveSettings::default(),
            readers: Readers::default(),
            service: ServiceStats::default(),
            outputs: Outputs::default(),
            waiting: WaitingList::default(),
            exact: FollowedBackends::default(),
            staged: None,
            prepared: None,
            cold_digest: 0,
            is_cold_changed: false,
            is_service_changed: false,
            is_outputs_changed: false,
            is_waiting_changed: false,
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
                self.time.pass(envelope.proposed_at_ms);
                self.forget_idle_restore();
                let reply = self.run(&origin, envelope.command);
                self.sessions.answer(&origin, reply.clone());
                reply
            }
        };
        let is_cold_changed = std::mem::take(&mut self.is_cold_changed);
        if is_cold_changed {
            self.cold_changed();
        }
        if std::mem::take(&mut self.is_service_changed) {
            self.view.publish_service(self.service_view());
        }
        if std::mem::take(&mut self.is_outputs_changed) {
            self.view.publish_outputs(self.outputs.view());
        }
        self.publish_for_policies();
        self.publish_for_admission(is_cold_changed);
        self.view.publish_time(self.time.now_ms);
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
    pub fn view(&self) -> Arc<StateView> {
        Arc::clone(&self.view)
    }

    /// The digest of everything replicated, as of the applied index; the index itself is no part
    /// of it. The big tables keep theirs as they change, so that this costs microseconds.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let [users, users_rest] = self.users.digest();
        let sessions = match planted::is(Bug::SnapshotWithoutSessions) {
            true => 0,
            false => xxh3_128(&encoding::to_bytes(&self.sessions)),
        };
        let parts = [
            u128::from(self.time.now_ms),
            self.cold_digest,
            self.ownership.digest(),
            self.leases.digest(),
            users,
            users_rest,
            sessions,
        ];
        let mut bytes = Vec::with_capacity(16 * 16);
        for part in parts {
            bytes.extend(part.to_le_bytes());
        }
        self.append_live_digest(&mut bytes);
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

    /// Answers a command that is not to be applied.
    fn admit(&mut self, origin: &Origin, proposed_at_ms: u64) -> Option<Reply> {
        let replica = origin.replica;
        if origin.seq == 0 {
            let (field, expected) = ("origin.seq".to_owned(), "at least 1".to_owned());
            return Some(Reply::Rejected(Rejection::Invalid { field, expected }));
        }
        match self.sessions.dedup(origin, proposed_at_ms) {
            Dedup::Fresh => None,
            Dedup::FreshRun => {
                self.close_replica(replica);
                None
            }
            Dedup::Repeated(reply) => Some(Reply::Repeated(Box::new(reply))),
            Dedup::Stale => Some(Reply::Rejected(Rejection::StaleSession { replica })),
        }
    }

    /// The only branch on commands.
    fn run(&mut self, origin: &Origin, command: Command) -> Reply {
        let result = match command {
            Command::InitCluster {
                hash_seed,
                policy,
                fairness,
            } => self.init_cluster(origin, hash_seed.into(), policy, fairness),
            Command::FoundCluster {
                hash_seed,
                hash_secret,
                policy,
                fairness,
            } => {
                let hashing = BlockHasher {
                    seed: hash_seed,
                    secret: Some(hash_secret),
                };
                self.init_cluster(origin, hashing, policy, fairness)
            }
            _ if !self.config.initialised => Err(Rejection::NotInitialised),
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
            Command::PutRouting(settings) => self.put_routing(origin, settings),
            Command::PutAdmission(settings) => self.put_admission(origin, settings),
            Command::PutUserLimits { name, limits } => self.put_user_limits(origin, name, limits),
            Command::SetUser { user, limits } => self.set_user(origin, user, limits),
            Command::ForgiveUser { name } => self.forgive_user(origin, name),
            Command::AssignReaders(readers) => self.assign_readers(origin, &readers),
            Command::BeginRestore { restore, force } => self.begin_restore(restore, force),
            Command::RestorePart {
                restore,
                number,
                bytes,
            } => self.restore_part(restore, number, bytes),
            Command::FinishRestore { restore, bytes } => {
                self.finish_restore(origin, restore, bytes)
            }
            Command::AbortRestore { restore } => {
                self.abort_restore(restore);
                Ok(())
            }
            Command::PaceTime => {
                self.time.pace();
                self.follow_format();
                Ok(())
            }
        };
        result.map_or_else(Reply::Rejected, |()| Reply::Applied)
    }

    /// Lets what depends on the log's format follow it. That all members know format 4 is in the
    /// state as that time is paced.
    fn follow_format(&mut self) {
        self.users.spare_charged(self.time.paced.is_some());
    }

    /// Ends what a replica has open: a run that is over keeps nothing.
    fn close_replica(&mut self, replica: ReplicaId) {
        let leases = match planted::is(Bug::ExpiryLeavesLeases) {
            true => Vec::new(),
            false => self.leases.close_replica(replica),
        };
        for lease in leases {
            // The engines went on without the replica: what they computed is cached.
            self.ownership.release(lease.lease(), true);
            self.exact
                .released(lease.backend.slot, &self.ownership, self.time.now_ms);
        }
        if !planted::is(Bug::ExpiryLeavesRequests) {
            self.users.close_replica(replica);
        }
        self.close_waiting(replica);
    }

    /// Lets ownership and leases follow a change of a backend.
    fn follow(&mut self, effect: SlotChange) {
        match effect {
            SlotChange::Unchanged => {}
            SlotChange::Resized(slot) => {
                let capacity = self.capacity_blocks(slot);
                self.ownership.set_capacity(slot, capacity);
            }
            SlotChange::Begun(slot) => {
                self.leases.forget_slot(slot);
                self.service.forget(slot);
                self.exact.forget(slot);
                self.ownership.remove_backend(slot);
                let capacity = self.capacity_blocks(slot);
                self.ownership.add_backend(slot, capacity);
            }
        }
    }

    /// Blocks that the cache of the backend in `slot` is taken to hold: as the operator says, else
    /// as the engine says, corrected by what its answers say.
    fn capacity_blocks(&self, slot: Slot) -> Option<u32> {
        let backend = self.backends.in_slot(slot)?;
        if backend.spec.capacity_blocks.is_some() {
            return backend.spec.capacity_blocks;
        }
        let told = backend.facts.capacity_blocks?;
        let figures = self.service.figures(slot);
        Some(figures.map_or(told, |figures| figures.accuracy.corrected(told)))
    }

    /// Publishes what the live policy looks at beside registry and blocks.
    fn publish_for_policies(&mut self) {
        let wants_all = self.view.wants_all();
        if wants_all || self.vtc_basic().is_some() {
            let settings = self.vtc_basic().unwrap_or_default();
            let lately = self.users.lately(self.time.now_ms, &settings);
            self.view.publish_lately(Some(lately));
        } else if self.view.publishes_lately() {
            self.users.forget_lately();
            self.view.publish_lately(None);
        }
    }

    /// The settings that say how long usage stays in the users' windows, of which there is one: the
    /// live policy's, else those of the first model by name with such a policy.
    fn vtc_basic(&self) -> Option<VtcBasicSettings> {
        let live = self.config.policy.vtc_basic();
        let routing = self.settings.routing.iter();
        let mut models = routing.flat_map(|routing| routing.models.values());
        live.or_else(|| models.find_map(PolicyConfig::vtc_basic))
    }

    /// After every change of config, backends or audit.
    fn cold_changed(&mut self) {
        let window_ms = self.vtc_basic().map_or(
            users::WINDOW_BUCKETS as u64 * users::WINDOW_BUCKET_MS,
            |settings| settings.window_ms(),
        );
        self.users.set_window_ms(window_ms);
        self.cold_digest = self.hash_cold();
        self.view.publish_registry(self.registry());
        // Who stands where, limits and capacities follow from these.
        self.is_service_changed = true;
    }

    /// What is published of the small part of the state.
    fn registry(&self) -> Registry {
        let kv = (&self.exact, &self.readers);
        Registry {
            restored: self.audit.restored(),
            hash_secret: self.hash_secret.clone(),
            ..Registry::of(&self.config, &self.backends, &self.settings, kv)
        }
    }

    fn hash_cold(&self) -> u128 {
        let mut bytes = encoding::to_bytes(&(&self.config, &self.backends, &self.audit));
        live::append_unless_default(&self.settings, &mut bytes);
        live::append_unless_default(&self.readers, &mut bytes);
        if let Some(secret) = &self.hash_secret {
            encoding::append_bytes(secret, &mut bytes);
        }
        xxh3_128(&bytes)
    }
}
