//! Asking a replica's admin API, and waiting for what it will say.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::header::CONTENT_TYPE;
use http::{Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::time::{interval, timeout};

/// Bound of every wait: a broken cluster fails the test in this time.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// Bound of one answer. The admin API itself waits for some things, for seconds at most.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A client of admin APIs. A connection per question: the replicas come and go.
#[derive(Debug)]
pub struct Admin {
    http: Client<HttpConnector, Full<Bytes>>,
}

impl Admin {
    /// A client.
    #[must_use]
    pub fn new() -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        Self {
            http: builder.pool_max_idle_per_host(0).build_http(),
        }
    }

    /// The JSON a replica answers, whatever the status.
    ///
    /// # Errors
    /// When it does not answer, or not in JSON.
    pub async fn get(&self, replica: SocketAddr, path: &str) -> anyhow::Result<Value> {
        let (_, answer) = self.send(Method::GET, replica, path, None).await?;
        serde_json::from_slice(&answer).with_context(|| format!("GET {replica}{path}: not JSON"))
    }

    /// Has a replica do something; the JSON it answers.
    ///
    /// # Errors
    /// When it does not answer in JSON, or refuses.
    pub async fn call(
        &self,
        method: Method,
        replica: SocketAddr,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let what = || format!("{method} {replica}{path}");
        let (status, answer) = self.send(method.clone(), replica, path, body).await?;
        ensure!(
            status.is_success(),
            "{}: {status}: {}",
            what(),
            String::from_utf8_lossy(&answer)
        );
        serde_json::from_slice(&answer).with_context(what)
    }

    async fn send(
        &self,
        method: Method,
        at: SocketAddr,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let uri: Uri = format!("http://{at}{path}").parse()?;
        let what = || format!("{method} {uri}");
        let mut request = Request::builder().method(&method).uri(&uri);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::from(body))?;
        let answer = async {
            let response = self.http.request(request).await?;
            let status = response.status();
            anyhow::Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        let answer = timeout(ANSWER_TIMEOUT, answer).await;
        answer.context("timed out").flatten().with_context(what)
    }
}

impl Default for Admin {
    fn default() -> Self {
        Self::new()
    }
}

/// Waits until `condition` holds.
///
/// # Errors
/// What the condition fails with, or that it did not hold within a minute.
pub async fn until(
    what: &str,
    condition: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let met = async {
        let mut looks = interval(LOOK_EVERY);
        while !condition().await? {
            looks.tick().await;
        }
        anyhow::Ok(())
    };
    timeout(PATIENCE, met)
        .await
        .with_context(|| format!("{what}: not within {} s", PATIENCE.as_secs()))
        .flatten()
        .with_context(|| what.to_owned())
}
