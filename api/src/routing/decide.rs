//! The decision: filter, match, weigh, choose. The hot path of the whole product.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use state::ids::{BackendRef, BlockHash, Slot};
use state::policy::{self, Candidate, Choice, Needs, PolicyConfig, Request};
use state::prefix::user_key;
use state::{Backend, Registry};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::metrics::{Meter, RoutingMetrics};
use super::{Ask, Decision, NoBackend, Router, Verdict, session};
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
        let config = policy_of(&fleet, ask);
        let needs = config.needs();
        let turn = if needs.turn {
            self.turn.fetch_add(1, Relaxed)
        } else {
            0
        };
        let request = self.request(&fleet, ask, &needs, turn);
        let decided = SCRATCH.with_borrow_mut(|scratch| {
            self.admit(&fleet, ask, scratch, |_, _, _| {})?;
            self.match_applied(matchable(ask), scratch);
            self.match_overlay(&fleet, matchable(ask), scratch);
            self.weigh(&fleet, Instant::now(), scratch);
            self.supplement(&fleet, ask, &needs, scratch);
            let choice = policy::choose(config, &request, &scratch.candidates);
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
                        free_blocks: self.free_blocks(backend),
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

    /// Blocks the backend can take before it evicts any; one of unknown capacity is taken to evict
    /// nothing.
    fn free_blocks(&self, backend: &Backend) -> u32 {
        let owned = self.view.blocks.owned(backend.handle.slot);
        backend
            .capacity_blocks()
            .map_or(u32::MAX, |capacity| capacity.saturating_sub(owned))
    }

    /// Adds what only some policies look at.
    pub(super) fn supplement(
        &self,
        fleet: &Fleet,
        ask: &Ask<'_>,
        needs: &Needs<'_>,
        scratch: &mut Scratch,
    ) {
        if !needs.listed_models {
            return;
        }
        for (candidate, &at) in scratch.candidates.iter_mut().zip(&scratch.places) {
            let backend = &fleet.registry.backends[at];
            candidate.is_model_listed = lists(backend, ask.model);
        }
    }

    /// The request as a policy sees it. `turn` is what round-robin counts by.
    pub(super) fn request(
        &self,
        fleet: &Fleet,
        ask: &Ask<'_>,
        needs: &Needs<'_>,
        turn: u64,
    ) -> Request {
        Request {
            jitter: xxh3_64(ask.request_id.as_bytes()),
            blocks: u32::try_from(matchable(ask).len()).unwrap_or(u32::MAX),
            tokens: ask.identity.tokens,
            tokens_per_block: ask.identity.tail.tokens_per_block,
            prefix_key: needs
                .prefix_blocks
                .map_or(0, |blocks| prefix_key(ask, blocks)),
            session: needs
                .session
                .zip(ask.headers)
                .and_then(|(settings, headers)| session::hash(settings, headers)),
            turn,
            user: if needs.user_tokens {
                let name = super::bounded_name(ask.user);
                let key = user_key(fleet.registry.hash_seed, &name);
                self.view.user_tokens(key)
            } else {
                policy::UserTokens::default()
            },
        }
    }
}

/// The policy that decides: what the request asks for, else the live one.
pub(super) fn policy_of<'a>(fleet: &'a Fleet, ask: &Ask<'a>) -> &'a PolicyConfig {
    ask.policy.unwrap_or(&fleet.registry.policy)
}

/// Names the prompt's first `blocks` blocks, or as many as there are; a prompt shorter than a block
/// by all its bytes.
fn prefix_key(ask: &Ask<'_>, blocks: u32) -> u64 {
    let identity = ask.identity;
    let first = identity.chain.get(..blocks as usize);
    match first.unwrap_or(&identity.chain).last() {
        Some(last) => last.0,
        None => xxh3_64_with_seed(&identity.tail.bytes, identity.root),
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

/// Whether the engine itself says that it has `model`, base model or adapter.
fn lists(backend: &Backend, model: &str) -> bool {
    let listed = backend.facts.models.as_ref();
    listed.is_some_and(|listed| listed.iter().any(|listed| listed == model))
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
