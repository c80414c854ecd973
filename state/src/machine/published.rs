//! [`StateView`]: the part of the state that the hot path reads, from any thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption, Guard};

use super::ClusterConfig;
use super::settings::OperatorSettings;
use crate::admission::UserFigures;
use crate::backends::{Backend, Backends, BlockSizes, RankSlots};
use crate::capacity::CapacityView;
use crate::command::UserDefaults;
use crate::discovery::{DiscoveredBackend, KnownFleet};
use crate::ids::{BackendRef, LogIndex, ModelKey, ReplicaId, Slot, UserKey};
use crate::keys::KeysView;
use crate::kv_events::{EvictionsView, FollowedBackends, KvCondition, LOWER_TIERS};
use crate::outputs::OutputsView;
use crate::policy::{PolicyConfig, RoutingSettings, UserTokens};
use crate::prefix::{BlockHasher, HashSecret};
use crate::pricing::FairnessSettings;
use crate::quotas::Quota;
use crate::ratios::{RatiosView, TokenRatio};
use crate::reader_assignment::{Assignment, Readers};
use crate::service::ServiceView;
use crate::settings::AdmissionSettings;
use crate::streams::StreamsView;
use crate::trees::TreesView;
use crate::usage::UsageView;
use crate::users::{RecentUsage, UsersView};
use crate::view::BlockView;

/// The part of the state that the hot path reads, from any thread and without waiting for `apply`.
pub struct StateView {
    /// Block ownership of all backends.
    pub blocks: BlockView,
    /// For each tier below the GPU, the blocks that engines hold on it or on a faster one. Empty for
    /// backends whose engines report no such tier.
    pub tiers: [BlockView; LOWER_TIERS],
    registry: ArcSwap<Registry>,
    applied: AtomicU64,
    now_ms: AtomicU64,
    /// Recent usage of the users; `None` while no policy reads it.
    recent_usage: ArcSwapOption<RecentUsage>,
    /// Whether to publish what any policy reads, instead of only what the live one reads.
    wants_all: AtomicBool,
    service: ArcSwap<ServiceView>,
    outputs: ArcSwap<OutputsView>,
    ratios: ArcSwap<RatiosView>,
    capacity: ArcSwap<CapacityView>,
    users: ArcSwap<UsersView>,
    keys: ArcSwap<KeysView>,
    evictions: ArcSwap<EvictionsView>,
    trees: ArcSwap<TreesView>,
    streams: ArcSwap<StreamsView>,
    usage: ArcSwap<UsageView>,
}

impl StateView {
    pub(super) fn new(
        (blocks, tiers): (BlockView, [BlockView; LOWER_TIERS]),
        users: UsersView,
        registry: Registry,
    ) -> Self {
        Self {
            blocks,
            tiers,
            registry: ArcSwap::from_pointee(registry),
            applied: AtomicU64::new(0),
            now_ms: AtomicU64::new(0),
            recent_usage: ArcSwapOption::empty(),
            wants_all: AtomicBool::new(false),
            service: ArcSwap::default(),
            outputs: ArcSwap::default(),
            ratios: ArcSwap::default(),
            capacity: ArcSwap::default(),
            users: ArcSwap::from_pointee(users),
            keys: ArcSwap::default(),
            evictions: ArcSwap::default(),
            trees: ArcSwap::default(),
            streams: ArcSwap::default(),
            usage: ArcSwap::default(),
        }
    }

    /// Returns the backends and the replicated config, as of their last change.
    #[must_use]
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    /// Whether the streams of the backend in `slot` are to go on elsewhere, because it drains. As
    /// cheap as a load, because every stream asks for every event.
    #[must_use]
    pub fn moves_streams(&self, slot: Slot) -> bool {
        let registry = self.registry.load();
        registry.backend(slot).is_some_and(|it| it.moves_streams)
    }

    /// Returns the measurements and derived limits of the backends, as of their last change. Cheap;
    /// use the guard for one decision and do not keep it.
    #[must_use]
    pub fn service(&self) -> Guard<Arc<ServiceView>> {
        self.service.load()
    }

    /// Returns the maximum number of concurrent requests of the backend in `slot`; `None` if it is
    /// unlimited.
    #[must_use]
    pub fn limit(&self, slot: Slot) -> Option<u32> {
        self.service.load().limit(slot)
    }

    /// Returns output lengths, predictions and bins, as of their last change. Cheap; use the guard
    /// for one decision and do not keep it.
    #[must_use]
    pub fn outputs(&self) -> Guard<Arc<OutputsView>> {
        self.outputs.load()
    }

    /// Returns the bytes per token of the prompts of `model`, as of their last change.
    #[must_use]
    pub fn ratio(&self, model: ModelKey) -> TokenRatio {
        self.ratios.load().of(model)
    }

