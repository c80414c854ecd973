//! What of a config a running replica takes: limits, probes, the budget of retries, drain, and where engines may be.

use std::sync::{Arc, Mutex, PoisonError};

use api::backends::{Backends, EngineDialer};
use api::proxy::Proxy;
use arc_swap::ArcSwap;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::raft_options;
use crate::config::{Config, DrainConfig};

/// Hands a config to a replica that runs, or is about to.
#[derive(Clone, Default)]
pub struct ReloadHandle {
    state: Arc<Mutex<ReloadState>>,
    has_failed: Gauge,
}

enum ReloadState {
    /// It is not running yet: it takes this when it does.
    Starting(Option<Box<Config>>),
    Running(RunningParts),
}

impl Default for ReloadState {
    fn default() -> Self {
        Self::Starting(None)
    }
}

/// The parts that go by settings that can change.
pub(super) struct RunningParts {
    pub(super) proxy: Arc<Proxy>,
    pub(super) backends: Arc<Backends>,
    pub(super) drain: Arc<ArcSwap<DrainConfig>>,
    pub(super) engines: EngineDialer,
}

impl ReloadHandle {
    /// Says what came of the last reload.
    pub(crate) fn note(&self, has_failed: bool) {
        self.has_failed.set(i64::from(has_failed));
    }

    /// Registers the metric that tells whether the last reload failed.
    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "1 if the last reload of the config, its certificates or the access log failed";
        registry.register(
            "quorate_config_reload_failed",
            help,
            self.has_failed.clone(),
        );
    }

    /// Has the settings of `config` in effect that can be.
    pub(crate) fn take(&self, config: &Config) {
        // Every change leaves it well formed.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *state {
            ReloadState::Starting(next) => *next = Some(Box::new(config.clone())),
            ReloadState::Running(parts) => parts.take(config),
        }
    }

    /// The replica runs.
    pub(super) fn started(&self, parts: RunningParts) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let ReloadState::Starting(Some(config)) = &*state {
            parts.take(config);
        }
        *state = ReloadState::Running(parts);
    }
}

impl RunningParts {
    fn take(&self, config: &Config) {
        self.proxy
            .replace_limits(raft_options::limits(&config.limits));
        let retries = raft_options::retry_allowance(&config.retry);
        self.proxy.replace_retry_allowance(retries);
        self.backends
            .replace_settings(raft_options::probe_settings(config));
        self.drain.store(Arc::new(config.drain.clone()));
        self.engines.allow(config.engine_addresses.clone());
    }
}
