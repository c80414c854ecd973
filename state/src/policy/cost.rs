//! `cost`: least predicted time to first token, of this request and of those that it delays.
//!
//! The prediction adds up what precedes the request's first token at a backend. *Ahead of it* are
//! dispatched but unfinished prefill, the share of each step that decoding requests take, the
//! engine's own queue, and preemption when the KV cache runs full. *Its work* is its own uncached
//! prefill, and the prefill that must be repeated for the blocks that it evicts. Each has a price
//! in nanoseconds; sums saturate. Blocks on tiers below the GPU are not computed but loaded, at
//! prices of their own.
//!
//! What is ahead delays only this request. Its work also delays every request that arrives before
//! the work is done. In a steady state, as many requests arrive during a wait as are found waiting
//! (Little's law). So the work counts once for the request, and once for each request that waits
//! for its first token at an average backend. An idle fleet minimises latency; a busy one saves
//! work.
//!
//! This makes following a prefix even more valuable. A prefix that most requests share would stay
//! at its first backend, beside idle ones: no single request gains enough to compute it elsewhere.
//! So a few requests go to the least busy backend regardless of what it holds. Their share grows
//! with what a request loses by following the prefix, relative to the cost of a copy (rent or buy,
//! decided by a coin, as in page replication). A rare prefix loses little by this: copies cost at
//! most one part in [`COPIES_PER_RENT`] of what the imbalance costs.
//!
//! docs/adr/0025 gives the reasons and measurements.

use std::cmp::Reverse;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::price_classes::PriceClasses;
use super::rank::{ByScore, Policy, PolicyInputs, Ranks, Tolerance, mix, product};
use super::{Candidate, LoadPrices, PolicyRequest, Prices, Reason};
use crate::kv_events::LOWER_TIERS;

/// Settings of the `cost` policy. Integers, because settings are replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CostSettings {
    /// Nanoseconds to prefill one uncached prompt token.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds that each running request adds to the time to first token.
    pub decode_ns_per_request: u32,
    /// Nanoseconds that each request waiting in the engine adds.
    pub waiting_ns_per_request: u32,
}

/// KV cache usage, in thousandths, above which each further thousandth adds to the cost.
const KV_PRESSURE_FROM_PERMILLE: u32 = 900;
/// Nanoseconds added per thousandth of KV cache usage above [`KV_PRESSURE_FROM_PERMILLE`].
const KV_PRESSURE_NS_PER_PERMILLE: u32 = 5_000_000;

impl Default for CostSettings {
    fn default() -> Self {
        Self {
            prefill_ns_per_token: 100_000,
            decode_ns_per_request: 1_000_000,
            waiting_ns_per_request: 50_000_000,
        }
    }
}

impl Policy for CostSettings {
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs {
            learnt: true,
            ..PolicyInputs::default()
        }
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let costs = Costs {
            settings: self,
            request,
            prefill: PriceClasses::of(&learnt(candidates).map(Prices::prefill)),
            decode: PriceClasses::of(&learnt(candidates).map(Prices::decode)),
            times: times(candidates),
        };
        let copies = costs.buys_copy(candidates);
        ByScore {
            score: move |candidate: &Candidate| {
                let cost = costs.of(candidate);
                if copies { cost.ahead_ns } else { cost.sum() }
            },
            near: Tolerance::Near,
            prefers_prefix: true,
            reason: Reason::LeastCost,
        }
    }
}

/// Minimum ratio of what requests lose by following a prefix to the cost of the copies made for it.
/// A higher value keeps a shared prefix in one place longer; a lower one costs rare prefixes more.
const COPIES_PER_RENT: u64 = 16;

/// Number of binary digits after the point in `Costs::times`.
const TIMES_DIGITS: u32 = 10;

/// Iterates over the learned prices of the candidates that have any. The settings apply only if none
/// has: mixing learned and configured prices would send all requests to one side, and a backend
/// without requests never learns.
fn learnt(candidates: &[Candidate]) -> impl Iterator<Item = Prices> + Clone {
    candidates.iter().filter_map(|candidate| candidate.prices)
}

/// Returns the prices of loading from a candidate's tiers below the GPU, fastest first. Assumed ones
/// are no higher than that of computing.
fn load_prices(prefill_ns: u64, candidate: &Candidate) -> [u64; LOWER_TIERS] {
    match candidate.prices {
        Some(prices) => prices.load.all().map(u64::from),
        None => (LoadPrices::ASSUMED.all()).map(|price| u64::from(price).min(prefill_ns)),
    }
}

/// Returns how many times a request's work counts: once for itself, and once for each request that
/// waits for its first token at an average backend.
fn times(candidates: &[Candidate]) -> u64 {
    let delayed = candidates.iter().map(|it| u64::from(it.pending));
    let count = (candidates.len() as u64).max(1);
    (1 << TIMES_DIGITS) + (delayed.sum::<u64>() << TIMES_DIGITS) / count
}

/// Cost of a request at one backend.
#[derive(Clone, Copy)]
struct Cost {
    /// Time until the request's own work starts, in nanoseconds.
    ahead_ns: u64,
    /// Time of the request's own work, including the delay of other requests, in nanoseconds.
    work_ns: u64,
}

impl Cost {
    fn sum(self) -> u64 {
        self.ahead_ns.saturating_add(self.work_ns)
    }
}

