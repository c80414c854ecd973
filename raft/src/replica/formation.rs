//! Cluster formation: bootstrap, join, and keeping this replica's membership entry up to date.
//!
//! A replica without a cluster polls its peers. One started with [`Formation::Join`] takes only the
//! first of these steps:
//!
//! 1. If a peer is a member of a cluster, the replica asks that peer to add it as a learner.
//! 2. Otherwise, if at least `expect` replicas respond (itself included) and its id is the lowest,
//!    it founds a cluster: it draws a random cluster id, *claims* each founder for it, and makes
//!    them the voters once all have granted. A replica grants one claim at a time and keeps it on
//!    disk, so two overlapping sets of founders can never both become clusters. Two disjoint sets
//!    could, so `expect` must be more than half of the configured peers.
//! 3. If any founder does not grant the claim, the claim is released and its cluster id is never
//!    used again. The replicas that granted it see that the claimant announces another cluster id
//!    or none, and release it too.
//!
//! A replica started with [`Formation::Bootstrap`] that finds fewer voters than `expect` requests
//! promotion once it has caught up. The leader agrees if its own config names the replica's
//! address, so that a replacement under a new id gets its vote without an operator. One started
//! with [`Formation::Join`] stays a learner until an operator promotes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use openraft::errors::InitializeError;
use tokio::time::Instant;

use super::ReplicaInner;
use super::member_info::INFO_TIMEOUT;
use super::member_info::check_told;
use super::peer_discovery::{
    AskError, LastSeen, PeerDiscovery, SearchLog, is_other_cluster, mark_doubles, report,
    two_clusters,
};
use crate::determinism::random;
use crate::error::ChangeError;
use crate::identity::ClusterBinding;
use crate::locks::lock;
use crate::net::PeerClient;
use crate::options::{Formation, Peers};
use crate::status::{PeerFinding, PeerState, Role};
use crate::types::{LogId, Metrics, Node};
use crate::wire::proto::change_request::Change;
use crate::wire::proto::change_response::Result as Outcome;
use crate::wire::{self, proto};

/// Interval between two polls of the peers.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Interval between two attempts to update this replica's entry or to be promoted.
const ENTRY_RETRY: Duration = Duration::from_millis(500);
/// Maximum pause after peers refused a request.
const REFUSAL_PAUSE_MAX: Duration = Duration::from_secs(10);
const JOIN_TIMEOUT: Duration = Duration::from_secs(20);
const FIRST_COMMAND_TIMEOUT: Duration = Duration::from_secs(5);

/// Result of polling the peers: the replicas that may exist, and those that responded.
pub(super) struct Discovery {
    /// Introductions of the peers by id. Excludes this replica's own id.
    peers: BTreeMap<u64, proto::InfoResponse>,
    /// Number of replicas that may exist, including this one.
    replicas: usize,
    /// Findings at each polled address.
    reports: Vec<PeerFinding>,
}

/// Returns how many replicas may exist, including this one. `answers` contains the store of each
/// peer, or `None` if the peer did not respond.
fn count_replicas(own: u64, answers: &[Option<u64>]) -> usize {
    let stores: BTreeSet<u64> = answers.iter().flatten().copied().chain([own]).collect();
    stores.len() + answers.iter().filter(|store| store.is_none()).count()
}

/// Returns the same count as [`count_replicas`] for the addresses of a DNS name. Each answer starts
/// with whether the address is IPv6. A replica may have an address of each family and listen on
/// only one, so addresses without a response are counted per family.
fn count_resolved(own: u64, answers: &[(bool, Option<u64>)]) -> usize {
    let of_family = |is_v6: bool| {
        let family = answers.iter().filter(|(v6, _)| *v6 == is_v6);
        let family: Vec<Option<u64>> = family.map(|(_, store)| *store).collect();
        let stores: BTreeSet<u64> = family.iter().flatten().copied().collect();
        stores.len() + family.iter().filter(|store| store.is_none()).count()
    };
    let is_listed = answers.iter().any(|(_, store)| *store == Some(own));
    of_family(false).max(of_family(true)) + usize::from(!is_listed)
}