    /// Returns the learned bytes per token of all models, as of their last change.
    #[must_use]
    pub fn ratios(&self) -> Guard<Arc<RatiosView>> {
        self.ratios.load()
    }

    /// Returns the demand for all models and the engines wanted, as of their last change.
    #[must_use]
    pub fn capacity(&self) -> Guard<Arc<CapacityView>> {
        self.capacity.load()
    }

    /// Returns the applied index. The caller then sees every published change up to that index.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        // This load pairs with the Release in `publish_applied`.
        LogIndex(self.applied.load(Ordering::Acquire))
    }

    /// Returns replicated time as of the applied index, see
    /// [`RouterState::now_ms`](super::RouterState::now_ms).
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        // The time is an independent number that orders no other access.
        self.now_ms.load(Ordering::Relaxed)
    }

    /// Returns the API keys, as of the last command that changed one. Cheap; use the guard for one
    /// request and do not keep it.
    #[must_use]
    pub fn keys(&self) -> Guard<Arc<KeysView>> {
        self.keys.load()
    }

    /// Returns the coming evictions of engines whose KV events are followed, as of the applied
    /// index. Cheap; use the guard for one decision and do not keep it.
    #[must_use]
    pub fn evictions(&self) -> Guard<Arc<EvictionsView>> {
        self.evictions.load()
    }

    /// Returns the sessions of agents and their trees, as of the applied index. Cheap; use the guard
    /// for one request and do not keep it.
    #[must_use]
    pub fn trees(&self) -> Guard<Arc<TreesView>> {
        self.trees.load()
    }

    /// Returns the resumable streams, as of the applied index. Cheap; use the guard for one event and
    /// do not keep it.
    #[must_use]
    pub fn streams(&self) -> Guard<Arc<StreamsView>> {
        self.streams.load()
    }

    /// Returns the usage by day, user, API key and model, as of the applied index.
    #[must_use]
    pub fn usage(&self) -> Guard<Arc<UsageView>> {
        self.usage.load()
    }

    /// Returns the usage of `user` within the window; zero while no policy reads it.
    #[must_use]
    pub fn user_tokens(&self, user: UserKey) -> UserTokens {
        let recent_usage = self.recent_usage.load();
        recent_usage
            .as_deref()
            .map(|recent_usage| recent_usage.tokens(user))
            .unwrap_or_default()
    }

    /// Makes every later command publish what any policy reads, because requests may select a
    /// policy other than the live one.
    pub fn want_all(&self) {
        self.wants_all.store(true, Ordering::Relaxed);
    }

    /// Returns all users, as of the last command that changed one. Do not keep the reference: it
    /// keeps replaced parts of the table in memory.
    #[must_use]
    pub fn users(&self) -> Arc<UsersView> {
        self.users.load_full()
    }

    /// Returns the figures of `user` for the queue orders; the default ones if unknown.
    #[must_use]
    pub fn user_figures(&self, user: UserKey) -> UserFigures {
        self.users.load().figures(user)
    }

    /// Returns limits and budget of `user`, and their usage.
    #[must_use]
    pub fn quota(&self, user: UserKey) -> Quota {
        self.users.load().quota(user)
    }

    pub(super) fn publish_users(&self, users: UsersView) {
        self.users.store(Arc::new(users));
    }

    pub(super) fn wants_all(&self) -> bool {
        self.wants_all.load(Ordering::Relaxed)
    }

    pub(super) fn publishes_recent_usage(&self) -> bool {
        self.recent_usage.load().is_some()
    }

    pub(super) fn publish_recent_usage(&self, recent_usage: Option<RecentUsage>) {
        self.recent_usage.store(recent_usage.map(Arc::new));
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

    pub(super) fn publish_trees(&self, trees: TreesView) {
        self.trees.store(Arc::new(trees));
    }

    pub(super) fn publish_streams(&self, streams: StreamsView) {
        self.streams.store(Arc::new(streams));
    }

    pub(super) fn publish_usage(&self, usage: UsageView) {
        self.usage.store(Arc::new(usage));
    }

    pub(super) fn publish_ratios(&self, ratios: RatiosView) {
        self.ratios.store(Arc::new(ratios));
    }

    pub(super) fn publish_capacity(&self, capacity: CapacityView) {
        self.capacity.store(Arc::new(capacity));
    }

    pub(super) fn publish_evictions(&self, evictions: EvictionsView) {
        self.evictions.store(Arc::new(evictions));
    }

    pub(super) fn publish_keys(&self, keys: KeysView) {
        self.keys.store(Arc::new(keys));
    }

    pub(super) fn publish_time(&self, now_ms: u64) {
        self.now_ms.store(now_ms, Ordering::Relaxed);
    }

    pub(super) fn publish_applied(&self, index: LogIndex) {
        self.applied.store(index.0, Ordering::Release);
    }
}

