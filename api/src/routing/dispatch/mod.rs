//! Dispatches requests and accounts for them: everything that routing writes.
//!
//! A [`Dispatcher`] counts requests in the load table, queues leases and charges in the outbox, and
//! sums up what attempts reveal about backends and output lengths. An [`Attempt`](super::Attempt)
//! holds the resources of one dispatch until its end.

pub(super) mod attempt;
pub(super) mod hidden_output;
pub(super) mod output_lengths;
pub(super) mod predictions;
pub(super) mod prefill;
pub(super) mod priced_total;
pub(super) mod prompt_size;
pub(super) mod reply;
pub(super) mod samples;
pub(super) mod text_samples;
mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use state::StateView;
use state::command::{Charge, Item};
use state::ids::{AttemptId, BackendRef, ModelKey, SessionId, UserKey};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::output_lengths::OutputLengths;
use self::priced_total::{LargestRequest, PricedTotal};
use self::prompt_size::PromptSize;
use self::samples::ServiceSamples;
use self::text_samples::TextSums;
use super::decide::routing_table::Fleet;
use super::learnt::KnownPrefixes;
use super::load::LoadTable;
use super::outbox::{Overlay, SharedOutbox};
use crate::engines::backends::{Backends, FoundTokens};
use crate::users::user_name::UserName;

/// Interval at which samples, output lengths and token counts are queued for the log.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Dispatches requests and accounts for them. Each replica has one.
pub struct Dispatcher {
    pub(super) view: Arc<StateView>,
    /// Receives the outcomes of requests.
    pub(super) backends: Arc<Backends>,
    pub(super) fleet: Arc<Fleet>,
    pub(super) load: Arc<LoadTable>,
    pub(super) outbox: Arc<SharedOutbox>,
    /// Blocks that the outbox has queued; only read here.
    pub(super) overlay: Arc<Overlay>,
    pub(super) known: KnownPrefixes,
    /// Session of this replica's run.
    pub(super) session: SessionId,
    pub(super) last_attempt: AtomicU64,
    pub(super) samples: ServiceSamples,
    pub(super) lengths: OutputLengths,
    pub(super) texts: TextSums,
    pub(super) priced: PricedTotal,
    /// Places for take-overs of streams that wait for the log.
    pub(super) take_overs: Arc<Semaphore>,
}

impl Dispatcher {
    /// Records that the state holds everything from before the start of this replica. The metrics
    /// tell such prefixes from those that are learnt later.
    pub fn caught_up(&self) {
        self.known
            .caught_up(&self.view.blocks, &self.view.registry());
    }

    /// Records how many of the predicted tokens of a prompt a response to `user` found cached.
    fn found_cached(
        &self,
        backend: BackendRef,
        user: UserKey,
        prompt: &PromptSize,
        (predicted, cached): (u64, u64),
    ) {
        let leaves_out = prompt.is_exact.then(|| {
            let registry = self.view.registry();
            let facts = registry.backend(backend.slot).map(|known| &known.facts);
            facts.and_then(|facts| facts.drops_last_block) == Some(true)
        });
        let found = FoundTokens {
            user,
            predicted,
            cached,
            leaves_out,
        };
        self.backends.found_cached(backend, found);
    }

    /// Records that a request of `user` waits until [`Dispatcher::end_wait`], so that the user does
    /// not count as idle. Returns the user to charge for the request.
    #[must_use]
    pub fn begin_wait(&self, user: &UserName) -> UserKey {
        let registry = self.view.registry();
        self.outbox.with(|outbox| {
            outbox.follow_names(registry.names_since);
            let user = outbox.payer(registry.hash_seed, user.as_str());
            outbox.charge(Charge {
                user,
                queued: 1,
                ..Charge::default()
            });
            user
        })
    }

    /// Records that a request of `user` no longer waits, whatever its outcome.
    pub fn end_wait(&self, user: UserKey) {
        let charge = Charge {
            user,
            dequeued: 1,
            ..Charge::default()
        };
        self.outbox.with(|outbox| outbox.charge(charge));
    }

    /// Returns the charges to `user` from this replica that the state does not include yet.
    #[must_use]
    pub fn unapplied(&self, user: UserKey) -> Charge {
        self.outbox.unapplied(user, self.view.applied())
    }

    /// Returns the total of priced tokens charged at this replica since its start.
    #[must_use]
    pub fn priced_tokens(&self) -> u64 {
        self.priced.all()
    }

    /// Returns the largest prices of requests that ended here since the last
    /// [`Dispatcher::take_largest_request`].
    #[must_use]
    pub fn largest_request(&self) -> LargestRequest {
        self.priced.largest()
    }

    /// Returns [`Dispatcher::largest_request`] and resets it.
    pub fn take_largest_request(&self) -> LargestRequest {
        self.priced.take_largest()
    }

    /// Queues samples, output lengths and token counts for the log every second, until `stop`.
    pub async fn run_samples(&self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(TELL_EVERY);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            self.queue_samples(Instant::now());
            self.queue_output_lengths();
            self.queue_text_samples();
        }
    }

    /// Queues the samples that are due at `now` for the log. A sample without room is lost; later
    /// ones carry similar information.
    pub fn queue_samples(&self, now: Instant) {
        for (sample, belief) in self.samples.take(now) {
            self.outbox.note(Item::ObserveService(Box::new(sample)));
            if let Some(belief) = belief {
                self.outbox.note(Item::ObserveBelief(belief));
            }
        }
    }

    /// Queues an item for the log that a later one makes good. Returns whether there was room.
    pub(crate) fn report(&self, item: Item) -> bool {
        self.outbox.note(item)
    }

    /// Queues the output lengths for the log. Lengths without room are lost; similar ones follow.
    pub fn queue_output_lengths(&self) {
        for ((user, model), tokens) in self.lengths.take() {
            self.outbox.note(Item::ObserveOutputs {
                user,
                model,
                tokens,
            });
        }
    }

    /// Queues the token counts that engines reported for prompts.
    pub fn queue_text_samples(&self) {
        for sample in self.texts.take() {
            self.outbox.note(Item::ObserveText(sample));
        }
    }

    /// Records the output length of a finished request, in tokens, if the admission settings use
    /// it.
    pub(super) fn ended_with(&self, user: UserKey, model: ModelKey, tokens: u64) {
        let registry = self.view.registry();
        if registry.admission.wants_outputs() {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            self.lengths.add(user, model, tokens);
        }
    }

    /// Flushes the outbox early if the other replicas know exactly what the backend holds. Without
    /// the update, they would predict wrongly.
    pub(super) fn flush_soon_for(&self, backend: BackendRef) {
        if self.view.evictions().get(backend).is_some() {
            self.outbox.flush_soon();
        }
    }

    pub(super) fn next_attempt(&self) -> AttemptId {
        AttemptId(self.last_attempt.fetch_add(1, Relaxed) + 1)
    }
}
