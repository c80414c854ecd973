//! A connection with or without TLS, as one type, so that code on top of connections exists only
//! once.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;

/// A connection with or without TLS.
pub enum MaybeTls<S> {
    /// A plain-text connection.
    Clear(S),
    /// An encrypted connection. Boxed, because the session state is large.
    Tls(Box<TlsStream<S>>),
}

impl<S> MaybeTls<S> {
    /// Returns the underlying connection.
    pub(crate) fn transport(&self) -> &S {
        match self {
            Self::Clear(stream) => stream,
            Self::Tls(tls) => tls.get_ref().0,
        }
    }

    /// Returns the certificates that the peer has presented, its own first; none without TLS.
    #[must_use]
    pub fn peer_certificates(&self) -> &[rustls::pki_types::CertificateDer<'static>] {
        match self {
            Self::Clear(_) => &[],
            Self::Tls(tls) => tls.get_ref().1.peer_certificates().unwrap_or_default(),
        }
    }
}

/// Reports the properties of the underlying connection to hyper's client.
impl<S: Connection> Connection for MaybeTls<S> {
    fn connected(&self) -> Connected {
        self.transport().connected()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for MaybeTls<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(tls) => Pin::new(&mut **tls).poll_read(cx, buffer),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MaybeTls<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(tls) => Pin::new(&mut **tls).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_write_vectored(cx, buffers),
            Self::Tls(tls) => Pin::new(&mut **tls).poll_write_vectored(cx, buffers),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Clear(stream) => stream.is_write_vectored(),
            Self::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(tls) => Pin::new(&mut **tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Clear(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(&mut **tls).poll_shutdown(cx),
        }
    }
}
