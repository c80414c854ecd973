//! Decides which of an engine's reports are news to the cluster.
//!
//! Every replica queries every engine, and proposes differences from the replicated registry as
//! [`EngineFacts`]. Pure: the clock is an argument. Three rules prevent replicas from contradicting
//! each other endlessly:
//!
//! - A restart is proposed under the incarnation that it ended. The first such command to be
//!   applied starts a new incarnation; later ones then name one that is over.
//! - Capacity in router blocks depends on the tokens per block, which for text are learned and vary
//!   with the traffic. A known capacity that differs by more than a thirty-third is changed at
//!   once: by any replica if the *engine's* figure changed, otherwise only by the leader. The
//!   leader also changes one that differs by more than a two-hundredth, at most every
//!   [`REFINE_AFTER`].
//! - The same report is not proposed again within [`REPEAT_AFTER`].
//!
//! An engine that does not report its start time has restarted if its counter fell, however many
//! scrapes failed in between; without a counter, if it refused connections and responds again; and
//! if its responses show an empty cache.

use std::time::Duration;

use state::Backend;
use state::command::EngineFacts;
use state::ids::BackendRef;
use tokio::time::Instant;

/// Time for which a proposal is not repeated while the registry does not show it.
pub const REPEAT_AFTER: Duration = Duration::from_secs(5);
/// Tolerance for start times, in seconds. If an engine does not report its start, a restart is
/// detected by falling counters and dated with this replica's clock. A restart dated within this
/// time of the last start is the same one, seen by another replica.
const SAME_START_S: u64 = 10;
/// Assumed start of the first incarnation of an engine that does not report its start time, in Unix
/// seconds. It is the same on every replica, and earlier than any start dated later.
const UNTOLD_START_S: u64 = 1;

/// A capacity that differs by more than one part in this many is proposed again at once.
const FAR_PART: u64 = 33;
/// A capacity that differs by more than one part in this many is proposed again after
/// [`REFINE_AFTER`]. An error of one percent costs one prediction in three hundred.
const NEAR_PART: u64 = 200;
/// Minimum time between two small changes of a backend's capacity, because the learned ratios keep
/// changing.
pub(super) const REFINE_AFTER: Duration = Duration::from_secs(30);

/// Facts read from an engine in one round of probes; `None` if it did not report them.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineReading {
    /// Ids of the engine's models, if they were queried.
    pub(crate) models: Option<Vec<String>>,
    /// Capacity of the engine's cache, in tokens.
    pub(crate) cache_tokens: Option<u64>,
    /// Start time of the engine's process, in Unix seconds.
    pub(crate) started_at_s: Option<u64>,
    /// Number of prompt tokens processed since the engine started.
    pub(crate) prompt_tokens: Option<u64>,
    /// Tokens per block of the engine's cache.
    pub(crate) block_size: Option<u32>,
    /// Whether the engine is a vLLM one that speculates; `None` if unknown.
    pub(crate) speculates: Option<bool>,
    /// Number of probes that were refused a connection since this replica has known the engine.
    pub(crate) refusals: u64,
}

impl EngineReading {
    /// Whether the engine responded to any query of the round.
    fn is_answer(&self) -> bool {
        self.models.is_some() || self.prompt_tokens.is_some()
    }
}

/// Circumstances of a round of probes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbeRound {
    /// Tokens per router block for this backend's model.
    pub(crate) tokens_per_block: f64,
    /// Whether this replica is the leader.
    pub(crate) is_leader: bool,
    /// Current Unix time, in seconds.
    pub(crate) unix_s: u64,
    /// Current monotonic time.
    pub(crate) now: Instant,
    /// Whether responses show that the engine's cache was emptied.
    pub(crate) is_emptied: bool,
    /// Whether the engine computes the last block of hits again, if responses show that this
    /// differs from the predictions.
    pub(crate) drops_last_block: Option<bool>,
}

