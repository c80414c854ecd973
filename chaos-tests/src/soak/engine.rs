//! The engines of a soak. They record the tokens that they compute for each request, to check
//! charges. Some prompts make them misbehave.
//!
//! An engine has a few places and makes one token at a time while its request is open. Like a real
//! one, it does not wait for its reader. It has no cache.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

/// Name of the model that the engines serve.
pub(super) const MODEL: &str = "soaked";
/// Maximum number of concurrent requests of an engine.
pub(super) const PLACES: usize = 4;
/// Time to first token of a response.
pub(super) const PREFILL: Duration = Duration::from_millis(50);
/// Time between two tokens of a response.
pub(super) const DECODE: Duration = Duration::from_millis(20);
/// Text in a prompt on which the engine breaks the connection.
pub(super) const POISON: &str = "(poison)";
/// Text in a prompt that the engine answers with a 500 response.
pub(super) const FAILING: &str = "(failing)";
/// Text in a prompt that the engine answers with large tokens, which a slow reader cannot read
/// within seconds.
pub(super) const LARGE_TOKENS: &str = "(fat)";
/// Number of extra bytes in a large token.
const LARGE_TOKEN_BYTES: usize = 8 << 10;
/// Number of bytes per prompt token.
const TOKEN_BYTES: usize = 4;
/// Number of bytes after the usage in a response with the prompt's logprobs.
const LOGPROBS_BYTES: usize = 400 << 10;
/// Idle timeout of connections as in vLLM, which is a little longer than the router keeps them.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

type EngineResponse = Response<BoxBody<Bytes, Infallible>>;

/// Work of all engines for one request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ComputedRequest {
    /// Number of prompt tokens, counted each time the request reached an engine.
    pub(super) seen: u64,
    /// Number of prompt tokens, counted each time an engine computed them.
    pub(super) prompt: u64,
    /// Number of output tokens.
    pub(super) output: u64,
    /// Number of times that an engine began with the request.
    pub(super) runs: u32,
    /// Time at which an engine last began with the request; `None` if none has.
    pub(super) began: Option<Instant>,
}

/// Work of all engines, by request.
#[derive(Debug, Default)]
pub(super) struct ComputedTokens(Mutex<HashMap<String, ComputedRequest>>);

impl ComputedTokens {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<String, ComputedRequest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn saw(&self, request: &str, prompt: u64) {
        self.lock().entry(request.to_owned()).or_default().seen += prompt;
    }

    fn began(&self, request: &str, prompt: u64) {
        if let Some(computed) = self.lock().get_mut(request) {
            computed.prompt += prompt;
            computed.runs += 1;
            computed.began = Some(Instant::now());
        }
    }

    fn made(&self, request: &str) {
        if let Some(computed) = self.lock().get_mut(request) {
            computed.output += 1;
        }
    }
}

/// A running engine, which stops when dropped.
#[derive(Debug)]
pub(super) struct SoakEngine {
    pub(super) at: SocketAddr,
    _accepts: AbortOnDropHandle<()>,
}

struct EngineShared {
    places: Arc<Semaphore>,
    ledger: Arc<ComputedTokens>,
}

/// A request as an engine reads it.
struct EngineRequest {
    id: String,
    prompt: u64,
    tokens: u64,
    is_streamed: bool,
    /// Whether the request asks for usage in every chunk.
    is_told_running: bool,
    is_told_at_end: bool,
    wants_logprobs: bool,
    text: String,
}

impl SoakEngine {
    /// Starts an engine on a free port.
    pub(super) async fn start(ledger: Arc<ComputedTokens>) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let at = listener.local_addr()?;
        let core = Arc::new(EngineShared {
            places: Arc::new(Semaphore::new(PLACES)),
            ledger,
        });
        let accepts = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((socket, _)) => drop(tokio::spawn(serve(core.clone(), socket))),
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
            }
        });
        Ok(Self {
            at,
            _accepts: AbortOnDropHandle::new(accepts),
        })
    }
}

async fn serve(core: Arc<EngineShared>, socket: TcpStream) {
    let service = service_fn(move |request| answer(core.clone(), request));
    // Ignores errors, because the other connections go on.
    let _ = socket.set_nodelay(true);
    let _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(KEEP_ALIVE)
        .serve_connection(TokioIo::new(socket), service)
        .await;
}

async fn answer(core: Arc<EngineShared>, request: Request<Incoming>) -> io::Result<EngineResponse> {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/health") => Ok(whole(Bytes::new())),
        (&Method::GET, "/v1/models") => {
            let models = json!({ "object": "list", "data": [{ "id": MODEL, "object": "model" }] });
            Ok(whole(models.to_string().into()))
        }
        (&Method::POST, "/v1/chat/completions") => complete(core, request).await,
        _ => Ok(refused(StatusCode::NOT_FOUND)),
    }
}

