//! A state without a replica, for inspection: replayed from a store's log or read from a backup.
//!
//! A decision explained against it uses the state without any load, and assumes that every engine
//! is healthy.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use admin::explain_offline;
use anyhow::{Context, bail};
use api::engines::backends::{Backends, Health};
use api::files::backup::FileReader;
use api::proxy::RequestReader;
use api::routing::{OutboxSettings, Router, RouterParts};
use raft::ReplayRange;
use serde_json::Value;
use state::RouterState;
use state::ids::SessionId;

use super::machine::{RouterMachine, SharedState};
use super::options;
use crate::config::Config;

/// A state at one log index, without a replica.
pub struct OfflineState {
    shared: Arc<SharedState>,
    /// Range of log indexes that were available.
    pub range: ReplayRange,
}

/// Replays the log of the store below `data_dir` up to the index `to`, by default the last one
/// known to be committed. Copies the store to the new folder `scratch`, which it removes
/// afterwards. Blocks.
///
/// # Errors
/// Fails if the store is in use or damaged, or does not contain the index.
pub fn replayed(data_dir: &Path, scratch: &Path, to: Option<u64>) -> anyhow::Result<OfflineState> {
    let shared = Arc::new(SharedState::default());
    let mut machine = RouterMachine::new(Arc::clone(&shared), None);
    let range = raft::replay(data_dir, scratch, to, &mut machine)?;
    Ok(OfflineState { shared, range })
}

/// Reads a backup, which holds the state at one index. Blocks.
///
/// # Errors
/// Fails if the file is not a complete backup, or its index differs from `to`.
pub fn backed_up(file: &PathBuf, to: Option<u64>) -> anyhow::Result<OfflineState> {
    let opened = File::open(file).with_context(|| format!("open {}", file.display()))?;
    let (mut reader, head) = FileReader::open(BufReader::new(opened))
        .with_context(|| format!("read {}", file.display()))?;
    let index = head.index;
    if let Some(wanted) = to.filter(|wanted| *wanted != index) {
        bail!("index {wanted} is not in this backup: it has the state of index {index} only");
    }
    let shared = Arc::new(SharedState::default());
    let restored = shared.state().restore(&mut reader);
    restored.with_context(|| format!("read {}", file.display()))?;
    let range = ReplayRange {
        snapshot: index,
        committed: index,
        last: index,
    };
    Ok(OfflineState { shared, range })
}

impl OfflineState {
    /// Calls `read` on the state and returns its result.
    pub fn with_state<R>(&self, read: impl FnOnce(&RouterState) -> R) -> R {
        read(&self.shared.state())
    }

    /// Explains the request in `body`, which is a body of `POST /admin/v1/explain`, with the
    /// tokenizers and users of `config`.
    ///
    /// # Errors
    /// Returns the problem with which the admin API would respond.
    pub async fn explained(&self, config: &Config, body: &[u8]) -> anyhow::Result<Value> {
        let view = self.shared.state().view();
        let backends = Arc::new(Backends::new(config.probes.clone()));
        for backend in &view.registry().backends {
            backends.assume(backend.handle.slot, &ASSUMED);
        }
        let router = Router::new(RouterParts {
            view: Arc::clone(&view),
            backends,
            models: config.models.clone(),
            replica: config.id,
            session: SessionId(0),
            outbox: OutboxSettings::default(),
            overrides: config.policy_overrides.clone(),
            select: config.select.clone(),
            clock: api::base::clock::Clock::default(),
        });
        let settings = Arc::new(options::proxy_settings(config));
        let requests = RequestReader::new(&router, settings);
        let explained = explain_offline(&requests, &router, body).await;
        explained.map_err(|problem| {
            let detail = problem.detail.unwrap_or_default();
            anyhow::anyhow!("{}: {detail}", problem.title)
        })
    }
}

/// Health that is assumed for engines, which are not probed.
const ASSUMED: Health = Health {
    is_healthy: true,
    detail: None,
    waiting: 0,
    running: 0,
    kv_usage_permille: 0,
    adapters: None,
};
