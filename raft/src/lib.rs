//! Replicates opaque commands in one agreed order.
//!
//! A [`StateMachine`] is driven by a Raft log (openraft) kept in sled and carried between replicas by
//! gRPC (tonic). Nothing here knows what a command means, and no openraft or sled name appears in
//! this interface, so that either can be replaced.
//!
//! # What is where
//!
//! | module | what |
//! | --- | --- |
//! | `replica` | start, stop, propose, change the membership, form a cluster, status |
//! | `host` | the machine under openraft: apply, snapshot, restore |
//! | `log` | votes and entries: one writing thread over sled, a task over memory |
//! | `snapshot` | snapshot files |
//! | `net` | links to peers, Raft's client, the service that answers, messages outside the log, the port that carries it |
//! | `identity` | who a replica is and the one cluster it belongs to |
//! | `files` | the port to files, small ones, and the folders below a data directory |
//! | `memory` | a disk in memory that forgets in a crash what was not synced |
//! | `storage` | where data is kept, and what follows from that |
//! | `blocking` | work that blocks: on a pool, or in place over a disk in memory |
//! | `chance`, `runtime`, `watch` | random numbers, timers and wake-ups, the same again in a simulation |
//! | `wire`, `types` | the wire types and openraft's, and the way between |
//!
//! # What holds
//!
//! - A command answered with [`Committed`] is on the disks of a majority and is applied by every
//!   replica at that index, once. Whoever is answered [`ProposeError::Unknown`] knows nothing and
//!   proposes the same bytes again: telling them apart is up to the machine.
//! - Log indexes count from 1 and are the same on every replica.
//! - A replica never votes or acknowledges without its disk. After an error of the disk or the
//!   machine it takes no further part ([`Status::fault`]); what it had applied stays readable.
//! - The log opens no file while it runs. A step that cannot begin, for want of room or of
//!   descriptors, is tried again until it can ([`Status::waiting`]).
//! - A replica that lost its store is another replica: it is refused under its old id.

mod blocking;
pub mod chance;
mod error;
mod fault;
mod files;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod host;
mod identity;
mod log;
mod machine;
mod memory;
mod net;
mod options;
mod patience;
pub mod planted;
mod replica;
mod runtime;
mod seldom;
mod snapshot;
mod status;
mod storage;
mod sync;
#[cfg(feature = "planted")]
pub mod trial;
mod types;
pub mod watch;
mod wire;

#[cfg(test)]
mod toy;

pub use error::{ChangeError, Committed, ProposeError, StartError};
pub use files::set_store_aside;
pub use machine::{
    CheckCommand, FrozenMachine, PeerHandler, SnapshotError, StateMachine, StopReplicaError,
};
pub use memory::{DiskShortage, MemoryDisk};
#[cfg(feature = "fuzzing")]
pub use net::lies;
pub use net::{
    PeerChannel, PeerRequest, PeerResponse, PeerSecret, PeerService, Secret, Tcp, Transport,
};
pub use options::{Formation, Peers, ReplicaOptions};
pub use replica::Replica;
pub use status::{Member, Role, Status};
pub use storage::Storage;

/// What a cluster is called that nobody named.
pub const DEFAULT_NAME: &str = "quorate";
/// Longest name of a cluster, in bytes.
pub const NAME_BYTES_MAX: usize = 64;
/// Longest command that is taken, in bytes.
pub const COMMAND_BYTES_MAX: usize = 16 * 1024 * 1024;
