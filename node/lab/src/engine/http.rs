//! The engine's HTTP surface: vLLM's routes on hyper, one connection task each.
//!
//! A client that leaves is noticed by hyper while a handler waits as well as while it streams; its
//! future or body is dropped, which aborts the request in the scheduler. Idle connections are closed
//! after the keep-alive time, as uvicorn does under vLLM.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use api::prompt::{Parsed, ReplyShape};
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::answer::{Answer, EventStream, Heading, Kind, UsageOptions, error_body};
use super::driver::{Core, unix_time};
use super::events::{REPLAY_MESSAGES, TOPIC};
use super::metrics::Page;
use super::model::{Finish, Job, Shape};
use super::text::{Sequence, detokenize, sequence_bytes, token_count, token_ids};

/// Largest request body, as vLLM limits it.
const BODY_BYTES_MAX: usize = 32 << 20;
/// Tokens made when the client names no limit.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Longest `x-request-id` that becomes part of an answer's id.
const REQUEST_ID_BYTES_MAX: usize = 128;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");
const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// What every connection shares.
#[derive(Debug)]
pub(super) struct Surface {
    core: Arc<Core>,
    model: String,
    shape: Shape,
    seed: u64,
    requests: AtomicU64,
}

/// A request refused, in vLLM's words.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    message: String,
    param: Option<String>,
}

impl Refusal {
    fn bad_request(message: impl Into<String>, param: Option<&str>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: param.map(str::to_owned),
        }
    }
}

/// Fields the routing parser has no use for.
#[derive(Debug, serde::Deserialize)]
struct Extras {
    n: Option<i64>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
}

/// Whether a question for tokens is one for a chat's prompt.
#[derive(Debug, serde::Deserialize)]
struct Tokenize {
    messages: Option<serde_json::Value>,
    add_generation_prompt: Option<bool>,
}

#[derive(Debug, serde::Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

impl Surface {
    /// The surface of an engine that serves `model` on `core`.
    #[must_use]
    pub(super) fn new(core: Arc<Core>, model: String, shape: Shape, seed: u64) -> Self {
        Self {
            core,
            model,
            shape,
            seed,
            requests: AtomicU64::new(0),
        }
    }

