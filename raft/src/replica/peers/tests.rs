//! Checks which calls the service refuses, over real connections.

use std::path::Path;

use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tonic::Code;

use crate::Role;
use crate::files::Files;
use crate::memory::MemoryDisk;
use crate::net::{PeerChannel, PeerSecret, Secret, Tcp, Transport, client};
use crate::replica::Replica;
use crate::testing;
use crate::wire::proto::peer_client::PeerClient;
use crate::wire::{self, proto};

fn secret(content: u8, id: u8) -> PeerSecret {
    PeerSecret {
        secret: Secret::new(&[content; 32]).unwrap(),
        is_optional: false,
        cluster_name: "quorate".to_owned(),
        id,
    }
}

/// Returns a question for the member's info, as any replica of the cluster asks it.
pub(super) fn info_request() -> proto::InfoRequest {
    proto::InfoRequest {
        cluster_name: "quorate".to_owned(),
        ..proto::InfoRequest::default()
    }
}

/// Connects to `address` as a replica with the given secret.
async fn connect_with(
    address: &str,
    secret: PeerSecret,
) -> Result<PeerClient<PeerChannel>, String> {
    let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let tcp = Tcp::new(own).unwrap().with_secret(secret);
    let connected = tcp.connect(address.to_owned()).await;
    connected.map(client).map_err(|error| error.why)
}

async fn connect(address: &str) -> PeerClient<PeerChannel> {
    let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let connected = Tcp::new(own).unwrap().connect(address.to_owned()).await;
    client(connected.unwrap())
}

/// Starts a cluster of one replica. Also returns a header with which a peer is admitted.
async fn alone() -> (Replica, proto::Header, MemoryDisk) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (replica, disk) = testing::replica(1, listener, vec![address.clone()]).await;
    let mut status = replica.watch();
    status
        .wait_for(|status| status.role == Role::Leader && status.caught_up)
        .await
        .unwrap();
    let header = replica.let_in(2).await;
    (replica, header, disk)
}

/// Returns a vote of `node` in `term`, which is a leader's if it is `committed`.
fn vote(term: u64, node: u64, committed: bool) -> Option<proto::Vote> {
    Some(proto::Vote {
        term,
        node,
        committed,
    })
}

fn append(header: proto::Header, vote: Option<proto::Vote>) -> proto::AppendRequest {
    proto::AppendRequest {
        header: Some(header),
        vote,
        ..proto::AppendRequest::default()
    }
}

fn candidacy(header: proto::Header, vote: Option<proto::Vote>) -> proto::VoteRequest {
    proto::VoteRequest {
        header: Some(header),
        vote,
        last: None,
        leadership_transfer: true,
        pre_vote: false,
    }
}

fn proposal(header: proto::Header) -> proto::ProposeRequest {
    proto::ProposeRequest {
        header: Some(header),
        command: "command".into(),
        timeout_ms: 5000,
    }
}

pub(super) fn messages(
    header: proto::Header,
) -> impl tokio_stream::Stream<Item = proto::PeerMessage> {
    tokio_stream::iter([proto::PeerMessage {
        header: Some(header),
        bytes: "digest".into(),
        unix_ms: 0,
        applied: 0,
    }])
}

fn is_refused<T>(answer: Result<T, tonic::Status>) {
    let status = answer.err().expect("it is refused");
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
}

/// Makes Raft's calls with `header`, all of which must be refused.
async fn all_refused(address: &str, header: proto::Header, term: u64) {
    let mut client = connect(address).await;
    let from = header.from;
    is_refused(client.append(append(header, vote(term, from, true))).await);
    is_refused(
        client
            .vote(candidacy(header, vote(term, from, false)))
            .await,
    );
    let parts = [proto::SnapshotPart {
        part: Some(start(header, term)),
    }];
    is_refused(client.install_snapshot(tokio_stream::iter(parts)).await);
    let transfer = proto::TransferLeaderRequest {
        header: Some(header),
        from_leader: vote(term, from, true),
        to: 1,
        last: None,
    };
    is_refused(client.transfer_leader(transfer).await);
}

