//! Greets peer connections: detects the protocol from the first bytes and runs the handshake if the
//! cluster has a secret or certificates. [`super::incoming`] limits the number of connections.
//!
//! A peer that lacks what is required is still served HTTP/2, where every call fails with an error
//! that names what is missing, so that the logs of both sides contain it.

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
use tokio_rustls::TlsStream;
use tonic::Status;
use tonic::transport::server::Connected;
use tower::{Service, ServiceExt, service_fn};

use super::certified::{PeerTls, connect};
use super::encrypted::EncryptedStream;
use super::handshake::{HAS_NONE, HandshakeError, MAGIC, PeerSecret};
use super::incoming::{PREFACE_TIMEOUT, PendingConnection};
use crate::log_throttle::LogThrottle;
use crate::net::sender::PeerSender;
use crate::net::transport::{PeerRequest, PeerService};

/// First bytes that an HTTP/2 client sends.
const HTTP2: &[u8; 8] = b"PRI * HT";
/// First byte that a TLS client sends.
const TLS: u8 = 22;
const LACKS_TLS: &str = "this cluster uses certificates, and the caller has no [tls.peer]";
const LACKS_SECRET: &str = "this cluster uses a secret, and the caller has no cluster.secret_file";

/// Method by which replicas prove their identity to each other.
#[derive(Debug, Clone)]
pub(super) enum PeerProof {
    /// Replicas prove nothing.
    Nothing,
    /// Replicas prove that they know a secret.
    Secret(Arc<PeerSecret>),
    /// Replicas show certificates. Callers without one use the alternative proof; `None` rejects
    /// them.
    Certificates(PeerTls, Option<Box<PeerProof>>),
}

impl PeerProof {
    /// Returns the proof required from a caller that speaks the protocol `spoken`.
    fn of_caller(self, spoken: &WireProtocol) -> Self {
        match (self, spoken) {
            (Self::Certificates(_, Some(others)), WireProtocol::Noise | WireProtocol::Http2) => {
                *others
            }
            (proof, _) => proof,
        }
    }
}

/// Connection, and the replica at its other end.
pub(super) struct PeerConnection<S> {
    stream: PeerStream<S>,
    sender: PeerSender,
}

enum PeerStream<S> {
    Plain(PeekedStream<S>),
    Sealed(Box<EncryptedStream<S>>),
    Tls(Box<TlsStream<PeekedStream<S>>>),
}

/// Stream whose first bytes are buffered for peeking.
struct PeekedStream<S> {
    stream: S,
    looked: [u8; 8],
    read: usize,
}

