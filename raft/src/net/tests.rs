//! What the service refuses, said to it over real connections.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::Code;

use super::connect_once;
use crate::machine::PeerHandler;
use crate::options::{Formation, Options, Peers, Storage};
use crate::replica::Replica;
use crate::toy::Toy;
use crate::wire::{self, proto};
use crate::{MemoryDisk, Role};

struct Deaf;

impl PeerHandler for Deaf {
    fn message(&self, _from: u8, _bytes: &[u8]) {}
}

/// A cluster of one replica, and what a peer would say to be let through.
async fn alone() -> (Replica, proto::Header, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = Options {
        id: 1,
        data_dir: folder.path().to_path_buf(),
        advertise: address.clone(),
        labels: BTreeMap::new(),
        formation: Formation::Bootstrap {
            peers: Peers::List(vec![address.clone()]),
            expect: 1,
            first_command: Vec::new(),
        },
        heartbeat: Duration::from_millis(50),
        election_timeout: Duration::from_millis(150)..Duration::from_millis(300),
        snapshot_every_entries: 1000,
        snapshot_every_bytes: 1 << 20,
        storage: Storage::Memory(MemoryDisk::new()),
    };
    let replica = Replica::start(options, listener, Toy::default(), Arc::new(Deaf))
        .await
        .unwrap();
    let mut status = replica.watch();
    status
        .wait_for(|status| status.role == Role::Leader && status.caught_up)
        .await
        .unwrap();
    let mut client = connect_once(&address).await.unwrap();
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
    (replica, header, folder)
}

#[tokio::test]
async fn a_call_for_another_cluster_replica_or_store_is_refused() {
    let (replica, right, _folder) = alone().await;
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
    let mut client = connect_once(&address).await.unwrap();
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

#[tokio::test]
async fn a_damaged_snapshot_part_is_refused() {
    let (replica, header, folder) = alone().await;
    let before = replica.status();
    let start = proto::snapshot_part::Part::Start(proto::SnapshotStart {
        header: Some(header),
        vote: Some(proto::Vote {
            term: 9,
            node: 2,
            committed: true,
        }),
        meta: Some(proto::SnapshotMeta {
            last: Some(proto::LogId {
                term: 9,
                node: 2,
                index: 900,
            }),
            membership: Some(proto::StoredMembership {
                log_id: None,
                membership: Some(proto::Membership::default()),
            }),
            has_commands: true,
        }),
    });
    let chunk = |crc| {
        proto::snapshot_part::Part::Chunk(proto::SnapshotChunk {
            bytes: "state".into(),
            crc,
        })
    };
    let whole = chunk(crc32fast::hash(b"state"));
    let end = |chunks| proto::snapshot_part::Part::End(proto::SnapshotEnd { chunks, bytes: 5 });
    let address = replica.local_addr().to_string();
    let mut client = connect_once(&address).await.unwrap();
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
    let left = std::fs::read_dir(folder.path().join("raft/snapshots"))
        .unwrap()
        .count();
    assert_eq!(left, 0, "what was refused is removed");
    replica.shutdown().await;
}
