//! [`RouterState`]: the whole replicated state, and `apply`.
//!
//! Only `apply` changes the state, except that a snapshot replaces all of it. `apply` depends only
//! on the state, the command and its log index, replies to every command and never panics on one.
//! It also publishes through [`StateView`] what readers on other threads need.

mod admin;
mod audit;
mod batch;
mod capacity;
mod check;
mod digest;
mod discovery;
mod keys;
mod kv_events;
mod leases;
mod measurements;
mod predicted_evictions;
mod published;
mod report;
mod restoring;
mod sessions;
mod settings;
mod snapshot;
mod streams;
mod time;
mod trees;
mod usage;
mod users;

use std::sync::Arc;

use crate::backends::{Backends, BlockSizes, SlotChange};
use crate::command::{Command, Envelope, Origin, Reply};
use crate::discovery::Discovered;
use crate::ids::{LogIndex, ReplicaId, Slot};
use crate::keys::Keys;
use crate::ownership::Ownership;
use crate::policy::{CostSettings, PolicyConfig, VtcBasicSettings};
use crate::prefix::HashSecret;
use crate::pricing::FairnessSettings;
use crate::reject::Rejection;
use crate::users::{Users, WINDOW_BUCKET_MS, WINDOW_BUCKETS};

use crate::capacity::Capacity;
use crate::kv_events::FollowedBackends;
use crate::kv_events::tiers::TierIndexes;
use crate::outputs::Outputs;
use crate::ratios::LearntRatios;
use crate::reader_assignment::Readers;
use crate::service::{AssumedCapacities, CapacityCorrections, ServiceStats};
use crate::streams::StreamTable;
use crate::trees::Trees;
use crate::usage::UsageTable;
use audit::Audit;
pub use audit::{AUDIT_ENTRIES_MAX, AuditAction, AuditEntry};
use leases::Leases;
pub use published::{Registry, StateView};
pub use report::{LeaseView, SessionView};
use restoring::StagedRestore;
pub use restoring::{RESTORE_IDLE_MS_MAX, ReadBackup, RestoreView, StagedBackup};
use sessions::{Dedup, Sessions};
use settings::OperatorSettings;
pub use snapshot::{FrozenState, SNAPSHOT_VERSION};
use time::ReplicatedTime;
pub use time::{STAMP_AHEAD_MS_MAX, STAMP_LATE_MS_MAX, UNANIMOUS_MS};

/// The replicated state, as one replica holds it.
pub struct RouterState {
    applied: LogIndex,
    time: ReplicatedTime,
    /// Stamp of the command being applied, in Unix milliseconds. It is not part of the state.
    stamped_ms: u64,
    config: ClusterConfig,
    backends: Backends,
    /// Sources and losses of the backends that sources registered.
    discovered: Discovered,
    block_sizes: BlockSizes,
    ownership: Ownership,
    /// Blocks that engines hold on tiers below the GPU; follows from `exact`.
    tiers: TierIndexes,
    sessions: Sessions,
    leases: Leases,
    users: Users,
    audit: Audit,
    settings: OperatorSettings,
    readers: Readers,
    service: ServiceStats,
    assumed: AssumedCapacities,
    beliefs: CapacityCorrections,
    outputs: Outputs,
    ratios: LearntRatios,
    capacity: Capacity,
    exact: FollowedBackends,
    keys: Keys,
    trees: Trees,
    streams: StreamTable,
    usage: UsageTable,
    /// Restore in progress, if any.
    staged: Option<StagedRestore>,
    /// Backup that was read ahead of the command that switches to it, if any. It is not part of the
    /// state, because its contents follow from `staged`.
    prepared: Option<ReadBackup>,
    /// Hash of the parts that rarely change (the cold parts): config, backends, audit, settings,
    /// readers, block sizes and sources of backends.
    cold_digest: u128,
    /// Whether a command changed one of the cold parts. Their hash and the published registry are
    /// updated once per command, because one batch may report a thousand engines.
    is_cold_changed: bool,
    /// Whether a command changed the published service figures.
    is_service_changed: bool,
    /// Whether a command changed the published output lengths.
    is_outputs_changed: bool,
    /// Whether a command changed the learned ratios.
    is_ratios_changed: bool,
    /// Whether a command changed the demand for a model.
    is_capacity_changed: bool,
    view: Arc<StateView>,
}

/// Settings that are fixed when the cluster is founded, and the live policy.
#[derive(Debug, Clone, PartialEq, bincode::Encode, bincode::Decode)]
struct ClusterConfig {
    initialised: bool,
    hash_seed: u64,
    hash_secret: HashSecret,
    policy: PolicyConfig,
    fairness: FairnessSettings,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            initialised: false,
            hash_seed: 0,
            hash_secret: HashSecret::default(),
            policy: PolicyConfig::Cost(CostSettings::default()),
            fairness: FairnessSettings::default(),
        }
    }
}

