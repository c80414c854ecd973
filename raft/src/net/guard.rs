//! Guards peer calls: decides whether a caller is believed, before anything of the call is used.
//!
//! A call between members names the cluster, the replica and the store it is meant for, and who makes
//! it. It is refused when one of them is another: an old address may be somebody else's by now. Who
//! makes it must be a member, and show its store's number, which only members are told.
//!
//! A replica that was away may not know of a member that came meanwhile, and that one may lead by now.
//! So a leader or candidate that is unknown is believed as long as no other leader is heard: without
//! that a cluster could be left without a quorum. What it can do is bounded: a term may be at most
//! [`TERM_LEAP_MAX`] ahead, or a single call could use all terms up, and there were no election any
//! more. docs/adr/0025-who-is-listened-to.md says which trust is left.

use std::sync::{Arc, OnceLock};

use openraft::async_runtime::WatchReceiver;
use tonic::Status;

use crate::files::is_shortage;
use crate::replica::ReplicaInner;
use crate::types::{self, LogId, Node, Vote};
use crate::wire::{self, MalformedMessageError, proto};

/// How far ahead of this replica's a term may be: more elections than a replica can miss, and few
/// enough that no number of calls reaches the last term.
const TERM_LEAP_MAX: u64 = 1_000_000;
/// The greatest term of the first leader that a new replica hears.
const TERM_FIRST_MAX: u64 = 1 << 40;
/// Ids are `1..=ID_MAX`.
const ID_MAX: u64 = 255;
/// A member with this label shows its store in every call.
pub(crate) const SHOWS_STORE: &str = "peer";

/// Whom a connection belongs to: the first id named on it, or the one its handshake has proven.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerSender {
    id: Arc<OnceLock<u64>>,
    lacks_secret: bool,
}

impl PeerSender {
    /// Of a connection whose handshake has proven its id.
    pub(super) fn proven(id: u64) -> Self {
        Self {
            id: Arc::new(OnceLock::from(id)),
            lacks_secret: false,
        }
    }

    /// Of a connection that is answered only that it lacks the secret.
    pub(super) fn without_secret() -> Self {
        Self {
            lacks_secret: true,
            ..Self::default()
        }
    }

    /// Whether all its calls are refused.
    pub(super) fn lacks_secret(&self) -> bool {
        self.lacks_secret
    }

    /// Ties the connection to `id`, or refuses it.
    pub(super) fn bind(&self, id: u64) -> Result<(), Status> {
        let bound = *self.id.get_or_init(|| id);
        if bound == id {
            return Ok(());
        }
        Err(Status::failed_precondition(format!(
            "replica {id} is named on a connection of replica {bound}"
        )))
    }
}

/// What a call is for, as far as it matters who makes it.
#[derive(Debug, Clone, Copy)]
pub(super) enum CallPurpose {
    /// To lead under this vote.
    Lead(Vote),
    /// To be elected with this vote.
    Elect(Vote),
    /// What only members do.
    Member,
}

impl ReplicaInner {
    /// Whether a call is meant for this replica and comes from who may make it; answers who.
    pub(super) fn admit(
        &self,
        sender: Option<&PeerSender>,
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
        let metrics = self.raft.metrics();
        let is_forming = RaftView(&metrics.borrow_watched()).is_new();
        if is_forming || self.cancel.is_cancelled() {
            // Others know a moment earlier that a cluster forms, and later that this replica stops.
            tracing::debug!(from, why, "call of a peer refused");
        } else if self.refusals.may_say() {
            tracing::warn!(from, why, "call of a peer refused");
        }
    }

    fn check(
        &self,
        sender: Option<&PeerSender>,
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
            return Err(refused("meant for another cluster"));
        }
        if let Some(sender) = sender {
            sender.bind(from)?;
        }
        self.check_sender(header, purpose)?;
        if enters && !identity.enter(cluster).map_err(|error| self.lost(&error))? {
            return Err(refused("meant for another cluster"));
        }
        self.links.heard_from(from);
        Ok(from)
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
        // Before Raft's metrics are looked at, lest one lock is taken under the other.
        let hears_other = self.hears_other(from);
        self.seen(|seen| {
            match (seen.node(from), purpose) {
                (Some(node), _) => check_store(from, node, header.from_store)?,
                (None, CallPurpose::Lead(_) | CallPurpose::Elect(_))
                    if seen.is_new() || !hears_other => {}
                (None, _) => return Err(refused(format!("replica {from} is no member"))),
            }
            match purpose {
                CallPurpose::Lead(vote) => check_vote(from, vote, true, seen),
                CallPurpose::Elect(vote) => check_vote(from, vote, false, seen),
                CallPurpose::Member => Ok(()),
            }
        })
    }

    /// The vote given last.
    pub(super) fn own_vote(&self) -> Vote {
        self.raft.metrics().borrow_watched().vote
    }

    /// Looks at what Raft knew a moment ago.
    pub(crate) fn seen<T>(&self, look: impl FnOnce(RaftView<'_>) -> T) -> T {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        look(RaftView(&metrics))
    }

    /// Whether a leader other than `from` is heard, or is this replica, and has a quorum.
    fn hears_other(&self, from: u64) -> bool {
        let status = self.status.borrow();
        let leader = status.leader.map(u64::from);
        status.has_quorum && leader.is_some_and(|leader| leader != from)
    }
}

