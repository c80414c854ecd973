//! [`StateView`]: what the hot path reads of the state, from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption, Guard};

use super::ClusterConfig;
use super::live::LiveSettings;
use crate::admission::UserFigures;
use crate::backends::{Backend, Backends};
use crate::exact::{FollowedBackends, KvCondition};
use crate::grants::{GrantsView, WaitingList};
use crate::ids::{BackendRef, LogIndex, ReplicaId, Slot, UserKey};
use crate::outputs::OutputsView;
use crate::policy::{PolicyConfig, RoutingSettings, UserTokens};
use crate::prefix::{BlockHasher, HashSecret};
use crate::pricing::FairnessSettings;
use crate::quotas::Quota;
use crate::readers::{Assignment, Readers};
use crate::service::ServiceView;
use crate::settings::AdmissionSettings;
use crate::users::{RecentUsage, UsersView};
use crate::view::BlockView;

/// What the hot path reads of the state, from any thread, without waiting for `apply`.
pub struct StateView {
    /// Which backend holds which blocks.
    pub blocks: BlockView,
    registry: ArcSwap<Registry>,
    applied: AtomicU64,
    now_ms: AtomicU64,
    /// What users used lately; `None` while no policy looks at it.
    lately: ArcSwapOption<RecentUsage>,
    /// Whether any policy may be asked for, live or not.
    wants_all: AtomicBool,
    service: ArcSwap<ServiceView>,
    outputs: ArcSwap<OutputsView>,
    /// All users; `None` while nobody wants them.
    users: ArcSwapOption<UsersView>,
    wants_users: AtomicBool,
    grants: ArcSwap<GrantsView>,
}

impl StateView {
    pub(super) fn new(blocks: BlockView, registry: Registry) -> Self {
        Self {
            blocks,
            registry: ArcSwap::from_pointee(registry),
            applied: AtomicU64::new(0),
            now_ms: AtomicU64::new(0),
            lately: ArcSwapOption::empty(),
            wants_all: AtomicBool::new(false),
            service: ArcSwap::default(),
            outputs: ArcSwap::default(),
            users: ArcSwapOption::empty(),
            wants_users: AtomicBool::new(false),
            grants: ArcSwap::default(),
        }
    }

    /// Backends and replicated config, as of the last change to either.
    #[must_use]
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    /// What was measured of the backends and what follows from it, as of the last change. Cheap:
    /// meant for one decision, not to be kept.
    #[must_use]
    pub fn service(&self) -> Guard<Arc<ServiceView>> {
        self.service.load()
    }

    /// Most requests that the backend in `slot` is given at once; `None`: as many as come.
    #[must_use]
    pub fn limit(&self, slot: Slot) -> Option<u32> {
        self.service.load().limit(slot)
    }

    /// Output lengths, predictions and bins, as of the last change. Cheap: meant for one decision,
    /// not to be kept.
    #[must_use]
    pub fn outputs(&self) -> Guard<Arc<OutputsView>> {
        self.outputs.load()
    }

    /// Index up to which the state is applied. What that index brought can be read once this
    /// answers it.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        // Pairs with the Release in `publish_applied`.
        LogIndex(self.applied.load(Ordering::Acquire))
    }

    /// Replicated time, as of the applied index: see [`RouterState::now_ms`](super::RouterState::now_ms).
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        // A number that stands for itself.
        self.now_ms.load(Ordering::Relaxed)
    }

    /// What a user used within the window; nothing while no policy looks at it.
    #[must_use]
    pub fn user_tokens(&self, user: UserKey) -> UserTokens {
        let lately = self.lately.load();
        lately
            .as_deref()
            .map(|lately| lately.tokens(user))
            .unwrap_or_default()
    }

    /// From the next command on, has everything published that any policy looks at, whichever is
    /// live: requests may ask for another one.
    pub fn want_all(&self) {
        self.wants_all.store(true, Ordering::Relaxed);
    }

    /// From the next command on, has the users published: admission reads them for every request.
    pub fn want_users(&self) {
        self.wants_users.store(true, Ordering::Relaxed);
    }

    /// All users as of the last command that changed one; `None` before they are published. To be
    /// held for one look only: while it is held, changing a user copies some more.
    #[must_use]
    pub fn users(&self) -> Option<Arc<UsersView>> {
        self.users.load_full()
    }

    /// What orders of admission look at, of one user.
    #[must_use]
    pub fn user_figures(&self, user: UserKey) -> UserFigures {
        let users = self.users.load();
        users
            .as_deref()
            .map(|users| users.figures(user))
            .unwrap_or_default()
    }

    /// A user's limits and what was used of them; without any bound before users are published.
    #[must_use]
    pub fn quota(&self, user: UserKey) -> Quota {
        let users = self.users.load();
        users
            .as_deref()
            .map(|users| users.quota(user))
            .unwrap_or_default()
    }

    /// Grants that were made and not taken yet, and who waits for one.
    #[must_use]
    pub fn grants(&self) -> Arc<GrantsView> {
        self.grants.load_full()
    }

    pub(super) fn wants_users(&self) -> bool {
        self.wants_users.load(Ordering::Relaxed)
    }

    pub(super) fn publishes_users(&self) -> bool {
        self.users.load().is_some()
    }

    pub(super) fn publish_users(&self, users: UsersView) {
        self.users.store(Some(Arc::new(users)));
    }

    pub(super) fn publish_grants(&self, waiting: &WaitingList) {
        self.grants.store(Arc::new(waiting.view()));
    }

    pub(super) fn wants_all(&self) -> bool {
        self.wants_all.load(Ordering::Relaxed)
    }

    pub(super) fn publishes_lately(&self) -> bool {
        self.lately.load().is_some()
    }

    pub(super) fn publish_lately(&self, lately: Option<RecentUsage>) {
        self.lately.store(lately.map(Arc::new));
    }

    pub(super) fn publish_registry(&self, registry: Registry) {
        self.registry.store(Arc::new(registry));
    }

    pub(super) fn publish_service(&self, service: ServiceView) {
        self.service.store(Arc::new(service));
    }

    pub(super) fn publish_outputs(&self, outputs: OutputsView) {
        self.outputs.store(Arc::new(outputs));
    }

    pub(super) fn publish_time(&self, now_ms: u64) {
        self.now_ms.store(now_ms, Ordering::Relaxed);
    }

    pub(super) fn publish_applied(&self, index: LogIndex) {
        self.applied.store(index.0, Ordering::Release);
    }
}

