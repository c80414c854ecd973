//! A stand-in for a gateway that asks endpoint pickers: it speaks external processing as Envoy does, from
//! the head of a request to the end of its answer, and sends requests to engines where a picker says.
//!
//! It is strict: an answer that Envoy's state machine would not take is an error. Pickers are asked in
//! turn, or the one that a request is pinned to; where one cannot be reached before anything went to
//! an engine, the next is asked.

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
use self::talk::{Picked, PickerTalk, Told};

/// Longest message that is taken from a picker, in bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// How a gateway is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayOptions {
    /// How both bodies go through the picker.
    pub bodies: BodySendMode,
    /// Whether bodies that stream wait until the picker has answered the head.
    pub waits_for_heads: bool,
    /// Whether a picker's answer to a head may change the modes, `allow_mode_override` of Envoy's.
    pub allows_override: bool,
    /// Bytes in one piece of a body, at most.
    pub piece_bytes: usize,
    /// The only endpoints that are offered; `None`: all.
    pub subset: Option<Vec<SocketAddr>>,
    /// How pickers are spoken to.
    pub tls: GatewayTls,
}

/// How a gateway connects to pickers, of which it verifies no certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewayTls {
    /// In the clear.
    Clear,
    /// With TLS, showing no certificate.
    Anonymous,
    /// With TLS, showing the certificate of these files in PEM, which are read for each connection.
    Shown {
        /// The certificate.
        cert_file: PathBuf,
        /// Its key.
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

/// A gateway in front of engines.
#[derive(Debug)]
pub struct StandInGateway {
    pickers: Vec<ExternalProcessorClient<Channel>>,
    options: GatewayOptions,
    engines: Client<HttpConnector, Full<Bytes>>,
    turn: AtomicUsize,
}

/// A request of a client.
#[derive(Debug, Clone)]
pub struct GatewayRequest {
    /// Its method.
    pub method: Method,
    /// Its path.
    pub path: String,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// The picker that is asked first; `None`: in turn.
    pub picker: Option<usize>,
    /// Its client leaves when it has got so many bytes of the answer's body.
    pub leaves_after: Option<usize>,
}

/// What a client got.
#[derive(Debug, Clone)]
pub struct GatewayAnswer {
    /// The status.
    pub status: StatusCode,
    /// Headers, as changed by the picker.
    pub headers: HeaderMap,
    /// The body, as far as its client stayed.
    pub body: Bytes,
    /// Who has answered; `None`: the picker itself.
    pub endpoint: Option<SocketAddr>,
}

impl GatewayRequest {
    /// A `POST` of JSON by a user.
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

    /// The same, asking this picker first.
    #[must_use]
    pub fn pinned(self, picker: usize) -> Self {
        Self {
            picker: Some(picker),
            ..self
        }
    }
}

impl StandInGateway {
    /// A gateway that asks these pickers. Connects when it first asks, and again when it has to.
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

    /// Serves one request.
    ///
    /// # Errors
    /// If no picker can be asked, one breaks the protocol, or no endpoint can be reached.
    pub async fn send(&self, request: &GatewayRequest) -> anyhow::Result<GatewayAnswer> {
        let first = request
            .picker
            .unwrap_or_else(|| self.turn.fetch_add(1, Relaxed));
        let mut last = None;
        for nth in 0..self.pickers.len() {
            let picker = &self.pickers[(first + nth) % self.pickers.len()];
            let mut talk = match PickerTalk::open(picker.clone(), &self.options).await {
                Ok(talk) => talk,
                Err(error) => {
                    last = Some(error);
                    continue;
                }
            };
            match talk.ask(request).await {
                Ok(Told::Immediate(answer)) => return Ok(answer),
                Ok(Told::Picked(picked)) => return self.forward(request, talk, picked).await,
                // Nothing went to an engine yet.
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
        for endpoint in &picked.endpoints {
            let mut outgoing = Request::new(Full::new(picked.body.clone()));
            *outgoing.method_mut() = request.method.clone();
            *outgoing.uri_mut() = format!("http://{endpoint}{}", request.path).parse()?;
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

/// Has an answer pass through the picker.
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
