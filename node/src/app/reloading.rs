//! Settings that a running replica reloads: limits, probes, retries, drain and engine addresses.

use std::sync::{Arc, Mutex, PoisonError};

use api::engines::backends::{Backends, EngineDialer};
use api::proxy::Proxy;
use arc_swap::ArcSwap;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::config::{Config, DrainConfig};

/// Handle that passes a config to a replica, which need not run yet.
#[derive(Clone, Default)]
pub struct ReloadHandle {
    state: Arc<Mutex<ReloadState>>,
    has_failed: Gauge,
}

enum ReloadState {
    /// The replica does not run yet. It uses this config when it starts, if any.
    Starting(Option<Box<Config>>),
    Running(RunningParts),
}

impl Default for ReloadState {
    fn default() -> Self {
        Self::Starting(None)
    }
}

/// Components of a running replica whose settings can change at run time.
pub(super) struct RunningParts {
    pub(super) proxy: Arc<Proxy>,
    pub(super) backends: Arc<Backends>,
    pub(super) drain: Arc<ArcSwap<DrainConfig>>,
    pub(super) engines: EngineDialer,
}

impl ReloadHandle {
    /// Records whether the last reload failed.
    pub(crate) fn note(&self, has_failed: bool) {
        self.has_failed.set(i64::from(has_failed));
    }

    /// Registers the metric that shows whether the last reload failed.
    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "1 if the last reload of the config or its certificates failed";
        registry.register(
            "quorate_config_reload_failed",
            help,
            self.has_failed.clone(),
        );
    }

    /// Applies the settings of `config` that can change at run time.
    pub(crate) fn take(&self, config: &Config) {
        // Every change leaves the value complete, so a poisoned lock is harmless.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *state {
            ReloadState::Starting(next) => *next = Some(Box::new(config.clone())),
            ReloadState::Running(parts) => parts.take(config),
        }
    }

    /// Passes later configs to the components of the replica, which now runs.
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
        self.proxy.replace_limits(config.limits);
        self.backends.replace_settings(config.probes.clone());
        self.drain.store(Arc::new(config.drain.clone()));
        self.engines.allow(config.engine_addresses.clone());
    }
}
