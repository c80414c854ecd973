//! The HTTP API of the engine: vLLM's routes and a few others, with one task per connection.
//!
//! The server notices a disconnect while a handler waits and while it streams. It drops the
//! handler's future or body, which aborts the request in the scheduler. Idle connections are closed
//! after the keep-alive time, as uvicorn does under vLLM.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use api::prompt::ParsedBody;
use axum::body::Body;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName};
use http::{HeaderMap, Method, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::EngineOptions;
use super::answer::{
    AnswerHeader, AnswerStream, AnswerWriter as _, CompletionEvents, CompletionKind, UsageOptions,
};
use super::driver::{LatestProgress, RequestGuard, unix_time};
use super::embeddings::{EmbeddingsRequest, INPUTS_MAX};
use super::events::{Publisher, REPLAY_MESSAGES, TOPIC};
use super::extras::{Extras, tokenize_ending};
use super::metrics::EngineMetricsPage;
use super::model::{ComputeJob, EngineShape, Finish};
use super::named::{NamedDialect, NamedEvents};
use super::output::Output;
use super::ranks::Ranks;
use super::rejection::{RequestRejection, read};
use super::rooms::{EngineRooms, RoomMode};
use super::text::{ChatEnding, Sequence, detokenize, sequence_bytes, token_count, token_ids};
use super::transfer::{Connector, TRANSFER_PATH, TransferParams};

/// Maximum length of a request body, as in vLLM.
const BODY_BYTES_MAX: usize = 32 << 20;
/// Maximum length of an `x-request-id` that becomes part of the response's id.
const REQUEST_ID_BYTES_MAX: usize = 128;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const EMBEDDINGS: &str = "/v1/embeddings";
const TOKENIZE: &str = "/tokenize";

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const EVENTS: [(HeaderName, &str); 1] = [(CONTENT_TYPE, "text/event-stream; charset=utf-8")];
const METRICS: [(HeaderName, &str); 1] =
    [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];

/// The server of one engine: its ranks, options and counters, shared by all connections.
#[derive(Debug)]
pub(super) struct EngineServer {
    ranks: Ranks,
    model: String,
    /// Names of the served LoRA adapters.
    adapters: Vec<Arc<str>>,
    /// Maximum number of adapters in memory.
    max_loras: u32,
    shape: EngineShape,
    seed: u64,
    requests: AtomicU64,
    connector: Option<Connector>,
    rooms: Option<EngineRooms>,
}

/// Extractor of the shared [`EngineServer`].
type Shared = State<Arc<EngineServer>>;
/// Body of a request, or the reason why it could not be read.
type BodyRead = Result<Bytes, BytesRejection>;

/// An endpoint that generates text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GenerateEndpoint {
    Completion(CompletionKind),
    Named(NamedDialect),
}

impl GenerateEndpoint {
    fn path(self) -> &'static str {
        match self {
            Self::Completion(CompletionKind::Chat) => CHAT,
            Self::Completion(CompletionKind::Text) => TEXT,
            Self::Named(NamedDialect::Responses) => RESPONSES,
            Self::Named(NamedDialect::Messages) => MESSAGES,
        }
    }

    /// Returns the prefix of response ids.
    fn id_prefix(self) -> &'static str {
        match self {
            Self::Completion(CompletionKind::Chat) => "chatcmpl-",
            Self::Completion(CompletionKind::Text) => "cmpl-",
            Self::Named(NamedDialect::Responses) => "resp_",
            Self::Named(NamedDialect::Messages) => "msg_",
        }
    }

    /// Returns how the prompt of a request ends.
    fn ending(self, extras: &Extras, body: &[u8]) -> Result<ChatEnding, RequestRejection> {
        match self {
            Self::Completion(CompletionKind::Text) => Ok(ChatEnding::Nothing),
            Self::Completion(CompletionKind::Chat) => extras.chat_ending(body),
            Self::Named(_) => Ok(ChatEnding::Heading),
        }
    }

    fn whole(self, header: &AnswerHeader, end: LatestProgress) -> Value {
        match self {
            Self::Completion(kind) => kind.whole(header, end),
            Self::Named(dialect) => dialect.whole(header, end),
        }
    }

    fn stream(self, ticket: RequestGuard, header: AnswerHeader, usage: UsageOptions) -> Body {
        match self {
            Self::Completion(kind) => {
                let events = CompletionEvents::new(header, kind, usage);
                Body::from_stream(AnswerStream::new(ticket, events))
            }
            Self::Named(dialect) => {
                let events = NamedEvents::new(header, dialect);
                Body::from_stream(AnswerStream::new(ticket, events))
            }
        }
    }

    /// Returns the stream of a response that has ended.
    fn stream_of(self, header: AnswerHeader, usage: UsageOptions, end: LatestProgress) -> Body {
        Body::from(match self {
            Self::Completion(kind) => CompletionEvents::new(header, kind, usage).write(end),
            Self::Named(dialect) => NamedEvents::new(header, dialect).write(end),
        })
    }
}

