//! A client of the admin API, for commands that read or operate a running cluster.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use api::files::text::read_text;
use api::net::tls::{CertificateFiles, CertificateSource as _, ClientFiles, NamedFile};
use http::header::ETAG;
use http::{HeaderValue, Method, StatusCode, Uri};
use lab::connector::ReplicaConnector;
use serde_json::Value;

use crate::json_client::{JsonAnswer, JsonClient, NoConnectionError};

/// Maximum time to wait for a response. Admin writes give up by themselves after five seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum duration of a download.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum number of attempts of an edit that conflicts with other writes.
const EDITS_MAX: usize = 4;
/// Number of entries per page.
const PAGE: usize = 1000;

/// Replicas to call, and the credentials for them.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AdminTarget {
    /// Admin URL of any replica, or several separated by commas: the first that can serve the
    /// command is used
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "URL",
        env = "QUORATE_ADMIN",
        default_value = "http://127.0.0.1:8081",
        value_delimiter = ',',
        value_parser = admin_url
    )]
    admin: Vec<Uri>,
    /// File with a token for the admin listener, as written by `quorate token create --out`
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "FILE",
        env = "QUORATE_TOKEN_FILE"
    )]
    token_file: Option<PathBuf>,
    /// Certificate authorities in PEM to trust for replicas. Default: those that this host trusts
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "FILE",
        env = "QUORATE_CA_FILE"
    )]
    ca_file: Option<PathBuf>,
    /// Certificate of an operator in PEM, as made by `quorate cert client --role ROLE`
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "FILE",
        env = "QUORATE_CERT_FILE",
        requires = "key_file"
    )]
    cert_file: Option<PathBuf>,
    /// Private key of the certificate
    #[arg(
        long,
        help_heading = "Connection",
        value_name = "FILE",
        env = "QUORATE_KEY_FILE",
        requires = "cert_file"
    )]
    key_file: Option<PathBuf>,
    /// Connector, created from the files when it is first needed.
    #[arg(skip)]
    connector: Arc<OnceLock<ReplicaConnector>>,
    /// Index of the replica to call, modulo the number of replicas. Changes only if that replica
    /// fails or cannot serve a request.
    #[arg(skip)]
    answering: Arc<AtomicUsize>,
}

