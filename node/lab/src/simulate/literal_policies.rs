//! Policies that follow the pseudo-code of their sources literally, for comparison with the
//! product's. docs/adr/0024 describes the differences and their reasons.
//!
//! Only the decision follows the source. Charges, leases, counts and the load that decisions see
//! are the product's. Where a source leaves ties open, the request's number decides.

use std::collections::{BTreeMap, HashMap};

use state::ids::Slot;

use super::events::Micros;

/// Policy that follows the pseudo-code of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReferencePolicy {
    /// AIBrix's `prefix_cache_routing`: any match counts, `imbalance > 8`, and a holder is chosen
    /// if `running < mean + 2 * stddev`.
    PrefixCache,
    /// The cache-aware gateway for vLLM: blocks by position and content, only the last of which is
    /// checked; one holder, chosen if `load < average * 1.25`.
    VllmCacheAware,
}

impl ReferencePolicy {
    /// All reference policies.
    pub const ALL: [Self; 2] = [Self::PrefixCache, Self::VllmCacheAware];

    /// Returns the policy's name for `--policy`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefixCache => "prefix-cache-as-written",
            Self::VllmCacheAware => "vllm-cache-aware-as-written",
        }
    }

    /// Returns the policy with this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}

/// A backend that a request may go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReferenceCandidate {
    /// Slot of the backend.
    pub slot: Slot,
    /// Number of leading blocks of the prompt that the product believes the backend holds.
    pub matched: u32,
    /// Number of requests in flight at the backend.
    pub running: u32,
}

/// Router of a reference policy, with the state that the policy keeps.
#[derive(Debug)]
pub struct ReferenceRouter {
    policy: ReferencePolicy,
    tracker: BlockCacheTracker,
}

impl ReferenceRouter {
    /// Creates a router with empty state.
    #[must_use]
    pub fn new(policy: ReferencePolicy) -> Self {
        Self {
            policy,
            tracker: BlockCacheTracker::default(),
        }
    }

    /// Chooses a backend for the request with the number `number`, whose block keys are
    /// `positions`.
    ///
    /// # Panics
    /// If `candidates` is empty.
    pub fn choose(
        &mut self,
        candidates: &[ReferenceCandidate],
        positions: &[u64],
        number: usize,
        now: Micros,
    ) -> Slot {
        match self.policy {
            ReferencePolicy::PrefixCache => prefix_cache(candidates, number),
            ReferencePolicy::VllmCacheAware => {
                self.tracker.evict_when_due(now);
                select_worker(candidates, &mut self.tracker, positions, number)
            }
        }
    }

    /// Records that a request with the block keys `positions` was sent to `slot`.
    pub fn dispatched(&mut self, positions: &[u64], slot: Slot) {
        if self.policy == ReferencePolicy::VllmCacheAware {
            self.tracker.record_request(positions, slot);
        }
    }
}

/// Returns one of the candidates with the fewest running requests; `number` breaks ties.
fn least_running(candidates: &[ReferenceCandidate], number: usize) -> Slot {
    let fewest = candidates.iter().map(|it| it.running).min();
    let idle = candidates.iter().filter(|it| Some(it.running) == fewest);
    let idle: Vec<Slot> = idle.map(|it| it.slot).collect();
    idle[spread(number) % idle.len()]
}

/// Hashes the number of a request, to break ties.
fn spread(number: usize) -> usize {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33
}

/// Chooses a backend like AIBrix's `prefix_cache_routing`.
fn prefix_cache(pods: &[ReferenceCandidate], number: usize) -> Slot {
    let running = || pods.iter().map(|pod| pod.running);
    let (fewest, most) = (running().min(), running().max());
    if most
        .zip(fewest)
        .is_some_and(|(most, fewest)| most - fewest > 8)
    {
        return least_running(pods, number);
    }
    let count = pods.len() as f64;
    let mean = running().map(f64::from).sum::<f64>() / count;
    let variance = running()
        .map(|it| (f64::from(it) - mean).powi(2))
        .sum::<f64>()
        / count;
    let limit = mean + 2.0 * variance.sqrt();
    let mut matched: Vec<_> = pods.iter().filter(|pod| pod.matched > 0).collect();
    matched.sort_by_key(|pod| (u32::MAX - pod.matched, pod.running));
    let selected = matched.iter().find(|pod| f64::from(pod.running) < limit);
    selected.map_or_else(|| least_running(pods, number), |pod| pod.slot)
}

/// Chooses a backend like the cache-aware gateway's `select_worker`.
fn select_worker(
    workers: &[ReferenceCandidate],
    tracker: &mut BlockCacheTracker,
    positions: &[u64],
    number: usize,
) -> Slot {
    let total: f64 = workers.iter().map(|it| f64::from(it.running)).sum();
    let average = total / workers.len() as f64;
    let best = tracker.find_best_backend(positions, number);
    let chosen = best.and_then(|(slot, matched)| {
        let worker = workers.iter().find(|worker| worker.slot == slot)?;
        let hit_ratio = matched as f64 / positions.len() as f64;
        let is_light = f64::from(worker.running) < average * 1.25;
        (hit_ratio > 0.3 && is_light).then_some(slot)
    });
    chosen.unwrap_or_else(|| least_running(workers, number))
}

/// Maximum number of tracked blocks per backend: the gateway's `max_blocks_per_backend`.
const BLOCKS_MAX: usize = 100_000;
/// Interval between evictions: the gateway's `eviction_interval_secs`.
const EVICTION_INTERVAL: Micros = 60_000_000;

