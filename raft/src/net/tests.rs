//! What the service refuses, said to it over real connections.

use std::path::Path;

use tokio::net::TcpListener;
use tonic::Code;

use super::link::client;
use super::{PeerChannel, Tcp, Transport};
use crate::Role;
use crate::files::Files;
use crate::memory::MemoryDisk;
use crate::replica::Replica;
use crate::toy;
use crate::wire::proto::peer_client::PeerClient;
use crate::wire::{self, proto};

async fn connect(address: &str) -> PeerClient<PeerChannel> {
    let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connected = Tcp::new(own).unwrap().connect(address.to_owned()).await;
    client(connected.unwrap())
}

/// A cluster of one replica, and what a peer would say to be let through.
async fn alone() -> (Replica, proto::Header, MemoryDisk) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (replica, disk) = toy::replica(1, listener, vec![address.clone()]).await;
    let mut status = replica.watch();
    status
        .wait_for(|status| status.role == Role::Leader && status.caught_up)
        .await
        .unwrap();
    let mut client = connect(&address).await;
    let info = client
        .info(proto::InfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(info.is_member);
    let header = proto::Header {
        cluster_high: info.cluster_high,
        cluster_low: info.cluster_low,
        from: 2,
        to: 1,
        to_store: info.store,
    };
    (replica, header, disk)
}

#[tokio::test]
async fn a_call_for_another_cluster_replica_or_store_is_refused() {
    let (replica, right, _) = alone().await;
    let (cluster_high, cluster_low) =
        wire::split(wire::join(right.cluster_high, right.cluster_low) + 1);
    let wrong = [
        proto::Header {
            cluster_high,
            cluster_low,
            ..right
        },
        proto::Header { to: 3, ..right },
        proto::Header {
            to_store: right.to_store + 1,
            ..right
        },
    ];
    let address = replica.local_addr().to_string();
    let mut client = connect(&address).await;
    let propose = |header| proto::ProposeRequest {
        header: Some(header),
        command: "command".into(),
        timeout_ms: 5000,
    };
    let term = replica.status().term;
    for header in wrong {
        let refused = client.propose(propose(header)).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{header:?}");
        let vote = proto::Vote {
            term: term + 10,
            node: 2,
            committed: true,
        };
        let append = proto::AppendRequest {
            header: Some(header),
            vote: Some(vote),
            ..proto::AppendRequest::default()
        };
        let refused = client.append(append).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{header:?}");
    }
    assert_eq!(replica.status().term, term, "nothing of it reached raft");
    let missing = proto::ProposeRequest {
        header: None,
        ..propose(right)
    };
    assert_eq!(
        client.propose(missing).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    let taken = client.propose(propose(right)).await.unwrap().into_inner();
    assert!(matches!(
        taken.result,
        Some(proto::propose_response::Result::Committed(_))
    ));
    replica.shutdown().await;
}

/// Begins a snapshot of a leader in `term`.
fn start(header: proto::Header, term: u64) -> proto::snapshot_part::Part {
    proto::snapshot_part::Part::Start(proto::SnapshotStart {
        header: Some(header),
        vote: Some(proto::Vote {
            term,
            node: 2,
            committed: true,
        }),
        meta: Some(proto::SnapshotMeta {
            last: Some(proto::LogId {
                term,
                node: 2,
                index: 900,
            }),
            membership: Some(proto::StoredMembership {
                log_id: None,
                membership: Some(proto::Membership::default()),
            }),
            has_commands: true,
        }),
    })
}

fn snapshots_in(disk: &MemoryDisk) -> usize {
    let folder = Path::new("/toy/raft/snapshots");
    disk.open().list(folder).unwrap().len()
}

#[tokio::test]
async fn a_snapshot_that_is_not_wanted_leaves_nothing() {
    let (replica, header, disk) = alone().await;
    let before = replica.status();
    let end = proto::SnapshotEnd {
        chunks: 0,
        bytes: 0,
    };
    // Of a leader of the past.
    let parts = [start(header, 0), proto::snapshot_part::Part::End(end)];
    let parts = parts.map(|part| proto::SnapshotPart { part: Some(part) });
    let address = replica.local_addr().to_string();
    let mut client = connect(&address).await;
    let answer = client.install_snapshot(tokio_stream::iter(parts)).await;
    let vote = answer.unwrap().into_inner().vote.unwrap();
    assert_eq!(vote.term, before.term);
    assert_eq!(replica.status().applied, before.applied);
    assert_eq!(snapshots_in(&disk), 0);
    replica.shutdown().await;
}

#[tokio::test]
async fn a_damaged_snapshot_part_is_refused() {
    let (replica, header, disk) = alone().await;
    let before = replica.status();
    let start = start(header, 9);
    let chunk = |crc| {
        proto::snapshot_part::Part::Chunk(proto::SnapshotChunk {
            bytes: "state".into(),
            crc,
        })
    };
    let whole = chunk(crc32fast::hash(b"state"));
    let end = |chunks| proto::snapshot_part::Part::End(proto::SnapshotEnd { chunks, bytes: 5 });
    let address = replica.local_addr().to_string();
    let mut client = connect(&address).await;
    for parts in [
        vec![start.clone(), chunk(1), end(1)],
        vec![start.clone(), whole.clone(), end(2)],
        vec![start.clone(), whole.clone()],
        vec![start.clone(), start.clone()],
    ] {
        let parts = parts
            .into_iter()
            .map(|part| proto::SnapshotPart { part: Some(part) });
        let parts: Vec<_> = parts.collect();
        let sent = client.install_snapshot(tokio_stream::iter(parts)).await;
        assert_eq!(sent.unwrap_err().code(), Code::DataLoss);
    }
    assert_eq!(replica.status().applied, before.applied);
    assert_eq!(snapshots_in(&disk), 0, "what was refused is removed");
    replica.shutdown().await;
}

#[tokio::test]
async fn a_command_that_cannot_be_decoded_is_refused_before_the_log() {
    let (replica, header, _) = alone().await;
    let before = replica.status().last_log;
    let mut client = connect(&replica.local_addr().to_string()).await;
    let propose = |command: Vec<u8>| proto::ProposeRequest {
        header: Some(header),
        command: command.into(),
        timeout_ms: 5000,
    };
    for command in [b"poison".to_vec(), vec![0; crate::COMMAND_BYTES_MAX + 1]] {
        let refused = client.propose(propose(command)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    let taken = client.propose(propose(b"sound".to_vec())).await.unwrap();
    let Some(proto::propose_response::Result::Committed(committed)) = taken.into_inner().result
    else {
        panic!("not committed");
    };
    assert_eq!(committed.index, before + 1, "the first after it");
    replica.shutdown().await;
}
