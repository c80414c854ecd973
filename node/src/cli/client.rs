//! A client of the admin API, for the commands that read or operate a running cluster.

use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Longest wait for an answer: admin writes themselves give up after ten seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Largest answer read.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// For whoever asked something that is no admin listener, or nobody.
const HINT: &str = "is this the admin listener of a replica? (`--admin URL` or QUORATE_ADMIN)";
/// Entries asked for at a time.
const PAGE: usize = 1000;

/// Which replica to ask.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Target {
    /// Admin URL of any replica
    #[arg(
        long,
        value_name = "URL",
        env = "QUORATE_ADMIN",
        default_value = "http://127.0.0.1:8081",
        value_parser = admin_url
    )]
    admin: Uri,
}

/// `http://host:port`, or `host:port` for short.
pub(super) fn admin_url(text: &str) -> Result<Uri, String> {
    let whole = if text.contains("://") {
        text.to_owned()
    } else {
        format!("http://{text}")
    };
    let uri: Option<Uri> = whole.trim_end_matches('/').parse().ok();
    uri.filter(|uri| uri.scheme_str() == Some("http") && uri.path() == "/" && uri.query().is_none())
        .ok_or_else(|| "expected http://host:port of an admin listener".to_owned())
}

impl Target {
    /// `GET path`.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(Method::GET, path, None).await
    }

    /// `GET /readyz`, whose answer counts whatever its status.
    pub(super) async fn readiness(&self) -> anyhow::Result<Value> {
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, self.fetch(Method::GET, "/readyz", None));
        let (_, answer) = answer
            .await
            .context("GET /readyz")?
            .context("GET /readyz")?;
        Ok(answer)
    }

    /// All pages of a list; `field` is the list's name in the answer.
    pub(super) async fn list(&self, path: &str, field: &str) -> anyhow::Result<Vec<Value>> {
        let mut all = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!("{path}?limit={PAGE}{cursor}")).await?;
            let Some(entries) = page[field].as_array() else {
                bail!("GET {path}: the answer has no list {field:?}");
            };
            all.extend(entries.iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return Ok(all),
            }
        }
    }

    /// Sends a request and answers the body, if the status says success.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let what = format!("{method} {}{path}", self.base());
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, self.exchange(method, path, body));
        let answer = answer
            .await
            .map_err(|_| anyhow::anyhow!("no answer in time"));
        answer.and_then(|answer| answer).with_context(|| what)
    }

    /// The URL of a path.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base())
    }

    fn base(&self) -> String {
        self.admin.to_string().trim_end_matches('/').to_owned()
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let (status, answer) = self.fetch(method, path, body).await?;
        judged(status, answer)
    }

    async fn fetch(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Value)> {
        let client: Client<HttpConnector, Full<Bytes>> =
            Client::builder(TokioExecutor::new()).build_http();
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base()));
        let bytes = match body {
            Some(body) => {
                request = request.header(http::header::CONTENT_TYPE, "application/json");
                Bytes::from(serde_json::to_vec(body)?)
            }
            None => Bytes::new(),
        };
        let (head, body) = client
            .request(request.body(Full::new(bytes))?)
            .await
            .map_err(|error| no_answer(&error))?
            .into_parts();
        let collected = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let bytes = collected
            .map_err(|error| anyhow::anyhow!("read answer: {error}"))?
            .to_bytes();
        match serde_json::from_slice(&bytes) {
            Ok(answer) => Ok((head.status, answer)),
            Err(_) => bail!("answered {} with what is not JSON: {HINT}", head.status),
        }
    }
}

/// The answer, if its status says success; what is wrong otherwise.
pub(super) fn judged(status: StatusCode, answer: Value) -> anyhow::Result<Value> {
    if status.is_success() {
        return Ok(answer);
    }
    match (answer["title"].as_str(), answer["detail"].as_str()) {
        (Some(title), Some(detail)) => bail!("answered {status}: {title}: {detail}"),
        (Some(title), None) => bail!("answered {status}: {title}"),
        (None, _) => bail!("answered {status}: {HINT}"),
    }
}

/// The innermost cause in place of the layers around it.
pub(super) fn no_answer(error: &hyper_util::client::legacy::Error) -> anyhow::Error {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let what = if error.is_connect() {
        "cannot connect"
    } else {
        "no answer"
    };
    anyhow::anyhow!("{what}: {cause}: {HINT}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admin_urls_are_taken_with_and_without_a_scheme() {
        for right in [
            "http://a:1",
            "http://a:1/",
            "a:1",
            "127.0.0.1:8081",
            "[::1]:8081",
        ] {
            assert_eq!(
                admin_url(right).unwrap().scheme_str(),
                Some("http"),
                "{right}"
            );
        }
        for wrong in [
            "",
            "https://a:1",
            "http://a:1/admin",
            "not a url",
            "a:1?b",
            "http://",
        ] {
            assert!(admin_url(wrong).is_err(), "{wrong}");
        }
    }
}
