//! A stand-in for a gateway with endpoint pickers. It passes requests and responses to a picker
//! with Envoy's external processing protocol, and sends each request to the engine that the picker
//! chooses.
//!
//! It is strict: a message that Envoy's state machine would reject is an error. The gateway asks
//! pickers in turn; a request that is pinned to a picker goes to that one first. If it loses a
//! picker before anything went to an engine, it asks the next.

mod dial;
mod messages;
mod talk;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context as _, bail, ensure};
use api::proxy::picker::ext_proc::BodySendMode;
use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tonic::transport::Channel;

pub use self::dial::picker_channel;
use self::talk::{Picked, PickerDecision, PickerTalk};

/// Maximum length of a message from a picker, in bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Options of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayOptions {
    /// Mode in which request and response bodies pass through the picker.
    pub bodies: BodySendMode,
    /// Whether streamed bodies wait for the picker's response to the head.
    pub waits_for_heads: bool,
    /// Whether a response to a head may change the body modes, like Envoy's `allow_mode_override`.
    pub allows_override: bool,
    /// Maximum length of a chunk of a body, in bytes.
    pub piece_bytes: usize,
    /// Endpoints that the picker may choose from; `None` for all.
    pub subset: Option<Vec<SocketAddr>>,
    /// TLS of connections to pickers.
    pub tls: GatewayTls,
}

/// How a gateway connects to pickers. It never verifies their certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewayTls {
    /// Plain TCP, without TLS.
    Clear,
    /// TLS without a client certificate.
    Anonymous,
    /// TLS with the client certificate in these PEM files, which are read for each connection.
    Shown {
        /// File with the certificate.
        cert_file: PathBuf,
        /// File with the certificate's private key.
        key_file: PathBuf,
    },
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            bodies: BodySendMode::FullDuplexStreamed,
            waits_for_heads: false,
            allows_override: false,
            piece_bytes: 16 * 1024,
            subset: None,
            tls: GatewayTls::Anonymous,
        }
    }
}

/// Stand-in for a gateway in front of engines.
#[derive(Debug)]
pub struct StandInGateway {
    pickers: Vec<ExternalProcessorClient<Channel>>,
    options: GatewayOptions,
    engines: Client<HttpConnector, Full<Bytes>>,
    turn: AtomicUsize,
}

/// A client's request to the gateway.
#[derive(Debug, Clone)]
pub struct GatewayRequest {
    /// HTTP method.
    pub method: Method,
    /// Request path.
    pub path: String,
    /// Request headers.
    pub headers: HeaderMap,
    /// Request body.
    pub body: Bytes,
    /// Index of the picker that is asked first; `None` to take turns.
    pub picker: Option<usize>,
    /// Number of response body bytes after which the client disconnects; `None` if it stays.
    pub leaves_after: Option<usize>,
}

/// The response that a client received.
#[derive(Debug, Clone)]
pub struct GatewayAnswer {
    /// HTTP status.
    pub status: StatusCode,
    /// Headers, as changed by the picker.
    pub headers: HeaderMap,
    /// Response body, up to the client's disconnect.
    pub body: Bytes,
    /// Endpoint that responded; `None` if the picker itself did.
    pub endpoint: Option<SocketAddr>,
}

impl GatewayRequest {
    /// Creates a `POST` request with a JSON body on behalf of `user`.
    #[must_use]
    pub fn post(path: &str, user: &str, body: &serde_json::Value) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(
            "content-type",
            http::HeaderValue::from_static("application/json"),
        );
        if let Ok(user) = http::HeaderValue::from_str(user) {
            headers.insert("x-quorate-user", user);
        }
        Self {
            method: Method::POST,
            path: path.to_owned(),
            headers,
            body: Bytes::from(body.to_string()),
            picker: None,
            leaves_after: None,
        }
    }

    /// Pins the request to the picker with the index `picker`, which is then asked first.
    #[must_use]
    pub fn pinned(self, picker: usize) -> Self {
        Self {
            picker: Some(picker),
            ..self
        }
    }
}

