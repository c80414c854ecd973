//! A KV connector like vLLM's `NixlConnector`: one engine computes prompts, another fetches them.
//!
//! A request with `do_remote_decode` creates an entry for its prompt. Its response has the entry's
//! address in `kv_transfer_params`. A request with these parameters, which set `do_remote_prefill`,
//! takes the entry from that engine over HTTP, waits as long as the transfer would take, and then
//! counts its prompt as computed. A transfer fails if the other engine cannot be reached, the entry
//! is gone or a fault is injected; [`LoadError`] defines what happens then. No blocks are held for
//! the other engine: only time is modelled.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Maximum number of prompts kept for other engines; the oldest is dropped first.
const ENTRIES_MAX: usize = 1024;
/// Path at which an engine hands an entry over to another engine.
pub(super) const TRANSFER_PATH: &str = "/kv_transfer/{entry}";

/// What to do with a request whose blocks cannot be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LoadError {
    /// Compute the blocks.
    #[default]
    Recompute,
    /// Respond with an error.
    Fail,
}

/// Options of an engine's connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferOptions {
    /// Fixed duration of a transfer, before its first token.
    pub base: Duration,
    /// Number of tokens whose blocks a transfer moves per second.
    pub tokens_per_s: u32,
    /// Interval of injected failures: every `lost_every`-th transfer fails; none if 0.
    pub lost_every: u32,
    /// Reaction to a failed transfer. Ignored with rooms, where the request fails.
    pub on_failure: LoadError,
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(5),
            tokens_per_s: 200_000,
            lost_every: 0,
            on_failure: LoadError::Recompute,
        }
    }
}

/// The `kv_transfer_params` of a request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct TransferParams {
    do_remote_decode: bool,
    do_remote_prefill: bool,
    remote_host: Option<String>,
    remote_port: Option<u16>,
    remote_request_id: Option<String>,
}

impl TransferParams {
    /// Returns whether the prompt's blocks are to be kept for another engine.
    pub(super) fn keeps(&self) -> bool {
        self.do_remote_decode
    }
}

/// An engine's KV connector, with the entries of kept prompts.
#[derive(Debug)]
pub(super) struct Connector {
    options: TransferOptions,
    address: SocketAddr,
    speed: f64,
    last: AtomicU64,
    fetched: AtomicU64,
    entries: Mutex<VecDeque<String>>,
}

impl Connector {
    pub(super) fn new(options: TransferOptions, address: SocketAddr, speed: f64) -> Self {
        Self {
            options,
            address,
            speed,
            last: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            entries: Mutex::default(),
        }
    }

    /// Keeps a computed prompt of `blocks` blocks for another engine. Returns the
    /// `kv_transfer_params` with which to fetch it.
    pub(super) fn keep(&self, blocks: u32) -> Value {
        let entry = format!("{:x}", self.last.fetch_add(1, Ordering::Relaxed));
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= ENTRIES_MAX {
            entries.pop_front();
        }
        entries.push_back(entry.clone());
        json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": (0..blocks).collect::<Vec<_>>(),
            "remote_engine_id": self.address.to_string(),
            "remote_request_id": entry,
            "remote_host": self.address.ip().to_string(),
            "remote_port": self.address.port(),
            "tp_size": 1,
        })
    }

    /// Removes an entry that another engine fetches. Returns whether it existed.
    pub(super) fn give(&self, entry: &str) -> bool {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let at = entries.iter().position(|kept| kept == entry);
        at.and_then(|at| entries.remove(at)).is_some()
    }

    /// Fetches a prompt of `tokens` tokens if the request sets `do_remote_prefill`. Returns whether
    /// its blocks are available here.
    ///
    /// # Errors
    /// With a message for the client, if the transfer failed and [`LoadError::Fail`] applies.
    pub(super) async fn fetch(
        &self,
        params: &TransferParams,
        tokens: u32,
    ) -> Result<bool, &'static str> {
        if !params.do_remote_prefill {
            return Ok(false);
        }
        let number = self.fetched.fetch_add(1, Ordering::Relaxed) + 1;
        let lost_every = u64::from(self.options.lost_every);
        let is_lost = lost_every > 0 && number.is_multiple_of(lost_every);
        if !is_lost && take(params).await.unwrap_or(false) {
            let rate = f64::from(self.options.tokens_per_s.max(1));
            let time = self.options.base.as_secs_f64() + f64::from(tokens) / rate;
            tokio::time::sleep(Duration::from_secs_f64(time / self.speed)).await;
            return Ok(true);
        }
        match self.options.on_failure {
            LoadError::Recompute => Ok(false),
            LoadError::Fail => Err("KV load failed"),
        }
    }
}

/// Takes the prompt's entry from the other engine. Returns whether it existed; `None` if the engine
/// cannot be reached or the parameters are invalid.
async fn take(params: &TransferParams) -> Option<bool> {
    let (host, port) = (params.remote_host.as_deref()?, params.remote_port?);
    let entry = params.remote_request_id.as_deref()?;
    let is_name = entry.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let mut socket = TcpStream::connect((host, port)).await.ok()?;
    let path = TRANSFER_PATH.replace("{entry}", entry);
    let head = format!("POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\n");
    let request = format!("{head}connection: close\r\n\r\n");
    if !is_name || socket.write_all(request.as_bytes()).await.is_err() {
        return None;
    }
    let mut status = [0; 12];
    socket.read_exact(&mut status).await.ok()?;
    Some(status.ends_with(b" 200"))
}
