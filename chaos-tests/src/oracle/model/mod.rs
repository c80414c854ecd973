//! The reference model, which computes the replicated state a second time, by a naive replay of the
//! log.
//!
//! It shares only the commands with `state`. Caches are maps searched from end to end, users are
//! sums, orders come from linear search. The model marks contents that it does not follow
//! ([`ModelCache::is_followed`]) rather than guess them: caches filled from KV events, which are
//! compared with the engines themselves, and caches of learned capacity.

pub mod cache;
pub mod registry;
pub mod sessions;
pub mod streams;
#[cfg(test)]
mod tests;
pub mod texts;
pub mod time;
pub mod usage;
pub mod users;

use std::collections::BTreeMap;

use state::admission::{AdmissionSettings, ChargeInput, Order};
use state::command::{Charge, Command, Envelope, Founding, Item, LeaseOutcome, Rejection, Reply};
use state::discovery::DiscoveryChange;
use state::ids::{
    ApiKeyId, AttemptId, BackendRef, BlockHash, LogIndex, ReplicaId, StreamCarrier, UserKey,
};
use state::keys::SecretHash;
use state::streams::{STREAM_IDLE_MS, StreamCharge, StreamKey};
use state::users::FairnessSettings;

use super::register::{RegisterKey, Registers};
use cache::ModelCache;
use registry::ModelRegistry;
use sessions::{Dedup, ModelSessions};
use streams::ModelStreams;
use texts::ModelTexts;
use time::ModelTime;
use usage::ModelUsage;
use users::{ModelUsers, price};

/// The state that all replicas must hold after the entries so far.
#[derive(Debug, Default)]
pub struct ReferenceModel {
    /// Replicated time.
    pub time: ModelTime,
    /// Sessions of replicas, which make commands idempotent.
    pub sessions: ModelSessions,
    /// Registers, which are written as a whole.
    pub registers: Registers,
    /// Registered backends and their slots.
    pub registry: ModelRegistry,
    /// Caches of backends, by slot.
    pub caches: BTreeMap<u16, ModelCache>,
    /// Open leases by replica and attempt.
    pub leases: BTreeMap<(ReplicaId, AttemptId), ModelLease>,
    /// Usage and counters of users.
    pub users: ModelUsers,
    /// Usage by day, user and source.
    pub usage: ModelUsage,
    /// Secrets of API keys, each with the user of the key.
    pub secrets: BTreeMap<ApiKeyId, (SecretHash, String)>,
    /// Newest known messages of KV event streams.
    pub streams: ModelStreams,
    /// Bytes per token of models.
    pub texts: ModelTexts,
    /// Number of priced tokens that each replica charged each user in advance and has not settled.
    pub ahead: BTreeMap<(ReplicaId, UserKey), i128>,
    /// Carriers of resumable streams, with their epochs and the times of their last charges.
    pub carriers: BTreeMap<StreamKey, (StreamCarrier, u32, u64)>,
    /// Whether the settings ever allowed advances for other than prompts.
    pub charges_otherwise: bool,
    prices: FairnessSettings,
    charged_input: ChargeInput,
    /// Whether a backup has replaced the state. The log does not have the contents of a backup.
    pub is_replaced: bool,
}

/// An open lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelLease {
    /// Backend of the lease.
    pub backend: BackendRef,
    /// Deepest block that the lease holds, if any.
    pub tip: Option<BlockHash>,
    /// Number of blocks that the lease inserted.
    pub inserted: u32,
}

/// Effect of a command in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandEffect {
    /// The command took effect with this reply. For a batch, the model's reply is only an
    /// acknowledgement.
    Done(Reply),
    /// The command is a repeat, so it had no effect. The first command of its origin took effect,
    /// at an index that is not known if others followed it.
    Repeat,
    /// The command had no effect, because its session is over.
    Stale,
}

