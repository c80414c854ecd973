//! Permanent removal of members, at their own request or by the leader while they are absent, and
//! readmission of a removed replica.
//!
//! The caller decides which members to remove, because it knows the desired size of the cluster.
//! This module checks that the others can do without a voter (enough voters remain, and most of
//! them respond), and that a member to be removed as absent does not respond.

use std::collections::BTreeSet;

use openraft::Instant as _;

use super::{Replica, ReplicaInner};
use crate::error::ChangeError;
use crate::options::{Formation, Peers};
use crate::types::Node;
use crate::wire::proto;
use crate::wire::proto::change_request::Change;
use crate::wire::proto::change_response::Result as Outcome;

impl Replica {
    /// Removes this replica from its cluster for good, if at least `voters_min` voters remain and
    /// most of them respond. Returns the log index.
    ///
    /// # Errors
    /// Fails if the replica must stay, or no leader could be asked.
    pub async fn leave(&self, voters_min: usize) -> Result<u64, ChangeError> {
        let remove = Change::Remove(proto::Remove {
            id: self.inner.links.identity.id,
            voters_min: voters_min.max(1) as u64,
        });
        Ok(self.inner.change(remove).await?.index)
    }

    /// Removes the absent member `id`, if this replica leads, at least `voters_min` voters remain
    /// and most of them respond. Returns the log index.
    ///
    /// # Errors
    /// Fails if the member is present or must stay.
    pub async fn remove_absent(&self, id: u8, voters_min: usize) -> Result<u64, ChangeError> {
        match self.inner.remove_absent(id.into(), voters_min).await {
            Outcome::Changed(changed) => Ok(changed.index),
            Outcome::Refused(why) => Err(ChangeError::Refused(why)),
            Outcome::Unknown(why) => Err(ChangeError::Unknown(why)),
            Outcome::NotLeader(_) => Err(ChangeError::Refused("leads no more".to_owned())),
        }
    }

    /// Requests, after this replica was removed, to be admitted again as a learner with its
    /// existing log.
    ///
    /// # Errors
    /// Fails if the replica was not removed, or no member admits it.
    pub async fn rejoin(&self) -> Result<(), ChangeError> {
        let inner = &self.inner;
        if !inner.status.borrow().is_removed {
            let why = "this replica was not removed";
            return Err(ChangeError::Refused(why.to_owned()));
        }
        inner.ask_in_again().await.map_err(ChangeError::Refused)
    }
}

impl ReplicaInner {
    /// Checks whether a member may leave or be removed as absent. Returns why it must stay.
    pub(super) fn check_shrink(&self, remove: &proto::Remove) -> Result<(), String> {
        let voters = self.voters();
        if remove.voters_min == 0 || !voters.contains(&remove.id) {
            return Ok(());
        }
        let id = remove.id;
        let rest = voters.len() - 1;
        if (rest as u64) < remove.voters_min {
            let least = remove.voters_min;
            return Err(format!(
                "replica {id} stays: {rest} voters would be left, but at least {least} are required"
            ));
        }
        let mut answering = self.answering();
        answering.remove(&id);
        let answering = voters.intersection(&answering).count();
        if answering * 2 <= rest {
            return Err(format!(
                "replica {id} stays: only {answering} of the {rest} other voters respond"
            ));
        }
        Ok(())
    }

    /// Returns the ids of this replica and of those that respond to it while it leads.
    fn answering(&self) -> BTreeSet<u64> {
        let me = self.links.identity.id;
        let connected = self.connected.borrow().clone();
        self.with_metrics(|metrics| {
            let acked = metrics.heartbeat.iter().flatten();
            let lately = acked.filter(|(id, acked)| {
                let is_late = acked.is_none_or(|acked| acked.elapsed() > self.lease());
                !is_late && connected.contains(id)
            });
            lately.map(|(id, _)| *id).chain([me]).collect()
        })
    }

    /// Whether member `id` runs with the store recorded in the membership.
    pub(super) async fn is_there(&self, id: u64, known: &Node) -> bool {
        id == self.links.identity.id
            || self.links.reachability.hears().contains(&id)
            || (self.ask(&known.address).await)
                .is_ok_and(|info| (info.id, info.store) == (id, known.store))
    }

    async fn remove_absent(&self, id: u64, voters_min: usize) -> Outcome {
        let refused = |why: String| Outcome::Refused(why);
        let _alone = self.changing.lock().await;
        if self.settled_voters().is_none() {
            let why = "this replica is not the leader, or a membership change is in progress";
            return refused(why.to_owned());
        }
        let Some(known) = self.node(id) else {
            return refused(format!("replica {id} is not a member"));
        };
        let voters_min = voters_min.max(1) as u64;
        if let Err(why) = self.check_shrink(&proto::Remove { id, voters_min }) {
            return refused(why);
        }
        if self.is_there(id, &known).await {
            return refused(format!("replica {id} runs at {}", known.address));
        }
        self.remove_here(id).await
    }

    /// Searches for members at the configured peers, then at the last known members, and asks them
    /// to admit this replica again.
    async fn ask_in_again(&self) -> Result<(), String> {
        let (Formation::Join(configured)
        | Formation::Bootstrap {
            peers: configured, ..
        }) = &self.options.formation;
        let known = self.others().1.into_iter().map(|(_, address)| address);
        let known = Peers::List(known.collect());
        let mut problem = "no member responds".to_owned();
        for peers in [configured, &known] {
            let found = self.find(peers).await;
            match self.request_join(&found).await {
                Ok(()) => return Ok(()),
                Err(why) => problem = why,
            }
        }
        Err(problem)
    }
}
