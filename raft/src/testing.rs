//! Shared by the unit tests: entries, a machine that records its commands, and replicas that drive
//! it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpListener;

use crate::machine::{
    CheckCommand, FrozenMachine, PeerHandler, SnapshotError, StateMachine, StopReplicaError,
};
use crate::memory::MemoryDisk;
use crate::net::{Tcp, Transport};
use crate::options::{Formation, Peers, ReplicaOptions};
use crate::replica::Replica;
use crate::storage::Storage;
use crate::types::{Command, Entry, Payload, log_id};

/// Entries of `term` whose commands have so many bytes each.
pub(crate) fn entries(term: u64, indexes: Range<u64>, bytes: usize) -> Vec<Entry> {
    let entry = |index: u64| Entry {
        log_id: log_id(term, 1, index),
        payload: Payload::Normal(Command(Bytes::from(vec![(index % 251) as u8; bytes]))),
    };
    indexes.map(entry).collect()
}

/// One of [`entries`].
pub(crate) fn entry(term: u64, index: u64, bytes: usize) -> Entry {
    entries(term, index..index + 1, bytes).remove(0)
}

struct Deaf;

impl PeerHandler for Deaf {
    fn message(&self, _from: u8, _bytes: &[u8]) {}
}

/// Starts a replica that founds a cluster with all `peers`, on a disk in memory.
pub(crate) async fn replica(
    id: u8,
    listener: TcpListener,
    peers: Vec<String>,
) -> (Replica, MemoryDisk) {
    replica_over(id, Tcp::new(listener).unwrap(), peers).await
}

/// As [`replica`], over the caller's transport.
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
        heartbeat: Duration::from_millis(50),
        election_timeout: Duration::from_millis(150)..Duration::from_millis(300),
        snapshot_every_entries: 1000,
        snapshot_every_bytes: 1 << 20,
        storage: Storage::Memory(disk.clone()),
    };
    let replica = Replica::start(
        options,
        Arc::new(tcp),
        RecordingMachine::default(),
        Arc::new(Deaf),
    );
    (replica.await.unwrap(), disk)
}

/// Commands in the order they were applied. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct RecordingMachine(pub(crate) Arc<Mutex<Vec<Vec<u8>>>>);

struct FrozenRecorder(Vec<Vec<u8>>);

impl StateMachine for RecordingMachine {
    fn check(&self) -> CheckCommand {
        Arc::new(|command, _| match command {
            b"poison" => Err("poison is no command".to_owned()),
            _ => Ok(()),
        })
    }

    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError> {
        self.0.lock().unwrap().push(command.to_vec());
        Ok(index.to_le_bytes().to_vec())
    }

    fn skip(&mut self, _index: u64) {}

    fn freeze(&self) -> Box<dyn FrozenMachine> {
        Box::new(FrozenRecorder(self.0.lock().unwrap().clone()))
    }

    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError> {
        let corrupt = |error: std::io::Error| SnapshotError(error.to_string());
        let mut commands = Vec::new();
        let mut length = [0; 4];
        let mut bytes = Vec::new();
        snapshot.read_to_end(&mut bytes).map_err(corrupt)?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest.read_exact(&mut length).map_err(corrupt)?;
            let mut command = vec![0; u32::from_le_bytes(length) as usize];
            rest.read_exact(&mut command).map_err(corrupt)?;
            commands.push(command);
        }
        *self.0.lock().unwrap() = commands;
        Ok(())
    }
}

impl FrozenMachine for FrozenRecorder {
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        for command in &self.0 {
            out.write_all(&(command.len() as u32).to_le_bytes())?;
            out.write_all(command)?;
        }
        Ok(())
    }
}