async fn complete(
    core: Arc<EngineShared>,
    request: Request<Incoming>,
) -> io::Result<EngineResponse> {
    let Some(asked) = EngineRequest::read(request).await else {
        return Ok(refused(StatusCode::BAD_REQUEST));
    };
    core.ledger.saw(&asked.id, asked.prompt);
    let place = core.places.clone().acquire_owned().await;
    let place = place.map_err(io::Error::other)?;
    core.ledger.began(&asked.id, asked.prompt);
    sleep(PREFILL).await;
    if asked.text.contains(POISON) {
        return Err(io::Error::other("the engine died"));
    }
    if asked.text.contains(FAILING) {
        return Ok(refused(StatusCode::INTERNAL_SERVER_ERROR));
    }
    if !asked.is_streamed {
        for _ in 0..asked.tokens {
            sleep(DECODE).await;
            core.ledger.made(&asked.id);
        }
        return Ok(whole(asked.document().into()));
    }
    Ok(stream_of(core, asked, place))
}

/// Streams tokens, whether or not they are read, until the request is closed.
fn stream_of(
    core: Arc<EngineShared>,
    asked: EngineRequest,
    place: OwnedSemaphorePermit,
) -> EngineResponse {
    let (send, receive) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let _place = place;
        for made in 1..=asked.tokens {
            tokio::select! {
                biased;
                () = send.closed() => return,
                () = sleep(DECODE) => {}
            }
            core.ledger.made(&asked.id);
            if send.send(asked.chunk(made)).is_err() {
                return;
            }
        }
        // The client may have left by now.
        let _ = send.send(asked.end());
    });
    let frames = stream::unfold(receive, |mut receive| async move {
        let bytes: Bytes = receive.recv().await?;
        Some((Ok(Frame::data(bytes)), receive))
    });
    let mut answer = Response::new(BodyExt::boxed(StreamBody::new(frames)));
    let events = http::HeaderValue::from_static("text/event-stream");
    answer.headers_mut().insert(CONTENT_TYPE, events);
    answer
}

impl EngineRequest {
    async fn read(request: Request<Incoming>) -> Option<Self> {
        let id = request.headers().get("x-request-id")?;
        let id = id.to_str().ok()?.to_owned();
        // Longer than any client of a soak takes to send.
        let body = timeout(Duration::from_secs(60), request.into_body().collect());
        let body: Value = serde_json::from_slice(&body.await.ok()?.ok()?.to_bytes()).ok()?;
        let text = body["messages"][0]["content"].as_str()?.to_owned();
        let options = &body["stream_options"];
        Some(Self {
            id,
            prompt: text.len().div_ceil(TOKEN_BYTES) as u64,
            tokens: body["max_tokens"].as_u64().unwrap_or(16),
            is_streamed: body["stream"] == true,
            is_told_running: options["continuous_usage_stats"] == true,
            is_told_at_end: options["include_usage"] == true,
            wants_logprobs: body["prompt_logprobs"].as_u64().is_some(),
            text,
        })
    }

    fn usage(&self, made: u64) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": made,
            "total_tokens": self.prompt + made,
            "prompt_tokens_details": { "cached_tokens": 0 },
        })
    }

    fn chunk(&self, made: u64) -> Bytes {
        let mut chunk = json!({
            "id": self.id, "object": "chat.completion.chunk", "model": MODEL,
            "choices": [{ "index": 0, "delta": { "content": "word " }, "finish_reason": null }],
        });
        if self.text.contains(LARGE_TOKENS) {
            chunk["padding"] = " ".repeat(LARGE_TOKEN_BYTES).into();
        }
        if self.is_told_running {
            chunk["usage"] = self.usage(made);
        }
        format!("data: {chunk}\n\n").into()
    }

    fn end(&self) -> Bytes {
        let mut end = String::new();
        if self.is_told_at_end {
            let chunk = json!({
                "id": self.id, "object": "chat.completion.chunk", "model": MODEL,
                "choices": [], "usage": self.usage(self.tokens),
            });
            end = format!("data: {chunk}\n\n");
        }
        (end + "data: [DONE]\n\n").into()
    }

    /// Returns the response; vLLM writes prompt data after the usage.
    fn document(&self) -> String {
        let words = "word ".repeat(usize::try_from(self.tokens).unwrap_or(0));
        let mut document = json!({
            "id": self.id, "object": "chat.completion", "model": MODEL,
            "choices": [{
                "index": 0, "message": { "role": "assistant", "content": words },
                "finish_reason": "length",
            }],
            "usage": self.usage(self.tokens),
        });
        if self.wants_logprobs {
            document["prompt_logprobs"] = "-1.0 ".repeat(LOGPROBS_BYTES / 5).into();
        }
        document.to_string()
    }
}

fn whole(body: Bytes) -> EngineResponse {
    let mut answer = Response::new(Full::new(body).boxed());
    let json = http::HeaderValue::from_static("application/json");
    answer.headers_mut().insert(CONTENT_TYPE, json);
    answer
}

fn refused(status: StatusCode) -> EngineResponse {
    let error = json!({ "error": { "message": "refused by the engine", "code": status.as_u16() } });
    let mut answer = whole(error.to_string().into());
    *answer.status_mut() = status;
    answer
}
