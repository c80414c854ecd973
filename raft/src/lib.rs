//! Replicates opaque commands in one agreed order.
//!
//! A [`Machine`] is driven by a Raft log (openraft) kept in sled and carried between replicas by
//! gRPC (tonic). Nothing here knows what a command means, and no openraft or sled name appears in
//! this interface, so that either can be replaced.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What a replicated log drives. The bytes are opaque on purpose.
pub trait Machine: Send + 'static {
    /// Applies one committed command and answers it. Called in log order, once per index; entries
    /// without a command (membership, leader's blank) arrive through [`Machine::skip`].
    ///
    /// # Errors
    /// Only when the command cannot be decoded: the replica then stops.
    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplica>;

    /// Notes an index that carries no command.
    fn skip(&mut self, index: u64);

    /// A frozen image of the state at this point, taken without delay.
    fn freeze(&self) -> Box<dyn FrozenMachine>;

    /// Replaces the state by a snapshot that [`FrozenMachine::write_to`] wrote.
    ///
    /// # Errors
    /// Says what is wrong with the snapshot and where; the state is then as it was.
    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), CorruptSnapshot>;
}

/// A state frozen for a snapshot, written out beside the running machine.
pub trait FrozenMachine: Send + 'static {
    /// Writes the snapshot.
    ///
    /// # Errors
    /// Those of `out`.
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()>;
}

/// Why a replica cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StopReplica(pub String);

/// A snapshot's bytes are not a state.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CorruptSnapshot(pub String);

/// Receives what peers send outside the log.
pub trait PeerHandler: Send + Sync + 'static {
    /// One message of `from`, in order of sending per peer; messages may be lost, never torn.
    fn message(&self, from: u8, bytes: &[u8]);
}

/// How a replica is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// `1..=255`.
    pub id: u8,
    /// Log, vote and snapshots live below it.
    pub data_dir: PathBuf,
    /// Host and port peers reach this replica's peer listener at.
    pub advertise: String,
    /// Free `key=value` facts told to peers and shown in [`Status`] (`admin`, `data`, `version`).
    pub labels: BTreeMap<String, String>,
    /// How a cluster comes to be.
    pub formation: Formation,
    /// Leader's heartbeat interval.
    pub heartbeat: Duration,
    /// Range an election timeout is drawn from.
    pub election_timeout: Range<Duration>,
    /// Log entries between snapshots.
    pub snapshot_every_entries: u64,
    /// Log bytes between snapshots, whichever comes first.
    pub snapshot_every_bytes: u64,
}

/// How a replica finds its cluster when its data directory is empty.
#[derive(Debug, Clone)]
pub enum Formation {
    /// Form a cluster once `expect` peers (this one included) answer and none of them has state;
    /// if one of them is in a cluster already, join that. The lowest id initialises.
    Bootstrap {
        /// Where peers are looked for.
        peers: Peers,
        /// How many voters begin.
        expect: usize,
        /// Command proposed as the cluster's first, by whoever initialises.
        first_command: Vec<u8>,
    },
    /// Join an existing cluster as a learner through any of these members.
    Join(Peers),
}

/// Where peers are looked for.
#[derive(Debug, Clone)]
pub enum Peers {
    /// `host:port` each.
    List(Vec<String>),
    /// One `host:port` that resolves to every peer; looked up anew at each try.
    Dns(String),
}

/// A running replica. Cheap to clone; the replica stops when told to, not when handles drop.
#[derive(Clone)]
pub struct Replica {}

/// A command that is committed and applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its place in the log.
    pub index: u64,
    /// What the machine answered.
    pub reply: Vec<u8>,
}

/// Why a proposal is not known to be committed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Refused before it entered any log: proposing again is safe.
    #[error("no leader is known")]
    NoLeader,
    /// It may or may not be committed, now or later: propose the same bytes again.
    #[error("outcome unknown: {0}")]
    Unknown(String),
    /// This replica is stopping or has stopped.
    #[error("replica stopped: {0}")]
    Stopped(String),
}

/// Why a change of membership or leadership did not take place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It cannot be done in the present membership; says why.
    #[error("{0}")]
    Refused(String),
    /// Not known to have taken place.
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// What a replica knows of its cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// This replica.
    pub id: u8,
    /// Random id of the cluster; `None` before it is formed or joined.
    pub cluster_id: Option<u128>,
    /// What this replica is at the moment.
    pub role: Role,
    /// Raft term.
    pub term: u64,
    /// The leader it follows.
    pub leader: Option<u8>,
    /// Whether the leader is heard from and a quorum answers it, as far as this replica can tell.
    pub has_quorum: bool,
    /// Last index known committed.
    pub committed: u64,
    /// Last index applied.
    pub applied: u64,
    /// Last index in the local log.
    pub last_log: u64,
    /// Index of the newest snapshot.
    pub snapshot: Option<u64>,
    /// First index the log still holds.
    pub purged: u64,
    /// Whether what the leader had committed when this replica started is applied.
    pub caught_up: bool,
    /// Why the replica stopped or cannot vote (storage fault, disk full).
    pub fault: Option<String>,
    /// All members, this one included.
    pub members: BTreeMap<u8, Member>,
}

