//! A picker in front of a fleet, and its gateways: over gRPC, or message by message without a
//! socket, with the test's own clock.

use std::net::SocketAddr;
use std::sync::Arc;

use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{
    BodySendMode, CommonResponse, HeaderMap, HeaderMutation, HeaderValue, HttpBody, HttpHeaders,
    Metadata, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
};
use api::proxy::picker::{
    BodyMode, Picker, PickerMessage, PickerMetrics, PickerServer, PickerSettings,
};
use api::proxy::{DrainResult, ProxySettings};
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, Stream};
use futures_util::{FutureExt as _, StreamExt as _, TryFutureExt as _};
use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::engine::Engine;
use super::fleet::{Fleet, PATIENT};

pub(super) const CHAT: &str =
    r#"{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true,"max_tokens":9}"#;
pub(super) const EVENTS: &str = "text/event-stream";
const DESTINATION: &str = "x-gateway-destination-endpoint";

/// A picker and its listener.
pub(super) struct Listening {
    pub(super) metrics: PickerMetrics,
    pub(super) address: SocketAddr,
    pub(super) drain: CancellationToken,
    pub(super) server: JoinHandle<DrainResult>,
}

/// A picker and a gateway's connection to it.
pub(super) struct ConnectedPicker {
    pub(super) metrics: PickerMetrics,
    client: ExternalProcessorClient<Channel>,
}

/// A picker without a listener, called in this process.
pub(super) struct InProcessPicker {
    pub(super) metrics: PickerMetrics,
    picker: Arc<Picker>,
}

impl InProcessPicker {
    pub(super) fn of(fleet: &Fleet) -> Self {
        let metrics = PickerMetrics::default();
        let settings = PickerSettings::default();
        let picker = Picker::new(Arc::clone(&fleet.proxy), settings, metrics.clone());
        Self {
            metrics,
            picker: Arc::new(picker),
        }
    }

    pub(super) fn open(&self) -> Result<Talk, Status> {
        let (say, said) = mpsc::channel(64);
        let said = ReceiverStream::new(said);
        let heard = self.follow(said.map(|it: ProcessingRequest| it.encode_to_vec().into()))?;
        let say = Some(say);
        Ok(Talk { say, heard })
    }

    /// Opens a stream with these encoded messages, which the gateway then keeps open.
    pub(super) fn hear_out(&self, messages: Vec<Bytes>) -> Result<Talk, Status> {
        let said = stream::iter(messages).chain(stream::pending());
        let heard = self.follow(said)?;
        Ok(Talk { say: None, heard })
    }

    fn follow(
        &self,
        said: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<BoxStream<'static, Result<ProcessingResponse, Status>>, Status> {
        let peer = http::HeaderValue::from_static("127.0.0.1");
        let heard = self.picker.follow(said.map(Ok), peer)?;
        let read = |message: PickerMessage| ProcessingResponse::decode(message.encoded());
        Ok(heard.map(move |it| it.map(|it| read(it).unwrap())).boxed())
    }
}

impl Listening {
    pub(super) async fn of(fleet: &Fleet) -> Self {
        Self::once(fleet, CancellationToken::new(), async {}).await
    }

    /// Starts a picker whose listener exists at once and is served from the end of `open` until
    /// `drain`.
    pub(super) async fn once(
        fleet: &Fleet,
        drain: CancellationToken,
        open: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        Self::with(fleet, PickerSettings::default(), drain, open).await
    }

    async fn with(
        fleet: &Fleet,
        settings: PickerSettings,
        drain: CancellationToken,
        open: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let metrics = PickerMetrics::default();
        let picker = Picker::new(Arc::clone(&fleet.proxy), settings, metrics.clone());
        let server = PickerServer::new(listener, picker, None);
        let serving = server.run_until(drain.clone(), Box::new(|| PATIENT));
        let server = tokio::spawn(async move {
            open.await;
            serving.await
        });
        Self {
            metrics,
            address,
            drain,
            server,
        }
    }
}

impl ConnectedPicker {
    pub(super) async fn of(fleet: &Fleet) -> Self {
        Self::to(Listening::of(fleet).await).await
    }

    /// Starts a picker for gateways that let it override the mode of request bodies.
    pub(super) async fn overriding(fleet: &Fleet) -> Self {
        let settings = PickerSettings {
            bodies: BodyMode::Streamed,
            ..PickerSettings::default()
        };
        let listening = Listening::with(fleet, settings, CancellationToken::new(), async {});
        Self::to(listening.await).await
    }

    async fn to(listening: Listening) -> Self {
        let Listening {
            metrics, address, ..
        } = listening;
        let client = ExternalProcessorClient::connect(format!("http://{address}"));
        let client = client.await.unwrap();
        Self { metrics, client }
    }

    pub(super) fn open(&self) -> Talk {
        let (say, said) = mpsc::channel(64);
        let mut client = self.client.clone();
        // The head of the picker's response comes with its first message.
        let heard = async move { client.process(ReceiverStream::new(said)).await };
        let heard = AbortOnDropHandle::new(tokio::spawn(heard));
        let heard = heard.map(|heard| heard.unwrap().map(Response::into_inner));
        Talk {
            say: Some(say),
            heard: heard.try_flatten_stream().boxed(),
        }
    }

