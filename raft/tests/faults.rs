//! Broken disks, dead peers, and founders that do not all start at once.

use std::sync::Arc;

use crate::common::{Cluster, PATIENCE, Seat, bootstrap, listeners};
use raft::{DiskShortage, MemoryDisk, ProposeError, Role, StartError, Storage};
use tokio::net::TcpListener;

/// Starts a cluster that has committed a command; returns it and its disks by id.
async fn on_memory(size: u8) -> (Cluster, Vec<MemoryDisk>) {
    let disks: Vec<_> = (0..size).map(|_| MemoryDisk::new()).collect();
    let cluster = Cluster::found_with(size, |options| {
        let disk = disks[usize::from(options.id) - 1].clone();
        options.storage = Storage::Memory(disk);
    })
    .await;
    cluster.seats[0].propose("before").await;
    (cluster, disks)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_with_a_failed_disk_steps_aside() {
    let (mut cluster, disks) = on_memory(3).await;
    let leader = cluster.leader().await;
    let disk = &disks[usize::from(leader) - 1];
    disk.fail(Some("disk full".to_owned()));
    let broken = cluster.seat(leader).replica().clone();
    let error = broken
        .propose(b"lost?".to_vec(), PATIENCE)
        .await
        .unwrap_err();
    assert!(
        matches!(error, ProposeError::Unknown(_) | ProposeError::Stopped(_)),
        "{error}"
    );
    let status = cluster
        .seat(leader)
        .wait("a fault", |status| status.fault.is_some())
        .await;
    assert_eq!(status.role, Role::Stopped);
    assert!(
        cluster.seat(leader).journal.contains(b"before"),
        "what was applied stays"
    );

    cluster.replaced(leader).await.propose("without it").await;
    // Repaired and started again it catches up.
    disk.fail(None);
    cluster.seat(leader).crash().await;
    cluster.seat(leader).start().await;
    let committed = cluster.seat(leader).propose("again").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_with_a_full_disk_pauses_and_recovers() {
    let (mut cluster, disks) = on_memory(3).await;
    let leader = cluster.leader().await;
    let disk = &disks[usize::from(leader) - 1];
    disk.run_short(Some(DiskShortage::Space));
    let full = cluster.seat(leader).replica().clone();
    let learnt = tokio::spawn(async move {
        loop {
            // Like the outbox: propose the same bytes again until the outcome is known.
            match full.propose(b"learnt meanwhile".to_vec(), PATIENCE).await {
                Ok(committed) => return committed,
                Err(ProposeError::Unknown(_) | ProposeError::NoLeader) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    let waiting = cluster.seat(leader);
    let waiting = waiting.wait("it waits", |status| status.waiting.is_some());
    assert_eq!(waiting.await.fault, None);
    cluster.replaced(leader).await.propose("without it").await;

    disk.run_short(None);
    learnt.await.unwrap();
    let back = cluster.seat(leader);
    let status = back
        .wait("it is back", |status| {
            status.waiting.is_none() && status.has_quorum
        })
        .await;
    assert_eq!(status.fault, None);
    let committed = back.propose("again").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_on_a_full_disk_can_be_stopped() {
    let (mut cluster, disks) = on_memory(1).await;
    disks[0].run_short(Some(DiskShortage::Space));
    let replica = cluster.seats[0].replica().clone();
    let proposed = tokio::spawn(async move { replica.propose(b"x".to_vec(), PATIENCE).await });
    cluster.seats[0]
        .wait("it waits", |status| status.waiting.is_some())
        .await;
    cluster.shutdown().await;
    assert!(proposed.await.unwrap().is_err());
    disks[0].run_short(None);
    cluster.seats[0].start().await;
    cluster.seats[0].propose("after").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_waits_for_descriptors() {
    let (mut cluster, disks) = on_memory(1).await;
    disks[0].run_short(Some(DiskShortage::Descriptors));
    let replica = cluster.seats[0].replica().clone();
    assert!(replica.snapshot().await.is_err());
    cluster.seats[0].propose("the log goes on").await;
    disks[0].run_short(None);
    cluster.seats[0]
        .wait("a snapshot", |status| status.snapshot.is_some())
        .await;
    assert_eq!(replica.status().fault, None);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_peer_causes_few_connection_attempts() {
    let mut cluster = Cluster::found(3).await;
    let leader = cluster.leader().await;
    cluster.seat(leader % 3 + 1).crash().await;
    let replica = cluster.seat(leader).replica().clone();
    let before = replica.connect_attempts();
    let began = std::time::Instant::now();
    for number in 0..500 {
        replica
            .propose(format!("{number}").into_bytes(), PATIENCE)
            .await
            .unwrap();
    }
    let attempts = replica.connect_attempts() - before;
    // Two links, retried first after 20 ms and later every 500 ms: never per append or heartbeat.
    let allowed = 16 + 2 * u64::try_from(began.elapsed().as_millis() / 500).unwrap();
    assert!(
        attempts <= allowed,
        "{attempts} attempts, at most {allowed}"
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_peers_than_founders_form_one_cluster() {
    let (listeners, peers) = listeners(5).await;
    let mut cluster = Cluster { seats: Vec::new() };
    // The highest ids first: they see each other before the lowest comes.
    for (id, listener) in (1..=5).zip(listeners).collect::<Vec<_>>().into_iter().rev() {
        let mut seat = Seat::new(id, bootstrap(&peers, 3));
        seat.start_on(listener).await.unwrap();
        cluster.seats.push(seat);
    }
    for seat in &cluster.seats {
        let status = seat
            .wait("five members", |status| {
                status.members.len() == 5 && status.caught_up
            })
            .await;
        assert_eq!(
            status
                .members
                .values()
                .filter(|member| member.is_voter)
                .count(),
            3
        );
    }
    let committed = cluster.seats[4].propose("one").await;
    cluster.agree(committed.index).await;
    let commands = cluster.seats[0].journal.commands();
    assert_eq!(
        commands
            .values()
            .filter(|command| *command == b"first")
            .count(),
        1
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_founder_that_crashes_while_founding_resumes() {
    let (listeners, peers) = listeners(3).await;
    let mut cluster = Cluster { seats: Vec::new() };
    for (id, listener) in (1..=3).zip(listeners) {
        let mut seat = Seat::new(id, bootstrap(&peers, 3));
        seat.start_on(listener).await.unwrap();
        cluster.seats.push(seat);
    }
    // However far it had got, it returns to the same cluster or founds it.
    cluster.seat(1).crash().await;
    cluster.seat(1).start().await;
    for seat in &cluster.seats {
        seat.wait("founded", |status| {
            status.members.len() == 3 && status.caught_up
        })
        .await;
    }
    let committed = cluster.seat(1).propose("one").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversize_command_enters_no_log() {
    let mut cluster = Cluster::found(1).await;
    let before = cluster.seats[0].propose("small").await.index;
    let command = vec![0; raft::COMMAND_BYTES_MAX + 1];
    let bytes = command.len();
    let error = cluster.seats[0]
        .replica()
        .propose(command, PATIENCE)
        .await
        .unwrap_err();
    assert_eq!(error, ProposeError::TooLarge { bytes });
    let largest = vec![0; raft::COMMAND_BYTES_MAX];
    let index = cluster.seats[0]
        .replica()
        .propose(largest, PATIENCE)
        .await
        .unwrap()
        .index;
    assert_eq!(index, before + 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_on_the_same_store_is_refused_harmlessly() {
    let mut cluster = Cluster::found(1).await;
    cluster.seats[0].propose("before").await;
    let seat = &cluster.seats[0];
    // As if a snapshot were being written.
    let unfinished = seat.folder.path().join("raft/snapshots/7.unfinished");
    std::fs::write(&unfinished, b"half").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let second = raft::Replica::start(
        seat.options.clone(),
        Arc::new(raft::Tcp::new(listener).unwrap()),
        Box::<crate::common::Journal>::default(),
        seat.mailbox.clone(),
    )
    .await;
    match second.map(|_| ()) {
        Err(StartError::Io { path, source }) => {
            assert_eq!(source.kind(), std::io::ErrorKind::ResourceBusy);
            assert!(path.ends_with("raft/lock"), "{}", path.display());
        }
        other => panic!("{other:?}"),
    }
    assert!(unfinished.exists());
    seat.propose("after").await;
    cluster.shutdown().await;
    // The first replica has released it, although a handle may be left.
    cluster.seats[0].start().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn founders_must_be_a_majority_of_the_peers() {
    for (peers, expect, is_right) in [(1, 0, false), (4, 2, false), (3, 2, true), (1, 1, true)] {
        let peers = (1..=peers).map(|port| format!("127.0.0.1:{port}"));
        let peers: Vec<_> = peers.collect();
        let mut seat = Seat::new(1, bootstrap(&peers, expect));
        match seat.try_start().await {
            Ok(()) => assert!(is_right, "{expect} started"),
            Err(StartError::Options(why)) => assert!(!is_right, "{why}"),
            Err(other) => panic!("{other}"),
        }
        seat.crash().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_voter_is_its_own_quorum() {
    let mut cluster = Cluster::found(1).await;
    let seat = &cluster.seats[0];
    // A lease starts when an election ends: without its own vote the quorum would be lost by then.
    let lease = seat.options.election_timeout.end;
    let lost = tokio::time::timeout(lease * 3, async {
        let mut status = seat.replica().watch();
        status.wait_for(|status| !status.has_quorum).await.unwrap();
    });
    assert!(lost.await.is_err(), "quorum lost");
    cluster.shutdown().await;
}
