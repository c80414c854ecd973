//! What a decision works on: the registry as decisions need it, and the candidates of one of them.

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

use super::RoutingRequest;
use super::endpoints::endpoint_of;
use super::metrics::{BackendMeter, RoutingMetrics};
use super::verdict::{FilterCounts, FilterVerdict};
use crate::backends::Doubt;

/// The registry with what decisions need beside it.
pub(super) struct RoutingTable {
    pub(super) registry: Arc<Registry>,
    /// The live policy.
    live: Arc<PolicyConfig>,
    /// Those of models.
    of_models: BTreeMap<String, Arc<PolicyConfig>>,
    /// By place in `registry.backends`.
    names: Vec<Arc<str>>,
    /// Beside each other, as the registry's entries lie far apart.
    handles: Vec<BackendRef>,
    meters: Vec<Arc<BackendMeter>>,
    /// Where a gateway can send requests for them.
    endpoints: Vec<Option<SocketAddr>>,
    /// Whether any backend computes prompts for others.
    has_prefill: bool,
    /// Blocks of the smallest cache; `None`: none is known.
    smallest_cache: Option<u32>,
    /// Who serves the models that were asked for.
    serving: ArcSwap<BTreeMap<String, Arc<[ServingBackend]>>>,
}

/// Most models of which it is remembered who serves them.
const SERVED_MODELS_MAX: usize = 256;

/// A backend that serves a model, with what the filters ask of each of them: in one row, as the
/// registry's entries lie far apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServingBackend {
    /// Place in the registry.
    pub(super) at: usize,
    pub(super) handle: BackendRef,
    /// Whether its engine lists the model.
    pub(super) is_listed: bool,
    pub(super) is_draining: bool,
    pub(super) role: BackendRole,
}

