//! Changes of membership and leadership. The leader makes them; other replicas forward them to it.
//!
//! The membership records the address, store and cluster of every member. A new member is asked for
//! its store before it is added, so that later calls reach only that store.
//!
//! The leader checks the sender. A replica without a cluster may only request to be added itself. A
//! member may update its own address and labels, request its own vote (granted if the leader's
//! config names it), and remove itself. Only a voter may request anything else: operators' tools
//! talk to voters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use openraft::Instant as _;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::{ChangeMembers, ServerState};
use tokio::time::{Instant, timeout_at};

use super::member_info::check_told;
use super::peer_discovery::two_clusters;
use super::{Replica, ReplicaInner};
use crate::error::ChangeError;
use crate::net::{CallError, LinkLane};
use crate::types::{LogId, Metrics, Node, applied_index};
use crate::wire::proto::change_request::Change;
use crate::wire::proto::change_response::Result as Outcome;
use crate::wire::{self, proto};

/// Timeout for a change of membership, including retries.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout for a learner to catch up before it is promoted.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a voter to take leadership.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(20);
/// Pause before another attempt to finish a change.
const FINISH_AGAIN: Duration = Duration::from_secs(1);
/// Maximum number of entries by which a learner may lag when it is promoted.
pub(super) const LAG_MAX: u64 = 64;
/// Maximum number of times a change is forwarded to find the leader.
const HOPS_MAX: u32 = 2;

type Members = ChangeMembers<u64, Node>;