impl ClusterConfig {
    /// Validates the settings that `apply` relies on. An error describes the first fault.
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
    /// Creates an empty state at index 0.
    #[must_use]
    pub fn new() -> Self {
        let (ownership, tiers) = (Ownership::new(), TierIndexes::default());
        let config = ClusterConfig::default();
        let backends = Backends::default();
        let users = Users::new();
        let view = Arc::new(StateView::new(
            (ownership.view(), tiers.views()),
            users.published(0),
            Registry::of(
                &config,
                &backends,
                &OperatorSettings::default(),
                (&FollowedBackends::default(), &Readers::default()),
            ),
        ));
        let mut state = Self {
            applied: LogIndex(0),
            time: ReplicatedTime::default(),
            stamped_ms: 0,
            config,
            backends,
            discovered: Discovered::default(),
            block_sizes: BlockSizes::default(),
            ownership,
            tiers,
            sessions: Sessions::default(),
            leases: Leases::new(),
            users,
            audit: Audit::default(),
            settings: OperatorSettings::default(),
            readers: Readers::default(),
            service: ServiceStats::default(),
            assumed: AssumedCapacities::default(),
            beliefs: CapacityCorrections::default(),
            outputs: Outputs::default(),
            ratios: LearntRatios::default(),
            capacity: Capacity::default(),
            exact: FollowedBackends::default(),
            keys: Keys::default(),
            trees: Trees::default(),
            streams: StreamTable::default(),
            usage: UsageTable::default(),
            staged: None,
            prepared: None,
            cold_digest: 0,
            is_cold_changed: false,
            is_service_changed: false,
            is_outputs_changed: false,
            is_ratios_changed: false,
            is_capacity_changed: false,
            view,
        };
        state.cold_digest = state.hash_cold();
        state
    }

