//! Application of batches: the facts that replicas learned, item by item, in order.
//!
//! No item can fail the batch. An item that does not apply is dropped and counted: its backend has
//! started a new incarnation, its lease is not open, or it is repeated, invalid or out of bounds.
//! If the backend does not own the tip of an acquire, the reply lists the attempt, so that its
//! sender can send the whole chain again.

use super::RouterState;
use super::leases::{Holder, LEASES_PER_REPLICA_MAX, OpenLease};
use crate::backends::EngineFacts;
use crate::bounds::BLOCKS_PER_ITEM_MAX;
use crate::command::{BatchReply, Item, LeaseOutcome};
use crate::ids::{AttemptId, BackendRef, BlockHash, ReplicaId, Slot, UserKey};
use crate::kv_events::{KvBatch, KvRejection, KvUpdate};
use crate::prefix::user_key;
use crate::validate::is_name;

/// Outcome of applying one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemResult {
    Applied,
    Dropped,
    MissingTip(AttemptId),
}

impl RouterState {
    pub(super) fn batch(
        &mut self,
        replica: ReplicaId,
        base_attempt: AttemptId,
        items: Vec<Item>,
    ) -> BatchReply {
        let mut reply = BatchReply::default();
        for item in items {
            match self.item(replica, base_attempt, item) {
                ItemResult::Applied => {}
                ItemResult::Dropped => reply.dropped = reply.dropped.saturating_add(1),
                ItemResult::MissingTip(attempt) => reply.missing_tip.push(attempt),
            }
        }
        self.exact.fade(&mut self.ownership, self.time.now_ms);
        reply
    }

    fn item(&mut self, replica: ReplicaId, base_attempt: AttemptId, item: Item) -> ItemResult {
        let holder = |attempt: u32| {
            let attempt = AttemptId(base_attempt.0.checked_add(u64::from(attempt))?);
            Some(Holder { replica, attempt })
        };
        let is_applied = match item {
            Item::Acquire {
                attempt,
                backend,
                tip,
                new,
            } => {
                return holder(attempt).map_or(ItemResult::Dropped, |holder| {
                    self.acquire(holder, backend, tip, &new)
                });
            }
            Item::Materialize { attempt, new } => {
                holder(attempt).is_some_and(|holder| self.materialize(holder, &new))
            }
            Item::Release { attempt, outcome } => {
                holder(attempt).is_some_and(|holder| self.release(holder, outcome))
            }
            Item::DefineUser { key, name } => self.define_user(key, &name),
            Item::Charge(charge) => self.charge(replica, &charge),
            Item::DefineSource(source) => self.define_source(source),
            Item::ObserveEngine { backend, facts } => self.observe_engine(backend, facts),
            Item::KvEvents(batch) => self.kv_events(&batch),
            Item::ObserveService(sample) => self.observe_service(&sample),
            Item::ObserveOutputs {
                user,
                model,
                tokens,
            } => self.observe_outputs(user, model, &tokens),
            Item::ObserveDemand(report) => self.observe_demand(replica, &report),
            Item::ObserveText(sample) => self.observe_text(&sample),
            Item::ObserveBelief(sample) => self.observe_belief(&sample),
            Item::ObserveBlockSize { backend, tokens } => self.observe_block_size(backend, tokens),
            Item::BeginSession(new) => {
                self.trees.begin(&new, self.time.now_ms);
                true
            }
            // A session may end while its turn runs, so a late item about it is no fault.
            Item::MoveSession { session, home } => {
                self.trees.relocate(session, home, self.time.now_ms);
                true
            }
            Item::EndTurn(turn) => {
                self.trees.turn(&turn, None, self.time.now_ms);
                true
            }
            Item::EndSession(session) => {
                self.trees.end_named(session);
                true
            }
            Item::ChargeStream(charge) => self.charge_stream(replica, &charge),
        };
        if is_applied {
            ItemResult::Applied
        } else {
            ItemResult::Dropped
        }
    }

