//! A client of the admin API, for the commands that read or operate a running cluster.

use std::time::Duration;

use anyhow::{Context, bail};
use http::{Method, Uri};
use serde_json::Value;

use crate::json_client::{JsonAnswer, JsonClient};

/// Longest wait for an answer: admin writes themselves give up after five seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Number of entries per page.
const PAGE: usize = 1000;

/// Which replica to ask.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AdminTarget {
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

/// Parses `http://host:port`, or `host:port` for short.
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

/// Encodes text as a part of a path or as the value of a query parameter.
pub(super) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

impl AdminTarget {
    /// Sends `GET path`.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(Method::GET, path, None).await
    }

    /// Sends `GET /readyz`, whose answer is valid whatever its status.
    pub(super) async fn readiness(&self) -> anyhow::Result<Value> {
        let client = JsonClient::new(ANSWER_TIMEOUT);
        let answer = client.send(Method::GET, &self.url("/readyz"), None).await?;
        answer.json().context("GET /readyz")
    }

    /// Returns all pages of a list; `field` is the list's name in the answer.
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

    /// Returns the target at a URL that a member has announced.
    pub(super) fn at(url: &str) -> Result<Self, String> {
        admin_url(url).map(|admin| Self { admin })
    }

    /// Sends a request without a body and returns the answer, whatever its status.
    pub(super) async fn try_send(&self, method: Method, path: &str) -> anyhow::Result<JsonAnswer> {
        let client = JsonClient::new(ANSWER_TIMEOUT);
        client.send(method, &self.url(path), None).await
    }

    /// Sends a request and returns the body of a successful answer.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let client = JsonClient::new(ANSWER_TIMEOUT);
        client.call(method, &self.url(path), body).await
    }

    /// Sends a request and returns the answer, whatever its status.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<JsonAnswer> {
        let client = JsonClient::new(ANSWER_TIMEOUT);
        client.send(method, &self.url(path), body).await
    }

    /// Returns the URL of a path.
    pub(super) fn url(&self, path: &str) -> String {
        let base = self.admin.to_string();
        format!("{}{path}", base.trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_would_read_as_syntax_is_encoded() {
        assert_eq!(encoded("a-1_B.~"), "a-1_B.~");
        assert_eq!(encoded("a/b?c&d=é %"), "a%2Fb%3Fc%26d%3D%C3%A9%20%25");
    }

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
