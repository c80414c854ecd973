//! Scales the membership with a StatefulSet, without an operator.
//!
//! The StatefulSet states how many pods it wants, and a pod's name states its number. Nothing else
//! distinguishes a pod that restarts from one that is scaled down: both are stopped, are away for a
//! while, and have no address in between. So replicas do three things, each only after reading the
//! StatefulSet again, and none if it cannot be read (ADR 0009):
//!
//! - A replica that stops and is beyond the wanted number removes itself, after its last update.
//! - The leader removes a member beyond it that was away for long, because it was killed before it
//!   could remove itself.
//! - A replica that was removed and is wanted again asks to rejoin with the log that it has.
//!
//! If the wanted number is 0, nobody is removed. `raft` refuses to remove members that the others
//! cannot do without, and promotes learners that keep up, unless the config forbids it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::engines::discovery::{KubernetesAccess, StatefulSetScale};
use api::ports::BoxFuture;
use raft::{Replica, Role, Status};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::intervals::every;
use crate::config::{Config, Formation, StatefulSetConfig};

/// Label of a member with the name of its StatefulSet.
pub(super) const LABEL: &str = "statefulset";
/// Interval at which the members are checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interval at which the StatefulSet is read while a member may have to leave or rejoin.
const READ_EVERY: Duration = Duration::from_secs(5);
/// Maximum time that a stopping replica waits for the StatefulSet.
const READ_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time for which an unwanted replica tries to remove itself.
const LEAVE_DEADLINE: Duration = Duration::from_secs(10);
/// Pause between two attempts to remove this replica.
const LEAVE_PAUSE: Duration = Duration::from_millis(200);

/// Source of the wanted number of replicas.
pub trait ScaleSource: Send + Sync {
    /// Returns the current scale, or why it cannot be read.
    fn read(&self) -> BoxFuture<'_, Result<StatefulSetScale, String>>;
}

/// Reads the scale of the StatefulSet in a config.
struct KubernetesScale {
    access: KubernetesAccess,
    name: String,
}

impl ScaleSource for KubernetesScale {
    fn read(&self) -> BoxFuture<'_, Result<StatefulSetScale, String>> {
        Box::pin(StatefulSetScale::read(&self.access, &self.name))
    }
}

/// Returns the source for the StatefulSet that the config names, if any.
pub(super) fn source(config: &StatefulSetConfig) -> Option<Arc<dyn ScaleSource>> {
    Some(Arc::new(KubernetesScale {
        name: config.name.clone()?,
        access: config.access.clone(),
    }))
}

/// Whether `scale` includes replica `id`. A scale of zero stops the cluster but does not end it.
fn wants(scale: StatefulSetScale, id: u8) -> bool {
    // Ids start at 1, ordinals at 0.
    let ordinal = u64::from(id).saturating_sub(1);
    let end = scale.first.saturating_add(scale.replicas);
    scale.replicas == 0 || (scale.first..end).contains(&ordinal)
}

/// Adjusts the membership to the wanted scale, as far as this replica may.
pub(super) struct Scaling {
    source: Arc<dyn ScaleSource>,
    /// Name of the StatefulSet.
    set: String,
    absent_after: Duration,
    /// Minimum number of voters to keep.
    voters_min: usize,
    /// Why the membership differs from the wanted one; `None` if it does not.
    blocked_reason: Mutex<Option<String>>,
}

impl Scaling {
    /// Creates the component if the config of the replica names a StatefulSet.
    pub(super) fn new(config: &Config, source: Option<Arc<dyn ScaleSource>>) -> Option<Arc<Self>> {
        let set = &config.cluster.statefulset;
        Some(Arc::new(Self {
            source: source?,
            set: set.name.clone()?,
            absent_after: set.remove_absent_after,
            voters_min: match &config.formation {
                Formation::Peers { expect, .. } | Formation::Dns { expect, .. } => *expect,
                Formation::Alone | Formation::Join(_) => 1,
            },
            blocked_reason: Mutex::default(),
        }))
    }

    /// Returns why the membership differs from the wanted one; `None` if it does not.
    pub(super) fn blocked_reason(&self) -> Option<String> {
        let blocked_reason = self.blocked_reason.lock();
        blocked_reason
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn set_blocked_reason(&self, why: Option<String>) {
        let mut blocked_reason = self
            .blocked_reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *blocked_reason != why {
            if let Some(why) = &why {
                tracing::warn!(why, "the membership does not match the desired scale");
            }
            *blocked_reason = why;
        }
    }

    /// Removes members that are gone and lets this replica rejoin, until `stop`.
    pub(super) async fn follow(self: Arc<Self>, replica: Replica, stop: CancellationToken) {
        let mut ticks = every(LOOK_EVERY);
        let (mut absences, mut read) = (Absences::default(), None);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let (status, now) = (replica.status(), Instant::now());
            let leads = status.role == Role::Leader && status.has_quorum;
            let absent = match leads {
                true => absences.look(now, &self.pods(&status), self.absent_after),
                false => {
                    absences = Absences::default();
                    Vec::new()
                }
            };
            if absent.is_empty() && !status.is_removed {
                self.set_blocked_reason(None);
                read = None;
                continue;
            }
            if read.is_some_and(|at| now.duration_since(at) < READ_EVERY) {
                continue;
            }
            read = Some(now);
            let scale = stop.run_until_cancelled(self.source.read()).await;
            let why = match scale {
                None => return,
                Some(Ok(scale)) if status.is_removed => self.try_rejoin(&replica, scale).await,
                Some(Ok(scale)) => {
                    let removed = self.remove_one(&replica, scale, &absent).await;
                    if removed == Ok(true) {
                        // The next one, if any, need not wait.
                        read = None;
                    }
                    removed.err()
                }
                Some(Err(why)) => Some(format!(
                    "StatefulSet {} cannot be read, and {}: {why}",
                    self.set,
                    told(&absent)
                )),
            };
            self.set_blocked_reason(why);
        }
    }

