//! Relays an engine's response that arrives through a gateway. Its pieces go through the same relay
//! as those of an engine's own connection, and return to the gateway as that relay releases them.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use http_body::Body as _;
use tokio::time::sleep;
use tonic::Status;

use super::BodyMode;
use super::gateway_message::{GatewayMessage, ToldPart};
use super::inbound::{GatewayMessages, StreamHalt, out_of_turn};
use super::outbound::{BodyOf, PIECE_BYTES_MAX, PickerMessages, answer_trailers};
use crate::proxy::response::answer_source::AnswerPipeWriter;
use crate::proxy::response::response_body::{SharedResponseBody, lock};
use crate::proxy::response::response_chunk::ResponseBodyError;

/// Whether a message ended a body.
struct BodyEnd {
    ends: bool,
    has_trailers: bool,
}

/// A response whose head was relayed.
pub(super) struct RelayedAnswer {
    pub(super) answer: SharedResponseBody,
    pub(super) writer: AnswerPipeWriter,
    pub(super) is_bodiless: bool,
    /// Remaining time for which the gateway may block the engine.
    pub(super) held_back: Duration,
    /// Maximum silence of the gateway after the engine's part is complete.
    pub(super) idle: Duration,
    /// Whether the relay leaves out what follows.
    pub(super) is_cut: bool,
}

impl RelayedAnswer {
    /// Relays the body to its end in the gateway's `mode`.
    pub(super) async fn pass(
        mut self,
        mode: BodyMode,
        inbound: &mut GatewayMessages,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        if self.is_bodiless {
            return Ok(());
        }
        match mode {
            BodyMode::Duplex => {
                let passed = self.stream(inbound, out).await;
                passed.inspect_err(|_| self.count())
            }
            BodyMode::Streamed | BodyMode::StreamedEarly => self.step(false, inbound, out).await,
            BodyMode::Buffered => self.step(true, inbound, out).await,
        }
    }

    /// Relays the body in pieces that both sides send independently.
    async fn stream(
        &mut self,
        inbound: &mut GatewayMessages,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        let (mut is_read, mut has_trailers) = (false, false);
        let mut halt = None;
        loop {
            tokio::select! {
                biased;
                piece = self.next() => {
                    let piece = piece.transpose().map_err(broken)?;
                    let is_last = piece.is_none() || self.is_over();
                    let ends = is_last && !has_trailers;
                    let left = &mut self.held_back;
                    send_pieces(piece.unwrap_or_default(), ends, (out, left)).await?;
                    if is_last {
                        break;
                    }
                }
                // What came before it has passed.
                Some(halt) = async { halt.take() } => return Err(halt),
                message = inbound.next(), if !is_read => {
                    let mut told = self.take_in(message);
                    // The end of a body often comes in a message right after its last piece, and
                    // can then go back with it.
                    if let Ok(BodyEnd { ends: false, .. }) = told
                        && let Some(next) = inbound.next().now_or_never()
                    {
                        told = self.take_in(next);
                    }
                    match told {
                        Ok(told) => (is_read, has_trailers) = (told.ends, told.has_trailers),
                        Err(why) => halt = Some(why),
                    }
                },
            }
            if is_read {
                self.writer.end();
            }
        }
        match has_trailers {
            true => out.send(answer_trailers()).await,
            false => Ok(()),
        }
    }

    /// Takes in what a message tells of a body that streams.
    fn take_in(&self, message: Result<GatewayMessage, StreamHalt>) -> Result<BodyEnd, StreamHalt> {
        let (ends, has_trailers) = match message?.told {
            ToldPart::ResponseBody(piece) => {
                self.writer.push(piece.body);
                (piece.end_of_stream, false)
            }
            ToldPart::ResponseTrailers => (true, true),
            told => return Err(out_of_turn(&told, "within the body of a response")),
        };
        Ok(BodyEnd { ends, has_trailers })
    }

    /// Lets the relay count what it was given before the gateway broke off.
    fn count(&self) {
        while let Some(Some(Ok(_))) = self.next().now_or_never() {}
    }

