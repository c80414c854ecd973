//! Tests of cases that only code inside a replica can produce.

use std::collections::BTreeSet;

use futures_util::FutureExt as _;
use openraft::ChangeMembers;
use tokio::net::TcpListener;

use crate::replica::Replica;
use crate::status::Role;
use crate::testing;
use crate::types::{LogId, log_id};
use crate::wire::proto::change_request::Change;
use crate::wire::proto::change_response::Result as Outcome;
use crate::wire::{self, proto};

/// Starts two replicas, of which the first leads.
async fn two_led_by_the_first() -> (Replica, Replica) {
    let (one, two) = (
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    );
    let peers = [&one, &two].map(|listener| listener.local_addr().unwrap().to_string());
    let (one, _first) = testing::replica(1, one, peers.to_vec()).await;
    let (two, _second) = testing::replica(2, two, peers.to_vec()).await;
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

/// Store of a member in these tests.
const STORE: u64 = 4711;

impl Replica {
    /// Adds `id` as a learner that does not run. Returns the header that its calls would have.
    pub(crate) async fn let_in(&self, id: u64) -> proto::Header {
        let identity = &self.inner.links.identity;
        let node = crate::types::Node {
            address: "127.0.0.1:1".to_owned(),
            labels: [].into(),
            store: STORE,
            cluster: identity.cluster().unwrap(),
        };
        let members = ChangeMembers::AddNodes([(id, node)].into());
        let raft = &self.inner.raft;
        // On a busy machine this replica may just have lost its lease or leadership.
        while raft.change_membership(members.clone(), true).await.is_err() {
            self.transfer_leader(Some(self.inner.options.id)).await.ok();
        }
        let mut status = self.watch();
        let known = status.wait_for(|status| status.members.keys().any(|it| u64::from(*it) == id));
        known.await.unwrap();
        proto::Header {
            from: id,
            to: identity.id,
            to_store: identity.store,
            from_store: STORE,
            ..identity.header(0, 0)
        }
    }

    /// Returns the outcome of a change that `from` requests.
    async fn asked_by(&self, from: u64, change: Change) -> Outcome {
        let request = proto::ChangeRequest {
            from,
            from_store: STORE,
            change: Some(change),
            ..proto::ChangeRequest::default()
        };
        self.inner.pass_change(request).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learners_and_strangers_cannot_change_members_or_get_votes() {
    let (one, two) = two_led_by_the_first().await;
    one.let_in(7).await;
    let before = one.status().members;
    let node = one.inner.node(2).unwrap();
    let describe = |id, change: fn(&mut proto::Member)| {
        let mut member = wire::member(id, &node);
        change(&mut member);
        Change::Describe(proto::Describe {
            member: Some(member),
        })
    };
    let promote = |id, voters_below| Change::Promote(proto::Promote { id, voters_below });
    for (from, change, why) in [
        (9, promote(9, 5), "replica 9 is not a member"),
        (
            7,
            promote(7, 5),
            "is not among the peers in the leader's config",
        ),
        (7, promote(7, 0), "replica 7 is a learner: ask a voter"),
        (
            7,
            Change::Remove(proto::Remove {
                id: 2,
                voters_min: 0,
            }),
            "ask a voter",
        ),
        (
            7,
            Change::Transfer(proto::Transfer { to: 2 }),
            "ask a voter",
        ),
        (7, describe(2, |_| {}), "replica 7 claims to be replica 2"),
        (2, describe(2, |_| {}), "replica 2 has another store"),
        (7, describe(7, |member| member.store += 1), "another store"),
        (
            7,
            describe(7, |member| {
                member.store = STORE;
                member.address = "nowhere".to_owned();
            }),
            "a host and port",
        ),
        (
            7,
            describe(7, |member| {
                member.store = STORE;
                member.labels = [("label".to_owned(), "x".repeat(1 << 20))].into();
            }),
            "a label of 5 and 1048576 bytes",
        ),
    ] {
        match one.asked_by(from, change).await {
            Outcome::Refused(refused) => assert!(refused.contains(why), "{refused}"),
            other => panic!("{why} was expected, not {other:?}"),
        }
    }
    let is_voter = |members: &std::collections::BTreeMap<u8, crate::Member>| {
        let voters = members.iter().map(|(id, member)| (*id, member.is_voter));
        voters.collect::<Vec<_>>()
    };
    assert_eq!(is_voter(&one.status().members), is_voter(&before));
    one.shutdown().await;
    two.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unfinished_change_of_voters_is_completed() {
    let (one, two) = two_led_by_the_first().await;
    let mut status = one.watch();

    // The first step is requested, and the call is dropped before the second.
    let changing = one
        .inner
        .raft
        .change_membership(ChangeMembers::RemoveVoters(BTreeSet::from([2])), false);
    assert!(changing.now_or_never().is_none(), "both steps at once");
    let finished = status.wait_for(|status| !status.members.contains_key(&2));
    let patience = std::time::Duration::from_secs(30);
    let finished = tokio::time::timeout(patience, finished).await;
    assert!(finished.is_ok(), "the old voters still count");
    drop(finished);
    one.shutdown().await;
    two.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_update_does_not_readmit_a_removed_member() {
    let (one, two) = two_led_by_the_first().await;
    let mut told = one.inner.node(2).unwrap();
    told.labels.insert("moved".to_owned(), "yes".to_owned());
    let asked = || {
        let member = Some(wire::member(2, &told));
        one.inner.pass_change(proto::ChangeRequest {
            from: 2,
            from_store: told.store,
            change: Some(Change::Describe(proto::Describe { member })),
            ..proto::ChangeRequest::default()
        })
    };

    assert!(matches!(asked().await, Outcome::Changed(_)));
    assert_eq!(one.inner.node(2).unwrap().labels, told.labels);
    one.remove(2).await.unwrap();
    let late = asked().await;
    assert!(
        matches!(&late, Outcome::Refused(why) if why == "replica 2 is not a member"),
        "{late:?}"
    );
    let mut status = one.watch();
    let gone = status.wait_for(|status| !status.members.contains_key(&2));
    gone.await.unwrap();
    one.shutdown().await;
    two.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_member_rejoins_only_by_a_later_request() {
    // The removal is known from the log, from the state, or from a restored snapshot.
    for kept_by in ["log", "state", "snapshot"] {
        asks_before_and_after_its_removal(kept_by).await;
    }
}

/// Purges the log of `replica` up to its last applied entry. If `restores`, first writes the state
/// to a snapshot and restores it from there.
async fn purge(replica: &Replica, restores: bool) {
    let inner = &replica.inner;
    replica.snapshot().await.unwrap();
    if restores {
        let (machine, blocking) = (inner.machine.clone(), inner.blocking);
        let file = machine.unfinished_snapshot();
        let taken = blocking.run(move || {
            machine.write_state(&file).unwrap();
            machine.install_state(&file).unwrap()
        });
        taken.await.unwrap();
    }
    let applied = inner.machine.applied().unwrap();
    inner.raft.trigger().purge_log(applied.index).await.unwrap();
    let mut metrics = inner.raft.metrics();
    while metrics.borrow_and_update().purged < Some(applied) {
        metrics.changed().await.unwrap();
    }
}

async fn asks_before_and_after_its_removal(kept_by: &str) {
    let (one, two) = two_led_by_the_first().await;
    let known = one.inner.node(2).unwrap();
    let added_by = one
        .inner
        .with_metrics(|metrics| *metrics.membership_config.log_id());
    let asked = |added_by: Option<LogId>| {
        let member = Some(wire::member(2, &known));
        let added_by = added_by.map(Into::into);
        one.inner.pass_change(proto::ChangeRequest {
            from: 2,
            from_store: known.store,
            change: Some(Change::Join(proto::Join { member, added_by })),
            ..proto::ChangeRequest::default()
        })
    };
    one.remove(2).await.unwrap();
    if kept_by != "log" {
        purge(&one, kept_by == "snapshot").await;
        assert!(!one.inner.log.holds(added_by.unwrap()).await.unwrap());
    }

    // Requested before it knew that it had become a member.
    let late = asked(added_by).await;
    assert!(
        matches!(&late, Outcome::Refused(why) if why == "replica 2 was removed"),
        "{late:?}"
    );
    assert!(one.inner.node(2).is_none());

    // A former leader added it, and no other replica has that entry.
    let lost = added_by.map(|it| log_id(it.leader_id.term + 9, 1, it.index));
    let orphaned = asked(lost).await;
    assert!(matches!(orphaned, Outcome::Changed(_)), "{orphaned:?}");
    // Raft publishes its metrics after it has answered.
    let mut metrics = one.inner.raft.metrics();
    while one.inner.node(2).is_none() {
        metrics.changed().await.unwrap();
    }
    one.remove(2).await.unwrap();
    let again = asked(None).await;
    assert!(matches!(again, Outcome::Changed(_)), "{again:?}");
    one.shutdown().await;
    two.shutdown().await;
}