    /// Opens a stream and sends a request in pieces of `piece` bytes.
    pub(super) async fn ask(&self, body: &str, piece: usize, more: ProcessingRequest) -> Talk {
        let talk = self.open();
        talk.ask(body, piece, more).await;
        talk
    }
}

/// One stream of a gateway.
pub(super) struct Talk {
    pub(super) say: Option<mpsc::Sender<ProcessingRequest>>,
    heard: BoxStream<'static, Result<ProcessingResponse, Status>>,
}

impl Talk {
    /// Sends a request in pieces of `piece` bytes.
    pub(super) async fn ask(&self, body: &str, piece: usize, more: ProcessingRequest) {
        self.say_with(head_before(body), more).await;
        let mut pieces = body.as_bytes().chunks(piece).peekable();
        while let Some(data) = pieces.next() {
            let end = pieces.peek().is_none();
            self.say(ProcessingMessage::RequestBody(piece_of(data, end)))
                .await;
        }
    }

    pub(super) async fn say(&self, said: ProcessingMessage) {
        self.say_with(said, ProcessingRequest::default()).await;
    }

    pub(super) async fn say_with(&self, said: ProcessingMessage, more: ProcessingRequest) {
        let request = Some(said);
        let message = ProcessingRequest { request, ..more };
        // The stream may have ended already.
        drop(self.say.as_ref().unwrap().send(message).await);
    }

    pub(super) async fn hear(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        let next = tokio::time::timeout(PATIENT, self.heard.next());
        next.await.expect("an answer comes in time").transpose()
    }

    pub(super) async fn next(&mut self) -> ProcessingResponse {
        self.hear().await.unwrap().expect("another answer comes")
    }

    /// Returns the endpoints from the picker's first response, with all its header changes.
    pub(super) async fn picked(&mut self) -> (String, HeaderMutation) {
        let message = self.next().await;
        let common = match message.response {
            Some(Heard::RequestHeaders(it)) => it.response.unwrap(),
            Some(Heard::RequestBody(it)) => it.response.unwrap(),
            other => panic!("{other:?}"),
        };
        let headers = common.header_mutation.unwrap();
        let endpoints = header(&headers, DESTINATION).unwrap();
        assert!(common.clear_route_cache);
        let beside = message.dynamic_metadata.unwrap();
        let Some(Kind::StructValue(beside)) = &beside.fields["envoy.lb"].kind else {
            panic!("{beside:?}");
        };
        let told = Some(Kind::StringValue(endpoints.clone()));
        assert_eq!(beside.fields[DESTINATION].kind, told);
        (endpoints, headers)
    }

    /// Returns the streamed body of a request or response.
    pub(super) async fn streamed(&mut self) -> String {
        let mut whole = Vec::new();
        loop {
            let common = body_of(self.next().await);
            let Some(Mutation::StreamedResponse(piece)) = common.body_mutation.unwrap().mutation
            else {
                panic!("a body that streams is answered so");
            };
            assert!(piece.body.len() <= 62 * 1024);
            whole.extend_from_slice(&piece.body);
            if piece.end_of_stream {
                return String::from_utf8(whole).unwrap();
            }
        }
    }

    /// Takes a decision and the request's body, and sends the headers of a streamed response.
    pub(super) async fn answering(&mut self) {
        self.picked().await;
        self.streamed().await;
        self.begin(EVENTS, None).await;
    }

