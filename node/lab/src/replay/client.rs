//! One streaming request: sent, timed, and read to its end.

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use memchr::memmem;
use tokio::time::{Instant, timeout};

use super::targets::{TargetAccess, Targets};
use crate::connector::ReplicaConnector;

/// Names the user a request is charged to.
const X_QUORATE_USER: HeaderName = HeaderName::from_static("x-quorate-user");
/// `matched/total` blocks, as the router predicted.
const X_QUORATE_PREFIX: HeaderName = HeaderName::from_static("x-quorate-prefix");
/// The replica that answers.
const X_QUORATE_REPLICA: HeaderName = HeaderName::from_static("x-quorate-replica");
/// The backend the router chose.
const X_QUORATE_BACKEND: HeaderName = HeaderName::from_static("x-quorate-backend");

/// Idle connections are dropped before servers close theirs (vLLM: 5 s).
const IDLE_MAX: Duration = Duration::from_secs(4);
/// Bytes of an event, and of an answer that is no stream.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// A connection pool to all targets.
#[derive(Debug, Clone)]
pub struct ReplayClient {
    http: HyperClient<ReplicaConnector, Full<Bytes>>,
    timeout: Duration,
    /// `None`: no key is shown.
    key_prefix: Option<String>,
}

/// A request to be sent.
#[derive(Debug, Clone)]
pub struct ReplayRequest {
    /// Where to.
    pub uri: Uri,
    /// Who is charged.
    pub user: HeaderValue,
    /// The JSON.
    pub body: Bytes,
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplayAnswer {
    /// Its text.
    pub text: String,
    /// From sending to the first text.
    pub ttft: Duration,
    /// From sending to the end.
    pub latency: Duration,
    /// Tokens of the prompt, by `usage`; `None` when it was not told.
    pub prompt_tokens: Option<u64>,
    /// Of these, found in the engine's cache.
    pub cached_tokens: Option<u64>,
    /// Tokens made.
    pub completion_tokens: Option<u64>,
    /// Whether a replica says that the answer came through it.
    pub is_routed: bool,
    /// Matched and all blocks, as the router predicted; `None` without a router, and where it does
    /// not tell.
    pub prefix: Option<(u64, u64)>,
    /// The backend the router chose; `None` as above.
    pub backend: Option<String>,
}

/// How a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// No connection could be had.
    #[error("connect: {0}")]
    Connect(String),
    /// The connection broke before the answer's head.
    #[error("broken before the answer: {0}")]
    Broken(String),
    /// An answer other than 200.
    #[error("status {status}: {body}")]
    Status {
        /// The status.
        status: StatusCode,
        /// The beginning of what came with it.
        body: String,
    },
    /// The stream ended before its end.
    #[error("cut off: {0}")]
    CutOff(String),
    /// The stream carried an error.
    #[error("error event: {0}")]
    ErrorEvent(String),
    /// What came is not a stream of completion chunks.
    #[error("not understood: {0}")]
    NotUnderstood(String),
    /// It took too long.
    #[error("timed out")]
    TimedOut,
}

impl ReplayError {
    /// The kind alone, to count by.
    #[must_use]
    pub fn kind(&self) -> String {
        match self {
            Self::Connect(_) => "connect".to_owned(),
            Self::Broken(_) => "broken before the answer".to_owned(),
            Self::Status { status, .. } => format!("status {}", status.as_u16()),
            Self::CutOff(_) => "cut off".to_owned(),
            Self::ErrorEvent(_) => "error event".to_owned(),
            Self::NotUnderstood(_) => "not understood".to_owned(),
            Self::TimedOut => "timed out".to_owned(),
        }
    }
}

#[derive(Debug, serde::Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<ResponseUsage>,
    error: Option<serde_json::Value>,
}

#[derive(Debug, serde::Deserialize)]
struct Choice {
    delta: Option<Delta>,
    text: Option<String>,
}

#[derive(Debug, serde::Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Debug, serde::Deserialize)]
struct ResponseUsage {
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<TokenDetails>,
}

#[derive(Debug, serde::Deserialize)]
struct TokenDetails {
    cached_tokens: Option<u64>,
}

#[derive(Debug, serde::Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Debug, serde::Deserialize)]
struct ListedModel {
    id: String,
}