#[derive(Debug, serde::Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

impl EngineServer {
    /// Creates the server of an engine with `ranks` and `options`, which listens on `address`.
    #[must_use]
    pub(super) fn new(
        ranks: Ranks,
        options: &EngineOptions,
        (address, rooms): (SocketAddr, Option<EngineRooms>),
    ) -> Self {
        let connector = options.transfer;
        let names = options.lora.names.iter();
        Self {
            ranks,
            model: options.model.clone(),
            adapters: names.map(|name| Arc::from(&**name)).collect(),
            max_loras: options.lora.max_loras,
            shape: options.shape,
            seed: options.seed,
            requests: AtomicU64::new(0),
            connector: connector.map(|it| Connector::new(it, address, options.speed)),
            rooms,
        }
    }

    /// Returns the router with all routes of the engine.
    pub(super) fn routes(self) -> Router {
        let empty = || async { StatusCode::OK };
        let version = || async { Json(json!({ "version": env!("CARGO_PKG_VERSION") })) };
        let generate = |endpoint| {
            post(move |surface, headers, body| Self::generate(surface, endpoint, headers, body))
        };
        let detail = |status, detail| async move { (status, Json(json!({ "detail": detail }))) };
        let completion = GenerateEndpoint::Completion;
        let endpoints = [
            completion(CompletionKind::Chat),
            completion(CompletionKind::Text),
            GenerateEndpoint::Named(NamedDialect::Responses),
            GenerateEndpoint::Named(NamedDialect::Messages),
        ];
        let router = endpoints
            .into_iter()
            .fold(Router::new(), |router, endpoint| {
                router.route(endpoint.path(), generate(endpoint))
            });
        router
            .route("/health", get(empty))
            .route("/ping", get(empty).post(empty))
            .route("/version", get(version))
            .route("/server_info", get(Self::server_info))
            .route("/load", get(Self::load))
            .route("/metrics", get(Self::metrics))
            .route("/v1/models", get(Self::models))
            .route("/v1/messages/count_tokens", post(Self::count_tokens))
            .route(EMBEDDINGS, post(Self::embed))
            .route("/kv_event_sources", get(Self::kv_event_sources))
            .route("/reset_prefix_cache", post(Self::reset_prefix_cache))
            .route("/debug/prefix", post(Self::prefix))
            .route(TRANSFER_PATH, post(Self::give))
            .route(TOKENIZE, post(Self::tokenize))
            .route("/detokenize", post(Self::detokenize))
            .fallback(Self::unknown)
            .method_not_allowed_fallback(move || {
                detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
            })
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .with_state(Arc::new(self))
    }

