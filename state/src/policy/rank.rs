//! Shared by all policies: ranking candidates, picking the best, and common sums over candidates.

use std::cmp::Reverse;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use super::{Candidate, Choice, PolicyRequest, Reason};
use crate::ids::{AttemptId, SessionId, Slot};
use crate::reject::Rejection;

/// A policy with its settings.
pub(super) trait Policy {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    fn validate(&self) -> Result<(), Rejection> {
        Ok(())
    }

    /// What must be gathered for it.
    fn needs(&self) -> Needs<'_> {
        Needs::default()
    }

    /// Looks at the candidates as a whole and answers how it ranks each of them.
    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a, Self>;
}

/// What a policy looks at beside what is always there; it costs time to gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs<'a> {
    /// `PolicyRequest::prefix_key` over so many blocks.
    pub prefix_blocks: Option<u32>,
    /// `PolicyRequest::session`, and where a request names it.
    pub session: Option<SessionNames<'a>>,
    /// `PolicyRequest::turn`.
    pub turn: bool,
    /// `PolicyRequest::user`.
    pub user_tokens: bool,
    /// `Candidate::prices`.
    pub learnt: bool,
    /// How leading blocks are to be found.
    pub match_by: MatchBy,
    /// When a request renews the age of blocks it finds cached.
    pub touch: Touch,
}

/// How the leading blocks that a backend holds are found. The answer is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MatchBy {
    /// For all backends at once, by bisection over the sets of holders.
    #[default]
    Mask,
    /// For each backend by itself, by binary search over positions.
    Position,
}

/// Where a request names its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionNames<'a> {
    /// The header whose value is the name.
    pub header: &'a str,
    /// The cookie whose value is the name when the header is missing; `None`: cookies are not looked at.
    pub cookie: Option<&'a str>,
}

/// When a match renews a block's age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Touch {
    /// Every time the chosen backend takes the request.
    #[default]
    Always,
    /// For one request in eight, by its identity in the log; always for blocks it brings.
    Sampled,
}

/// One request in so many touches when touches are sampled.
const TOUCHED_IN: u64 = 8;

impl Touch {
    /// Whether this attempt renews the age of the blocks it found. The whole chain or nothing: what
    /// goes with a part of a prefix renewed is the rest of it.
    #[must_use]
    pub fn is_due(self, session: SessionId, attempt: AttemptId) -> bool {
        match self {
            Self::Always => true,
            Self::Sampled => mix(session.0 ^ mix(attempt.0)).is_multiple_of(TOUCHED_IN),
        }
    }
}

/// A policy at work on one request.
pub(super) trait Ranks {
    /// How `candidate`, which stands at `place` among the candidates, compares.
    fn rank(&self, place: usize, candidate: &Candidate) -> Rank;

    /// Greatest score that counts as equal to `best`, the least one of the first tier.
    fn near_limit(&self, best: u64) -> u64 {
        best
    }

    /// Whether, among near-equal scores, only those that hold most of the prompt stay in: under
    /// load the window is wider than what a matched prefix saves.
    fn prefers_prefix(&self) -> bool {
        false
    }
}

/// Where a candidate stands: by tier, then by score, then by the second score; lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) tier: u8,
    pub(super) score: u64,
    /// 0 in policies whose scores have a window of near-equality.
    pub(super) then: u64,
    /// The same for all of a tier.
    pub(super) reason: Reason,
}

impl Rank {
    /// In the first tier, without a second score.
    pub(super) fn first(score: u64, reason: Reason) -> Self {
        Self {
            tier: 0,
            score,
            then: 0,
            reason,
        }
    }
}

/// Ranks by a score alone.
pub(super) struct ByScore<F> {
    pub(super) score: F,
    pub(super) near: Tolerance,
    pub(super) prefers_prefix: bool,
    pub(super) reason: Reason,
}

/// Which scores count as equal to the best.
#[derive(Debug, Clone, Copy)]
pub(super) enum Tolerance {
    /// Those equal to it.
    Equal,
    /// Those within so many thousandths of it.
    Permille(u32),
    /// Those at most so much greater.
    Within(u64),
}

impl Tolerance {
    pub(super) fn limit(self, best: u64) -> u64 {
        match self {
            Self::Equal => best,
            Self::Permille(permille) => {
                let window = u128::from(best) * u128::from(permille) / 1000;
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

/// The best rank; among near-equal ones the highest draw of the request's jitter.
pub(super) fn pick(
    ranks: &impl Ranks,
    request: &PolicyRequest,
    candidates: &[Candidate],
) -> Option<Choice> {
    let ranked = || {
        let rank = |(place, candidate)| (ranks.rank(place, candidate), candidate);
        candidates.iter().enumerate().map(rank)
    };
    let (best, _) = ranked().min_by_key(|(rank, _)| (rank.tier, rank.score, rank.then))?;
    let limit = ranks.near_limit(best.score);
    let mut near = 0_usize;
    let mut chosen: Option<(u32, u64, Reverse<Slot>, &Candidate)> = None;
    for (rank, candidate) in ranked() {
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
        let draw = (held, draw(request.jitter, slot), Reverse(slot));
        if chosen.is_none_or(|(held, highest, slot, _)| draw > (held, highest, slot)) {
            chosen = Some((draw.0, draw.1, draw.2, candidate));
        }
    }
    let (.., chosen) = chosen?;
    Some(Choice {
        slot: chosen.slot,
        matched: chosen.matched,
        reason: if near > 1 {
            Reason::Jitter
        } else {
            best.reason
        },
    })
}

/// A request's draw for one slot: rendezvous hashing, so that the winner among a set does not
/// depend on who else was near.
pub(super) fn draw(jitter: u64, slot: Slot) -> u64 {
    mix(jitter ^ (u64::from(slot.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Requests at the backend.
pub(super) fn requests(candidate: &Candidate) -> u64 {
    u64::from(candidate.running) + u64::from(candidate.waiting)
}

/// The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
pub(super) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Cannot overflow: both factors have 32 bits.
pub(super) fn product(count: u32, price: u32) -> u64 {
    u64::from(count) * u64::from(price)
}

/// `ceil(factor * (total + 1) / n)` over the running requests: what a bounded load may be once the
/// request is there. At least one candidate is below it when the factor is 1 or more.
pub(super) fn load_bound(factor_milli: u32, candidates: &[Candidate]) -> u64 {
    let total: u64 = candidates.iter().map(|it| u64::from(it.running)).sum();
    let count = (candidates.len() as u128).max(1);
    let bound = (u128::from(factor_milli) * (u128::from(total) + 1)).div_ceil(1000 * count);
    u64::try_from(bound).unwrap_or(u64::MAX)
}

/// Candidates counted by slot, the order in which backends were registered. Those who gather
/// candidates have them in this order already.
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

    /// How many candidates have a lower slot than the one at `place`.
    pub(super) fn place(&self, place: usize) -> usize {
        if self.is_sorted {
            return place;
        }
        let slot = self.candidates[place].slot;
        self.candidates.iter().filter(|it| it.slot < slot).count()
    }

    /// The slot with `place` candidates below it; 0 when there are no more than `place`.
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
