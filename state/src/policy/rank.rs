//! Code shared by all policies: ranking candidates, picking the best, and sums over candidates.

use std::cmp::Reverse;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Candidate, Choice, PolicyRequest, Reason};
use crate::ids::{AttemptId, SessionId, Slot};
use crate::reject::Rejection;

/// A routing policy with its settings.
pub(super) trait Policy {
    /// Checks every setting of the policy.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    fn validate(&self) -> Result<(), Rejection> {
        Ok(())
    }

    /// Returns the optional data to gather for the policy.
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs::default()
    }

    /// Examines the candidates as a whole and returns how to rank each of them.
    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a, Self>;
}

/// Optional data that a policy uses. It is gathered only on request, because that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PolicyInputs<'a> {
    /// Number of blocks to hash for [`PolicyRequest::prefix_key`]; `None` if the policy does not
    /// use it.
    pub prefix_blocks: Option<u32>,
    /// Places where requests name the session for [`PolicyRequest::session`]; `None` if unused.
    pub session: Option<SessionNames<'a>>,
    /// Whether the policy uses [`PolicyRequest::turn`].
    pub turn: bool,
    /// Whether the policy uses [`PolicyRequest::user`].
    pub user_tokens: bool,
    /// Whether the policy uses [`Candidate::prices`].
    pub learnt: bool,
    /// What the policy loses if a request takes another backend than the chosen one.
    pub affinity: Affinity,
    /// Method of finding the leading blocks that backends hold.
    pub match_by: MatchBy,
    /// Condition under which a request refreshes the age of the cached blocks that it finds.
    pub touch: Touch,
}

impl PolicyInputs<'_> {
    /// Returns the inputs of a policy that looks at load only.
    pub(super) fn by_load() -> Self {
        Self {
            affinity: Affinity::None,
            ..Self::default()
        }
    }
}

/// What a policy loses if a request takes another backend than the chosen one. This determines how
/// long the request waits for a place at the chosen backend that a peer replica holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Affinity {
    /// The prefix that the chosen backend holds and the other one lacks.
    #[default]
    Prefix,
    /// The assignment of a session or prefix to one backend.
    Pinned,
    /// Nothing: the policy looks at load only.
    None,
}

/// Longest time that a request waits for a place that a peer holds, in microseconds. A peer that
/// hears the demand hands over a free place within a few milliseconds.
const PATIENCE_US_MAX: u64 = 50_000;
/// Shortest such wait if the other backend lacks any block, in microseconds. Below it, the place
/// would rarely arrive in time.
const PATIENCE_US_MIN: u64 = 10_000;

impl Affinity {
    /// Returns how long a request waits for a place at the chosen backend before it takes another
    /// one, in microseconds: at most as long as the other backend computes the `missing_tokens`
    /// that only the chosen one holds, at `prefill_ns_per_token`.
    #[must_use]
    pub fn patience_us(self, missing_tokens: u64, prefill_ns_per_token: u32) -> u64 {
        match self {
            Self::None => 0,
            Self::Pinned => PATIENCE_US_MAX,
            Self::Prefix if missing_tokens == 0 => 0,
            Self::Prefix => {
                let price_us = missing_tokens.saturating_mul(prefill_ns_per_token.into()) / 1000;
                price_us.clamp(PATIENCE_US_MIN, PATIENCE_US_MAX)
            }
        }
    }
}

/// Method of finding the leading blocks that a backend holds. All methods give the same result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MatchBy {
    /// Finds them for all backends at once, by bisection over the sets of holders.
    #[default]
    Mask,
    /// Finds them for each backend separately, by binary search over positions.
    Position,
}

/// Places where a request may name its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionNames<'a> {
    /// Header with the name.
    pub header: &'a str,
    /// Cookie with the name, used if the header is missing. `None` if cookies are ignored.
    pub cookie: Option<&'a str>,
    /// Whether the client's address names the session if neither does.
    pub client_address: bool,
}

/// When a match refreshes a block's age.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Touch {
    /// Whenever the chosen backend takes the request.
    #[default]
    Always,
    /// For one request in eight, selected by its identity in the log; always for blocks that the
    /// request brings.
    Sampled,
}

/// Inverse share of requests that refresh found blocks with [`Touch::Sampled`]: one in this many.
const TOUCHED_IN: u64 = 8;

