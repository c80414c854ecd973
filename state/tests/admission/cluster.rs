//! Replicas with a state each, fed from one log that each of them applies with a delay.

use std::collections::BTreeMap;
use std::sync::Arc;

use state::admission::{PendingCharges, Pricing};
use state::command::{Charge, Command, Envelope, Item, Lane, Origin};
use state::ids::{LogIndex, ReplicaId, SessionId, UserKey};
use state::{RouterState, StateView};

use crate::common;

/// Start of the simulation.
pub(crate) const START_MS: u64 = 1_700_000_000_000;
/// Time between two batches of one replica.
const FLUSH_MS: u64 = 20;

/// One replica: its state, and its pending charges.
pub(crate) struct Replica {
    pub(crate) id: ReplicaId,
    pub(crate) state: RouterState,
    pub(crate) view: Arc<StateView>,
    pending: PendingCharges,
    charges: BTreeMap<UserKey, Charge>,
    /// Its proposed batch that it has not applied yet.
    outstanding: Option<Vec<Charge>>,
    seq: u64,
    applied: usize,
    /// Delay between the commit of an entry and its application here.
    lag_ms: u64,
}

/// Several replicas and their log.
pub(crate) struct Cluster {
    pub(crate) now_ms: u64,
    pub(crate) replicas: Vec<Replica>,
    pub(crate) pricing: Pricing,
    log: Vec<(u64, Envelope)>,
}

impl Replica {
    fn new(id: u8, lag_ms: u64) -> Self {
        let state = RouterState::new();
        let view = state.view();
        Self {
            id: ReplicaId(id),
            state,
            view,
            pending: PendingCharges::default(),
            charges: BTreeMap::new(),
            outstanding: None,
            seq: 0,
            applied: 0,
            lag_ms,
        }
    }

    pub(crate) fn charge(&mut self, charge: &Charge, pricing: &Pricing) {
        self.pending.add(charge, pricing);
        self.charges.entry(charge.user).or_default().add(charge);
    }

    pub(crate) fn pending(&self) -> &PendingCharges {
        &self.pending
    }

    fn flush(&mut self, now_ms: u64) -> Option<Envelope> {
        let is_due = now_ms.is_multiple_of(FLUSH_MS) && self.outstanding.is_none();
        if !is_due || self.charges.is_empty() {
            return None;
        }
        let charges: Vec<Charge> = std::mem::take(&mut self.charges).into_values().collect();
        let items = charges.iter().copied().map(Item::Charge).collect();
        self.outstanding = Some(charges);
        self.seq += 1;
        Some(Envelope {
            origin: Origin {
                replica: self.id,
                session: SessionId(1),
                lane: Lane::Outbox,
                seq: self.seq,
            },
            proposed_at_ms: now_ms,
            command: common::batch(items),
        })
    }
}

impl Cluster {
    /// Creates a cluster in which replica `i` applies an entry `lags_ms[i]` after it was proposed.
    pub(crate) fn new(lags_ms: &[u64], commands: Vec<Command>) -> Self {
        let mut cluster = Self {
            now_ms: START_MS,
            replicas: (1..)
                .zip(lags_ms)
                .map(|(id, lag_ms)| Replica::new(id, *lag_ms))
                .collect(),
            pricing: Pricing::default(),
            log: Vec::new(),
        };
        for (seq, command) in (1..).zip(commands) {
            let mut envelope = common::envelope(9, 1, Lane::Admin, seq, command);
            envelope.proposed_at_ms = START_MS;
            cluster.log.push((START_MS - 1000, envelope));
        }
        cluster.deliver();
        cluster
    }

    /// Advances time by a millisecond.
    pub(crate) fn tick(&mut self) {
        self.now_ms += 1;
        for replica in &mut self.replicas {
            if let Some(envelope) = replica.flush(self.now_ms) {
                self.log.push((self.now_ms, envelope));
            }
        }
        self.deliver();
    }

    fn deliver(&mut self) {
        for replica in &mut self.replicas {
            while let Some((proposed_ms, envelope)) = self.log.get(replica.applied)
                && proposed_ms + replica.lag_ms <= self.now_ms
            {
                replica.applied += 1;
                let index = LogIndex(replica.applied as u64);
                replica.state.apply(index, envelope.clone());
                if envelope.origin.replica == replica.id {
                    for charge in replica.outstanding.take().into_iter().flatten() {
                        replica.pending.settle(&charge, &self.pricing);
                    }
                }
            }
        }
    }
}