impl StandInGateway {
    /// Creates a gateway that asks the pickers at these addresses. It connects on first use, and
    /// again when necessary.
    #[must_use]
    pub fn new(pickers: &[SocketAddr], options: GatewayOptions) -> Self {
        let client = |at: &SocketAddr| {
            let client = ExternalProcessorClient::new(picker_channel(*at, &options.tls));
            client.max_decoding_message_size(MESSAGE_BYTES_MAX)
        };
        Self {
            pickers: pickers.iter().map(client).collect(),
            options,
            engines: Client::builder(TokioExecutor::new()).build_http(),
            turn: AtomicUsize::new(0),
        }
    }

    /// Sends one request to the engine that a picker chooses, and returns the response.
    ///
    /// # Errors
    /// If no picker can be reached, a picker breaks the protocol, or no chosen endpoint can be
    /// reached.
    pub async fn send(&self, request: &GatewayRequest) -> anyhow::Result<GatewayAnswer> {
        let first = request
            .picker
            .unwrap_or_else(|| self.turn.fetch_add(1, Relaxed));
        let mut last = None;
        for nth in 0..self.pickers.len() {
            let picker = &self.pickers[(first + nth) % self.pickers.len()];
            let mut talk = PickerTalk::open(picker.clone(), &self.options);
            match talk.ask(request).await {
                Ok(PickerDecision::Immediate(answer)) => return Ok(answer),
                Ok(PickerDecision::Picked(picked)) => {
                    return self.forward(request, talk, picked).await;
                }
                // Nothing went to an engine yet, so the next picker can be asked.
                Err(error) if talk.is_lost() => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.context("there is no picker")?.context("ask a picker"))
    }

    async fn forward(
        &self,
        request: &GatewayRequest,
        talk: PickerTalk,
        picked: Picked,
    ) -> anyhow::Result<GatewayAnswer> {
        let mut refused = None;
        let path = picked.path.as_ref().unwrap_or(&request.path);
        for endpoint in &picked.endpoints {
            let mut outgoing = Request::new(Full::new(picked.body.clone()));
            *outgoing.method_mut() = request.method.clone();
            *outgoing.uri_mut() = format!("http://{endpoint}{path}").parse()?;
            *outgoing.headers_mut() = picked.headers.clone();
            match self.engines.request(outgoing).await {
                Ok(response) => {
                    return answer(talk, response, *endpoint, request.leaves_after).await;
                }
                Err(error) if error.is_connect() => refused = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        match refused {
            Some(error) => Err(error).context("no endpoint can be reached"),
            None => bail!("a picker told no endpoint"),
        }
    }
}

/// Passes a response through the picker, until its end or the client's disconnect.
async fn answer(
    mut talk: PickerTalk,
    response: Response<Incoming>,
    endpoint: SocketAddr,
    leaves_after: Option<usize>,
) -> anyhow::Result<GatewayAnswer> {
    let (head, mut body) = response.into_parts();
    let headers = talk.answer_head(&head, endpoint).await?;
    let mut passed = Vec::new();
    let mut is_sent = false;
    while !talk.is_over() {
        let has_left = leaves_after.is_some_and(|bytes| passed.len() >= bytes);
        if has_left {
            break;
        }
        tokio::select! {
            biased;
            piece = talk.hear_piece(), if talk.is_owed() => passed.extend_from_slice(&piece?),
            frame = body.frame(), if !is_sent => match frame {
                Some(frame) => {
                    if let Ok(data) = frame?.into_data() {
                        match talk.shows_answers() {
                            true => talk.say_pieces(&data).await?,
                            false => passed.extend_from_slice(&data),
                        }
                    }
                }
                None => {
                    is_sent = true;
                    talk.say_end().await?;
                }
            },
        }
    }
    ensure!(
        leaves_after.is_some() || is_sent,
        "a picker ended an answer before its engine did"
    );
    Ok(GatewayAnswer {
        status: head.status,
        headers,
        body: passed.into(),
        endpoint: Some(endpoint),
    })
}