    /// Serves one connection until it ends or `stop` is cancelled.
    pub(super) async fn serve(
        self: Arc<Self>,
        socket: TcpStream,
        keep_alive: Duration,
        stop: CancellationToken,
    ) {
        let service = service_fn(|request| {
            let surface = self.clone();
            async move { Ok::<_, Infallible>(surface.answer(request).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(keep_alive)
            .serve_connection(TokioIo::new(socket), service);
        // An error here is a client that left or spoke no HTTP: nothing to tell anybody.
        let _ = stop.run_until_cancelled(connection).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Answer> {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let answer = match (&method, path.as_str()) {
            (&Method::GET, "/health") | (&Method::GET | &Method::POST, "/ping") => {
                Ok(respond(JSON, Bytes::new()))
            }
            (&Method::GET, "/version") => Ok(respond_json(
                &json!({ "version": env!("CARGO_PKG_VERSION") }),
            )),
            (&Method::GET, "/load") => {
                let load = *self.core.watch_open().borrow();
                Ok(respond_json(&json!({ "server_load": load })))
            }
            (&Method::GET, "/metrics") => Ok(respond(METRICS, Bytes::from(self.metrics()))),
            (&Method::GET, "/v1/models") => Ok(respond_json(&self.models())),
            (&Method::POST, "/v1/chat/completions") => self.complete(request, Kind::Chat).await,
            (&Method::POST, "/v1/completions") => self.complete(request, Kind::Text).await,
            (&Method::GET, "/kv_event_sources") => Ok(respond_json(&self.kv_event_sources())),
            (&Method::POST, "/reset_prefix_cache") => Ok(match self.core.reset_cache() {
                true => respond(JSON, Bytes::new()),
                false => busy(),
            }),
            (&Method::POST, "/debug/prefix") => self.prefix(request).await,
            (&Method::POST, "/tokenize") => self.tokenize(request).await,
            (&Method::POST, "/detokenize") => Self::detokenize(request).await,
            (_, known) => return not_routed(known),
        };
        answer.unwrap_or_else(|refusal| refuse(&refusal))
    }

    async fn complete(
        &self,
        request: Request<Incoming>,
        kind: Kind,
    ) -> Result<Response<Answer>, Refusal> {
        let path = request.uri().path().to_owned();
        let id = self.request_id(&request, kind);
        let body = read_body(request).await?;
        let parsed = parse(&path, &body)?;
        self.check_model(&parsed.model)?;
        let wanted = check_extras(&body)?;
        let salt = parsed.cache_salt.unwrap_or_default();
        let bytes = sequence_bytes(parsed.prompt, parsed.reply == ReplyShape::Message);
        let prompt_tokens = token_count(bytes.len());
        let max_tokens = wanted.unwrap_or(DEFAULT_MAX_TOKENS);
        self.check_length(prompt_tokens, max_tokens)?;
        let sequence = self.sequence(&bytes, &salt);
        let heading = Heading {
            kind,
            id,
            created_s: unix_time().as_secs(),
            model: self.model.clone(),
            voice: sequence.voice(),
            prompt_tokens,
        };
        let ending = if wanted.is_some() {
            Finish::Length
        } else {
            Finish::Stop
        };
        let ticket = self.core.submit(Job {
            sequence,
            max_tokens,
            ending,
        });
        if parsed.stream {
            let include = parsed.include_usage.unwrap_or(false);
            let usage = UsageOptions {
                include,
                continuous: include && parsed.continuous_usage.unwrap_or(false),
            };
            let stream = EventStream::new(ticket, heading, usage);
            let mut response = Response::new(Answer::Events(Box::new(stream)));
            response.headers_mut().insert(CONTENT_TYPE, EVENTS);
            return Ok(response);
        }
        let end = ticket.finished().await;
        Ok(respond(JSON, heading.whole(end)))
    }

    /// A request's sequence. What it holds is remembered where somebody is told.
    fn sequence(&self, bytes: &[u8], salt: &str) -> Sequence {
        let new = match self.core.publisher() {
            Some(_) => Sequence::remembering,
            None => Sequence::new,
        };
        new(bytes, salt, self.shape.block_size, self.seed)
    }

    /// `POST /debug/prefix`, which vLLM does not have: what of a would-be request stands in the cache.
    async fn prefix(&self, request: Request<Incoming>) -> Result<Response<Answer>, Refusal> {
        let body = read_body(request).await?;
        let asked: Tokenize = serde_json::from_slice(&body)
            .map_err(|error| Refusal::bad_request(error.to_string(), None))?;
        let path = match asked.messages {
            Some(_) => "/v1/chat/completions",
            None => "/v1/completions",
        };
        let parsed = parse(path, &body)?;
        let salt = parsed.cache_salt.unwrap_or_default();
        let bytes = sequence_bytes(parsed.prompt, parsed.reply == ReplyShape::Message);
        let sequence = self.sequence(&bytes, &salt);
        let (blocks, all) = self.core.look(|scheduler| {
            (
                scheduler.cached_prefix(&sequence),
                scheduler.cached_hashes(),
            )
        });
        Ok(respond_json(
            &json!({ "blocks": blocks, "cached_hashes": all }),
        ))
    }

    /// As vLLM's: which publishers there are, by data-parallel rank.
    fn kv_event_sources(&self) -> serde_json::Value {
        match self.core.publisher() {
            Some(publisher) => json!({ "0": {
                "enable_kv_cache_events": true,
                "publisher": "zmq",
                "endpoint": format!("tcp://*:{}", publisher.events_at().port()),
                "replay_endpoint": publisher.replay_at().map(|at| format!("tcp://*:{}", at.port())),
                "buffer_steps": REPLAY_MESSAGES,
                "topic": TOPIC,
            }}),
            None => json!({ "0": { "enable_kv_cache_events": false } }),
        }
    }

    async fn tokenize(&self, request: Request<Incoming>) -> Result<Response<Answer>, Refusal> {
        let path = request.uri().path().to_owned();
        let body = read_body(request).await?;
        let parsed = parse(&path, &body)?;
        self.check_model(&parsed.model)?;
        let asked: Tokenize = serde_json::from_slice(&body)
            .map_err(|error| Refusal::bad_request(error.to_string(), None))?;
        let is_chat = asked.messages.is_some() && asked.add_generation_prompt.unwrap_or(true);
        let tokens = token_ids(&sequence_bytes(parsed.prompt, is_chat));
        Ok(respond_json(&json!({
            "count": tokens.len(),
            "max_model_len": self.core.tokens_max(),
            "tokens": tokens,
            "token_strs": null,
        })))
    }

    async fn detokenize(request: Request<Incoming>) -> Result<Response<Answer>, Refusal> {
        let body = read_body(request).await?;
        let Detokenize { tokens } = serde_json::from_slice(&body)
            .map_err(|error| Refusal::bad_request(error.to_string(), Some("tokens")))?;
        Ok(respond_json(&json!({ "prompt": detokenize(&tokens) })))
    }

    fn check_model(&self, model: &str) -> Result<(), Refusal> {
        if model == self.model {
            return Ok(());
        }
        Err(Refusal {
            status: StatusCode::NOT_FOUND,
            message: format!("The model `{model}` does not exist."),
            param: Some("model".to_owned()),
        })
    }

    fn check_length(&self, prompt_tokens: u32, max_tokens: u32) -> Result<(), Refusal> {
        if prompt_tokens == 0 {
            return Err(Refusal::bad_request(
                "The decoder prompt cannot be empty",
                Some("prompt"),
            ));
        }
        let most = self.core.tokens_max();
        if prompt_tokens.saturating_add(max_tokens) <= most {
            return Ok(());
        }
        Err(Refusal::bad_request(
            format!(
                "This model's maximum context length is {most} tokens. However, you requested \
                 {max_tokens} output tokens and your prompt contains {prompt_tokens} input tokens."
            ),
            Some("input_tokens"),
        ))
    }

    fn request_id(&self, request: &Request<Incoming>, kind: Kind) -> String {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Text => "cmpl",
        };
        let given = request
            .headers()
            .get(X_REQUEST_ID)
            .and_then(|id| id.to_str().ok());
        match given.filter(|id| id.len() <= REQUEST_ID_BYTES_MAX) {
            Some(id) => format!("{prefix}-{id}"),
            None => {
                let number = self.requests.fetch_add(1, Ordering::Relaxed);
                format!(
                    "{prefix}-{:016x}",
                    number.wrapping_mul(0x9E37_79B9_7F4A_7C15)
                )
            }
        }
    }

    fn models(&self) -> serde_json::Value {
        json!({
            "object": "list",
            "data": [{
                "id": self.model,
                "object": "model",
                "created": unix_time().as_secs(),
                "owned_by": "vllm",
                "root": self.model,
                "parent": null,
                "max_model_len": self.core.tokens_max(),
                "permission": [],
            }],
        })
    }

    fn metrics(&self) -> String {
        let stats = self.core.stats();
        Page {
            model: &self.model,
            shape: self.shape,
            started_s: self.core.started_s(),
            stats,
        }
        .render()
    }
}

async fn read_body(request: Request<Incoming>) -> Result<Bytes, Refusal> {
    let limited = Limited::new(request.into_body(), BODY_BYTES_MAX);
    match limited.collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            message: format!("Request body is larger than {BODY_BYTES_MAX} bytes"),
            param: None,
        }),
        Err(error) => Err(Refusal::bad_request(format!("read body: {error}"), None)),
    }
}

fn parse(path: &str, body: &Bytes) -> Result<Parsed, Refusal> {
    api::prompt::parse(path, body)
        .map_err(|bad| Refusal::bad_request(bad.message, bad.param.as_deref()))
}

/// Refuses what this engine cannot do; answers the client's limit of tokens.
fn check_extras(body: &[u8]) -> Result<Option<u32>, Refusal> {
    let extras: Extras = serde_json::from_slice(body)
        .map_err(|error| Refusal::bad_request(error.to_string(), None))?;
    if extras.n.is_some_and(|n| n != 1) {
        return Err(Refusal::bad_request(
            "this engine makes one choice: n must be 1",
            Some("n"),
        ));
    }
    let Some(wanted) = extras.max_completion_tokens.or(extras.max_tokens) else {
        return Ok(None);
    };
    let whole = u32::try_from(wanted).ok().filter(|wanted| *wanted > 0);
    whole.map(Some).ok_or_else(|| {
        let message = format!("max_tokens must be at least 1, got {wanted}.");
        Refusal::bad_request(message, Some("max_tokens"))
    })
}

fn not_routed(path: &str) -> Response<Answer> {
    let allow = match path {
        "/health" | "/version" | "/load" | "/metrics" | "/v1/models" | "/kv_event_sources" => "GET",
        "/reset_prefix_cache" | "/debug/prefix" => "POST",
        "/ping" => "GET, POST",
        "/v1/chat/completions" | "/v1/completions" | "/tokenize" | "/detokenize" => "POST",
        _ => {
            let mut response = respond_json(&json!({ "detail": "Not Found" }));
            *response.status_mut() = StatusCode::NOT_FOUND;
            return response;
        }
    };
    let mut response = respond_json(&json!({ "detail": "Method Not Allowed" }));
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response
        .headers_mut()
        .insert(ALLOW, HeaderValue::from_static(allow));
    response
}

fn refuse(refusal: &Refusal) -> Response<Answer> {
    let status = refusal.status;
    let body = error_body(status.as_u16(), &refusal.message, refusal.param.as_deref());
    let mut response = respond(JSON, body);
    *response.status_mut() = status;
    response
}

fn respond_json(value: &serde_json::Value) -> Response<Answer> {
    respond(JSON, Bytes::from(value.to_string()))
}

fn respond(content_type: HeaderValue, body: Bytes) -> Response<Answer> {
    let mut response = Response::new(Answer::from(body));
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// A cache that is in use is not reset.
fn busy() -> Response<Answer> {
    let mut response = respond(JSON, Bytes::new());
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}