    fn acquire(
        &mut self,
        holder: Holder,
        backend: BackendRef,
        tip: Option<BlockHash>,
        new: &[BlockHash],
    ) -> ItemResult {
        let is_welcome = new.len() <= BLOCKS_PER_ITEM_MAX
            && self.backends.is_live(backend)
            && !self.leases.contains(holder)
            && self.leases.of_replica(holder.replica) < LEASES_PER_REPLICA_MAX;
        if !is_welcome {
            return ItemResult::Dropped;
        }
        match self.ownership.acquire(backend.slot, tip, new) {
            Ok(lease) => {
                self.leases.open(holder, OpenLease::of(backend, &lease));
                ItemResult::Applied
            }
            Err(_) => ItemResult::MissingTip(holder.attempt),
        }
    }

    fn materialize(&mut self, holder: Holder, new: &[BlockHash]) -> bool {
        if new.len() > BLOCKS_PER_ITEM_MAX {
            return false;
        }
        let Some(open) = self.leases.close(holder) else {
            return false;
        };
        let mut lease = open.lease();
        self.ownership.extend(&mut lease, new);
        self.leases
            .open(holder, OpenLease::of(open.backend, &lease))
    }

    fn release(&mut self, holder: Holder, outcome: LeaseOutcome) -> bool {
        let Some(open) = self.leases.close(holder) else {
            return false;
        };
        match outcome {
            LeaseOutcome::Kept => self.ownership.release(open.lease(), true),
            LeaseOutcome::KeptUntouched => self.ownership.release_untouched(open.lease()),
            LeaseOutcome::Discarded => self.ownership.release(open.lease(), false),
        }
        let (slot, now_ms) = (open.backend.slot, self.time.now_ms);
        self.exact
            .released(slot, open.tip, &mut self.ownership, now_ms);
        true
    }

    /// Records the name of a user. Returns `false` for a name that does not hash to the key,
    /// because it would show one user under the name of another, or if the name is invalid or the
    /// table is full.
    fn define_user(&mut self, key: UserKey, name: &str) -> bool {
        is_name(name)
            && user_key(self.config.hash_seed, name) == key
            && self.users.define(key, name)
    }

    fn observe_engine(&mut self, backend: BackendRef, facts: EngineFacts) -> bool {
        let before = self
            .backends
            .in_slot(backend.slot)
            .map(|it| it.facts.clone());
        let Some(changes) = Some(facts)
            .filter(EngineFacts::is_valid)
            .and_then(|it| self.backends.observe(backend, it))
        else {
            return false;
        };
        self.follow(&changes);
        // Replicas report engines repeatedly, so only a change publishes a new registry.
        if self.backends.in_slot(backend.slot).map(|it| &it.facts) != before.as_ref() {
            self.is_cold_changed = true;
            self.settle_block_sizes(backend.slot);
        }
        true
    }

    fn observe_block_size(&mut self, backend: BackendRef, tokens: u32) -> bool {
        if !self.backends.is_live(backend) {
            return false;
        }
        let Some(is_news) = self.block_sizes.report(backend.slot, tokens) else {
            return false;
        };
        if is_news {
            self.is_cold_changed = true;
            self.settle_block_sizes(backend.slot);
        }
        true
    }

    /// Updates the block sizes of the models that the backend in `slot` serves. If a size changes,
    /// discards what engines reported in blocks of the former size. Their readers then start over.
    pub(super) fn settle_block_sizes(&mut self, slot: Slot) {
        for (model, before) in self.block_sizes.settle(slot, &self.backends) {
            let served = self.backends.iter().filter(|it| it.serves(&model));
            let served: Vec<BackendRef> = served.map(|it| it.handle).collect();
            for backend in served {
                self.void_kv_events(backend, before);
            }
        }
    }

    fn void_kv_events(&mut self, backend: BackendRef, router: u32) {
        let engine = self.block_sizes.of_engine(backend.slot).unwrap_or(router);
        let status = self.kv_status(backend.slot);
        for rank in status.into_iter().flat_map(|it| it.ranks) {
            self.kv_events(&KvBatch {
                backend,
                rank: rank.rank,
                publisher: rank.publisher,
                news: KvUpdate::Refuse(KvRejection::BlockSize { engine, router }),
            });
        }
    }
}
