//! Leadership when links are cut in one direction, machines are wrong and disks are slow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::world::{World, simulate, start, wait};
use crate::common::{Journal, PATIENCE, refused};
use raft::{MemoryDisk, ProposeError, Replica, Role};
use tokio::time::{MissedTickBehavior, interval};

/// Interval at which replicas exchange messages.
const TELL_EVERY: Duration = Duration::from_millis(100);

struct Cluster {
    world: World,
    replicas: Vec<(Replica, Journal)>,
    /// Sync time of every disk, in milliseconds.
    sync_ms: Arc<AtomicU64>,
}

impl Cluster {
    /// Starts replicas `1..=size` and waits until they have a leader.
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

    /// Returns the ids of the other replicas.
    fn others(&self, id: u8) -> Vec<u8> {
        (1..=self.replicas.len() as u8)
            .filter(|other| *other != id)
            .collect()
    }

    /// Waits until `id` follows a leader other than `old` that has a quorum; returns that leader.
    async fn leads_after(&self, old: u8, id: u8) -> u8 {
        let status = wait(self.replica(id), |status| {
            status.leader.is_some_and(|leader| leader != old) && status.has_quorum
        });
        status.await.leader.unwrap()
    }

    async fn propose(&self, id: u8) -> Result<raft::Committed, ProposeError> {
        self.replica(id)
            .propose(b"command".to_vec(), PATIENCE)
            .await
    }
}

/// Runs `test` with a simulated cluster of `size` replicas and the id of its leader.
fn led(seed: u64, size: u8, test: impl AsyncFnOnce(&Cluster, u8)) {
    simulate(seed, async {
        let cluster = Cluster::of(size).await;
        let leader = cluster.replica(1).status().leader.unwrap();
        test(&cluster, leader).await;
        for (replica, _) in &cluster.replicas {
            replica.crash().await;
        }
    });
}

/// Makes a replica send messages to its peers until it stops.
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
fn a_leader_without_a_quorum_stops_sending_heartbeats() {
    led(1, 4, async |cluster, old| {
        let others = cluster.others(old);
        // One of the four still hears the leader, and its vote is needed to elect another.
        for other in &others[1..] {
            cluster.world.cut(old, *other);
            cluster.world.cut(*other, old);
        }
        for other in &others[1..] {
            cluster.leads_after(old, *other).await;
        }
        cluster.propose(others[1]).await.unwrap();
    });
}

#[test]
fn an_unreachable_leader_hands_over() {
    led(3, 3, async |cluster, old| {
        cluster.world.deafen(old);
        for other in cluster.others(old) {
            cluster.leads_after(old, other).await;
            cluster.propose(other).await.unwrap();
        }
    });
}

#[test]
fn the_replica_between_two_disconnected_ones_leads() {
    led(4, 3, async |cluster, old| {
        let [between, far] = cluster.others(old)[..] else {
            panic!("three replicas");
        };
        cluster.world.cut(old, far);
        cluster.world.cut(far, old);
        assert_eq!(cluster.leads_after(old, far).await, between);
        cluster.propose(far).await.unwrap();
    });
}

#[test]
fn a_leader_reachable_by_all_stays() {
    led(5, 3, async |cluster, _| {
        let term = cluster.replica(1).status().term;
        tokio::time::sleep(PATIENCE).await;
        assert_eq!(cluster.replica(1).status().term, term);
    });
}

#[test]
fn a_replica_with_suspect_state_does_not_lead() {
    led(6, 3, async |cluster, old| {
        let [doubtful, sound] = cluster.others(old)[..] else {
            panic!("three replicas");
        };
        cluster.replica(doubtful).set_state_suspect(true);
        // The leader learns it from the next response; until then the replica refuses.
        tokio::time::sleep(TELL_EVERY).await;
        refused(cluster.replica(old).transfer_leader(Some(doubtful)).await);
        assert_eq!(
            cluster.replica(old).transfer_leader(None).await.unwrap(),
            sound
        );
        cluster.replica(sound).crash().await;
        assert_eq!(cluster.leads_after(sound, doubtful).await, old);
        cluster.replica(doubtful).set_state_suspect(false);
        cluster.replica(old).crash().await;
    });
}

#[test]
fn a_leader_with_suspect_state_hands_over() {
    led(7, 3, async |cluster, old| {
        cluster.replica(old).set_state_suspect(true);
        for other in cluster.others(old) {
            cluster.leads_after(old, other).await;
        }
        cluster.propose(old).await.unwrap();
    });
}

#[test]
fn slow_disks_delay_elections_but_do_not_prevent_them() {
    led(8, 3, async |cluster, old| {
        cluster.sync_ms.store(250, Ordering::Relaxed);
        cluster.replica(old).crash().await;
        for other in cluster.others(old) {
            cluster.leads_after(old, other).await;
        }
    });
}

#[test]
fn an_isolated_replica_knows_the_age_of_its_state() {
    led(9, 3, async |cluster, leader| {
        let others = cluster.others(leader);
        let (cut, other) = (cluster.replica(others[0]), cluster.replica(others[1]));
        wait_until(|| cut.confirmed().is_some()).await;
        for far in [leader, others[1]] {
            cluster.world.cut(far, others[0]);
            cluster.world.cut(others[0], far);
        }
        wait(cut, |status| !status.has_quorum).await;
        // The isolated replica notices after a lease, and has heard nothing meanwhile.
        let lease = Duration::from_millis(300);
        let age = cut.confirmed().expect("it was told before").elapsed();
        assert!(age >= lease, "{age:?}");
        // For the others nothing has changed.
        for replica in [cluster.replica(leader), other] {
            let age = replica.confirmed().expect("it was told").elapsed();
            assert!(age < lease, "{age:?}");
        }
    });
}

/// Polls until `wish` holds. For conditions of which no status change gives notice.
async fn wait_until(wish: impl Fn() -> bool) {
    let mut ticks = interval(Duration::from_millis(10));
    while !wish() {
        ticks.tick().await;
    }
}
