//! The stream with a picker for one request, following the rules of Envoy's external processing
//! filter.

use std::collections::VecDeque;
use std::net::SocketAddr;

use anyhow::{Context as _, bail, ensure};
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{
    BodySendMode, CommonResponse, ImmediateResponse, ProcessingMode, ProcessingRequest,
    ProcessingResponse, ProtocolConfiguration,
};
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt as _, StreamExt as _, TryFutureExt as _};
use http::{HeaderMap, StatusCode, response};
use prost_types::Struct;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::messages::{
    DESTINATION, change, destination, head, path, piece, served, subset, upload,
};
use super::{GatewayAnswer, GatewayOptions, GatewayRequest};

/// Maximum number of messages queued for a picker.
const WAITING_MAX: usize = 16;

/// Stream to and from a picker for one request.
pub(super) struct PickerTalk {
    say: mpsc::Sender<ProcessingRequest>,
    heard: BoxStream<'static, Result<ProcessingResponse, Status>>,
    options: GatewayOptions,
    /// Mode in which the request's body passes through the picker.
    requests: BodySendMode,
    /// Mode in which the response's body passes through the picker.
    answers: BodySendMode,
    /// Whether the stream to the picker failed or ended.
    is_lost: bool,
    /// Parts of the response's body that the picker has yet to answer, each with whether it is the
    /// last. An answer without a part of its own passes it unchanged. Unused in full-duplex mode, in which answers do not match messages.
    owed: VecDeque<(Bytes, bool)>,
    /// Response body so far, in [`BodySendMode::Buffered`].
    whole: Vec<u8>,
    is_over: bool,
}

/// A picker's decision on a request.
pub(super) enum PickerDecision {
    /// The request goes to one of the picked endpoints.
    Picked(Picked),
    /// The picker responds itself.
    Immediate(GatewayAnswer),
}

