//! The beginning of an HTTP/2 connection that does not negotiate its protocol.

use std::io::{self, Cursor};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};

/// HTTP/2 connection preface.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// First bytes of a TLS handshake: its type, and the major version of all TLS records.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// Waits for the HTTP/2 preface, for which hyper has no timer, and returns a stream that begins
/// with it. From then on, pings detect dead peers.
///
/// # Errors
/// If the connection fails, or the client speaks something else.
pub(crate) async fn greeting<S: AsyncRead + AsyncWrite>(
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
