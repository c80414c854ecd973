//! Bounds for incomplete messages of gateways. gRPC's decoder allocates what a message's first
//! bytes announce, and buffers until the message is complete. A body counts as held only when it is
//! read. Until then the announced length counts toward `limits.max_held_bodies`.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;
use tower::BoxError;

use super::Picker;
use crate::proxy::request::request_body::HeldBodyBytes;

/// Length of a message's prefix: a compression flag and the length.
const PREFIX_BYTES: usize = 5;

/// Body of incoming messages, whose announced lengths are counted.
pub(super) struct CountedMessages<B> {
    messages: B,
    count: MessageCount,
}

impl<B> CountedMessages<B> {
    pub(super) fn of(messages: B, picker: &Picker, message_max: usize) -> Self {
        let proxy = &picker.proxy;
        let held_max = proxy.limits.load().held_bytes();
        let held = HeldBodyBytes::none(&proxy.held_bytes, held_max);
        Self {
            messages,
            count: MessageCount::new(held, message_max),
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for CountedMessages<B>
where
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = ready!(Pin::new(&mut self.messages).poll_frame(cx));
        let counted = next.map(|frame| {
            let frame = frame.map_err(Into::into)?;
            if let Some(data) = frame.data_ref() {
                self.count.take_in(data)?;
            }
            Ok(frame)
        });
        Poll::Ready(counted)
    }

    fn is_end_stream(&self) -> bool {
        self.messages.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.messages.size_hint()
    }
}

/// Position of a stream within a message.
pub(super) struct MessageCount {
    prefix: [u8; PREFIX_BYTES],
    /// Number of prefix bytes received.
    prefix_bytes: usize,
    /// Number of bytes of the message still to come.
    left: usize,
    message_max: usize,
    held: HeldBodyBytes,
}

impl MessageCount {
    pub(super) fn new(held: HeldBodyBytes, message_max: usize) -> Self {
        Self {
            prefix: [0; PREFIX_BYTES],
            prefix_bytes: 0,
            left: 0,
            message_max,
            held,
        }
    }

    pub(super) fn take_in(&mut self, mut data: &[u8]) -> Result<(), Status> {
        while !data.is_empty() {
            if self.left > 0 {
                let come = self.left.min(data.len());
                data = &data[come..];
                self.left -= come;
                if self.left == 0 {
                    self.held.release();
                }
                continue;
            }
            let come = (PREFIX_BYTES - self.prefix_bytes).min(data.len());
            let (of_prefix, rest) = data.split_at(come);
            self.prefix[self.prefix_bytes..][..come].copy_from_slice(of_prefix);
            self.prefix_bytes += come;
            data = rest;
            if self.prefix_bytes == PREFIX_BYTES {
                self.prefix_bytes = 0;
                self.announced(data.len())?;
            }
        }
        Ok(())
    }

    /// Begins a message of which `here` bytes have already arrived.
    fn announced(&mut self, here: usize) -> Result<(), Status> {
        let [_, length @ ..] = self.prefix;
        self.left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if self.left <= here || self.left > self.message_max {
            return Ok(());
        }
        let held = self.held.add(self.left);
        held.map_err(|_| {
            Status::unavailable("bodies and messages hold all that limits.max_held_bodies allows")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use tonic::Code;

    use super::*;

    const MAX: usize = 1000;

    fn count(held_max: u64) -> (MessageCount, Arc<AtomicU64>) {
        let all = Arc::default();
        let held = HeldBodyBytes::none(&all, held_max);
        (MessageCount::new(held, MAX), all)
    }

    fn message(bytes: u32) -> Vec<u8> {
        let mut message = vec![0];
        message.extend_from_slice(&bytes.to_be_bytes());
        message.resize(PREFIX_BYTES + bytes as usize, 7);
        message
    }

    #[test]
    fn announced_frame_bytes_are_reserved_until_complete() {
        let (mut count, all) = count(2000);
        let stream = [message(300), message(0), message(40), message(500)].concat();
        for piece in [1, 3, 7, 100, 5000] {
            let mut most = 0;
            for data in stream.chunks(piece) {
                count.take_in(data).unwrap();
                most = most.max(all.load(Relaxed));
            }
            let expected = if piece == 5000 { 0 } else { 500 };
            assert_eq!((most, all.load(Relaxed)), (expected, 0), "{piece}");
        }
        count.take_in(&message(300)[..9]).unwrap();
        assert_eq!(all.load(Relaxed), 300);
        drop(count);
        assert_eq!(all.load(Relaxed), 0);
    }

    #[test]
    fn an_announced_length_cannot_reserve_more_than_the_bound() {
        let (mut count, all) = count(500);
        let why = count.take_in(&message(600)[..PREFIX_BYTES]).unwrap_err();
        assert_eq!(why.code(), Code::Unavailable);
        drop(count);
        assert_eq!(all.load(Relaxed), 0);
    }

    #[test]
    fn frames_the_decoder_refuses_reserve_nothing() {
        let (mut count, all) = count(500);
        count.take_in(&[0, 0xff, 0xff, 0xff, 0xff]).unwrap();
        assert_eq!(all.load(Relaxed), 0);
    }
}
