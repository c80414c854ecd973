//! Computes free capacity, which admission checks before it dispatches requests.

use state::ids::{BackendRef, Slot};
use state::outputs::batch::BatchRoom;
use tokio::time::Instant;

use super::Decider;
use super::pairs::PREFILL_SCRATCH;
use super::routing_table::{DecisionScratch, RoutingTable, SCRATCH, matchable};
use crate::routing::RoutingRequest;

impl Decider {
    /// Applies `look` to the prefill backends for handovers through rooms; returns the default if
    /// there are none.
    fn computing<T: Default>(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        now: Instant,
        look: impl FnOnce(&DecisionScratch) -> T,
    ) -> T {
        PREFILL_SCRATCH.with_borrow_mut(|prefill| {
            match self.admit_prefill_beyond_limit(fleet, ask, now, prefill) {
                Ok(()) => look(prefill),
                Err(_) => T::default(),
            }
        })
    }

    /// Returns the backends that may take the request, whether or not they are at their limits.
    #[must_use]
    pub fn wanted_backends(&self, ask: &RoutingRequest<'_>, now: Instant) -> Vec<BackendRef> {
        let fleet = self.fleet.table();
        SCRATCH.with_borrow_mut(|scratch| {
            if self.admit_beyond_limit(&fleet, ask, now, scratch).is_err() {
                return Vec::new();
            }
            let handles = |scratch: &DecisionScratch| -> Vec<BackendRef> {
                let places = scratch.places.iter();
                let handles = places.map(|at| fleet.handle(*at));
                handles.collect()
            };
            let mut wanted = handles(scratch);
            if scratch.has_rooms {
                wanted.extend(self.computing(&fleet, ask, now, handles));
            }
            wanted
        })
    }

    /// Returns the slots of the limited backends at which this replica does not own all places.
    /// Static batching excludes them.
    #[must_use]
    pub fn divided_slots(&self) -> Vec<Slot> {
        let (registry, service) = (self.view.registry(), self.view.service());
        let is_divided = |handle: &BackendRef| {
            let Some(limit) = service.limit(handle.slot) else {
                return false;
            };
            let places = self.load.places(*handle, limit);
            places.is_some_and(|(_, all)| all < limit)
        };
        let handles = registry.backends.iter().map(|it| it.handle);
        let divided = handles.filter(is_divided);
        divided.map(|handle| handle.slot).collect()
    }

    /// Returns how many requests of this replica run at backends that serve `model`.
    #[must_use]
    pub fn running_here(&self, model: &str) -> u64 {
        let registry = self.view.registry();
        let backends = registry.backends.iter().filter(|it| it.serves(model));
        let running = backends.map(|it| u64::from(self.load.here(it.handle).running));
        running.sum()
    }

    /// Returns how many leading blocks of the prompt the best-matching backend is believed to find
    /// cached.
    #[must_use]
    pub fn best_match(&self, ask: &RoutingRequest<'_>) -> u32 {
        let (fleet, mut best) = (self.fleet.table(), 0);
        let lower = self.used_tiers().map(|(_, level)| level);
        for level in std::iter::once(&self.view.blocks).chain(lower) {
            level.match_prefix(matchable(ask), |slot, mut matched| {
                if let Some(at) = fleet.registry.place(slot) {
                    fleet.leave_out_dropped(at, ask, &mut matched);
                }
                best = best.max(matched);
            });
        }
        best
    }

    /// Returns the slots of backends that run any request, from any replica.
    #[must_use]
    pub fn busy_slots(&self, now: Instant) -> Vec<Slot> {
        let registry = self.view.registry();
        let backends = &registry.backends;
        let mut running = vec![0_u32; backends.len()];
        self.load.add_each(
            now,
            backends.len(),
            |at| backends[at].handle,
            |at, load| running[at] = running[at].saturating_add(load.running),
        );
        let slots = backends.iter().map(|backend| backend.handle.slot);
        let busy = slots.zip(running).filter(|(_, running)| *running > 0);
        busy.map(|(slot, _)| slot).collect()
    }

    /// Returns the slots of all backends except `slot`.
    #[must_use]
    pub fn slots_but(&self, slot: Slot) -> Vec<Slot> {
        let registry = self.view.registry();
        let slots = registry.backends.iter().map(|backend| backend.handle.slot);
        slots.filter(|other| *other != slot).collect()
    }

    /// Returns how many requests and tokens fit at the backend in `slot` beside a request of
    /// `tokens` tokens, if nothing else runs there. A backend without a limit takes `BATCH_DEFAULT`
    /// requests in total.
    #[must_use]
    pub fn batch_room(&self, slot: Slot, tokens: u64, tokens_per_block: u32) -> BatchRoom {
        let registry = self.view.registry();
        let found = registry
            .backends
            .iter()
            .find(|backend| backend.handle.slot == slot);
        let capacity_blocks = found.and_then(state::Backend::capacity_blocks);
        let capacity_tokens =
            capacity_blocks.map(|blocks| u64::from(blocks) * u64::from(tokens_per_block));
        let limit = self.view.limit(slot).unwrap_or(BATCH_DEFAULT);
        BatchRoom {
            requests: limit.saturating_sub(1),
            tokens: capacity_tokens.map(|capacity| capacity.saturating_sub(tokens)),
        }
    }
}

/// Batch size, in requests, at a backend without a limit.
const BATCH_DEFAULT: u32 = 32;