/// What a replica is in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Orders the log.
    Leader,
    /// Votes and follows.
    Follower,
    /// Asks for votes.
    Candidate,
    /// Follows without a vote.
    Learner,
    /// Not in a cluster yet.
    Forming,
    /// Over, see [`Status::fault`].
    Stopped,
}

/// A member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Host and port of its peer listener.
    pub address: String,
    /// What it told about itself.
    pub labels: BTreeMap<String, String>,
    /// Whether it counts for the quorum.
    pub is_voter: bool,
    /// Whether its peer stream is up, as seen from here.
    pub is_connected: bool,
    /// Entries it is behind; known on the leader only.
    pub lag: Option<u64>,
}

impl Replica {
    /// Opens the store, restores the machine and starts serving peers on `listener`.
    ///
    /// # Errors
    /// When the store cannot be opened or is damaged: names file and offset.
    pub async fn start(
        options: Options,
        listener: tokio::net::TcpListener,
        machine: impl Machine,
        handler: Arc<dyn PeerHandler>,
    ) -> Result<Self, StartError> {
        let _ = (options, listener, machine, handler);
        unimplemented!("raft helper")
    }

    /// Has a command committed and applied on the leader, forwarding it when that is another
    /// replica. Waits at most `timeout`.
    ///
    /// # Errors
    /// See [`ProposeError`]: only `NoLeader` says that it did not happen.
    pub async fn propose(
        &self,
        command: Vec<u8>,
        timeout: Duration,
    ) -> Result<Committed, ProposeError> {
        let _ = (command, timeout);
        unimplemented!("raft helper")
    }

    /// Waits until this replica has applied everything committed when the call began, as the
    /// leader confirms with a quorum. Answers the index.
    ///
    /// # Errors
    /// When no leader confirms within `timeout`.
    pub async fn read_barrier(&self, timeout: Duration) -> Result<u64, ProposeError> {
        let _ = timeout;
        unimplemented!("raft helper")
    }

    /// The present status.
    #[must_use]
    pub fn status(&self) -> Status {
        unimplemented!("raft helper")
    }

    /// Every change of the status.
    #[must_use]
    pub fn watch(&self) -> tokio::sync::watch::Receiver<Status> {
        unimplemented!("raft helper")
    }

    /// Sends `bytes` to every connected peer outside the log. Never waits; a peer that is behind
    /// gets only the newest message.
    pub fn broadcast(&self, bytes: bytes::Bytes) {
        let _ = bytes;
        unimplemented!("raft helper")
    }

    /// Adds a replica that listens at `address` as a learner. Answers the log index.
    ///
    /// # Errors
    /// When it does not answer, is in another cluster, or its id is taken.
    pub async fn add_learner(&self, id: u8, address: String) -> Result<u64, ChangeError> {
        let _ = (id, address);
        unimplemented!("raft helper")
    }

    /// Makes a learner a voter once its lag is small. Answers the log index.
    ///
    /// # Errors
    /// When it is no learner or does not catch up.
    pub async fn promote(&self, id: u8) -> Result<u64, ChangeError> {
        let _ = id;
        unimplemented!("raft helper")
    }

    /// Removes a member. A leader that removes itself hands leadership over first. Answers the log
    /// index.
    ///
    /// # Errors
    /// When it is no member or the last voter.
    pub async fn remove(&self, id: u8) -> Result<u64, ChangeError> {
        let _ = id;
        unimplemented!("raft helper")
    }

    /// Hands leadership to `to`, or to the voter that is furthest. Answers the new leader.
    ///
    /// # Errors
    /// When `to` is no voter or does not take it in time.
    pub async fn transfer_leader(&self, to: Option<u8>) -> Result<u8, ChangeError> {
        let _ = to;
        unimplemented!("raft helper")
    }

    /// Takes a snapshot now. Answers its index.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn snapshot(&self) -> Result<u64, ChangeError> {
        unimplemented!("raft helper")
    }

    /// Stops: hands leadership over if it has it, finishes what is being written, closes the store.
    pub async fn shutdown(&self) {
        unimplemented!("raft helper")
    }

    /// Where peers are served.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        unimplemented!("raft helper")
    }
}

/// Why a replica did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A file of the store is damaged.
    #[error("{path} is damaged at byte {offset}: {what}")]
    Damaged {
        /// The file (or tree and key, for the log inside sled).
        path: String,
        /// Where in it; for a log entry its index.
        offset: u64,
        /// What was found and what was expected.
        what: String,
    },
    /// The store belongs to another replica or cluster.
    #[error("{0}")]
    WrongStore(String),
    /// The store cannot be opened or written.
    #[error("open store {path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Empties the log, vote and snapshots of a damaged replica below `data_dir`, so that it joins
/// under a new id and is rebuilt from its peers. Answers what was moved aside and where to.
///
/// # Errors
/// Those of the file system.
pub fn set_store_aside(data_dir: &std::path::Path) -> std::io::Result<Option<PathBuf>> {
    let _ = data_dir;
    unimplemented!("raft helper")
}
