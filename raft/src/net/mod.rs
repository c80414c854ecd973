//! The network between replicas, as a replica sees it: connections to peers, Raft's client on top
//! of them, and snapshots as streams of parts. `crate::replica::peers` serves the calls of peers.
//!
//! | module | purpose |
//! | --- | --- |
//! | `transport` | the port that carries calls; a simulation implements its own |
//! | `tcp` | that port over HTTP/2 and TCP, encrypted if the cluster has a secret |
//! | `sender` | the replica on whose behalf a connection calls |
//! | `links` | connections to peers, with reconnect backoff |
//! | `reachability` | which replicas reach which |
//! | `client` | the calls that Raft makes |
//! | `snapshot_stream` | splits snapshot files into parts and reassembles them |
//! | `validate` | context-free checks of messages |

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

/// Maximum size of a message, in bytes. A batch of entries or a single command is far smaller.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Timeout for connecting to a peer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
