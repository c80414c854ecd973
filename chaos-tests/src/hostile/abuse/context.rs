//! State and helpers that all attacks share: the cluster and connections to it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use api::net::tls::MaybeTls;
use bytes::Bytes;
use http::{HeaderName, StatusCode};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::hostile::client::{self, OutgoingRequest, RequestError, ResponseHead};
use crate::hostile::engine::MODEL;
use crate::hostile::record::EngineRecord;
use crate::processes::access::{ClientAccess, key};

/// Source address from which attacks connect.
pub(super) const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 1);
/// Path to which attacks send chat requests.
pub(super) const CHAT: &str = "/v1/chat/completions";
/// User in whose name attacks send requests, with a valid API key.
pub(super) const ATTACKER: &str = "greedy";
/// Maximum wait for a connection or a response.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Maximum number of bytes kept of a response.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// Connection that an attack opens, with or without TLS.
pub(super) type AbuseStream = MaybeTls<TcpStream>;

/// State that all attacks share.
#[derive(Debug)]
pub(super) struct AbuseContext {
    pub(super) data: Vec<SocketAddr>,
    pub(super) access: ClientAccess,
    pub(super) seen: Arc<EngineRecord>,
    /// Factor for the size of an attack, relative to its size in tests.
    pub(super) scale: usize,
    pub(super) ends: Mutex<BTreeMap<String, u64>>,
}

impl AbuseContext {
    /// Counts one more connection or request that ended as `how` states.
    pub(super) fn count(&self, how: impl Into<String>) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        *ends.entry(how.into()).or_default() += 1;
    }

    /// Opens a connection to a replica and offers `protocol` in the TLS handshake.
    pub(super) async fn connect(
        &self,
        replica: usize,
        protocol: &[u8],
    ) -> anyhow::Result<AbuseStream> {
        let to = self.data[replica];
        let connected = timeout(PATIENCE, async {
            let socket = client::connect(FROM.into(), to).await?;
            socket.set_nodelay(true)?;
            self.access.speaking(protocol).secure(socket, to).await
        });
        let connected = connected.await.context("no connection in time")?;
        connected.with_context(|| format!("connect to replica {}", replica + 1))
    }

    /// Sends one chat request on its own connection and returns the head of the response.
    pub(super) async fn ask(
        &self,
        replica: usize,
        id: &str,
        is_streamed: bool,
    ) -> Result<ResponseHead, RequestError> {
        let asked = chat(ATTACKER, id, is_streamed);
        client::ask(&self.access, FROM, self.data[replica], asked).await
    }
}

/// Returns the body of a chat request with one message.
pub(super) fn chat_body(content: &str, is_streamed: bool) -> Bytes {
    let body = json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": content }],
        "stream": is_streamed,
    });
    body.to_string().into()
}

/// Returns a chat request of `user`. The beginning of `id` selects the engine's behaviour. Each
/// request has its own prompt, because the router rejects prompts that break engines.
pub(super) fn chat(user: &str, id: &str, is_streamed: bool) -> OutgoingRequest {
    let mut asked = OutgoingRequest::post(CHAT, &key(user), chat_body(id, is_streamed));
    asked.set(HeaderName::from_static("x-request-id"), id);
    asked
}

/// Waits for a response. Returns its status and as much of its body as arrived, or the error.
pub(super) async fn outcome(
    asked: impl Future<Output = Result<ResponseHead, RequestError>>,
) -> (Option<StatusCode>, String) {
    let outcome = timeout(PATIENCE, async {
        let mut head = match asked.await {
            Ok(head) => head,
            Err(error) => return (None, error.to_string()),
        };
        let mut text = String::new();
        loop {
            match head.piece().await {
                Ok(None) => return (Some(head.status), text),
                Ok(Some(piece)) if text.len() < TEXT_BYTES_MAX => {
                    text.push_str(&String::from_utf8_lossy(&piece));
                }
                Ok(Some(_)) => {}
                Err(error) => return (Some(head.status), format!("{text} {error}")),
            }
        }
    });
    let late = (None, "no end in time".to_owned());
    outcome.await.unwrap_or(late)
}
