//! Replicas on loopback with a machine that remembers every command.

#![allow(unreachable_pub, reason = "shared by the tests")]

mod journal;
pub mod world;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use raft::{
    ChangeError, Formation, PeerHandler, Peers, Replica, ReplicaOptions, StartError, Status,
    Storage, Tcp,
};
use tempfile::TempDir;
use tokio::net::TcpListener;

pub use self::journal::Journal;

/// Timeout of a step; longer than any step takes unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Keeps the newest message of each peer.
#[derive(Debug, Default)]
pub struct Mailbox(tokio::sync::watch::Sender<BTreeMap<u8, Vec<u8>>>);

impl PeerHandler for Mailbox {
    fn message(&self, from: u8, bytes: &[u8]) {
        self.0.send_modify(|newest| {
            newest.insert(from, bytes.to_vec());
        });
    }
}

impl Mailbox {
    pub async fn wait_for(&self, from: u8, bytes: &[u8]) {
        let mut newest = self.0.subscribe();
        let arrived = newest.wait_for(|newest| newest.get(&from).is_some_and(|n| n == bytes));
        tokio::time::timeout(PATIENCE, arrived)
            .await
            .expect("message arrives")
            .unwrap();
    }
}

/// Returns a replica's options in these tests, without its address.
pub fn options(id: u8, data_dir: &Path, formation: Formation) -> ReplicaOptions {
    ReplicaOptions {
        id,
        data_dir: data_dir.to_path_buf(),
        advertise: String::new(),
        cluster_name: raft::DEFAULT_NAME.to_owned(),
        labels: BTreeMap::from([("version".to_owned(), "1".to_owned())]),
        formation,
        replaces_lost: false,
        promotion: None,
        heartbeat: Duration::from_millis(50),
        election_timeout: Duration::from_millis(200)..Duration::from_millis(400),
        snapshot_every_entries: 10_000,
        snapshot_every_bytes: 64 << 20,
        storage: Storage::Sled,
    }
}

/// Returns the formation of a cluster with `expect` of `peers` as founders.
pub fn bootstrap(peers: &[String], expect: usize) -> Formation {
    Formation::Bootstrap {
        peers: Peers::List(peers.to_vec()),
        expect,
        first_command: b"first".to_vec(),
    }
}

/// Returns why a change was refused. Panics if it was not.
pub fn refused<T: std::fmt::Debug>(answer: Result<T, ChangeError>) -> String {
    match answer {
        Err(ChangeError::Refused(why)) => why,
        other => panic!("not refused: {other:?}"),
    }
}

/// A replica with its folder and port, across restarts.
pub struct Seat {
    pub options: ReplicaOptions,
    pub folder: TempDir,
    pub journal: Journal,
    pub mailbox: Arc<Mailbox>,
    replica: Option<Replica>,
}

impl Seat {
    pub fn new(id: u8, formation: Formation) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            options: options(id, folder.path(), formation),
            folder,
            journal: Journal::default(),
            mailbox: Arc::default(),
            replica: None,
        }
    }

    /// Starts a replica that waits to be added by an operator.
    pub async fn waiting(id: u8) -> Self {
        let mut seat = Self::new(id, Formation::Join(Peers::List(Vec::new())));
        seat.start().await;
        seat
    }

    /// Starts on a free port, or on the port used before.
    pub async fn try_start(&mut self) -> Result<(), StartError> {
        let listener = if self.options.advertise.is_empty() {
            TcpListener::bind("127.0.0.1:0").await.unwrap()
        } else {
            bind(&self.options.advertise).await
        };
        self.start_on(listener).await
    }

    pub async fn start_on(&mut self, listener: TcpListener) -> Result<(), StartError> {
        self.options.advertise = listener.local_addr().unwrap().to_string();
        self.journal = Journal::default();
        let started = Replica::start(
            self.options.clone(),
            Arc::new(Tcp::new(listener).unwrap()),
            Box::new(self.journal.clone()),
            self.mailbox.clone(),
        );
        self.replica = Some(started.await?);
        Ok(())
    }

    pub async fn start(&mut self) {
        self.try_start().await.unwrap();
    }

    pub fn replica(&self) -> &Replica {
        self.replica.as_ref().expect("the replica runs")
    }

    pub fn is_running(&self) -> bool {
        self.replica.is_some()
    }

    pub async fn crash(&mut self) {
        if let Some(replica) = self.replica.take() {
            replica.crash().await;
        }
    }

    pub async fn shutdown(&mut self) {
        if let Some(replica) = self.replica.take() {
            replica.shutdown().await;
        }
    }

    /// Waits until the status satisfies `wish`.
    pub async fn wait(&self, what: &str, wish: impl Fn(&Status) -> bool) -> Status {
        let mut status = self.replica().watch();
        match tokio::time::timeout(PATIENCE, status.wait_for(|status| wish(status))).await {
            Ok(Ok(status)) => status.clone(),
            _ => panic!(
                "replica {} never: {what}: {:#?}",
                self.options.id,
                self.replica().status()
            ),
        }
    }

    pub async fn propose(&self, command: &str) -> raft::Committed {
        self.replica()
            .propose(command.as_bytes().to_vec(), PATIENCE)
            .await
            .unwrap()
    }
}

