//! Builds envelopes from the outbox's queue.

use std::collections::BTreeMap;
use std::ops::Bound;

use state::command::{Charge, Command, EngineFacts, Envelope, Item, Lane, Origin};
use state::ids::{AttemptId, UserKey};
use tokio::time::Instant;

use super::charges::ChargeKey;
use super::steps::{LeaseStep, LeaseStepKind};
use super::{Outbox, OutstandingEnvelope, QueuedSize};

/// Maximum sum of the upper bounds of a batch's item sizes, in bytes; leaves room for the envelope.
pub(super) const BATCH_BYTES_MAX: usize = (64 << 10) - 256;
/// Upper bound of the size of an encoded charge, in bytes.
pub(super) const CHARGE_BYTES: usize = 120;
/// Upper bound of the size of an encoded charge of a stream, in bytes.
const STREAM_CHARGE_BYTES: usize = 184;
/// Upper bound of the size of an encoded definition of a user or source without its name, or of engine facts
/// without their models, in bytes.
const FRAME_BYTES: usize = 48;

/// An envelope under construction.
#[derive(Default)]
struct BatchBuilder {
    items: Vec<Item>,
    size: QueuedSize,
}

impl BatchBuilder {
    fn has_room(&self, bytes: usize) -> bool {
        self.size.bytes + bytes <= BATCH_BYTES_MAX
    }

    fn put(&mut self, item: Item, bytes: usize) {
        self.items.push(item);
        self.size.add(bytes);
    }
}

impl Outbox {
    /// Whether the queue can fill an envelope.
    pub fn is_full(&self) -> bool {
        let queued_bytes = self.queued.bytes + self.notes_bytes;
        queued_bytes + self.charges.len() * CHARGE_BYTES >= BATCH_BYTES_MAX
    }

    /// Builds the next envelope if none is outstanding and the queue is not empty. Users, charges
    /// and engine facts come first, then notes and lease steps. Facts precede steps because leases
    /// on a restarted engine are void.
    pub fn cut(&mut self, now: Instant, unix_ms: u64) -> Option<&Envelope> {
        if self.outstanding.is_some() || self.is_empty() {
            return None;
        }
        self.sweep();
        let mut cut = BatchBuilder::default();
        self.cut_users(&mut cut);
        self.cut_facts(&mut cut);
        self.cut_notes(&mut cut);
        let steps = self.cut_steps(&mut cut);
        // The envelope is empty only if all queued items were dropped.
        if cut.items.is_empty() && steps.is_empty() {
            return None;
        }
        self.last_seq += 1;
        let origin = Origin {
            replica: self.replica,
            session: self.session,
            lane: Lane::Outbox,
            seq: self.last_seq,
        };
        let mut charges: BTreeMap<UserKey, Charge> = BTreeMap::new();
        for item in &cut.items {
            let charge = match item {
                Item::Charge(charge) => charge,
                Item::ChargeStream(item) => &item.charge,
                _ => continue,
            };
            charges.entry(charge.user).or_default().add(charge);
        }
        let Self {
            commits,
            charges: queued,
            ..
        } = self;
        commits.leave(|charged| ChargeKey::are_queued(queued, charged));
        let base = steps
            .iter()
            .map(|step| step.attempt)
            .min()
            .unwrap_or_default();
        let mut acquires = Vec::new();
        let mut runs = Vec::new();
        for step in steps {
            if let Some(run) = step.run() {
                runs.push((step.backend, run.clone()));
            }
            if matches!(step.what, LeaseStepKind::Acquire { .. }) {
                acquires.push(step.attempt);
            }
            cut.items.push(step.into_item(base));
        }
        let command = Command::Batch {
            base_attempt: base,
            items: cut.items,
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: unix_ms,
            command,
        };
        let outstanding = OutstandingEnvelope {
            envelope,
            size: cut.size,
            acquires,
            runs,
            charges,
            since: now,
        };
        Some(&self.outstanding.insert(outstanding).envelope)
    }