impl Touch {
    /// Whether this `attempt` of `session` refreshes the age of the blocks that it found. Applies
    /// to the whole chain: refreshing only part of a prefix would evict the rest.
    #[must_use]
    pub fn is_due(self, session: SessionId, attempt: AttemptId) -> bool {
        match self {
            Self::Always => true,
            Self::Sampled => mix(session.0 ^ mix(attempt.0)).is_multiple_of(TOUCHED_IN),
        }
    }
}

/// Ranking of the candidates for one request.
pub(super) trait Ranks {
    /// Returns the rank of `candidate`, which is at index `place`.
    fn rank(&self, place: usize, candidate: &Candidate) -> Rank;

    /// Returns the highest score that counts as equal to `best`, the lowest of the first tier.
    fn near_limit(&self, best: u64) -> u64 {
        best
    }

    /// Whether to keep only those near-equal candidates that hold most of the prompt. Under load,
    /// the tolerance is wider than the saving of a matched prefix.
    fn prefers_prefix(&self) -> bool {
        false
    }
}

/// Rank of a candidate: tier, then score, then second score; lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) tier: u8,
    pub(super) score: u64,
    /// Second score; 0 in policies with a tolerance.
    pub(super) then: u64,
    /// Reason for the choice, which all candidates of a tier share.
    pub(super) reason: Reason,
}

impl Rank {
    /// Whether this rank is better than `other`.
    fn is_better(&self, other: &Self) -> bool {
        let by_score = || (self.score, self.then) < (other.score, other.then);
        self.tier < other.tier || self.tier == other.tier && by_score()
    }

    /// Returns a rank in the first tier without a second score.
    pub(super) fn first(score: u64, reason: Reason) -> Self {
        Self {
            tier: 0,
            score,
            then: 0,
            reason,
        }
    }

    /// Returns the rank of a candidate whose prefix counts: least `missing` blocks, then least
    /// `running` requests.
    pub(super) fn longest_prefix(missing: u32, running: u64) -> Self {
        Self {
            tier: 0,
            score: missing.into(),
            then: running,
            reason: Reason::LongestPrefix,
        }
    }

    /// Returns the rank of a candidate whose prefix does not count: least `running` requests.
    pub(super) fn without_prefix(running: u64) -> Self {
        Self {
            tier: 1,
            ..Self::first(running, Reason::LeastRequests)
        }
    }
}

/// Ranking by a score alone.
pub(super) struct ByScore<F> {
    pub(super) score: F,
    pub(super) near: Tolerance,
    pub(super) prefers_prefix: bool,
    pub(super) reason: Reason,
}

/// Range of scores that count as equal to the best one.
#[derive(Debug, Clone, Copy)]
pub(super) enum Tolerance {
    /// Only equal scores.
    Equal,
    /// Scores that exceed the best one by at most [`NEAR_PERCENT`].
    Near,
    /// Scores that exceed the best one by at most this much.
    Within(u64),
}

/// Difference of scores that count as equal, in percent of the lowest one.
const NEAR_PERCENT: u128 = 2;

impl Tolerance {
    pub(super) fn limit(self, best: u64) -> u64 {
        match self {
            Self::Equal => best,
            Self::Near => {
                let window = u128::from(best) * NEAR_PERCENT / 100;
                best.saturating_add(u64::try_from(window).unwrap_or(u64::MAX))
            }
            Self::Within(window) => best.saturating_add(window),
        }
    }
}

impl<F: Fn(&Candidate) -> u64> Ranks for ByScore<F> {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        Rank::first((self.score)(candidate), self.reason)
    }

    fn near_limit(&self, best: u64) -> u64 {
        self.near.limit(best)
    }

    fn prefers_prefix(&self) -> bool {
        self.prefers_prefix
    }
}

/// Maximum number of candidates that are ranked without an allocation.
const FEW: usize = 16;

