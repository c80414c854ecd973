//! gRPC's framing: a gateway's messages as they arrive, and the picker's as they are sent. A
//! compression flag and a length precede each message. Neither side keeps more memory than its
//! messages take: a stream is open as long as its response, and its longest message may have been a
//! prompt of megabytes.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::Stream;
use http::HeaderMap;
use http_body::{Body, Frame};
use tonic::Status;
use tonic::metadata::MetadataValue;

use super::Picker;
use super::answers::PickerAnswers;
use super::wire::PREFIX_BYTES;
use crate::proxy::request::request_body::HeldBodyBytes;

/// Maximum length of a message without its body, in bytes.
const MESSAGE_EXTRA_BYTES: usize = 1 << 20;
/// Number of bytes of ready messages that are sent at once.
const SENT_BYTES: usize = 32 << 10;

/// Messages of a gateway in one stream. The stream ends when the gateway has left, and an error is
/// the picker's reply to a message that it cannot read.
pub(super) struct GatewayFrames<B> {
    body: B,
    /// What has arrived and was not read yet.
    arrived: Bytes,
    reader: MessageReader,
    is_over: bool,
}

impl<B> GatewayFrames<B> {
    pub(super) fn of(body: B, picker: &Picker) -> Self {
        let proxy = &picker.proxy;
        let limits = proxy.limits.load();
        let held = HeldBodyBytes::none(&proxy.held_bytes, limits.held_bytes());
        let body_max = usize::try_from(limits.body_bytes_max).unwrap_or(usize::MAX);
        let message_max = body_max.saturating_add(MESSAGE_EXTRA_BYTES);
        Self {
            body,
            arrived: Bytes::new(),
            reader: MessageReader::new(held, message_max),
            is_over: false,
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Stream for GatewayFrames<B> {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        while !this.is_over {
            let read = this.reader.take(&mut this.arrived).transpose();
            if let Some(read) = read {
                this.is_over = read.is_err();
                return Poll::Ready(Some(read));
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                // Trailers tell nothing.
                Some(Ok(frame)) => this.arrived = frame.into_data().unwrap_or_default(),
                // The connection is gone, or the stream was reset.
                Some(Err(_)) => this.is_over = true,
                None => {
                    this.is_over = true;
                    if this.reader.is_within() {
                        let why = "the gateway ended the stream within a message";
                        return Poll::Ready(Some(Err(Status::invalid_argument(why))));
                    }
                }
            }
        }
        Poll::Ready(None)
    }
}

/// Reader of a stream's messages. Until a message is complete, the length that it announces counts
/// toward `limits.max_held_bodies`, since its memory is allocated; its body counts as held only when
/// it is read.
pub(super) struct MessageReader {
    prefix: [u8; PREFIX_BYTES],
    /// Number of prefix bytes received.
    prefix_bytes: usize,
    /// The message as far as it has arrived.
    message: Vec<u8>,
    /// Length of the message whose prefix is complete.
    length: usize,
    message_max: usize,
    held: HeldBodyBytes,
}

impl MessageReader {
    pub(super) fn new(held: HeldBodyBytes, message_max: usize) -> Self {
        Self {
            prefix: [0; PREFIX_BYTES],
            prefix_bytes: 0,
            message: Vec::new(),
            length: 0,
            message_max,
            held,
        }
    }

    /// Takes bytes from `data`, and returns the next message if they complete it.
    ///
    /// # Errors
    /// Returns the status that ends the stream if a message is compressed or too long, or if there
    /// is no room for it.
    pub(super) fn take(&mut self, data: &mut Bytes) -> Result<Option<Bytes>, Status> {
        if self.prefix_bytes < PREFIX_BYTES {
            let come = (PREFIX_BYTES - self.prefix_bytes).min(data.len());
            self.prefix[self.prefix_bytes..][..come].copy_from_slice(&data.split_to(come));
            self.prefix_bytes += come;
            if self.prefix_bytes < PREFIX_BYTES {
                return Ok(None);
            }
            self.announced(data.len())?;
        }
        let come = (self.length - self.message.len()).min(data.len());
        self.message.extend_from_slice(&data.split_to(come));
        if self.message.len() < self.length {
            return Ok(None);
        }
        self.prefix_bytes = 0;
        self.held.release();
        Ok(Some(std::mem::take(&mut self.message).into()))
    }

    /// Begins a message of which `here` bytes have already arrived.
    fn announced(&mut self, here: usize) -> Result<(), Status> {
        let [flag, length @ ..] = self.prefix;
        match flag {
            0 => {}
            1 => return Err(compressed()),
            _ => {
                let why = "a message's compression flag is neither 0 nor 1";
                return Err(Status::invalid_argument(why));
            }
        }
        self.length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if self.length > self.message_max {
            let why = "a message is longer than limits.max_body allows";
            return Err(Status::resource_exhausted(why));
        }
        if here < self.length {
            let held = self.held.add(self.length);
            held.map_err(|_| {
                let why = "bodies and messages hold all that limits.max_held_bodies allows";
                Status::unavailable(why)
            })?;
        }
        self.message.reserve_exact(self.length);
        Ok(())
    }

    /// Whether a message is incomplete.
    fn is_within(&self) -> bool {
        self.prefix_bytes > 0
    }
}

/// Returns the status for a gateway that compresses messages.
fn compressed() -> Status {
    let why = "the messages are compressed, and this picker reads none that are: turn off the \
               compression of the gateway's grpc_service";
    let mut status = Status::unimplemented(why);
    let none = MetadataValue::from_static("identity");
    status.metadata_mut().insert("grpc-accept-encoding", none);
    status
}

/// The picker's side of a stream as it is sent: messages that are ready at the same time together,
/// then the status.
pub(super) struct PickerFrames {
    answers: PickerAnswers,
    /// Body of a message whose other fields were sent.
    rest: Bytes,
    /// Status at the end of the stream, once it is known.
    end: Option<Status>,
    is_over: bool,
}

impl PickerFrames {
    pub(super) fn of(answers: PickerAnswers) -> Self {
        Self {
            answers,
            rest: Bytes::new(),
            end: None,
            is_over: false,
        }
    }
}

impl Body for PickerFrames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if !this.rest.is_empty() {
            let rest = std::mem::take(&mut this.rest);
            return Poll::Ready(Some(Ok(Frame::data(rest))));
        }
        if this.is_over {
            return Poll::Ready(None);
        }
        let mut data = Vec::new();
        while this.end.is_none() && this.rest.is_empty() && data.len() < SENT_BYTES {
            match this.answers.poll_next_unpin(cx) {
                Poll::Pending if data.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Some(said)) => {
                    match said.and_then(|message| message.sent_after(&mut data)) {
                        Ok(rest) => this.rest = rest,
                        Err(status) => this.end = Some(status),
                    }
                }
                Poll::Ready(None) => this.end = Some(Status::ok("")),
            }
        }
        if !data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(data.into()))));
        }
        this.is_over = true;
        let mut trailers = HeaderMap::new();
        if let Some(status) = this.end.take() {
            // A stream without a status counts as failed.
            let _: Result<(), Status> = status.add_header(&mut trailers);
        }
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use http_body_util::{BodyExt as _, StreamBody};
    use tokio::sync::{mpsc, oneshot};
    use tonic::Code;

    use super::*;
    use crate::proxy::picker::answers::StreamEnd;
    use crate::proxy::picker::outbound::{BodyOf, request_trailers};
    use crate::proxy::picker::wire::PickerMessage;

    const MAX: usize = 1000;

    fn reader(held_max: u64) -> (MessageReader, Arc<AtomicU64>) {
        let all = Arc::default();
        let held = HeldBodyBytes::none(&all, held_max);
        (MessageReader::new(held, MAX), all)
    }

    fn framed(bytes: u32) -> Vec<u8> {
        let mut message = vec![0];
        message.extend_from_slice(&bytes.to_be_bytes());
        message.resize(PREFIX_BYTES + bytes as usize, 7);
        message
    }

    /// Reads all messages that these bytes complete.
    fn read(reader: &mut MessageReader, data: &[u8]) -> Result<Vec<Bytes>, Status> {
        let mut data = Bytes::copy_from_slice(data);
        let mut messages = Vec::new();
        while let Some(message) = reader.take(&mut data)? {
            messages.push(message);
        }
        Ok(messages)
    }

    #[test]
    fn messages_read_alike_in_pieces_of_any_length() {
        let (mut reader, all) = reader(2000);
        let stream = [framed(300), framed(0), framed(40), framed(500)].concat();
        for piece in [1, 3, 7, 100, 5000] {
            let (mut most, mut messages) = (0, Vec::new());
            for data in stream.chunks(piece) {
                messages.extend(read(&mut reader, data).unwrap());
                most = most.max(all.load(Relaxed));
            }
            let lengths: Vec<_> = messages.iter().map(Bytes::len).collect();
            assert_eq!(lengths, [300, 0, 40, 500], "{piece}");
            assert!(messages.concat().iter().all(|byte| *byte == 7), "{piece}");
            // Announced lengths are held until their messages are complete.
            let expected = if piece == 5000 { 0 } else { 500 };
            assert_eq!((most, all.load(Relaxed)), (expected, 0), "{piece}");
            assert!(!reader.is_within());
        }
        read(&mut reader, &framed(300)[..9]).unwrap();
        assert_eq!(all.load(Relaxed), 300);
        assert!(reader.is_within());
        drop(reader);
        assert_eq!(all.load(Relaxed), 0);
    }

    #[test]
    fn an_announced_length_cannot_reserve_more_than_the_bound() {
        let (mut reader, all) = reader(500);
        let why = read(&mut reader, &framed(600)[..PREFIX_BYTES]).unwrap_err();
        assert_eq!(why.code(), Code::Unavailable);
        drop(reader);
        assert_eq!(all.load(Relaxed), 0);
    }

    #[test]
    fn refused_messages_reserve_nothing() {
        for (prefix, code) in [
            ([0, 0xff, 0xff, 0xff, 0xff], Code::ResourceExhausted),
            ([1, 0, 0, 0, 9], Code::Unimplemented),
            ([2, 0, 0, 0, 9], Code::InvalidArgument),
        ] {
            let (mut reader, all) = reader(500);
            assert_eq!(read(&mut reader, &prefix).unwrap_err().code(), code);
            assert_eq!(all.load(Relaxed), 0);
        }
    }

    /// Returns how many bytes of memory a message keeps.
    fn kept(message: Bytes) -> usize {
        message.try_into_mut().expect("nobody shares it").capacity()
    }

    #[test]
    fn a_received_message_keeps_only_its_own_memory() {
        let (mut reader, _) = reader(2000);
        let stream = [framed(900), framed(40), framed(900)].concat();
        let messages = read(&mut reader, &stream).unwrap();
        let kept: Vec<_> = messages.into_iter().map(kept).collect();
        assert_eq!(kept, [900, 40, 900]);
        assert_eq!(reader.message.capacity(), 0);
    }

    #[tokio::test]
    async fn a_stream_that_ends_within_a_message_is_refused() {
        for (stream, expected) in [
            (framed(40), [Ok(40)].into()),
            (
                framed(40)[..30].to_vec(),
                [Err(Code::InvalidArgument)].into(),
            ),
            (vec![0, 0], [Err(Code::InvalidArgument)].into()),
            (Vec::new(), VecDeque::new()),
        ] {
            let data = [Ok::<_, Infallible>(Frame::data(Bytes::from(stream)))];
            let frames = GatewayFrames {
                body: StreamBody::new(futures_util::stream::iter(data)),
                arrived: Bytes::new(),
                reader: reader(500).0,
                is_over: false,
            };
            let told = frames.map(|read| read.map(|it| it.len()).map_err(|why| why.code()));
            assert_eq!(told.collect::<VecDeque<_>>().await, expected);
        }
    }

    /// Returns the frames of a stream with these messages.
    async fn sent(messages: Vec<PickerMessage>, how: StreamEnd) -> Vec<Frame<Bytes>> {
        let (sender, receiver) = mpsc::channel(messages.len());
        for message in messages {
            sender.try_send(message).unwrap();
        }
        drop(sender);
        let (end, ended) = oneshot::channel();
        end.send(how).unwrap();
        let mut frames = PickerFrames::of(PickerAnswers::new(receiver, ended));
        let mut all = Vec::new();
        while let Some(Ok(frame)) = frames.frame().await {
            assert_eq!(frames.is_end_stream(), frame.is_trailers());
            all.push(frame);
        }
        all
    }

    #[tokio::test]
    async fn ready_messages_are_sent_together_before_the_status() {
        let piece = || BodyOf::Answer.piece(Bytes::from_static(b"hello"), false);
        let mut expected = Vec::new();
        for message in [request_trailers(), piece()] {
            let message = message.encoded();
            expected.extend([&[0, 0, 0, 0, message.len() as u8], &message[..]].concat());
        }
        for (how, status) in [(Ok(()), "0"), (Err(Status::aborted("it broke off")), "10")] {
            let said = vec![request_trailers(), piece()];
            let [data, trailers] = sent(said, how).await.try_into().unwrap();
            assert_eq!(data.into_data().unwrap(), expected);
            let trailers = trailers.into_trailers().unwrap();
            assert_eq!(trailers["grpc-status"], status);
            assert_eq!(trailers.contains_key("grpc-message"), status != "0");
        }
    }

    #[tokio::test]
    async fn a_sent_message_keeps_no_memory_and_a_long_body_is_not_copied() {
        let body = Bytes::from(vec![7; 1 << 20]);
        let said = vec![
            BodyOf::Request.piece(body.clone(), false),
            request_trailers(),
            BodyOf::Answer.piece(Bytes::from_static(b"hello"), true),
        ];
        let mut frames = sent(said, Ok(())).await;
        assert_eq!(frames.len(), 4);
        let mut data = frames.drain(..3).map(|it| it.into_data().unwrap());
        let (first, whole, rest) = (data.next(), data.next(), data.next());
        assert!(kept(first.unwrap()) < 1000 && kept(rest.unwrap()) < 1000);
        assert_eq!(whole.unwrap().as_ptr(), body.as_ptr());
    }
}
