//! JSON over HTTP, for commands that use the admin API and for tests of clusters.

use std::fmt;
use std::io;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, IF_MATCH};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use lab::connector::{ReplicaConnector, TlsConnectError, refused, tls_fault};
use rustls::Error as TlsFault;
use serde_json::Value;

/// Maximum length of a response body, in bytes.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Hint for a response that is not from an admin listener.
const HINT: &str = "is this the admin listener of a replica? (`--admin URL` or QUORATE_ADMIN)";

/// Hint for a 401 response, which means that the request had no token or a wrong one.
const TOKEN_HINT: &str = "it takes a token of its admin.tokens_file (`--token-file FILE` or QUORATE_TOKEN_FILE), or where \
     it has tls.admin.client_ca_file a certificate (`--cert-file FILE` or QUORATE_CERT_FILE)";

/// An HTTP client that opens a connection for each request, because replicas come and go.
#[derive(Debug, Clone)]
pub struct JsonClient {
    http: Client<ReplicaConnector, Full<Bytes>>,
    timeout: Duration,
    /// Value of the `authorization` header, if any.
    authorization: Option<HeaderValue>,
    /// Value of the `if-match` header, if any.
    version: Option<HeaderValue>,
}

/// A response with any status and a complete body.
#[derive(Debug, Clone)]
pub struct JsonAnswer {
    /// Status of the response.
    pub status: StatusCode,
    /// Headers of the response.
    pub headers: HeaderMap,
    /// Body of the response, as received.
    pub body: Bytes,
}

/// Error for a request that was not sent because no connection could be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoConnectionError {
    /// Innermost cause of the failure.
    pub cause: String,
    /// Whether the TLS handshake failed.
    pub is_tls: bool,
}

impl fmt::Display for NoConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cause = &self.cause;
        match self.is_tls {
            true => write!(f, "cannot connect: {cause}"),
            false => write!(f, "cannot connect: {cause}: {HINT}"),
        }
    }
}

impl std::error::Error for NoConnectionError {}

/// Error for a response whose status is not a success.
#[derive(Debug, Clone, PartialEq)]
pub struct AnswerError {
    /// Status of the response.
    pub status: StatusCode,
    /// Body of the response, usually `application/problem+json`.
    pub problem: Value,
}

impl fmt::Display for AnswerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "answered {}", self.status)?;
        if self.status == StatusCode::UNAUTHORIZED {
            return write!(f, ": {TOKEN_HINT}");
        }
        let reason = self.status.canonical_reason().unwrap_or_default();
        let detail = self.problem["detail"].as_str();
        match (self.problem["title"].as_str(), detail) {
            (Some(title), Some(detail)) if title.eq_ignore_ascii_case(reason) => {
                write!(f, ": {detail}")
            }
            (Some(title), Some(detail)) => write!(f, ": {title}: {detail}"),
            (Some(title), None) => write!(f, ": {title}"),
            (None, _) => write!(f, ": {HINT}"),
        }
    }
}

impl std::error::Error for AnswerError {}

impl JsonClient {
    /// Creates a client whose requests take at most `timeout`.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self {
            http: ReplicaConnector::new(None).client(),
            timeout,
            authorization: None,
            version: None,
        }
    }

    /// Makes the client connect through `connector`.
    #[must_use]
    pub fn through(self, connector: &ReplicaConnector) -> Self {
        let http = connector.client();
        Self { http, ..self }
    }

    /// Makes the client send the header `authorization` with every request; `None` sends no such
    /// header.
    #[must_use]
    pub fn authorized(self, authorization: Option<HeaderValue>) -> Self {
        Self {
            authorization,
            ..self
        }
    }

    /// Makes every request conditional, so that it takes effect only if the resource has this
    /// version.
    #[must_use]
    pub fn only_on(self, version: Option<HeaderValue>) -> Self {
        Self { version, ..self }
    }

    /// Sends a request and reads the response.
    ///
    /// # Errors
    /// Fails if the request cannot be sent, or no complete response arrives in time.
    pub async fn send(
        &self,
        method: Method,
        url: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<JsonAnswer> {
        let what = format!("{method} {url}");
        let answer = tokio::time::timeout(self.timeout, self.exchange(method, url, body)).await;
        let answer = answer.map_err(|_| anyhow!("no response in time"));
        answer.flatten().context(what)
    }

    /// Sends a request and returns the JSON of a successful response.
    ///
    /// # Errors
    /// Fails like [`Self::send`], or if the response is not JSON or its status is not a success.
    pub async fn call(
        &self,
        method: Method,
        url: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let answer = self.send(method.clone(), url, body).await?;
        answer.success().with_context(|| format!("{method} {url}"))
    }

    async fn exchange(
        &self,
        method: Method,
        url: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<JsonAnswer> {
        let mut request = Request::builder().method(method).uri(url);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if let Some(version) = &self.version {
            request = request.header(IF_MATCH, version);
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let response = self.http.request(request.body(Full::from(body))?).await;
        JsonAnswer::read(response.map_err(|error| no_answer(&error))?).await
    }
}

impl JsonAnswer {
    /// Reads the body of a response.
    ///
    /// # Errors
    /// Fails if the body breaks off or is too long.
    pub async fn read(response: Response<Incoming>) -> anyhow::Result<Self> {
        let (head, body) = response.into_parts();
        let collected = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = collected.map_err(|error| anyhow!("read response: {error}"))?;
        Ok(Self {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes(),
        })
    }

    /// Returns the body as JSON.
    ///
    /// # Errors
    /// Fails if the body is not JSON.
    pub fn json(&self) -> anyhow::Result<Value> {
        let json = serde_json::from_slice(&self.body);
        json.map_err(|_| {
            anyhow!(
                "the response with status {} is not JSON: {HINT}",
                self.status
            )
        })
    }

    /// Returns the body as JSON if the status is a success.
    ///
    /// # Errors
    /// Fails with the problem that the response reports, or if the body is not JSON.
    pub fn success(&self) -> anyhow::Result<Value> {
        let (status, problem) = (self.status, self.json()?);
        match status.is_success() {
            true => Ok(problem),
            false => Err(AnswerError { status, problem }.into()),
        }
    }
}

/// Returns the error for a request without a response: a [`NoConnectionError`] if it was not sent.
/// Reports the innermost cause instead of the layers around it.
pub(crate) fn no_answer(error: &hyper_util::client::legacy::Error) -> anyhow::Error {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let fault = cause.downcast_ref::<io::Error>().and_then(tls_fault);
    match (error.is_connect(), fault) {
        // The server aborted TLS after our side had finished the handshake, so it read no request.
        (false, Some(TlsFault::AlertReceived(alert))) => NoConnectionError {
            cause: refused(&format!("{alert:?}")),
            is_tls: true,
        }
        .into(),
        (true, _) => NoConnectionError {
            cause: cause.to_string(),
            is_tls: cause.is::<TlsConnectError>(),
        }
        .into(),
        (false, _) => anyhow!("no response: {cause}: {HINT}"),
    }
}