/// An immutable image of the small part of the state.
#[derive(Debug, Clone, PartialEq)]
pub struct Registry {
    /// Whether `InitCluster` was applied.
    pub initialised: bool,
    /// Seed of user hashes and of the beginnings of chains.
    pub hash_seed: u64,
    /// What blocks are hashed under; `None`: of a cluster founded before there was a secret.
    pub hash_secret: Option<HashSecret>,
    /// The live policy.
    pub policy: PolicyConfig,
    /// What tokens cost.
    pub fairness: FairnessSettings,
    /// By slot, ascending; free slots are absent.
    pub backends: Vec<Backend>,
    /// What routing follows beside the policy; `None` while nobody has set it: the defaults.
    pub routing: Option<RoutingSettings>,
    /// How requests are admitted; `None` while nobody has set it: the defaults.
    pub admission: Option<AdmissionSettings>,
    /// How the ownership of backends is known whose KV events are read, by slot, ascending. Of the
    /// others it is known by leases.
    pub kv: Vec<(BackendRef, KvCondition)>,
    /// Who reads which backend's KV events, by slot, ascending.
    pub readers: Vec<Assignment>,
    /// Where in the log the last restore stands, as far as the audit knows of one: what was told to the
    /// state before has to be told again.
    pub restored: Option<LogIndex>,
}

impl Registry {
    pub(super) fn of(
        config: &ClusterConfig,
        backends: &Backends,
        settings: &LiveSettings,
        (exact, readers): (&FollowedBackends, &Readers),
    ) -> Self {
        let reader = |backend: &Backend| {
            Some(Assignment {
                backend: backend.handle,
                replica: readers.of(backend.handle.slot)?,
            })
        };
        Self {
            initialised: config.initialised,
            hash_seed: config.hash_seed,
            hash_secret: None,
            policy: config.policy.clone(),
            fairness: config.fairness,
            backends: backends.iter().cloned().collect(),
            routing: settings.routing.clone(),
            admission: settings.admission.clone(),
            kv: exact.conditions().collect(),
            readers: backends.iter().filter_map(reader).collect(),
            restored: None,
        }
    }

    /// How the cluster hashes blocks.
    #[must_use]
    pub fn hashing(&self) -> BlockHasher {
        BlockHasher {
            seed: self.hash_seed,
            secret: self.hash_secret.clone(),
        }
    }

    /// How the ownership of what stands in `slot` is known; `None`: by leases, as nobody reads its KV
    /// events.
    #[must_use]
    pub fn kv(&self, slot: Slot) -> Option<KvCondition> {
        let at = self.kv.binary_search_by_key(&slot, |(it, _)| it.slot);
        at.ok().map(|at| self.kv[at].1)
    }

    /// Who reads the KV events of what stands in `slot`.
    #[must_use]
    pub fn reader(&self, slot: Slot) -> Option<ReplicaId> {
        let at = self
            .readers
            .binary_search_by_key(&slot, |it| it.backend.slot);
        at.ok().map(|at| self.readers[at].replica)
    }
}