    /// Returns the members that are pods of the StatefulSet, each with whether it is connected.
    fn pods(&self, status: &Status) -> BTreeMap<u8, bool> {
        let members = status.members.iter();
        let pods = members.filter(|(_, member)| member.labels.get(LABEL) == Some(&self.set));
        pods.map(|(id, member)| (*id, member.is_connected || *id == status.id))
            .collect()
    }

    /// Removes the absent member with the highest id that is no longer wanted. Returns whether
    /// there was one, or why it could not be removed.
    async fn remove_one(
        &self,
        replica: &Replica,
        scale: StatefulSetScale,
        absent: &[u8],
    ) -> Result<bool, String> {
        let Some(id) = absent.iter().rev().find(|id| !wants(scale, **id)) else {
            return Ok(false);
        };
        match replica.remove_absent(*id, self.voters_min).await {
            Ok(index) => {
                let wanted = scale.replicas;
                tracing::info!(id, index, wanted, "removed a replica that was scaled down");
                Ok(true)
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Asks to rejoin if this replica is wanted. Returns why it is still not a member, if so.
    async fn try_rejoin(&self, replica: &Replica, scale: StatefulSetScale) -> Option<String> {
        if !wants(scale, replica.status().id) {
            return None;
        }
        match replica.rejoin().await {
            Ok(()) => {
                tracing::info!("rejoined the cluster with its previous log");
                None
            }
            Err(error) => Some(format!("this replica was removed and is wanted: {error}")),
        }
    }

    /// Removes this replica from the cluster if it is no longer wanted. If that is unknown, it
    /// stays, and the leader removes it later.
    pub(super) async fn leave(&self, replica: &Replica) {
        let status = replica.status();
        let is_member = status.members.contains_key(&status.id) && !status.is_removed;
        if !is_member || status.fault.is_some() {
            return;
        }
        let left = tokio::time::timeout(LEAVE_DEADLINE, self.try_to_leave(replica, status.id));
        if left.await.is_err() {
            tracing::warn!("stays a member: could not leave in time");
        }
    }

    async fn try_to_leave(&self, replica: &Replica, id: u8) {
        loop {
            let scale = match tokio::time::timeout(READ_TIMEOUT, self.source.read()).await {
                Ok(Ok(scale)) => scale,
                Ok(Err(why)) => {
                    let set = &self.set;
                    tracing::warn!(set, why, "stays a member: the StatefulSet cannot be read");
                    return;
                }
                Err(_) => {
                    tracing::warn!("stays a member: the StatefulSet cannot be read in time");
                    return;
                }
            };
            if wants(scale, id) {
                return;
            }
            match replica.leave(self.voters_min).await {
                Ok(index) => {
                    let wanted = scale.replicas;
                    tracing::info!(index, wanted, "left the cluster permanently");
                    return;
                }
                Err(error) => tracing::warn!(%error, "cannot leave yet"),
            }
            tokio::time::sleep(LEAVE_PAUSE).await;
        }
    }
}

fn told(absent: &[u8]) -> String {
    if absent.is_empty() {
        return "this replica was removed".to_owned();
    }
    let ids: Vec<_> = absent.iter().map(u8::to_string).collect();
    format!("replicas are away: {}", ids.join(", "))
}

/// Times since which members have been absent. Pure: times and observations are arguments.
#[derive(Debug, Default)]
struct Absences(BTreeMap<u8, Instant>);

impl Absences {
    /// Records which members are present. Returns all that have been absent for at least `after`.
    fn look(&mut self, now: Instant, members: &BTreeMap<u8, bool>, after: Duration) -> Vec<u8> {
        let is_away = |id: &u8| members.get(id) == Some(&false);
        self.0.retain(|id, _| is_away(id));
        for id in members.keys().filter(|id| is_away(id)) {
            self.0.entry(*id).or_insert(now);
        }
        let since = self.0.iter();
        let long = since.filter(|(_, since)| now.duration_since(**since) >= after);
        long.map(|(id, _)| *id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_within_the_replica_count_are_wanted() {
        let wanted = |first, replicas| -> Vec<u8> {
            let scale = StatefulSetScale { first, replicas };
            (1..=7).filter(|id| wants(scale, *id)).collect()
        };
        assert_eq!(wanted(0, 3), [1, 2, 3]);
        assert_eq!(wanted(1, 3), [2, 3, 4]);
        assert_eq!(wanted(0, 9), [1, 2, 3, 4, 5, 6, 7]);
        // Scaled to zero means stopped.
        assert_eq!(wanted(0, 0), [1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_replica_seen_in_between_was_not_absent() {
        let (mut absences, start) = (Absences::default(), Instant::now());
        let after = Duration::from_secs(60);
        let mut look = |seconds: u64, there: &[(u8, bool)]| {
            let there = there.iter().copied().collect();
            absences.look(start + Duration::from_secs(seconds), &there, after)
        };
        assert!(look(0, &[(4, false), (5, false)]).is_empty());
        assert!(look(30, &[(4, true), (5, false)]).is_empty());
        assert_eq!(look(60, &[(4, false), (5, false)]), [5]);
        assert_eq!(look(120, &[(4, false), (5, false)]), [4, 5]);
        // One is back, the other is no longer a member.
        assert!(look(150, &[(4, true)]).is_empty());
        assert!(look(151, &[(4, false), (5, false)]).is_empty());
    }
}