/// Finishes changes of voters that a former leader began. Such a change takes two log entries, and
/// a leader that is lost between them leaves a joint membership, in which both the old and the new
/// voters must agree to everything.
pub(super) async fn finish_changes(inner: Arc<ReplicaInner>) {
    let mut metrics = inner.raft.metrics();
    loop {
        let is_halfway = is_halfway(&metrics.borrow_and_update());
        if is_halfway && !inner.finish_change().await {
            tokio::time::sleep(FINISH_AGAIN).await;
        } else if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Whether this replica leads and the newest membership is a committed joint one.
fn is_halfway(metrics: &Metrics) -> bool {
    let committed = &metrics.committed_membership_config;
    metrics.state == ServerState::Leader
        && committed.membership().get_joint_config().len() > 1
        && committed.log_id() == metrics.membership_config.log_id()
}

impl Replica {
    /// Adds the replica that listens at `address` as a learner. Returns the log index.
    ///
    /// # Errors
    /// Fails if the replica does not respond, is in another cluster, or its id is taken.
    pub async fn add_learner(&self, id: u8, address: String) -> Result<u64, ChangeError> {
        let id = id.into();
        let add = Change::AddLearner(proto::AddLearner { id, address });
        Ok(self.inner.change(add).await?.index)
    }

    /// Promotes a learner to voter once its lag is small. Returns the log index.
    ///
    /// # Errors
    /// Fails if the replica is no learner or does not catch up.
    pub async fn promote(&self, id: u8) -> Result<u64, ChangeError> {
        let promote = Change::Promote(proto::Promote {
            id: id.into(),
            voters_below: 0,
        });
        Ok(self.inner.change(promote).await?.index)
    }

    /// Removes a member. A leader that removes itself transfers leadership first. Returns the log
    /// index.
    ///
    /// # Errors
    /// Fails if the replica is no member or is the last voter.
    pub async fn remove(&self, id: u8) -> Result<u64, ChangeError> {
        let remove = Change::Remove(proto::Remove {
            id: id.into(),
            voters_min: 0,
        });
        Ok(self.inner.change(remove).await?.index)
    }

    /// Transfers leadership to `to`, or to the voter with the longest log. Returns the new leader.
    ///
    /// # Errors
    /// Fails if `to` is no voter or does not take leadership in time.
    pub async fn transfer_leader(&self, to: Option<u8>) -> Result<u8, ChangeError> {
        let to = to.map_or(0, u64::from);
        let transfer = Change::Transfer(proto::Transfer { to });
        let leader = self.inner.change(transfer).await?.leader;
        u8::try_from(leader).map_err(|_| ChangeError::Unknown("a leader above 255".to_owned()))
    }
}

impl ReplicaInner {
    /// Finishes a half-made change of voters, if any. Returns whether none is left.
    async fn finish_change(&self) -> bool {
        let _alone = self.changing.lock().await;
        let is_halfway = self.with_metrics(is_halfway);
        if !is_halfway {
            return true;
        }
        let outcome = self
            .write(ChangeMembers::AddVoterIds(BTreeSet::new()), false)
            .await;
        let is_finished = matches!(outcome, Outcome::Changed(_));
        tracing::info!(is_finished, "membership change was left incomplete");
        is_finished
    }

    /// Transfers leadership, if this replica leads and is not alone, because it is about to stop.
    pub(super) async fn hand_over(&self) {
        if self.leader() != Some(self.links.identity.id) || self.voters().len() < 2 {
            return;
        }
        // A voter takes it in far less time; one that has just stopped as well never will.
        self.transfer_within(0, self.options.election_timeout.end * 2)
            .await;
    }

    /// Transfers leadership to `to`, or to the voter with the longest log for 0. Logs a failure.
    pub(super) async fn transfer_within(&self, to: u64, limit: Duration) {
        if let Outcome::Refused(why) | Outcome::Unknown(why) = self.transfer_here(to, limit).await {
            tracing::warn!(why, "could not transfer leadership");
        }
    }

    /// Makes a change through the leader, and waits for its outcome.
    pub(super) fn change(
        &self,
        change: Change,
    ) -> BoxFuture<'_, Result<proto::Changed, ChangeError>> {
        self.ask_for(change).boxed()
    }

    async fn ask_for(&self, change: Change) -> Result<proto::Changed, ChangeError> {
        let end = Instant::now() + CHANGE_TIMEOUT;
        loop {
            if let Some(why) = self.why_stopped() {
                return Err(ChangeError::Refused(why));
            }
            let (cluster_high, cluster_low) = self.links.identity.cluster_halves();
            let request = proto::ChangeRequest {
                cluster_high,
                cluster_low,
                from: self.links.identity.id,
                change: Some(change.clone()),
                hops: 0,
                from_store: self.links.identity.store,
                cluster_name: self.options.cluster_name.clone(),
            };
            match self.pass_change(request).await {
                Outcome::Changed(changed) => return Ok(changed),
                Outcome::Refused(why) => return Err(ChangeError::Refused(why)),
                Outcome::Unknown(why) => return Err(ChangeError::Unknown(why)),
                Outcome::NotLeader(_) if Instant::now() >= end => {
                    return Err(ChangeError::Refused("no leader is known".to_owned()));
                }
                Outcome::NotLeader(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }

    /// Makes a change here if this replica leads, otherwise forwards it to the leader.
    pub(crate) async fn pass_change(&self, mut request: proto::ChangeRequest) -> Outcome {
        let not_leader = |leader| Outcome::NotLeader(proto::NotLeader { leader });
        let Some(leader) = self.leader() else {
            return not_leader(0);
        };
        if leader == self.links.identity.id {
            let (from, store) = (request.from, request.from_store);
            let Some(change) = request.change else {
                return Outcome::Refused("an unknown change".to_owned());
            };
            return match self.check_asker(from, store, &change) {
                Ok(()) => self.change_here(change).await,
                Err(why) => Outcome::Refused(why),
            };
        }
        if request.hops >= HOPS_MAX {
            return not_leader(leader);
        }
        let Some(peer) = self.links.peer(leader) else {
            return not_leader(0);
        };
        request.hops += 1;
        request.cluster_name.clone_from(&self.options.cluster_name);
        (request.cluster_high, request.cluster_low) = self.links.identity.cluster_halves();
        let call = peer.call(LinkLane::Bulk, CHANGE_TIMEOUT, |mut client| async move {
            client.change(request).await
        });
        match call.await {
            Ok(answer) => answer
                .result
                .unwrap_or(Outcome::Unknown("a response without a result".to_owned())),
            Err(CallError::NotSent(_)) => not_leader(leader),
            Err(error) => Outcome::Unknown(error.to_string()),
        }
    }

    /// Checks that the replica `from`, which claims to have `store`, may request this change.
    /// Returns the reason if not.
    fn check_asker(&self, from: u64, store: u64, change: &Change) -> Result<(), String> {
        let of_itself = |member: &Option<proto::Member>| match member {
            Some(member) if member.id == from => Ok(()),
            Some(member) => Err(format!("replica {from} claims to be replica {}", member.id)),
            None => Err("an unknown change".to_owned()),
        };
        if let Change::Join(join) = change {
            return of_itself(&join.member);
        }
        self.check_member(from, store)?;
        match change {
            Change::Describe(describe) => return of_itself(&describe.member),
            Change::Promote(promote) if promote.voters_below != 0 && promote.id == from => {
                return Ok(());
            }
            Change::Remove(remove) if remove.id == from => return Ok(()),
            _ => {}
        }
        if self.voters().contains(&from) {
            return Ok(());
        }
        Err(format!("replica {from} is a learner: ask a voter"))
    }

    pub(super) async fn change_here(&self, change: Change) -> Outcome {
        if let Change::Transfer(transfer) = &change {
            return self.transfer_here(transfer.to, TRANSFER_TIMEOUT).await;
        }
        let _alone = self.changing.lock().await;
        match change {
            Change::AddLearner(add) => self.add_here(add.id, &add.address, None).await,
            Change::Join(proto::Join {
                member: Some(member),
                added_by,
            }) => self.join_here(member, added_by.map(LogId::from)).await,
            Change::Describe(proto::Describe {
                member: Some(member),
            }) => self.describe_here(member).await,
            Change::Promote(promote) => self.promote_here(&promote).await,
            Change::Remove(remove) => match self.check_shrink(&remove) {
                Ok(()) => self.remove_here(remove.id).await,
                Err(why) => Outcome::Refused(why),
            },
            Change::Transfer(_)
            | Change::Join(proto::Join { member: None, .. })
            | Change::Describe(proto::Describe { member: None }) => {
                Outcome::Refused("an unknown change".to_owned())
            }
        }
    }

    /// Adds the replica at `address` if it is `id` and in no other cluster. `store` is the store
    /// that it claimed, if it made the request itself.
    async fn add_here(&self, id: u64, address: &str, store: Option<u64>) -> Outcome {
        if !(1..=255).contains(&id) {
            return Outcome::Refused(format!("id {id} is not within 1..=255"));
        }
        if self.node(id).is_some() {
            return Outcome::Refused(format!("replica {id} is already a member"));
        }
        let Some(cluster) = self.links.identity.cluster() else {
            return Outcome::Refused("not in a cluster".to_owned());
        };
        let info = match self.ask(address).await {
            Ok(info) => info,
            Err(why) => return Outcome::Refused(format!("replica {id} does not respond: {why}")),
        };
        let theirs = wire::join_optional(info.cluster_high, info.cluster_low);
        if info.id != id || store.is_some_and(|store| store != info.store) {
            return Outcome::Refused(format!(
                "{address} is replica {} with another store",
                info.id
            ));
        }
        if info.is_member && theirs != Some(cluster) {
            return Outcome::Refused(two_clusters(&info, Some(cluster)));
        }
        let node = Node {
            address: address.to_owned(),
            labels: info.labels.into_iter().collect(),
            store: info.store,
            cluster,
        };
        if let Err(why) = check_told(&node.address, &node.labels) {
            return Outcome::Refused(why);
        }
        self.write(ChangeMembers::AddNodes(BTreeMap::from([(id, node)])), true)
            .await
    }

    /// Admits a replica at its own request: as a new learner, at a new address, or in place of its
    /// former self that lost its store. A request may arrive long after it was made: if the entry
    /// `added_by` was committed, the sender is a member that was removed since. The log shows that
    /// for the entries that it still holds; beyond that, the state records it.
    async fn join_here(&self, member: proto::Member, added_by: Option<LogId>) -> Outcome {
        let id = member.id;
        if let Some(known) = self.node(id) {
            if !self.options.replaces_lost || known.store == member.store {
                return self.describe_here(member).await;
            }
            if let Err(why) = self.check_lost(id, &known).await {
                return Outcome::Refused(why);
            }
            tracing::warn!(id, "a replica lost its store and rejoins under its id");
            let removed = self.remove_here(id).await;
            if !matches!(removed, Outcome::Changed(_)) {
                return removed;
            }
        } else if let Some(added_by) = added_by {
            let is_late = (self.machine).is_removed_since(id, member.store, added_by);
            match self.log.holds(added_by).await {
                Ok(false) if !is_late => {}
                Ok(_) => return Outcome::Refused(format!("replica {id} was removed")),
                Err(error) => return Outcome::Unknown(error.to_string()),
            }
        }
        let reported = Node::from(member);
        self.add_here(id, &reported.address, Some(reported.store))
            .await
    }

    /// Returns an error if the member `id` must not be replaced: it is heard, it responds with its
    /// store, or there is no quorum, so that its removal would wait in the log until it is back.
    async fn check_lost(&self, id: u64, known: &Node) -> Result<(), String> {
        if !self.status.borrow().has_quorum {
            return Err(format!("no quorum to replace replica {id}"));
        }
        match self.is_there(id, known).await {
            true => Err(format!(
                "replica {id} runs at {} with its store: give this one another node.id, or stop \
                 that one",
                known.address
            )),
            false => Ok(()),
        }
    }

    /// Updates a member's address and labels. If it was removed in the meantime, this does not add
    /// it again.
    async fn describe_here(&self, member: proto::Member) -> Outcome {
        let id = member.id;
        let mut reported = Node::from(member);
        let Some(known) = self.node(id) else {
            return Outcome::Refused(format!("replica {id} is not a member"));
        };
        if known.store != reported.store {
            return Outcome::Refused(format!(
                "replica {id} is a member with another store: a replica that lost its store joins \
                 under a new id (start it with another node.id, and run `quorate member replace {id} \
                 --as NEW-ID`; with the old data directory it comes back as it was), or under its \
                 own with cluster.replace_lost"
            ));
        }
        if let Err(why) = check_told(&reported.address, &reported.labels) {
            return Outcome::Refused(why);
        }
        reported.cluster = known.cluster;
        if known == reported {
            return self.changed(self.applied());
        }
        self.write(
            ChangeMembers::SetNodes(BTreeMap::from([(id, reported)])),
            true,
        )
        .await
    }

    async fn promote_here(&self, promote: &proto::Promote) -> Outcome {
        let id = promote.id;
        let voters = self.voters();
        let Some(node) = self.node(id) else {
            return Outcome::Refused(format!("replica {id} is not a member"));
        };
        if voters.contains(&id) {
            return Outcome::Refused(format!("replica {id} is already a voter"));
        }
        if promote.voters_below != 0 {
            // Requested by the replica itself: its config may be a copy of another replica's.
            let Some(wanted) = self.voters_wanted_with(&node.address).await else {
                return Outcome::Refused(format!(
                    "{} is not among the peers in the leader's config: `quorate member promote {id}` \
                     makes replica {id} a voter",
                    node.address
                ));
            };
            if voters.len() as u64 >= promote.voters_below.min(wanted as u64) {
                return Outcome::Refused(format!("there are already {} voters", voters.len()));
            }
        }
        if !self.wait_for_learner(id).await {
            return Outcome::Refused(format!("replica {id} does not catch up"));
        }
        self.write(ChangeMembers::AddVoterIds(BTreeSet::from([id])), true)
            .await
    }

    pub(super) async fn remove_here(&self, id: u64) -> Outcome {
        let voters = self.voters();
        if self.node(id).is_none() {
            return Outcome::Refused(format!("replica {id} is not a member"));
        }
        if !voters.contains(&id) {
            return self
                .write(ChangeMembers::RemoveNodes(BTreeSet::from([id])), false)
                .await;
        }
        if voters.len() == 1 {
            return Outcome::Refused(format!("replica {id} is the last voter"));
        }
        if id == self.links.identity.id {
            return match self.transfer_here(0, TRANSFER_TIMEOUT).await {
                // The new leader removes this one.
                Outcome::Changed(changed) => Outcome::NotLeader(proto::NotLeader {
                    leader: changed.leader,
                }),
                other => other,
            };
        }
        self.write(ChangeMembers::RemoveVoters(BTreeSet::from([id])), false)
            .await
    }

    async fn transfer_here(&self, to: u64, limit: Duration) -> Outcome {
        let me = self.links.identity.id;
        let target = match to {
            0 => self.furthest_voter(),
            id => Some(id).filter(|id| self.voters().contains(id)),
        };
        let Some(target) = target else {
            return Outcome::Refused(match to {
                0 => "no other voter responds".to_owned(),
                id => format!("replica {id} is not a voter"),
            });
        };
        // The target would refuse, and the cluster would have no leader until the next election.
        if target != me && self.links.reachability.refuses_leadership(target) {
            return Outcome::Refused(format!(
                "replica {target} cannot become the leader at present"
            ));
        }
        if target != me && self.raft.trigger().transfer_leader(target).await.is_err() {
            return Outcome::Refused(self.why_stopped().unwrap_or("stopped".to_owned()));
        }
        let took = self
            .wait_for(Instant::now() + limit, |metrics| {
                metrics
                    .current_leader
                    .filter(|leader| *leader != me || target == me)
            })
            .await;
        match took {
            Some(leader) if leader == target || to == 0 => Outcome::Changed(proto::Changed {
                leader,
                ..proto::Changed::default()
            }),
            Some(leader) => Outcome::Unknown(format!("replica {leader} took it")),
            None => Outcome::Unknown(format!(
                "replica {target} did not become the leader in time"
            )),
        }
    }

    /// Writes a change of membership. If another one is being written, waits for that first.
    async fn write(&self, members: Members, retain: bool) -> Outcome {
        let end = Instant::now() + CHANGE_TIMEOUT;
        loop {
            let written = timeout_at(end, self.raft.change_membership(members.clone(), retain));
            let error = match written.await {
                Err(_) => return Outcome::Unknown("not committed in time".to_owned()),
                Ok(Ok(response)) => return self.changed(response.log_id.index + 1),
                Ok(Err(RaftError::Fatal(fatal))) => return Outcome::Unknown(fatal.to_string()),
                Ok(Err(RaftError::APIError(error))) => error,
            };
            match error {
                ClientWriteError::ForwardToLeader(forward) => {
                    let leader = forward.leader_id.unwrap_or(0);
                    return Outcome::NotLeader(proto::NotLeader { leader });
                }
                ClientWriteError::ChangeMembershipError(
                    ChangeMembershipError::InProgress(_)
                    | ChangeMembershipError::UncommittedLeaderLog(_),
                ) if Instant::now() < end => tokio::time::sleep(RETRY).await,
                ClientWriteError::ChangeMembershipError(error) => {
                    return Outcome::Refused(error.to_string());
                }
                ClientWriteError::LogEntryDiscarded(_)
                | ClientWriteError::PreconditionFailed(_) => {
                    return Outcome::Unknown(error.to_string());
                }
            }
        }
    }

    fn changed(&self, index: u64) -> Outcome {
        let (cluster_high, cluster_low) = self.links.identity.cluster_halves();
        Outcome::Changed(proto::Changed {
            index,
            leader: 0,
            cluster_high,
            cluster_low,
        })
    }

    fn applied(&self) -> u64 {
        self.with_metrics(applied_index)
    }

    pub(super) fn node(&self, id: u64) -> Option<Node> {
        self.with_metrics(|metrics| {
            let membership = metrics.membership_config.membership();
            membership.get_node(&id).cloned()
        })
    }

    pub(super) fn voters(&self) -> BTreeSet<u64> {
        self.with_metrics(|metrics| metrics.membership_config.voter_ids().collect())
    }

    /// Returns the other voter with the longest log, among those that were heard recently and do
    /// not refuse to lead. `None` if there is none, or if this replica does not lead.
    fn furthest_voter(&self) -> Option<u64> {
        let voters = self.voters();
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let acked = metrics.heartbeat.as_ref()?;
        let is_heard = |id: &u64| {
            let acked = acked.get(id).copied().flatten();
            acked.is_some_and(|acked| acked.elapsed() <= self.lease())
        };
        let replication = metrics.replication.as_ref()?;
        replication
            .iter()
            .filter(|(id, _)| **id != self.links.identity.id)
            .filter(|(id, _)| voters.contains(id) && is_heard(id))
            .filter(|(id, _)| !self.links.reachability.refuses_leadership(**id))
            .max_by_key(|(_, matched)| **matched)
            .map(|(id, _)| *id)
    }

    async fn wait_for_learner(&self, id: u64) -> bool {
        self.wait_for(Instant::now() + CATCH_UP_TIMEOUT, |metrics| {
            let matched = metrics.replication.as_ref()?.get(&id).copied().flatten()?;
            (matched.index + LAG_MAX >= metrics.last_log_index?).then_some(())
        })
        .await
        .is_some()
    }

    /// Waits until `find` returns a value for Raft's metrics; returns `None` after `end`.
    async fn wait_for<T>(
        &self,
        end: Instant,
        mut find: impl FnMut(&Metrics) -> Option<T>,
    ) -> Option<T> {
        let mut metrics = self.raft.metrics();
        loop {
            let found = find(&metrics.borrow_and_update());
            if found.is_some() {
                return found;
            }
            timeout_at(end, metrics.changed()).await.ok()?.ok()?;
        }
    }
}
