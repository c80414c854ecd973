//! JSON over HTTP, for commands that use the admin API and for tests of clusters.

use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Maximum length of an answer, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Hint for an answer that cannot come from an admin listener.
const HINT: &str = "is this the admin listener of a replica? (`--admin URL` or QUORATE_ADMIN)";

/// A client. Every request has its own connection, because replicas come and go.
#[derive(Debug, Clone)]
pub struct JsonClient {
    http: Client<HttpConnector, Full<Bytes>>,
    timeout: Duration,
}

/// An answer, whatever its status.
#[derive(Debug, Clone)]
pub struct JsonAnswer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body as received.
    pub body: Bytes,
}

impl JsonClient {
    /// Creates a client whose requests take at most `timeout` each.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        let http = builder.pool_max_idle_per_host(0).build_http();
        Self { http, timeout }
    }

    /// Sends a request and reads the answer.
    ///
    /// # Errors
    /// If there is no answer in time.
    pub async fn send(
        &self,
        method: Method,
        url: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<JsonAnswer> {
        let what = format!("{method} {url}");
        let answer = tokio::time::timeout(self.timeout, self.exchange(method, url, body)).await;
        let answer = answer.map_err(|_| anyhow!("no answer in time"));
        answer.flatten().context(what)
    }

    /// Sends a request that must succeed, and returns the JSON of the answer.
    ///
    /// # Errors
    /// If there is no answer in time, it is not JSON, or its status is not a success.
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
        let body = body.map(Value::to_string).unwrap_or_default();
        let response = self.http.request(request.body(Full::from(body))?).await;
        JsonAnswer::read(response.map_err(|error| no_answer(&error))?).await
    }
}

impl JsonAnswer {
    /// Reads the rest of an answer.
    ///
    /// # Errors
    /// If it breaks off or is too large.
    pub async fn read(response: Response<Incoming>) -> anyhow::Result<Self> {
        let (head, body) = response.into_parts();
        let collected = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = collected.map_err(|error| anyhow!("read answer: {error}"))?;
        Ok(Self {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes(),
        })
    }

    /// Returns the body as JSON.
    ///
    /// # Errors
    /// If it is not JSON.
    pub fn json(&self) -> anyhow::Result<Value> {
        let json = serde_json::from_slice(&self.body);
        json.map_err(|_| anyhow!("answered {} with what is not JSON: {HINT}", self.status))
    }

    /// Returns the body as JSON if the status is a success.
    ///
    /// # Errors
    /// The problem reported by the answer.
    pub fn success(&self) -> anyhow::Result<Value> {
        let (status, answer) = (self.status, self.json()?);
        if status.is_success() {
            return Ok(answer);
        }
        match (answer["title"].as_str(), answer["detail"].as_str()) {
            (Some(title), Some(detail)) => bail!("answered {status}: {title}: {detail}"),
            (Some(title), None) => bail!("answered {status}: {title}"),
            (None, _) => bail!("answered {status}: {HINT}"),
        }
    }
}

/// Returns why there was no answer: the innermost cause instead of the layers around it.
pub(crate) fn no_answer(error: &hyper_util::client::legacy::Error) -> anyhow::Error {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let what = if error.is_connect() {
        "cannot connect"
    } else {
        "no answer"
    };
    anyhow!("{what}: {cause}: {HINT}")
}
