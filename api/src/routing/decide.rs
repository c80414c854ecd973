//! The decision: filter, match, weigh, choose. The hot path of the whole product.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use state::ids::{BackendRef, BlockHash, Slot};
use state::policy::{self, Candidate, Choice, Request};
use state::{Backend, Registry};
use xxhash_rust::xxh3::xxh3_64;

use super::metrics::{Meter, RoutingMetrics};
use super::{Ask, Decision, NoBackend, Router, Verdict};
use crate::backends::Glance;

/// The registry with what decisions need beside it.
pub(super) struct Fleet {
    pub(super) registry: Arc<Registry>,
    /// By place in `registry.backends`.
    names: Vec<Arc<str>>,
    meters: Vec<Arc<Meter>>,
}

impl Fleet {
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

    pub(super) fn meter(&self, backend: BackendRef) -> Option<Arc<Meter>> {
        let at = self.place(backend.slot)?;
        (self.registry.backends[at].handle == backend).then(|| Arc::clone(&self.meters[at]))
    }

    pub(super) fn name(&self, at: usize) -> &Arc<str> {
        &self.names[at]
    }

    fn place(&self, slot: Slot) -> Option<usize> {
        self.registry
            .backends
            .binary_search_by_key(&slot, |backend| backend.handle.slot)
            .ok()
    }
}

/// The candidates of one decision, by slot ascending, with their place in the registry.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) candidates: Vec<Candidate>,
    pub(super) places: Vec<usize>,
}

impl Scratch {
    fn handle(&self, fleet: &Fleet, i: usize) -> BackendRef {
        fleet.registry.backends[self.places[i]].handle
    }
}

thread_local! {
    /// Keeps its capacity from one decision to the next, so that none allocates.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Router {
    /// Chooses a backend. Local memory only; waits for nothing.
    ///
    /// # Errors
    /// [`NoBackend`].
    pub fn decide(&self, ask: &Ask<'_>) -> Result<Decision, NoBackend> {
        let fleet = self.fleet();
        let index = self.view.applied();
        let config = &fleet.registry.policy;
        let decided = SCRATCH.with_borrow_mut(|scratch| {
            self.admit(&fleet, ask, scratch, |_, _, _| {})?;
            self.match_applied(matchable(ask), scratch);
            self.match_overlay(&fleet, matchable(ask), scratch);
            self.weigh(&fleet, Instant::now(), scratch);
            let choice = policy::choose(config, &request(ask), &scratch.candidates);
            let choice = choice.ok_or(NoBackend::NoneHealthy)?;
            Ok((choice, scratch.place(choice)))
        });
        self.metrics.decided(config.name(), decided.err());
        let (choice, at) = decided?;
        Ok(Decision {
            backend: fleet.registry.backends[at].handle,
            name: Arc::clone(fleet.name(at)),
            matched: choice.matched,
            total: u32::try_from(ask.identity.chain.len()).unwrap_or(u32::MAX),
            reason: choice.reason,
            policy: config.name(),
            index,
        })
    }

    /// The fleet as the registry has it.
    pub(super) fn fleet(&self) -> Arc<Fleet> {
        let registry = self.view.registry();
        let fleet = self.fleet.load();
        if Arc::ptr_eq(&fleet.registry, &registry) {
            return Arc::clone(&fleet);
        }
        let fleet = Arc::new(Fleet::of(registry, &self.metrics));
        self.fleet.store(Arc::clone(&fleet));
        fleet
    }

    /// Fills `scratch` with the backends that may take the request; `seen` hears of all of them.
    pub(super) fn admit(
        &self,
        fleet: &Fleet,
        ask: &Ask<'_>,
        scratch: &mut Scratch,
        mut seen: impl FnMut(&Backend, Verdict, Option<Glance>),
    ) -> Result<(), NoBackend> {
        scratch.candidates.clear();
        scratch.places.clear();
        let mut refusal = NoBackend::UnknownModel;
        for (at, backend) in fleet.registry.backends.iter().enumerate() {
            let slot = backend.handle.slot;
            let glance = self.backends.glance(slot);
            let verdict = verdict(backend, glance, ask);
            match (verdict, glance) {
                (Verdict::Candidate, Some(glance)) => {
                    scratch.places.push(at);
                    scratch.candidates.push(Candidate {
                        slot,
                        waiting: glance.waiting,
                        kv_usage_permille: glance.kv_usage_permille,
                        owned_blocks: self.view.blocks.owned(slot),
                        capacity_blocks: backend.capacity_blocks(),
                        ..Candidate::default()
                    });
                }
                (Verdict::OtherModel, _) => {}
                (Verdict::Tried, _) => refusal = NoBackend::AllTried,
                (Verdict::Candidate | Verdict::Draining | Verdict::Unhealthy, _) => {
                    if refusal == NoBackend::UnknownModel {
                        refusal = NoBackend::NoneHealthy;
                    }
                }
            }
            seen(backend, verdict, glance);
        }
        if scratch.candidates.is_empty() {
            Err(refusal)
        } else {
            Ok(())
        }
    }

    /// Matches the prompt against what the log says.
    pub(super) fn match_applied(&self, chain: &[BlockHash], scratch: &mut Scratch) {
        let mut candidates = scratch.candidates.iter_mut().peekable();
        self.view.blocks.match_prefix(chain, |slot, blocks| {
            while candidates
                .next_if(|candidate| candidate.slot < slot)
                .is_some()
            {}
            if let Some(candidate) = candidates.next_if(|candidate| candidate.slot == slot) {
                candidate.matched = blocks;
            }
        });
    }

    /// Goes on with what this replica has routed and the log does not say yet.
    pub(super) fn match_overlay(&self, fleet: &Fleet, chain: &[BlockHash], scratch: &mut Scratch) {
        let handles = scratch
            .places
            .iter()
            .map(|&at| fleet.registry.backends[at].handle);
        let matches = scratch
            .candidates
            .iter_mut()
            .map(|candidate| &mut candidate.matched);
        self.overlay.extend(chain, handles.zip(matches));
    }

    /// Adds the load of this replica and its peers.
    pub(super) fn weigh(&self, fleet: &Fleet, now: Instant, scratch: &mut Scratch) {
        let mut candidates = std::mem::take(&mut scratch.candidates);
        self.load.add_each(
            now,
            candidates.len(),
            |i| scratch.handle(fleet, i),
            |i, load| {
                let candidate = &mut candidates[i];
                candidate.running = candidate.running.saturating_add(load.running);
                candidate.pending_prefill_tokens = candidate
                    .pending_prefill_tokens
                    .saturating_add(load.pending_prefill_tokens);
            },
        );
        scratch.candidates = candidates;
    }
}

