//! A dishonest peer for simulated clusters: it makes calls to a running replica that no correct replica
//! makes, as if they came over the network. The replica must refuse each of them.

use tokio_stream::StreamExt;
use tonic::Status;

use super::guard::known_node;
use super::service::PeerRpc;
use crate::net::validate::term_max;
use crate::replica::{Replica, ReplicaInner};
use crate::wire::proto;
use crate::wire::proto::peer_client::PeerClient;
use crate::wire::proto::peer_server::PeerServer;

/// Id that no replica of a simulation has.
const STRANGER: u64 = 250;

/// Number of kinds of forged calls.
pub const KINDS: u64 = 8;

/// Makes a forged call to `replica`. `draw` determines which.
///
/// # Panics
/// Panics if the replica accepts the call.
pub async fn send(replica: &Replica, draw: u64) {
    let inner = replica.inner();
    let mut client = PeerClient::new(PeerServer::new(PeerRpc::new(inner.clone())));
    let forged = ForgedCall::new(&inner, draw / KINDS);
    let before = inner.own_vote().leader_id.term;
    let result: Result<(), Status> = match draw % KINDS {
        0 => client.propose(forged.undecodable()).await.map(drop),
        1 => client.append(forged.leap()).await.map(drop),
        2 => client.vote(forged.candidacy()).await.map(drop),
        3 => client.append(forged.for_another()).await.map(drop),
        4 => {
            let parts = tokio_stream::iter(forged.snapshot()).chain(tokio_stream::pending());
            client.install_snapshot(parts).await.map(drop)
        }
        5 => {
            let digests = tokio_stream::iter([forged.digest()]).chain(tokio_stream::pending());
            client.messages(digests).await.map(drop)
        }
        6 => {
            let fetch = proto::FetchStateRequest {
                header: Some(forged.stranger),
            };
            client.fetch_state(fetch).await.map(drop)
        }
        _ => client.append(forged.out_of_order()).await.map(drop),
    };
    let kind = draw % KINDS;
    assert!(result.is_err(), "a forged call of kind {kind} was believed");
    let after = inner.own_vote().leader_id.term;
    assert!(after < term_max(before), "term {before} has become {after}");
}

fn vote(term: u64, node: u64, committed: bool) -> Option<proto::Vote> {
    Some(proto::Vote {
        term,
        node,
        committed,
    })
}

struct ForgedCall {
    /// Header of a misbehaving member, or of the stranger if there is no other member.
    member: proto::Header,
    stranger: proto::Header,
    /// Term that is greater than any real one.
    term: u64,
    draw: u64,
}

impl ForgedCall {
    fn new(inner: &ReplicaInner, draw: u64) -> Self {
        let identity = &inner.links.identity;
        let stranger = proto::Header {
            from: STRANGER,
            from_store: draw,
            ..identity.header(identity.id, identity.store)
        };
        let (_, members) = inner.membership((0, 0));
        let others: Vec<u64> = members
            .into_iter()
            .filter(|id| *id != identity.id)
            .collect();
        let other = others.get(draw as usize % others.len().max(1)).copied();
        let store =
            |id| inner.with_metrics(|metrics| known_node(metrics, id).map(|node| node.store));
        let member = other.and_then(|id| Some((id, store(id)?)));
        Self {
            member: member.map_or(stranger, |(from, from_store)| proto::Header {
                from,
                from_store,
                ..stranger
            }),
            stranger,
            term: u64::MAX - draw % 1000,
            draw,
        }
    }

    fn append(&self, vote: Option<proto::Vote>) -> proto::AppendRequest {
        proto::AppendRequest {
            header: Some(self.member),
            vote,
            has_quorum: true,
            ..proto::AppendRequest::default()
        }
    }

    fn undecodable(&self) -> proto::ProposeRequest {
        let command = [&b"\xffga"[..], &self.draw.to_le_bytes()].concat();
        proto::ProposeRequest {
            header: Some(self.member),
            command: command.into(),
            timeout_ms: 1000,
        }
    }

    fn leap(&self) -> proto::AppendRequest {
        self.append(vote(self.term, self.member.from, true))
    }

    fn candidacy(&self) -> proto::VoteRequest {
        proto::VoteRequest {
            header: Some(self.member),
            vote: vote(self.term, self.member.from, false),
            last: None,
            leadership_transfer: true,
            pre_vote: self.draw.is_multiple_of(2),
        }
    }

    /// Returns a leader's call with a vote that was given to another replica.
    fn for_another(&self) -> proto::AppendRequest {
        self.append(vote(1 + self.draw % 100, STRANGER + 1, true))
    }

    fn snapshot(&self) -> Vec<proto::SnapshotPart> {
        let start = proto::SnapshotStart {
            header: Some(self.member),
            vote: vote(self.term, self.member.from, true),
            meta: Some(proto::SnapshotMeta::default()),
        };
        let chunk = proto::SnapshotChunk {
            bytes: vec![0; 1000].into(),
            crc: 0,
        };
        let parts = [
            proto::snapshot_part::Part::Start(start),
            proto::snapshot_part::Part::Chunk(chunk),
        ];
        let part = |part| proto::SnapshotPart { part: Some(part) };
        parts.map(part).into()
    }

    /// Returns a bogus digest, under the id of a member without its store.
    fn digest(&self) -> proto::PeerMessage {
        let header = proto::Header {
            from_store: self.member.from_store.wrapping_add(1).max(1),
            ..self.member
        };
        proto::PeerMessage {
            header: Some(header),
            bytes: self.draw.to_le_bytes().to_vec().into(),
            unix_ms: 0,
            applied: 0,
        }
    }

    /// Returns entries that leave a hole, from a log that would win every election.
    fn out_of_order(&self) -> proto::AppendRequest {
        let id = |index| proto::LogId {
            term: self.term,
            node: self.member.from,
            index,
        };
        let entry = |index| proto::Entry {
            log_id: Some(id(index)),
            payload: Some(proto::entry::Payload::Blank(proto::Blank {})),
        };
        proto::AppendRequest {
            previous: Some(id(self.draw % 100)),
            entries: vec![entry(7), entry(9)],
            ..self.append(vote(self.term, self.member.from, true))
        }
    }
}
