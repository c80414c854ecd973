//! Greets peer connections: reads the first bytes to see what the peer speaks, and runs the
//! handshake if the cluster has a secret. [`super::incoming`] bounds their number and time.
//!
//! A peer that lacks the secret is still served HTTP/2, where every call fails with one sentence,
//! so that the logs of both sides say what is missing.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::server::Connected;
use tower::{Service, ServiceExt, service_fn};

use super::encrypted::EncryptedStream;
use super::handshake::{HAS_NONE, HandshakeError, MAGIC, PeerSecret};
use super::incoming::{FIRST_WORDS_TIMEOUT, PendingConnection};
use crate::log_throttle::LogThrottle;
use crate::net::sender::PeerSender;
use crate::net::transport::{PeerRequest, PeerService};

/// The first bytes of HTTP/2.
const HTTP2: &[u8; 8] = b"PRI * HT";
const LACKS_SECRET: &str = "this cluster has a secret, and the caller no cluster.secret_file";

/// A connection, and the replica it speaks for.
pub(super) struct PeerConnection<S> {
    stream: PeerStream<S>,
    sender: PeerSender,
}

enum PeerStream<S> {
    /// The bytes that were looked at are still to be read.
    Plain {
        stream: S,
        looked: [u8; 8],
        read: usize,
    },
    Sealed(Box<EncryptedStream<S>>),
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> PeerStream<S> {
    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Send + Unpin)> {
        match self {
            Self::Plain { stream, .. } => Pin::new(stream),
            Self::Sealed(sealed) => Pin::new(&mut **sealed),
        }
    }
}

/// Greets the connections that come in and hands them to `accepted`, until that is closed.
pub(super) async fn accept(
    incoming: impl futures_util::Stream<Item = io::Result<PendingConnection>>,
    secret: Option<Arc<PeerSecret>>,
    accepted: mpsc::Sender<io::Result<PeerConnection<PendingConnection>>>,
) {
    let refusals = Arc::new(LogThrottle::default());
    // Aborted together when this ends.
    let mut greetings = JoinSet::new();
    let mut incoming = pin!(incoming);
    while let Some(Ok(stream)) = incoming.next().await {
        while greetings.try_join_next().is_some() {}
        let (secret, accepted, refusals) = (secret.clone(), accepted.clone(), refusals.clone());
        greetings.spawn(async move {
            let peer = stream.peer();
            let greeted = timeout(FIRST_WORDS_TIMEOUT, greet(stream, secret.as_deref()));
            let greeted = greeted.await.unwrap_or_else(|_| Err(silent()));
            match greeted {
                // The server may have ended.
                Ok(connection) => drop(accepted.send(Ok(connection)).await),
                Err(why) => log_failure(&refusals, &format!("{peer:?}"), &why),
            }
        });
    }
}

fn silent() -> HandshakeError {
    HandshakeError::Io(io::ErrorKind::TimedOut.into())
}

/// Logs why there is no connection if a config is to blame, at a bounded rate.
pub(super) fn log_failure(refusals: &LogThrottle, peer: &str, why: &HandshakeError) {
    // A port scan just disconnects.
    if !matches!(why, HandshakeError::Io(_)) && refusals.may_say() {
        tracing::warn!(peer, %why, "could not connect to peer");
    }
}

/// Connects to the replica at `address` and runs the handshake.
pub(super) async fn dial(
    address: &str,
    secret: &PeerSecret,
) -> Result<PeerConnection<TcpStream>, HandshakeError> {
    let connect = async || {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok::<_, HandshakeError>(stream)
    };
    let stream = match secret.connect(connect().await?).await {
        Ok(sealed) => PeerStream::Sealed(Box::new(sealed)),
        // It took the handshake for bad HTTP/2 and closed.
        Err(HandshakeError::HasNone) if secret.is_optional => PeerStream::Plain {
            stream: connect().await?,
            looked: [0; 8],
            read: 8,
        },
        Err(why) => return Err(why),
    };
    let sender = PeerSender::default();
    Ok(PeerConnection { stream, sender })
}

/// Finds out what a connection speaks and which replica it belongs to.
async fn greet(
    mut stream: PendingConnection,
    secret: Option<&PeerSecret>,
) -> Result<PeerConnection<PendingConnection>, HandshakeError> {
    let mut looked = [0; 8];
    stream.read_exact(&mut looked).await?;
    match (looked == *MAGIC, secret) {
        (true, Some(secret)) => {
            let (sealed, from) = secret.accept(stream).await?;
            Ok(PeerConnection {
                stream: PeerStream::Sealed(Box::new(sealed)),
                sender: PeerSender::proven(from),
            })
        }
        (true, None) => {
            stream.write_all(&[HAS_NONE]).await?;
            Err(HandshakeError::WeHaveNone)
        }
        (false, _) if looked != *HTTP2 => Err(HandshakeError::Malformed),
        (false, secret) => {
            let sender = match secret {
                Some(secret) if !secret.is_optional => PeerSender::without_secret(),
                Some(_) | None => PeerSender::default(),
            };
            let stream = PeerStream::Plain {
                stream,
                looked,
                read: 0,
            };
            Ok(PeerConnection { stream, sender })
        }
    }
}

/// Wraps `service` so that callers that lack the secret are refused.
pub(super) fn for_proven(service: PeerService) -> PeerService {
    let refusals = Arc::new(LogThrottle::default());
    PeerService::new(service_fn(move |request: PeerRequest| {
        let lacks = request
            .extensions()
            .get::<PeerSender>()
            .is_some_and(PeerSender::lacks_secret);
        let mut service = service.clone();
        let answered: BoxFuture<'static, _> = if lacks {
            if refusals.may_say() {
                tracing::warn!("refused a peer's call: it has no cluster.secret_file");
            }
            let refused = tonic::Status::unauthenticated(LACKS_SECRET).into_http();
            Box::pin(std::future::ready(Ok(refused)))
        } else {
            Box::pin(async move { service.ready().await?.call(request).await })
        };
        answered
    }))
}

impl<S> Connected for PeerConnection<S> {
    type ConnectInfo = PeerSender;

    fn connect_info(&self) -> PeerSender {
        self.sender.clone()
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> AsyncRead for PeerConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            PeerStream::Plain { looked, read, .. } if *read < looked.len() => {
                let taken = buffer.remaining().min(looked.len() - *read);
                buffer.put_slice(&looked[*read..*read + taken]);
                *read += taken;
                Poll::Ready(Ok(()))
            }
            PeerStream::Plain { stream, .. } => Pin::new(stream).poll_read(cx, buffer),
            PeerStream::Sealed(sealed) => Pin::new(&mut **sealed).poll_read(cx, buffer),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> AsyncWrite for PeerConnection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream.writer().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream.writer().poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            PeerStream::Plain { stream, .. } => stream.is_write_vectored(),
            PeerStream::Sealed(_) => false,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.writer().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.writer().poll_shutdown(cx)
    }
}