impl ReferenceModel {
    /// Applies the next entry and returns its effect.
    pub fn apply(&mut self, index: LogIndex, envelope: &Envelope) -> CommandEffect {
        match self.sessions.admit(envelope) {
            Dedup::Repeat => return CommandEffect::Repeat,
            Dedup::Stale => return CommandEffect::Stale,
            Dedup::NewRun => self.close(envelope.origin.replica),
            Dedup::Fresh => {}
        }
        self.time.pass(envelope.proposed_at_ms);
        let now_ms = self.time.now_ms;
        (self.carriers)
            .retain(|_, (_, _, used_ms)| used_ms.saturating_add(STREAM_IDLE_MS) > now_ms);
        self.users.stamp_ms = envelope.proposed_at_ms;
        self.usage.drop_old(self.time.calendar_ms.unwrap_or(0));
        self.sessions.took(&envelope.origin, index);
        CommandEffect::Done(self.run(envelope))
    }

    fn run(&mut self, envelope: &Envelope) -> Reply {
        let (replica, command) = (envelope.origin.replica, &envelope.command);
        if !matches!(command, Command::Found(_))
            && self.registers.value(&RegisterKey::Policy).is_none()
        {
            return Reply::Rejected(Rejection::NotInitialised);
        }
        let reply = self.write(command);
        if let Reply::Rejected(_) = reply {
            return reply;
        }
        match command {
            Command::Found(founding) => self.found(founding),
            Command::Batch {
                base_attempt,
                items,
            } => {
                let each = items.iter();
                each.for_each(|item| self.item(replica, *base_attempt, item));
            }
            Command::PutBackend(spec) => {
                let change = self.registry.put(spec);
                self.registry
                    .drain(&spec.id, self.registers.drains(&spec.id));
                self.follow(change);
            }
            Command::Discover(discovery) => self.discover(&discovery.change),
            Command::DeleteBackend { name } => {
                let change = self.registry.remove(name);
                self.follow(change);
            }
            Command::SetDraining { name, draining, .. } => self.registry.drain(name, *draining),
            Command::ExpireSession { replica, session } => {
                if self.sessions.is_current(*replica, *session) {
                    self.close(*replica);
                }
            }
            Command::PutAdmission(settings) => self.admit_by(settings),
            Command::PutPolicy(_)
            | Command::PutRouting(_)
            | Command::AssignReaders(_)
            | Command::BeginRestore { .. }
            | Command::RestorePart { .. }
            | Command::AbortRestore { .. } => {}
            Command::ForgiveUser { name } => self.users.forgive(name),
            Command::CreateKey(spec) => {
                self.secrets
                    .insert(spec.id, (spec.secret, spec.user.clone()));
            }
            Command::RevokeKey { id } => drop(self.secrets.remove(id)),
            Command::RotateKey { id, secret, .. } => self.rotate(id, *secret),
            Command::ConfigureUser { name, settings } => self.users.configure(name, settings),
            Command::PutUserDefaults(defaults) => self.users.set_defaults(defaults),
            Command::DeleteUser { name } => {
                let key = self.users.key(name);
                self.carriers.retain(|stream, _| stream.user != key);
                self.users.delete(name);
                self.usage.forget(key);
            }
            // Simulated engines have one rank.
            Command::SetRanks { .. } => {}
            // Sessions decide nothing that the model follows.
            Command::EndTree { .. } => {}
            // The contents of its parts are not examined.
            Command::FinishRestore { .. } => self.is_replaced = true,
        }
        reply
    }

    fn rotate(&mut self, id: &ApiKeyId, secret: SecretHash) {
        if let Some((present, _)) = self.secrets.get_mut(id) {
            *present = secret;
        }
    }

    fn discover(&mut self, change: &DiscoveryChange) {
        let name = change.backend();
        let effect = match change {
            DiscoveryChange::Found(spec) => self.registry.put(spec),
            DiscoveryChange::Lost { .. } => registry::SlotChange::None,
            DiscoveryChange::Forgotten { .. } => self.registry.remove(name),
        };
        self.registry.drain(name, self.registers.drains(name));
        self.follow(effect);
    }