/// A replica's memory of one backend between rounds of probes.
#[derive(Debug, Default)]
pub(crate) struct FactsMemory {
    handle: Option<BackendRef>,
    /// Last reported number of prompt tokens processed; `None` before the first report.
    prompt_tokens: Option<u64>,
    /// Number of refused probes when the engine last responded; `None` before the first reading.
    refusals: Option<u64>,
    cache_tokens: Option<u64>,
    /// When the capacity was first compared with the registry, or last proposed.
    capacity_at: Option<Instant>,
    proposed: Option<(EngineFacts, Instant)>,
    proposed_block_size: Option<(u32, Instant)>,
}

impl FactsMemory {
    /// Returns the facts to propose about `known` after reading `saw`; `None` if nothing is new.
    pub(crate) fn news(
        &mut self,
        known: &Backend,
        saw: &EngineReading,
        round: &ProbeRound,
    ) -> Option<EngineFacts> {
        if self.handle != Some(known.handle) {
            *self = Self {
                handle: Some(known.handle),
                ..Self::default()
            };
        }
        let started_at_s = self.new_start(known, saw, round);
        let mut facts = EngineFacts {
            models: saw.models.clone(),
            capacity_blocks: None,
            started_at_s,
            drops_last_block: new_drop(known, saw, round),
        };
        if started_at_s.is_some() && known.facts.started_at_s.is_some() {
            // A new incarnation has no facts yet, so report everything.
            facts.capacity_blocks = blocks(saw.cache_tokens, round);
        } else {
            facts
                .models
                .take_if(|m| known.facts.models.as_ref() == Some(m));
            facts.capacity_blocks = self.new_capacity(known, saw, round);
        }
        self.hold_back(facts, round.now)
    }

    /// Returns the block size to propose after reading `saw`, where `known` is the replicated one;
    /// `None` if nothing is new.
    pub(crate) fn new_block_size(
        &mut self,
        known: Option<u32>,
        saw: Option<u32>,
        now: Instant,
    ) -> Option<u32> {
        let size = saw.filter(|size| known != Some(*size))?;
        let is_repeat = |(last, at): (u32, Instant)| {
            last == size && now.saturating_duration_since(at) < REPEAT_AFTER
        };
        if self.proposed_block_size.is_some_and(is_repeat) {
            return None;
        }
        self.proposed_block_size = Some((size, now));
        Some(size)
    }

    fn new_start(
        &mut self,
        known: &Backend,
        saw: &EngineReading,
        round: &ProbeRound,
    ) -> Option<u64> {
        // Keep the values that a failed scrape omits: a restart is accompanied by failures.
        let before = self.prompt_tokens;
        self.prompt_tokens = saw.prompt_tokens.or(before);
        let refusals = *self.refusals.get_or_insert(saw.refusals);
        if !saw.is_answer() && saw.started_at_s.is_none() {
            return None;
        }
        self.refusals = Some(saw.refusals);
        if let Some(started) = saw.started_at_s {
            return (known.facts.started_at_s < Some(started)).then_some(started);
        }
        let Some(last) = known.facts.started_at_s else {
            return Some(UNTOLD_START_S);
        };
        let is_other_process = match before.zip(saw.prompt_tokens) {
            Some((before, now)) => now < before,
            None => before.is_none() && refusals < saw.refusals,
        };
        let is_new = is_other_process || round.is_emptied;
        (is_new && last.saturating_add(SAME_START_S) < round.unix_s).then_some(round.unix_s)
    }

    fn new_capacity(
        &mut self,
        known: &Backend,
        saw: &EngineReading,
        round: &ProbeRound,
    ) -> Option<u32> {
        let before = self.cache_tokens;
        if saw.cache_tokens.is_some() {
            self.cache_tokens = saw.cache_tokens;
        }
        if known.spec.capacity_blocks.is_some() {
            return None;
        }
        let now = blocks(saw.cache_tokens, round)?;
        let Some(held) = known.facts.capacity_blocks else {
            return Some(now);
        };
        let engine_changed = before.is_some() && before != saw.cache_tokens;
        let differs_by = |part| u64::from(held.abs_diff(now)) * part > u64::from(held);
        let since = *self.capacity_at.get_or_insert(round.now);
        let is_due = round.now.saturating_duration_since(since) >= REFINE_AFTER;
        let is_news = differs_by(FAR_PART) && (engine_changed || round.is_leader)
            || differs_by(NEAR_PART) && is_due && round.is_leader;
        is_news.then(|| {
            self.capacity_at = Some(round.now);
            now
        })
    }