    /// Relays piece by piece with one reply each. With `is_whole`, there is only one piece.
    async fn step(
        mut self,
        is_whole: bool,
        inbound: &mut GatewayMessages,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        loop {
            let message = tokio::select! {
                biased;
                message = inbound.next() => message?,
                why = self.stalled() => return Err(broken(why)),
            };
            match message.told {
                ToldPart::ResponseBody(piece) => {
                    let is_last = is_whole || piece.end_of_stream;
                    let passed = self.passed(piece.body.clone(), is_last).await?;
                    let said = match passed == piece.body {
                        true => BodyOf::Answer.passes(),
                        false => BodyOf::Answer.replaced(passed),
                    };
                    let said = said.last_if(piece.end_of_stream);
                    out.send_within(said, &mut self.held_back).await?;
                    if piece.end_of_stream {
                        return Ok(());
                    }
                }
                ToldPart::ResponseTrailers => {
                    // Nothing can follow the last piece.
                    self.rest(&mut ReleasedBytes::default()).await?;
                    return out.send(answer_trailers()).await;
                }
                told => return Err(out_of_turn(&told, "within the body of a response")),
            }
        }
    }

    /// Waits until the response stalls and returns the reason. The relay itself times out the
    /// engine's part. After that, only trailers can follow.
    async fn stalled(&self) -> ResponseBodyError {
        if self.is_over() {
            sleep(self.idle).await;
            return ResponseBodyError::Silent;
        }
        let early = self.next().await;
        early
            .and_then(Result::err)
            .unwrap_or(ResponseBodyError::Silent)
    }

    /// Returns the replacement of a piece. Whether trailers follow the last piece is known only
    /// after the reply to it. What is withheld to the end of a response therefore waits for its
    /// charge as soon as the response is complete.
    async fn passed(&mut self, piece: Bytes, is_last: bool) -> Result<Bytes, StreamHalt> {
        if self.is_cut {
            return Ok(Bytes::new());
        }
        if self.is_over() {
            return Ok(piece);
        }
        self.writer.push(piece);
        let mut passed = ReleasedBytes::default();
        self.ready(&mut passed)?;
        // It ended the response before the gateway did, as it does with a long error.
        self.is_cut = self.is_over();
        if is_last || lock(&self.answer).is_withholding() {
            self.rest(&mut passed).await?;
        }
        Ok(passed.into())
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, ResponseBodyError>>> {
        let mut answer = lock(&self.answer);
        let polled = Pin::new(&mut *answer).poll_frame(cx);
        polled.map(|frame| frame.map(|frame| frame.map(|it| it.into_data().unwrap_or_default())))
    }

    async fn next(&self) -> Option<Result<Bytes, ResponseBodyError>> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn is_over(&self) -> bool {
        lock(&self.answer).is_end_stream()
    }

    /// Takes the bytes that the relay has released so far.
    fn ready(&self, passed: &mut ReleasedBytes) -> Result<(), StreamHalt> {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(piece)) = self.poll(&mut cx) {
            passed.add(piece.map_err(broken)?);
        }
        Ok(())
    }

    /// Ends the input, waits for the end of the response, and takes everything up to it.
    async fn rest(&self, passed: &mut ReleasedBytes) -> Result<(), StreamHalt> {
        self.writer.end();
        while let Some(piece) = self.next().await {
            passed.add(piece.map_err(broken)?);
        }
        Ok(())
    }
}

/// Bytes that the relay has released. Most often it is one piece, which needs no copy.
#[derive(Default)]
struct ReleasedBytes {
    first: Bytes,
    whole: BytesMut,
}

impl ReleasedBytes {
    fn add(&mut self, piece: Bytes) {
        if self.first.is_empty() && self.whole.is_empty() {
            self.first = piece;
            return;
        }
        self.whole
            .extend_from_slice(&std::mem::take(&mut self.first));
        self.whole.extend_from_slice(&piece);
    }
}

impl From<ReleasedBytes> for Bytes {
    fn from(released: ReleasedBytes) -> Self {
        match released.whole.is_empty() {
            true => released.first,
            false => released.whole.freeze(),
        }
    }
}

/// Sends relayed bytes in pieces that a gateway accepts. The last one ends the body if `ends`.
pub(super) async fn send_pieces(
    mut passed: Bytes,
    ends: bool,
    (out, left): (&PickerMessages, &mut Duration),
) -> Result<(), StreamHalt> {
    while passed.len() > PIECE_BYTES_MAX {
        let piece = passed.split_to(PIECE_BYTES_MAX);
        out.send_within(BodyOf::Answer.piece(piece, false), left)
            .await?;
    }
    match passed.is_empty() && !ends {
        true => Ok(()),
        false => {
            let piece = BodyOf::Answer.piece(passed, ends).last_if(ends);
            out.send_within(piece, left).await
        }
    }
}

fn broken(why: ResponseBodyError) -> StreamHalt {
    StreamHalt::Broken(match why {
        ResponseBodyError::Silent => Status::deadline_exceeded(why.to_string()),
        why => Status::aborted(why.to_string()),
    })
}