/// Binds the port of a replica that has just stopped, which may take a moment to be free.
async fn bind(address: &str) -> TcpListener {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => {
                assert!(
                    std::time::Instant::now() < deadline,
                    "bind {address}: {error}"
                );
                tokio::task::yield_now().await;
            }
        }
    }
}

/// A founded cluster of replicas `1..=size`.
pub struct Cluster {
    pub seats: Vec<Seat>,
}

/// Binds `count` listeners on free ports; returns them and their addresses.
pub async fn listeners(count: usize) -> (Vec<TcpListener>, Vec<String>) {
    let mut listeners = Vec::new();
    for _ in 0..count {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let peers = listeners
        .iter()
        .map(|listener| listener.local_addr().unwrap().to_string())
        .collect();
    (listeners, peers)
}

impl Cluster {
    pub async fn found(size: u8) -> Self {
        Self::found_with(size, |_| {}).await
    }

    pub async fn found_with(size: u8, adjust: impl Fn(&mut ReplicaOptions)) -> Self {
        let (listeners, addresses) = listeners(size.into()).await;
        let mut seats = Vec::new();
        for (id, listener) in (1..).zip(listeners) {
            let mut seat = Seat::new(id, bootstrap(&addresses, size.into()));
            adjust(&mut seat.options);
            seat.start_on(listener).await.unwrap();
            seats.push(seat);
        }
        let cluster = Self { seats };
        for seat in &cluster.seats {
            seat.wait("founded", |status| {
                status.leader.is_some() && status.caught_up && status.has_quorum
            })
            .await;
        }
        cluster
    }

    pub fn seat(&mut self, id: u8) -> &mut Seat {
        self.seats
            .iter_mut()
            .find(|seat| seat.options.id == id)
            .expect("no such replica")
    }

    /// Returns the formation for joining this cluster.
    pub fn join(&self) -> Formation {
        let seats = self.seats.iter();
        Formation::Join(Peers::List(
            seats.map(|seat| seat.options.advertise.clone()).collect(),
        ))
    }

    /// Returns a running replica.
    pub fn running(&self) -> &Seat {
        let running = self.seats.iter().find(|seat| seat.is_running());
        running.expect("one runs")
    }

    /// Returns the leader, as a running replica sees it.
    pub async fn leader(&self) -> u8 {
        let has_one = |status: &Status| status.leader.is_some() && status.has_quorum;
        let status = self.running().wait("a leader", has_one).await;
        status.leader.unwrap()
    }

    /// Waits until a running replica other than `old` follows a new leader; returns that replica.
    pub async fn replaced(&self, old: u8) -> &Seat {
        let mut others = self.seats.iter().filter(|seat| seat.options.id != old);
        let other = others.find(|seat| seat.is_running()).expect("one runs");
        let is_replaced = |status: &Status| status.leader.is_some_and(|now| now != old);
        other.wait("another leader", is_replaced).await;
        other
    }

    /// Waits until all running replicas have applied `index`, and compares what they applied.
    pub async fn agree(&self, index: u64) {
        let mut all = Vec::new();
        for seat in self.seats.iter().filter(|seat| seat.is_running()) {
            seat.wait("applied", |status| status.applied >= index).await;
            let mut commands = seat.journal.commands();
            commands.split_off(&(index + 1));
            all.push(commands);
        }
        for pair in all.windows(2) {
            assert_eq!(pair[0], pair[1]);
        }
    }

    pub async fn shutdown(&mut self) {
        for seat in &mut self.seats {
            seat.shutdown().await;
        }
    }
}