/// Immutable image of the rarely changing parts of the state.
#[derive(Debug, Clone, PartialEq)]
pub struct Registry {
    /// Whether the cluster is initialised.
    pub initialised: bool,
    /// Seed of the user hashes and of the first link of each chain.
    pub hash_seed: u64,
    /// Secret under which blocks are hashed.
    pub hash_secret: HashSecret,
    /// Live routing policy.
    pub policy: PolicyConfig,
    /// Token prices of the cluster.
    pub fairness: FairnessSettings,
    /// All backends, in ascending order of slots.
    pub backends: Vec<Backend>,
    /// Slots of the ranks of each engine with several ranks.
    pub ranks: RankSlots,
    /// Sources and losses of the backends that sources registered, by slot.
    pub discovered: BTreeMap<Slot, DiscoveredBackend>,
    /// Routing settings other than the policy.
    pub routing: RoutingSettings,
    /// Admission settings.
    pub admission: AdmissionSettings,
    /// Source and condition of the ownership of backends whose KV events are followed, in ascending
    /// order of slots. The ownership of other backends follows from leases.
    pub kv: Vec<(BackendRef, KvCondition)>,
    /// Readers of KV events, in ascending order of slots.
    pub readers: Vec<Assignment>,
    /// Log index of the last restore or deletion of a user that the audit still has; `None` if it
    /// has neither. Users that were defined before it must be defined again.
    pub names_since: Option<LogIndex>,
    /// Block sizes of engines and models, in tokens.
    pub block_sizes: BlockSizes,
    /// Defaults that apply to users without their own settings.
    pub user_defaults: UserDefaults,
}

impl Registry {
    pub(super) fn of(
        config: &ClusterConfig,
        backends: &Backends,
        settings: &OperatorSettings,
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
            hash_secret: config.hash_secret.clone(),
            policy: config.policy.clone(),
            fairness: config.fairness,
            backends: backends.iter().cloned().collect(),
            ranks: backends.ranks().clone(),
            discovered: BTreeMap::new(),
            routing: settings.routing.clone(),
            admission: settings.admission.clone(),
            kv: exact.conditions().collect(),
            readers: backends.iter().filter_map(reader).collect(),
            names_since: None,
            block_sizes: BlockSizes::default(),
            user_defaults: UserDefaults::default(),
        }
    }

    /// Whether a backend [names](Backend::named_models) `model`.
    #[must_use]
    pub fn names_model(&self, model: &str) -> bool {
        let mut named = self.backends.iter().flat_map(Backend::named_models);
        named.any(|named| named == model)
    }

    /// Returns the backends in the form that a [`SourcePlan`](crate::discovery::SourcePlan) reads.
    #[must_use]
    pub fn fleet(&self) -> KnownFleet<'_> {
        KnownFleet {
            backends: &self.backends,
            discovered: &self.discovered,
        }
    }

    /// Whether any backend serves `model`.
    #[must_use]
    pub fn is_served(&self, model: &str) -> bool {
        self.backends.iter().any(|backend| backend.serves(model))
    }

    /// Returns the hasher with the seed and secret for block hashes.
    #[must_use]
    pub fn hashing(&self) -> BlockHasher {
        BlockHasher {
            seed: self.hash_seed,
            secret: self.hash_secret.clone(),
        }
    }

    /// Returns the index in `backends` of the backend in `slot`, if any.
    #[must_use]
    pub fn place(&self, slot: Slot) -> Option<usize> {
        let at = self
            .backends
            .binary_search_by_key(&slot, |it| it.handle.slot);
        at.ok()
    }

    /// Returns the backend in `slot`, if any.
    #[must_use]
    pub fn backend(&self, slot: Slot) -> Option<&Backend> {
        self.place(slot).map(|at| &self.backends[at])
    }

    /// Returns the number of the rank that `backend` represents; `None` if its engine has only one.
    #[must_use]
    pub fn rank(&self, backend: &Backend) -> Option<u16> {
        let is_first = || !self.ranks.of(backend.handle.slot).is_empty();
        backend.further_rank().or_else(|| is_first().then_some(0))
    }

    /// Returns the source and condition of the ownership of the backend in `slot`. `None` if its KV
    /// events are not followed, so that its ownership follows from leases.
    #[must_use]
    pub fn kv(&self, slot: Slot) -> Option<KvCondition> {
        let at = self.kv.binary_search_by_key(&slot, |(it, _)| it.slot);
        at.ok().map(|at| self.kv[at].1)
    }

    /// Returns the reader of the KV events of the backend in `slot`, if any.
    #[must_use]
    pub fn reader(&self, slot: Slot) -> Option<ReplicaId> {
        let at = self
            .readers
            .binary_search_by_key(&slot, |it| it.backend.slot);
        at.ok().map(|at| self.readers[at].replica)
    }
}
