//! A listener of which a number of connections are open at once. Others wait in its backlog.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use crate::log_rate_limit::LogRateLimit;

/// Pause after a failed accept. The usual cause, a lack of descriptors, does not end at once.
const PAUSE: Duration = Duration::from_millis(50);
/// The log has one line about failed accepts in this time.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// A connection, and the place that it takes until this is dropped.
pub(crate) struct BoundedConnection {
    pub(crate) stream: TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) place: OwnedSemaphorePermit,
}

/// A listener with so many places.
pub(crate) struct BoundedListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
    /// Who connects to it, for the log.
    clients: &'static str,
    failures: LogRateLimit,
}

impl BoundedListener {
    pub(crate) fn new(
        listener: TcpListener,
        connections_max: usize,
        clients: &'static str,
    ) -> Self {
        Self {
            listener,
            places: Arc::new(Semaphore::new(connections_max)),
            clients,
            failures: LogRateLimit::new(1, TOLD_EVERY),
        }
    }

    /// The next connection, once there is a place for it. Cancelled, it loses nothing.
    pub(crate) async fn accept(&self) -> BoundedConnection {
        loop {
            match self.next().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    if let Some(suppressed) = self.failures.may_say() {
                        let clients = self.clients;
                        tracing::warn!(%error, clients, suppressed, "accept failed");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// A connection of the backlog that has a place. Closing the listener resets the others.
    pub(crate) fn accept_waiting(&self) -> Option<BoundedConnection> {
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