    fn hold_back(&mut self, facts: EngineFacts, now: Instant) -> Option<EngineFacts> {
        if facts == EngineFacts::default() {
            return None;
        }
        if let Some((last, at)) = &self.proposed
            && *last == facts
            && now.saturating_duration_since(*at) < REPEAT_AFTER
        {
            return None;
        }
        self.proposed = Some((facts.clone(), now));
        Some(facts)
    }
}

/// Returns whether the engine computes the last block of hits again, if this is news.
fn new_drop(known: &Backend, saw: &EngineReading, round: &ProbeRound) -> Option<bool> {
    let now = match saw.speculates {
        Some(true) => round.drops_last_block?,
        Some(false) => false,
        // An engine without metrics is not suspected, but may be acquitted.
        None => round.drops_last_block.filter(|drops| !drops)?,
    };
    (known.facts.drops_last_block.unwrap_or(false) != now).then_some(now)
}

/// Converts `cache_tokens` into router blocks, rounded up: overestimating a capacity is better than
/// underestimating it. Returns `None` if the tokens, or the tokens per block, are unknown.
fn blocks(cache_tokens: Option<u64>, round: &ProbeRound) -> Option<u32> {
    let per_block = round.tokens_per_block;
    if !(per_block.is_finite() && per_block > 0.0) {
        return None;
    }
    let blocks = (cache_tokens? as f64 / per_block).ceil();
    // The cast saturates at the maximum capacity of a backend.
    Some((blocks as u32).max(1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use state::command::BackendSpec;
    use state::ids::{Incarnation, Slot};

    use super::*;

    fn backend(facts: EngineFacts) -> Backend {
        Backend {
            handle: BackendRef {
                slot: Slot(3),
                incarnation: Incarnation(1),
            },
            spec: BackendSpec {
                id: "a".into(),
                url: "http://127.0.0.1:1".into(),
                models: vec!["*".into()],
                labels: BTreeMap::new(),
                capacity_blocks: None,
                kv_events: None,
                kv_replay: None,
                role: state::command::BackendRole::Both,
            },
            draining: false,
            moves_streams: false,
            facts,
        }
    }

    fn round(now: Instant) -> ProbeRound {
        ProbeRound {
            tokens_per_block: 32.0,
            is_leader: false,
            unix_s: 1_000_000,
            now,
            is_emptied: false,
            drops_last_block: None,
        }
    }

    fn saw() -> EngineReading {
        EngineReading {
            models: Some(vec!["m".into()]),
            cache_tokens: Some(3200),
            started_at_s: Some(500),
            prompt_tokens: Some(10),
            block_size: Some(16),
            speculates: Some(false),
            refusals: 0,
        }
    }

    fn told() -> EngineFacts {
        EngineFacts {
            models: Some(vec!["m".into()]),
            capacity_blocks: Some(100),
            started_at_s: Some(500),
            ..EngineFacts::default()
        }
    }

    #[test]
    fn facts_are_reported_once_until_repeated() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        let unknown = backend(EngineFacts::default());
        assert_eq!(memory.news(&unknown, &saw(), &round(now)), Some(told()));
        assert_eq!(memory.news(&unknown, &saw(), &round(now)), None);
        let later = round(now + REPEAT_AFTER);
        assert_eq!(memory.news(&unknown, &saw(), &later), Some(told()));
        assert_eq!(memory.news(&backend(told()), &saw(), &later), None);
    }

    #[test]
    fn a_later_start_is_a_restart_and_reports_all_facts() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        let later = EngineReading {
            started_at_s: Some(501),
            ..saw()
        };
        let expected = EngineFacts {
            started_at_s: Some(501),
            ..told()
        };
        assert_eq!(
            memory.news(&backend(told()), &later, &round(now)),
            Some(expected)
        );
        let earlier = EngineReading {
            started_at_s: Some(499),
            ..saw()
        };
        assert_eq!(memory.news(&backend(told()), &earlier, &round(now)), None);
    }

    #[test]
    fn falling_counters_are_a_restart_if_the_start_is_unknown() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        let silent = |prompt_tokens| EngineReading {
            started_at_s: None,
            prompt_tokens: Some(prompt_tokens),
            ..saw()
        };
        let known = backend(told());
        assert_eq!(memory.news(&known, &silent(100), &round(now)), None);
        assert_eq!(memory.news(&known, &silent(120), &round(now)), None);
        let facts = memory.news(&known, &silent(4), &round(now)).unwrap();
        assert_eq!(facts.started_at_s, Some(1_000_000));
        // Its first incarnation also needs a start time, or the first restart would not be later.
        let unknown = backend(EngineFacts::default());
        let first = FactsMemory::default().news(&unknown, &silent(100), &round(now));
        assert_eq!(first.unwrap().started_at_s, Some(UNTOLD_START_S));
        // Another replica dated the same restart three seconds ago.
        let fresh = backend(EngineFacts {
            started_at_s: Some(999_997),
            ..told()
        });
        let mut other = FactsMemory::default();
        assert_eq!(other.news(&fresh, &silent(100), &round(now)), None);
        assert_eq!(other.news(&fresh, &silent(4), &round(now)), None);
    }

    #[test]
    fn failed_scrapes_do_not_hide_a_restart() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        let silent = |prompt_tokens| EngineReading {
            started_at_s: None,
            prompt_tokens,
            models: None,
            ..saw()
        };
        let known = backend(told());
        assert_eq!(memory.news(&known, &silent(Some(8_773)), &round(now)), None);
        assert_eq!(memory.news(&known, &silent(None), &round(now)), None);
        let facts = memory.news(&known, &silent(Some(5)), &round(now)).unwrap();
        assert_eq!(facts.started_at_s, Some(1_000_000));
    }

    #[test]
    fn without_counters_refused_connections_are_a_restart() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        let silent = |models: Option<Vec<String>>, refusals| EngineReading {
            models,
            refusals,
            ..EngineReading::default()
        };
        let models = || told().models;
        let unknown = backend(EngineFacts::default());
        let first = memory.news(&unknown, &silent(models(), 7), &round(now));
        assert_eq!(first.unwrap().started_at_s, Some(UNTOLD_START_S));
        let known = backend(told());
        assert_eq!(memory.news(&known, &silent(models(), 7), &round(now)), None);
        assert_eq!(memory.news(&known, &silent(None, 9), &round(now)), None);
        let facts = memory.news(&known, &silent(models(), 9), &round(now));
        assert_eq!(facts.unwrap().started_at_s, Some(1_000_000));
        // If the counter did not fall, the network failed.
        let mut memory = FactsMemory::default();
        let counted = |refusals| EngineReading {
            started_at_s: None,
            refusals,
            ..saw()
        };
        assert_eq!(memory.news(&known, &counted(0), &round(now)), None);
        assert_eq!(memory.news(&known, &counted(3), &round(now)), None);
    }

    #[test]
    fn an_emptied_cache_is_a_restart_if_the_start_is_unknown() {
        let now = Instant::now();
        let emptied = ProbeRound {
            is_emptied: true,
            ..round(now)
        };
        let known = backend(told());
        assert_eq!(FactsMemory::default().news(&known, &saw(), &emptied), None);
        let silent = EngineReading {
            started_at_s: None,
            ..saw()
        };
        let facts = FactsMemory::default().news(&known, &silent, &emptied);
        assert_eq!(facts.unwrap().started_at_s, Some(1_000_000));
    }

    #[test]
    fn the_leader_refines_a_capacity_that_is_far_off() {
        let now = Instant::now();
        let known = backend(told());
        let mut at = ProbeRound {
            tokens_per_block: 31.5,
            is_leader: true,
            ..round(now)
        };
        assert_eq!(FactsMemory::default().news(&known, &saw(), &at), None);
        at.tokens_per_block = 30.0;
        let facts = FactsMemory::default().news(&known, &saw(), &at).unwrap();
        assert_eq!(facts.capacity_blocks, Some(107));
        at.is_leader = false;
        assert_eq!(FactsMemory::default().news(&known, &saw(), &at), None);
    }

    #[test]
    fn a_slightly_wrong_capacity_is_refined_occasionally() {
        let (mut memory, begin) = (FactsMemory::default(), Instant::now());
        let known = backend(told());
        let mut after = |time, tokens_per_block, is_leader| {
            let at = ProbeRound {
                tokens_per_block,
                is_leader,
                ..round(begin + time)
            };
            let facts = memory.news(&known, &saw(), &at);
            facts.and_then(|facts| facts.capacity_blocks)
        };
        let moment = Duration::from_secs(1);
        assert_eq!(after(Duration::ZERO, 31.5, true), None);
        assert_eq!(after(REFINE_AFTER - moment, 31.5, true), None);
        assert_eq!(after(REFINE_AFTER, 31.5, false), None, "it does not lead");
        assert_eq!(after(REFINE_AFTER, 32.0, true), None, "it is right");
        assert_eq!(after(REFINE_AFTER, 31.5, true), Some(102));
        assert_eq!(after(2 * REFINE_AFTER - moment, 31.3, true), None);
        assert_eq!(after(2 * REFINE_AFTER, 31.3, true), Some(103));
    }

    #[test]
    fn any_replica_reports_a_capacity_the_engine_changed() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        let known = backend(told());
        assert_eq!(memory.news(&known, &saw(), &round(now)), None);
        let grown = EngineReading {
            cache_tokens: Some(6400),
            ..saw()
        };
        let facts = memory.news(&known, &grown, &round(now)).unwrap();
        assert_eq!(facts.capacity_blocks, Some(200));
        assert_eq!(facts.models, None);
    }

    #[test]
    fn a_block_size_is_reported_until_the_cluster_knows_it() {
        let (mut memory, now) = (FactsMemory::default(), Instant::now());
        assert_eq!(memory.new_block_size(None, None, now), None);
        assert_eq!(memory.new_block_size(None, Some(32), now), Some(32));
        assert_eq!(memory.new_block_size(None, Some(32), now), None);
        assert_eq!(memory.new_block_size(None, Some(16), now), Some(16));
        let later = now + REPEAT_AFTER;
        assert_eq!(memory.new_block_size(None, Some(16), later), Some(16));
        assert_eq!(memory.new_block_size(Some(16), Some(16), later), None);
    }

    #[test]
    fn only_an_engine_that_speculates_drops_the_last_block() {
        let knows = |drops_last_block| {
            backend(EngineFacts {
                drops_last_block,
                ..told()
            })
        };
        let news = |known, speculates, shown| {
            let saw = EngineReading {
                speculates,
                ..saw()
            };
            let round = ProbeRound {
                drops_last_block: shown,
                ..round(Instant::now())
            };
            let facts = FactsMemory::default().news(&knows(known), &saw, &round);
            facts.and_then(|facts| facts.drops_last_block)
        };
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(news(None, yes, yes), yes);
        assert_eq!(news(no, yes, yes), yes);
        assert_eq!(news(yes, yes, no), no);
        // It runs without a speculator now, or without metrics.
        assert_eq!(news(yes, no, None), no);
        assert_eq!(news(yes, None, no), no);
        for (known, speculates, shown) in [
            (None, no, yes),
            (None, None, yes),
            (None, yes, None),
            (None, yes, no),
            (yes, yes, None),
            (yes, yes, yes),
            (yes, None, None),
            (yes, None, yes),
        ] {
            assert_eq!(
                news(known, speculates, shown),
                None,
                "{known:?} {speculates:?} {shown:?}"
            );
        }
    }

    #[test]
    fn a_configured_capacity_is_not_overridden() {
        let mut known = backend(EngineFacts::default());
        known.spec.capacity_blocks = Some(7);
        let facts = FactsMemory::default().news(&known, &saw(), &round(Instant::now()));
        assert_eq!(facts.unwrap().capacity_blocks, None);
    }

    #[test]
    fn capacity_blocks_are_rounded_up_and_bounded() {
        let mut at = round(Instant::now());
        assert_eq!(blocks(Some(33), &at), Some(2));
        assert_eq!(blocks(Some(0), &at), Some(1));
        assert_eq!(blocks(Some(u64::MAX), &at), Some(u32::MAX));
        for per_block in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            at.tokens_per_block = per_block;
            assert_eq!(blocks(Some(33), &at), None);
        }
    }
}
