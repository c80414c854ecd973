//! Conversions between the wire types and openraft's types.
//!
//! openraft's serde formats change between versions, so its types are only sent and stored as
//! protobuf types. This module converts the parts of messages and files, such as votes and entries;
//! other modules compose messages from them.

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub(crate) mod proto {
    include!("../proto/peer.rs");
}

use std::collections::{BTreeMap, BTreeSet};

use crate::types;

/// Error for a message that lacks a part or contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub(crate) struct MalformedMessageError(pub(crate) &'static str);

pub(crate) fn split(wide: u128) -> (u64, u64) {
    ((wide >> 64) as u64, wide as u64)
}

pub(crate) fn join(high: u64, low: u64) -> u128 {
    (u128::from(high) << 64) | u128::from(low)
}

/// Joins the halves of a cluster id. Returns `None` for 0, which means none.
pub(crate) fn join_optional(high: u64, low: u64) -> Option<u128> {
    Some(join(high, low)).filter(|id| *id != 0)
}

/// Formats a cluster id for display.
pub(crate) fn shown_id(id: u128) -> String {
    format!("{id:032x}")
}

/// Formats a cluster id of which only the first half is known; 0 if not even that.
pub(crate) fn shown_first(first: u64) -> String {
    match first {
        0 => "not told".to_owned(),
        first => format!("{first:016x}..."),
    }
}

/// Returns the first half of the cluster id that an introduction announces; 0 for none.
pub(crate) fn announced_cluster_prefix(info: &proto::InfoResponse) -> u64 {
    match info.cluster_first {
        0 => info.cluster_high,
        first => first,
    }
}

impl From<types::Vote> for proto::Vote {
    fn from(vote: types::Vote) -> Self {
        Self {
            term: vote.leader_id.term,
            node: vote.leader_id.node_id,
            committed: vote.committed,
        }
    }
}

impl From<proto::Vote> for types::Vote {
    fn from(vote: proto::Vote) -> Self {
        match vote.committed {
            true => Self::new_committed(vote.term, vote.node),
            false => Self::new(vote.term, vote.node),
        }
    }
}

impl From<types::LogId> for proto::LogId {
    fn from(id: types::LogId) -> Self {
        Self {
            term: id.leader_id.term,
            node: id.leader_id.node_id,
            index: id.index,
        }
    }
}

impl From<proto::LogId> for types::LogId {
    fn from(id: proto::LogId) -> Self {
        types::log_id(id.term, id.node, id.index)
    }
}

/// Encodes the member `node` with its id.
pub(crate) fn member(id: u64, node: &types::Node) -> proto::Member {
    let (cluster_high, cluster_low) = split(node.cluster);
    proto::Member {
        id,
        address: node.address.clone(),
        labels: node.labels.clone().into_iter().collect(),
        store: node.store,
        cluster_high,
        cluster_low,
    }
}

impl From<proto::Member> for types::Node {
    fn from(member: proto::Member) -> Self {
        Self {
            cluster: join(member.cluster_high, member.cluster_low),
            address: member.address,
            labels: member.labels.into_iter().collect(),
            store: member.store,
        }
    }
}

impl From<&types::Membership> for proto::Membership {
    fn from(membership: &types::Membership) -> Self {
        let voters = membership.get_joint_config().iter();
        Self {
            voters: voters
                .map(|set| proto::VoterSet {
                    ids: set.iter().copied().collect(),
                })
                .collect(),
            members: membership
                .nodes()
                .map(|(id, node)| member(*id, node))
                .collect(),
        }
    }
}

impl TryFrom<proto::Membership> for types::Membership {
    type Error = MalformedMessageError;

    fn try_from(wire: proto::Membership) -> Result<Self, MalformedMessageError> {
        let voters: Vec<BTreeSet<u64>> = wire
            .voters
            .into_iter()
            .map(|set| set.ids.into_iter().collect())
            .collect();
        let nodes: BTreeMap<u64, types::Node> = wire
            .members
            .into_iter()
            .map(|member| (member.id, member.into()))
            .collect();
        if voters.is_empty() && nodes.is_empty() {
            return Ok(Self::default());
        }
        Self::new(voters, nodes).map_err(|_| MalformedMessageError("a voter is not a member"))
    }
}

impl From<&types::StoredMembership> for proto::StoredMembership {
    fn from(stored: &types::StoredMembership) -> Self {
        Self {
            log_id: (*stored.log_id()).map(Into::into),
            membership: Some(stored.membership().into()),
        }
    }
}

impl TryFrom<proto::StoredMembership> for types::StoredMembership {
    type Error = MalformedMessageError;

