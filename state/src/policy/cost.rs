//! `cost`: least predicted time to first token.
//!
//! What stands before the request's first token at a backend: the prefill that is dispatched but
//! not done, the request's own uncached prefill, the slots that decoding requests take from each
//! step, the engine's own queue, and preemption when its KV cache runs full. Each has a price in
//! nanoseconds; the sum saturates.

use super::{Candidate, CostSettings, Request};

/// Nanoseconds until the first token, as predicted.
pub(super) fn score(settings: &CostSettings, request: &Request, candidate: &Candidate) -> u64 {
    let prefill_tokens = candidate
        .pending_prefill_tokens
        .saturating_add(uncached_tokens(request, candidate));
    let pressure_permille = candidate
        .kv_usage_permille
        .saturating_sub(settings.kv_pressure_from_permille);
    [
        prefill_tokens.saturating_mul(u64::from(settings.prefill_ns_per_token)),
        product(candidate.running, settings.decode_ns_per_request),
        product(candidate.waiting, settings.waiting_ns_per_request),
        product(pressure_permille, settings.kv_pressure_ns_per_permille),
        eviction_ns(settings, request, candidate),
    ]
    .into_iter()
    .fold(0, u64::saturating_add)
}

/// Prompt tokens the backend would have to compute.
fn uncached_tokens(request: &Request, candidate: &Candidate) -> u64 {
    let matched = candidate.matched.min(request.blocks);
    u64::from(request.tokens).saturating_sub(product(matched, request.tokens_per_block))
}

/// What others lose: the blocks a full cache gives up for this request's new ones, at the price of
/// computing them again, as far as they are likely to be asked for again. Without it a backend that
/// holds the one block all prompts share would draw every request while others stand empty.
fn eviction_ns(settings: &CostSettings, request: &Request, candidate: &Candidate) -> u64 {
    let Some(capacity) = candidate.capacity_blocks else {
        return 0;
    };
    let new = request.blocks.saturating_sub(candidate.matched);
    let evicted = candidate
        .owned_blocks
        .saturating_add(new)
        .saturating_sub(capacity);
    product(evicted.min(new), request.tokens_per_block)
        .saturating_mul(u64::from(settings.prefill_ns_per_token))
        .saturating_mul(u64::from(settings.eviction_permille))
        / 1000
}

/// Cannot overflow: both factors have 32 bits.
fn product(count: u32, price: u32) -> u64 {
    u64::from(count) * u64::from(price)
}
