//! The network between replicas, as a replica sees it: connections to peers, Raft's client over
//! them, and snapshots as streams of parts. What a replica answers its peers is in
//! `crate::replica::peers`.
//!
//! | module | what |
//! | --- | --- |
//! | `transport` | the port that carries calls; a simulation has its own behind it |
//! | `tcp` | HTTP/2 over TCP behind that port, encrypted where the cluster has a secret |
//! | `sender` | which replica a connection speaks for |
//! | `links` | connections to peers, and when a failed one is tried again |
//! | `reachability` | whose calls reach whom |
//! | `client` | the calls that Raft makes |
//! | `snapshot_stream` | snapshot files cut into parts and put together again |
//! | `validate` | checks that a message must pass by itself |

mod client;
mod links;
mod reachability;
mod sender;
pub(crate) mod snapshot_stream;
mod tcp;
mod transport;
pub(crate) mod validate;

use std::time::Duration;

pub(crate) use self::client::Network;
#[cfg(test)]
pub(crate) use self::links::client;
pub(crate) use self::links::{CallError, CallOnceError, LinkLane, Peer, PeerClient, PeerLinks};
pub(crate) use self::reachability::better_leader;
pub(crate) use self::sender::PeerSender;
pub use self::tcp::{PeerSecret, PeerTls, PeerTlsConfigs, Secret, Tcp, certificate_names};
#[cfg(feature = "fuzzing")]
pub(crate) use self::tcp::{read_first, write_first};
pub use self::transport::{
    ConnectError, ConnectFailure, PeerChannel, PeerRequest, PeerResponse, PeerService, Transport,
};

/// Largest message on the wire. A batch of entries and a single command are far smaller.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest wait for a connection to a peer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