    fn try_from(wire: proto::StoredMembership) -> Result<Self, MalformedMessageError> {
        let membership = wire
            .membership
            .ok_or(MalformedMessageError("no membership"))?
            .try_into()?;
        Ok(Self::new(wire.log_id.map(Into::into), membership))
    }
}

impl From<types::Entry> for proto::Entry {
    fn from(entry: types::Entry) -> Self {
        let payload = match entry.payload {
            types::Payload::Blank => proto::entry::Payload::Blank(proto::Blank {}),
            types::Payload::Normal(command) => proto::entry::Payload::Command(command.0),
            types::Payload::Membership(membership) => {
                proto::entry::Payload::Membership((&membership).into())
            }
        };
        Self {
            log_id: Some(entry.log_id.into()),
            payload: Some(payload),
        }
    }
}

impl TryFrom<proto::Entry> for types::Entry {
    type Error = MalformedMessageError;

    fn try_from(wire: proto::Entry) -> Result<Self, MalformedMessageError> {
        let payload = match wire
            .payload
            .ok_or(MalformedMessageError("an entry without payload"))?
        {
            proto::entry::Payload::Blank(_) => types::Payload::Blank,
            proto::entry::Payload::Command(bytes) => types::Payload::Normal(types::Command(bytes)),
            proto::entry::Payload::Membership(membership) => {
                types::Payload::Membership(membership.try_into()?)
            }
        };
        let log_id = wire
            .log_id
            .ok_or(MalformedMessageError("an entry without id"))?
            .into();
        Ok(Self { log_id, payload })
    }
}

/// Encodes the head of a snapshot; `has_commands` is whether any command was applied.
pub(crate) fn snapshot_meta(
    meta: &types::SnapshotMeta,
    has_commands: bool,
    removals: Vec<proto::Removal>,
) -> proto::SnapshotMeta {
    proto::SnapshotMeta {
        last: meta.last_log_id.map(Into::into),
        membership: Some((&meta.last_membership).into()),
        has_commands,
        removals,
    }
}

impl TryFrom<proto::SnapshotMeta> for types::SnapshotMeta {
    type Error = MalformedMessageError;

    fn try_from(wire: proto::SnapshotMeta) -> Result<Self, MalformedMessageError> {
        let membership = wire
            .membership
            .ok_or(MalformedMessageError("a snapshot without membership"))?;
        Ok(Self {
            last_log_id: wire.last.map(Into::into),
            last_membership: membership.try_into()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message;

    use super::*;

    fn node(store: u64) -> types::Node {
        types::Node {
            address: "127.0.0.1:1".into(),
            labels: BTreeMap::from([("version".into(), "1".into())]),
            store,
            cluster: 7 << 64 | 9,
        }
    }

    fn entry(payload: types::Payload) -> types::Entry {
        types::Entry {
            log_id: types::log_id(3, 2, 5),
            payload,
        }
    }

    #[test]
    fn every_entry_round_trips_over_the_wire() {
        let voters = vec![BTreeSet::from([1, 2]), BTreeSet::from([2, 3])];
        let nodes = BTreeMap::from([(1, node(1)), (2, node(2)), (3, node(3)), (4, node(4))]);
        let membership = types::Membership::new(voters, nodes).unwrap();
        for payload in [
            types::Payload::Blank,
            types::Payload::Normal(types::Command(Bytes::from_static(b"command"))),
            types::Payload::Membership(membership),
        ] {
            let original = entry(payload);
            let bytes = proto::Entry::from(original.clone()).encode_to_vec();
            let read = proto::Entry::decode(&bytes[..]).unwrap();
            assert_eq!(types::Entry::try_from(read).unwrap(), original);
        }
    }

    #[test]
    fn a_command_entry_has_golden_bytes() {
        let command = types::Payload::Normal(types::Command(Bytes::from_static(b"ab")));
        let bytes = proto::Entry::from(entry(command)).encode_to_vec();
        assert_eq!(bytes, [10, 6, 8, 3, 16, 2, 24, 5, 26, 2, b'a', b'b']);
    }

    #[test]
    fn a_voter_outside_the_members_is_malformed() {
        let wire = proto::Membership {
            voters: vec![proto::VoterSet { ids: vec![1] }],
            members: vec![member(2, &node(2))],
        };
        assert!(types::Membership::try_from(wire).is_err());
    }

    #[test]
    fn an_entry_without_payload_is_malformed() {
        let wire = proto::Entry {
            log_id: None,
            payload: None,
        };
        assert_eq!(
            types::Entry::try_from(wire),
            Err(MalformedMessageError("an entry without payload"))
        );
    }
}
