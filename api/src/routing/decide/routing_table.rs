//! Working data of decisions: the registry with derived data, and the candidates of one decision.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use schemars::JsonSchema;
use serde::Serialize;
use state::command::BackendRole;
use state::ids::{BackendRef, BlockHash, Slot, UserKey};
use state::policy::{Candidate, Choice, PolicyConfig};
use state::{Backend, Registry, StateView};

use super::endpoints::endpoint_of;
use crate::engines::backends::Doubt;
use crate::planted::{self, Bug};
use crate::routing::RoutingRequest;
use crate::routing::metrics::{BackendMeter, RoutingMetrics};
use crate::routing::verdict::{FilterCounts, FilterVerdict};

/// The registry with data derived from it for decisions. Vectors are in registry order.
pub(in crate::routing) struct RoutingTable {
    pub(in crate::routing) registry: Arc<Registry>,
    /// The live policy.
    live: Arc<PolicyConfig>,
    /// Policies that replace the live one, by model.
    of_models: BTreeMap<String, Arc<PolicyConfig>>,
    /// Ids of the backends, by registry index.
    names: Vec<Arc<str>>,
    /// References to the backends by registry index, in contiguous memory because the registry's
    /// entries lie far apart.
    handles: Vec<BackendRef>,
    meters: Vec<Arc<BackendMeter>>,
    /// Endpoint of each backend to which a gateway can send requests; `None` if it has none.
    endpoints: Vec<Option<SocketAddr>>,
    /// Tokens at the end of each hit that the engine computes again, by registry index; empty if
    /// none does.
    dropped_tokens: Vec<u32>,
    /// Whether any backend computes prompts for others.
    has_prefill: bool,
    /// Capacity of the smallest known cache, in blocks; `None` if none is known.
    smallest_cache: Option<u32>,
    /// Cache of the backends that serve a model, by model.
    serving: ArcSwap<BTreeMap<String, Arc<[ServingBackend]>>>,
}

/// Maximum number of models in `serving`.
const SERVED_MODELS_MAX: usize = 256;

/// A backend that serves a model. Holds the inputs of the filters in contiguous memory, because the
/// registry's entries lie far apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServingBackend {
    /// Index in the registry.
    pub(in crate::routing) at: usize,
    pub(in crate::routing) handle: BackendRef,
    /// Whether its engine lists the model.
    pub(super) is_listed: bool,
    pub(super) is_draining: bool,
    pub(in crate::routing) role: BackendRole,
}

impl RoutingTable {
    pub(in crate::routing) fn of(registry: Arc<Registry>, metrics: &RoutingMetrics) -> Self {
        let ids = || {
            registry
                .backends
                .iter()
                .map(|backend| backend.spec.id.as_str())
        };
        let models = registry.routing.models.iter();
        let drops = |backend: &Backend| backend.facts.drops_last_block == Some(true);
        let dropped = |backend: &Backend| {
            let size = registry.block_sizes.of_engine(backend.handle.slot);
            size.filter(|_| drops(backend)).unwrap_or(0)
        };
        Self {
            dropped_tokens: match registry.backends.iter().any(drops) {
                true => registry.backends.iter().map(dropped).collect(),
                false => Vec::new(),
            },
            live: Arc::new(registry.policy.clone()),
            of_models: models
                .map(|(model, policy)| (model.clone(), Arc::new(policy.clone())))
                .collect(),
            has_prefill: (registry.backends.iter())
                .any(|backend| backend.spec.role == BackendRole::Prefill),
            smallest_cache: (registry.backends.iter())
                .filter_map(Backend::capacity_blocks)
                .min(),
            names: ids().map(Arc::from).collect(),
            handles: (registry.backends.iter())
                .map(|backend| backend.handle)
                .collect(),
            endpoints: (registry.backends.iter())
                .map(|backend| endpoint_of(&backend.spec.url))
                .collect(),
            meters: ids().map(|id| metrics.meter(id)).collect(),
            serving: ArcSwap::default(),
            registry,
        }
    }

    /// Subtracts the blocks that the engine at `at` computes again from the blocks of the prompt
    /// that it holds.
    pub(super) fn leave_out_dropped(&self, at: usize, ask: &RoutingRequest<'_>, matched: &mut u32) {
        let dropped = self.dropped_tokens.get(at).copied().unwrap_or(0);
        let tail = &ask.identity.tail;
        let per_block = tail.tokens_per_block.max(1);
        let blocks = match tail.block_bytes {
            0 if dropped.is_multiple_of(per_block) => dropped / per_block,
            // A part of a block shortens only some hits by a whole one.
            0 => 0,
            _ => dropped.saturating_add(per_block / 2) / per_block,
        };
        *matched = matched.saturating_sub(blocks);
    }