/// A request as it goes to an engine, and the endpoints to try in order.
pub(super) struct Picked {
    pub(super) endpoints: Vec<SocketAddr>,
    /// Path, if it is not the client's.
    pub(super) path: Option<String>,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// A request with the picker's changes so far.
#[derive(Default)]
struct ChangedRequest {
    path: Option<String>,
    headers: HeaderMap,
    beside: Option<Struct>,
    body: Vec<u8>,
}

impl PickerTalk {
    /// Opens a stream. The head of the picker's response comes with its first message, so an error of
    /// the connection shows there too.
    pub(super) fn open(
        mut picker: ExternalProcessorClient<Channel>,
        options: &GatewayOptions,
    ) -> Self {
        let (say, said) = mpsc::channel(WAITING_MAX);
        let heard = async move { picker.process(ReceiverStream::new(said)).await };
        let heard = AbortOnDropHandle::new(tokio::spawn(heard));
        let heard = heard.map(|heard| match heard {
            Ok(heard) => heard.map(Response::into_inner),
            Err(error) => Err(Status::from_error(error.into())),
        });
        Self {
            say,
            heard: heard.try_flatten_stream().boxed(),
            options: options.clone(),
            requests: options.bodies,
            answers: options.bodies,
            is_lost: false,
            owed: VecDeque::new(),
            whole: Vec::new(),
            is_over: false,
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Returns whether the whole response has passed through the picker.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns whether the picker may still send something about the response's body.
    pub(super) fn is_owed(&self) -> bool {
        self.answers == BodySendMode::FullDuplexStreamed || !self.owed.is_empty()
    }

    /// Returns whether the picker sees response bodies.
    pub(super) fn shows_answers(&self) -> bool {
        self.answers != BodySendMode::None
    }

    /// Applies the body modes that the response to a head requests, if the options allow it.
    fn take_modes(&mut self, asked: Option<ProcessingMode>) {
        let GatewayOptions {
            bodies,
            waits_for_heads,
            allows_override,
            ..
        } = self.options;
        let may_change = allows_override && waits_for_heads;
        if let Some(asked) = asked
            && may_change
            && bodies != BodySendMode::FullDuplexStreamed
        {
            self.requests = asked.request_body_mode();
            self.answers = asked.response_body_mode();
        }
    }

    async fn say(&mut self, message: ProcessingRequest) -> anyhow::Result<()> {
        let said = self.say.send(message).await;
        self.is_lost |= said.is_err();
        said.context("a picker has ended the stream")
    }

    async fn hear(&mut self) -> anyhow::Result<ProcessingResponse> {
        match self.heard.next().await {
            Some(Ok(message)) => Ok(message),
            None => {
                self.is_lost = true;
                bail!("a picker ended the stream")
            }
            Some(Err(status)) => {
                self.is_lost = true;
                Err(status.into())
            }
        }
    }

    fn message(said: ProcessingMessage) -> ProcessingRequest {
        ProcessingRequest {
            request: Some(said),
            ..ProcessingRequest::default()
        }
    }

    /// Sends the request to the picker, and returns the picker's decision.
    pub(super) async fn ask(&mut self, request: &GatewayRequest) -> anyhow::Result<PickerDecision> {
        let pseudo = [
            (":method", request.method.as_str()),
            (":path", &request.path),
            (":scheme", "http"),
            (":authority", "models.example"),
        ];
        let mut headers = request.headers.clone();
        headers.insert("content-length", request.body.len().into());
        let is_bodiless = request.body.is_empty();
        let told = head(&pseudo, &headers, is_bodiless);
        let mode: i32 = self.options.bodies.into();
        let first = ProcessingRequest {
            metadata_context: self.options.subset.as_deref().map(subset),
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: mode,
                response_body_mode: mode,
                send_body_without_waiting_for_header_response: !self.options.waits_for_heads,
            }),
            ..Self::message(ProcessingMessage::RequestHeaders(told))
        };
        self.say(first).await?;
        let mut changed = ChangedRequest {
            headers,
            ..ChangedRequest::default()
        };
        let answer = match self.requests {
            _ if is_bodiless => self.head_answered(&mut changed).await?,
            BodySendMode::FullDuplexStreamed => self.duplex(request, &mut changed).await?,
            BodySendMode::Streamed if !self.options.waits_for_heads => {
                let pieces = self.upload(&request.body).await?;
                match self.head_answered(&mut changed).await? {
                    Some(answer) => Some(answer),
                    None => self.streamed(request, pieces, &mut changed).await?,
                }
            }
            BodySendMode::Streamed | BodySendMode::Buffered => {
                self.after_head(request, &mut changed).await?
            }
            other => bail!("the stand-in does not speak {}", other.as_str_name()),
        };
        if let Some(answer) = answer {
            return Ok(PickerDecision::Immediate(immediate(answer)?));
        }
        picked(changed).map(PickerDecision::Picked)
    }