/// Returns an error if `expect` founders are so few that the other peers could found a cluster too.
pub(super) fn check_majority(expect: usize, replicas: usize) -> Result<(), String> {
    if expect * 2 > replicas {
        return Ok(());
    }
    Err(format!(
        "{expect} of {replicas} peers are to form a cluster: with half of them or less, two clusters \
         could form"
    ))
}

/// Brings this replica into a cluster, then keeps its membership entry up to date.
pub(super) async fn keep_membership(inner: Arc<ReplicaInner>) {
    inner.know_own_log().await;
    inner.join_cluster().await;
    inner.keep_entry_current().await;
}

/// Proposes the cluster's first command whenever this replica leads a cluster without one.
///
/// A leader that has applied an entry of its own term knows whether there is one: any earlier
/// proposal of it is applied by then or lost for good.
pub(super) async fn propose_first_command(inner: Arc<ReplicaInner>) {
    let Formation::Bootstrap { first_command, .. } = &inner.options.formation else {
        return;
    };
    if first_command.is_empty() {
        return;
    }
    let command = Bytes::copy_from_slice(first_command);
    let mut status = inner.status.subscribe();
    while !inner.machine.has_commands() {
        let (leads, caught_up) = {
            let status = status.borrow_and_update();
            (status.role == Role::Leader, status.caught_up)
        };
        if leads && caught_up && inner.has_applied_own_term() {
            inner.write_first(command.clone()).await;
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

impl ReplicaInner {
    async fn write_first(&self, command: Bytes) {
        // Held so that a second call cannot propose while the first is in flight.
        let _alone = self.changing.lock().await;
        if self.machine.has_commands() {
            return;
        }
        let write = self.raft.client_write(crate::types::Command(command));
        match tokio::time::timeout(FIRST_COMMAND_TIMEOUT, write).await {
            Ok(Ok(response)) => {
                tracing::info!(index = response.log_id.index + 1, "cluster founded");
            }
            Ok(Err(error)) => tracing::warn!(%error, "first command was not committed"),
            Err(_) => tracing::warn!("first command was not committed in time"),
        }
    }

    /// Waits until Raft's metrics show the log that this replica started with. Until then it would
    /// consider itself new, and a removed replica would rejoin by itself.
    async fn know_own_log(&self) {
        let mut metrics = self.raft.metrics();
        let is_told = |metrics: &Metrics| metrics.last_log_index.is_some();
        while self.log.has_entries() && !is_told(&metrics.borrow_and_update()) {
            if metrics.changed().await.is_err() {
                return;
            }
        }
    }

    async fn join_cluster(&self) {
        let mut log = SearchLog::new(Instant::now());
        let mut seen = LastSeen::default();
        while !self.is_member() {
            let mut search = self.look().await;
            let now = Instant::now();
            seen.replace_timeouts(now, &mut search.peers);
            log.say(now, &search);
            let is_news = *lock(&self.search) != search;
            if is_news {
                *lock(&self.search) = search;
                self.refresh();
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        // Clear the findings of the search.
        *lock(&self.search) = PeerDiscovery::default();
        self.refresh();
    }

    /// Polls the peers once and takes the next step.
    async fn look(&self) -> PeerDiscovery {
        // Read before the peers are asked: their responses must be newer than the claim.
        let claim = self.links.identity.binding();
        let peers = match &self.options.formation {
            Formation::Join(peers) | Formation::Bootstrap { peers, .. } => peers,
        };
        let found = self.find(peers).await;
        let stepped = match &self.options.formation {
            Formation::Join(_) if found.peers.is_empty() => Err("no member responds".to_owned()),
            Formation::Join(_) => self.request_join(&found).await,
            Formation::Bootstrap { expect, .. } => self.bootstrap(claim, &found, *expect).await,
        };
        PeerDiscovery {
            problem: stepped.err(),
            peers: found.reports,
        }
    }

    async fn bootstrap(
        &self,
        claim: ClusterBinding,
        found: &Discovery,
        expect: usize,
    ) -> Result<(), String> {
        self.drop_dead_claim(claim, found)?;
        if found.peers.values().any(|info| info.is_member) {
            return self.request_join(found).await;
        }
        check_majority(expect, found.replicas)?;
        let answering = found.peers.len() + 1;
        if answering < expect {
            return Err(format!(
                "waiting for {expect} replicas, found {answering} (this one included)"
            ));
        }
        match found.peers.keys().next() {
            Some(lowest) if *lowest < self.links.identity.id => Err(format!(
                "waiting for replica {lowest}, the lowest id, to found the cluster"
            )),
            _ => self.found(found, expect).await,
        }
    }

    /// Asks the replica at every address to introduce itself.
    pub(super) async fn find(&self, peers: &Peers) -> Discovery {
        let (addresses, unresolved) = match peers {
            Peers::List(addresses) => (addresses.clone(), None),
            Peers::Dns(name) => match tokio::net::lookup_host(name).await {
                Ok(found) => (found.map(|address| address.to_string()).collect(), None),
                Err(error) => (Vec::new(), Some(error)),
            },
        };
        let lookups = addresses.iter().map(|address| async move {
            let mut info = self.ask(address).await?;
            info.address.clone_from(address);
            Ok::<_, AskError>(info)
        });
        let answers = join_all(lookups).await;
        let identity = &self.links.identity;
        let mut reports: Vec<_> = (addresses.iter().zip(&answers))
            .map(|(address, answer)| report(address, answer, identity))
            .collect();
        mark_doubles(&mut reports, &answers);
        if let (Some(error), Peers::Dns(name)) = (unresolved, peers) {
            reports.push(PeerFinding {
                address: name.clone(),
                state: PeerState::UnknownName,
                detail: format!("name not found: {error}"),
            });
        }
        reports.extend(self.own_address_missing(peers, &reports));
        let stores: Vec<Option<u64>> = (answers.iter())
            .map(|answer| answer.as_ref().ok().map(|info| info.store))
            .collect();
        let replicas = match peers {
            Peers::List(_) => count_replicas(identity.store, &stores),
            Peers::Dns(_) => {
                let is_v6 = addresses.iter().map(|address| address.starts_with('['));
                count_resolved(identity.store, &is_v6.zip(stores).collect::<Vec<_>>())
            }
        };
        let peers = answers.into_iter().flatten();
        Discovery {
            peers: peers
                .filter(|info| info.id != identity.id)
                .map(|info| (info.id, info))
                .collect(),
            replicas,
            reports,
        }
    }

    /// Returns a finding if the founders apparently do not include this replica.
    fn own_address_missing(&self, peers: &Peers, reports: &[PeerFinding]) -> Option<PeerFinding> {
        let Formation::Bootstrap { .. } = &self.options.formation else {
            return None;
        };
        let own = &self.options.advertise;
        let is_there = reports.iter().any(|peer| peer.state == PeerState::Own);
        let detail = match peers {
            _ if is_there => return None,
            Peers::List(list) if list.contains(own) => return None,
            Peers::List(_) => "this replica's own address is not in cluster.peers".to_owned(),
            // An address without a response may be this replica's.
            Peers::Dns(_) if reports.iter().any(|peer| !peer.state.is_fine()) => return None,
            Peers::Dns(name) => format!("{name} does not resolve to this replica's own address"),
        };
        Some(PeerFinding {
            address: own.clone(),
            state: PeerState::OwnMissing,
            detail,
        })
    }

    /// Releases a claim on this replica if it can no longer lead to a cluster: the claimant has
    /// given it up, or, for this replica's own claim, a peer with a lower id is to found the
    /// cluster.
    fn drop_dead_claim(&self, claim: ClusterBinding, found: &Discovery) -> Result<(), String> {
        let identity = &self.links.identity;
        let ClusterBinding::Claimed { cluster, by } = claim else {
            return Ok(());
        };
        let is_dead = if by == identity.id {
            // This replica's own claim, but a peer with a lower id is to found the cluster.
            found.peers.keys().any(|id| *id < identity.id)
        } else {
            found.peers.get(&by).is_some_and(|info| {
                wire::join_optional(info.cluster_high, info.cluster_low) != Some(cluster)
            })
        };
        if is_dead && self.log.is_pristine() {
            identity.give_up(claim).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Claims the founders for a new cluster and makes them its voters.
    async fn found(&self, found: &Discovery, expect: usize) -> Result<(), String> {
        let identity = &self.links.identity;
        let disk = |error: std::io::Error| error.to_string();
        let cluster = match identity.binding() {
            ClusterBinding::Claimed { by, .. } if by != identity.id => {
                return Err(format!(
                    "waiting for replica {by}, which is founding a cluster"
                ));
            }
            binding => binding
                .cluster()
                .unwrap_or_else(|| wire::join(random::draw_id(), random::draw())),
        };
        if !identity.claim(cluster, identity.id).map_err(disk)? {
            return Ok(());
        }
        let founders: Vec<&proto::InfoResponse> = found.peers.values().take(expect - 1).collect();
        let claims = founders.iter().map(|info| self.claim(info, cluster));
        if !join_all(claims).await.into_iter().all(|granted| granted) {
            identity.give_up(identity.binding()).map_err(disk)?;
            return Err("not all founders could be claimed".to_owned());
        }
        let mut members: BTreeMap<u64, Node> = founders
            .into_iter()
            .map(|info| {
                let node = Node {
                    address: info.address.clone(),
                    labels: info.labels.clone().into_iter().collect(),
                    store: info.store,
                    cluster,
                };
                (info.id, node)
            })
            .collect();
        for node in members.values() {
            check_told(&node.address, &node.labels)?;
        }
        members.insert(identity.id, self.described(cluster));
        tracing::info!(founders = ?members.keys().collect::<Vec<_>>(), "founding a cluster");
        let founded = self.raft.initialize(members).await;
        founded.map_err(|error| match error.api_error() {
            // A member of the cluster has called this replica meanwhile.
            Some(InitializeError::NotAllowed(_)) => {
                "another replica is founding the cluster".to_owned()
            }
            _ => error.to_string(),
        })
    }

    async fn claim(&self, info: &proto::InfoResponse, cluster: u128) -> bool {
        let (cluster_high, cluster_low) = wire::split(cluster);
        let request = proto::ClaimRequest {
            from: self.links.identity.id,
            to: info.id,
            to_store: info.store,
            cluster_high,
            cluster_low,
            cluster_name: self.options.cluster_name.clone(),
        };
        let call = async |mut client: PeerClient| client.claim(request).await;
        let answer = self
            .links
            .call_once(&info.address, INFO_TIMEOUT, call)
            .await;
        answer.is_ok_and(|answer| answer.granted)
    }

    /// Asks the members found, one after another, to add this replica to their cluster.
    pub(super) async fn request_join(&self, found: &Discovery) -> Result<(), String> {
        let member = wire::member(self.links.identity.id, &self.described(0));
        let mut problem = "no peer is in a cluster".to_owned();
        let binding = self.links.identity.binding();
        for info in found.peers.values().filter(|info| info.is_member) {
            if is_other_cluster(info, binding) {
                problem = two_clusters(info, binding.cluster());
                continue;
            }
            let join = proto::Join {
                member: Some(member.clone()),
                added_by: None,
            };
            let request = proto::ChangeRequest {
                cluster_high: info.cluster_high,
                cluster_low: info.cluster_low,
                from: self.links.identity.id,
                change: Some(Change::Join(join)),
                hops: 0,
                from_store: self.links.identity.store,
                cluster_name: self.options.cluster_name.clone(),
            };
            let call = async |mut client: PeerClient| client.change(request).await;
            let answer = self
                .links
                .call_once(&info.address, JOIN_TIMEOUT, call)
                .await;
            match answer.map(|answer| answer.result) {
                Ok(Some(Outcome::Changed(changed))) => {
                    return self
                        .adopt_cluster(wire::join(changed.cluster_high, changed.cluster_low));
                }
                Ok(Some(Outcome::Refused(why))) => problem = why,
                Ok(_) => problem = "its leader is not known".to_owned(),
                Err(error) => problem = error.to_string(),
            }
        }
        Err(problem)
    }

    fn adopt_cluster(&self, cluster: u128) -> Result<(), String> {
        match self.links.identity.join(cluster) {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!(
                "let into cluster {}, this store belongs to cluster {}",
                wire::shown_id(cluster),
                self.links
                    .identity
                    .cluster()
                    .map_or("none".to_owned(), wire::shown_id)
            )),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns the entry that this replica should have in the membership of `cluster`.
    fn described(&self, cluster: u128) -> Node {
        Node {
            address: self.options.advertise.clone(),
            labels: self.options.labels.clone(),
            store: self.links.identity.store,
            cluster,
        }
    }

    /// Updates this replica's membership entry when its address or labels change, and requests
    /// promotion if voters are missing.
    async fn keep_entry_current(&self) {
        let id = self.links.identity.id;
        let mut status = self.status.subscribe();
        loop {
            let change = match self.entry() {
                // The membership that names this replica was never committed: ask to join again.
                Some((known, Some(added_by))) => {
                    let member = wire::member(id, &self.described(known.cluster));
                    Some(Change::Join(proto::Join {
                        member: Some(member),
                        added_by: Some(added_by.into()),
                    }))
                }
                Some((known, None)) => match self.described(known.cluster) {
                    described if described == known => self.wanted_vote(),
                    described => {
                        let member = Some(wire::member(id, &described));
                        Some(Change::Describe(proto::Describe { member }))
                    }
                },
                None => None,
            };
            let pause = match change {
                None => None,
                Some(change) => match self.change(change).await {
                    Ok(_) => Some(ENTRY_RETRY / 10),
                    Err(ChangeError::Refused(why)) => {
                        tracing::debug!(why, "could not describe or promote this replica yet");
                        None
                    }
                    Err(ChangeError::Unknown(_)) => Some(ENTRY_RETRY),
                },
            };
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => {
                    let before = status.borrow_and_update().clone();
                    let changed = status.wait_for(|status| {
                        status.members != before.members || status.caught_up != before.caught_up
                    });
                    // A refused request may be granted later, without a change of the status.
                    if let Ok(Err(_)) = tokio::time::timeout(REFUSAL_PAUSE_MAX, changed).await {
                        return;
                    }
                }
            }
        }
    }

    /// Returns this replica's entry in the newest membership here. Adds the log id of that
    /// membership if the newest committed one does not name this replica.
    fn entry(&self) -> Option<(Node, Option<LogId>)> {
        let id = self.links.identity.id;
        // Read both at once: in between, this replica may learn that it was removed.
        self.with_metrics(|metrics| {
            let newest = &metrics.membership_config;
            let known = newest.membership().get_node(&id)?;
            let agreed = metrics.committed_membership_config.membership();
            let is_agreed = agreed.get_node(&id).is_some();
            let added_by = newest.log_id().filter(|_| !is_agreed);
            Some((known.clone(), added_by))
        })
    }

    fn wanted_vote(&self) -> Option<Change> {
        let id = self.links.identity.id;
        let Formation::Bootstrap { expect, .. } = &self.options.formation else {
            return None;
        };
        let voters = self.voters();
        let is_wanted =
            !voters.contains(&id) && voters.len() < *expect && self.status.borrow().caught_up;
        let voters_below = *expect as u64;
        is_wanted.then_some(Change::Promote(proto::Promote { id, voters_below }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_address_counts_as_a_replica() {
        let half = [Some(1), Some(2), Some(3), None, None, None];
        let v4 = half.map(|store| (false, store));
        assert_eq!(count_resolved(1, &v4), 6);
        assert_eq!(count_replicas(1, &half), 6);
        assert!(check_majority(3, count_resolved(1, &v4)).is_err());
        assert_eq!(count_resolved(9, &v4), 7, "this replica is not among them");
        assert_eq!(count_replicas(9, &half), 7);
    }

    #[test]
    fn a_replica_on_one_address_family_counts_once() {
        let v4 = [1, 2, 3].map(|store| (false, Some(store)));
        let v6 = [(true, None); 3];
        assert_eq!(count_resolved(1, &[v4, v6].concat()), 3);
        let both = [1, 2, 3].map(|store| (true, Some(store)));
        assert_eq!(count_resolved(1, &[v4, both].concat()), 3);
    }
}
