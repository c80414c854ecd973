//! Clients of the engines: connection pools, health probes, metrics and discovery.

use std::sync::Arc;

use state::ids::Slot;

/// What a replica knows of the registered backends' health and engine metrics. One per replica.
pub struct Backends {}

/// What the last probes said of one backend.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Health {
    /// Whether requests may go there.
    pub is_healthy: bool,
    /// Why not, or the last failure.
    pub detail: Option<String>,
    /// Requests in the engine's queue.
    pub waiting: u32,
    /// Requests running in the engine, all clients.
    pub running: u32,
    /// KV cache in use, thousandths.
    pub kv_usage_permille: u32,
}

impl Backends {
    /// Health of the backend in `slot`; `None` when nothing stands there. Never waits.
    #[must_use]
    pub fn health(&self, slot: Slot) -> Option<Arc<Health>> {
        let _ = slot;
        unimplemented!("backends helper")
    }

    /// A request to it failed to connect or was cut off: counts as a failed probe, so that a dead
    /// engine is passed over before the next probe.
    pub fn report_failure(&self, slot: Slot) {
        let _ = slot;
        unimplemented!("backends helper")
    }
}
