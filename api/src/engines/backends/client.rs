//! A small HTTP client for probes: one keep-alive connection to one backend, GET only, everything
//! bounded. It is separate from the data plane's pool, so that a full pool cannot make a healthy
//! backend look dead, and a probe cannot take a connection from a request.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, HOST, USER_AGENT};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::NAME_HOLDS_FOR;
use super::dialer::{EngineDialer, RulesId};
use super::keys::EngineHeaders;
use super::local_failure::is_local;
use super::url::{EngineUrl, EngineUrlError};

/// A complete response to a probe.
#[derive(Debug)]
pub(crate) struct ProbeResponse {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

/// Reason why a probe got no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProbeError {
    #[error("{0:?}: {1}")]
    Url(String, EngineUrlError),
    #[error("{0:?} is not a path")]
    Path(String),
    #[error("connect: {0}")]
    Connect(std::io::Error),
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("http: {0}")]
    Http(hyper::Error),
    #[error("body is longer than {0} bytes")]
    TooLong(usize),
}

impl ProbeError {
    /// Whether this process could not send the probe, so that it reveals nothing about the backend.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Connect(error) if is_local(error))
    }
}

/// A probe's client of one backend. Dropping it closes its connection.
pub(crate) struct ProbeClient {
    url: EngineUrl,
    host: HeaderValue,
    headers: Option<EngineHeaders>,
    timeout: Duration,
    dialer: EngineDialer,
    connection: Option<ProbeConnection>,
}

struct ProbeConnection {
    sender: SendRequest<Empty<Bytes>>,
    /// Id of the address rules that applied when the connection was opened.
    rules: RulesId,
    opened_at: Instant,
    _driver: AbortOnDropHandle<()>,
}

impl ProbeClient {
    /// Creates a client of the engine at `url` that sends the credentials `headers`, if any. Each
    /// call takes at most `timeout`.
    pub(crate) fn new(
        url: &str,
        headers: Option<EngineHeaders>,
        (timeout, dialer): (Duration, &EngineDialer),
    ) -> Result<Self, ProbeError> {
        let bad = |why| ProbeError::Url(url.to_owned(), why);
        let url = EngineUrl::parse(url).map_err(bad)?;
        let host = url.host_header();
        Ok(Self {
            host: host.ok_or_else(|| bad(EngineUrlError))?,
            url,
            headers,
            timeout,
            dialer: dialer.clone(),
            connection: None,
        })
    }

    /// Sets the credentials for subsequent requests; `None` to send none.
    pub(crate) fn authorize(&mut self, headers: Option<EngineHeaders>) {
        self.headers = headers;
    }

    /// Sets the timeout for subsequent calls.
    pub(crate) fn patience(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sends `GET path` and returns a response with a body of at most `body_bytes_max` bytes.
    pub(crate) async fn get(
        &mut self,
        path: &str,
        body_bytes_max: usize,
    ) -> Result<ProbeResponse, ProbeError> {
        let limit = self.timeout;
        // Move the connection out, so that cancelling the call closes it.
        let kept = self.connection.take();
        match tokio::time::timeout(limit, self.exchange(kept, path, body_bytes_max)).await {
            Ok(Ok((answer, connection))) => {
                self.connection = Some(connection);
                Ok(answer)
            }
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(ProbeError::Timeout(limit)),
        }
    }

    async fn exchange(
        &self,
        kept: Option<ProbeConnection>,
        path: &str,
        body_bytes_max: usize,
    ) -> Result<(ProbeResponse, ProbeConnection), ProbeError> {
        if let Some(mut connection) = kept.filter(|kept| self.is_usable(kept)) {
            match self.ask(&mut connection, path, body_bytes_max).await {
                Ok(answer) => return Ok((answer, connection)),
                // Engines close idle connections at will, so only a new connection is conclusive.
                Err(ProbeError::Http(_)) => {}
                Err(failure) => return Err(failure),
            }
        }
        let mut connection = self.connect().await?;
        let answer = self.ask(&mut connection, path, body_bytes_max).await?;
        Ok((answer, connection))
    }

    /// Whether the kept connection is open and still suits the engine's name and the current
    /// address rules.
    fn is_usable(&self, kept: &ProbeConnection) -> bool {
        let leads_here = !self.url.is_name() || kept.opened_at.elapsed() < NAME_HOLDS_FOR;
        leads_here && kept.rules == self.dialer.rules() && !kept.sender.is_closed()
    }

    async fn connect(&self) -> Result<ProbeConnection, ProbeError> {
        let rules = self.dialer.rules();
        let stream = self.dialer.reach(&self.url).await;
        let stream = stream.map_err(ProbeError::Connect)?;
        let stream = self.dialer.secure(&self.url, stream).await;
        let stream = stream.map_err(ProbeError::Connect)?;
        let (sender, driver) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(ProbeError::Http)?;
        let driver = tokio::spawn(async move {
            // The sender's users detect the end of the connection.
            drop(driver.await);
        });
        Ok(ProbeConnection {
            sender,
            rules,
            opened_at: Instant::now(),
            _driver: AbortOnDropHandle::new(driver),
        })
    }

    async fn ask(
        &self,
        connection: &mut ProbeConnection,
        path: &str,
        body_bytes_max: usize,
    ) -> Result<ProbeResponse, ProbeError> {
        let request = self.request(path)?;
        let sender = &mut connection.sender;
        sender.ready().await.map_err(ProbeError::Http)?;
        let response = sender
            .send_request(request)
            .await
            .map_err(ProbeError::Http)?;
        let status = response.status();
        let mut frames = response.into_body();
        let mut body = BytesMut::new();
        while let Some(frame) = frames.frame().await {
            let frame = frame.map_err(ProbeError::Http)?;
            if let Some(data) = frame.data_ref() {
                if body.len() + data.len() > body_bytes_max {
                    return Err(ProbeError::TooLong(body_bytes_max));
                }
                body.extend_from_slice(data);
            }
        }
        Ok(ProbeResponse {
            status,
            body: body.freeze(),
        })
    }

    fn request(&self, path: &str) -> Result<Request<Empty<Bytes>>, ProbeError> {
        let mut request = Request::new(Empty::new());
        let target = path.parse();
        let target = target.map_err(|_| ProbeError::Path(path.to_owned()))?;
        *request.uri_mut() = self.url.locate(target);
        let headers = request.headers_mut();
        headers.insert(HOST, self.host.clone());
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
        headers.insert(USER_AGENT, HeaderValue::from_static("quorate-probe"));
        if let Some(own) = &self.headers {
            own.put_into(headers);
        }
        Ok(request)
    }
}
