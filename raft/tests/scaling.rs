//! Clusters that grow and shrink automatically: learners are promoted, members leave for good or
//! are removed while absent, and removed members return with their old store.

use std::time::Duration;

use crate::common::{Cluster, PATIENCE, Seat, refused};
use futures_util::future::join_all;
use raft::{Promotion, Replica, ReplicaOptions, Role, Status};

fn promoting(options: &mut ReplicaOptions) {
    options.promotion = Some(Promotion {
        after: Duration::from_millis(200),
        voters_max: 5,
    });
}

fn voters(status: &Status) -> Vec<u8> {
    let voters = status.members.iter().filter(|(_, it)| it.is_voter);
    voters.map(|(id, _)| *id).collect()
}

/// Adds a replica that joins by itself.
async fn join(cluster: &mut Cluster, id: u8) {
    let mut seat = Seat::new(id, cluster.join());
    promoting(&mut seat.options);
    seat.start().await;
    cluster.seats.push(seat);
}

async fn vote(cluster: &Cluster, expected: &[u8]) {
    for seat in cluster.seats.iter().filter(|seat| seat.is_running()) {
        let id = seat.options.id;
        if expected.contains(&id) {
            let what = format!("{expected:?} vote");
            seat.wait(&what, |status| voters(status) == expected).await;
        }
    }
}

/// Removes `replica` from its cluster. Retries while it must stay, because a new leader has not
/// received responses yet.
fn leave(replica: &Replica, voters_min: usize) -> impl Future<Output = ()> + use<> {
    let replica = replica.clone();
    async move {
        while let Err(error) = replica.leave(voters_min).await {
            assert!(error.to_string().contains("stays"), "{error}");
            tokio::task::yield_now().await;
        }
    }
}

/// Founds a cluster of three voters that grows to five.
async fn five() -> Cluster {
    let mut cluster = Cluster::found_with(3, promoting).await;
    join(&mut cluster, 4).await;
    let fourth = cluster.seat(4);
    fourth.wait("a learner", |status| status.caught_up).await;
    join(&mut cluster, 5).await;
    vote(&cluster, &[1, 2, 3, 4, 5]).await;
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learners_are_promoted_in_pairs_and_leave_again() {
    let mut cluster = five().await;
    let committed = cluster.seats[4].propose("of five").await;
    cluster.agree(committed.index).await;
    // The leader is among those that leave.
    cluster.seats[0]
        .replica()
        .transfer_leader(Some(5))
        .await
        .unwrap();
    let going = [5, 4].map(|id| leave(cluster.seat(id).replica(), 3));
    tokio::time::timeout(PATIENCE, join_all(going))
        .await
        .unwrap();
    cluster.seat(4).shutdown().await;
    cluster.seat(5).shutdown().await;
    vote(&cluster, &[1, 2, 3]).await;
    let committed = cluster.seats[0].propose("of three").await;
    cluster.agree(committed.index).await;

    // With their old stores: they are admitted again and get votes.
    for id in [4, 5] {
        let seat = cluster.seat(id);
        seat.start().await;
        seat.wait("removed", |status| status.is_removed).await;
        seat.replica().rejoin().await.unwrap();
        seat.wait("a member again", |status| {
            !status.is_removed && status.caught_up && status.has_quorum
        })
        .await;
    }
    vote(&cluster, &[1, 2, 3, 4, 5]).await;
    let committed = cluster.seats[3].propose("of five again").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_needed_for_the_quorum_may_not_leave() {
    let mut cluster = Cluster::found_with(3, promoting).await;
    let leader = cluster.leader().await;
    let other = leader % 3 + 1;
    let replica = cluster.seat(other).replica().clone();
    let why = refused(replica.leave(3).await);
    assert!(
        why.contains("2 voters would be left, but at least 3"),
        "{why}"
    );
    let why = refused(replica.rejoin().await);
    assert_eq!(why, "this replica was not removed");
    let leads = cluster.seat(leader).replica().clone();
    let seat = cluster.seat(leader);
    seat.wait("all are connected", |status| {
        status.members.values().all(|it| it.is_connected)
    })
    .await;
    let why = refused(leads.remove_absent(other, 1).await);
    assert!(why.contains("runs at"), "{why}");

    // One member is gone. If another left, only one of the two others would respond.
    let third = other % 3 + 1;
    let third = if third == leader {
        third % 3 + 1
    } else {
        third
    };
    cluster.seat(third).crash().await;
    let seat = cluster.seat(leader);
    seat.wait("a voter is gone", |status| {
        status.has_quorum && !status.members[&third].is_connected
    })
    .await;
    let why = refused(replica.leave(1).await);
    assert!(why.contains("respond"), "{why}");
    let why = refused(replica.remove_absent(third, 1).await);
    assert!(why.contains("not the leader"), "{why}");
    let why = refused(leads.remove_absent(third, 3).await);
    assert!(why.contains("at least 3"), "{why}");
    let removed = async {
        // Refused until the last call of the crashed member is old enough.
        while leads.remove_absent(third, 2).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, removed).await.unwrap();
    let seat = cluster.seat(third);
    seat.start().await;
    seat.wait("removed", |status| status.role == Role::Removed)
        .await;
    seat.replica().rejoin().await.unwrap();
    vote(&cluster, &[1, 2, 3]).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fourth_replica_stays_a_learner() {
    let mut cluster = Cluster::found_with(3, promoting).await;
    join(&mut cluster, 4).await;
    let fourth = cluster.seat(4);
    fourth.wait("a learner", |status| status.caught_up).await;
    // A member that leaves makes room for it.
    let leader = cluster.leader().await;
    let gone = leader % 3 + 1;
    let going = leave(cluster.seat(gone).replica(), 2);
    tokio::time::timeout(PATIENCE, going).await.unwrap();
    cluster.seat(gone).shutdown().await;
    let mut expected: Vec<u8> = (1..=4).filter(|id| *id != gone).collect();
    expected.sort_unstable();
    vote(&cluster, &expected).await;
    cluster.shutdown().await;
}
