//! Admits or refuses calls between members before any other part of a call takes effect.
//!
//! Such a call names the intended cluster, replica and store, and its sender. It is refused if any
//! of these is wrong, since an old address may belong to another replica by now. The sender must be
//! a member and present the id of its store, which a member reveals only within its cluster.
//!
//! A replica that is new or was away may not know the member that now leads, under an id that is
//! new or that belonged to another store. So an unknown leader or candidate is accepted while no
//! other leader is heard; otherwise a cluster could lose its quorum. Its power is limited:
//! [`term_max`] keeps a single call from using up all terms, after which no election would be
//! possible. docs/adr/0010 describes the remaining trust.

use tonic::Status;

use crate::files::is_shortage;
use crate::net::PeerSender;
use crate::net::validate::term_max;
use crate::replica::ReplicaInner;
use crate::types::{Metrics, Node, Vote};
use crate::wire::{self, MalformedMessageError, proto};

/// Maximum term that a new replica accepts from the first leader it hears.
const TERM_FIRST_MAX: u64 = 1 << 40;
/// Maximum id of a replica; ids start at 1.
const ID_MAX: u64 = 255;

/// Purpose of a call, as far as it determines which senders may make it.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallPurpose {
    /// Call of a leader with this vote.
    Lead(Vote),
    /// Call of a candidate with this vote.
    Elect(Vote),
    /// Any other call that only members may make.
    Member,
}

impl ReplicaInner {
    /// Checks that a call is meant for this replica and that its sender may make it. Returns the
    /// sender's id. `sender` is `None` if the transport does not provide it. A call without a
    /// `header` is rejected.
    pub(super) fn admit(
        &self,
        sender: Option<PeerSender>,
        header: Option<&proto::Header>,
        purpose: CallPurpose,
    ) -> Result<u64, Status> {
        let header = header.ok_or(MalformedMessageError("no header"))?;
        let admitted = self.check(sender, header, purpose);
        if let Err(refused) = &admitted {
            self.tell_refused(header.from, refused.message());
        }
        admitted
    }

    fn tell_refused(&self, from: u64, why: &str) {
        if !self.is_member() || self.cancel.is_cancelled() {
            // Expected: other members learn slightly earlier that a cluster forms, and slightly
            // later that this replica stops.
            tracing::debug!(from, why, "refused a peer's call");
        } else if self.refusals.try_acquire() {
            tracing::warn!(from, why, "refused a peer's call");
        }
    }

    fn check(
        &self,
        sender: Option<PeerSender>,
        header: &proto::Header,
        purpose: CallPurpose,
    ) -> Result<u64, Status> {
        let (identity, from) = (&self.links.identity, header.from);
        if self.cancel.is_cancelled() {
            return Err(refused("replica is stopping"));
        }
        if (header.to, header.to_store) != (identity.id, identity.store) {
            return Err(refused(format!(
                "meant for another store of replica {}, this is replica {}",
                header.to, identity.id
            )));
        }
        if !(1..=ID_MAX).contains(&from) || from == identity.id {
            return Err(refused(format!("replica {from} cannot call this one")));
        }
        let cluster = wire::join_optional(header.cluster_high, header.cluster_low);
        let cluster = cluster.ok_or(MalformedMessageError("no cluster"))?;
        let enters = matches!(purpose, CallPurpose::Lead(_));
        if !identity.cluster().map_or(enters, |ours| ours == cluster) {
            return Err(self.other_cluster(cluster));
        }
        if let Some(sender) = sender {
            sender.bind(from)?;
        }
        self.check_sender(header, purpose)?;
        if enters && !identity.enter(cluster).map_err(|error| self.lost(&error))? {
            return Err(self.other_cluster(cluster));
        }
        self.links.heard_from(from);
        Ok(from)
    }

