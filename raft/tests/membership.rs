//! Joining, promotion, removal, moving, and refusals.

use std::collections::BTreeMap;

use crate::common::{Cluster, Seat, bootstrap, refused};
use raft::{Formation, PeerState, Peers, Role, StartError};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joining_replica_learns_is_promoted_and_removed() {
    let mut cluster = Cluster::found(3).await;
    for number in 0..20 {
        cluster.seats[0].propose(&number.to_string()).await;
    }
    let mut joiner = Seat::new(4, cluster.join());
    joiner.start().await;
    let status = joiner
        .wait("caught up as a learner", |status| status.caught_up)
        .await;
    assert_eq!(status.role, Role::Learner);
    assert!(!status.members[&4].is_voter);
    let committed = joiner.propose("through a learner").await;
    cluster.seats.push(joiner);
    cluster.agree(committed.index).await;

    let asked = cluster.seats[1].replica().clone();
    asked.promote(4).await.unwrap();
    for seat in &cluster.seats {
        seat.wait("four voters", |status| {
            status.members.get(&4).is_some_and(|m| m.is_voter)
        })
        .await;
    }
    refused(asked.promote(4).await);

    asked.remove(4).await.unwrap();
    cluster.seats[0]
        .wait("gone", |status| !status.members.contains_key(&4))
        .await;
    let knows = |status: &raft::Status| status.is_removed && status.role == Role::Removed;
    cluster.seat(4).wait("it knows", knows).await;
    assert!(!cluster.seats[0].replica().status().is_removed);
    refused(asked.remove(4).await);
    cluster.seats[0].propose("without it").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_removes_itself_hands_over_first() {
    let mut cluster = Cluster::found(3).await;
    let leader = cluster.leader().await;
    cluster.seat(leader).replica().remove(leader).await.unwrap();
    let other = leader % 3 + 1;
    let status = cluster
        .seat(other)
        .wait("removed", |status| {
            !status.members.contains_key(&leader) && status.leader.is_some_and(|l| l != leader)
        })
        .await;
    assert_eq!(status.members.len(), 2);
    cluster.seat(other).propose("two are enough").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_lost_its_store_is_refused_under_its_old_id() {
    let mut cluster = Cluster::found(3).await;
    let committed = cluster.seats[0].propose("kept").await;
    cluster.agree(committed.index).await;
    let leader = cluster.leader().await;
    let lost = leader % 3 + 1;
    let in_use = raft::set_store_aside(cluster.seat(lost).folder.path()).unwrap_err();
    assert_eq!(in_use.kind(), std::io::ErrorKind::ResourceBusy);
    cluster.seat(lost).crash().await;
    let aside = raft::set_store_aside(cluster.seat(lost).folder.path()).unwrap();
    assert!(aside.is_some());
    cluster.seat(lost).start().await;
    // The others continue without it, and it never rejoins by itself.
    for number in 0..20 {
        cluster.seat(leader).propose(&number.to_string()).await;
    }
    assert_eq!(cluster.seat(lost).replica().status().role, Role::Forming);
    assert!(cluster.seat(lost).journal.commands().is_empty());

    // Under a new id it is admitted, and gets a vote because a founder is missing.
    cluster.seat(leader).replica().remove(lost).await.unwrap();
    cluster.seat(lost).crash().await;
    raft::set_store_aside(cluster.seat(lost).folder.path()).unwrap();
    let seat = cluster.seat(lost);
    seat.options.id = 9;
    seat.start().await;
    seat.wait("a voter", |status| {
        status.members.get(&9).is_some_and(|m| m.is_voter)
    })
    .await;
    let committed = cluster.seat(leader).propose("three again").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_lost_its_store_rejoins_under_its_id() {
    let mut cluster = Cluster::found_with(3, |options| options.replaces_lost = true).await;
    for number in 0..20 {
        cluster.seats[0].propose(&number.to_string()).await;
    }
    // Replace each store in turn, the leader's too: in the end no founder has its first store.
    for lost in 1..=3 {
        cluster.seat(lost).crash().await;
        let store = cluster.seat(lost).folder.path().to_path_buf();
        let aside = raft::set_store_aside(&store).unwrap().unwrap();
        cluster.seat(lost).start().await;
        let seat = cluster.seat(lost);
        let is_voter = |status: &raft::Status| {
            let member = status.members.get(&lost);
            member.is_some_and(|member| member.is_voter) && status.caught_up
        };
        seat.wait("a voter again", is_voter).await;
        let committed = seat.propose("from its new store").await;
        cluster.agree(committed.index).await;

        // With its old store the replica is not a member.
        let seat = cluster.seat(lost);
        seat.crash().await;
        let new = raft::set_store_aside(&store).unwrap().unwrap();
        swap(&aside, &store);
        let seat = cluster.seat(lost);
        seat.start().await;
        seat.wait("removed", |status| status.is_removed).await;
        seat.crash().await;
        raft::set_store_aside(&store).unwrap();
        swap(&new, &store);
        cluster.seat(lost).start().await;
    }
    let committed = cluster.seats[1].propose("with three voters").await;
    cluster.agree(committed.index).await;
    // Without replica 1, a quorum needs the new stores of both others.
    cluster.seat(1).crash().await;
    let committed = cluster.replaced(1).await.propose("with two of them").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

/// Moves a store that was set aside back into `data_dir`.
fn swap(aside: &std::path::Path, data_dir: &std::path::Path) {
    std::fs::rename(aside, data_dir.join("raft")).expect("a store that was set aside");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_replica_is_not_replaced() {
    let mut cluster = Cluster::found_with(3, |options| options.replaces_lost = true).await;
    let leader = cluster.leader().await;
    for taken in [leader, leader % 3 + 1] {
        let mut second = Seat::new(taken, cluster.seats[0].options.formation.clone());
        second.start().await;
        let status = second
            .wait("refused", |status| {
                let why = status.unjoined.as_deref();
                why.is_some_and(|why| why.contains("runs at"))
            })
            .await;
        assert_eq!(status.role, Role::Forming);
        second.crash().await;
    }
    let committed = cluster.seats[0].propose("the three of before").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_replica_announces_its_new_address() {
    let mut cluster = Cluster::found(3).await;
    let moved = cluster.leader().await % 3 + 1;
    cluster.seat(moved).crash().await;
    let seat = cluster.seat(moved);
    seat.options.advertise = String::new();
    seat.options.labels = BTreeMap::from([("version".to_owned(), "2".to_owned())]);
    seat.start().await;
    let address = seat.options.advertise.clone();
    for seat in &cluster.seats {
        seat.wait("the new address", |status| {
            let member = &status.members[&moved];
            member.address == address && member.labels["version"] == "2"
        })
        .await;
    }
    let committed = cluster.seat(moved).propose("from there").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_another_cluster_or_a_taken_id_is_refused() {
    let mut ours = Cluster::found(1).await;
    let mut theirs = Cluster::found(1).await;
    let address = theirs.seats[0].options.advertise.clone();
    let replica = ours.seats[0].replica();
    refused(replica.add_learner(2, address.clone()).await);
    refused(replica.add_learner(1, address).await);
    refused(replica.remove(1).await);
    ours.shutdown().await;
    theirs.shutdown().await;
}

/// Returns the id of a replica's cluster, formatted for display.
fn cluster_id(seat: &Seat) -> String {
    let id = seat.replica().status().cluster_id;
    format!("{:032x}", id.expect("it is in a cluster"))
}

/// Founds a cluster of replica `id` alone, at `address` if it is not empty.
async fn cluster_of_one(id: u8, address: &str) -> Seat {
    let mut seat = Seat::new(id, bootstrap(&[], 1));
    seat.options.advertise = address.to_owned();
    seat.start().await;
    seat.wait("a cluster", |status| status.caught_up).await;
    seat
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_of_another_cluster_is_refused_with_both_ids() {
    let mut ours = Cluster::found(1).await;
    let mut theirs = cluster_of_one(2, "").await;
    let address = theirs.options.advertise.clone();
    let why = refused(ours.seats[0].replica().add_learner(2, address).await);
    // A stranger learns half of an id.
    assert!(why.contains(&cluster_id(&theirs)[..16]), "{why}");
    assert!(!why.contains(&cluster_id(&theirs)), "{why}");
    assert!(why.contains(&cluster_id(&ours.seats[0])), "{why}");
    theirs.shutdown().await;
    ours.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_reports_a_foreign_cluster_with_both_ids() {
    let mut cluster = Cluster::found(2).await;
    cluster.seats[0].propose("agreed").await;
    let address = cluster.seats[1].options.advertise.clone();
    cluster.seats[1].crash().await;
    let mut stranger = cluster_of_one(2, &address).await;
    let ids = [
        cluster_id(&cluster.seats[0]),
        cluster_id(&stranger)[..16].to_owned(),
    ];
    cluster.seats[0]
        .wait("both ids", |status| {
            status.peers.iter().any(|peer| {
                peer.state == PeerState::OtherCluster
                    && ids.iter().all(|id| peer.detail.contains(id))
            })
        })
        .await;
    stranger.shutdown().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_does_not_start_under_another_cluster_name() {
    let mut cluster = Cluster::found(1).await;
    let id = cluster_id(&cluster.seats[0]);
    cluster.shutdown().await;
    let seat = &mut cluster.seats[0];
    let name = std::mem::replace(&mut seat.options.cluster_name, "staging".to_owned());
    let Err(StartError::WrongStore(why)) = seat.try_start().await else {
        panic!("it starts under another name");
    };
    for told in [&name, "\"staging\"", &id] {
        assert!(why.contains(told), "{why}");
    }
    seat.options.cluster_name = name;
    seat.start().await;
    cluster.seats[0].wait("as before", |it| it.caught_up).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_adds_a_waiting_replica() {
    let mut cluster = Cluster::found(1).await;
    let waiting = Seat::waiting(2).await;
    let address = waiting.options.advertise.clone();
    cluster.seats[0]
        .replica()
        .add_learner(2, address)
        .await
        .unwrap();
    waiting
        .wait("a learner", |status| {
            status.role == Role::Learner && status.caught_up
        })
        .await;
    cluster.seats.push(waiting);
    let committed = cluster.seats[1].propose("from the learner").await;
    cluster.agree(committed.index).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_serves_only_its_own_replica() {
    let mut cluster = Cluster::found(1).await;
    cluster.shutdown().await;
    let seat = &mut cluster.seats[0];
    seat.options.id = 2;
    assert!(matches!(
        seat.try_start().await,
        Err(StartError::WrongStore(_))
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_of_another_cluster_name_is_refused_with_both() {
    let mut cluster = Cluster::found(1).await;
    let mut other = Seat::new(2, Formation::Join(Peers::List(Vec::new())));
    other.options.cluster_name = "staging".to_owned();
    other.start().await;
    let address = other.options.advertise.clone();
    let why = refused(cluster.seats[0].replica().add_learner(2, address).await);
    let both = "meant for cluster \"quorate\", this replica is configured for \"staging\"";
    assert!(why.ends_with(both), "{why}");
    other.shutdown().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_with_a_copied_config_stays_a_learner() {
    let mut cluster = Cluster::found(3).await;
    let formation = cluster.seats[0].options.formation.clone();
    // Its config wants three voters, and only two are left.
    let leader = cluster.leader().await;
    let gone = leader % 3 + 1;
    let remover = cluster.seat(leader).replica().clone();
    remover.remove(gone).await.unwrap();
    let mut copy = Seat::new(9, formation);
    copy.start().await;
    copy.wait("a learner that has caught up", |status| status.caught_up)
        .await;
    let status = cluster.seat(leader).replica().status();
    assert!(!status.members[&9].is_voter);
    // An operator can.
    remover.promote(9).await.unwrap();
    copy.wait("a voter", |status| status.members[&9].is_voter)
        .await;
    copy.shutdown().await;
    cluster.shutdown().await;
}
