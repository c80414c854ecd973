//! Membership of an epoch: the replicas that are heard, and the epoch that follows from them.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64;

use super::{Epoch, LOOK_MS_MAX, Run, SILENT_MS, ShareReport};
use crate::ids::ReplicaId;

/// Last report of one peer.
#[derive(Debug, Clone)]
struct HeardPeer {
    report: ShareReport,
    heard_ms: u64,
}

/// Peers that a replica hears, on a clock that stands still while the replica is suspended.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    awake_ms: u64,
    looked_ms: Option<u64>,
    peers: BTreeMap<ReplicaId, HeardPeer>,
    /// Other replicas of the cluster, with the time since which they are expected.
    expected: BTreeMap<ReplicaId, u64>,
}

impl Members {
    /// Returns the time that this replica was awake, in milliseconds.
    pub(super) fn awake_ms(&self) -> u64 {
        self.awake_ms
    }

    /// Updates the time and the other replicas of the cluster.
    pub(super) fn advance_time(&mut self, now_ms: u64, expected: &[ReplicaId]) {
        let passed = now_ms.saturating_sub(self.looked_ms.unwrap_or(now_ms));
        self.awake_ms += passed.min(LOOK_MS_MAX);
        self.looked_ms = Some(now_ms);
        self.expected.retain(|id, _| expected.contains(id));
        for id in expected {
            self.expected.entry(*id).or_insert(self.awake_ms);
        }
    }

    /// Whether this report is not newer than the last one of its session.
    pub(super) fn is_late(&self, peer: ReplicaId, report: &ShareReport) -> bool {
        self.peers.get(&peer).is_some_and(|known| {
            known.report.run.session == report.run.session && known.report.number >= report.number
        })
    }

    /// Records a peer's report in place of its previous one.
    pub(super) fn record_report(&mut self, peer: ReplicaId, report: ShareReport) {
        let heard_ms = self.awake_ms;
        self.peers.insert(peer, HeardPeer { report, heard_ms });
    }

    /// Forgets silent peers.
    pub(super) fn forget_silent(&mut self) {
        let awake_ms = self.awake_ms;
        self.peers.retain(|_, peer| is_heard(peer, awake_ms));
    }

    /// Returns the reports of the replicas that are heard here, by replica.
    pub(super) fn heard(&self) -> impl Iterator<Item = (ReplicaId, &ShareReport)> {
        let heard = self
            .peers
            .iter()
            .filter(|(_, peer)| is_heard(peer, self.awake_ms));
        heard.map(|(id, peer)| (*id, &peer.report))
    }

    /// Returns all replicas but `me` that are heard here, or by a replica that is heard here: one
    /// that only some members hear must not cause two epochs. `next` replaces its replica's
    /// previous report.
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
        let told = reports.iter().flat_map(|(_, it)| &it.heard);
        for (id, run) in told.filter(|(id, _)| *id != me && !direct.contains_key(id)) {
            let known = others.entry(*id).or_insert(*run);
            *known = (*known).max(*run);
        }
        others
    }

    /// Whether some replica of the cluster was not heard and has not had enough time for it.
    pub(super) fn lacks_any(&self) -> bool {
        self.expected.iter().any(|(id, since)| {
            !self.peers.contains_key(id) && self.awake_ms.saturating_sub(*since) <= SILENT_MS
        })
    }
}

fn is_heard(peer: &HeardPeer, awake_ms: u64) -> bool {
    awake_ms.saturating_sub(peer.heard_ms) <= SILENT_MS
}

/// Returns the epoch of these members.
pub(super) fn epoch_of(members: &BTreeMap<ReplicaId, Run>) -> Epoch {
    let mut bytes = Vec::with_capacity(members.len() * 17);
    for (id, run) in members {
        bytes.push(id.0);
        bytes.extend(run.session.0.to_le_bytes());
        bytes.extend(run.generation.to_le_bytes());
    }
    Epoch(xxh3_64(&bytes))
}
