//! Application of the replicas' demand, with what is known of the engines.

use super::RouterState;
use crate::backends::BackendRole;
use crate::capacity::{DemandReport, EngineFigures};
use crate::ids::{ReplicaId, Slot};
use crate::service::{LEARNT_FIRST_TOKENS_MIN, LimitSettings};
use crate::settings::BATCH_MAX;
use crate::validate::is_name;

impl RouterState {
    /// Applies a report of demand. Returns `false` if it is invalid or its model has no room.
    pub(super) fn observe_demand(&mut self, replica: ReplicaId, report: &DemandReport) -> bool {
        if !is_name(&report.model) {
            return false;
        }
        let figures = self.engine_figures(&report.model);
        let now_ms = self.time.now_ms;
        let is_taken = self.capacity.observe(replica, report, figures, now_ms);
        self.is_capacity_changed |= is_taken;
        is_taken
    }

    /// Returns what is known of the engines that answer requests for `model` and do not drain. The
    /// ranks of an engine count together.
    fn engine_figures(&self, model: &str) -> EngineFigures {
        let settings = LimitSettings::from(&self.settings.admission);
        let mut engines = 0;
        let mut slots = 0;
        let mut places = Mean::default();
        let mut prefill_ns = Mean::default();
        let serving = self
            .backends
            .iter()
            .filter(|it| it.serves(model) && !it.draining && it.spec.role != BackendRole::Prefill);
        for backend in serving {
            slots += 1;
            engines += u32::from(!backend.is_further_rank());
            let slot = backend.handle.slot;
            places.add(self.places(slot, &settings));
            let learnt = self.service.figures(slot);
            let learnt = learnt.and_then(|it| it.learning.learnt());
            let trusted = learnt.and_then(|it| it.trusted());
            prefill_ns.add(trusted.map(|it| it.prefill_ns_per_token));
        }
        let per_engine = |mean: u64, (by, of): (u64, u64)| {
            let all = mean.saturating_mul(by) / of.max(1);
            u32::try_from(all.max(1)).unwrap_or(u32::MAX)
        };
        let ranks = (slots, u64::from(engines));
        EngineFigures {
            engines,
            places: places.mean().map(|it| per_engine(it, ranks)),
            prefill_ns: prefill_ns.mean().map(|it| per_engine(it, (ranks.1, slots))),
        }
    }

    /// Returns how many requests the backend in `slot` runs at once: the least of its limit and of what
    /// its KV cache holds; without either, as many as double the time between two tokens. `None` if
    /// nothing of this is known.
    fn places(&self, slot: Slot, settings: &LimitSettings) -> Option<u32> {
        let limits = self.limits(slot, settings);
        let least = limits.limit.into_iter().chain(limits.b_mem).min();
        let doubling = || {
            let learnt = self.service.figures(slot)?.learning.learnt()?;
            let per_request = u64::from(learnt.gap_ns_per_request);
            let places = (u64::from(learnt.gap_base_us) * 1000).checked_div(per_request)?;
            let is_trusted = learnt.gaps >= LEARNT_FIRST_TOKENS_MIN;
            is_trusted.then(|| u32::try_from(places).unwrap_or(BATCH_MAX))
        };
        least.or_else(doubling).map(|it| it.clamp(1, BATCH_MAX))
    }
}

/// A mean of the numbers that are known.
#[derive(Default)]
struct Mean {
    sum: u64,
    numbers: u64,
}

impl Mean {
    fn add(&mut self, number: Option<u32>) {
        if let Some(number) = number {
            self.sum += u64::from(number);
            self.numbers += 1;
        }
    }

    fn mean(&self) -> Option<u64> {
        self.sum.checked_div(self.numbers)
    }
}
