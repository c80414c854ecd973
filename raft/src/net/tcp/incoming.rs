//! Accepts a limited number of peer connections, and fails those on which the peer stays silent.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Maximum number of open connections from peers. Others wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 128;
/// Timeout for the first bytes of a connection.
pub(super) const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
/// Length of HTTP/2's connection preface and the head of its first frame, in bytes.
const PREFACE_BYTES: usize = 24 + 9;
/// Pause after a failed accept. The usual cause, a lack of descriptors, lasts for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Returns the stream of connections accepted on `listener`.
pub(super) fn incoming(
    listener: TcpListener,
) -> impl Stream<Item = io::Result<PendingConnection>> + Send + 'static {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    futures_util::stream::unfold((listener, places), |(listener, places)| async move {
        let place = Arc::clone(&places).acquire_owned().await.ok()?;
        let stream = accept(&listener).await;
        let incoming = PendingConnection {
            stream,
            until: Some(Box::pin(tokio::time::sleep(PREFACE_TIMEOUT))),
            read: 0,
            _place: place,
        };
        Some((Ok(incoming), (listener, places)))
    })
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        let accepted = listener.accept().await.and_then(|(stream, _)| {
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => return stream,
            Err(error) => {
                tracing::debug!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Accepted connection. Counts toward [`CONNECTIONS_MAX`] until it is dropped.
pub(super) struct PendingConnection {
    stream: TcpStream,
    /// Deadline for the first bytes; `None` once they have arrived.
    until: Option<Pin<Box<Sleep>>>,
    /// Number of bytes read so far, while `until` is set.
    read: usize,
    _place: OwnedSemaphorePermit,
}

impl PendingConnection {
    /// Returns the peer's address; `None` if the system no longer knows it.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }
}

impl AsyncRead for PendingConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        let Some(until) = &mut this.until else {
            return polled;
        };
        this.read += buf.filled().len() - before;
        if this.read >= PREFACE_BYTES {
            this.until = None;
            return polled;
        }
        if polled.is_pending() && until.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        polled
    }
}

impl AsyncWrite for PendingConnection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn silent_connections_are_dropped_and_active_ones_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Box::pin(incoming(listener));
        let mut talker = TcpStream::connect(address).await.unwrap();
        let mut talked_to = incoming.next().await.unwrap().unwrap();
        let _silent = TcpStream::connect(address).await.unwrap();
        let mut waited_for = incoming.next().await.unwrap().unwrap();
        tokio::time::pause();

        talker.write_all(&[7; PREFACE_BYTES]).await.unwrap();
        let mut heard = [0; PREFACE_BYTES];
        talked_to.read_exact(&mut heard).await.unwrap();
        let error = waited_for.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Long after the deadline.
        talker.write_all(&[8]).await.unwrap();
        assert_eq!(talked_to.read_u8().await.unwrap(), 8);
    }

    #[tokio::test]
    async fn connections_are_bounded_and_closing_frees_a_place() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Box::pin(incoming(listener));
        let (mut clients, mut open) = (Vec::new(), Vec::new());
        for _ in 0..CONNECTIONS_MAX {
            clients.push(TcpStream::connect(address).await.unwrap());
            open.push(incoming.next().await.unwrap().unwrap());
        }
        let _late = TcpStream::connect(address).await.unwrap();
        let mut next = incoming.next();
        assert!(futures_util::poll!(&mut next).is_pending());
        open.pop();
        next.await.unwrap().unwrap();
    }
}
