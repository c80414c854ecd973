//! Answers admission's questions to routing: running requests, cached prefixes, local charges, and
//! which users wait.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use state::command::Charge;
use state::ids::{ReplicaId, Slot, UserKey};
use state::outputs::batch::BatchRoom;
use state::prefix::user_key;
use tokio::time::Instant;

use super::fleet::{SCRATCH, matchable};
use super::{Router, RoutingRequest};
use crate::user_name;

/// What was charged here, in priced tokens.
#[derive(Debug, Default)]
pub(super) struct PricedTotal {
    all: AtomicU64,
    largest_request: AtomicU64,
    largest_output: AtomicU64,
}

/// The most that a request came to, in priced tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LargestRequest {
    /// All of one.
    pub request: u64,
    /// The output of one, perhaps another.
    pub output: u64,
}

impl LargestRequest {
    /// The larger of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            request: self.request.max(other.request),
            output: self.output.max(other.output),
        }
    }
}

impl PricedTotal {
    /// Counts what goes into the outbox.
    pub(super) fn add(&self, tokens: u64) {
        self.all.fetch_add(tokens, Relaxed);
    }

    /// Counts a request that is over.
    pub(super) fn request(&self, price: LargestRequest) {
        self.largest_request.fetch_max(price.request, Relaxed);
        self.largest_output.fetch_max(price.output, Relaxed);
    }
}

impl Router {
    /// The user's name is known to wait from here on, until [`Router::end_wait`]: a user who waits is
    /// not idle. Answers whom the request is charged to.
    #[must_use]
    pub fn begin_wait(&self, user: &str) -> UserKey {
        let registry = self.view.registry();
        let name = user_name::bounded(user);
        self.desk.with(|outbox| {
            outbox.follow_restore(registry.restored);
            let user = outbox.payer(registry.hash_seed, &name);
            outbox.charge(Charge {
                user,
                queued: 1,
                ..Charge::default()
            });
            user
        })
    }

    /// A request of this user waits no more, whichever way.
    pub fn end_wait(&self, user: UserKey) {
        let charge = Charge {
            user,
            dequeued: 1,
            ..Charge::default()
        };
        self.desk.with(|outbox| outbox.charge(charge));
    }

    /// The key of a user's name.
    #[must_use]
    pub fn user_key(&self, user: &str) -> UserKey {
        user_key(self.view.registry().hash_seed, &user_name::bounded(user))
    }

    /// Priced tokens charged here since the start.
    #[must_use]
    pub fn priced_tokens(&self) -> u64 {
        self.priced.all.load(Relaxed)
    }

    /// Price of the largest request that ended here since [`Router::take_largest_request`].
    #[must_use]
    pub fn largest_request(&self) -> LargestRequest {
        LargestRequest {
            request: self.priced.largest_request.load(Relaxed),
            output: self.priced.largest_output.load(Relaxed),
        }
    }

    /// The same; looks for a new one from here on.
    pub fn take_largest_request(&self) -> LargestRequest {
        LargestRequest {
            request: self.priced.largest_request.swap(0, Relaxed),
            output: self.priced.largest_output.swap(0, Relaxed),
        }
    }

    /// This replica.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// Gives a user credit for priced tokens that were charged and not used.
    pub fn credit(&self, user: UserKey, tokens: u64) {
        self.desk.with(|outbox| outbox.ledger.credit(user, tokens));
    }

    /// Has what is queued proposed at once, unless an envelope is under way.
    pub fn hurry(&self) {
        self.desk.hurry();
    }

    /// Requests that the backends which may take this one have room for, all together.
    #[must_use]
    pub fn free_places(&self, ask: &RoutingRequest<'_>) -> u64 {
        let fleet = self.fleet();
        SCRATCH.with_borrow_mut(|scratch| {
            let admitted = self.admit(&fleet, ask, Instant::now(), scratch, |_, _| {});
            if admitted.is_err() {
                return 0;
            }
            let places = scratch.candidates.iter().map(|candidate| {
                let limit = self.view.limit(candidate.slot).unwrap_or(u32::MAX);
                u64::from(limit.saturating_sub(candidate.running))
            });
            places.sum()
        })
    }

    /// Requests of this replica that run on backends of the model.
    #[must_use]
    pub(crate) fn running_here(&self, model: &str) -> u64 {
        let registry = self.view.registry();
        let backends = registry.backends.iter().filter(|it| it.serves(model));
        let running = backends.map(|it| u64::from(self.load.here(it.handle).running));
        running.sum()
    }

    /// Leading blocks of the prompt that the backend with most of them is believed to hold.
    #[must_use]
    pub fn best_match(&self, ask: &RoutingRequest<'_>) -> u32 {
        let mut best = 0;
        self.view
            .blocks
            .match_prefix(matchable(ask), |_, blocks| best = best.max(blocks));
        best
    }

    /// Backends that run anything, from any replica.
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

    /// All backends but the one in `slot`.
    #[must_use]
    pub fn slots_but(&self, slot: Slot) -> Vec<Slot> {
        let registry = self.view.registry();
        let slots = registry.backends.iter().map(|backend| backend.handle.slot);
        slots.filter(|other| *other != slot).collect()
    }

    /// What the backend in `slot` has room for beside one request of `tokens`, with nothing else
    /// there. One without a limit takes a batch of `BATCH_DEFAULT`.
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

/// Requests of a batch for a backend without a limit.
const BATCH_DEFAULT: u32 = 32;
