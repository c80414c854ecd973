//! The engines of hostile tests. They record which requests they saw and what they computed, and
//! misbehave as a request demands: by the beginning of its id, or by a mark in its prompt.
//!
//! An engine has a few places and makes one token at a time while its request is open. Like a real
//! one, it does not wait for its reader. It has no cache.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::record::EngineRecord;

/// Name of the model that the engines serve.
pub(super) const MODEL: &str = "hostile";
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
/// Maximum number of bytes written of an endless response. The router must disconnect long before.
const ENDLESS_BYTES_MAX: usize = 64 << 20;
/// Maximum length of a request's head, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Number of chunks in a response that is larger than all buffers on the way to its reader.
const FAT_PIECES: usize = 512;
const PIECE_BYTES: usize = 64 << 10;
/// Idle timeout of connections as in vLLM, which is a little longer than the router keeps them.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Maximum time for a request's body, which is longer than any client takes.
const BODY_PATIENCE: Duration = Duration::from_secs(60);

const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const REDIRECT: &str = "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\n\
                        content-length: 0\r\n\r\n";
/// Body of a response with impossible usage counts.
const ABSURD: &str = r#"{"id":"1","object":"chat.completion","model":"hostile","choices":[{"index":0,"message":{"role":"assistant","content":"word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":9223372036854775807,"total_tokens":-5,"prompt_tokens_details":{"cached_tokens":1e308}}}"#;

/// Concurrency and speed of an engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct EngineSpeed {
    /// Maximum number of concurrent requests.
    pub(super) places: usize,
    /// Time to first token of a response.
    pub(super) prefill: Duration,
    /// Time between two tokens of a response.
    pub(super) decode: Duration,
}

impl EngineSpeed {
    /// No limit, and no time for any token.
    pub(super) const INSTANT: Self = Self {
        places: Semaphore::MAX_PERMITS,
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
    };
}

/// A running engine, which stops when dropped.
#[derive(Debug)]
pub(super) struct HostileEngine {
    pub(super) at: SocketAddr,
    _accepts: AbortOnDropHandle<()>,
}

struct EngineShared {
    speed: EngineSpeed,
    places: Semaphore,
    record: Arc<EngineRecord>,
}

