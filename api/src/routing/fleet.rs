//! What a decision works on: the registry as decisions need it, and the candidates of one of them.

use std::cell::RefCell;
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde::Serialize;
use state::ids::{BackendRef, BlockHash, Slot, UserKey};
use state::policy::{Candidate, Choice, PolicyConfig};
use state::{Registry, StateView};

use super::RoutingRequest;
use super::metrics::{BackendMeter, RoutingMetrics};
use super::verdict::FilterCounts;

/// The registry with what decisions need beside it.
pub(super) struct RoutingTable {
    pub(super) registry: Arc<Registry>,
    /// By place in `registry.backends`.
    names: Vec<Arc<str>>,
    meters: Vec<Arc<BackendMeter>>,
}

impl RoutingTable {
    pub(super) fn of(registry: Arc<Registry>, metrics: &RoutingMetrics) -> Self {
        let ids = || {
            registry
                .backends
                .iter()
                .map(|backend| backend.spec.id.as_str())
        };
        Self {
            names: ids().map(Arc::from).collect(),
            meters: ids().map(|id| metrics.meter(id)).collect(),
            registry,
        }
    }

    pub(super) fn meter(&self, backend: BackendRef) -> Option<Arc<BackendMeter>> {
        let at = self.registry.place(backend.slot)?;
        (self.registry.backends[at].handle == backend).then(|| Arc::clone(&self.meters[at]))
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
}

impl Fleet {
    pub(super) fn new(view: Arc<StateView>, metrics: RoutingMetrics) -> Self {
        let table = RoutingTable::of(view.registry(), &metrics);
        Self {
            view,
            metrics,
            table: ArcSwap::from_pointee(table),
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
        self.table.store(Arc::clone(&table));
        table
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
}

impl DecisionScratch {
    pub(super) fn clear(&mut self) {
        self.candidates.clear();
        self.places.clear();
        self.tally = FilterCounts::default();
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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
) -> (&'a PolicyConfig, PolicySource) {
    let live = &fleet.registry.policy;
    let models = fleet.registry.routing.as_ref().map(|it| &it.models);
    match (ask.policy, models.and_then(|models| models.get(ask.model))) {
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
