//! Relays an engine's response that arrives through a gateway. Its pieces go through the same relay
//! as those of an engine's own connection, and return to the gateway as that relay releases them.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use tokio::time::sleep;
use tonic::Status;

use super::BodyMode;
use super::ext_proc::processing_request::Request;
use super::inbound::{GatewayMessages, StreamHalt, out_of_turn};
use super::outbound::{BodyOf, PIECE_BYTES_MAX, PickerMessages, answer_trailers};
use crate::proxy::response::answer_source::AnswerPipeWriter;
use crate::proxy::response::response_body::{SharedResponseBody, lock};
use crate::proxy::response::response_chunk::ResponseBodyError;

/// A response whose head was relayed.
pub(super) struct RelayedAnswer {
    pub(super) answer: SharedResponseBody,
    pub(super) writer: AnswerPipeWriter,
    pub(super) is_bodiless: bool,
    /// Remaining time for which the gateway may block the engine.
    pub(super) held_back: Duration,
    /// Maximum silence of the gateway after the engine's part is complete.
    pub(super) idle: Duration,
}

impl RelayedAnswer {
    /// Relays the body to its end in the gateway's `mode`.
    pub(super) async fn pass(
        self,
        mode: BodyMode,
        inbound: &mut GatewayMessages,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        if self.is_bodiless {
            return Ok(());
        }
        match mode {
            BodyMode::Duplex => self.stream(inbound, out).await,
            BodyMode::Streamed | BodyMode::StreamedEarly => self.step(false, inbound, out).await,
            BodyMode::Buffered => self.step(true, inbound, out).await,
        }
    }

    /// Relays the body in pieces that both sides send independently.
    async fn stream(
        mut self,
        inbound: &mut GatewayMessages,
        out: &PickerMessages,
    ) -> Result<(), StreamHalt> {
        let (mut is_read, mut has_trailers) = (false, false);
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
                message = inbound.next(), if !is_read => match message?.request {
                    Request::ResponseBody(piece) => {
                        self.writer.push(piece.body);
                        is_read = piece.end_of_stream;
                    }
                    Request::ResponseTrailers(_) => (is_read, has_trailers) = (true, true),
                    request => return Err(out_of_turn(&request, "within the body of a response")),
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
            match message.request {
                Request::ResponseBody(piece) => {
                    let passed = self
                        .passed(piece.body, is_whole || piece.end_of_stream)
                        .await?;
                    let said = BodyOf::Answer.replaced(passed, None);
                    out.send_within(said, &mut self.held_back).await?;
                    if piece.end_of_stream {
                        return Ok(());
                    }
                }
                Request::ResponseTrailers(_) => {
                    // Nothing can follow the last piece.
                    self.rest().await?;
                    return out.send(answer_trailers()).await;
                }
                request => return Err(out_of_turn(&request, "within the body of a response")),
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
    async fn passed(&self, piece: Bytes, is_last: bool) -> Result<Bytes, StreamHalt> {
        if self.is_over() {
            return Ok(piece);
        }
        self.writer.push(piece);
        let mut passed = BytesMut::from(&*self.ready()?);
        if is_last || lock(&self.answer).is_withholding() {
            passed.extend_from_slice(&self.rest().await?);
        }
        Ok(passed.freeze())
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
    fn ready(&self) -> Result<Bytes, StreamHalt> {
        let mut passed = BytesMut::new();
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(piece)) = self.poll(&mut cx) {
            passed.extend_from_slice(&piece.map_err(broken)?);
        }
        Ok(passed.freeze())
    }

    /// Ends the input, waits for the end of the response, and returns everything up to it.
    async fn rest(&self) -> Result<Bytes, StreamHalt> {
        self.writer.end();
        let mut passed = BytesMut::new();
        while let Some(piece) = self.next().await {
            passed.extend_from_slice(&piece.map_err(broken)?);
        }
        Ok(passed.freeze())
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
            out.send_within(BodyOf::Answer.piece(passed, ends), left)
                .await
        }
    }
}

fn broken(why: ResponseBodyError) -> StreamHalt {
    StreamHalt::Broken(match why {
        ResponseBodyError::Silent => Status::deadline_exceeded(why.to_string()),
        why => Status::aborted(why.to_string()),
    })
}
