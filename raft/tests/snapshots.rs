//! Snapshots: by entries and by bytes, installed on lagging replicas, damaged.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Cluster, PATIENCE, Seat, refused};
use raft::{ProposeError, Role, StartError};

fn snapshot_files(seat: &Seat) -> Vec<PathBuf> {
    let folder = seat.folder.path().join("raft/snapshots");
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x20;
    fs::write(path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_behind_the_log_gets_a_snapshot() {
    let mut cluster = Cluster::found_with(3, |options| options.snapshot_every_entries = 20).await;
    let leader = cluster.leader().await;
    let late = leader % 3 + 1;
    cluster.seat(late).crash().await;
    let mut last = 0;
    for number in 0..100 {
        // Larger than a chunk in total.
        let command = format!("{number} {}", "x".repeat(8000));
        last = cluster.seat(leader).propose(&command).await.index;
    }
    let status = cluster
        .seat(leader)
        .wait("purged", |status| status.purged > 60)
        .await;
    assert!(status.snapshot.is_some());
    cluster.seat(late).start().await;
    let status = cluster
        .seat(late)
        .wait("caught up", |status| status.applied >= last)
        .await;
    assert!(status.snapshot.is_some());
    cluster.agree(last).await;

    // It restarts from the received snapshot.
    cluster.seat(late).crash().await;
    cluster.seat(late).start().await;
    cluster
        .seat(late)
        .wait("restored", |status| status.applied >= last)
        .await;
    cluster.agree(last).await;
    assert_eq!(snapshot_files(cluster.seat(late)).len(), 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_learner_gets_a_snapshot() {
    let mut cluster = Cluster::found_with(1, |options| options.snapshot_every_entries = 10).await;
    let mut last = 0;
    for number in 0..50 {
        last = cluster.seats[0].propose(&number.to_string()).await.index;
    }
    cluster.seats[0]
        .wait("purged", |status| status.purged > 30)
        .await;
    let mut joiner = Seat::new(2, cluster.join());
    joiner.start().await;
    joiner
        .wait("caught up", |status| {
            status.caught_up && status.applied >= last
        })
        .await;
    cluster.seats.push(joiner);
    cluster.agree(last).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_bytes_trigger_a_snapshot() {
    let mut cluster =
        Cluster::found_with(1, |options| options.snapshot_every_bytes = 100_000).await;
    for _ in 0..12 {
        cluster.seats[0].propose(&"x".repeat(10_000)).await;
    }
    cluster.seats[0]
        .wait("a snapshot", |status| status.snapshot.is_some())
        .await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_snapshot_is_named_at_start() {
    let mut cluster = Cluster::found(1).await;
    cluster.seats[0].propose("command").await;
    let index = cluster.seats[0].replica().snapshot().await.unwrap();
    assert!(index >= 3, "{index}");
    let after = cluster.seats[0].propose("after the snapshot").await;
    cluster.shutdown().await;

    let seat = &mut cluster.seats[0];
    let file = snapshot_files(seat).pop().unwrap();
    let end = fs::read(&file).unwrap().len();
    flip(&file, end - 30);
    match seat.try_start().await {
        Err(StartError::Damaged { path, offset, .. }) => {
            assert_eq!(path, file.display().to_string());
            assert!(offset > 0 && offset < end as u64);
        }
        other => panic!("{other:?}"),
    }
    flip(&file, end - 30);
    seat.start().await;
    seat.wait("all of it", |status| status.applied >= after.index)
        .await;
    assert!(seat.journal.contains(b"after the snapshot"));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_snapshot_is_detected_at_start() {
    let mut cluster = Cluster::found_with(1, |options| options.snapshot_every_entries = 10).await;
    for number in 0..50 {
        cluster.seats[0].propose(&number.to_string()).await;
    }
    cluster.seats[0]
        .wait("purged", |status| status.purged > 30)
        .await;
    cluster.shutdown().await;
    let seat = &mut cluster.seats[0];
    for file in snapshot_files(seat) {
        fs::remove_file(file).unwrap();
    }
    // The first start has released the store.
    for _ in 0..2 {
        let started = seat.try_start().await;
        assert!(
            matches!(started, Err(StartError::Damaged { .. })),
            "{started:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_committed_unreadable_command_stops_the_replica() {
    let mut cluster = Cluster::found(1).await;
    cluster.seats[0].propose("good").await;
    let replica = cluster.seats[0].replica().clone();
    let error = replica
        .propose(b"poison".to_vec(), PATIENCE)
        .await
        .unwrap_err();
    assert!(matches!(error, ProposeError::Unknown(_)), "{error}");
    let status = cluster.seats[0]
        .wait("stopped", |status| status.role == Role::Stopped)
        .await;
    let fault = status.fault.unwrap();
    assert!(fault.contains("cannot decode"), "{fault}");
    let error = replica
        .propose(b"more".to_vec(), PATIENCE)
        .await
        .unwrap_err();
    assert!(matches!(error, ProposeError::Stopped(_)), "{error}");
    assert!(
        cluster.seats[0].journal.contains(b"good"),
        "what was applied stays"
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_snapshot_is_retried_later() {
    let mut cluster = Cluster::found(1).await;
    let seat = &cluster.seats[0];
    seat.propose("before").await;
    let folder = seat.folder.path().join("raft/snapshots");
    let away = seat.folder.path().join("away");
    fs::rename(&folder, &away).unwrap();
    refused(seat.replica().snapshot().await);
    let committed = seat.propose("the log goes on").await;
    assert_eq!(seat.replica().status().fault, None);
    fs::rename(&away, &folder).unwrap();
    let written = |status: &raft::Status| status.snapshot >= Some(committed.index);
    seat.wait("a snapshot of now", written).await;
    assert_eq!(snapshot_files(seat).len(), 1);
    cluster.shutdown().await;
    cluster.seats[0].start().await;
    assert!(cluster.seats[0].journal.contains(b"the log goes on"));
    cluster.shutdown().await;
}
