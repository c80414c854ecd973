//! Keeps the status and the peers' addresses up to date, and takes snapshots by size and on demand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::Instant as _;
use openraft::ServerState;
use tokio::time::Instant;

use super::peer_discovery::PeerDiscovery;
use super::{Replica, ReplicaInner};
use crate::error::ChangeError;
use crate::files::is_shortage;
use crate::locks::lock;
use crate::status::{Member, Role, Status};
use crate::types::{
    self, LogId, Metrics, Vote, applied_index, committed_index, last_log_index, public_index,
};

/// Refreshes the status whenever its contents may have changed. Changes of indices, lags, and a
/// follower's quorum alone are shown at the next tick.
pub(super) async fn keep_status(inner: Arc<ReplicaInner>) {
    let mut metrics = inner.raft.metrics();
    let mut fault = inner.fault.watch();
    let mut waiting = inner.log.waiting();
    let mut connected = inner.connected.subscribe();
    // Silence changes the status as well.
    let mut beats = inner.beats();
    let mut is_running = true;
    loop {
        // Read first, so that what changes during the refresh causes another one.
        let shown = inner.with_metrics(|metrics| inner.shown(metrics));
        inner.refresh();
        let shown_changes = async {
            while metrics.changed().await.is_ok() {
                if inner.with_metrics(|metrics| inner.shown(metrics)) != shown {
                    return true;
                }
            }
            false
        };
        tokio::select! {
            biased;
            is_changed = shown_changes, if is_running => is_running = is_changed,
            _ = fault.changed() => {}
            _ = waiting.changed() => {}
            _ = connected.changed() => {}
            _ = beats.tick() => {}
        }
    }
}

/// Raft's metrics that the status shows at once. Entries, ticks, and acknowledged heartbeats change
/// the rest several hundred times per second, and each refresh wakes all who watch the status. It is
/// shown at the next tick.
#[derive(PartialEq)]
struct ShownMetrics {
    is_running: bool,
    vote: Vote,
    state: ServerState,
    leader: Option<u64>,
    leads: bool,
    is_caught_up: bool,
    snapshot: Option<LogId>,
    purged: Option<LogId>,
    membership: Option<LogId>,
}

