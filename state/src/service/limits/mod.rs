//! Adaptive limits on a backend's concurrent requests: `b_t = min(b_mem, b_SLA)`.
//!
//! `Footprint` learns what requests hold and yields `b_mem` (Algorithm 1). `SlaController` learns
//! what the time between tokens allows and yields `b_SLA` (Algorithms 2 and 7). `apply` computes
//! both from replicated samples, so that every replica has the same limit at the same log index and
//! a new leader continues where the last one stopped. The algorithms are numbered as in
//! docs/adr/0031.
//!
//! The limit bounds how many requests may *start*. It may fall below the number running: no request
//! is withdrawn from an engine, and none starts until enough have ended. Algorithm 2 never goes
//! below the number of requests in decode. That floor is meant for a scheduler inside the engine,
//! which cannot remove a sequence from a batch. Here it would do harm: the count is as old as its
//! sample, and a floor refilled from it never falls.

mod footprint;
#[cfg(test)]
mod literal;
mod pace;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::ServiceSample;
use crate::settings::{AdmissionSettings, Concurrency};
pub(crate) use footprint::Footprint;
pub(crate) use pace::SlaController;

/// Settings of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LimitSettings {
    concurrency: Concurrency,
    sla: SlaSettings,
}

/// Settings of limits by service level (Algorithms 1, 2 and 7). All but the target are constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlaSettings {
    /// Target time between tokens (`D_SLA`), in microseconds; 0 to limit by memory only.
    inter_token_us: u32,
    /// Half width of the tolerance band around the target (`eps_D`), in microseconds.
    tolerance_us: u32,
    /// Lower bound of the limit (`B_min`), in requests.
    batch_min: u32,
    /// Upper bound of the limit (`B_max`), in requests.
    batch_max: u32,
    /// Quantile `z` of Algorithm 1, in thousandths: with 1645, memory overflows in 5 % of cases.
    memory_z_milli: u32,
}

impl From<u32> for SlaSettings {
    fn from(inter_token_us: u32) -> Self {
        Self {
            inter_token_us,
            tolerance_us: 5_000,
            batch_min: 1,
            batch_max: 1024,
            memory_z_milli: 1645,
        }
    }
}

impl From<&AdmissionSettings> for LimitSettings {
    fn from(settings: &AdmissionSettings) -> Self {
        Self {
            concurrency: settings.concurrency,
            sla: settings.inter_token_us.into(),
        }
    }
}

/// Maximum number of tokens per router block that a report may contain.
const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// State of the adaptive limit of one incarnation of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct AdaptiveLimit {
    footprint: Footprint,
    /// Number of tokens per block as last reported; 0 before the first report.
    block_tokens: u32,
    pace: SlaController,
}

/// The limit of one backend and the figures behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct LimitFigures {
    /// Maximum number of concurrent requests; `None`: unlimited.
    pub limit: Option<u32>,
    /// `b_mem`: the number of requests that its cache holds. `None`: its capacity is unknown, or
    /// too few requests were seen.
    pub b_mem: Option<u32>,
    /// `b_SLA`: the number of requests that the target time between tokens allows. `None`: there is
    /// no target.
    pub b_sla: Option<u32>,
    /// Capacity of its cache in tokens; `None` if unknown.
    pub capacity_tokens: Option<u64>,
    /// Number of requests behind the next two figures, faded.
    pub requests: u32,
    /// Mean number of tokens that a request adds.
    pub request_tokens: u64,
    /// Standard deviation of these tokens.
    pub request_tokens_deviation: u64,
    /// Time between tokens at the controller's last decision, in microseconds; milliseconds in
    /// JSON. `None` before the first.
    #[serde(
        rename = "inter_token_ms",
        serialize_with = "crate::readable::ms_of_us"
    )]
    #[schemars(with = "Option<f64>")]
    pub inter_token_us: Option<u32>,
    /// Search interval of the controller, `b_low` and `b_high`; `None` without a controller.
    #[schemars(with = "Option<[u32; 2]>")]
    pub interval: Option<(u32, u32)>,
}

impl AdaptiveLimit {
    /// Adds the measurements of one replica. `capacity_blocks` is `None` if unknown.
    pub(crate) fn observe(
        &mut self,
        sample: &ServiceSample,
        settings: &LimitSettings,
        capacity_blocks: Option<u32>,
    ) {
        self.footprint.observe(sample);
        if (1..=BLOCK_TOKENS_MAX).contains(&sample.block_tokens) {
            self.block_tokens = sample.block_tokens;
        }
        let sla = &settings.sla;
        if settings.concurrency == Concurrency::Adaptive && sla.inter_token_us > 0 {
            let b_mem = self.b_mem(sla, capacity_blocks);
            self.pace.observe(sample, sla, b_mem);
        } else {
            self.pace = SlaController::default();
        }
    }

    /// Returns the current limit and the figures behind it. `capacity_blocks` is `None` if unknown.
    pub(crate) fn figures(
        &self,
        settings: &LimitSettings,
        capacity_blocks: Option<u32>,
    ) -> LimitFigures {
        let sla = &settings.sla;
        let asks_pace = settings.concurrency == Concurrency::Adaptive && sla.inter_token_us > 0;
        let b_mem = self.b_mem(sla, capacity_blocks);
        let b_sla = asks_pace.then(|| self.pace.b_sla(sla));
        let adaptive = b_mem.into_iter().chain(b_sla).min();
        LimitFigures {
            limit: match settings.concurrency {
                Concurrency::Adaptive => adaptive.map(|b| b.clamp(sla.batch_min, sla.batch_max)),
                Concurrency::Unlimited => None,
                Concurrency::Fixed(requests) => Some(requests),
            },
            b_mem,
            b_sla,
            capacity_tokens: self.capacity_tokens(capacity_blocks),
            requests: self.footprint.requests(),
            request_tokens: self.footprint.mean(),
            request_tokens_deviation: self.footprint.deviation(),
            inter_token_us: self.pace.inter_token_us().filter(|_| asks_pace),
            interval: asks_pace.then(|| self.pace.interval(sla)),
        }
    }

    fn b_mem(&self, sla: &SlaSettings, capacity_blocks: Option<u32>) -> Option<u32> {
        let capacity_tokens = self.capacity_tokens(capacity_blocks)?;
        self.footprint
            .b_mem(capacity_tokens, sla.memory_z_milli, sla.batch_max)
    }

    /// Returns `eta` of Algorithm 1: the capacity in tokens. `None` if it is unknown.
    fn capacity_tokens(&self, capacity_blocks: Option<u32>) -> Option<u64> {
        let block_tokens = Some(self.block_tokens).filter(|tokens| *tokens > 0)?;
        Some(u64::from(capacity_blocks?) * u64::from(block_tokens))
    }
}