impl ReplayClient {
    /// A client whose requests may each take `timeout`.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self::reaching(None, timeout)
    }

    /// The same for these targets, however they are reached.
    #[must_use]
    pub fn of(targets: &Targets, timeout: Duration) -> Self {
        Self::reaching(targets.access(), timeout)
    }

    fn reaching(access: Option<&TargetAccess>, timeout: Duration) -> Self {
        let tls = access.map(|access| access.tls.clone());
        let connector = ReplicaConnector::new(tls).within(timeout);
        let http = HyperClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_MAX)
            .build(connector);
        Self {
            http,
            timeout,
            key_prefix: access.map(|access| access.key_prefix.clone()),
        }
    }

    /// Sends a streaming request and reads the answer to its end.
    ///
    /// # Errors
    /// [`ReplayError`]; nothing is tried twice once a byte of it may have been sent.
    pub async fn stream(&self, ask: ReplayRequest) -> Result<ReplayAnswer, ReplayError> {
        timeout(self.timeout, self.stream_untimed(ask))
            .await
            .unwrap_or(Err(ReplayError::TimedOut))
    }

    /// The first model a server says it serves.
    ///
    /// # Errors
    /// [`ReplayError`], also when it serves none.
    pub async fn first_model(&self, uri: Uri) -> Result<String, ReplayError> {
        let request = Request::get(&uri)
            .header(HOST, host(&uri))
            .body(Full::default())
            .expect("the parts are valid");
        let answer = async {
            let response = self
                .http
                .request(request)
                .await
                .map_err(|error| broken(&error))?;
            let status = response.status();
            let body = whole(response.into_body()).await?;
            if status != StatusCode::OK {
                return Err(refused(status, &body));
            }
            let models: ModelList = serde_json::from_slice(&body)
                .map_err(|error| ReplayError::NotUnderstood(error.to_string()))?;
            let first = models.data.into_iter().next();
            first
                .map(|model| model.id)
                .ok_or_else(|| ReplayError::NotUnderstood("no model is served".to_owned()))
        };
        timeout(self.timeout, answer)
            .await
            .unwrap_or(Err(ReplayError::TimedOut))
    }

    async fn stream_untimed(&self, ask: ReplayRequest) -> Result<ReplayAnswer, ReplayError> {
        let mut request = Request::post(&ask.uri)
            .header(HOST, host(&ask.uri))
            .header(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(prefix) = &self.key_prefix {
            let user = String::from_utf8_lossy(ask.user.as_bytes());
            request = request.header(AUTHORIZATION, format!("Bearer {prefix}{user}"));
        }
        let request = request
            .header(X_QUORATE_USER, ask.user)
            .body(Full::new(ask.body))
            .expect("the parts are valid");
        let sent = Instant::now();
        let response = self
            .http
            .request(request)
            .await
            .map_err(|error| broken(&error))?;
        let (head, mut body) = response.into_parts();
        if head.status != StatusCode::OK {
            let body = whole(body).await?;
            return Err(refused(head.status, &body));
        }
        let mut answer = ReplayAnswer::from_headers(&head.headers);
        let mut first = None;
        let mut reader = EventReader::default();
        while !reader.is_done {
            let frame = body
                .frame()
                .await
                .ok_or_else(|| ReplayError::CutOff("ended without [DONE]".to_owned()))?
                .map_err(|error| ReplayError::CutOff(chain(&error)))?;
            if let Some(data) = frame.data_ref() {
                reader.read(data, &mut answer)?;
                if first.is_none() && !answer.text.is_empty() {
                    first = Some(sent.elapsed());
                }
            }
        }
        // The connection goes back to the pool only when the body's end is read.
        while let Some(frame) = body.frame().await {
            frame.map_err(|error| ReplayError::CutOff(chain(&error)))?;
        }
        answer.latency = sent.elapsed();
        answer.ttft = first.unwrap_or(answer.latency);
        Ok(answer)
    }
}

impl ReplayAnswer {
    /// An answer that came whole, by another way; its text counts as begun at its end.
    ///
    /// # Errors
    /// As [`ReplayClient::stream`].
    pub fn of_whole(
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
        latency: Duration,
    ) -> Result<Self, ReplayError> {
        if status != StatusCode::OK {
            return Err(refused(status, body));
        }
        let mut answer = Self::from_headers(headers);
        let mut reader = EventReader::default();
        reader.read(body, &mut answer)?;
        if !reader.is_done {
            return Err(ReplayError::CutOff("ended without [DONE]".to_owned()));
        }
        answer.latency = latency;
        answer.ttft = latency;
        Ok(answer)
    }