    /// Calls `read` with the backends that serve `model`, in registry order.
    pub(super) fn with_serving<R>(
        &self,
        model: &str,
        read: impl FnOnce(&[ServingBackend]) -> R,
    ) -> R {
        let known = self.serving.load();
        if let Some(serving) = known.get(model) {
            return read(serving);
        }
        let serving = self.find_serving(model);
        // Models that no backend names are not cached, because clients can send any name.
        if self.registry.names_model(model) && known.len() < SERVED_MODELS_MAX {
            self.serving.rcu(|known| {
                let mut known = BTreeMap::clone(known);
                known.insert(model.to_owned(), Arc::from(&*serving));
                known
            });
        }
        read(&serving)
    }

    fn find_serving(&self, model: &str) -> Vec<ServingBackend> {
        let backends = self.registry.backends.iter().enumerate();
        let serving = backends.filter(|(_, backend)| backend.serves(model));
        let serving = serving.map(|(at, backend)| ServingBackend {
            at,
            handle: backend.handle,
            is_listed: backend.lists(model),
            is_draining: backend.draining,
            role: backend.spec.role,
        });
        serving.collect()
    }

    /// Returns the models whose serving backends are cached.
    #[cfg(test)]
    pub(in crate::routing) fn remembered(&self) -> Vec<String> {
        self.serving.load().keys().cloned().collect()
    }

    pub(in crate::routing) fn meter(&self, backend: BackendRef) -> Option<Arc<BackendMeter>> {
        let at = self.registry.place(backend.slot)?;
        (self.registry.backends[at].handle == backend).then(|| Arc::clone(&self.meters[at]))
    }

    pub(super) fn has_prefill(&self) -> bool {
        self.has_prefill
    }

    /// Returns the capacity of the smallest known cache, in blocks; `None` if none is known.
    pub(super) fn smallest_cache(&self) -> Option<u32> {
        self.smallest_cache
    }

    /// Returns the role of the backend at registry index `at`.
    pub(in crate::routing) fn role(&self, at: usize) -> BackendRole {
        self.registry.backends[at].spec.role
    }

    /// Returns the endpoint of the backend at registry index `at`; `None` if it has none.
    pub(in crate::routing) fn endpoint(&self, at: usize) -> Option<SocketAddr> {
        self.endpoints[at]
    }

    pub(in crate::routing) fn handle(&self, at: usize) -> BackendRef {
        self.handles[at]
    }

    pub(in crate::routing) fn name(&self, at: usize) -> &Arc<str> {
        &self.names[at]
    }
}

/// Caches the [`RoutingTable`] of the current registry.
pub(in crate::routing) struct Fleet {
    view: Arc<StateView>,
    metrics: RoutingMetrics,
    table: ArcSwap<RoutingTable>,
    /// Ids of current and earlier backends, so that past decisions can be shown.
    known: Mutex<KnownNames>,
}

/// Maximum number of backend ids kept, including those of current backends.
const NAMES_MAX: usize = 4096;

/// Ids of backends, each with the number of the last table that contained it.
#[derive(Default)]
struct KnownNames {
    tables: u64,
    names: BTreeMap<BackendRef, (u64, Arc<str>)>,
}

impl KnownNames {
    fn add(&mut self, table: &RoutingTable) {
        self.tables += 1;
        for (backend, name) in table.registry.backends.iter().zip(&table.names) {
            let last = (self.tables, Arc::clone(name));
            self.names.insert(backend.handle, last);
        }
        while self.names.len() > NAMES_MAX {
            let oldest = self.names.iter().min_by_key(|(_, (seen, _))| *seen);
            let Some(oldest) = oldest.map(|(handle, _)| *handle) else {
                return;
            };
            self.names.remove(&oldest);
        }
    }
}

impl Fleet {
    pub(in crate::routing) fn new(view: Arc<StateView>, metrics: RoutingMetrics) -> Self {
        let table = RoutingTable::of(view.registry(), &metrics);
        let mut known = KnownNames::default();
        known.add(&table);
        Self {
            view,
            metrics,
            table: ArcSwap::from_pointee(table),
            known: Mutex::new(known),
        }
    }

    /// Returns the table of the current registry, which is built if the registry has changed.
    pub(in crate::routing) fn table(&self) -> Arc<RoutingTable> {
        let registry = self.view.registry();
        let table = self.table.load();
        if Arc::ptr_eq(&table.registry, &registry) {
            return Arc::clone(&table);
        }
        if planted::is(Bug::SettingsNoticedLate) && table.registry.backends == registry.backends {
            return Arc::clone(&table);
        }
        let table = Arc::new(RoutingTable::of(registry, &self.metrics));
        self.known().add(&table);
        self.table.store(Arc::clone(&table));
        table
    }