/// Takes a snapshot when enough bytes were applied since the last one. openraft counts entries.
pub(super) async fn keep_snapshots(inner: Arc<ReplicaInner>) {
    let mut status = inner.status.subscribe();
    loop {
        if inner.machine.bytes_since_snapshot() >= inner.options.snapshot_every_bytes
            && inner.raft.trigger().snapshot().await.is_err()
        {
            return;
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

impl Replica {
    /// Takes a snapshot now. Returns its index.
    ///
    /// # Errors
    /// Fails if nothing is applied yet, the replica stops, or the snapshot cannot be written. A
    /// failed write is retried in the background.
    pub async fn snapshot(&self) -> Result<u64, ChangeError> {
        let inner = &self.inner;
        let stopped = || ChangeError::Refused(inner.why_stopped().unwrap_or("stopped".to_owned()));
        let (now, mut status) = (self.status(), inner.status.subscribe());
        let mut unwritten = inner.machine.unwritten();
        unwritten.mark_unchanged();
        let wanted = now.applied;
        if wanted == 0 {
            return Err(ChangeError::Refused("nothing is applied yet".to_owned()));
        }
        if now.snapshot < Some(wanted) {
            let triggered = inner.raft.trigger().snapshot().await;
            triggered.map_err(|_| stopped())?;
        }
        let done =
            status.wait_for(|status| status.snapshot >= Some(wanted) || status.fault.is_some());
        let failed = async {
            while unwritten.changed().await.is_ok() {
                if let Some(why) = unwritten.borrow_and_update().clone() {
                    return why;
                }
            }
            std::future::pending().await
        };
        let written = tokio::select! {
            biased;
            written = done => written.map_err(|_| stopped())?,
            why = failed => return Err(ChangeError::Refused(format!("not written yet: {why}"))),
            () = inner.cancel.cancelled() => return Err(stopped()),
        };
        match (&written.fault, written.snapshot) {
            (None, Some(index)) => Ok(index),
            (Some(fault), _) => Err(ChangeError::Refused(fault.clone())),
            (None, None) => Err(ChangeError::Unknown("no snapshot".to_owned())),
        }
    }
}

impl ReplicaInner {
    /// Returns the time for which a leader is trusted without contact: the length of its lease.
    pub(super) fn lease(&self) -> Duration {
        self.options.election_timeout.end
    }

    /// Updates whether this replica has a quorum, and returns what the status shows at once.
    fn shown(&self, metrics: &Metrics) -> ShownMetrics {
        ShownMetrics {
            is_running: metrics.running_state.is_ok(),
            vote: metrics.vote,
            state: metrics.state,
            leader: metrics.current_leader,
            leads: self.take_in(metrics),
            is_caught_up: self.is_caught_up(metrics),
            snapshot: metrics.snapshot,
            purged: metrics.purged,
            membership: *metrics.membership_config.log_id(),
        }
    }

    /// Updates everything derived from Raft's metrics.
    pub(super) fn refresh(&self) {
        let metrics = self.with_metrics(Metrics::clone);
        let membership = metrics.membership_config.membership();
        for (id, node) in membership.nodes() {
            self.links.learn(*id, node);
        }
        if let Some(cluster) = types::cluster_of(membership)
            && let Err(error) = self.links.identity.enter(cluster)
            // Retried at the next refresh.
            && !is_shortage(&error)
        {
            self.fault.set(format!("identity: {error}"));
        }
        if let Err(fatal) = &metrics.running_state
            && self.why_stopped().is_none()
        {
            self.fault.set(fatal.to_string());
        }
        let leads = self.take_in(&metrics);
        let status = self.status_of(&metrics, leads);
        self.status.send_if_modified(|old| {
            log_changes(old, &status);
            let is_new = *old != status;
            if is_new {
                *old = status;
            }
            is_new
        });
    }

    /// Updates whether this replica has a quorum. Returns whether it leads with one.
    fn take_in(&self, metrics: &Metrics) -> bool {
        let leads = self.leads_with_quorum(metrics);
        self.has_quorum
            .send_if_modified(|has_quorum| std::mem::replace(has_quorum, leads) != leads);
        self.confirm(metrics, leads);
        leads
    }

    fn leads_with_quorum(&self, metrics: &Metrics) -> bool {
        if metrics.state != ServerState::Leader {
            return false;
        }
        let acked = metrics.last_quorum_acked.as_ref();
        self.is_alone(metrics) || acked.is_some_and(|acked| acked.elapsed() <= self.lease())
    }

    /// Whether this replica is the only voter, and so its own quorum.
    fn is_alone(&self, metrics: &Metrics) -> bool {
        let id = self.links.identity.id;
        let mut voters = metrics.membership_config.voter_ids();
        voters.all(|voter| voter == id)
    }

    /// Records the time up to which everything committed is applied here.
    fn confirm(&self, metrics: &Metrics, leads: bool) {
        if leads {
            let acked = metrics.last_quorum_acked.as_ref();
            let acked = acked.filter(|_| !self.is_alone(metrics));
            let age = acked.map_or(Duration::ZERO, |acked| acked.elapsed());
            let at = Instant::now() - age;
            self.heard.led(metrics.vote, metrics.cluster_committed, at);
        }
        if let Some(applied) = metrics.last_applied {
            self.heard.applied(applied);
        }
    }

    fn status_of(&self, metrics: &Metrics, leads: bool) -> Status {
        let fault = self.fault.get();
        let is_member = metrics.membership_config.nodes().next().is_some();
        let is_removed = self.is_removed.load(Ordering::Acquire);
        let role = match metrics.state {
            _ if fault.is_some() => Role::Stopped,
            ServerState::Shutdown => Role::Stopped,
            _ if !is_member => Role::Forming,
            _ if is_removed => Role::Removed,
            ServerState::Leader => Role::Leader,
            ServerState::Follower => Role::Follower,
            ServerState::Candidate => Role::Candidate,
            ServerState::Learner => Role::Learner,
        };
        let was_caught_up = self.status.borrow().caught_up;
        let has_quorum = fault.is_none() && (leads || self.follows_with_quorum(metrics));
        let search = match is_member && has_quorum {
            true => PeerDiscovery::default(),
            false => lock(&self.search).clone(),
        };
        Status {
            id: self.options.id,
            cluster_id: types::cluster_of(metrics.membership_config.membership()),
            role,
            term: metrics.current_term,
            leader: metrics.current_leader.and_then(|id| u8::try_from(id).ok()),
            has_quorum,
            committed: committed_index(metrics),
            applied: applied_index(metrics),
            last_log: last_log_index(metrics),
            snapshot: metrics.snapshot.as_ref().map(|id| public_index(Some(id))),
            purged: public_index(metrics.purged.as_ref()) + 1,
            caught_up: was_caught_up || self.is_caught_up(metrics),
            is_removed,
            fault,
            unjoined: search.problem.filter(|_| !is_member),
            peers: search.peers,
            waiting: self.log.waiting().borrow().clone(),
            members: self.members(metrics),
        }
    }

    fn follows_with_quorum(&self, metrics: &Metrics) -> bool {
        metrics.state != ServerState::Leader
            && metrics.current_leader.is_some()
            && self.heard.has_quorum(self.lease())
    }

    /// Whether this replica leads and has applied an entry of its own term.
    pub(super) fn has_applied_own_term(&self) -> bool {
        self.with_metrics(|metrics| {
            metrics.state == ServerState::Leader && self.is_caught_up(metrics)
        })
    }

    /// Whether this replica has caught up. A leader has once it has applied an entry of its own
    /// term, which covers all earlier ones.
    fn is_caught_up(&self, metrics: &Metrics) -> bool {
        let Some(applied) = metrics.last_applied else {
            return false;
        };
        if metrics.state == ServerState::Leader {
            return applied.leader_id == metrics.vote.leader_id;
        }
        self.heard
            .catch_up()
            .is_some_and(|target| applied >= target)
    }

    fn members(&self, metrics: &Metrics) -> BTreeMap<u8, Member> {
        let connected = self.connected.borrow();
        let known = &self.status.borrow().members;
        let membership = metrics.membership_config.membership();
        let voters: BTreeSet<u64> = membership.voter_ids().collect();
        let member = |(id, node): (&u64, &types::Node)| {
            let is_us = *id == self.links.identity.id;
            let matched = metrics.replication.as_ref().and_then(|all| all.get(id));
            let lag = matched.map(|matched| {
                last_log_index(metrics).saturating_sub(public_index(matched.as_ref()))
            });
            let is_connected = is_us || connected.contains(id);
            let silent_since = u8::try_from(*id)
                .ok()
                .and_then(|id| known.get(&id)?.silent_since);
            let member = Member {
                address: node.address.clone(),
                labels: node.labels.clone(),
                is_voter: voters.contains(id),
                is_connected,
                silent_since: (!is_connected).then(|| silent_since.unwrap_or_else(Instant::now)),
                is_refusing: self.links.peer(*id).is_some_and(|peer| peer.is_refusing()),
                lag: if is_us {
                    metrics.replication.is_some().then_some(0)
                } else {
                    lag
                },
            };
            u8::try_from(*id).ok().map(|id| (id, member))
        };
        membership.nodes().filter_map(member).collect()
    }
}

/// Logs the changes of the status that an operator needs to follow events.
fn log_changes(old: &Status, new: &Status) {
    if (old.role, old.leader, old.term) != (new.role, new.leader, new.term) {
        tracing::info!(role = ?new.role, leader = new.leader, term = new.term, "role changed");
    }
    let members = |status: &Status, votes: bool| {
        let members = status.members.iter();
        let wanted = members.filter(|(_, member)| member.is_voter == votes);
        wanted.map(|(id, _)| *id).collect::<Vec<u8>>()
    };
    let all = |status| (members(status, true), members(status, false));
    let (voters, learners) = all(new);
    if all(old) != (voters.clone(), learners.clone()) {
        tracing::info!(?voters, ?learners, "membership changed");
    }
    if old.caught_up != new.caught_up {
        tracing::info!(applied = new.applied, "caught up with the cluster");
    }
    if new.is_removed && !old.is_removed {
        tracing::error!(
            "removed from the cluster; this replica gets no more updates and should be stopped"
        );
    }
}
