//! A machine that went wrong although its log is correct installs another replica's state.

use crate::common::{Cluster, refused};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_state_is_rebuilt_from_a_peer_under_load() {
    let mut cluster = Cluster::found(3).await;
    let leader = cluster.leader().await;
    let wrong = leader % 3 + 1;
    for number in 0..50 {
        cluster
            .seat(leader)
            .propose(&format!("before {number}"))
            .await;
    }
    let last = cluster.seat(leader).propose("the last before").await.index;
    cluster.agree(last).await;
    // Make one replica's state wrong, and its newest snapshot too.
    cluster.seat(wrong).journal.spoil(last);
    cluster.seat(wrong).replica().snapshot().await.unwrap();
    assert!(!cluster.seat(wrong).journal.contains(b"the last before"));

    let (writer, rebuilt) = (
        cluster.seat(leader).replica().clone(),
        cluster.seat(wrong).replica().clone(),
    );
    let load = async {
        let mut last = 0;
        for number in 0..100 {
            let command = format!("beside {number}").into_bytes();
            last = writer
                .propose(command, crate::common::PATIENCE)
                .await
                .unwrap()
                .index;
        }
        last
    };
    let (reached, last) = tokio::join!(rebuilt.rebuild(leader), load);
    assert!(reached.unwrap() > 50);
    cluster.agree(last).await;

    // Neither the old snapshot nor a replayed log bring the fault back.
    cluster.seat(wrong).crash().await;
    cluster.seat(wrong).start().await;
    let last = cluster.seat(leader).propose("after").await.index;
    cluster.agree(last).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_refuses_leaders_and_strangers() {
    let mut cluster = Cluster::found(2).await;
    let leader = cluster.leader().await;
    let follower = leader % 2 + 1;
    let why = refused(cluster.seat(leader).replica().rebuild(follower).await);
    assert_eq!(why, "a leader's state cannot be replaced");
    let why = refused(cluster.seat(follower).replica().rebuild(9).await);
    assert_eq!(why, "no replica has the id 9");
    cluster.shutdown().await;
}