    /// Returns the id of a backend that is registered or was until recently.
    pub(super) fn name_of(&self, backend: BackendRef) -> Option<Arc<str>> {
        // A replica that has not decided anything yet does not know the registered names.
        drop(self.table());
        let known = self.known();
        known.names.get(&backend).map(|(_, name)| Arc::clone(name))
    }

    fn known(&self) -> MutexGuard<'_, KnownNames> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the metrics of `backend`, whose id is `name`.
    pub(in crate::routing) fn meter(&self, backend: BackendRef, name: &str) -> Arc<BackendMeter> {
        let known = self.table.load().meter(backend);
        known.unwrap_or_else(|| self.metrics.meter(name))
    }
}

/// Working data of one decision: the candidates in ascending slot order, with their registry
/// indexes in `places`, and what the filters found.
#[derive(Default)]
pub(in crate::routing) struct DecisionScratch {
    pub(in crate::routing) candidates: Vec<Candidate>,
    pub(in crate::routing) places: Vec<usize>,
    /// Number of backends excluded by each filter.
    pub(in crate::routing) tally: FilterCounts,
    /// Whether all backends with an open circuit were excluded.
    pub(super) are_circuits_kept: bool,
    /// Backends with an open circuit: the time at which it opened, and the slot.
    pub(in crate::routing) open: Vec<(u64, Slot)>,
    /// Whether panic mode is on.
    pub(in crate::routing) is_panic: bool,
    /// Which backends receive requests although probes report them as unhealthy.
    pub(in crate::routing) doubt: Doubt,
    /// Whether any candidate reports its adapters.
    pub(super) has_adapters: bool,
    /// Whether any candidate's engine lists the model.
    pub(super) has_listed: bool,
    /// Whether any candidate needs another engine to serve the request.
    pub(super) has_rooms: bool,
    /// Verdict on each backend, by registry index; empty unless decisions are recorded.
    pub(in crate::routing) verdicts: Vec<FilterVerdict>,
}

impl DecisionScratch {
    pub(in crate::routing) fn clear(&mut self) {
        self.candidates.clear();
        self.places.clear();
        self.has_adapters = false;
        self.has_listed = false;
        self.has_rooms = false;
        self.tally = FilterCounts::default();
    }

    /// Returns the candidates whose registry index satisfies `are`.
    pub(super) fn candidates_where(
        &self,
        are: impl Fn(usize) -> bool,
    ) -> impl Iterator<Item = Candidate> {
        let found = self.candidates.iter().zip(&self.places);
        let found = found.filter(move |(_, at)| are(**at));
        found.map(|(candidate, _)| *candidate)
    }

    /// Returns the registry index of the backend that `choice` names.
    ///
    /// # Panics
    /// Panics if it is not among the candidates.
    pub(super) fn registry_index(&self, choice: Choice) -> usize {
        let found = self
            .candidates
            .binary_search_by_key(&choice.slot, |candidate| candidate.slot);
        self.places[found.expect("a policy chooses among the candidates")]
    }
}

thread_local! {
    /// Working data of this thread's decisions, kept between them to avoid allocations.
    pub(super) static SCRATCH: RefCell<DecisionScratch> = RefCell::default();
}

/// Returns the key of the request's user, by which circuit breakers distinguish users.
pub(super) fn user_of(fleet: &RoutingTable, ask: &RoutingRequest<'_>) -> UserKey {
    ask.user.key(fleet.registry.hash_seed)
}

/// What selected the policy that decides.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum PolicySource {
    /// A header of the request.
    Request,
    /// The replicated settings of its model.
    Model,
    /// The cluster's live policy.
    Cluster,
}

/// Returns the policy to use and its source: the request's, else the model's, else the cluster's.
pub(super) fn policy_of<'a>(
    fleet: &'a RoutingTable,
    ask: &RoutingRequest<'a>,
) -> (&'a Arc<PolicyConfig>, PolicySource) {
    let live = &fleet.live;
    match (ask.policy, fleet.of_models.get(ask.model)) {
        (Some(asked), _) if asked.name() == live.name() => (live, PolicySource::Request),
        (Some(asked), _) => (asked, PolicySource::Request),
        (None, Some(of_model)) => (of_model, PolicySource::Model),
        (None, None) => (live, PolicySource::Cluster),
    }
}

/// Returns the leading blocks of the prompt that an engine can have cached.
pub(in crate::routing) fn matchable<'a>(ask: &RoutingRequest<'a>) -> &'a [BlockHash] {
    let chain = &ask.identity.chain;
    &chain[..chain.len().min(ask.identity.matchable as usize)]
}