    fn from_headers(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let prefix = text(X_QUORATE_PREFIX)
            .and_then(|value| value.split_once('/'))
            .and_then(|(matched, total)| Some((matched.parse().ok()?, total.parse().ok()?)));
        let backend = text(X_QUORATE_BACKEND).map(str::to_owned);
        Self {
            is_routed: headers.contains_key(X_QUORATE_REPLICA),
            prefix,
            backend,
            ..Self::default()
        }
    }

    fn add(&mut self, chunk: Chunk) {
        for choice in chunk.choices {
            let words = choice.delta.and_then(|delta| delta.content).or(choice.text);
            self.text.push_str(words.as_deref().unwrap_or_default());
        }
        if let Some(usage) = chunk.usage {
            self.prompt_tokens = Some(usage.prompt_tokens);
            self.completion_tokens = Some(usage.completion_tokens);
            let cached = usage
                .prompt_tokens_details
                .and_then(|details| details.cached_tokens);
            self.cached_tokens = cached.or(self.cached_tokens);
        }
    }
}

/// Takes server-sent events apart, however the stream cuts them.
#[derive(Debug, Default)]
struct EventReader {
    /// An event that is not whole yet.
    pending: Vec<u8>,
    is_done: bool,
}

impl EventReader {
    fn read(&mut self, data: &[u8], answer: &mut ReplayAnswer) -> Result<(), ReplayError> {
        self.pending.extend_from_slice(data);
        let mut from = 0;
        while let Some(length) = memmem::find(&self.pending[from..], b"\n\n") {
            let event = &self.pending[from..from + length];
            from += length + 2;
            for line in event.split(|byte| *byte == b'\n') {
                let Some(data) = line.strip_prefix(b"data:") else {
                    continue;
                };
                let data = data.trim_ascii();
                if data == b"[DONE]" {
                    self.is_done = true;
                    continue;
                }
                let chunk: Chunk = serde_json::from_slice(data)
                    .map_err(|error| ReplayError::NotUnderstood(error.to_string()))?;
                if let Some(error) = chunk.error {
                    return Err(ReplayError::ErrorEvent(error.to_string()));
                }
                answer.add(chunk);
            }
        }
        self.pending.drain(..from);
        if self.pending.len() > EVENT_BYTES_MAX {
            let message = format!("an event of more than {EVENT_BYTES_MAX} bytes");
            return Err(ReplayError::NotUnderstood(message));
        }
        Ok(())
    }
}

async fn whole(body: Incoming) -> Result<Bytes, ReplayError> {
    let limited = http_body_util::Limited::new(body, EVENT_BYTES_MAX);
    let collected = limited
        .collect()
        .await
        .map_err(|error| ReplayError::CutOff(error.to_string()))?;
    Ok(collected.to_bytes())
}

fn refused(status: StatusCode, body: &[u8]) -> ReplayError {
    const SHOWN_CHARS: usize = 200;
    let body = String::from_utf8_lossy(body)
        .chars()
        .take(SHOWN_CHARS)
        .collect();
    ReplayError::Status { status, body }
}

fn broken(error: &hyper_util::client::legacy::Error) -> ReplayError {
    let words = chain(error);
    if error.is_connect() {
        ReplayError::Connect(words)
    } else {
        ReplayError::Broken(words)
    }
}

/// An error with what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}

fn host(uri: &Uri) -> HeaderValue {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    HeaderValue::from_str(authority).expect("an authority is a header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b": hello\n\n\
        data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"abc\"}}],\"usage\":null}\n\n\
        data: {\"choices\":[{\"text\":\"def\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\
        \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

    #[test]
    fn a_stream_reads_the_same_however_it_is_cut() {
        for cut in 1..STREAM.len() {
            let mut reader = EventReader::default();
            let mut answer = ReplayAnswer::default();
            for piece in STREAM.chunks(cut) {
                reader.read(piece, &mut answer).unwrap();
            }
            assert!(reader.is_done);
            assert_eq!(answer.text, "abcdef");
            assert_eq!(
                (
                    answer.prompt_tokens,
                    answer.cached_tokens,
                    answer.completion_tokens
                ),
                (Some(9), Some(4), Some(2))
            );
        }
    }

    #[test]
    fn an_error_in_the_stream_is_a_failure() {
        let event = b"data: {\"error\":{\"message\":\"engine left\"}}\n\n";
        let failure = EventReader::default()
            .read(event, &mut ReplayAnswer::default())
            .unwrap_err();
        assert_eq!(failure.kind(), "error event");
        // A reader that failed is not used again.
        let failure = EventReader::default()
            .read(b"data: {\n\n", &mut ReplayAnswer::default())
            .unwrap_err();
        assert_eq!(failure.kind(), "not understood");
    }
}
