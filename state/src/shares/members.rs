//! Membership of an epoch: the replicas that are heard, and the epoch that follows from them.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64;

use super::{Epoch, LOOK_MS_MAX, Run, SILENT_MS, ShareReport};
use crate::ids::ReplicaId;

/// Last report of one peer, and when it arrived.
#[derive(Debug, Clone)]
struct HeardPeer {
    report: ShareReport,
    heard_ms: u64,
}

/// Peers that a replica hears, timed by a clock that stands still while the replica is suspended.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    awake_ms: u64,
    looked_ms: Option<u64>,
    peers: BTreeMap<ReplicaId, HeardPeer>,
    /// Other replicas of the cluster, with the awake time in milliseconds since they are expected.
    expected: BTreeMap<ReplicaId, u64>,
}

impl Members {
    /// Returns the time during which this replica was awake, in milliseconds.
    pub(super) fn awake_ms(&self) -> u64 {
        self.awake_ms
    }

    /// Updates the time and the set of other replicas in the cluster.
    pub(super) fn advance_time(&mut self, now_ms: u64, expected: &[ReplicaId]) {
        let passed = now_ms.saturating_sub(self.looked_ms.unwrap_or(now_ms));
        self.awake_ms += passed.min(LOOK_MS_MAX);
        self.looked_ms = Some(now_ms);
        self.expected.retain(|id, _| expected.contains(id));
        for id in expected {
            self.expected.entry(*id).or_insert(self.awake_ms);
        }
    }

    /// Whether `report` belongs to the same session as the last one of `peer` and is not newer.
    pub(super) fn is_late(&self, peer: ReplicaId, report: &ShareReport) -> bool {
        self.peers.get(&peer).is_some_and(|known| {
            known.report.run.session == report.run.session && known.report.number >= report.number
        })
    }

    /// Records a report of `peer` in place of its previous one.
    pub(super) fn record_report(&mut self, peer: ReplicaId, report: ShareReport) {
        let heard_ms = self.awake_ms;
        self.peers.insert(peer, HeardPeer { report, heard_ms });
    }

    /// Forgets peers that have been silent for longer than [`SILENT_MS`](super::SILENT_MS).
    pub(super) fn forget_silent(&mut self) {
        let awake_ms = self.awake_ms;
        self.peers.retain(|_, peer| is_heard(peer, awake_ms));
    }

    /// Iterates over the last reports of the replicas that are heard here, ascending by replica.
    pub(super) fn heard(&self) -> impl Iterator<Item = (ReplicaId, &ShareReport)> {
        let heard = self
            .peers
            .iter()
            .filter(|(_, peer)| is_heard(peer, self.awake_ms));
        heard.map(|(id, peer)| (*id, &peer.report))
    }

    /// Returns all replicas except `me` that are heard here, or by a replica that is heard here. A
    /// replica that only some members hear must not cause two epochs. `next`, if given, replaces
    /// its replica's previous report.
    pub(super) fn others(
        &self,
        me: ReplicaId,
        next: Option<(ReplicaId, &ShareReport)>,
    ) -> BTreeMap<ReplicaId, Run> {
        let known = self
            .heard()
            .filter(|(id, _)| next.is_none_or(|(next, _)| next != *id));
        let reports: Vec<(ReplicaId, &ShareReport)> = known.chain(next).collect();
        let direct: BTreeMap<ReplicaId, Run> =
            reports.iter().map(|(id, it)| (*id, it.run)).collect();
        let mut others = direct.clone();
        let reported = reports.iter().flat_map(|(_, it)| &it.heard);
        for (id, run) in reported.filter(|(id, _)| *id != me && !direct.contains_key(id)) {
            let known = others.entry(*id).or_insert(*run);
            *known = (*known).max(*run);
        }
        others
    }

    /// Whether some expected replica was never heard, but may still be heard in time.
    pub(super) fn lacks_any(&self) -> bool {
        self.expected.iter().any(|(id, since)| {
            !self.peers.contains_key(id) && self.awake_ms.saturating_sub(*since) <= SILENT_MS
        })
    }
}

fn is_heard(peer: &HeardPeer, awake_ms: u64) -> bool {
    awake_ms.saturating_sub(peer.heard_ms) <= SILENT_MS
}

/// Returns the epoch that consists of `members`.
pub(super) fn epoch_of(members: &BTreeMap<ReplicaId, Run>) -> Epoch {
    let mut bytes = Vec::with_capacity(members.len() * 17);
    for (id, run) in members {
        bytes.push(id.0);
        bytes.extend(run.session.0.to_le_bytes());
        bytes.extend(run.generation.to_le_bytes());
    }
    Epoch(xxh3_64(&bytes))
}
