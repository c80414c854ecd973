//! Room for a batch (Algorithm 3). The queue selects the batch's bin (Algorithm 5) and its requests,
//! in its own order: by arrival, the batch of a user with many requests would hold only those.
//!
//! A batch is the longest run in that order that fits. A request whose own tokens exceed a backend's
//! memory is rejected on arrival ([`fits`]): in the queue it would never fit into a batch and would
//! block its bin for good.
//!
//! The original keeps statistics per bin to estimate the size of a batch. This module adds up the
//! candidates' own tokens (prompt and predicted output), which is what the statistics estimate.

/// Whether a request of `tokens` tokens, prompt and output, can ever run on a backend with a cache
/// of `capacity_tokens`. If the capacity is unknown (`None`), any request can.
#[must_use]
pub fn fits(tokens: u64, capacity_tokens: Option<u64>) -> bool {
    capacity_tokens.is_none_or(|capacity| tokens <= capacity)
}

/// Free capacity of a backend for one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRoom {
    /// Number of requests that still fit: `min(b_mem, b_SLA)` less the running ones.
    pub requests: u32,
    /// Number of tokens that still fit; `None` if unknown, which means unlimited.
    pub tokens: Option<u64>,
}

impl BatchRoom {
    /// Whether a request of `tokens` tokens fits.
    #[must_use]
    pub fn fits(&self, tokens: u64) -> bool {
        self.requests > 0 && fits(tokens, self.tokens)
    }

    /// Takes the room of a request of `tokens` tokens.
    pub fn take(&mut self, tokens: u64) {
        self.requests = self.requests.saturating_sub(1);
        self.tokens = self.tokens.map(|free| free.saturating_sub(tokens));
    }
}