impl<S> PeekedStream<S> {
    /// Creates a stream with no buffered bytes.
    fn new(stream: S) -> Self {
        let looked = [0; 8];
        let read = looked.len();
        Self {
            stream,
            looked,
            read,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> PeerStream<S> {
    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Send + Unpin)> {
        match self {
            Self::Plain(stream) => Pin::new(&mut stream.stream),
            Self::Sealed(sealed) => Pin::new(&mut **sealed),
            Self::Tls(tls) => Pin::new(&mut **tls),
        }
    }
}

/// Greets incoming connections and passes them to `accepted` until it is closed.
pub(super) async fn accept(
    incoming: impl futures_util::Stream<Item = io::Result<PendingConnection>>,
    proof: PeerProof,
    accepted: mpsc::Sender<io::Result<PeerConnection<PendingConnection>>>,
) {
    let refusals = Arc::new(LogThrottle::default());
    // Dropping the set aborts all greetings when this function ends.
    let mut greetings = JoinSet::new();
    let mut incoming = pin!(incoming);
    while let Some(Ok(stream)) = incoming.next().await {
        while greetings.try_join_next().is_some() {}
        let (proof, accepted, refusals) = (proof.clone(), accepted.clone(), refusals.clone());
        greetings.spawn(async move {
            let peer = stream.peer();
            let greeted = timeout(PREFACE_TIMEOUT, greet(stream, proof));
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

/// Logs a connection failure that a config may have caused, unless a line was logged recently.
pub(super) fn log_failure(refusals: &LogThrottle, peer: &str, why: &HandshakeError) {
    // A port scan merely disconnects.
    if !matches!(why, HandshakeError::Io(_)) && refusals.try_acquire() {
        tracing::warn!(peer, %why, "could not connect to peer");
    }
}

/// Connects to the replica at `address` and runs the handshake. If `id` is given, a certificate
/// must name that replica.
pub(super) async fn dial(
    address: &str,
    id: Option<u64>,
    proof: &PeerProof,
) -> Result<PeerConnection<TcpStream>, HandshakeError> {
    let plain = async || Ok::<_, HandshakeError>(PeekedStream::new(connect(address).await?));
    let stream = match proof {
        PeerProof::Nothing => PeerStream::Plain(plain().await?),
        PeerProof::Secret(secret) => match secret.connect(connect(address).await?).await {
            Ok(sealed) => PeerStream::Sealed(Box::new(sealed)),
            // The peer took the handshake for bad HTTP/2 and closed.
            Err(HandshakeError::HasNone) if secret.is_optional => PeerStream::Plain(plain().await?),
            Err(why) => return Err(why),
        },
        PeerProof::Certificates(tls, others) => {
            match (tls.connect(plain().await?, id).await, others) {
                (Ok(tls), _) => PeerStream::Tls(tls),
                // The peer did not recognise TLS and closed.
                (Err(HandshakeError::HasNoTls), Some(others)) => {
                    return Box::pin(dial(address, id, others)).await;
                }
                (Err(why), _) => return Err(why),
            }
        }
    };
    let sender = PeerSender::default();
    Ok(PeerConnection { stream, sender })
}

/// Detects the protocol of a connection, and identifies the replica at its other end.
async fn greet(
    mut stream: PendingConnection,
    proof: PeerProof,
) -> Result<PeerConnection<PendingConnection>, HandshakeError> {
    let mut looked = [0; 8];
    stream.read_exact(&mut looked).await?;
    let plain = |stream| PeekedStream {
        stream,
        looked,
        read: 0,
    };
    let spoken = WireProtocol::of(looked);
    let proof = proof.of_caller(&spoken);
    let (stream, sender) = match (spoken, proof) {
        (WireProtocol::Noise, PeerProof::Secret(secret)) => {
            let (sealed, from) = secret.accept(stream).await?;
            let stream = PeerStream::Sealed(Box::new(sealed));
            (stream, PeerSender::proven(from))
        }
        (WireProtocol::Noise, PeerProof::Nothing | PeerProof::Certificates(..)) => {
            stream.write_all(&[HAS_NONE]).await?;
            return Err(HandshakeError::WeHaveNone);
        }
        (WireProtocol::Tls, PeerProof::Certificates(tls, _)) => {
            let (tls, sender) = tls.accept(plain(stream)).await?;
            (PeerStream::Tls(tls), sender)
        }
        (WireProtocol::Tls, PeerProof::Nothing | PeerProof::Secret(_)) => {
            return Err(HandshakeError::WeHaveNoTls);
        }
        (WireProtocol::Http2, proof) => {
            let sender = match proof {
                PeerProof::Certificates(..) => {
                    PeerSender::refused(Status::permission_denied(LACKS_TLS))
                }
                PeerProof::Secret(secret) if !secret.is_optional => {
                    PeerSender::refused(Status::unauthenticated(LACKS_SECRET))
                }
                PeerProof::Secret(_) | PeerProof::Nothing => PeerSender::default(),
            };
            (PeerStream::Plain(plain(stream)), sender)
        }
        (WireProtocol::Unknown, _) => return Err(HandshakeError::Malformed),
    };
    Ok(PeerConnection { stream, sender })
}

/// Protocol of a connection, as detected from its first bytes.
enum WireProtocol {
    Noise,
    Tls,
    Http2,
    Unknown,
}

impl WireProtocol {
    fn of(looked: [u8; 8]) -> Self {
        match looked {
            it if it == *MAGIC => Self::Noise,
            it if it == *HTTP2 => Self::Http2,
            [TLS, ..] => Self::Tls,
            _ => Self::Unknown,
        }
    }
}

/// Wraps `service` so that it rejects the calls of senders that did not prove their identity as
/// required ([`PeerSender::refusal`]).
pub(super) fn for_proven(service: PeerService) -> PeerService {
    let refusals = Arc::new(LogThrottle::default());
    PeerService::new(service_fn(move |request: PeerRequest| {
        let sender = request.extensions().get::<PeerSender>();
        let refusal = sender.and_then(PeerSender::refusal);
        let mut service = service.clone();
        let answered: BoxFuture<'static, _> = if let Some(why) = refusal {
            if refusals.try_acquire() {
                tracing::warn!(why = why.message(), "refused a peer's call");
            }
            let refused = why.clone().into_http();
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

impl<S: AsyncRead + Unpin> AsyncRead for PeekedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.read < this.looked.len() {
            let taken = buffer.remaining().min(this.looked.len() - this.read);
            buffer.put_slice(&this.looked[this.read..this.read + taken]);
            this.read += taken;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PeekedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> AsyncRead for PeerConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            PeerStream::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            PeerStream::Sealed(sealed) => Pin::new(&mut **sealed).poll_read(cx, buffer),
            PeerStream::Tls(tls) => Pin::new(&mut **tls).poll_read(cx, buffer),
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
            PeerStream::Plain(stream) => stream.is_write_vectored(),
            PeerStream::Sealed(_) => false,
            PeerStream::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.writer().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.writer().poll_shutdown(cx)
    }
}
