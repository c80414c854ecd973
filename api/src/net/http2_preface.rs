//! The beginning of an HTTP/2 connection that does not negotiate its protocol.

use std::io::{self, Cursor};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::TcpStream;

use super::tls::{self, ClearRejection, MaybeTls, ServerConfig, TlsAcceptError};

/// Response to a client that sends plain HTTP to a TLS port.
static NO_TLS: LazyLock<ClearRejection> = LazyLock::new(|| ClearRejection {
    content_type: "text/plain",
    body: Bytes::from_static(b"this port requires TLS\n"),
});

/// HTTP/2 connection preface.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// First bytes of a TLS handshake: its type, and the major version of all TLS records.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// Returns a connection after its TLS handshake, if there is a config for one, at its HTTP/2 preface.
///
/// # Errors
/// If the connection fails, or the client speaks something else.
pub(crate) async fn greeted(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
) -> Result<impl AsyncRead + AsyncWrite + Unpin, TlsAcceptError> {
    let secure = match tls {
        None => MaybeTls::Clear(stream),
        Some(config) => tls::accept(stream, config, &NO_TLS, |stream| stream).await?,
    };
    Ok(greeting(secure).await?)
}

/// Waits for the HTTP/2 preface, for which hyper has no timer, and returns a stream that begins
/// with it. From then on, pings detect dead peers.
///
/// # Errors
/// If the connection fails, or the client speaks something else.
async fn greeting<S: AsyncRead + AsyncWrite>(
    stream: S,
) -> io::Result<impl AsyncRead + AsyncWrite + Unpin> {
    let (mut reader, writer) = tokio::io::split(stream);
    let mut preface = [0; PREFACE.len()];
    reader.read_exact(&mut preface).await?;
    if preface != *PREFACE {
        let why = match preface.starts_with(&TLS_HANDSHAKE) {
            true => "the client uses TLS, and this port does not",
            false => "the client does not use HTTP/2",
        };
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let whole = Cursor::new(preface).chain(reader);
    Ok(tokio::io::join(whole, writer))
}