#[tokio::test]
async fn strangers_and_wrong_stores_are_refused() {
    let (replica, right, _) = alone().await;
    let address = replica.local_addr().to_string();
    let before = replica.status();
    let (cluster_high, cluster_low) =
        wire::split(wire::join(right.cluster_high, right.cluster_low) + 1);
    for wrong in [
        // Meant for another cluster, replica or store.
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
        // From another sender.
        proto::Header { from: 9, ..right },
        proto::Header { from: 1, ..right },
        proto::Header { from: 0, ..right },
        proto::Header { from: 300, ..right },
        proto::Header {
            from_store: right.from_store + 1,
            ..right
        },
        proto::Header {
            from_store: 0,
            ..right
        },
    ] {
        all_refused(&address, wrong, before.term + 1).await;
        let mut client = connect(&address).await;
        is_refused(client.propose(proposal(wrong)).await);
        let barrier = proto::ReadBarrierRequest {
            header: Some(wrong),
            timeout_ms: 5000,
        };
        is_refused(client.read_barrier(barrier).await);
        let fetch = proto::FetchStateRequest {
            header: Some(wrong),
        };
        is_refused(client.fetch_state(fetch).await);
        let question = proto::Question {
            header: Some(wrong),
            bytes: "question".into(),
        };
        is_refused(client.ask(question).await);
        is_refused(client.messages(messages(wrong)).await);
    }
    let after = replica.status();
    assert_eq!((after.term, after.last_log), (before.term, before.last_log));
    let mut client = connect(&address).await;
    let missing = proto::ProposeRequest {
        header: None,
        ..proposal(right)
    };
    let refused = client.propose(missing).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let taken = client.propose(proposal(right)).await.unwrap().into_inner();
    assert!(matches!(
        taken.result,
        Some(proto::propose_response::Result::Committed(_))
    ));
    replica.shutdown().await;
}

#[tokio::test]
async fn leaping_terms_and_votes_of_others_are_refused() {
    let (replica, header, _) = alone().await;
    let address = replica.local_addr().to_string();
    let term = replica.status().term;
    for leap in [u64::MAX, u64::MAX - 1, term + 1_000_001] {
        all_refused(&address, header, leap).await;
    }
    let mut client = connect(&address).await;
    let of_another = client.append(append(header, vote(term + 1, 3, true))).await;
    is_refused(of_another);
    let not_elected = client
        .append(append(header, vote(term + 1, 2, false)))
        .await;
    is_refused(not_elected);
    assert_eq!(replica.status().term, term);
    // A log of a later term than its leader's would win every election.
    let mut forged = append(header, vote(term + 1, 2, true));
    forged.previous = Some(proto::LogId {
        term: u64::MAX,
        node: 2,
        index: 7,
    });
    let refused = client.append(forged).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    // A candidate that is not too far ahead is treated like any other.
    let elected = client.vote(candidacy(header, vote(term + 1_000_000, 2, false)));
    assert!(!elected.await.unwrap().into_inner().granted, "an empty log");
    replica.shutdown().await;
}

#[tokio::test]
async fn a_connection_represents_one_replica() {
    let (replica, two, _) = alone().await;
    let three = replica.let_in(3).await;
    let address = replica.local_addr().to_string();
    let mut client = connect(&address).await;
    client.messages(messages(two)).await.unwrap();
    is_refused(client.messages(messages(three)).await);
    is_refused(client.propose(proposal(three)).await);
    client.propose(proposal(two)).await.unwrap();
    let mut another = connect(&address).await;
    another.propose(proposal(three)).await.unwrap();
    replica.shutdown().await;
}

#[tokio::test]
async fn a_stranger_learns_only_that_a_member_is_here() {
    let (replica, header, _) = alone().await;
    let mut client = connect(&replica.local_addr().to_string()).await;
    let mut ask = async |cluster_name: &str, cluster_low: u64| {
        let request = proto::InfoRequest {
            cluster_name: cluster_name.to_owned(),
            cluster_high: header.cluster_high,
            cluster_low,
            ..proto::InfoRequest::default()
        };
        client.info(request).await.map(tonic::Response::into_inner)
    };
    let told = ask("quorate", header.cluster_low + 1).await.unwrap();
    let all = proto::InfoResponse {
        id: 1,
        is_member: true,
        cluster_name: "quorate".to_owned(),
        cluster_first: header.cluster_high,
        ..proto::InfoResponse::default()
    };
    assert_eq!(told, all);
    let told = ask("quorate", header.cluster_low).await.unwrap();
    assert_eq!((told.store, told.members), (header.to_store, vec![1, 2]));
    let refused = ask("staging", header.cluster_low).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let why = "meant for cluster \"staging\", this replica is configured for \"quorate\"";
    assert_eq!(refused.message(), why);
    replica.shutdown().await;
}