/// Inputs that determine the cost of one request at each backend.
#[derive(Clone, Copy)]
struct Costs<'a> {
    settings: &'a CostSettings,
    request: &'a PolicyRequest,
    prefill: PriceClasses,
    decode: PriceClasses,
    times: u64,
}

impl Costs<'_> {
    fn of(&self, candidate: &Candidate) -> Cost {
        let settings = self.settings;
        let prefill = self.prefill.price(candidate.prices.map(Prices::prefill));
        let prefill_ns = u64::from(prefill.unwrap_or(settings.prefill_ns_per_token));
        let decode = self.decode.price(candidate.prices.map(Prices::decode));
        let decode_ns = decode.unwrap_or(settings.decode_ns_per_request);
        let pressure_permille = candidate
            .kv_usage_permille
            .saturating_sub(KV_PRESSURE_FROM_PERMILLE);
        let ahead = [
            candidate.pending_prefill_tokens.saturating_mul(prefill_ns),
            product(candidate.running, decode_ns),
            product(candidate.waiting, settings.waiting_ns_per_request),
            product(pressure_permille, KV_PRESSURE_NS_PER_PERMILLE),
        ];
        let own = self.request.uncached_tokens(candidate.matched);
        let work_ns = own
            .saturating_mul(prefill_ns)
            .saturating_add(self.load_ns(prefill_ns, candidate))
            .saturating_add(self.eviction_ns(prefill_ns, candidate));
        Cost {
            ahead_ns: ahead.into_iter().fold(0, u64::saturating_add),
            work_ns: work_ns.saturating_mul(self.times) >> TIMES_DIGITS,
        }
    }

    /// Returns the time to load blocks from tiers below the GPU, in nanoseconds.
    fn load_ns(&self, prefill_ns: u64, candidate: &Candidate) -> u64 {
        let loaded = candidate
            .loaded
            .all()
            .into_iter()
            .zip(load_prices(prefill_ns, candidate));
        loaded.fold(0, |sum, (blocks, price_ns)| {
            let tokens = product(blocks, self.request.tokens_per_block);
            sum.saturating_add(tokens.saturating_mul(price_ns))
        })
    }

    /// Returns the cost of evictions, in nanoseconds: the blocks that a full cache evicts for this
    /// request's new ones, at the price of recomputing them, or of loading them if they stay on a
    /// lower tier. Without it, a backend that
    /// holds the one block shared by all prompts would attract every request while others are idle.
    fn eviction_ns(&self, prefill_ns: u64, candidate: &Candidate) -> u64 {
        let on_gpu = candidate.matched.saturating_sub(candidate.loaded.total());
        let new = self.request.missing_blocks(on_gpu);
        let evicted = new.saturating_sub(candidate.free_blocks);
        let price_ns = candidate.evicts_to.map_or(prefill_ns, |tier| {
            load_prices(prefill_ns, candidate)[tier.at()].min(prefill_ns)
        });
        product(evicted, self.request.tokens_per_block).saturating_mul(price_ns)
    }

    /// Whether this request goes to the least busy backend, to leave a copy of its prefix there.
    /// The probability is what it loses by following the prefix (the rent), divided by
    /// [`COPIES_PER_RENT`] times the cost of the copy.
    ///
    /// A turn that continues a session leaves none: no other request has its prefix, and its next
    /// turn needs it in one place only.
    fn buys_copy(&self, candidates: &[Candidate]) -> bool {
        if candidates.iter().any(|it| self.continues_at(it)) {
            return false;
        }
        // The high half, from another number than the one that breaks ties.
        let drawn = u128::from(mix(self.request.jitter ^ COIN) >> 32);
        // The rent is below the price of the copy, or the copy would be the cheaper choice. The
        // probability is thus below 1 / `COPIES_PER_RENT`.
        if drawn * u128::from(COPIES_PER_RENT) >= 1 << 32 {
            return false;
        }
        let least = |of: fn(Cost) -> u64| {
            let costs = candidates.iter().map(|it| (self.of(it), it));
            costs.min_by_key(|(cost, it)| (of(*cost), Reverse(it.matched), it.slot))
        };
        let cheapest = least(Cost::sum);
        let idlest = least(|cost| cost.ahead_ns);
        let (Some((holder, held)), Some((other, copied))) = (cheapest, idlest) else {
            return false;
        };
        let rent_ns = holder.ahead_ns.saturating_sub(other.ahead_ns);
        let price_ns = other.work_ns.saturating_sub(holder.work_ns);
        let price = u128::from(price_ns) * u128::from(COPIES_PER_RENT);
        copied.matched < held.matched && price * drawn < u128::from(rent_ns) << 32
    }
}

impl Costs<'_> {
    /// Whether the candidate is the home of the request's session and holds most of its last turn.
    /// A prompt of which it holds less is another one under the session's name.
    fn continues_at(&self, candidate: &Candidate) -> bool {
        let request = self.request;
        let held = u64::from(candidate.matched) * u64::from(request.tokens_per_block);
        let most = request.continued_tokens / 4 * 3;
        request.home == Some(candidate.slot) && most > 0 && held >= most
    }
}

/// Value mixed into the jitter, which makes the draw for copies independent of other draws.
const COIN: u64 = 0xc01d_ca5e_0fc0_71e5;
