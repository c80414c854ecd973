//! Adaptive limits: how many requests a backend is given at once, `b_t = min(b_mem, b_SLA)`.
//!
//! `Footprint` learns what requests hold and answers `b_mem` (Algorithm 1), `SlaController` learns what
//! the time between tokens allows and answers `b_SLA` (Algorithms 2 and 7). Both are computed in
//! `apply` from replicated samples, so that every replica has the same limit at the same log index and
//! whoever leads next goes on where the last leader was.
//!
//! The limit says how many requests may *start*. It may fall below what runs: nothing is taken back
//! from an engine, and nothing starts until enough has ended. Algorithm 2's floor of "what decodes
//! at present" is for a scheduler inside the engine, which cannot take a sequence out of a batch. Here
//! it would do harm: the count is as old as its sample, and a floor that is refilled from it never
//! falls.

mod footprint;
#[cfg(test)]
mod literal;
mod pace;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use serde::Serialize;

use super::ServiceSample;
use crate::settings::{AdmissionSettings, Concurrency, SlaSettings};
pub(crate) use footprint::Footprint;
pub(crate) use pace::SlaController;

/// Most tokens that one of the router's blocks is believed to hold.
const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// What is learnt about the limit of one life of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct AdaptiveLimit {
    footprint: Footprint,
    /// Tokens per block as last told; 0: never.
    block_tokens: u32,
    pace: SlaController,
}

/// The limit of one backend and what it follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct LimitFigures {
    /// Requests that are given to the backend at once; `None`: as many as come.
    pub limit: Option<u32>,
    /// `b_mem`: what its cache holds; `None`: its capacity is unknown, or too few requests were seen.
    pub b_mem: Option<u32>,
    /// `b_SLA`: what the inter-token time allows; `None`: none is asked for.
    pub b_sla: Option<u32>,
    /// Tokens its cache holds; `None`: unknown.
    pub capacity_tokens: Option<u64>,
    /// Requests that the next two figures are of, faded.
    pub requests: u32,
    /// Mean of the tokens that a request adds.
    pub request_tokens: u64,
    /// Their standard deviation.
    pub request_tokens_deviation: u64,
    /// Time between tokens at the controller's last decision, microseconds; `None` before the first.
    pub inter_token_us: Option<u32>,
    /// The interval the controller searches, `b_low` and `b_high`; `None` without a controller.
    pub interval: Option<(u32, u32)>,
}

impl AdaptiveLimit {
    /// Takes in what a replica measured.
    pub(crate) fn observe(
        &mut self,
        sample: &ServiceSample,
        settings: &AdmissionSettings,
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

    /// The limit and what it follows from.
    pub(crate) fn figures(
        &self,
        settings: &AdmissionSettings,
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

    /// `eta` of Algorithm 1.
    fn capacity_tokens(&self, capacity_blocks: Option<u32>) -> Option<u64> {
        let block_tokens = Some(self.block_tokens).filter(|tokens| *tokens > 0)?;
        Some(u64::from(capacity_blocks?) * u64::from(block_tokens))
    }
}