    async fn upload(&mut self, body: &Bytes) -> anyhow::Result<usize> {
        let mut left = body.clone();
        let mut count = 0;
        while !left.is_empty() {
            let bytes = left.len().min(self.options.piece_bytes);
            let part = left.split_to(bytes);
            let said = self.say(Self::message(upload(part, left.is_empty()))).await;
            if said.is_err() {
                // The picker reads no more after its decision.
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    /// Receives the picker's response to the head. Returns a response to the client if the picker
    /// responds itself.
    async fn head_answered(
        &mut self,
        changed: &mut ChangedRequest,
    ) -> anyhow::Result<Option<ImmediateResponse>> {
        let message = self.hear().await?;
        match message.response {
            Some(Heard::ImmediateResponse(answer)) => return Ok(Some(answer)),
            Some(Heard::RequestHeaders(it)) => {
                let common = it.response.unwrap_or_default();
                ensure!(common.body_mutation.is_none(), "a head has no body");
                changed.take(&common, message.dynamic_metadata)?;
                self.take_modes(message.mode_override);
            }
            other => bail!("the head of a request was answered by {other:?}"),
        }
        Ok(None)
    }

    async fn duplex(
        &mut self,
        request: &GatewayRequest,
        changed: &mut ChangedRequest,
    ) -> anyhow::Result<Option<ImmediateResponse>> {
        self.upload(&request.body).await?;
        if let Some(answer) = self.head_answered(changed).await? {
            return Ok(Some(answer));
        }
        loop {
            let common = match self.hear().await?.response {
                Some(Heard::RequestBody(it)) => it.response.unwrap_or_default(),
                other => bail!("the body of a request was answered by {other:?}"),
            };
            let (data, end) = streamed_piece(common)?;
            changed.body.extend_from_slice(&data);
            if end {
                return Ok(None);
            }
        }
    }

    /// Sends the body after the picker's response to the head, which may change the body's mode.
    async fn after_head(
        &mut self,
        request: &GatewayRequest,
        changed: &mut ChangedRequest,
    ) -> anyhow::Result<Option<ImmediateResponse>> {
        if let Some(answer) = self.head_answered(changed).await? {
            return Ok(Some(answer));
        }
        match self.requests {
            BodySendMode::Buffered => self.buffered(request, changed).await,
            BodySendMode::Streamed => {
                let pieces = self.upload(&request.body).await?;
                self.streamed(request, pieces, changed).await
            }
            other => bail!("a picker asks for {}", other.as_str_name()),
        }
    }

    async fn streamed(
        &mut self,
        request: &GatewayRequest,
        pieces: usize,
        changed: &mut ChangedRequest,
    ) -> anyhow::Result<Option<ImmediateResponse>> {
        let parts = request.body.chunks(self.options.piece_bytes);
        for part in parts.take(pieces) {
            match self.hear().await?.response {
                Some(Heard::RequestBody(it)) => {
                    let common = it.response.unwrap_or_default();
                    changed.body.extend(replaced(common, part)?);
                }
                other => bail!("a piece of a request was answered by {other:?}"),
            }
        }
        Ok(None)
    }

    async fn buffered(
        &mut self,
        request: &GatewayRequest,
        changed: &mut ChangedRequest,
    ) -> anyhow::Result<Option<ImmediateResponse>> {
        let whole = upload(request.body.clone(), true);
        self.say(Self::message(whole)).await?;
        let message = self.hear().await?;
        match message.response {
            Some(Heard::ImmediateResponse(answer)) => return Ok(Some(answer)),
            Some(Heard::RequestBody(it)) => {
                let common = it.response.unwrap_or_default();
                changed.take(&common, message.dynamic_metadata)?;
                changed.body = replaced(common, &request.body)?;
            }
            other => bail!("the body of a request was answered by {other:?}"),
        }
        Ok(None)
    }

    /// Sends the head of a response of the endpoint `by`. Returns the changed headers.
    pub(super) async fn answer_head(
        &mut self,
        told: &response::Parts,
        by: SocketAddr,
    ) -> anyhow::Result<HeaderMap> {
        let pseudo = [(":status", told.status.as_str())];
        let message = ProcessingRequest {
            metadata_context: Some(served(by)),
            ..Self::message(ProcessingMessage::ResponseHeaders(head(
                &pseudo,
                &told.headers,
                false,
            )))
        };
        self.say(message).await?;
        let mut headers = told.headers.clone();
        match self.hear().await?.response {
            Some(Heard::ResponseHeaders(it)) => {
                let common = it.response.unwrap_or_default();
                change(&mut headers, &common.header_mutation.unwrap_or_default())?;
            }
            other => bail!("the head of an answer was answered by {other:?}"),
        }
        Ok(headers)
    }

    /// Sends a part of the response's body to the picker, or buffers it if it is sent as a whole.
    pub(super) async fn say_pieces(&mut self, data: &Bytes) -> anyhow::Result<()> {
        if self.answers == BodySendMode::Buffered {
            self.whole.extend_from_slice(data);
            return Ok(());
        }
        for part in data.chunks(self.options.piece_bytes) {
            self.say_piece(Bytes::copy_from_slice(part), false).await?;
        }
        Ok(())
    }

    /// Signals the end of the response's body to the picker.
    pub(super) async fn say_end(&mut self) -> anyhow::Result<()> {
        if !self.shows_answers() {
            self.is_over = true;
            return Ok(());
        }
        let whole = std::mem::take(&mut self.whole);
        self.say_piece(whole.into(), true).await
    }

    async fn say_piece(&mut self, data: Bytes, end: bool) -> anyhow::Result<()> {
        if self.answers != BodySendMode::FullDuplexStreamed {
            self.owed.push_back((data.clone(), end));
        }
        let said = ProcessingMessage::ResponseBody(piece(data, end));
        self.say(Self::message(said)).await
    }

    /// Receives the next bytes of the response's body for the client. Cancel safe.
    pub(super) async fn hear_piece(&mut self) -> anyhow::Result<Vec<u8>> {
        let common = match self.hear().await?.response {
            Some(Heard::ResponseBody(it)) => it.response.unwrap_or_default(),
            other => bail!("the body of an answer was answered by {other:?}"),
        };
        if self.answers == BodySendMode::FullDuplexStreamed {
            let (data, end) = streamed_piece(common)?;
            self.is_over = end;
            return Ok(data.to_vec());
        }
        let (data, end) = self.owed.pop_front().context("a piece too many")?;
        self.is_over = end;
        replaced(common, &data)
    }
}

impl ChangedRequest {
    fn take(&mut self, common: &CommonResponse, beside: Option<Struct>) -> anyhow::Result<()> {
        if let Some(mutation) = &common.header_mutation {
            let names_endpoint = beside.is_some();
            ensure!(
                common.clear_route_cache == names_endpoint,
                "the route is looked up anew exactly if there is an endpoint"
            );
            change(&mut self.headers, mutation)?;
            self.path = path(mutation)?;
            self.beside = beside;
        }
        Ok(())
    }
}

fn picked(changed: ChangedRequest) -> anyhow::Result<Picked> {
    let ChangedRequest {
        path,
        mut headers,
        beside,
        body,
    } = changed;
    let told = headers
        .remove(DESTINATION)
        .context("no endpoint was told")?;
    let told = told.to_str()?;
    ensure!(
        destination(beside.as_ref()) == Some(told),
        "header and metadata differ: {told} and {beside:?}"
    );
    if let Some(length) = headers.remove("content-length") {
        let length: usize = length.to_str()?.parse()?;
        ensure!(
            length == body.len(),
            "{length} bytes told, {} sent",
            body.len()
        );
    }
    let endpoints: Result<_, _> = told.split(',').map(str::parse).collect();
    Ok(Picked {
        endpoints: endpoints?,
        path,
        headers,
        body: body.into(),
    })
}

/// Returns a chunk of a streamed body, and whether it is the last chunk.
fn streamed_piece(common: CommonResponse) -> anyhow::Result<(Bytes, bool)> {
    match common.body_mutation.and_then(|it| it.mutation) {
        Some(Mutation::StreamedResponse(piece)) => Ok((piece.body, piece.end_of_stream)),
        other => bail!("expected a streamed piece, got {other:?}"),
    }
}

/// Returns the bytes that replace the chunk `sent`.
fn replaced(common: CommonResponse, sent: &[u8]) -> anyhow::Result<Vec<u8>> {
    match common.body_mutation.and_then(|it| it.mutation) {
        None => Ok(sent.to_vec()),
        Some(Mutation::Body(body)) => Ok(body.to_vec()),
        Some(Mutation::ClearBody(true)) => Ok(Vec::new()),
        other => bail!("expected a piece by itself, got {other:?}"),
    }
}

fn immediate(answer: ImmediateResponse) -> anyhow::Result<GatewayAnswer> {
    let mut headers = HeaderMap::new();
    change(&mut headers, &answer.headers.unwrap_or_default())?;
    let code = answer.status.context("no status")?.code;
    Ok(GatewayAnswer {
        status: StatusCode::from_u16(u16::try_from(code)?)?,
        headers,
        body: answer.body,
        endpoint: None,
    })
}