/// The gateway's `BlockCacheTracker`: for each block, by position and content, its holders and when
/// each last used it.
#[derive(Debug, Default)]
struct BlockCacheTracker {
    blocks: HashMap<u64, BTreeMap<Slot, u64>>,
    block_count: BTreeMap<Slot, usize>,
    epoch: u64,
    evicted_at: Micros,
}

impl BlockCacheTracker {
    fn record_request(&mut self, hashes: &[u64], backend: Slot) {
        self.epoch += 1;
        for hash in hashes {
            let owners = self.blocks.entry(*hash).or_default();
            if owners.insert(backend, self.epoch).is_none() {
                *self.block_count.entry(backend).or_default() += 1;
            }
        }
    }

    /// Returns the backend with the longest match, and the length of that match in blocks. Marks
    /// the matched blocks as used, even if the backend is not chosen.
    fn find_best_backend(&mut self, hashes: &[u64], number: usize) -> Option<(Slot, usize)> {
        let holders = self.blocks.get(hashes.first()?)?;
        let matches: Vec<(Slot, usize)> = holders
            .keys()
            .map(|slot| (*slot, self.matched(hashes, *slot)))
            .collect();
        let longest = matches.iter().map(|(_, matched)| *matched).max()?;
        // The source's map is unordered, so any of them may come first.
        let best: Vec<Slot> = matches
            .into_iter()
            .filter(|(_, matched)| *matched == longest && longest > 0)
            .map(|(slot, _)| slot)
            .collect();
        let best = *best.get(spread(number) % best.len().max(1))?;
        self.epoch += 1;
        for hash in &hashes[..longest] {
            if let Some(used) = self.blocks.get_mut(hash).and_then(|it| it.get_mut(&best)) {
                *used = self.epoch;
            }
        }
        Some((best, longest))
    }

    /// Returns the length of a match like `binary_search_backend_match`, which checks only the last
    /// block of each tested prefix.
    fn matched(&self, hashes: &[u64], backend: Slot) -> usize {
        let (mut low, mut high) = (0, hashes.len());
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            let holders = self.blocks.get(&hashes[middle - 1]);
            if holders.is_some_and(|holders| holders.contains_key(&backend)) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }

    fn evict_when_due(&mut self, now: Micros) {
        if now < self.evicted_at + EVICTION_INTERVAL {
            return;
        }
        self.evicted_at = now;
        let full = self.block_count.iter().filter(|it| *it.1 > BLOCKS_MAX);
        let full: Vec<(Slot, usize)> = full.map(|(slot, count)| (*slot, *count)).collect();
        for (slot, count) in full {
            let owned = self.blocks.iter();
            let owned = owned.filter_map(|(hash, owners)| Some((*owners.get(&slot)?, *hash)));
            let mut owned: Vec<(u64, u64)> = owned.collect();
            owned.sort_unstable();
            for (_, hash) in owned.into_iter().take(count - BLOCKS_MAX) {
                if let Some(owners) = self.blocks.get_mut(&hash) {
                    owners.remove(&slot);
                    if owners.is_empty() {
                        self.blocks.remove(&hash);
                    }
                }
            }
            self.block_count.insert(slot, BLOCKS_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(backends: &[(u16, u32, u32)]) -> Vec<ReferenceCandidate> {
        let candidate = |&(slot, matched, running): &(u16, u32, u32)| ReferenceCandidate {
            slot: Slot(slot),
            matched,
            running,
        };
        backends.iter().map(candidate).collect()
    }

    #[test]
    fn literal_prefix_cache_ignores_matches_at_even_load() {
        assert_eq!(prefix_cache(&fleet(&[(1, 1, 2), (2, 0, 1)]), 0), Slot(1));
        // `running < mean + 2 * 0`.
        let even = fleet(&[(1, 9, 4), (2, 0, 4)]);
        let chosen: Vec<Slot> = (0..20).map(|number| prefix_cache(&even, number)).collect();
        assert!(chosen.contains(&Slot(2)), "{chosen:?}");
        assert_eq!(prefix_cache(&fleet(&[(1, 9, 9), (2, 0, 0)]), 0), Slot(2));
    }

    #[test]
    fn literal_positions_match_after_a_different_start() {
        // Block 1 differs, the blocks after it are the same.
        let asked = |differing| [1, differing, 3, 4, 5, 6, 7, 8];
        let mut tracker = BlockCacheTracker::default();
        tracker.record_request(&asked(20), Slot(0));
        tracker.record_request(&asked(21), Slot(1));
        assert_eq!(tracker.matched(&asked(22), Slot(0)), 8);
        assert_eq!(tracker.matched(&[1, 20, 3, 4, 0, 0, 0, 0], Slot(0)), 4);
        assert_eq!(
            tracker.find_best_backend(&[2, 20], 0),
            None,
            "block 0 is looked for"
        );
    }

    #[test]
    fn literal_tracker_drops_blocks_once_a_minute() {
        let mut tracker = BlockCacheTracker::default();
        let blocks: Vec<u64> = (0..BLOCKS_MAX as u64 + 7).collect();
        tracker.record_request(&blocks, Slot(0));
        tracker.evict_when_due(EVICTION_INTERVAL - 1);
        assert_eq!(tracker.blocks.len(), blocks.len());
        tracker.evict_when_due(EVICTION_INTERVAL);
        assert_eq!(tracker.blocks.len(), BLOCKS_MAX);
    }
}