    async fn generate(
        State(surface): Shared,
        endpoint: GenerateEndpoint,
        headers: HeaderMap,
        body: BodyRead,
    ) -> Result<Response, RequestRejection> {
        let body = body?;
        let parsed = parse(endpoint.path(), &body)?;
        let adapter = surface.adapter_of(&parsed.model)?;
        let extras = Extras::read(&body)?;
        let rank = surface.ranks.asked(&headers)?;
        let salt = parsed.cache_salt.unwrap_or_default();
        let mut bytes = sequence_bytes(parsed.prompt, endpoint.ending(&extras, &body)?);
        let output = Output::after(&mut bytes, surface.seed);
        let prompt_tokens = token_count(bytes.len());
        let wanted = extras.max_tokens;
        let max_tokens = wanted.unwrap_or_else(|| output.words_to_stop());
        surface.check_length(prompt_tokens, max_tokens)?;
        let scope = (adapter.as_deref().unwrap_or(""), &*salt);
        let sequence = surface.sequence(&bytes, scope).with_output(output);
        let heading = AnswerHeader {
            id: surface.request_id(&headers, endpoint.id_prefix()),
            created_s: unix_time().as_secs(),
            model: parsed.model,
            output,
            prompt_tokens,
        };
        let ending = match wanted {
            Some(_) => Finish::Length,
            None => Finish::Stop,
        };
        let mut job = ComputeJob {
            sequence,
            max_tokens,
            ending,
            adapter,
            is_fetched: surface.fetch(&extras.transfer, prompt_tokens).await?,
        };
        let include = parsed.include_usage.unwrap_or(false);
        let usage = UsageOptions {
            include,
            continuous: include && parsed.continuous_usage.unwrap_or(false),
        };
        if let Some(rooms) = &surface.rooms {
            let room = EngineRooms::of(&body)?;
            if rooms.mode() == RoomMode::Prefill {
                job.max_tokens = 1;
                let end = rooms.compute(rank, job, &room).await?;
                return Ok(match parsed.stream {
                    true => (EVENTS, endpoint.stream_of(heading, usage, end)).into_response(),
                    false => Json(endpoint.whole(&heading, end)).into_response(),
                });
            }
            rooms.fetch(&room).await?;
            job.is_fetched = true;
        }
        let ticket = rank.submit(job);
        if parsed.stream {
            return Ok((EVENTS, endpoint.stream(ticket, heading, usage)).into_response());
        }
        let end = ticket.finished().await;
        let mut answer = endpoint.whole(&heading, end);
        if let Some(connector) = surface
            .connector
            .as_ref()
            .filter(|_| extras.transfer.keeps())
        {
            let blocks = prompt_tokens.div_ceil(surface.shape.block_size);
            answer["kv_transfer_params"] = connector.keep(blocks);
        }
        Ok(Json(answer).into_response())
    }

    /// Fetches a prompt that another engine computed. Returns whether its blocks are available.
    async fn fetch(&self, params: &TransferParams, tokens: u32) -> Result<bool, RequestRejection> {
        let Some(connector) = &self.connector else {
            return Ok(false);
        };
        let fetched = connector.fetch(params, tokens).await;
        fetched.map_err(|message| RequestRejection {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message: message.to_owned(),
            param: None,
        })
    }

    /// Hands a kept prompt over to another engine, or responds 404 if there is no such entry.
    async fn give(State(surface): Shared, Path(entry): Path<String>) -> StatusCode {
        let connector = surface.connector.as_ref();
        match connector.is_some_and(|connector| connector.give(&entry)) {
            true => StatusCode::OK,
            false => StatusCode::NOT_FOUND,
        }
    }

