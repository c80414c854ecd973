//! A minimal client of the Kubernetes API for reading pods: `GET` of an object and a watch, with
//! this crate's usual HTTP and TLS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, HOST, USER_AGENT};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Collected, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};
use tokio_util::task::AbortOnDropHandle;

use crate::engines::backends::EngineUrl;
use crate::engines::discovery::KubernetesAccess;
use crate::net::tls::{Certificates, ClientFiles, MaybeTls, NamedFile};

/// Task that drives a connection. Dropping it closes the connection.
type ApiConnection = AbortOnDropHandle<()>;

/// Environment variables with the address of the API server in a pod.
const SERVER_VARIABLES: [&str; 2] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];
/// Timeout for connecting, and for the head of a response.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum silence of a watch: servers send bookmarks about once a minute.
const SILENCE_MAX: Duration = Duration::from_secs(180);
/// Maximum length of a response, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Maximum length of one event, in bytes.
const EVENT_BYTES_MAX: usize = 4 << 20;

/// Reason why a request failed or its response cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// A setting or a file is missing or unusable.
    #[error("{0}")]
    Setup(String),
    /// The connection failed.
    #[error("connect to {0}: {1}")]
    Connect(String, io::Error),
    /// The connection broke during the exchange.
    #[error("http: {0}")]
    Http(#[from] hyper::Error),
    /// The server responded with an error status.
    #[error("{0} to {1}: {2}")]
    Refused(StatusCode, String, String),
    /// The server no longer knows the requested position in the stream.
    #[error("the API server no longer has the resource version")]
    Expired,
    /// The server did not respond in time.
    #[error("no response within {0:?}")]
    Silent(Duration),
    /// The response does not have the expected form.
    #[error("{0}")]
    Unexpected(String),
}

/// Percent-encodes the value of a query parameter.
pub(super) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// A client of one API server.
#[derive(Clone)]
pub(super) struct ApiClient {
    server: EngineUrl,
    authorization: Option<HeaderValue>,
    tls: Option<Arc<ClientConfig>>,
}

impl ApiClient {
    /// Creates a client. Reads the token and the authorities from their files each time, because
    /// they expire.
    pub(super) fn new(access: &KubernetesAccess) -> Result<Self, ApiError> {
        let server = match &access.api_server {
            Some(server) => server.clone(),
            None => in_cluster()?,
        };
        let token = &access.token_file;
        let authorization = match std::fs::read_to_string(token) {
            Ok(token) => {
                let value = HeaderValue::from_str(&format!("Bearer {}", token.trim()));
                let mut value = value.map_err(|_| {
                    let shown = access.token_file.display();
                    ApiError::Setup(format!("{shown} holds no token"))
                })?;
                value.set_sensitive(true);
                Some(value)
            }
            // A proxy next to this process may not need a token.
            Err(_) if !server.is_tls() => None,
            Err(error) => {
                let shown = token.display();
                return Err(ApiError::Setup(format!("read {shown}: {error}")));
            }
        };
        let tls = match server.is_tls() {
            false => None,
            true => Some(trust(access)?),
        };
        Ok(Self {
            server,
            authorization,
            tls,
        })
    }

    /// Returns the object at `path`.
    pub(super) async fn get(&self, path: &str) -> Result<Value, ApiError> {
        let (answer, _connection) = self.ask(path).await?;
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect();
        let body = tokio::time::timeout(SILENCE_MAX, body).await;
        let body = body.map_err(|_| ApiError::Silent(SILENCE_MAX))?;
        let body = body.map_err(|error| ApiError::Unexpected(format!("{path}: {error}")))?;
        let object = serde_json::from_slice(&body.to_bytes());
        object.map_err(|error| ApiError::Unexpected(format!("{path}: {error}")))
    }

    /// Begins the watch at `path`.
    pub(super) async fn watch(&self, path: &str) -> Result<WatchStream, ApiError> {
        let (answer, connection) = self.ask(path).await?;
        Ok(WatchStream {
            body: answer.into_body(),
            rest: BytesMut::new(),
            _connection: connection,
        })
    }