impl HostileEngine {
    /// Starts an engine on a free port.
    pub(super) async fn start(speed: EngineSpeed, record: Arc<EngineRecord>) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let at = listener.local_addr()?;
        let shared = Arc::new(EngineShared {
            speed,
            places: Semaphore::new(speed.places),
            record,
        });
        let accepts = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    // Ignores errors, because the other connections go on.
                    Ok((socket, _)) => drop(tokio::spawn(serve(shared.clone(), socket))),
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

async fn serve(shared: Arc<EngineShared>, socket: TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let mut connection = EngineConnection {
        socket,
        read: Vec::new(),
    };
    while let Some(head) = timeout(KEEP_ALIVE, connection.head()).await?? {
        let line = head.lines().next().unwrap_or_default();
        let answer = match line.split(' ').nth(1) {
            _ if line.starts_with("POST ") => match connection.answer(&shared, head).await? {
                true => continue,
                false => return Ok(()),
            },
            Some("/health") => document("200 OK", ""),
            Some("/v1/models") => {
                let models =
                    json!({ "object": "list", "data": [{ "id": MODEL, "object": "model" }] });
                document("200 OK", &models.to_string())
            }
            _ => refused("404 Not Found"),
        };
        connection.socket.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}

/// A connection, and the bytes read from it that no request has used.
struct EngineConnection {
    socket: TcpStream,
    read: Vec<u8>,
}

impl EngineConnection {
    async fn head(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(at) = self.read.windows(4).position(|it| it == b"\r\n\r\n") {
                let head: Vec<u8> = self.read.drain(..at + 4).collect();
                return Ok(Some(String::from_utf8_lossy(&head).into_owned()));
            }
            let is_over = self.socket.read_buf(&mut self.read).await? == 0;
            if is_over || self.read.len() > HEAD_BYTES_MAX {
                return Ok(None);
            }
        }
    }

    async fn body(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.read.len() < length {
            if self.socket.read_buf(&mut self.read).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.read.drain(..length).collect())
    }

    /// Answers a request. Returns whether the connection stays open.
    async fn answer(&mut self, shared: &EngineShared, head: String) -> io::Result<bool> {
        let id = header(&head, "x-request-id").unwrap_or_default().to_owned();
        let length = header(&head, "content-length");
        let length = length.and_then(|it| it.parse().ok()).unwrap_or(0);
        shared.record.head(head);
        let behaviour = id.split('.').next().unwrap_or_default();
        if behaviour == "early" {
            // The body is not read.
            let answer = EngineRequest::read(&id, b"").document();
            self.socket.write_all(answer.as_bytes()).await?;
            return Ok(false);
        }
        let body = timeout(BODY_PATIENCE, self.body(length)).await??;
        if let Some(is_open) = misbehave(behaviour, &mut self.socket).await? {
            return Ok(is_open);
        }
        let request = EngineRequest::read(&id, &body);
        let (mut from, mut to) = self.socket.split();
        tokio::select! {
            biased;
            () = closed(&mut from, &mut self.read) => Ok(false),
            is_open = shared.compute(&request, &mut to) => is_open,
        }
    }
}

/// Waits until the other side closes the connection.
async fn closed(from: &mut ReadHalf<'_>, read: &mut Vec<u8>) {
    while from.read_buf(read).await.is_ok_and(|bytes| bytes > 0) {}
}

/// A refusal within a stream, as SGLang sends it when its queue is full.
const REFUSAL: &str =
    "data: {\"error\":{\"message\":\"the queue is full\",\"code\":503}}\n\ndata: [DONE]\n\n";
/// Pause between two comments that keep a connection alive, and their number: a minute in all.
const COMMENT_INTERVAL: Duration = Duration::from_millis(100);
const COMMENTS: usize = 600;

/// Responds with the given behaviour, if it is one. Returns whether the connection stays open.
async fn misbehave(behaviour: &str, socket: &mut TcpStream) -> io::Result<Option<bool>> {
    match behaviour {
        "endless-line" => {
            socket.write_all(EVENTS.as_bytes()).await?;
            socket.write_all(&chunk(b"data: ")).await?;
            endless(socket, &chunk(&[b'x'; PIECE_BYTES])).await?;
        }
        "endless-head" => {
            socket.write_all(b"HTTP/1.1 200 OK\r\n").await?;
            endless(socket, b"x-more: and more and more and more\r\n").await?;
        }
        "endless-continue" => endless(socket, b"HTTP/1.1 100 Continue\r\n\r\n").await?,
        "endless-document" => {
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                u64::MAX / 2
            );
            socket.write_all(head.as_bytes()).await?;
            endless(socket, &[b' '; PIECE_BYTES]).await?;
        }
        "absurd" => {
            let answer = document("200 OK", ABSURD);
            socket.write_all(answer.as_bytes()).await?;
            return Ok(Some(true));
        }
        "redirect" => {
            socket.write_all(REDIRECT.as_bytes()).await?;
            return Ok(Some(true));
        }
        "refusing" => {
            socket.write_all(EVENTS.as_bytes()).await?;
            socket.write_all(&chunk(REFUSAL.as_bytes())).await?;
            socket.write_all(b"0\r\n\r\n").await?;
            return Ok(Some(true));
        }
        "comments" => {
            socket.write_all(EVENTS.as_bytes()).await?;
            let mut ticks = tokio::time::interval(COMMENT_INTERVAL);
            for _ in 0..COMMENTS {
                ticks.tick().await;
                socket.write_all(&chunk(b": keep-alive\n\n")).await?;
            }
        }
        "fat" => {
            socket.write_all(EVENTS.as_bytes()).await?;
            let padding = "x".repeat(PIECE_BYTES);
            let event = format!("data: {{\"padding\":\"{padding}\"}}\n\n");
            for _ in 0..FAT_PIECES {
                socket.write_all(&chunk(event.as_bytes())).await?;
            }
            socket.write_all(&chunk(b"data: [DONE]\n\n")).await?;
            socket.write_all(b"0\r\n\r\n").await?;
            return Ok(Some(true));
        }
        _ => return Ok(None),
    }
    Ok(Some(false))
}

