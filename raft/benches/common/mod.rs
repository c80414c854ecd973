//! Clusters on loopback with a machine that does nothing.

#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "shared by the benches"
)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::io::{Read, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use raft::{
    CheckCommand, Formation, FrozenMachine, PeerHandler, Peers, Replica, ReplicaOptions,
    SnapshotError, StateMachine, Status, StopReplicaError, Storage, Tcp,
};
use tempfile::TempDir;
use tokio::net::TcpListener;

/// A machine without state, which does nothing with commands.
pub struct Nothing;

impl StateMachine for Nothing {
    fn check(&self) -> CheckCommand {
        Arc::new(|_, _, _| Ok(()))
    }

    fn apply(&mut self, _index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError> {
        black_box(command);
        Ok(Vec::new())
    }

    fn skip(&mut self, _index: u64) {}

    fn freeze(&self) -> Box<dyn FrozenMachine> {
        Box::new(Nothing)
    }

    fn restore(&mut self, _snapshot: &mut dyn Read) -> Result<(), SnapshotError> {
        Ok(())
    }
}

impl FrozenMachine for Nothing {
    fn write_to(&self, _out: &mut dyn Write) -> std::io::Result<()> {
        Ok(())
    }
}

impl PeerHandler for Nothing {
    fn message(&self, _from: u8, _bytes: &[u8]) {}
}

/// A replica with its options and folder, across restarts.
pub struct Seat {
    pub options: ReplicaOptions,
    pub replica: Replica,
    _folder: TempDir,
}

impl Seat {
    pub async fn start_again(&mut self) {
        let listener = TcpListener::bind(&self.options.advertise).await;
        let listener = listener.expect("the port was its own");
        self.replica = start(self.options.clone(), listener).await;
    }

    pub async fn wait(&self, wish: impl Fn(&Status) -> bool) -> Status {
        let mut status = self.replica.watch();
        let status = status.wait_for(|status| wish(status)).await;
        status.expect("the replica runs").clone()
    }
}

async fn start(options: ReplicaOptions, listener: TcpListener) -> Replica {
    let transport = Arc::new(Tcp::new(listener).expect("it is bound"));
    let started = Replica::start(options, transport, Box::new(Nothing), Arc::new(Nothing)).await;
    started.expect("the replica starts")
}

/// Founds a cluster of the replicas `1..=size`, and waits until all have caught up.
pub async fn cluster(size: u8, election_timeout: Range<Duration>) -> Vec<Seat> {
    let mut listeners = Vec::new();
    for _ in 0..size {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        listeners.push(listener.expect("loopback has ports"));
    }
    let address = |listener: &TcpListener| listener.local_addr().expect("it is bound").to_string();
    let peers: Vec<String> = listeners.iter().map(address).collect();
    let mut seats = Vec::new();
    for (id, listener) in (1..).zip(listeners) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = ReplicaOptions {
            id,
            data_dir: folder.path().to_path_buf(),
            advertise: address(&listener),
            cluster_name: raft::DEFAULT_NAME.to_owned(),
            labels: BTreeMap::new(),
            formation: Formation::Bootstrap {
                peers: Peers::List(peers.clone()),
                expect: size.into(),
                first_command: Vec::new(),
            },
            replaces_lost: false,
            promotion: None,
            heartbeat: Duration::from_millis(50),
            election_timeout: election_timeout.clone(),
            snapshot_every_entries: 50_000,
            snapshot_every_bytes: 256 << 20,
            storage: Storage::Sled,
        };
        let replica = start(options.clone(), listener).await;
        seats.push(Seat {
            options,
            replica,
            _folder: folder,
        });
    }
    for seat in &seats {
        seat.wait(|status| status.leader.is_some() && status.has_quorum && status.caught_up)
            .await;
    }
    seats
}

/// Returns the leader's index among the seats.
pub async fn leader(seats: &[Seat]) -> usize {
    let led = |status: &Status| status.leader.is_some() && status.has_quorum;
    let status = seats[0].wait(led).await;
    usize::from(status.leader.expect("it was waited for")) - 1
}