impl RoutingTable {
    pub(super) fn of(registry: Arc<Registry>, metrics: &RoutingMetrics) -> Self {
        let ids = || {
            registry
                .backends
                .iter()
                .map(|backend| backend.spec.id.as_str())
        };
        let routing = registry.routing.as_ref();
        let models = routing.iter().flat_map(|routing| &routing.models);
        Self {
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

    /// Calls `read` with the backends that serve `model`, by place in the registry.
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
        // What no backend names is not remembered, as clients can ask for anything.
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

    /// Models of which it is remembered who serves them.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> Vec<String> {
        self.serving.load().keys().cloned().collect()
    }

    pub(super) fn meter(&self, backend: BackendRef) -> Option<Arc<BackendMeter>> {
        let at = self.registry.place(backend.slot)?;
        (self.registry.backends[at].handle == backend).then(|| Arc::clone(&self.meters[at]))
    }

    pub(super) fn has_prefill(&self) -> bool {
        self.has_prefill
    }

    /// Blocks of the smallest cache; `None`: none is known.
    pub(super) fn smallest_cache(&self) -> Option<u32> {
        self.smallest_cache
    }

    /// Role of the backend at a place of the registry.
    pub(super) fn role(&self, at: usize) -> BackendRole {
        self.registry.backends[at].spec.role
    }

    /// Where a gateway can send requests for the backend at a place of the registry; `None`: nowhere.
    pub(super) fn endpoint(&self, at: usize) -> Option<SocketAddr> {
        self.endpoints[at]
    }

    pub(super) fn handle(&self, at: usize) -> BackendRef {
        self.handles[at]
    }

    pub(super) fn name(&self, at: usize) -> &Arc<str> {
        &self.names[at]
    }
}

/// The registry's table as of the last look.
pub(super) struct Fleet {
    view: Arc<StateView>,
    metrics: RoutingMetrics,
    table: ArcSwap<RoutingTable>,
    /// Backends of this table and of those before, for what was decided then.
    known: Mutex<KnownNames>,
}

/// Most backends whose name is remembered, present ones included.
const NAMES_MAX: usize = 4096;

/// Names of backends, each with the number of the table that had it last.
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
    pub(super) fn new(view: Arc<StateView>, metrics: RoutingMetrics) -> Self {
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

    /// The table of the registry as it is.
    pub(super) fn table(&self) -> Arc<RoutingTable> {
        let registry = self.view.registry();
        let table = self.table.load();
        if Arc::ptr_eq(&table.registry, &registry) {
            return Arc::clone(&table);
        }
        let table = Arc::new(RoutingTable::of(registry, &self.metrics));
        self.known().add(&table);
        self.table.store(Arc::clone(&table));
        table
    }

    /// The id of a backend that is registered or was lately.
    pub(super) fn name_of(&self, backend: BackendRef) -> Option<Arc<str>> {
        let known = self.known();
        known.names.get(&backend).map(|(_, name)| Arc::clone(name))
    }

    fn known(&self) -> MutexGuard<'_, KnownNames> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The metrics of a backend, whose id is `name`.
    pub(super) fn meter(&self, backend: BackendRef, name: &str) -> Arc<BackendMeter> {
        let known = self.table.load().meter(backend);
        known.unwrap_or_else(|| self.metrics.meter(name))
    }
}

/// The candidates of one decision, by slot ascending, with their place in the registry.
#[derive(Default)]
pub(super) struct DecisionScratch {
    pub(super) candidates: Vec<Candidate>,
    pub(super) places: Vec<usize>,
    /// Who was taken out on the way.
    pub(super) tally: FilterCounts,
    /// Whether all backends with an open circuit were taken out.
    pub(super) are_circuits_kept: bool,
    /// Those with an open circuit, by when it opened.
    pub(super) open: Vec<(u64, Slot)>,
    /// Whether probes are doubted.
    pub(super) is_panic: bool,
    /// To which backends requests go although probes call them unhealthy.
    pub(super) doubt: Doubt,
    /// Whether any candidate tells of its adapters.
    pub(super) has_adapters: bool,
    /// Whether any candidate says that it has the model.
    pub(super) has_listed: bool,
    /// Whether any candidate does nothing alone.
    pub(super) has_rooms: bool,
    /// By place in the registry, where decisions are recorded.
    pub(super) verdicts: Vec<FilterVerdict>,
}

impl DecisionScratch {
    pub(super) fn clear(&mut self) {
        self.candidates.clear();
        self.places.clear();
        self.has_adapters = false;
        self.has_listed = false;
        self.has_rooms = false;
        self.tally = FilterCounts::default();
    }

    /// The candidates at places of the registry that `are` says.
    pub(super) fn those(&self, are: impl Fn(usize) -> bool) -> impl Iterator<Item = Candidate> {
        let found = self.candidates.iter().zip(&self.places);
        let found = found.filter(move |(_, at)| are(**at));
        found.map(|(candidate, _)| *candidate)
    }

    /// The chosen backend's place in the registry.
    pub(super) fn place(&self, choice: Choice) -> usize {
        let found = self
            .candidates
            .binary_search_by_key(&choice.slot, |candidate| candidate.slot);
        self.places[found.expect("a policy chooses among the candidates")]
    }
}

thread_local! {
    /// Keeps its capacity from one decision to the next, so that none allocates.
    pub(super) static SCRATCH: RefCell<DecisionScratch> = RefCell::default();
}

/// Whose request it is, as circuits tell users apart.
pub(super) fn user_of(fleet: &RoutingTable, ask: &RoutingRequest<'_>) -> UserKey {
    ask.user.key(fleet.registry.hash_seed)
}

/// Who named the policy that decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PolicySource {
    /// The request.
    Request,
    /// The replicated settings, for its model.
    Model,
    /// The cluster: the live policy.
    Cluster,
}

/// The policy that decides, and who says so: the request, else the model, else the cluster.
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

/// The blocks of the prompt that an engine can have.
pub(super) fn matchable<'a>(ask: &RoutingRequest<'a>) -> &'a [BlockHash] {
    let chain = &ask.identity.chain;
    &chain[..chain.len().min(ask.identity.matchable as usize)]
}
