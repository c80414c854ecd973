//! A client that sends streaming requests, reads the responses to the end, and times them.

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

/// Header with the user that a request is charged to.
const X_QUORATE_USER: HeaderName = HeaderName::from_static("x-quorate-user");
const X_QUORATE_SESSION: HeaderName = HeaderName::from_static("x-quorate-session");
const X_QUORATE_PARENT_SESSION: HeaderName = HeaderName::from_static("x-quorate-parent-session");
/// Header with the router's prediction: `matched/total` blocks.
const X_QUORATE_PREFIX: HeaderName = HeaderName::from_static("x-quorate-prefix");
/// Header with the replica that responds.
const X_QUORATE_REPLICA: HeaderName = HeaderName::from_static("x-quorate-replica");
/// Header with the backend that the router chose.
const X_QUORATE_BACKEND: HeaderName = HeaderName::from_static("x-quorate-backend");

/// Age at which idle connections are dropped, before servers close them (vLLM: 5 s).
const IDLE_MAX: Duration = Duration::from_secs(4);
/// Maximum length of an event, and of a response that is not a stream, in bytes.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// HTTP client with one connection pool for all targets.
#[derive(Debug, Clone)]
pub struct ReplayClient {
    http: HyperClient<ReplicaConnector, Full<Bytes>>,
    timeout: Duration,
    /// Prefix of API keys; `None` if requests have no key.
    key_prefix: Option<String>,
}

/// A request to send to a replica or an engine.
#[derive(Debug, Clone)]
pub struct ReplayRequest {
    /// URL that the request goes to.
    pub uri: Uri,
    /// User to whom the request is charged.
    pub user: HeaderValue,
    /// Names of the agent's session of which the request is a turn, and of the session that started
    /// it, if any.
    pub session: [Option<HeaderValue>; 2],
    /// JSON body of the request.
    pub body: Bytes,
}

/// A complete response, with its times and token counts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplayAnswer {
    /// Generated text.
    pub text: String,
    /// Time from sending the request to receiving the first text; `latency` if there is none.
    pub ttft: Duration,
    /// Time from sending the request to the end of the response.
    pub latency: Duration,
    /// Number of prompt tokens according to `usage`; `None` if not reported.
    pub prompt_tokens: Option<u64>,
    /// Number of prompt tokens found in the engine's cache; `None` if not reported.
    pub cached_tokens: Option<u64>,
    /// Number of output tokens; `None` if not reported.
    pub completion_tokens: Option<u64>,
    /// Whether the response came through a replica.
    pub is_routed: bool,
    /// Matched and total blocks, as the router predicted; `None` without a router, or if it does
    /// not report them.
    pub prefix: Option<(u64, u64)>,
    /// Backend that the router chose; `None` without a router, or if it does not
    /// report it.
    pub backend: Option<String>,
}

/// Reason for the failure of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The connection could not be established.
    #[error("connect: {0}")]
    Connect(String),
    /// The connection broke before the response's head.
    #[error("broken before the answer: {0}")]
    Broken(String),
    /// The response has a status other than 200.
    #[error("status {status}: {body}")]
    Status {
        /// Status of the response.
        status: StatusCode,
        /// Beginning of the response's body.
        body: String,
    },
    /// The stream broke off before its end.
    #[error("cut off: {0}")]
    CutOff(String),
    /// The stream contained an error.
    #[error("error event: {0}")]
    ErrorEvent(String),
    /// The response is not a stream of completion chunks.
    #[error("not understood: {0}")]
    NotUnderstood(String),
    /// The request timed out.
    #[error("timed out")]
    TimedOut,
}

impl ReplayError {
    /// Returns the kind of the error, by which failures are counted.
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
    /// Creates a client without TLS and keys, whose requests time out after `timeout`.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self::reaching(None, timeout)
    }

    /// Creates a client for `targets` with their TLS config and keys, whose requests time out after
    /// `timeout`.
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

    /// Sends a streaming request and reads the response to its end.
    ///
    /// # Errors
    /// If the request fails or times out. The client never retries once it may have sent a byte.
    pub async fn stream(&self, ask: ReplayRequest) -> Result<ReplayAnswer, ReplayError> {
        timeout(self.timeout, self.stream_untimed(ask))
            .await
            .unwrap_or(Err(ReplayError::TimedOut))
    }

    /// Returns the name of the first model that a server lists.
    ///
    /// # Errors
    /// If the request fails or the server lists no model.
    pub async fn first_model(&self, uri: Uri) -> Result<String, ReplayError> {
        let models = self.models(uri).await?;
        Ok(models.into_iter().next().unwrap_or_default())
    }

    /// Returns the names of all models that a server lists, of which there is at least one.
    ///
    /// # Errors
    /// If the request fails or the server lists no model.
    pub async fn models(&self, uri: Uri) -> Result<Vec<String>, ReplayError> {
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
            let models: Vec<String> = models.data.into_iter().map(|model| model.id).collect();
            match models.is_empty() {
                true => Err(ReplayError::NotUnderstood("no model is served".to_owned())),
                false => Ok(models),
            }
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
        let sessions = [X_QUORATE_SESSION, X_QUORATE_PARENT_SESSION];
        for (name, session) in sessions.into_iter().zip(ask.session) {
            if let Some(session) = session {
                request = request.header(name, session);
            }
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
        // The connection returns to the pool only after the body's end.
        while let Some(frame) = body.frame().await {
            frame.map_err(|error| ReplayError::CutOff(chain(&error)))?;
        }
        answer.latency = sent.elapsed();
        answer.ttft = first.unwrap_or(answer.latency);
        Ok(answer)
    }
}

impl ReplayAnswer {
    /// Parses a stream that was received as a whole by other means. Sets both times of the result
    /// to `latency`.
    ///
    /// # Errors
    /// If the status is not 200, or the body is not a complete stream of completion chunks.
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

/// Parser that splits a stream into server-sent events.
#[derive(Debug, Default)]
struct EventReader {
    /// Bytes of the incomplete event at the end of the data so far.
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

/// Formats an error with its causes.
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
    fn a_stream_parses_the_same_in_any_chunks() {
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
