//! The handshake of a listener. A client that speaks plain HTTP to it gets one answer, in HTTP,
//! that says so.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsStream};

use super::stream::MaybeTls;

/// First byte of a handshake.
const HANDSHAKE: u8 = 22;

/// Why a client has no TLS connection.
#[derive(Debug, thiserror::Error)]
pub enum TlsAcceptError {
    /// It spoke something else, and was told if that was HTTP.
    #[error("the client spoke no TLS")]
    Clear,
    /// The handshake failed, or the connection broke.
    #[error("tls handshake: {0}")]
    Handshake(#[from] io::Error),
}

/// What a client that speaks HTTP in the clear is answered.
#[derive(Debug, Clone)]
pub struct ClearRejection {
    /// The form of the body.
    pub content_type: &'static str,
    /// The body of a 400.
    pub body: Bytes,
}

/// Runs the handshake on a connection of which nothing has been read. `wrap` makes of the socket
/// what TLS is to read from and write to. A client that speaks HTTP in the clear is answered
/// `refusal`.
///
/// # Errors
/// [`TlsAcceptError`]. The caller bounds the wait.
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
    // What the client sent is read first: closing over unread bytes would reset the connection, and
    // the answer with it.
    let mut sent = [0; 4096];
    while let Ok(read @ 1..) = stream.try_read(&mut sent) {
        if read < sent.len() {
            break;
        }
    }
    stream.shutdown().await
}