    /// Applies one command and returns its reply.
    ///
    /// # Panics
    /// If `index` is not above the previous one, which means that the log is broken.
    pub fn apply(&mut self, index: LogIndex, envelope: Envelope) -> Reply {
        self.advance(index);
        let origin = envelope.origin;
        let reply = match self.admit(&origin, envelope.proposed_at_ms) {
            Some(answer) => answer,
            None => {
                self.stamped_ms = envelope.proposed_at_ms;
                self.time.advance(envelope.proposed_at_ms);
                self.forget_idle_restore();
                self.trees.forget_some(self.time.now_ms);
                self.streams.forget_some(self.time.now_ms);
                self.forget_usage();
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
        if std::mem::take(&mut self.is_ratios_changed) {
            self.view.publish_ratios(self.ratios.view());
        }
        if std::mem::take(&mut self.is_capacity_changed) {
            self.view.publish_capacity(self.capacity.view());
        }
        self.publish_keys();
        self.publish_trees();
        self.publish_streams();
        self.publish_usage();
        self.publish_evictions();
        self.publish_for_policies();
        self.publish_users();
        self.view.publish_time(self.time.now_ms);
        self.view.publish_applied(index);
        reply
    }

    /// Advances to `index` without a change, for a log entry that carries no command.
    ///
    /// # Panics
    /// If `index` is not above the previous one, which means that the log is broken.
    pub fn skip(&mut self, index: LogIndex) {
        self.advance(index);
        self.view.publish_applied(index);
    }

    /// Returns the view for readers on other threads. It stays the same object, even across a
    /// restore.
    #[must_use]
    pub fn view(&self) -> Arc<StateView> {
        Arc::clone(&self.view)
    }

    fn advance(&mut self, index: LogIndex) {
        let applied = self.applied;
        assert!(
            index > applied,
            "log applied out of order: {index} after {applied}"
        );
        self.applied = index;
    }

    /// Returns the reply to a command that must not be applied; `None` if it must be. Closes what
    /// an earlier session of the replica left open if the command starts a new one.
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

    /// Runs an admitted command and returns its reply.
    fn run(&mut self, origin: &Origin, command: Command) -> Reply {
        let result = match command {
            Command::Found(founding) => self.found(origin, *founding),
            _ if !self.config.initialised => Err(Rejection::NotInitialised),
            Command::Batch {
                base_attempt,
                items,
            } => {
                return Reply::Batch(self.batch(origin.replica, base_attempt, items));
            }
            Command::PutBackend(spec) => self.put_backend(origin, spec),
            Command::DeleteBackend { name } => self.delete_backend(origin, name),
            Command::SetDraining {
                name,
                draining,
                moves_streams,
            } => self.set_draining(origin, name, (draining, moves_streams)),
            Command::PutPolicy(policy) => self.put_policy(origin, policy),
            Command::ExpireSession { replica, session } => {
                self.expire_session(replica, session);
                Ok(())
            }
            Command::PutRouting(settings) => self.put_routing(origin, settings),
            Command::PutAdmission(settings) => self.put_admission(origin, settings),
            Command::ConfigureUser { name, settings } => {
                self.configure_user(origin, name, *settings)
            }
            Command::ForgiveUser { name } => self.forgive_user(origin, name),
            Command::DeleteUser { name } => self.delete_user(origin, name),
            Command::CreateKey(spec) => self.create_key(origin, *spec),
            Command::RevokeKey { id } => self.revoke_key(origin, id),
            Command::RotateKey {
                id,
                secret,
                grace_ms,
            } => self.rotate_key(origin, id, (secret, grace_ms)),
            Command::PutUserDefaults(defaults) => self.put_user_defaults(origin, *defaults),
            Command::Discover(discovery) => self.discover(*discovery),
            Command::AssignReaders(readers) => self.assign_readers(&readers),
            Command::BeginRestore { restore, force } => self.begin_restore(restore, force),
            Command::RestorePart {
                restore,
                number,
                bytes,
            } => self.restore_part(restore, number, bytes),
            Command::FinishRestore { restore, bytes } => {
                self.finish_restore(origin, restore, bytes)
            }
            Command::AbortRestore { restore } => self.abort_restore(restore),
            Command::EndTree { root } => self.end_tree(origin, root),
            Command::SetRanks { backend, ranks } => self.set_ranks(backend, ranks),
        };
        result.map_or_else(Reply::Rejected, |()| Reply::Applied)
    }

    /// Closes everything that a replica has open, when its session ends.
    fn close_replica(&mut self, replica: ReplicaId) {
        for lease in self.leases.close_replica(replica) {
            // The engines continued without the replica, so what they computed is cached.
            self.ownership.release(lease.lease(), true);
            let (slot, now_ms) = (lease.backend.slot, self.time.now_ms);
            self.exact
                .released(slot, lease.tip, &mut self.ownership, now_ms);
        }
        self.users.close_replica(replica);
        self.is_capacity_changed |= self.capacity.close_replica(replica, self.time.now_ms);
    }

    /// Applies changes of backends to ownership, leases, measurements and unknown capacities.
    fn follow(&mut self, changes: &[SlotChange]) {
        for change in changes {
            match *change {
                SlotChange::Resized(slot) => {
                    let capacity = self.capacity_blocks(slot);
                    self.ownership.set_capacity(slot, capacity);
                }
                SlotChange::Begun(slot) => {
                    self.forget_occupant(slot);
                    let capacity = self.capacity_blocks(slot);
                    self.ownership.add_backend(slot, capacity);
                }
                SlotChange::Gone(slot) => {
                    self.forget_occupant(slot);
                    self.block_sizes.forget(slot);
                    self.readers.forget(slot);
                    self.discovered.forget(slot);
                }
            }
        }
        if !changes.is_empty() {
            self.resize_unknown_capacities();
        }
    }

    /// Forgets the leases, blocks, KV events and measurements of the occupant of `slot`.
    fn forget_occupant(&mut self, slot: Slot) {
        self.leases.forget_slot(slot);
        self.service.forget(slot);
        self.assumed.forget(slot);
        self.beliefs.forget(slot);
        self.exact.forget(slot);
        self.ownership.remove_backend(slot);
        self.tiers.remove_backend(slot);
    }

    /// Publishes the users' recent usage, which policies read in addition to registry and blocks.
    fn publish_for_policies(&mut self) {
        let wants_all = self.view.wants_all();
        if wants_all || self.vtc_basic().is_some() {
            let settings = self.vtc_basic().unwrap_or_default();
            let recent_usage = self.users.recent_usage(self.time.now_ms, &settings);
            self.view.publish_recent_usage(Some(recent_usage));
        } else if self.view.publishes_recent_usage() {
            self.users.forget_lately();
            self.view.publish_recent_usage(None);
        }
    }

    /// Returns the settings that determine the length of the usage windows. All policies share one
    /// set of windows: that of the live policy, else of the first model by name with such a policy.
    /// `None` if no policy reads usage.
    fn vtc_basic(&self) -> Option<VtcBasicSettings> {
        let live = self.config.policy.vtc_basic();
        let mut models = self.settings.routing.models.values();
        live.or_else(|| models.find_map(PolicyConfig::vtc_basic))
    }

    /// Updates everything derived from the cold parts of the state after one of them changed.
    fn cold_changed(&mut self) {
        let window_ms = self
            .vtc_basic()
            .map_or(WINDOW_BUCKETS as u64 * WINDOW_BUCKET_MS, |settings| {
                settings.window_ms()
            });
        self.users.set_window_ms(window_ms);
        self.cold_digest = self.hash_cold();
        self.view.publish_registry(self.registry());
        // The published slots, limits and capacities depend on the cold parts.
        self.is_service_changed = true;
    }

    /// Returns the registry to publish.
    fn registry(&self) -> Registry {
        let kv = (&self.exact, &self.readers);
        Registry {
            discovered: self.discovered.by_slot().clone(),
            names_since: self.audit.names_since(),
            block_sizes: self.block_sizes.clone(),
            user_defaults: self.users.defaults().clone(),
            ..Registry::of(&self.config, &self.backends, &self.settings, kv)
        }
    }
}
