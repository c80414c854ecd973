//! Replicates opaque commands in one agreed order.
//!
//! A Raft log drives a [`StateMachine`]: openraft, with a log store in sled and gRPC (tonic)
//! between replicas. This crate does not interpret commands, and its public interface names neither
//! openraft nor sled, so either can be replaced.
//!
//! # Modules
//!
//! | module | purpose |
//! | --- | --- |
//! | `replica` | start, stop, propose, change membership, form a cluster, status, serve peers |
//! | `machine` | the traits that a user implements |
//! | `adapter` | runs the state machine under openraft: apply, snapshot, restore |
//! | `log` | votes and entries: the storage port, its sled implementation and the writer |
//! | `snapshot` | snapshot files |
//! | `replay` | applies a store's log offline, from a copy |
//! | `net` | connections to peers, Raft's client and the port for calls |
//! | `identity` | the replica's identity and the one cluster it belongs to |
//! | `files` | the file port, small files and the layout of a data directory |
//! | `memory` | an in-memory disk for simulations that loses unsynced data in a crash |
//! | `storage` | the disk that a replica uses, and what depends on it |
//! | `determinism` | what makes a simulated run repeatable |
//! | `wire`, `types` | wire types, openraft's types, and conversions between them |
//!
//! # Guarantees
//!
//! - A command acknowledged with [`Committed`] is on the disks of a majority, and every replica
//!   applies it once, at that index. After [`ProposeError::Unknown`] it may or may not be
//!   committed. The caller then proposes the same bytes again; the machine must recognise
//!   duplicates.
//! - Log indexes start at 1 and are the same on every replica.
//! - A replica never votes or acknowledges anything before it is durable. After an error of the
//!   disk or the machine it stops participating ([`Status::fault`]); the state it has applied stays
//!   readable.
//! - The log opens no file while it runs. A write that cannot begin for lack of space is retried
//!   until it can ([`Status::waiting`]).
//! - A replica that lost its store counts as a different replica. It is refused under its old id,
//!   unless the leader may replace the former member ([`ReplicaOptions::replaces_lost`]).

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
mod removed_members;
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

pub use adapter::SnapshotCounts;
pub use determinism::{random, watch};
pub use error::{ChangeError, Committed, ProposeError, StartError};
pub use files::set_store_aside;
pub use log::{SYNC_BUCKETS_S, SyncTimes};
pub use machine::{
    CheckCommand, CommandSource, FrozenMachine, PeerHandler, SnapshotError, StateMachine,
    StopReplicaError,
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
pub use replica::forged_calls;
pub use status::{Member, PeerFinding, PeerState, Role, Status};
pub use storage::Storage;

/// Default name of a cluster.
pub const DEFAULT_NAME: &str = "quorate";
/// Maximum length of a cluster name, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Maximum length of a command, in bytes.
pub const COMMAND_BYTES_MAX: usize = 16 * 1024 * 1024;
