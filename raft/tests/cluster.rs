//! Clusters on loopback: forming, proposing, failing over, restarting.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::{Cluster, PATIENCE};
use raft::{ProposeError, Role};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_form_a_cluster_that_accepts_commands_anywhere() {
    let mut cluster = Cluster::found(3).await;
    let ids: BTreeSet<_> = cluster
        .seats
        .iter()
        .map(|seat| seat.replica().status().cluster_id)
        .collect();
    assert_eq!(ids.len(), 1);
    assert!(ids.first().unwrap().is_some());

    let mut last = 0;
    for round in 0..5 {
        for seat in &cluster.seats {
            let command = format!("{round} from {}", seat.options.id);
            let committed = seat.propose(&command).await;
            assert_eq!(committed.reply, format!("ok {command}").as_bytes());
            assert!(committed.index > last, "{} after {last}", committed.index);
            last = committed.index;
        }
    }
    cluster.agree(last).await;
    let commands = cluster.seats[0].journal.commands();
    assert_eq!(commands.values().next().unwrap(), b"first");
    assert_eq!(
        commands
            .values()
            .filter(|command| *command == b"first")
            .count(),
        1
    );
    assert_eq!(commands.len(), 16);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crashed_leader_is_replaced_and_rejoins() {
    let mut cluster = Cluster::found(3).await;
    cluster.seats[0].propose("before").await;
    let leader = cluster.leader().await;
    cluster.seat(leader).crash().await;

    cluster.replaced(leader).await.propose("meanwhile").await;

    cluster.seat(leader).start().await;
    let back = cluster.seat(leader);
    let committed = back.propose("back").await;
    cluster.agree(committed.index).await;
    assert!(cluster.seats[0].journal.contains(b"meanwhile"));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_restart_keeps_every_command() {
    let mut cluster = Cluster::found(3).await;
    let mut last = 0;
    for number in 0..50 {
        last = cluster.seats[number % 3]
            .propose(&number.to_string())
            .await
            .index;
    }
    cluster.agree(last).await;
    let before = cluster.seats[0].journal.commands();
    for seat in &mut cluster.seats {
        seat.crash().await;
    }
    for seat in &mut cluster.seats {
        seat.start().await;
    }
    cluster.agree(last).await;
    assert_eq!(cluster.seats[0].journal.commands(), before);
    let committed = cluster.seats[2].propose("after").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_without_a_quorum_claims_no_leader_or_reads() {
    let mut cluster = Cluster::found(3).await;
    let leader = cluster.leader().await;
    for id in (1..=3).filter(|id| *id != leader) {
        cluster.seat(id).crash().await;
    }
    let alone = cluster.seat(leader);
    alone.wait("no quorum", |status| !status.has_quorum).await;
    let limit = Duration::from_millis(300);
    let error = alone
        .replica()
        .propose(b"lost?".to_vec(), limit)
        .await
        .unwrap_err();
    assert!(
        matches!(error, ProposeError::Unknown(_) | ProposeError::NoLeader),
        "{error}"
    );
    let error = alone.replica().read_barrier(limit).await.unwrap_err();
    assert_eq!(error, ProposeError::NoLeader);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_barrier_shows_commits_of_other_replicas() {
    let mut cluster = Cluster::found(3).await;
    for number in 0..20 {
        let command = format!("write {number}");
        let committed = cluster.seats[number % 3].propose(&command).await;
        for seat in &cluster.seats {
            let index = seat.replica().read_barrier(PATIENCE).await.unwrap();
            assert!(index >= committed.index);
            assert!(seat.journal.contains(command.as_bytes()));
        }
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_transfers_on_request_and_on_shutdown() {
    let mut cluster = Cluster::found(3).await;
    let first = cluster.leader().await;
    let target = first % 3 + 1;
    // Asked through a replica that does not lead.
    let asked = cluster.seat(target).replica().clone();
    assert_eq!(asked.transfer_leader(Some(target)).await.unwrap(), target);
    cluster
        .seat(target)
        .wait("leads", |status| status.role == Role::Leader)
        .await;

    cluster.seat(target).shutdown().await;
    cluster.replaced(target).await.propose("after").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_newest_message_reaches_every_peer_first() {
    let mut cluster = Cluster::found(3).await;
    for seat in &cluster.seats {
        seat.wait("connected", |status| {
            status.members.values().all(|m| m.is_connected)
        })
        .await;
    }
    for number in 0..100 {
        for seat in &cluster.seats {
            seat.replica().broadcast(format!("{number}").into());
        }
    }
    for to in &cluster.seats {
        for from in (1..=3).filter(|from| *from != to.options.id) {
            to.mailbox.wait_for(from, b"99").await;
        }
    }
    cluster.seat(2).crash().await;
    cluster.seats[0]
        .wait("lost", |status| {
            !status.members[&2].is_connected && status.members[&2].is_refusing
        })
        .await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_command_enters_no_log() {
    let mut cluster = Cluster::found(3).await;
    let before = cluster.seats[0].propose("good").await;
    for seat in &cluster.seats {
        let refused = seat.replica().propose(b"garbage".to_vec(), PATIENCE).await;
        let why = "garbage is no command".to_owned();
        assert_eq!(refused, Err(ProposeError::Refused(why)));
    }
    let after = cluster.seats[0].propose("better").await;
    assert_eq!(after.index, before.index + 1);
    cluster.shutdown().await;
}
