//! Capacity: how many engines each model needs, as one number for the whole cluster.
//!
//! Replicas report their *demand* for a model (requests that run and wait, prompt tokens that wait) as
//! it is, not what changed, at most once a second. `apply` adds the reports up and combines them with
//! what the state knows of the model's engines: limits, room for KV cache and learned prices. So every
//! replica has the same number at the same log index, and it survives the replica that computed it.
//!
//! Engines are needed for two reasons, of which the greater counts ([`needed_engines`]):
//! - *Places*: the engines have as many places as requests run and wait, and spare ones: the square root
//!   of that number, and at least one of [`SPARE_DIVISOR`] requests.
//! - *Wait*: the engines compute the waiting prompts within [`WAIT_TARGET_MS`].
//!
//! Requests are smoothed over [`SMOOTHING_MS`], so that a burst of a second starts no engine. The
//! number rises with the need, to at least 1 with the first request. It falls to the greatest need of
//! the last [`HOLD_MS`] only, so it does not flap, and is 0 only after that time without any request.
//!
//! Time passes with the log. While a model needs engines, replicas repeat their reports, so that the
//! number can fall; once it is 0, nothing is written.

mod need;
mod table;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};

pub use need::{
    EngineRoom, HOLD_MS, PLACES_UNKNOWN, PREFILL_NS_UNKNOWN, SMOOTHING_MS, SPARE_DIVISOR,
    WAIT_TARGET_MS, needed_engines, saturation_permille,
};
pub(crate) use table::{Capacity, EngineFigures};
pub use table::{CapacityView, ModelCapacityView};

/// Maximum number of models whose demand is known. Beyond it, a model that needs no engine is
/// forgotten; if there is none, the report has no effect.
pub const DEMAND_MODELS_MAX: usize = 64;
/// Maximum number of requests in one report.
pub const DEMAND_REQUESTS_MAX: u32 = 1 << 24;
/// Maximum number of waiting prompt tokens in one report.
pub const DEMAND_TOKENS_MAX: u64 = 1 << 40;

/// Demand of one replica for one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub struct ModelDemand {
    /// Number of requests that wait at the replica.
    pub waiting: u32,
    /// Number of requests of the replica that run at engines which serve the model.
    pub running: u32,
    /// Number of prompt tokens of the waiting requests that no engine is believed to have cached.
    pub waiting_tokens: u64,
}

impl ModelDemand {
    /// Returns the number of requests that run and wait.
    #[must_use]
    pub fn requests(&self) -> u64 {
        u64::from(self.waiting) + u64::from(self.running)
    }

    fn add(&mut self, other: &Self) {
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.running = self.running.saturating_add(other.running);
        self.waiting_tokens = self.waiting_tokens.saturating_add(other.waiting_tokens);
    }
}

/// What a replica reports of its demand for one model. It replaces the replica's earlier report.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct DemandReport {
    /// Name of the model.
    pub model: String,
    /// Demand at the time of the report.
    pub demand: ModelDemand,
    /// Number of requests that the replica sent to engines since its last report. They may have ended.
    pub started: u32,
}

impl DemandReport {
    /// Whether a replica can have this demand.
    pub(crate) fn is_plausible(&self) -> bool {
        let demand = &self.demand;
        let counts = [demand.waiting, demand.running, self.started];
        counts.iter().all(|count| *count <= DEMAND_REQUESTS_MAX)
            && demand.waiting_tokens <= DEMAND_TOKENS_MAX
    }
}
