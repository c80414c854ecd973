//! Type parameters for openraft, which stay inside this crate.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;

openraft::declare_raft_types!(
    /// Type configuration for Raft over opaque commands.
    pub(crate) Config:
        D = Command,
        R = Reply,
        NodeId = u64,
        Node = Node,
        AsyncRuntime = crate::determinism::runtime::Runtime,
);

pub(crate) type LeaderId = openraft::impls::leader_id_adv::LeaderId<u64, u64>;
pub(crate) type LogId = openraft::LogId<LeaderId>;
pub(crate) type Vote = openraft::Vote<LeaderId>;
pub(crate) type Payload = openraft::EntryPayload<Command, u64, Node>;
pub(crate) type Entry = openraft::Entry<LeaderId, Payload>;
pub(crate) type Membership = openraft::Membership<u64, Node>;
pub(crate) type StoredMembership = openraft::StoredMembership<LeaderId, u64, Node>;
pub(crate) type SnapshotMeta = openraft::SnapshotMeta<LeaderId, u64, Node>;
pub(crate) type Metrics = openraft::RaftMetrics<Config>;

/// Bytes of a command. Formatting shows only their number.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Command(pub(crate) Bytes);

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Reply of the machine. Empty for entries without a command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Reply(pub(crate) Vec<u8>);

/// Member of a cluster, as recorded in the membership.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Node {
    /// Host and port of the member's peer listener.
    pub(crate) address: String,
    /// `key=value` pairs that the member announces about itself.
    pub(crate) labels: BTreeMap<String, String>,
    /// Random id of the member's store. A replica that lost its store draws a new id, so that calls
    /// meant for the old store, which has promised votes and entries, never reach the new one.
    pub(crate) store: u64,
    /// Random id of the cluster, which is the same for every member.
    pub(crate) cluster: u128,
}

/// Builds the log id of an entry written by the leader `node_id` of `term`.
pub(crate) fn log_id(term: u64, node_id: u64, index: u64) -> LogId {
    let leader_id = LeaderId { term, node_id };
    LogId { leader_id, index }
}

/// Returns the public index: openraft counts from 0, the public API from 1; 0 stands for `None`.
pub(crate) fn public_index(log_id: Option<&LogId>) -> u64 {
    log_id.map_or(0, |log_id| log_id.index + 1)
}

/// Returns the index of the last entry known to be committed.
pub(crate) fn committed_index(metrics: &Metrics) -> u64 {
    public_index(metrics.cluster_committed.as_ref())
        .max(public_index(metrics.local_committed.as_ref()))
}

/// Returns the index of the last applied entry.
pub(crate) fn applied_index(metrics: &Metrics) -> u64 {
    public_index(metrics.last_applied.as_ref())
}

/// Returns the index of the last entry in the local log.
pub(crate) fn last_log_index(metrics: &Metrics) -> u64 {
    metrics.last_log_index.map_or(0, |last| last + 1)
}

/// Returns the id of the cluster that a membership belongs to; `None` if it has no members.
pub(crate) fn cluster_of(membership: &Membership) -> Option<u128> {
    membership.nodes().next().map(|(_, node)| node.cluster)
}