    fn found(&mut self, founding: &Founding) {
        self.prices = founding.fairness;
        self.users.begin(founding.hash_seed);
        self.usage.begin(founding.hash_seed);
        self.admit_by(&founding.admission);
        self.users.set_defaults(&founding.user_defaults);
    }

    /// Applies a command that writes registers, and returns the reply.
    fn write(&mut self, command: &Command) -> Reply {
        let checked = match command {
            Command::DeleteUser { name } => self.users.check_delete(name),
            Command::ForgiveUser { name } => self.users.check_forgive(name),
            _ => Ok(()),
        };
        if let Err(reject) = checked {
            return Reply::Rejected(reject);
        }
        self.registers.write(command)
    }

    fn admit_by(&mut self, settings: &AdmissionSettings) {
        self.charged_input = settings.charge;
        self.usage.days = settings.usage_days;
        self.charges_otherwise |= settings.order == Order::VtcPred;
    }

    fn item(&mut self, replica: ReplicaId, base: AttemptId, item: &Item) {
        let holder = |attempt: u32| (replica, AttemptId(base.0 + u64::from(attempt)));
        match item {
            Item::Acquire {
                attempt,
                backend,
                tip,
                new,
            } => self.acquire(holder(*attempt), *backend, *tip, new),
            Item::Materialize { attempt, new } => self.materialize(holder(*attempt), new),
            Item::Release { attempt, outcome } => self.release(holder(*attempt), *outcome),
            Item::DefineUser { key, name } if *key == self.users.key(name) => self.users.know(*key),
            // A name that does not match the key is ignored.
            Item::DefineUser { .. } => {}
            Item::Charge(charge) => {
                let ahead = self.ahead.entry((replica, charge.user)).or_default();
                *ahead += i128::from(charge.advance) - i128::from(charge.settled);
                self.charge(replica, charge);
            }
            Item::ObserveEngine { backend, facts } => {
                let change = self.registry.observe(*backend, facts);
                self.follow(change);
            }
            // Events of another incarnation of a backend are ignored.
            Item::KvEvents(batch) if !self.registry.is_live(batch.backend) => {}
            Item::KvEvents(batch) => {
                self.streams.tell(batch);
                self.unfollow(batch.backend);
            }
            Item::ObserveService(sample) => {
                if self.registry.learns_capacity(sample.backend) {
                    self.unfollow(sample.backend);
                }
            }
            Item::ObserveBelief(sample) => {
                if self.registry.learns_capacity(sample.backend) {
                    self.unfollow(sample.backend);
                }
            }
            Item::DefineSource(source) => self.usage.define(source),
            Item::ChargeStream(charge) => self.charge_stream(replica, charge),
            Item::ObserveOutputs { .. }
            | Item::BeginSession(_)
            | Item::MoveSession { .. }
            | Item::EndTurn(_)
            | Item::EndSession(_)
            | Item::ObserveDemand(_) => {}
            Item::ObserveText(sample) => self.texts.observe(sample),
            Item::ObserveBlockSize { backend, tokens } => {
                self.registry.observe_block_size(*backend, *tokens);
            }
        }
    }

    fn acquire(
        &mut self,
        holder: (ReplicaId, AttemptId),
        backend: BackendRef,
        tip: Option<BlockHash>,
        new: &[BlockHash],
    ) {
        if !self.registry.is_live(backend) || self.leases.contains_key(&holder) {
            return;
        }
        let cache = self.caches.entry(backend.slot.0).or_default();
        if tip.is_some_and(|tip| !cache.owns(tip)) {
            return;
        }
        let (tip, inserted) = cache.acquire(tip, new);
        let lease = ModelLease {
            backend,
            tip,
            inserted,
        };
        self.leases.insert(holder, lease);
    }

    fn materialize(&mut self, holder: (ReplicaId, AttemptId), new: &[BlockHash]) {
        if let Some(lease) = self.leases.get_mut(&holder) {
            let cache = self.caches.entry(lease.backend.slot.0).or_default();
            let (tip, inserted) = cache.extend(lease.tip, new);
            lease.tip = tip;
            lease.inserted += inserted;
        }
    }