    /// Sends response headers with content type `kind`, as from the endpoint `served` if given.
    /// Returns the picker's header changes.
    pub(super) async fn begin(&mut self, kind: &str, served: Option<&str>) -> HeaderMutation {
        let head = answer_of(&[(":status", "200"), ("content-type", kind)], false);
        let more = ProcessingRequest {
            metadata_context: served.map(|served| {
                let served = Kind::StringValue(served.to_owned());
                told("envoy.lb", "x-gateway-destination-endpoint-served", served)
            }),
            ..ProcessingRequest::default()
        };
        self.say_with(ProcessingMessage::ResponseHeaders(head), more)
            .await;
        match self.next().await.response {
            Some(Heard::ResponseHeaders(it)) => it.response.unwrap().header_mutation.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn answer(&self, pieces: &[&str]) {
        for (nth, piece) in pieces.iter().enumerate() {
            let end = nth + 1 == pieces.len();
            let piece = piece_of(piece.as_bytes(), end);
            self.say(ProcessingMessage::ResponseBody(piece)).await;
        }
    }

    /// Returns the status and body of an immediate response, which the gateway sends to its client.
    pub(super) async fn refused(&mut self) -> (i32, String) {
        match self.next().await.response {
            Some(Heard::ImmediateResponse(it)) => {
                assert!(it.details.starts_with("quorate"), "{}", it.details);
                let body = String::from_utf8(it.body.to_vec()).unwrap();
                (it.status.unwrap().code, body)
            }
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn is_over(&mut self) {
        assert_eq!(self.hear().await.unwrap(), None);
    }

    /// Returns the error that ends the stream, whatever precedes it.
    pub(super) async fn fails(&mut self) -> Status {
        loop {
            match self.hear().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the stream ended without an error"),
                Err(status) => return status,
            }
        }
    }
}

pub(super) fn body_of(message: ProcessingResponse) -> CommonResponse {
    match message.response {
        Some(Heard::RequestBody(it) | Heard::ResponseBody(it)) => it.response.unwrap(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn piece_of(data: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody {
        body: Bytes::copy_from_slice(data),
        end_of_stream,
    }
}

/// Returns the head of a chat request whose body is [`CHAT`].
pub(super) fn head() -> ProcessingMessage {
    head_before(CHAT)
}

/// Returns the head of a chat request with this body.
pub(super) fn head_before(body: &str) -> ProcessingMessage {
    let mut head = head_of("POST", "/v1/chat/completions", false);
    let length = body.len().to_string();
    let fields = headers(&[("content-length", &length)]);
    let all = head.headers.get_or_insert_default();
    all.headers.extend(fields.headers);
    ProcessingMessage::RequestHeaders(head)
}

/// Returns a piece of a request's body.
pub(super) fn upload(data: &str, end: bool) -> ProcessingMessage {
    ProcessingMessage::RequestBody(piece_of(data.as_bytes(), end))
}

/// Returns a piece of a response's body.
pub(super) fn reply(data: &str, end: bool) -> ProcessingMessage {
    ProcessingMessage::ResponseBody(piece_of(data.as_bytes(), end))
}

pub(super) fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    HeaderMap {
        headers: fields.iter().map(field).collect(),
    }
}

pub(super) fn head_of(method: &str, path: &str, end_of_stream: bool) -> HttpHeaders {
    let fields = [
        (":method", method),
        (":path", path),
        (":authority", "models.example"),
        ("content-type", "application/json"),
        ("accept-encoding", "gzip"),
        ("x-quorate-user", "ada"),
    ];
    HttpHeaders {
        headers: Some(headers(&fields)),
        end_of_stream,
    }
}

/// Returns the head of a response.
pub(super) fn answer_of(fields: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    HttpHeaders {
        headers: Some(headers(fields)),
        end_of_stream,
    }
}

pub(super) fn header(mutation: &HeaderMutation, name: &str) -> Option<String> {
    let mut all = mutation.set_headers.iter().flat_map(|it| &it.header);
    let found = all.find(|it| it.key == name)?;
    Some(String::from_utf8(found.raw_value.to_vec()).unwrap())
}

pub(super) fn told(namespace: &str, key: &str, kind: Kind) -> Metadata {
    let fields = [(key.to_owned(), Value { kind: Some(kind) })].into();
    Metadata {
        filter_metadata: [(namespace.to_owned(), Struct { fields })].into(),
    }
}

/// Returns Envoy's subset hint, which restricts the choice to `endpoints`.
pub(super) fn only(endpoints: &[String]) -> ProcessingRequest {
    let value = |text: &String| Value {
        kind: Some(Kind::StringValue(text.clone())),
    };
    let list = Kind::ListValue(ListValue {
        values: endpoints.iter().map(value).collect(),
    });
    let key = "x-gateway-destination-endpoint-subset";
    ProcessingRequest {
        metadata_context: Some(told("envoy.lb.subset_hint", key, list)),
        ..ProcessingRequest::default()
    }
}

pub(super) fn modes(
    requests: BodySendMode,
    answers: BodySendMode,
    early: bool,
) -> ProcessingRequest {
    ProcessingRequest {
        protocol_config: Some(ProtocolConfiguration {
            request_body_mode: requests.into(),
            response_body_mode: answers.into(),
            send_body_without_waiting_for_header_response: early,
        }),
        ..ProcessingRequest::default()
    }
}

/// Returns Envoy's reason for a response.
pub(super) fn because(details: &str) -> ProcessingRequest {
    let kind = Kind::StringValue(details.to_owned());
    let told = told("envoy.filters.http.ext_proc", "response.code_details", kind);
    ProcessingRequest {
        attributes: told.filter_metadata,
        ..ProcessingRequest::default()
    }
}

pub(super) fn plain() -> ProcessingRequest {
    ProcessingRequest::default()
}

pub(super) async fn engines() -> [Engine; 2] {
    [Engine::dead().await, Engine::dead().await]
}

pub(super) async fn start(engines: &[Engine; 2]) -> (Fleet, ConnectedPicker) {
    start_with(engines, |_| {}).await
}

pub(super) async fn start_with(
    engines: &[Engine; 2],
    change: impl FnOnce(&mut ProxySettings),
) -> (Fleet, ConnectedPicker) {
    let both = [&engines[0], &engines[1]];
    let fleet = Fleet::start_with(&both, PATIENT, change).await;
    let picking = ConnectedPicker::of(&fleet).await;
    (fleet, picking)
}
