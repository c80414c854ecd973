//! A listener that limits its open connections. Further connections wait in the backlog.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use crate::base::log_rate_limit::LogRateLimit;

/// Pause after a failed accept. The usual cause, a lack of descriptors, persists for a while.
const PAUSE: Duration = Duration::from_millis(50);
/// Minimum interval between log lines about failed accepts.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// An accepted connection with its permit. Dropping the permit makes room for another one.
pub struct BoundedConnection {
    /// The connection.
    pub stream: TcpStream,
    /// Address of the client.
    pub peer: SocketAddr,
    /// Permit of the connection.
    pub place: OwnedSemaphorePermit,
}

/// A listener that limits its open connections.
pub struct BoundedListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
    /// Name of the kind of clients, for the log.
    clients: &'static str,
    failures: LogRateLimit,
}

impl BoundedListener {
    /// Creates a listener with at most `connections_max` open connections.
    #[must_use]
    pub fn new(listener: TcpListener, connections_max: usize, clients: &'static str) -> Self {
        Self {
            listener,
            places: Arc::new(Semaphore::new(connections_max)),
            clients,
            failures: LogRateLimit::new(1, TOLD_EVERY),
        }
    }

    /// Waits for a permit, then accepts the next connection. Cancellation safe.
    pub async fn accept(&self) -> BoundedConnection {
        loop {
            match self.next().await {
                Ok(accepted) => return accepted,
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

    /// Accepts a backlogged connection if there is a permit, without waiting. Closing the listener
    /// resets the others.
    pub fn accept_waiting(&self) -> Option<BoundedConnection> {
        self.next().now_or_never()?.ok()
    }

    async fn next(&self) -> io::Result<BoundedConnection> {
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(|_| io::Error::other("the semaphore is never closed"))?;
        let (stream, peer) = self.listener.accept().await?;
        Ok(BoundedConnection {
            stream,
            peer,
            place,
        })
    }
}