    /// Returns the refusal of a call meant for the cluster `theirs`. It reveals how the id of this
    /// replica's cluster begins, as this replica does to any caller.
    pub(super) fn other_cluster(&self, theirs: u128) -> Status {
        let ours = match self.links.identity.cluster_halves() {
            (0, 0) => "in none".to_owned(),
            (first, _) => format!("in cluster {}", wire::shown_first(first)),
        };
        refused(format!(
            "meant for cluster {}, this replica is {ours}",
            wire::shown_id(theirs)
        ))
    }

    fn lost(&self, error: &std::io::Error) -> Status {
        if is_shortage(error) {
            return Status::resource_exhausted(format!("identity: {error}"));
        }
        self.fault.set(format!("identity: {error}"));
        Status::aborted(format!("replica stopped: {error}"))
    }

    fn check_sender(&self, header: &proto::Header, purpose: CallPurpose) -> Result<(), Status> {
        let from = header.from;
        // Call this before locking Raft's metrics: one lock must not be taken under the other.
        let hears_other = self.hears_other(from);
        self.with_metrics(|metrics| {
            let known = match known_node(metrics, from) {
                Some(node) => check_store(from, node, header.from_store),
                None => Err(refused(format!("replica {from} is not a member"))),
            };
            match (known, purpose) {
                (Ok(()), _) => {}
                (Err(_), CallPurpose::Lead(_) | CallPurpose::Elect(_))
                    if is_new(metrics) || !hears_other => {}
                (Err(why), _) => return Err(why),
            }
            match purpose {
                CallPurpose::Lead(vote) => check_vote(from, vote, true, metrics),
                CallPurpose::Elect(vote) => check_vote(from, vote, false, metrics),
                CallPurpose::Member => Ok(()),
            }
        })
    }

    /// Returns this replica's current vote.
    pub(super) fn own_vote(&self) -> Vote {
        self.with_metrics(|metrics| metrics.vote)
    }

    /// Whether a leader other than `from`, possibly this replica, has a quorum.
    fn hears_other(&self, from: u64) -> bool {
        let status = self.status.borrow();
        let leader = status.leader.map(u64::from);
        status.has_quorum && leader.is_some_and(|leader| leader != from)
    }
}

/// Returns the member `id` of the newest membership, or else of the newest committed one; `None` if
/// neither has it.
pub(super) fn known_node(metrics: &Metrics, id: u64) -> Option<&Node> {
    let newest = metrics.membership_config.membership().get_node(&id);
    newest.or_else(|| {
        let committed = metrics.committed_membership_config.membership();
        committed.get_node(&id)
    })
}

/// Whether no membership is known yet.
fn is_new(metrics: &Metrics) -> bool {
    metrics.membership_config.nodes().next().is_none()
}

/// Refuses a caller that uses the id of a member without knowing its store.
pub(crate) fn check_store(id: u64, node: &Node, shown: u64) -> Result<(), Status> {
    if shown == node.store {
        return Ok(());
    }
    Err(refused(format!("replica {id} has another store")))
}

fn check_vote(from: u64, vote: Vote, leads: bool, metrics: &Metrics) -> Result<(), Status> {
    let (term, node) = (vote.leader_id.term, vote.leader_id.node_id);
    if node != from || vote.committed != leads {
        return Err(refused(format!(
            "replica {from} shows a vote of replica {node}"
        )));
    }
    let most = match is_new(metrics) {
        true => TERM_FIRST_MAX,
        false => term_max(metrics.vote.leader_id.term),
    };
    if term > most {
        return Err(refused(format!(
            "term {term} of replica {from} is above {most}"
        )));
    }
    Ok(())
}

fn refused(why: impl Into<String>) -> Status {
    Status::failed_precondition(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_must_show_its_store() {
        let node = Node {
            store: 7,
            ..Node::default()
        };
        assert!(check_store(2, &node, 7).is_ok());
        for other in [0, 8] {
            assert!(check_store(2, &node, other).is_err());
        }
    }
}
