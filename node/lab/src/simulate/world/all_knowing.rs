//! An ideal for comparison: the policy decides by what the engines really hold and have to do, at
//! the moment of dispatch, and by their true prices. No router can know that.

use state::ids::Slot;
use state::kv_events::LowerTierBlocks;
use state::policy::{Candidate, LoadPrices, PolicyRequest, Prices, choose};
use xxhash_rust::xxh3::xxh3_64;

use super::{RequestState, SimWorld};
use crate::engine::model::{DECODE_BATCH_DOUBLING, EngineShape};
use crate::simulate::plan::{EngineModel, micros};

impl SimWorld<'_> {
    /// Returns the engine that the policy chooses for a request if it knows everything; `None` if the
    /// plan is not for that.
    pub(super) fn chosen_by_all_knowing(&self, request: usize) -> Option<Slot> {
        let EngineModel::Continuous(shape) = &self.plan.engine else {
            return None;
        };
        if !self.plan.is_all_knowing {
            return None;
        }
        let asked = &self.requests[request];
        let prices = self.true_prices(shape);
        let view = self.places[asked.replica].replica.state.view();
        let registry = view.registry();
        let handles = registry.backends.iter().map(|backend| backend.handle);
        let open = handles.filter(|backend| self.is_below_limit(asked.replica, *backend));
        let seen = |slot: Slot| self.seen(slot, asked, prices);
        let candidates: Vec<Candidate> = open.map(|backend| seen(backend.slot)).collect();
        let home = self.home(asked);
        let ask = PolicyRequest {
            jitter: xxh3_64(request.to_string().as_bytes()),
            blocks: (asked.prompt.tokens.saturating_sub(1)) / self.plan.block_tokens,
            tokens: asked.prompt.tokens,
            tokens_per_block: self.plan.block_tokens,
            home,
            continued_tokens: home.map_or(0, |_| asked.prompt.tokens.into()),
            ..PolicyRequest::default()
        };
        choose(&self.plan.policy, &ask, &candidates).map(|choice| choice.slot)
    }

    /// Returns the engine of the last turn of a request's session.
    fn home(&self, asked: &RequestState) -> Option<Slot> {
        let turn = &self.workload.turns[asked.turn?];
        let engine = self.turns.engine_of(turn.session)?;
        u16::try_from(engine).ok().map(Slot)
    }

    /// Returns an engine as it is, for a request.
    fn seen(&self, slot: Slot, asked: &RequestState, prices: Prices) -> Candidate {
        let engine = &self.engines[usize::from(slot.0)];
        let blocks = |tokens: u32| tokens / self.plan.block_tokens;
        let found = engine.found_tokens(&asked.prompt);
        let waiting = engine.in_flight().map(|number| &self.requests[number]);
        let waiting = waiting.filter(|it| !it.has_first_token);
        // What is left to load takes as long as computing so many tokens.
        let (mut pending, mut load_ns) = (0, 0);
        for it in waiting {
            let found = engine.found_tokens(&it.prompt);
            pending += 1;
            load_ns += u64::from(found.cpu) * u64::from(prices.load.cpu_ns_per_token)
                + u64::from(found.disk) * u64::from(prices.load.disk_ns_per_token);
        }
        let figures = engine.figures();
        Candidate {
            slot,
            matched: blocks(found.cached()),
            loaded: LowerTierBlocks {
                cpu: blocks(found.cpu),
                disk: blocks(found.disk),
                store: 0,
            },
            running: figures.running + figures.waiting,
            pending,
            pending_prefill_tokens: engine.prefill_left()
                + load_ns / u64::from(prices.prefill_ns_per_token.max(1)),
            kv_usage_permille: figures.kv_usage_permille,
            free_blocks: engine.uncached_blocks(),
            prices: Some(prices),
            ..Candidate::default()
        }
    }

    fn true_prices(&self, shape: &EngineShape) -> Prices {
        let ns = |ns: u64| u32::try_from(ns).unwrap_or(u32::MAX);
        let [cpu, disk] = self.plan.offload.load_ns(shape.prefill_tokens_per_s);
        let decode_us = micros(shape.decode) / DECODE_BATCH_DOUBLING;
        Prices {
            prefill_ns_per_token: ns(1_000_000_000 / u64::from(shape.prefill_tokens_per_s)),
            decode_ns_per_request: ns(1000 * decode_us),
            prefill_range_ns: None,
            decode_range_ns: None,
            load: LoadPrices {
                cpu_ns_per_token: ns(cpu),
                disk_ns_per_token: ns(disk),
                ..LoadPrices::ASSUMED
            },
        }
    }
}
