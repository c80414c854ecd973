//! Replays the log with the naive [`ReferenceModel`] and compares every state image with it.

use std::collections::{BTreeMap, BTreeSet};

use state::budgets::{BudgetPeriod, BudgetStatus};
use state::codec::decode_envelope;
use state::command::{Command, Envelope};
use state::ids::{BackendRef, LogIndex, UserKey};
use state::kv_events::KvMode;

use super::image::{BackendImage, StateImage, UserImage};
use super::model::users::ModelUser;
use super::model::{CommandEffect, ReferenceModel};
use super::observation::{Observation, ReplicaRun};

/// Result of replaying the log: effects, and differences between states and the model.
#[derive(Debug)]
pub struct ReplayComparison {
    /// Effect of every command by index, up to the first command that cannot be replayed.
    pub effects: BTreeMap<u64, CommandEffect>,
    /// Commands other than batches, by index. Batches make up most of the log, and no check needs
    /// them.
    pub commands: BTreeMap<u64, Envelope>,
    /// Registered backends after each change, by its index, each with whether it drains.
    pub backends: BTreeMap<u64, BTreeMap<BackendRef, bool>>,
    /// Differences between state images and the model.
    pub differences: Vec<Difference>,
    /// Number of comparisons of each part of the state.
    pub compared: BTreeMap<StatePart, u64>,
    /// Model after the last command that was replayed.
    pub model: ReferenceModel,
}

/// A part of the replicated state that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatePart {
    /// Replicated time.
    Time,
    /// Sessions and their sequence numbers.
    Sessions,
    /// Administrative settings, and the slots of backends.
    Settings,
    /// Counters, totals and requests of users.
    Users,
    /// Open leases.
    Leases,
    /// Owned blocks.
    Blocks,
    /// Positions in the streams of KV events.
    Streams,
    /// Values that are learned from engines' responses.
    Learnt,
}

/// A difference between a state image and the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Part of the state that differs.
    pub part: StatePart,
    /// Description of the state, its index, and the difference.
    pub detail: String,
}

impl ReplayComparison {
    pub(super) fn of(seen: &Observation) -> Self {
        let mut comparison = Self {
            effects: BTreeMap::new(),
            commands: BTreeMap::new(),
            backends: BTreeMap::from([(0, BTreeMap::new())]),
            differences: Vec::new(),
            compared: BTreeMap::new(),
            model: ReferenceModel::default(),
        };
        let mut images: BTreeMap<u64, Vec<(ReplicaRun, &StateImage)>> = BTreeMap::new();
        let at_rest = seen.at_rest.values().map(|it| (it.run, &*it.image));
        let images_seen = seen.images.iter().map(|(_, run, image)| (*run, &**image));
        for (run, image) in images_seen.chain(at_rest) {
            images.entry(image.index).or_default().push((run, image));
        }
        for (next, (index, entry)) in (1..).zip(&seen.log) {
            let command = entry.command.as_deref();
            let envelope = command.map(decode_envelope).transpose();
            // Other checks find missing or foreign entries; nothing after them can be replayed.
            let (true, Ok(envelope)) = (*index == next, envelope) else {
                break;
            };
            if let Some(envelope) = envelope {
                let effect = comparison.model.apply(LogIndex(*index), &envelope);
                comparison.effects.insert(*index, effect);
                comparison.note_backends(*index);
                if !matches!(envelope.command, Command::Batch { .. }) {
                    comparison.commands.insert(*index, envelope);
                }
            }
            if comparison.model.is_replaced {
                break;
            }
            for (run, image) in images.remove(index).unwrap_or_default() {
                comparison.compare(run, image);
            }
        }
        comparison
    }

    /// Returns the backends after all commands up to `index`, with whether each drains.
    #[must_use]
    pub fn backends_at(&self, index: LogIndex) -> &BTreeMap<BackendRef, bool> {
        let mut until = self.backends.range(..=index.0);
        let (_, backends) = until.next_back().expect("an entry stands at index 0");
        backends
    }

    fn note_backends(&mut self, index: u64) {
        let present = self.model.registry.backends.values();
        let present = present.map(|it| (it.handle, it.draining)).collect();
        let last = self.backends.last_key_value();
        if last.is_none_or(|(_, last)| *last != present) {
            self.backends.insert(index, present);
        }
    }

    fn compare(&mut self, run: ReplicaRun, image: &StateImage) {
        let mut look = ImageComparison {
            at: format!("{run}, index {}", image.index),
            image,
            model: &self.model,
            differences: &mut self.differences,
            compared: &mut self.compared,
        };
        look.time_and_sessions();
        look.settings();
        look.users();
        look.leases();
        look.blocks();
        look.streams();
        let (is, must) = (&image.ratios, &look.model.texts.ratios());
        look.same(StatePart::Learnt, "bytes per token", is, must);
        let (is, must) = (&image.block_sizes, &look.model.registry.block_sizes);
        look.same(StatePart::Learnt, "tokens per block", is, must);
    }
}

/// Comparison of one state image with the model.
struct ImageComparison<'a> {
    at: String,
    image: &'a StateImage,
    model: &'a ReferenceModel,
    differences: &'a mut Vec<Difference>,
    compared: &'a mut BTreeMap<StatePart, u64>,
}

