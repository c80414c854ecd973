//! Asking a replica's admin API, and waiting for what it will say.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use http_body_util::{BodyExt, Empty};
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
    http: Client<HttpConnector, Empty<Bytes>>,
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
        let uri: Uri = format!("http://{replica}{path}").parse()?;
        let request = Request::get(&uri).body(Empty::new())?;
        let answer = async {
            let response = self.http.request(request).await?;
            let body = response.into_body().collect().await?.to_bytes();
            anyhow::Ok(serde_json::from_slice(&body)?)
        };
        let answer = timeout(ANSWER_TIMEOUT, answer).await;
        answer
            .context("timed out")
            .flatten()
            .with_context(|| format!("GET {uri}"))
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