/// Parses an admin URL: `http://host:port`, `https://host:port`, or `host:port` for the former.
pub(super) fn admin_url(text: &str) -> Result<Uri, String> {
    let whole = if text.contains("://") {
        text.to_owned()
    } else {
        format!("http://{text}")
    };
    let uri: Option<Uri> = whole.trim_end_matches('/').parse().ok();
    let is_admin = |uri: &Uri| {
        let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
        is_http && uri.path() == "/" && uri.query().is_none()
    };
    uri.filter(is_admin).ok_or_else(|| {
        "expected http://host:port or https://host:port of an admin listener".to_owned()
    })
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
    /// Returns a target for the URL that a member has announced, with the same credentials.
    pub(super) fn at(&self, url: &str) -> Result<Self, String> {
        Ok(Self {
            admin: vec![admin_url(url)?],
            answering: Arc::default(),
            connector: Arc::default(),
            ..self.clone()
        })
    }

    /// Adds `urls` after the known ones. Ignores those that do not parse.
    pub(super) fn also_at<'a>(&mut self, urls: impl Iterator<Item = &'a str>) {
        for url in urls.filter_map(|url| admin_url(url).ok()) {
            if !self.admin.contains(&url) {
                self.admin.push(url);
            }
        }
    }

    /// Returns a separate target for each of the replicas.
    pub(super) fn each(&self) -> impl Iterator<Item = Self> {
        self.admin.iter().map(|admin| Self {
            admin: vec![admin.clone()],
            answering: Arc::default(),
            ..self.clone()
        })
    }

    /// Returns a connector to replicas, with TLS if a URL requires it.
    pub(super) fn connector(&self) -> anyhow::Result<&ReplicaConnector> {
        if let Some(connector) = self.connector.get() {
            return Ok(connector);
        }
        let is_tls = |uri: &Uri| uri.scheme_str() == Some("https");
        let tls = match self.admin.iter().any(is_tls) {
            true => Some(self.files().load()?.config),
            false => None,
        };
        Ok(self.connector.get_or_init(|| ReplicaConnector::new(tls)))
    }

    fn files(&self) -> ClientFiles {
        let named = |flag: &str, file: &PathBuf| NamedFile::new(flag, file);
        let key = self.key_file.as_ref();
        let certificate = self.cert_file.as_ref().zip(key).map(|(cert, key)| {
            let (cert, key) = (named("--cert-file", cert), named("--key-file", key));
            CertificateFiles { cert, key }
        });
        let authorities = self.ca_file.as_ref();
        ClientFiles {
            trusts_system: authorities.is_none(),
            authorities: authorities.map(|file| named("--ca-file", file)),
            certificate,
            protocols: &[b"http/1.1"],
        }
    }

    /// Returns the `authorization` header, if a token file is configured.
    pub(super) fn authorization(&self) -> anyhow::Result<Option<HeaderValue>> {
        let Some(file) = &self.token_file else {
            return Ok(None);
        };
        let shown = || format!("token file {}", file.display());
        let token = read_text(file).with_context(shown)?;
        let value = HeaderValue::try_from(format!("Bearer {}", token.trim()));
        // The original error does not help, so it is dropped.
        let mut value = value.map_err(|_| anyhow!("{}: holds no token", shown()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// Sends `GET path` and returns the body of a successful response.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(Method::GET, path, None).await
    }

    /// Sends `GET path` and returns the body of a successful response; `None` if there is nothing.
    pub(super) async fn find(&self, path: &str) -> anyhow::Result<Option<Value>> {
        let answer = self.ask(Method::GET, path, None).await?;
        if answer.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        let found = answer.success();
        found
            .map(Some)
            .with_context(|| format!("GET {}", self.url(path)))
    }

    /// Sends `GET /readyz` and returns the body, whatever the status of the response.
    pub(super) async fn readiness(&self) -> anyhow::Result<Value> {
        let answer = self.ask(Method::GET, "/readyz", None).await?;
        answer.json().context("GET /readyz")
    }

    /// Returns all pages of a list; `field` is the list's name in the response.
    pub(super) async fn list(&self, path: &str, field: &str) -> anyhow::Result<Vec<Value>> {
        let mut all = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!("{path}?limit={PAGE}{cursor}")).await?;
            let Some(entries) = page[field].as_array() else {
                bail!("GET {path}: the response has no list {field:?}");
            };
            all.extend(entries.iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={}", encoded(next)),
                None => return Ok(all),
            }
        }
    }

    /// Sends a request, with or without a body, and returns the body of a successful response.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let answer = self.ask(method.clone(), path, body).await?;
        let success = answer.success();
        success.with_context(|| format!("{method} {}", self.url(path)))
    }

    /// Downloads a file from the replica that responded last, or from the first.
    pub(super) async fn download(&self, path: &str) -> anyhow::Result<String> {
        let client = JsonClient::new(DOWNLOAD_TIMEOUT).through(self.connector()?);
        let client = client.authorized(self.authorization()?);
        let url = self.url(path);
        let answer = client.send(Method::GET, &url, None).await?;
        if !answer.status.is_success() {
            answer.success().with_context(|| format!("GET {url}"))?;
        }
        String::from_utf8(answer.body.into()).with_context(|| format!("GET {url}"))
    }

    /// Sends a request and returns the response, whatever its status. Tries the next replica if one
    /// cannot be reached or has no quorum, and so has done nothing; for a `GET`, also if one does
    /// not respond.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<JsonAnswer> {
        self.ask_over(method, path, body, None).await
    }

    /// Sends a request like [`Self::ask`] that takes effect only if the resource has version
    /// `version`.
    pub(super) async fn ask_over(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        version: Option<HeaderValue>,
    ) -> anyhow::Result<JsonAnswer> {
        let client = JsonClient::new(ANSWER_TIMEOUT).through(self.connector()?);
        let client = client.authorized(self.authorization()?).only_on(version);
        let (mut refused, mut unreached) = (None, Vec::new());
        for _ in &self.admin {
            let (url, base) = (self.url(path), self.url(""));
            match client.send(method.clone(), &url, body).await {
                Ok(answer) if is_without_quorum(&answer) => refused = Some(answer),
                Ok(answer) => return Ok(answer),
                Err(error) if !is_safe_to_retry(&method, &error) => return Err(error),
                Err(error) => unreached.push((base, error)),
            }
            self.skip_replica();
        }
        match (refused, unreached) {
            (Some(answer), _) => Ok(answer),
            (None, mut errors) if errors.len() == 1 => Err(errors.remove(0).1),
            (None, errors) => {
                let each = errors
                    .iter()
                    .map(|(url, error)| format!("\n  {url}: {}", brief(error)));
                Err(anyhow!("no replica responds{}", each.collect::<String>()))
            }
        }
    }

    /// Reads the resource at `path` after everything that was committed before. Also returns its
    /// version; `None` if it does not exist.
    pub(super) async fn latest(
        &self,
        path: &str,
    ) -> anyhow::Result<(JsonAnswer, Option<HeaderValue>)> {
        let latest = format!("{path}?read=linearizable");
        let answer = self.ask(Method::GET, &latest, None).await?;
        let version = answer.headers.get(ETAG).cloned();
        Ok((answer, version))
    }

    /// Reads the resource at `path`, passes it to `change` (`null` if it does not exist), and
    /// writes the result. Starts again if another operator has written in between.
    pub(super) async fn edit(
        &self,
        path: &str,
        change: impl Fn(Value) -> anyhow::Result<Value>,
    ) -> anyhow::Result<Value> {
        let mut edits = 0;
        loop {
            let (read, version) = self.latest(path).await?;
            let present = match read.status {
                StatusCode::NOT_FOUND => Value::Null,
                _ => read
                    .success()
                    .with_context(|| format!("GET {}", self.url(path)))?,
            };
            let body = change(present)?;
            let written = self.ask_over(Method::PUT, path, Some(&body), version);
            let written = written.await?;
            edits += 1;
            if written.status != StatusCode::PRECONDITION_FAILED || edits == EDITS_MAX {
                let success = written.success();
                return success.with_context(|| format!("PUT {}", self.url(path)));
            }
        }
    }

    /// Selects a replica that responds, and has a quorum if needed, for requests that are sent
    /// without [`Self::ask`].
    pub(super) async fn select_replica(&self, needs_quorum: bool) -> anyhow::Result<()> {
        let path = match needs_quorum {
            true => "/admin/v1/digest?read=linearizable",
            false => "/livez",
        };
        match self.admin.len() {
            1 => Ok(()),
            _ => self.ask(Method::GET, path, None).await.map(|_| ()),
        }
    }

    /// Makes the next replica the first one to use.
    pub(super) fn skip_replica(&self) {
        self.answering.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the URL of `path` at the replica that responded last, or at the first.
    pub(super) fn url(&self, path: &str) -> String {
        let at = self.answering.load(Ordering::Relaxed) % self.admin.len();
        let base = self.admin[at].to_string();
        format!("{}{path}", base.trim_end_matches('/'))
    }
}

