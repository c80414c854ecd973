//! A listener that limits its open connections, in all and per client address.
//!
//! Where there is no room, the longest idle connections close first, those of the addresses with the
//! most connections before others (`connections`). An address gets at most three quarters of the
//! places, so that a crowd at one address leaves room for others. Connections wait in the backlog
//! only while every place is busy.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::connections::{ClientTable, ConnectionGuard, ConnectionRequestGuard};
use crate::base::log_rate_limit::LogRateLimit;

/// Pause after a failed accept. The usual cause, a lack of descriptors, persists for a while.
const PAUSE: Duration = Duration::from_millis(50);
/// Minimum interval between log lines about failed accepts.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// Time after which another connection is asked to make room, if those asked before have not closed.
const EVICT_EVERY: Duration = Duration::from_millis(100);

/// An accepted connection with its place. Dropping the place makes room for another one.
pub struct BoundedConnection {
    /// The connection.
    pub stream: TcpStream,
    /// Address of the client.
    pub peer: SocketAddr,
    /// Place of the connection.
    pub place: ConnectionPlace,
}

/// The place of an open connection.
pub struct ConnectionPlace {
    /// `None` only while dropped: the place is free before the listener is told.
    seat: Option<ConnectionGuard>,
    freed: Arc<Notify>,
}

/// Marks a connection as busy, so that it does not have to make room for others.
#[must_use]
pub struct BusyGuard {
    _request: ConnectionRequestGuard,
}

impl ConnectionPlace {
    /// Marks the connection as busy until the guard is dropped.
    pub fn busy(&self) -> BusyGuard {
        let (request, _) = self.seat().begin_request();
        BusyGuard { _request: request }
    }

    /// Waits until the connection, which was idle, must make room for another one.
    pub async fn told_to_leave(&self) {
        self.seat().connection.told_to_leave().await;
    }

    fn seat(&self) -> &ConnectionGuard {
        self.seat.as_ref().expect("taken only when dropped")
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.seat.take();
        self.freed.notify_one();
    }
}

/// A listener that limits its open connections.
pub struct BoundedListener {
    listener: TcpListener,
    table: Arc<ClientTable>,
    connections_max: usize,
    freed: Arc<Notify>,
    /// Name of the kind of clients, for the log.
    clients: &'static str,
    failures: LogRateLimit,
    refusals: LogRateLimit,
}

impl BoundedListener {
    /// Creates a listener with at most `connections_max` open connections.
    #[must_use]
    pub fn new(listener: TcpListener, connections_max: usize, clients: &'static str) -> Self {
        let per_address_max = connections_max / 4 * 3;
        Self {
            listener,
            table: Arc::new(ClientTable::new(per_address_max, usize::MAX)),
            connections_max,
            freed: Arc::default(),
            clients,
            failures: LogRateLimit::new(1, TOLD_EVERY),
            refusals: LogRateLimit::new(1, TOLD_EVERY),
        }
    }

    /// Accepts the next connection for which there is room. Cancelling it may close a connection.
    pub async fn accept(&self) -> BoundedConnection {
        loop {
            match self.next().await {
                Ok(Some(accepted)) => return accepted,
                Ok(None) => {}
                Err(error) => {
                    if let Some(suppressed) = self.failures.try_acquire() {
                        let clients = self.clients;
                        tracing::warn!(%error, clients, suppressed, "accept failed");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Accepts a backlogged connection if there is room, without waiting. Closing the listener
    /// resets the others.
    pub fn accept_waiting(&self) -> Option<BoundedConnection> {
        self.next().now_or_never()?.ok()?
    }

    /// Accepts a connection; `None` if its address has reached its limit with busy ones.
    async fn next(&self) -> io::Result<Option<BoundedConnection>> {
        let (stream, peer) = self.listener.accept().await?;
        let mut is_asked = false;
        loop {
            let is_full = self.table.len() >= self.connections_max;
            let seat = (!is_full).then(|| self.table.register(peer.ip(), false));
            if let Some(Some(seat)) = seat {
                let place = ConnectionPlace {
                    seat: Some(seat),
                    freed: Arc::clone(&self.freed),
                };
                return Ok(Some(BoundedConnection {
                    stream,
                    peer,
                    place,
                }));
            }
            let leaving = self.table.close_idle(1);
            if leaving == 0 && !is_full && !is_asked {
                self.tell_of_refusal(peer);
                return Ok(None);
            }
            // One that was asked before may still have to close.
            is_asked = leaving > 0;
            let _: Result<(), _> = timeout(EVICT_EVERY, self.freed.notified()).await;
        }
    }

    fn tell_of_refusal(&self, peer: SocketAddr) {
        if let Some(suppressed) = self.refusals.try_acquire() {
            let (clients, address) = (self.clients, peer.ip());
            tracing::warn!(%address, clients, suppressed, "connection refused: this address has too many that are busy");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use tokio::io::AsyncReadExt as _;
    use tokio::task::JoinSet;

    use super::*;

    /// A listener for four connections, and connections from an address to it.
    struct Lobby {
        listener: BoundedListener,
        address: SocketAddr,
    }

    impl Lobby {
        async fn open() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let listener = BoundedListener::new(listener, 4, "tests");
            Self { listener, address }
        }

        /// Connects from 127.0.0.`last` and returns both ends.
        async fn connect(&self, last: u8) -> (TcpStream, BoundedConnection) {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            let from = Ipv4Addr::new(127, 0, 0, last);
            socket.bind(SocketAddr::from((from, 0))).unwrap();
            let client = socket.connect(self.address).await.unwrap();
            (client, self.listener.accept().await)
        }
    }

    #[tokio::test]
    async fn the_longest_idle_connection_of_a_crowd_makes_room() {
        let lobby = Lobby::open().await;
        let mut clients = Vec::new();
        let mut served = JoinSet::new();
        for _ in 0..20 {
            let (client, accepted) = lobby.connect(2).await;
            clients.push(client);
            served.spawn(async move {
                accepted.place.told_to_leave().await;
                drop(accepted);
            });
        }
        // The first to come are the first to leave, and their clients notice.
        for client in &mut clients[..17] {
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
        }
        let (_probe, accepted) = lobby.connect(3).await;
        assert_eq!(accepted.peer.ip(), Ipv4Addr::new(127, 0, 0, 3));
    }

    #[tokio::test]
    async fn busy_connections_of_an_address_leave_room_for_others() {
        let lobby = Lobby::open().await;
        let mut crowd = Vec::new();
        for _ in 0..3 {
            let (client, accepted) = lobby.connect(2).await;
            let busy = accepted.place.busy();
            crowd.push((client, accepted, busy));
        }
        let socket = TcpStream::connect(lobby.address);
        let one_more = tokio::net::TcpSocket::new_v4().unwrap();
        one_more
            .bind(SocketAddr::from(([127, 0, 0, 2], 0)))
            .unwrap();
        let mut refused = one_more.connect(lobby.address).await.unwrap();
        let mut probe = socket.await.unwrap();
        let accepted = lobby.listener.accept().await;
        assert_eq!(accepted.peer, probe.local_addr().unwrap());
        let ended = refused.read(&mut [0]).await;
        assert!(ended.is_err() || ended.is_ok_and(|read| read == 0));
        drop(accepted);
        assert_eq!(probe.read(&mut [0]).await.unwrap(), 0);
    }
}