/// What Raft knew a moment ago.
#[derive(Clone, Copy)]
pub(crate) struct RaftView<'a>(&'a types::Metrics);

impl<'a> RaftView<'a> {
    /// A member of the newest membership, or of the newest that is agreed on.
    pub(crate) fn node(self, id: u64) -> Option<&'a Node> {
        let newest = self.0.membership_config.membership().get_node(&id);
        newest.or_else(|| {
            let agreed = self.0.committed_membership_config.membership();
            agreed.get_node(&id)
        })
    }

    /// Its vote.
    pub(crate) fn vote(self) -> Vote {
        self.0.vote
    }

    /// Whether no membership is known yet.
    fn is_new(self) -> bool {
        self.0.membership_config.nodes().next().is_none()
    }
}

/// Refuses whoever goes by a member's id without its store.
pub(crate) fn check_store(id: u64, node: &Node, shown: u64) -> Result<(), Status> {
    // Replicas of earlier builds show none.
    let is_earlier = shown == 0 && !node.labels.contains_key(SHOWS_STORE);
    if is_earlier || shown == node.store {
        return Ok(());
    }
    Err(refused(format!("replica {id} has another store")))
}

fn check_vote(from: u64, vote: Vote, leads: bool, seen: RaftView<'_>) -> Result<(), Status> {
    let (term, node) = (vote.leader_id.term, vote.leader_id.node_id);
    if node != from || vote.committed != leads {
        return Err(refused(format!(
            "replica {from} shows a vote of replica {node}"
        )));
    }
    let most = match seen.is_new() {
        true => TERM_FIRST_MAX,
        false => term_max(seen.vote().leader_id.term),
    };
    if term > most {
        return Err(refused(format!(
            "term {term} of replica {from} is above {most}"
        )));
    }
    Ok(())
}

/// The greatest term that is believed where `known` is the greatest known.
pub(super) fn term_max(known: u64) -> u64 {
    known.saturating_add(TERM_LEAP_MAX)
}

/// Refuses entries that no leader of this term can send.
pub(crate) fn check_entries(
    vote: Vote,
    previous: Option<LogId>,
    committed: Option<LogId>,
    entries: &[types::Entry],
) -> Result<(), MalformedMessageError> {
    let term = vote.leader_id.term;
    let is_later = |id: &LogId| id.leader_id.term > term;
    if previous.iter().chain(&committed).any(is_later) {
        return Err(MalformedMessageError(
            "a log of a later term than the leader's",
        ));
    }
    let mut before = previous;
    for entry in entries {
        let id = entry.log_id;
        let follows = match before {
            Some(before) => before.index.checked_add(1) == Some(id.index) && before < id,
            None => id.index == 0,
        };
        if !follows || is_later(&id) {
            return Err(MalformedMessageError(
                "entries that do not follow each other",
            ));
        }
        before = Some(id);
    }
    Ok(())
}

fn refused(why: impl Into<String>) -> Status {
    Status::failed_precondition(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Entry, LeaderId, Payload};

    fn id(term: u64, index: u64) -> LogId {
        let leader_id = LeaderId { term, node_id: 1 };
        LogId { leader_id, index }
    }

    fn entry(term: u64, index: u64) -> Entry {
        Entry {
            log_id: id(term, index),
            payload: Payload::Blank,
        }
    }

    #[test]
    fn entries_follow_each_other_up_to_the_leaders_term() {
        let vote = Vote::new_committed(5, 1);
        let check = |previous, committed, entries: &[Entry]| {
            check_entries(vote, previous, committed, entries)
        };
        let fine = [entry(3, 8), entry(5, 9)];
        assert_eq!(check(Some(id(3, 7)), Some(id(5, 90)), &fine), Ok(()));
        assert_eq!(check(None, None, &[entry(0, 0)]), Ok(()));
        assert_eq!(check(None, None, &[]), Ok(()));
        for (previous, committed, entries) in [
            (Some(id(6, 7)), None, vec![]),
            (None, Some(id(u64::MAX, 7)), vec![]),
            (Some(id(3, 7)), None, vec![entry(6, 8)]),
            (Some(id(3, 7)), None, vec![entry(3, 9)]),
            (Some(id(3, 7)), None, vec![entry(2, 8)]),
            (Some(id(3, u64::MAX)), None, vec![entry(3, 0)]),
            (None, None, vec![entry(3, 1)]),
        ] {
            assert!(check(previous, committed, &entries).is_err(), "{entries:?}");
        }
    }

    #[test]
    fn a_connection_belongs_to_the_first_that_is_named_on_it() {
        let sender = PeerSender::default();
        assert!(sender.bind(2).is_ok());
        assert!(sender.clone().bind(2).is_ok());
        assert!(sender.clone().bind(3).is_err());
    }

    #[test]
    fn a_member_shows_its_store_unless_it_is_of_an_earlier_build() {
        let mut node = Node {
            store: 7,
            ..Node::default()
        };
        assert!(check_store(2, &node, 0).is_ok());
        assert!(check_store(2, &node, 7).is_ok());
        assert!(check_store(2, &node, 8).is_err());
        node.labels.insert(SHOWS_STORE.to_owned(), "2".to_owned());
        assert!(check_store(2, &node, 0).is_err());
        assert!(check_store(2, &node, 7).is_ok());
    }
}