    /// Sends a request on a connection of its own, and returns a successful response.
    async fn ask(&self, path: &str) -> Result<(Response<Incoming>, ApiConnection), ApiError> {
        let asking = tokio::time::timeout(TIMEOUT, self.exchange(path)).await;
        let (answer, connection) = asking.map_err(|_| ApiError::Silent(TIMEOUT))??;
        let status = answer.status();
        if status.is_success() {
            return Ok((answer, connection));
        }
        if status == StatusCode::GONE {
            return Err(ApiError::Expired);
        }
        let place = path.split('?').next().unwrap_or(path).to_owned();
        let body = Limited::new(answer.into_body(), EVENT_BYTES_MAX).collect();
        let body = tokio::time::timeout(TIMEOUT, body).await;
        let body = body.ok().and_then(Result::ok).map(Collected::to_bytes);
        let told: Value = serde_json::from_slice(&body.unwrap_or_default()).unwrap_or_default();
        let message = told["message"].as_str().unwrap_or("no message").to_owned();
        Err(ApiError::Refused(status, place, message))
    }

    async fn exchange(&self, path: &str) -> Result<(Response<Incoming>, ApiConnection), ApiError> {
        let stream = self.connect().await;
        let stream =
            stream.map_err(|error| ApiError::Connect(self.server.as_str().to_owned(), error))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(async move { drop(connection.await) });
        let connection = AbortOnDropHandle::new(driver);
        let mut request = Request::get(path).header(ACCEPT, "application/json");
        request = request.header(USER_AGENT, concat!("quorate/", env!("CARGO_PKG_VERSION")));
        if let Some(host) = self.server.host_header() {
            request = request.header(HOST, host);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|_| ApiError::Setup(format!("{path:?} is not a path")))?;
        Ok((sender.send_request(request).await?, connection))
    }

    async fn connect(&self) -> io::Result<MaybeTls<TcpStream>> {
        let (host, port) = (self.server.host(), self.server.port());
        let stream = TcpStream::connect((host, port)).await?;
        let Some(config) = &self.tls else {
            return Ok(MaybeTls::Clear(stream));
        };
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let connected = TlsConnector::from(Arc::clone(config)).connect(name, stream);
        Ok(MaybeTls::Tls(Box::new(TlsStream::Client(connected.await?))))
    }
}

/// Returns the address of the API server of the cluster in which this pod runs.
fn in_cluster() -> Result<EngineUrl, ApiError> {
    let [host, port] = SERVER_VARIABLES.map(|name| std::env::var(name).ok());
    let (Some(host), Some(port)) = (host, port) else {
        let [host, port] = SERVER_VARIABLES;
        let expected = format!("{host} and {port} are not set, so this is not a pod");
        return Err(ApiError::Setup(expected));
    };
    let host = match host.contains(':') {
        true => format!("[{host}]"),
        false => host,
    };
    let url = EngineUrl::parse(&format!("https://{host}:{port}"));
    url.map_err(|error| ApiError::Setup(format!("{}: {error}", SERVER_VARIABLES.join(", "))))
}

fn trust(access: &KubernetesAccess) -> Result<Arc<ClientConfig>, ApiError> {
    let files = ClientFiles {
        authorities: Some(NamedFile {
            key: "discovery.ca_file".into(),
            path: access.ca_file.clone(),
        }),
        trusts_system: false,
        certificate: None,
        protocols: &[b"http/1.1"],
    };
    let certificates = Certificates::load("discovery", files);
    let certificates = certificates.map_err(|error| ApiError::Setup(error.to_string()))?;
    Ok(certificates.current())
}

/// A watch, which delivers one line of JSON per event.
pub(super) struct WatchStream {
    body: Incoming,
    rest: BytesMut,
    _connection: ApiConnection,
}

impl WatchStream {
    /// Returns the next event; `None` if the server has ended the watch.
    pub(super) async fn next(&mut self) -> Result<Option<Value>, ApiError> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.rest) {
                let line = self.rest.split_to(end + 1);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let event = serde_json::from_slice(&line);
                return event.map(Some).map_err(|error| {
                    ApiError::Unexpected(format!("an event that is not JSON: {error}"))
                });
            }
            if self.rest.len() > EVENT_BYTES_MAX {
                let found = format!("an event of more than {EVENT_BYTES_MAX} bytes");
                return Err(ApiError::Unexpected(found));
            }
            let frame = tokio::time::timeout(SILENCE_MAX, self.body.frame()).await;
            match frame.map_err(|_| ApiError::Silent(SILENCE_MAX))? {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        self.rest.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}
