//! Talking to peers: one link each way per peer and purpose, Raft's client over it, the service
//! that answers, the streams of messages outside the log, and the port that carries all of it.

mod accept;
mod client;
mod door;
mod guard;
mod hearing;
#[cfg(feature = "fuzzing")]
pub mod lies;
mod link;
mod messages;
mod parts;
mod sealed;
mod secret;
mod service;
#[cfg(test)]
mod tests;
mod transport;

use std::time::Duration;

pub(crate) use self::client::Network;
pub(crate) use self::guard::{SHOWS_STORE, check_store};
pub(crate) use self::hearing::better_leader;
pub(crate) use self::link::{CallError, LinkLane, Peer, PeerLinks};
pub(crate) use self::messages::keep_streams;
pub(crate) use self::parts::{SnapshotInstalls, fetch_state};
pub use self::secret::{PeerSecret, Secret};
pub(crate) use self::service::serve;
pub use self::transport::{PeerChannel, PeerRequest, PeerResponse, PeerService, Tcp, Transport};
#[cfg(feature = "fuzzing")]
pub(crate) use self::{
    guard::check_entries,
    parts::check_head,
    secret::{read_first, write_first},
};

/// Largest message on the wire. A batch of entries or a single command stays far below.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest wait for a peer's TCP connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection on which nothing answers a ping is dropped after the sum of both.
const PING_EVERY: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Parts of a snapshot read ahead of the network.
const PARTS_MAX: usize = 4;
/// Largest state that is received, in bytes.
const SNAPSHOT_BYTES_MAX: u64 = 16 << 30;
/// A snapshot that makes no progress is ended by pings; this only bounds one that never ends.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(3600);
/// HTTP/2 flow control: what a peer may send unread.
const WINDOW_BYTES: u32 = 4 * 1024 * 1024;
