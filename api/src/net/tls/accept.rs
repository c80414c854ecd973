//! The TLS handshake of a listener. A client that sends plain HTTP gets one HTTP response that
//! explains the error.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsStream};

use super::stream::MaybeTls;

/// First byte of a TLS handshake.
const HANDSHAKE: u8 = 22;

/// Reason why a client has no TLS connection.
#[derive(Debug, thiserror::Error)]
pub enum TlsAcceptError {
    /// The client did not send TLS. It got a response if it sent HTTP.
    #[error("the client does not use TLS")]
    Clear,
    /// The handshake failed, or the connection broke.
    #[error("tls handshake: {0}")]
    Handshake(#[from] io::Error),
}

/// Response to a client that sends plain HTTP.
#[derive(Debug, Clone)]
pub struct ClearRejection {
    /// Content type of the body.
    pub content_type: &'static str,
    /// Body of the 400 response.
    pub body: Bytes,
}

/// Performs the handshake on a connection from which nothing was read yet. `wrap` converts the
/// socket into the stream below TLS. A client that sends plain HTTP gets `refusal`. The handshake
/// has no timeout of its own; the caller must set one.
///
/// # Errors
/// Returns [`TlsAcceptError`] if the client does not use TLS or the handshake fails.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
    refusal: &ClearRejection,
    wrap: impl FnOnce(TcpStream) -> S,
) -> Result<MaybeTls<S>, TlsAcceptError> {
    let mut first = [0; 1];
    let looked = stream.peek(&mut first).await?;
    if looked > 0 && first[0] != HANDSHAKE {
        if first[0].is_ascii_uppercase() {
            refuse(&mut stream, refusal).await?;
        }
        return Err(TlsAcceptError::Clear);
    }
    let accepted = TlsAcceptor::from(config).accept(wrap(stream)).await?;
    Ok(MaybeTls::Tls(Box::new(TlsStream::Server(accepted))))
}

async fn refuse(stream: &mut TcpStream, refusal: &ClearRejection) -> io::Result<()> {
    let ClearRejection { content_type, body } = refusal;
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).await?;
    // Read what the client sent, because closing with unread bytes would reset the connection and
    // lose the response.
    let mut sent = [0; 4096];
    while let Ok(read @ 1..) = stream.try_read(&mut sent) {
        if read < sent.len() {
            break;
        }
    }
    stream.shutdown().await
}
