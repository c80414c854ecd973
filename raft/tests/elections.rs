//! Who leads when disks are slow.

#![allow(
    clippy::unwrap_used,
    reason = "these are tests, their helpers included"
)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::world::{World, simulate, start, wait};
use common::Journal;
use raft::{MemoryDisk, Replica, Role};
use tokio::time::{MissedTickBehavior, interval};

/// How often replicas tell each other something.
const TELL_EVERY: Duration = Duration::from_millis(100);

struct Cluster {
    world: World,
    replicas: Vec<(Replica, Journal)>,
    /// How long every disk takes to sync, milliseconds.
    sync_ms: Arc<AtomicU64>,
}

impl Cluster {
    /// Replicas `1..=size` that have a leader.
    async fn of(size: u8) -> Self {
        let (world, sync_ms) = (World::new(), Arc::new(AtomicU64::new(1)));
        let mut replicas = Vec::new();
        for id in 1..=size {
            let sync_ms = sync_ms.clone();
            let sync_time = move || Duration::from_millis(sync_ms.load(Ordering::Relaxed));
            let disk = MemoryDisk::with_sync(sync_time);
            let (replica, journal) = start(&world, id, size, &disk).await;
            tell(replica.clone());
            replicas.push((replica, journal));
        }
        let cluster = Self {
            world,
            replicas,
            sync_ms,
        };
        for id in 1..=size {
            let is_ready = |status: &raft::Status| {
                status.caught_up && status.has_quorum && status.members.len() == usize::from(size)
            };
            wait(cluster.replica(id), is_ready).await;
        }
        cluster
    }

    fn replica(&self, id: u8) -> &Replica {
        &self.replicas[usize::from(id) - 1].0
    }

    fn leader(&self) -> u8 {
        self.replica(1).status().leader.unwrap()
    }

    /// The others, by id.
    fn others(&self, id: u8) -> Vec<u8> {
        (1..=self.replicas.len() as u8)
            .filter(|other| *other != id)
            .collect()
    }

    /// Waits until `id` follows or is another leader than `old`, one with a quorum; answers which.
    async fn leads_after(&self, old: u8, id: u8) -> u8 {
        let status = wait(self.replica(id), |status| {
            status.leader.is_some_and(|leader| leader != old) && status.has_quorum
        });
        status.await.leader.unwrap()
    }

    async fn shutdown(&self) {
        for (replica, _) in &self.replicas {
            replica.crash().await;
        }
    }
}

/// Has a replica send messages for ever.
fn tell(replica: Replica) {
    tokio::spawn(async move {
        let mut ticks = interval(TELL_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while replica.status().role != Role::Stopped {
            ticks.tick().await;
            replica.broadcast("message".into());
        }
    });
}

#[test]
fn disks_slower_than_election_timeouts_delay_an_election_and_do_not_prevent_it() {
    simulate(8, async {
        let cluster = Cluster::of(3).await;
        let old = cluster.leader();
        cluster.sync_ms.store(250, Ordering::Relaxed);
        cluster.replica(old).crash().await;
        for other in cluster.others(old) {
            cluster.leads_after(old, other).await;
        }
        cluster.shutdown().await;
    });
}