impl ImageComparison<'_> {
    fn same<T: PartialEq + std::fmt::Debug>(
        &mut self,
        part: StatePart,
        what: &str,
        is: &T,
        must: &T,
    ) {
        *self.compared.entry(part).or_default() += 1;
        if is != must {
            let detail = format!("{}: {what} is {is:?}, the log says {must:?}", self.at);
            self.differences.push(Difference { part, detail });
        }
    }

    fn time_and_sessions(&mut self) {
        let (image, model) = (self.image, self.model);
        self.same(
            StatePart::Time,
            "the time",
            &image.now_ms,
            &model.time.now_ms,
        );
        let must: BTreeMap<_, _> = model
            .sessions
            .iter()
            .map(|(replica, session, seqs)| (replica, (session, seqs)))
            .collect();
        let replicas: BTreeSet<_> = must.keys().chain(image.sessions.keys()).collect();
        for replica in replicas {
            let what = format!("the run of replica {replica}");
            let (is, must) = (image.sessions.get(replica), must.get(replica));
            self.same(StatePart::Sessions, &what, &is, &must);
        }
    }

    fn settings(&mut self) {
        let (image, model) = (self.image, self.model);
        for (key, is) in &image.registers {
            let must = model.registers.value(key);
            self.same(StatePart::Settings, &format!("{key:?}"), is, &must);
        }
        let is: BTreeMap<&String, _> = image
            .backends
            .iter()
            .map(|(name, it)| (name, (it.handle, it.draining)))
            .collect();
        let must: BTreeMap<&String, _> = model
            .registry
            .backends
            .iter()
            .map(|(name, it)| (name, (it.handle, it.draining)))
            .collect();
        self.same(StatePart::Settings, "the registry", &is, &must);
        let (is, must) = (&image.secrets, &model.secrets);
        self.same(StatePart::Settings, "whose secrets there are", is, must);
    }

    fn users(&mut self) {
        let (image, model) = (self.image, self.model);
        let users: BTreeSet<&UserKey> =
            image.users.keys().chain(model.users.users.keys()).collect();
        for key in users {
            let is = image.users.get(key).copied();
            let user = model.users.users.get(key);
            // The budget is compared by today's usage.
            let budget = is.map(|it| it.budget).unwrap_or_default();
            let must = user.map(|user| image_of(user, model.users.weight_milli(user), budget));
            self.same(StatePart::Users, &format!("user {key}"), &is, &must);
            let today = budget.left(BudgetPeriod::Day, model.users.stamp_ms, 0);
            let is = today.map(|left| (left.used, left.limit));
            let must = user.and_then(|user| model.users.today(user));
            self.same(
                StatePart::Users,
                &format!("today of user {key}"),
                &is,
                &must,
            );
        }
        let rows: BTreeSet<_> = image.usage.keys().chain(model.usage.rows.keys()).collect();
        for row in rows {
            let (is, must) = (image.usage.get(row), model.usage.rows.get(row));
            self.same(
                StatePart::Users,
                &format!("the usage of {row:?}"),
                &is,
                &must,
            );
        }
        let must = model.users.virtual_time();
        self.same(StatePart::Users, "virtual time", &image.virtual_time, &must);
    }

    /// Compares the leases of backends whose leases the model follows.
    fn leases(&mut self) {
        let (image, model) = (self.image, self.model);
        let holders: BTreeSet<_> = image.leases.keys().chain(model.leases.keys()).collect();
        for holder in holders {
            let is = image.leases.get(holder).map(|it| (it.backend, it.tip));
            let must = model.leases.get(holder).map(|it| (it.backend, it.tip));
            let mut backends = is.iter().chain(&must).map(|(backend, _)| *backend);
            if backends.all(|backend| model.follows(backend)) {
                self.same(
                    StatePart::Leases,
                    &format!("the lease of {holder:?}"),
                    &is,
                    &must,
                );
            }
        }
    }

    /// Compares the owned blocks of backends whose leases the model follows.
    fn blocks(&mut self) {
        for (name, backend) in &self.image.backends {
            let Some(cache) = self.model.caches.get(&backend.handle.slot.0) else {
                continue;
            };
            if cache.is_followed {
                self.blocks_of(name, backend, cache);
            }
        }
    }

    /// Checks that exact backends have applied every message that a reader reported.
    fn streams(&mut self) {
        for (name, backend) in &self.image.backends {
            let exact = backend.kv.as_ref().filter(|kv| kv.mode == KvMode::Exact);
            for position in exact.iter().flat_map(|kv| &kv.positions) {
                let (rank, publisher) = (position.rank, position.publisher);
                let streams = &self.model.streams;
                let newest = streams.newest(backend.handle, rank, publisher);
                let Some(newest) = newest else { continue };
                let applied = position.last.map(|(seq, _)| seq);
                let what = format!(
                    "that rank {rank} of {name}, called exact at {applied:?}, has message {newest}"
                );
                self.same(StatePart::Streams, &what, &(applied >= Some(newest)), &true);
            }
        }
    }

    fn blocks_of(&mut self, name: &str, is: &BackendImage, must: &super::model::cache::ModelCache) {
        let hashes: BTreeSet<_> = is.owned.keys().chain(must.blocks.keys()).collect();
        *self.compared.entry(StatePart::Blocks).or_default() += 1;
        for hash in hashes {
            let is = is.owned.get(hash);
            let is = is.map(|it| (it.parent, u32::from(it.leases)));
            let must = must.blocks.get(hash).map(|it| (it.parent, it.leases));
            if is != must {
                let detail = format!(
                    "{}: block {hash} of {name} (the one before it, leases) is {is:?}, the log says \
                     {must:?}",
                    self.at
                );
                let part = StatePart::Blocks;
                self.differences.push(Difference { part, detail });
                return;
            }
        }
    }
}

fn image_of(user: &ModelUser, weight_milli: u32, budget: BudgetStatus) -> UserImage {
    UserImage {
        counter_milli_tokens: user.counter(),
        weight_milli,
        total: user.total,
        in_flight: user.in_flight.values().sum(),
        waiting: user.waiting.values().sum(),
        budget,
    }
}
