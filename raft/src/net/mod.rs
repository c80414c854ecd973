//! Talking to peers: one link each way per peer and purpose, Raft's client over it, the service
//! that answers, and the streams of messages outside the log.

mod client;
mod link;
mod messages;
mod service;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use self::client::Network;
pub(crate) use self::link::{CallError, Lane, Links, connect_once};
pub(crate) use self::messages::keep_streams;
pub(crate) use self::service::serve;

/// Largest message on the wire. A batch of entries or a single command stays far below.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest wait for a peer's TCP connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection on which nothing answers a ping is dropped after the sum of both.
const PING_EVERY: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// HTTP/2 flow control: what a peer may send unread.
const WINDOW_BYTES: u32 = 4 * 1024 * 1024;