async fn endless(socket: &mut TcpStream, piece: &[u8]) -> io::Result<()> {
    let mut written = 0;
    let many = piece.repeat(PIECE_BYTES.div_ceil(piece.len()));
    while written < ENDLESS_BYTES_MAX {
        socket.write_all(&many).await?;
        written += many.len();
    }
    Ok(())
}

impl EngineShared {
    /// Computes a response and writes it. Returns whether the connection stays open.
    async fn compute(&self, request: &EngineRequest, to: &mut WriteHalf<'_>) -> io::Result<bool> {
        self.record.saw(&request.id, request.prompt);
        let place = self.places.acquire().await.map_err(io::Error::other)?;
        self.record.began(&request.id, request.prompt);
        sleep(self.speed.prefill).await;
        if request.text.contains(POISON) {
            return Ok(false);
        }
        if request.text.contains(FAILING) {
            let answer = refused("500 Internal Server Error");
            to.write_all(answer.as_bytes()).await?;
            return Ok(true);
        }
        if !request.is_streamed {
            for _ in 0..request.tokens {
                sleep(self.speed.decode).await;
                self.record.made(&request.id);
            }
            drop(place);
            to.write_all(request.document().as_bytes()).await?;
            return Ok(true);
        }
        let (send, mut receive) = mpsc::unbounded_channel::<Bytes>();
        // Tokens are made whether or not they are read.
        let making = async move {
            for made in 1..=request.tokens {
                sleep(self.speed.decode).await;
                self.record.made(&request.id);
                drop(send.send(request.chunk(made)));
            }
            drop(place);
            drop(send.send(request.end()));
        };
        let writing = async {
            to.write_all(EVENTS.as_bytes()).await?;
            while let Some(event) = receive.recv().await {
                to.write_all(&chunk(&event)).await?;
            }
            to.write_all(b"0\r\n\r\n").await
        };
        let ((), written) = tokio::join!(making, writing);
        written.map(|()| true)
    }
}

/// A request as an engine reads it.
struct EngineRequest {
    id: String,
    prompt: u64,
    tokens: u64,
    is_streamed: bool,
    /// Whether the request asks for usage in every chunk.
    wants_running_usage: bool,
    wants_usage_at_end: bool,
    wants_logprobs: bool,
    text: String,
}

impl EngineRequest {
    fn read(id: &str, body: &[u8]) -> Self {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let text = body["messages"][0]["content"].as_str().unwrap_or_default();
        let options = &body["stream_options"];
        Self {
            id: id.to_owned(),
            prompt: text.len().div_ceil(TOKEN_BYTES) as u64,
            tokens: body["max_tokens"].as_u64().unwrap_or(1),
            is_streamed: body["stream"] == true,
            wants_running_usage: options["continuous_usage_stats"] == true,
            wants_usage_at_end: options["include_usage"] == true,
            wants_logprobs: body["prompt_logprobs"].as_u64().is_some(),
            text: text.to_owned(),
        }
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
        if self.wants_running_usage {
            chunk["usage"] = self.usage(made);
        }
        format!("data: {chunk}\n\n").into()
    }

    fn end(&self) -> Bytes {
        let mut end = String::new();
        if self.wants_usage_at_end {
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
        let mut body = json!({
            "id": self.id, "object": "chat.completion", "model": MODEL,
            "choices": [{
                "index": 0, "message": { "role": "assistant", "content": words },
                "finish_reason": "length",
            }],
            "usage": self.usage(self.tokens),
        });
        if self.wants_logprobs {
            body["prompt_logprobs"] = "-1.0 ".repeat(LOGPROBS_BYTES / 5).into();
        }
        document("200 OK", &body.to_string())
    }
}

fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
    chunk.extend_from_slice(bytes);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

fn document(status: &str, body: &str) -> String {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n");
    format!("{head}content-length: {length}\r\n\r\n{body}")
}

fn refused(status: &str) -> String {
    let error = json!({ "error": { "message": "refused by the engine", "code": status } });
    document(status, &error.to_string())
}

/// Returns the value of the header `name`, trimmed but otherwise as received.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines();
    lines.find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}