/// Returns the first part of a snapshot from a leader in `term`.
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
            removals: Vec::new(),
        }),
    })
}

fn snapshots_in(disk: &MemoryDisk) -> usize {
    let folder = Path::new("/toy/raft/snapshots");
    disk.open().list(folder).unwrap().len()
}

#[tokio::test]
async fn an_unwanted_snapshot_leaves_no_files() {
    let (replica, header, disk) = alone().await;
    let before = replica.status();
    let end = proto::SnapshotEnd {
        chunks: 0,
        bytes: 0,
    };
    // From a former leader.
    let parts = [start(header, 0), proto::snapshot_part::Part::End(end)];
    let parts = parts.map(|part| proto::SnapshotPart { part: Some(part) });
    let address = replica.local_addr().to_string();
    let mut client = connect(&address).await;
    let answer = client.install_snapshot(tokio_stream::iter(parts)).await;
    let vote = answer.unwrap().into_inner().vote.unwrap();
    assert_eq!(vote.term, before.term);
    assert_eq!(replica.status().applied, before.applied);
    assert_eq!(snapshots_in(&disk), 0);
    // The parts are not even awaited.
    let begins = tokio_stream::iter([proto::SnapshotPart {
        part: Some(start(header, 0)),
    }]);
    let never_ends = begins.chain(tokio_stream::pending());
    let answer = client.install_snapshot(never_ends).await.unwrap();
    assert_eq!(answer.into_inner().vote.unwrap().term, before.term);
    replica.shutdown().await;
}

#[tokio::test]
async fn a_truncated_or_superseded_snapshot_leaves_no_files() {
    let (replica, header, disk) = alone().await;
    let term = replica.status().term + 1;
    let address = replica.local_addr().to_string();
    let chunk = proto::snapshot_part::Part::Chunk(proto::SnapshotChunk {
        bytes: "state".into(),
        crc: crc32fast::hash(b"state"),
    });
    let parts = || {
        let parts = [start(header, term), chunk.clone()];
        let parts = parts.map(|part| proto::SnapshotPart { part: Some(part) });
        tokio_stream::iter(parts).chain(tokio_stream::pending())
    };
    let files_are = async |count| {
        while snapshots_in(&disk) != count {
            tokio::task::yield_now().await;
        }
    };
    let mut clients = (connect(&address).await, connect(&address).await);
    {
        let mut first = Box::pin(clients.0.install_snapshot(parts()));
        tokio::select! {
            biased;
            _ = &mut first => panic!("it has no end"),
            () = files_are(1) => {}
        }
        let mut second = Box::pin(clients.1.install_snapshot(parts()));
        let overtaken = tokio::select! {
            biased;
            _ = &mut second => panic!("it has no end"),
            overtaken = first => overtaken.unwrap_err(),
        };
        assert_eq!(overtaken.code(), Code::Aborted, "{overtaken}");
        files_are(1).await;
    }
    // The sender is gone.
    drop(clients);
    files_are(0).await;
    replica.shutdown().await;
}

#[tokio::test]
async fn snapshot_headers_are_bounded() {
    let (replica, header, disk) = alone().await;
    let term = replica.status().term + 1;
    let mut head = start(header, term);
    let proto::snapshot_part::Part::Start(begun) = &mut head else {
        panic!("not a start");
    };
    let meta = begun.meta.as_mut().unwrap();
    let membership = meta.membership.as_mut().unwrap();
    let labels = [("label".to_owned(), "x".repeat(17 << 20))];
    let member = proto::Member {
        id: 2,
        labels: labels.into(),
        ..proto::Member::default()
    };
    membership.membership.as_mut().unwrap().members.push(member);
    let parts = [proto::SnapshotPart { part: Some(head) }];
    let mut client = connect(&replica.local_addr().to_string()).await;
    let refused = client.install_snapshot(tokio_stream::iter(parts)).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(snapshots_in(&disk), 0);
    replica.shutdown().await;
}