    async fn embed(
        State(surface): Shared,
        headers: HeaderMap,
        body: BodyRead,
    ) -> Result<Json<Value>, RequestRejection> {
        let body = body?;
        let parsed = parse(EMBEDDINGS, &body)?;
        let adapter = surface.adapter_of(&parsed.model)?;
        let rank = surface.ranks.asked(&headers)?;
        let asked: EmbeddingsRequest = read(&body, Some("input"))?;
        asked
            .check_dimensions()
            .map_err(|message| RequestRejection::bad_request(message, Some("dimensions")))?;
        let (form, prompts) = (asked.form(), asked.input.prompts());
        if prompts.is_empty() || prompts.len() > INPUTS_MAX {
            let message = format!("input must have 1 to {INPUTS_MAX} prompts");
            return Err(RequestRejection::bad_request(message, Some("input")));
        }
        let salt = parsed.cache_salt.unwrap_or_default();
        let mut jobs = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let bytes = sequence_bytes(prompt, ChatEnding::Nothing);
            surface.check_length(token_count(bytes.len()), 0)?;
            let sequence = surface.sequence(&bytes, (adapter.as_deref().unwrap_or(""), &salt));
            jobs.push(ComputeJob {
                sequence,
                max_tokens: 0,
                ending: Finish::Stop,
                adapter: adapter.clone(),
                is_fetched: false,
            });
        }
        let submitted = jobs.into_iter().map(|job| {
            let sequence = &job.sequence;
            let (output_seed, tokens) = (sequence.output().seed(), sequence.prompt_tokens());
            (output_seed, tokens, rank.submit(job))
        });
        let submitted: Vec<_> = submitted.collect();
        let (mut data, mut prompt_tokens, mut cached_tokens) = (Vec::new(), 0_u32, 0_u32);
        for (index, (output_seed, tokens, ticket)) in submitted.into_iter().enumerate() {
            prompt_tokens = prompt_tokens.saturating_add(tokens);
            cached_tokens = cached_tokens.saturating_add(ticket.finished().await.cached_tokens);
            data.push(form.entry(index, output_seed));
        }
        Ok(Json(json!({
            "id": surface.request_id(&headers, "embd-"), "object": "list",
            "created": unix_time().as_secs(), "model": parsed.model, "data": data,
            "usage": {
                "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": { "cached_tokens": cached_tokens },
            },
        })))
    }

    async fn count_tokens(
        State(surface): Shared,
        body: BodyRead,
    ) -> Result<Json<Value>, RequestRejection> {
        let parsed = parse(MESSAGES, &body?)?;
        surface.adapter_of(&parsed.model)?;
        let tokens = token_count(sequence_bytes(parsed.prompt, ChatEnding::Heading).len());
        Ok(Json(json!({ "input_tokens": tokens })))
    }

    async fn unknown(method: Method, uri: Uri) -> RequestRejection {
        RequestRejection {
            status: StatusCode::NOT_FOUND,
            message: format!(
                "this is an emulated engine (quorate engine), which has no {method} {}",
                uri.path()
            ),
            param: None,
        }
    }

    /// Returns the sequence of a prompt. It keeps its contents if the engine publishes events.
    fn sequence(&self, bytes: &[u8], adapter_and_salt: (&str, &str)) -> Sequence {
        let new = match self.ranks.first().publisher() {
            Some(_) => Sequence::remembering,
            None => Sequence::of_adapter,
        };
        new(bytes, adapter_and_salt, self.shape.block_size, self.seed)
    }

    /// Responds to SGLang's `/server_info` with the fields that a router needs; 404 without rooms.
    async fn server_info(State(surface): Shared) -> Response {
        let Some(rooms) = &surface.rooms else {
            return StatusCode::NOT_FOUND.into_response();
        };
        Json(json!({
            "disaggregation_mode": rooms.mode().label(),
            "disaggregation_bootstrap_port": rooms.address().port(),
        }))
        .into_response()
    }

    async fn load(State(surface): Shared) -> Json<Value> {
        let ranks = surface.ranks.all().iter();
        let load: u32 = ranks.map(|rank| *rank.watch_open().borrow()).sum();
        Json(json!({ "server_load": load }))
    }

    async fn reset_prefix_cache(State(surface): Shared) -> StatusCode {
        let ranks = surface.ranks.all().iter();
        let held = ranks.filter(|rank| !rank.reset_cache()).count();
        match held == 0 {
            true => StatusCode::OK,
            false => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Responds to `POST /debug/prefix`, which vLLM lacks, with the number of leading blocks of a
    /// prompt that are cached, and the number of cached hashes.
    async fn prefix(
        State(surface): Shared,
        headers: HeaderMap,
        body: BodyRead,
    ) -> Result<Json<Value>, RequestRejection> {
        let body = body?;
        let rank = surface.ranks.asked(&headers)?;
        let parsed = parse(TOKENIZE, &body)?;
        let salt = parsed.cache_salt.unwrap_or_default();
        let bytes = sequence_bytes(parsed.prompt, tokenize_ending(&body)?);
        let adapter = surface.adapter_of(&parsed.model).ok().flatten();
        let adapter = adapter.as_deref().unwrap_or("");
        let sequence = surface.sequence(&bytes, (adapter, &salt));
        let (blocks, all) = rank.look(|scheduler| {
            (
                scheduler.cached_prefix(&sequence),
                scheduler.cached_hashes(),
            )
        });
        Ok(Json(json!({ "blocks": blocks, "cached_hashes": all })))
    }

    /// Lists the publishers of KV events by data-parallel rank, as vLLM does.
    async fn kv_event_sources(State(surface): Shared) -> Json<Value> {
        let source = |publisher: &Publisher| {
            json!({
                "enable_kv_cache_events": true,
                "publisher": "zmq",
                "endpoint": format!("tcp://*:{}", publisher.events_at().port()),
                "replay_endpoint": publisher.replay_at().map(|at| format!("tcp://*:{}", at.port())),
                "buffer_steps": REPLAY_MESSAGES,
                "topic": TOPIC,
            })
        };
        let ranks = surface.ranks.publishers().enumerate();
        let sources: serde_json::Map<String, Value> = ranks
            .map(|(rank, publisher)| (rank.to_string(), source(publisher)))
            .collect();
        Json(match sources.is_empty() {
            true => json!({ "0": { "enable_kv_cache_events": false } }),
            false => Value::Object(sources),
        })
    }

    async fn tokenize(
        State(surface): Shared,
        body: BodyRead,
    ) -> Result<Json<Value>, RequestRejection> {
        let body = body?;
        let parsed = parse(TOKENIZE, &body)?;
        surface.adapter_of(&parsed.model)?;
        let tokens = token_ids(&sequence_bytes(parsed.prompt, tokenize_ending(&body)?));
        Ok(Json(json!({
            "count": tokens.len(),
            "max_model_len": surface.ranks.first().tokens_max(),
            "tokens": tokens,
            "token_strs": null,
        })))
    }

    async fn detokenize(body: BodyRead) -> Result<Json<Value>, RequestRejection> {
        let Detokenize { tokens } = read(&body?, Some("tokens"))?;
        Ok(Json(json!({ "prompt": detokenize(&tokens) })))
    }

    /// Returns the LoRA adapter named `model`; `None` for the base model; 404 for other names.
    fn adapter_of(&self, model: &str) -> Result<Option<Arc<str>>, RequestRejection> {
        if model == self.model {
            return Ok(None);
        }
        if let Some(adapter) = self.adapters.iter().find(|adapter| ***adapter == *model) {
            return Ok(Some(Arc::clone(adapter)));
        }
        Err(RequestRejection {
            status: StatusCode::NOT_FOUND,
            message: format!("The model `{model}` does not exist."),
            param: Some("model".to_owned()),
        })
    }

    fn check_length(&self, prompt_tokens: u32, max_tokens: u32) -> Result<(), RequestRejection> {
        if prompt_tokens == 0 {
            return Err(RequestRejection::bad_request(
                "The decoder prompt cannot be empty",
                Some("prompt"),
            ));
        }
        let most = self.ranks.first().tokens_max();
        if prompt_tokens.saturating_add(max_tokens) <= most {
            return Ok(());
        }
        Err(RequestRejection::bad_request(
            format!(
                "This model's maximum context length is {most} tokens. However, you requested \
                 {max_tokens} output tokens and your prompt contains {prompt_tokens} input tokens."
            ),
            Some("input_tokens"),
        ))
    }

    fn request_id(&self, headers: &HeaderMap, prefix: &str) -> String {
        let given = headers.get(X_REQUEST_ID).and_then(|id| id.to_str().ok());
        match given.filter(|id| id.len() <= REQUEST_ID_BYTES_MAX) {
            Some(id) => format!("{prefix}{id}"),
            None => {
                let number = self.requests.fetch_add(1, Ordering::Relaxed);
                format!(
                    "{prefix}{:016x}",
                    number.wrapping_mul(0x9E37_79B9_7F4A_7C15)
                )
            }
        }
    }

    async fn models(State(surface): Shared) -> Json<Value> {
        let listed = |name: &str, parent: Option<&str>| {
            json!({
                "id": name,
                "object": "model",
                "created": unix_time().as_secs(),
                "owned_by": if surface.rooms.is_some() { "sglang" } else { "vllm" },
                "root": name,
                "parent": parent,
                "max_model_len": surface.ranks.first().tokens_max(),
                "permission": [],
            })
        };
        let mut data = vec![listed(&surface.model, None)];
        let adapters = surface.adapters.iter();
        data.extend(adapters.map(|adapter| listed(adapter, Some(&surface.model))));
        Json(json!({ "object": "list", "data": data }))
    }

    async fn metrics(State(surface): Shared) -> impl IntoResponse {
        let series = surface.ranks.first().lora_series();
        let stats = surface.ranks.stats();
        let has_adapters = !surface.adapters.is_empty();
        let page = EngineMetricsPage {
            model: &surface.model,
            shape: surface.shape,
            started_s: surface.ranks.first().started_s(),
            stats: &stats,
            lora: has_adapters.then_some((surface.max_loras, &series)),
        };
        let page = match &surface.rooms {
            Some(rooms) => page.render_sglang(rooms.mode().label()),
            None => page.render(),
        };
        (METRICS, page)
    }
}

/// Serves the HTTP requests of one connection until it ends or `stop` is cancelled.
pub(super) async fn serve(
    routes: Router,
    socket: TcpStream,
    keep_alive: Duration,
    stop: CancellationToken,
) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(keep_alive)
        .serve_connection(TokioIo::new(socket), TowerToHyperService::new(routes));
    // The client has disconnected or does not speak HTTP; neither needs a report.
    let _ = stop.run_until_cancelled(connection).await;
}

fn parse(path: &str, body: &Bytes) -> Result<ParsedBody, RequestRejection> {
    api::prompt::parse(path, body)
        .map_err(|bad| RequestRejection::bad_request(bad.message, bad.param.as_deref()))
}