impl Scratch {
    /// The chosen backend's place in the registry.
    pub(super) fn place(&self, choice: Choice) -> usize {
        let found = self
            .candidates
            .binary_search_by_key(&choice.slot, |candidate| candidate.slot);
        self.places[found.expect("a policy chooses among the candidates")]
    }
}

/// The blocks of the prompt that an engine can have.
pub(super) fn matchable<'a>(ask: &Ask<'a>) -> &'a [BlockHash] {
    let chain = &ask.identity.chain;
    &chain[..chain.len().min(ask.identity.matchable as usize)]
}

/// The request as a policy sees it.
pub(super) fn request(ask: &Ask<'_>) -> Request {
    Request {
        jitter: xxh3_64(ask.request_id.as_bytes()),
        blocks: u32::try_from(matchable(ask).len()).unwrap_or(u32::MAX),
        tokens: ask.identity.tokens,
        tokens_per_block: ask.identity.tail.tokens_per_block,
    }
}

fn verdict(backend: &Backend, glance: Option<Glance>, ask: &Ask<'_>) -> Verdict {
    if !serves(backend, ask.model) {
        Verdict::OtherModel
    } else if ask.excluded.contains(&backend.handle.slot) {
        Verdict::Tried
    } else if backend.draining {
        Verdict::Draining
    } else if glance.is_some_and(|glance| glance.is_healthy) {
        Verdict::Candidate
    } else {
        Verdict::Unhealthy
    }
}

/// Whether `backend` serves `model`: by its description or, under `"*"`, by what the engine lists.
/// An engine that has not been asked yet may serve anything.
pub(super) fn serves(backend: &Backend, model: &str) -> bool {
    backend.spec.models.iter().any(|served| {
        served == model
            || served == "*"
                && backend
                    .facts
                    .models
                    .as_ref()
                    .is_none_or(|listed| listed.iter().any(|listed| listed == model))
    })
}