#[tokio::test]
async fn a_damaged_snapshot_part_is_refused() {
    let (replica, header, disk) = alone().await;
    let before = replica.status();
    let start = start(header, before.term + 1);
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
async fn an_undecodable_command_is_refused_before_the_log() {
    let (replica, header, _) = alone().await;
    let before = replica.status().last_log;
    let mut client = connect(&replica.local_addr().to_string()).await;
    let propose = |command: Vec<u8>| proto::ProposeRequest {
        command: command.into(),
        ..proposal(header)
    };
    for command in [b"garbage".to_vec(), vec![0; crate::COMMAND_BYTES_MAX + 1]] {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_without_the_secret_are_not_served() {
    let listeners = [
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    ];
    let peers = listeners
        .each_ref()
        .map(|it| it.local_addr().unwrap().to_string());
    let mut replicas = Vec::new();
    for (id, listener) in (1..).zip(listeners) {
        let tcp = Tcp::new(listener).unwrap().with_secret(secret(7, id));
        replicas.push(testing::replica_over(id, tcp, peers.to_vec()).await.0);
    }
    // Large enough for several frames.
    let command = vec![5; 150_000];
    for replica in &replicas {
        let mut status = replica.watch();
        let led = status.wait_for(|status| status.leader.is_some() && status.caught_up);
        led.await.unwrap();
        let limit = std::time::Duration::from_secs(30);
        replica.propose(command.clone(), limit).await.unwrap();
    }

    replicas[0].transfer_leader(Some(1)).await.unwrap();
    let mut status = replicas[0].watch();
    let leads = status.wait_for(|status| status.role == Role::Leader && status.caught_up);
    leads.await.unwrap();

    let address = &peers[0];
    let mut known = connect_with(address, secret(7, 9)).await.unwrap();
    assert!(known.info(info_request()).await.is_ok());
    // The handshake names 9.
    let header = replicas[0].let_in(3).await;
    is_refused(known.propose(proposal(header)).await);
    let mut member = connect_with(address, secret(7, 3)).await.unwrap();
    member.messages(messages(header)).await.unwrap();

    let differs = connect_with(address, secret(8, 3)).await.unwrap_err();
    assert!(
        differs.ends_with("it has another cluster.secret_file"),
        "{differs}"
    );
    let mut other = secret(7, 3);
    other.cluster_name = "staging".to_owned();
    let other = connect_with(address, other).await.unwrap_err();
    let both = "it is configured for cluster \"quorate\", this replica for \"staging\"";
    assert!(other.ends_with(both), "{other}");
    let mut none = connect(address).await;
    let refused = none.info(info_request()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    for replica in replicas {
        replica.shutdown().await;
    }
}

#[tokio::test]
async fn a_secret_can_be_rolled_out_one_replica_at_a_time() {
    let (without, _, _) = alone().await;
    let address = without.local_addr().to_string();
    let refused = connect_with(&address, secret(7, 3)).await.unwrap_err();
    assert!(
        refused.ends_with("it has no cluster.secret_file"),
        "{refused}"
    );
    let optional = |id| PeerSecret {
        is_optional: true,
        ..secret(7, id)
    };
    // Replicas with and without a secret communicate.
    let mut first = connect_with(&address, optional(3)).await.unwrap();
    assert!(first.info(info_request()).await.is_ok());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let tcp = Tcp::new(listener).unwrap().with_secret(optional(1));
    let (with, _) = testing::replica_over(1, tcp, vec![address.clone()]).await;
    for mut caller in [
        connect(&address).await,
        connect_with(&address, optional(3)).await.unwrap(),
        connect_with(&address, secret(7, 3)).await.unwrap(),
    ] {
        assert!(caller.info(info_request()).await.is_ok());
    }
    let differs = connect_with(&address, secret(8, 3)).await.unwrap_err();
    assert!(
        differs.ends_with("it has another cluster.secret_file"),
        "{differs}"
    );
    without.shutdown().await;
    with.shutdown().await;
}

#[tokio::test]
async fn silent_and_malformed_connections_are_closed() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let tcp = Tcp::new(listener).unwrap().with_secret(secret(7, 1));
    let (replica, _) = testing::replica_over(1, tcp, vec![address.clone()]).await;
    let told = [
        &b""[..],
        b"GET / HTTP/1.1\r\n\r\n",
        b"quonois1",
        b"quonois1\xff\xff",
        b"quonois1\x00\x00",
        b"quonois1\x00\x30and what is no message of a handshake, of 48 bytes",
    ];
    let address = &address;
    let ends = told.map(|bytes| async move {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut answer = Vec::new();
        // Reset or closed, at the latest when the handshake times out.
        let _end = stream.read_to_end(&mut answer).await;
        assert!(answer.len() <= 1, "{bytes:?} is answered {answer:?}");
    });
    futures_util::future::join_all(ends).await;
    replica.shutdown().await;
}
