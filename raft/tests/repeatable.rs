//! A run on one thread, with simulated time, disks and network, is repeatable.

use std::time::Duration;

use crate::common::PATIENCE;
use crate::common::world::{World, simulate, start, wait, within_ms};
use raft::{MemoryDisk, random};
use tokio::time::sleep;

/// Proposes commands while leaders crash and restart, then waits until all replicas agree. Returns
/// the trace.
async fn run() -> Vec<String> {
    let world = World::new();
    let disks: Vec<MemoryDisk> = (0..3)
        .map(|_| MemoryDisk::with_sync(|| within_ms(8)))
        .collect();
    let mut replicas = Vec::new();
    for (id, disk) in (1..).zip(&disks) {
        replicas.push(start(&world, id, 3, disk).await);
    }
    for round in 0..5 {
        for (replica, _) in &replicas {
            wait(replica, |status| {
                status.leader.is_some() && status.caught_up
            })
            .await;
        }
        let leader = usize::from(
            wait(&replicas[0].0, |s| s.leader.is_some())
                .await
                .leader
                .unwrap(),
        );
        let survivor = replicas[leader % 3].0.clone();
        let proposing = tokio::spawn(async move {
            for number in 0..30 {
                let command = format!("{round} {number}").into_bytes();
                // A command that was lost with its leader does not matter.
                survivor.propose(command, Duration::from_secs(2)).await.ok();
            }
        });
        sleep(within_ms(300)).await;
        replicas[leader - 1].0.crash().await;
        disks[leader - 1].crash(|unsynced| random::draw() as usize % (unsynced + 1));
        sleep(within_ms(1000)).await;
        replicas[leader - 1] = start(&world, leader as u8, 3, &disks[leader - 1]).await;
        proposing.await.unwrap();
    }
    let (first, _) = &replicas[0];
    let last = first.propose(b"last".to_vec(), PATIENCE).await.unwrap();
    let mut journals = Vec::new();
    for (replica, journal) in &replicas {
        wait(replica, |status| status.applied >= last.index).await;
        journals.push(journal.commands());
    }
    assert!(journals[0].len() > 20, "{journals:?}");
    assert_eq!(journals[0], journals[1]);
    assert_eq!(journals[0], journals[2]);
    for (replica, _) in &replicas {
        replica.shutdown().await;
    }
    world.trace()
}

fn trace_of(seed: u64) -> Vec<String> {
    simulate(seed, run())
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let [one, other] = [1, 2].map(|seed| {
        let first = trace_of(seed);
        let again = trace_of(seed);
        for (number, (one, other)) in first.iter().zip(&again).enumerate() {
            assert_eq!(one, other, "seed {seed}, line {number}");
        }
        assert_eq!(first.len(), again.len(), "seed {seed}");
        first
    });
    assert_ne!(one, other, "a seed decides");
}