/// Picks the best rank; `None` if there are no candidates. Among near-equal ones, the home of the
/// request's session wins, else the highest draw from the request's jitter.
pub(super) fn pick(
    ranks: &impl Ranks,
    request: &PolicyRequest,
    candidates: &[Candidate],
) -> Option<Choice> {
    // Rank each candidate only once: ranking is the most expensive step here.
    let mut few = [Rank::first(0, Reason::OnlyCandidate); FEW];
    let mut many = Vec::new();
    let ranked = match few.get_mut(..candidates.len()) {
        Some(few) => few,
        None => {
            many.resize(candidates.len(), few[0]);
            &mut many[..]
        }
    };
    for (place, candidate) in candidates.iter().enumerate() {
        ranked[place] = ranks.rank(place, candidate);
    }
    // Not `min_by_key`, which would copy each key and its padding.
    let mut best = ranked.first()?;
    for rank in ranked.iter() {
        if rank.is_better(best) {
            best = rank;
        }
    }
    let limit = ranks.near_limit(best.score);
    let mut near = 0_usize;
    let mut chosen: Option<(u32, u64, Reverse<Slot>, &Candidate)> = None;
    for (rank, candidate) in ranked.iter().zip(candidates) {
        if rank.tier != best.tier || rank.score > limit || rank.then > best.then {
            continue;
        }
        let held = if ranks.prefers_prefix() {
            candidate.matched
        } else {
            0
        };
        let most_held = chosen.map_or(0, |(held, ..)| held);
        if held < most_held {
            continue;
        }
        near = if held > most_held { 1 } else { near + 1 };
        let slot = candidate.slot;
        let is_home = request.home == Some(slot);
        let draw = (
            held,
            if is_home {
                u64::MAX
            } else {
                draw(request.jitter, slot)
            },
            Reverse(slot),
        );
        if chosen.is_none_or(|(held, highest, slot, _)| draw > (held, highest, slot)) {
            chosen = Some((draw.0, draw.1, draw.2, candidate));
        }
    }
    let (.., chosen) = chosen?;
    Some(Choice {
        slot: chosen.slot,
        matched: chosen.matched,
        loaded: chosen.loaded,
        reason: match near {
            0 | 1 => best.reason,
            _ if request.home == Some(chosen.slot) => Reason::Home,
            _ => Reason::Jitter,
        },
    })
}

/// Returns a request's draw for one slot. This is rendezvous hashing: which candidate of a set wins
/// does not depend on the other near-equal candidates.
pub(super) fn draw(jitter: u64, slot: Slot) -> u64 {
    mix(jitter ^ (u64::from(slot.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Returns the number of requests known to be at the backend. The requests that replicas dispatched
/// include those waiting in the engine; the engine's queue is longer only if other clients use it.
pub(super) fn requests(candidate: &Candidate) -> u64 {
    u64::from(candidate.running.max(candidate.waiting))
}

/// Mixes the bits of `x` with the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
pub(super) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the product of `count` and `price`, which cannot overflow.
pub(super) fn product(count: u32, price: u32) -> u64 {
    u64::from(count) * u64::from(price)
}

/// Returns `ceil(factor * (total + 1) / n)` over the running requests: the maximum load of a
/// backend, including the new request. With a factor of 1 or more, at least one candidate can take
/// the request.
pub(super) fn load_bound(factor_milli: u32, candidates: &[Candidate]) -> u64 {
    let total: u64 = candidates.iter().map(|it| u64::from(it.running)).sum();
    let count = (candidates.len() as u128).max(1);
    let bound = (u128::from(factor_milli) * (u128::from(total) + 1)).div_ceil(1000 * count);
    u64::try_from(bound).unwrap_or(u64::MAX)
}

/// Candidates ordered by slot, which is the order of registration. Callers usually pass them in
/// this order.
pub(super) struct BySlot<'a> {
    candidates: &'a [Candidate],
    is_sorted: bool,
}

impl<'a> BySlot<'a> {
    pub(super) fn of(candidates: &'a [Candidate]) -> Self {
        Self {
            candidates,
            is_sorted: candidates.is_sorted_by_key(|it| it.slot),
        }
    }

    /// Returns the number of candidates with a lower slot than the one at index `place`.
    pub(super) fn place(&self, place: usize) -> usize {
        if self.is_sorted {
            return place;
        }
        let slot = self.candidates[place].slot;
        self.candidates.iter().filter(|it| it.slot < slot).count()
    }

    /// Returns the slot with `place` candidates below it; 0 if there are too few.
    pub(super) fn slot(&self, place: usize) -> Slot {
        if self.is_sorted {
            return self
                .candidates
                .get(place)
                .map_or(Slot(0), |candidate| candidate.slot);
        }
        let has_place = |nth: &usize| self.place(*nth) == place;
        let found = (0..self.candidates.len()).find(has_place);
        found.map_or(Slot(0), |nth| self.candidates[nth].slot)
    }
}