    fn cut_users(&mut self, cut: &mut BatchBuilder) {
        let half = BATCH_BYTES_MAX / 2;
        while cut.size.bytes < half
            && let Some((key, name)) = self.names.pop_front()
        {
            let bytes = FRAME_BYTES + name.len();
            cut.put(Item::DefineUser { key, name }, bytes);
        }
        while cut.size.bytes < half
            && let Some((_, source)) = self.sources.pop_first()
        {
            let bytes = FRAME_BYTES + source.model.len();
            cut.put(Item::DefineSource(source), bytes);
        }
        while cut.size.bytes < half
            && let Some(charge) = self.next_charge()
        {
            let bytes = match charge {
                Item::ChargeStream(_) => STREAM_CHARGE_BYTES,
                _ => CHARGE_BYTES,
            };
            cut.put(charge, bytes);
        }
    }

    pub(super) fn next_charge(&mut self) -> Option<Item> {
        let after = (Bound::Excluded(self.last_charged), Bound::Unbounded);
        let next = self.charges.range(after).next();
        let (&key, _) = next.or_else(|| self.charges.first_key_value())?;
        self.last_charged = key;
        self.charges
            .remove(&key)
            .map(|queued| queued.into_item(key))
    }

    fn cut_steps(&mut self, cut: &mut BatchBuilder) -> Vec<LeaseStep> {
        let mut steps = Vec::new();
        let (mut least, mut most) = (u64::MAX, 0);
        while let Some(step) = self.steps.front() {
            let bytes = step.bytes();
            least = least.min(step.attempt.0);
            most = most.max(step.attempt.0);
            if !cut.has_room(bytes) || most - least > u64::from(u32::MAX) {
                break;
            }
            let Some(step) = self.steps.pop_front() else {
                break;
            };
            self.queued.take(bytes);
            cut.size.add(bytes);
            if let Some(lease) = self.leases.get_mut(&step.attempt) {
                lease.queued.take(bytes);
                lease.is_sent = true;
            }
            steps.push(step);
        }
        let Self { unsent, leases, .. } = self;
        let is_over = |attempt: &mut _| leases.get(attempt).is_none_or(|lease| lease.is_sent);
        while unsent.pop_front_if(is_over).is_some() {}
        steps
    }

    fn cut_facts(&mut self, cut: &mut BatchBuilder) {
        while let Some(entry) = self.facts.first_entry() {
            let bytes = facts_bytes(entry.get());
            if bytes > BATCH_BYTES_MAX {
                entry.remove();
                self.dropped += 1;
                continue;
            }
            // The first facts are always taken, so that large facts cannot get stuck.
            if !cut.has_room(bytes) || cut.size.bytes > BATCH_BYTES_MAX / 2 {
                break;
            }
            let (backend, facts) = entry.remove_entry();
            cut.put(Item::ObserveEngine { backend, facts }, bytes);
        }
    }
}

impl Outbox {
    /// Adds notes until three quarters of the envelope are used. The rest is for lease steps.
    fn cut_notes(&mut self, cut: &mut BatchBuilder) {
        let most = BATCH_BYTES_MAX / 4 * 3;
        while let Some((item, bytes)) = self
            .notes
            .pop_front_if(|(_, bytes)| cut.items.is_empty() || cut.size.bytes + *bytes <= most)
        {
            self.notes_bytes -= bytes;
            cut.put(item, bytes);
        }
    }
}

fn facts_bytes(facts: &EngineFacts) -> usize {
    let models = facts.models.iter().flatten();
    FRAME_BYTES + models.map(|model| model.len() + 9).sum::<usize>()
}

impl LeaseStep {
    fn into_item(self, base: AttemptId) -> Item {
        let offset = self.attempt.0 - base.0;
        let attempt = u32::try_from(offset).expect("a batch is cut before offsets exceed 32 bits");
        let backend = self.backend;
        match self.what {
            LeaseStepKind::Acquire { tip, run } => Item::Acquire {
                attempt,
                backend,
                tip,
                new: run.blocks().to_vec(),
            },
            LeaseStepKind::Extend { run } => Item::Materialize {
                attempt,
                new: run.blocks().to_vec(),
            },
            LeaseStepKind::Release { outcome } => Item::Release { attempt, outcome },
        }
    }
}
