//! Replicates opaque commands in one agreed order.
//!
//! A [`StateMachine`] is driven by a Raft log: openraft, over a log store in sled and gRPC (tonic)
//! between replicas. Nothing here knows what a command means, and no name of openraft or sled
//! appears in the public interface, so either can be replaced.
//!
//! # What is where
//!
//! | module | what |
//! | --- | --- |
//! | `replica` | start, stop, propose, change the membership, form a cluster, status, answer peers |
//! | `machine` | the traits that a user implements |
//! | `adapter` | runs the state machine under openraft: apply, snapshot, restore |
//! | `log` | votes and entries: a port to the disk, sled behind it, and the task that writes |
//! | `snapshot` | snapshot files |
//! | `replay` | applies a store's log offline, from a copy |
//! | `net` | connections to peers, Raft's client, and the port that carries calls |
//! | `identity` | who a replica is and the one cluster it belongs to |
//! | `files` | the port to files, small files, and the layout of a data directory |
//! | `memory` | a disk in memory, for simulations, that forgets in a crash what was not synced |
//! | `storage` | which disk a replica uses, and what follows from that |
//! | `determinism` | what makes a run repeatable in a simulation |
//! | `wire`, `types` | the wire types and openraft's, and conversions between them |
//!
//! # What holds
//!
//! - A command answered with [`Committed`] is on the disks of a majority and is applied by every
//!   replica at that index, once. After [`ProposeError::Unknown`] it may or may not be committed,
//!   and the caller proposes the same bytes again: the machine must recognise duplicates.
//! - Log indexes start at 1 and are the same on every replica.
//! - A replica never votes or acknowledges anything before its disk has it. After an error of the
//!   disk or the machine it takes no further part ([`Status::fault`]); what it had applied stays
//!   readable.
//! - The log opens no file while it runs. A write that cannot begin for lack of space is retried
//!   until it can ([`Status::waiting`]).
//! - A replica that lost its store is a different replica: it is refused under its old id.

mod adapter;
mod backoff;
mod determinism;
mod error;
mod fault;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod identity;
mod locks;
mod log;
mod log_throttle;
mod machine;
mod memory;
mod net;
mod options;
pub mod planted;
mod removed;
mod replay;
mod replica;
mod snapshot;
mod status;
mod storage;
#[cfg(feature = "planted")]
pub mod truncated_log;
mod types;
mod wire;

#[cfg(test)]
extern crate self as raft;
#[cfg(test)]
mod testing;

pub use determinism::{random, watch};
pub use error::{ChangeError, Committed, ProposeError, StartError};
pub use files::set_store_aside;
pub use log::{SYNC_BUCKETS_S, SyncTimes};
pub use machine::{
    CheckCommand, FrozenMachine, PeerHandler, SnapshotError, StateMachine, StopReplicaError,
};
pub use memory::{DiskShortage, MemoryDisk};
pub use net::{
    ConnectError, ConnectFailure, PeerChannel, PeerRequest, PeerResponse, PeerSecret, PeerService,
    PeerTls, PeerTlsConfigs, Secret, Tcp, Transport, certificate_names,
};
pub use options::{Formation, Peers, Promotion, ReplicaOptions};
pub use replay::{ReplayError, ReplayRange, replay};
pub use replica::Replica;
#[cfg(feature = "fuzzing")]
pub use replica::lies;
pub use status::{Member, PeerFinding, PeerState, Role, Status};
pub use storage::Storage;

/// Name of a cluster whose config does not name it.
pub const DEFAULT_NAME: &str = "quorate";
/// Longest name of a cluster, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Longest command that is taken, in bytes.
pub const COMMAND_BYTES_MAX: usize = 16 * 1024 * 1024;