    fn release(&mut self, holder: (ReplicaId, AttemptId), outcome: LeaseOutcome) {
        let Some(lease) = self.leases.remove(&holder) else {
            return;
        };
        let cache = self.caches.entry(lease.backend.slot.0).or_default();
        if let Some(tip) = lease.tip {
            cache.release(tip, outcome, lease.inserted > 0);
        }
    }

    fn charge(&mut self, replica: ReplicaId, charge: &Charge) {
        let due = price(&self.prices, self.charged_input, charge);
        self.users.charge(replica, charge, due);
        self.usage.charge(self.users.stamp_ms, charge);
    }

    /// Charges a user for a resumable stream. Of a carrier that has lost the stream, only requests
    /// count that started or ended.
    fn charge_stream(&mut self, replica: ReplicaId, item: &StreamCharge) {
        let (key, carrier, now_ms) = (item.key(), item.carried.carrier, self.time.now_ms);
        let present = self.carriers.get(&key).copied();
        let present = present.unwrap_or((carrier, item.takes_over.unwrap_or(0), now_ms));
        let is_taken = present.0 != carrier && item.takes_over > Some(present.1);
        let epoch = match is_taken {
            true => item.takes_over.unwrap_or(0),
            false => present.1,
        };
        let is_void = present.0 != carrier && !is_taken;
        let charge = match is_void {
            false => item.charge,
            true => Charge {
                user: item.charge.user,
                source: item.charge.source,
                queued: item.charge.queued,
                dequeued: item.charge.dequeued,
                started: item.charge.started,
                ended: item.charge.ended,
                ..Charge::default()
            },
        };
        if !is_void {
            self.carriers.insert(key, (carrier, epoch, now_ms));
        }
        let has_usage = charge
            != Charge {
                user: charge.user,
                source: charge.source,
                ..Charge::default()
            };
        if has_usage {
            self.charge(replica, &charge);
        }
    }

    /// Closes what a replica's session left open: leases, requests in flight and waiting ones.
    fn close(&mut self, replica: ReplicaId) {
        let open: Vec<_> = self.leases.keys().copied().collect();
        for holder in open.into_iter().filter(|(holder, _)| *holder == replica) {
            self.release(holder, LeaseOutcome::Kept);
        }
        self.users.close(replica);
    }

    fn follow(&mut self, change: registry::SlotChange) {
        match change {
            registry::SlotChange::None => {}
            registry::SlotChange::Resized(slot, capacity) => {
                self.caches.entry(slot).or_default().resize(capacity);
            }
            registry::SlotChange::Begun(slot, capacity) => {
                self.leases.retain(|_, lease| lease.backend.slot.0 != slot);
                self.caches.insert(slot, ModelCache::new(capacity));
            }
            registry::SlotChange::Gone(slot) => {
                self.leases.retain(|_, lease| lease.backend.slot.0 != slot);
                self.caches.remove(&slot);
            }
        }
        self.bound_untold();
    }

    /// Sets the assumed capacity of backends whose capacity is unknown.
    fn bound_untold(&mut self) {
        let (slots, each) = self.registry.untold();
        for slot in slots {
            self.caches.entry(slot).or_default().resize(Some(each));
        }
    }

    fn unfollow(&mut self, backend: BackendRef) {
        if self.registry.is_live(backend) {
            self.caches.entry(backend.slot.0).or_default().is_followed = false;
        }
    }

    /// Returns the prices of tokens.
    #[must_use]
    pub fn prices(&self) -> FairnessSettings {
        self.prices
    }

    /// Returns whether the model follows the leases and blocks of a backend.
    #[must_use]
    pub fn follows(&self, backend: BackendRef) -> bool {
        self.caches
            .get(&backend.slot.0)
            .is_none_or(|cache| cache.is_followed)
    }
}