/// Returns a brief reason why one of several replicas did not respond.
fn brief(error: &anyhow::Error) -> String {
    match error.downcast_ref::<NoConnectionError>() {
        Some(error) => error.cause.clone(),
        None => format!("{error:#}"),
    }
}

/// Whether a replica refused a request for lack of a quorum, so that another may serve it.
fn is_without_quorum(answer: &JsonAnswer) -> bool {
    let is_told = || {
        let problem = answer.json().unwrap_or_default();
        problem["type"] == "/problems/no-quorum" && problem["outcome"] != "unknown"
    };
    answer.status == StatusCode::SERVICE_UNAVAILABLE && is_told()
}

/// Whether a request that got no response can safely be sent to another replica.
fn is_safe_to_retry(method: &Method, error: &anyhow::Error) -> bool {
    *method == Method::GET || error.downcast_ref::<NoConnectionError>().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_syntax_in_names_is_encoded() {
        assert_eq!(encoded("a-1_B.~"), "a-1_B.~");
        assert_eq!(encoded("a/b?c&d=é %"), "a%2Fb%3Fc%26d%3D%C3%A9%20%25");
    }

    #[test]
    fn admin_urls_are_accepted_with_and_without_a_scheme() {
        for (right, scheme) in [
            ("http://a:1", "http"),
            ("http://a:1/", "http"),
            ("a:1", "http"),
            ("127.0.0.1:8081", "http"),
            ("[::1]:8081", "http"),
            ("https://a:1", "https"),
        ] {
            assert_eq!(admin_url(right).unwrap().scheme_str(), Some(scheme));
        }
        for wrong in [
            "",
            "ftp://a:1",
            "http://a:1/admin",
            "not a url",
            "a:1?b",
            "http://",
        ] {
            assert!(admin_url(wrong).is_err(), "{wrong}");
        }
    }
}
