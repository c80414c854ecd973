//! What attacks share: the cluster, and connections to it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use api::tls::MaybeTls;
use bytes::Bytes;
use http::{HeaderName, StatusCode};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::engine::{MODEL, SeenHeads};
use crate::processes::access::{ClientAccess, key};
use crate::wire::{self, OutgoingRequest, RequestError, ResponseHead};

/// Where attacks come from.
pub(super) const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 1);
/// Where requests go.
pub(super) const CHAT: &str = "/v1/chat/completions";
/// Who attacks, and has a key.
pub(super) const ATTACKER: &str = "greedy";
/// Longest that a connection, or an answer, is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Most of an answer that is kept.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// A connection of an attack.
pub(super) type AbuseStream = MaybeTls<TcpStream>;

/// What attacks share.
#[derive(Debug)]
pub(super) struct AbuseContext {
    pub(super) data: Vec<SocketAddr>,
    pub(super) access: ClientAccess,
    pub(super) seen: Arc<SeenHeads>,
    /// How many times as large an attack is as in a test.
    pub(super) scale: usize,
    pub(super) ends: Mutex<BTreeMap<String, u64>>,
}

impl AbuseContext {
    /// Notes how something ended.
    pub(super) fn count(&self, how: impl Into<String>) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        *ends.entry(how.into()).or_default() += 1;
    }

    /// A connection that speaks this protocol.
    pub(super) async fn connect(
        &self,
        replica: usize,
        protocol: &[u8],
    ) -> anyhow::Result<AbuseStream> {
        let to = self.data[replica];
        let connected = timeout(PATIENCE, async {
            let socket = wire::connect(FROM.into(), to).await?;
            socket.set_nodelay(true)?;
            self.access.speaking(protocol).secure(socket, to).await
        });
        let connected = connected.await.context("no connection in time")?;
        connected.with_context(|| format!("connect to replica {}", replica + 1))
    }

    /// Asks once on a connection of its own: the answer's beginning.
    pub(super) async fn ask(
        &self,
        replica: usize,
        id: &str,
        is_streamed: bool,
    ) -> Result<ResponseHead, RequestError> {
        let asked = chat(ATTACKER, id, is_streamed);
        wire::ask(&self.access, FROM, self.data[replica], asked).await
    }
}

/// The body of a chat.
pub(super) fn chat_body(content: &str, is_streamed: bool) -> Bytes {
    let body = json!({
        "model": MODEL,
        "messages": [{ "role": "user", "content": content }],
        "stream": is_streamed,
    });
    body.to_string().into()
}

/// A chat of a user; what the id begins with tells the engine how to behave. Each has a prompt of its
/// own, as those that break engines are refused.
pub(super) fn chat(user: &str, id: &str, is_streamed: bool) -> OutgoingRequest {
    let mut asked = OutgoingRequest::post(CHAT, &key(user), chat_body(id, is_streamed));
    asked.set(HeaderName::from_static("x-request-id"), id);
    asked
}

/// How a request ended, and its answer's body as far as it came.
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
