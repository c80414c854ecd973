//! The encrypted connection that the handshake in [`super::handshake`] establishes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use snow::TransportState;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum length of a frame, in bytes, which is the limit of Noise.
pub(super) const FRAME_BYTES_MAX: usize = 65_535;
/// Overhead of encryption per frame, in bytes.
const TAG_BYTES: usize = 16;
/// Maximum number of bytes per read from the socket.
const READ_BYTES: usize = 16 * 1024;

/// Byte stream that is encrypted with Noise.
pub(super) struct EncryptedStream<S> {
    stream: S,
    noise: TransportState,
    /// Received bytes that are not decrypted yet.
    sealed: BytesMut,
    /// Decrypted bytes that are not read yet.
    opened: BytesMut,
    /// Encrypted bytes that are not sent yet.
    unsent: BytesMut,
    /// Buffer for one frame, kept between calls because it is large.
    scratch: Box<[u8]>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> EncryptedStream<S> {
    pub(super) fn new(stream: S, noise: TransportState) -> Self {
        Self {
            stream,
            noise,
            sealed: BytesMut::new(),
            opened: BytesMut::new(),
            unsent: BytesMut::new(),
            scratch: vec![0; FRAME_BYTES_MAX].into(),
        }
    }

    /// Decrypts the next frame. Returns `false` if no complete one was received yet.
    fn open_frame(&mut self) -> io::Result<bool> {
        let Some(head) = self.sealed.first_chunk() else {
            return Ok(false);
        };
        let length = usize::from(u16::from_be_bytes(*head));
        let Some(frame) = self.sealed.get(2..2 + length) else {
            return Ok(false);
        };
        let opened = self.noise.read_message(frame, &mut self.scratch);
        let opened = opened.map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidData, "a frame that was not sent so")
        })?;
        self.opened.extend_from_slice(&self.scratch[..opened]);
        self.sealed.advance(2 + length);
        Ok(true)
    }

    /// Receives more bytes; returns `false` at the end of the stream.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        let mut buffer = ReadBuf::new(&mut self.scratch[..READ_BYTES]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
        let received = buffer.filled();
        self.sealed.extend_from_slice(received);
        Poll::Ready(Ok(!received.is_empty()))
    }

    /// Sends all encrypted bytes that are not sent yet.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.unsent))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unsent.advance(sent);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for EncryptedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.opened.is_empty() {
            if self.open_frame()? {
                continue;
            }
            if !ready!(self.poll_receive(cx))? {
                return Poll::Ready(match self.sealed.is_empty() {
                    true => Ok(()),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                });
            }
        }
        let taken = buffer.remaining().min(self.opened.len());
        buffer.put_slice(&self.opened.split_to(taken));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for EncryptedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Only one frame is in flight at a time.
        ready!(self.poll_send(cx))?;
        let taken = bytes.len().min(FRAME_BYTES_MAX - TAG_BYTES);
        let this = &mut *self;
        let sealed = this.noise.write_message(&bytes[..taken], &mut this.scratch);
        let sealed = sealed.map_err(|error| io::Error::other(error.to_string()))?;
        let length = u16::try_from(sealed).expect("Noise keeps messages below 64 KiB");
        this.unsent.extend_from_slice(&length.to_be_bytes());
        this.unsent.extend_from_slice(&this.scratch[..sealed]);
        if let Poll::Ready(Err(error)) = self.poll_send(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
