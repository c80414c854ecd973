//! What only a look inside a replica can bring about.

use std::collections::BTreeSet;

use openraft::ChangeMembers;
use tokio::net::TcpListener;

use crate::error::ChangeError;
use crate::replica::Replica;
use crate::status::Role;
use crate::toy;
use crate::types::Metrics;
use crate::wire::proto::change_request::Change;
use crate::wire::{self, proto};

/// Two replicas, of which the first leads.
async fn two_led_by_the_first() -> (Replica, Replica) {
    let (one, two) = (
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    );
    let peers = [&one, &two].map(|listener| listener.local_addr().unwrap().to_string());
    let (one, _first) = toy::replica(1, one, peers.to_vec()).await;
    let (two, _second) = toy::replica(2, two, peers.to_vec()).await;
    let mut status = one.watch();
    let led = status.wait_for(|status| status.leader.is_some() && status.caught_up);
    led.await.unwrap();
    one.transfer_leader(Some(1)).await.unwrap();
    status
        .wait_for(|status| status.role == Role::Leader && status.caught_up)
        .await
        .unwrap();
    (one, two)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_voters_left_halfway_is_finished() {
    let (one, two) = two_led_by_the_first().await;
    let mut status = one.watch();

    // The first step, by a call that is gone before the second.
    let changing = one
        .inner
        .raft
        .change_membership(ChangeMembers::RemoveVoters(BTreeSet::from([2])), false);
    let mut metrics = one.inner.raft.metrics();
    let began = async {
        let is_joint = |metrics: &Metrics| {
            let membership = metrics.membership_config.membership();
            membership.get_joint_config().len() > 1
        };
        while !is_joint(&metrics.borrow_and_update()) {
            metrics.changed().await.unwrap();
        }
    };
    tokio::select! {
        biased;
        _ = began => {}
        _ = changing => panic!("both steps at once"),
    }
    let finished = status.wait_for(|status| !status.members.contains_key(&2));
    let patience = std::time::Duration::from_secs(30);
    let finished = tokio::time::timeout(patience, finished).await;
    assert!(finished.is_ok(), "the old voters still count");
    drop(finished);
    one.shutdown().await;
    two.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_removed_member_told_before_does_not_bring_it_back() {
    let (one, two) = two_led_by_the_first().await;
    let mut told = one.inner.node(2).unwrap();
    told.labels.insert("moved".to_owned(), "yes".to_owned());
    let change = || {
        let member = Some(wire::member(2, &told));
        Change::Describe(proto::Describe { member })
    };

    one.inner.change(change()).await.unwrap();
    assert_eq!(one.inner.node(2).unwrap().labels, told.labels);
    one.remove(2).await.unwrap();
    let late = one.inner.change(change()).await;
    assert!(
        matches!(&late, Err(ChangeError::Refused(why)) if why == "replica 2 is no member"),
        "{late:?}"
    );
    assert!(!one.status().members.contains_key(&2));
    one.shutdown().await;
    two.shutdown().await;
}
