//! Helpers for unit tests: entries, and replicas that drive the integration tests' machine.

#[path = "../tests/common/journal.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "shared with the integration tests"
)]
mod journal;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;

pub(crate) use self::journal::Journal;
use crate::machine::PeerHandler;
use crate::memory::MemoryDisk;
use crate::net::{Tcp, Transport};
use crate::options::{Formation, Peers, ReplicaOptions};
use crate::replica::Replica;
use crate::storage::Storage;
use crate::types::{Command, Entry, Payload, log_id};

/// Returns entries of `term` whose commands have `bytes` bytes each.
pub(crate) fn entries(term: u64, indexes: Range<u64>, bytes: usize) -> Vec<Entry> {
    let entry = |index: u64| Entry {
        log_id: log_id(term, 1, index),
        payload: Payload::Normal(Command(Bytes::from(vec![(index % 251) as u8; bytes]))),
    };
    indexes.map(entry).collect()
}

/// Returns an entry of `term` at `index` whose command has `bytes` bytes.
pub(crate) fn entry(term: u64, index: u64, bytes: usize) -> Entry {
    entries(term, index..index + 1, bytes).remove(0)
}

struct IgnoreMessages;

impl PeerHandler for IgnoreMessages {
    fn message(&self, _from: u8, _bytes: &[u8]) {}
}

/// Starts a replica with an in-memory disk that founds a cluster with all `peers`.
pub(crate) async fn replica(
    id: u8,
    listener: TcpListener,
    peers: Vec<String>,
) -> (Replica, MemoryDisk) {
    replica_over(id, Tcp::new(listener).unwrap(), peers).await
}

/// Starts a replica on the transport `tcp`, with an in-memory disk, that founds a cluster with all
/// `peers`.
pub(crate) async fn replica_over(id: u8, tcp: Tcp, peers: Vec<String>) -> (Replica, MemoryDisk) {
    let disk = MemoryDisk::new();
    let options = ReplicaOptions {
        id,
        data_dir: "/toy".into(),
        advertise: tcp.local_addr().to_string(),
        cluster_name: crate::DEFAULT_NAME.to_owned(),
        labels: BTreeMap::new(),
        formation: Formation::Bootstrap {
            expect: peers.len(),
            peers: Peers::List(peers),
            first_command: Vec::new(),
        },
        replaces_lost: false,
        promotion: None,
        heartbeat: Duration::from_millis(50),
        election_timeout: Duration::from_millis(150)..Duration::from_millis(300),
        snapshot_every_entries: 1000,
        snapshot_every_bytes: 1 << 20,
        storage: Storage::Memory(disk.clone()),
    };
    let replica = Replica::start(
        options,
        Arc::new(tcp),
        Box::<Journal>::default(),
        Arc::new(IgnoreMessages),
    );
    (replica.await.unwrap(), disk)
}
