//! Batches from bins: which bin goes next (Algorithm 5), and how many of it (Algorithm 3).
//!
//! A batch is of one bin, so that its requests end at about the same time, and is the longest run from
//! the bin's front that has room. What has no room stays at the front, in its order. Two things are
//! other than in the seed of these algorithms. A request whose own tokens exceed a backend's memory is
//! refused when it arrives ([`fits`]): in the queue it would never be part of a batch and stop its bin
//! for good. And a bin whose oldest request has waited for longer than an age bound goes before its
//! turn: with the longest queue first, a bin of few requests would else starve.
//!
//! The seed keeps statistics per bin to estimate what a batch of it holds. Here the candidates' own
//! tokens, prompt and predicted output, are added up, which is what the statistics estimate.

use std::collections::VecDeque;

use crate::settings::BinSelection;

/// Whether a request of so many tokens, prompt and output, can ever run on a backend whose cache
/// holds `capacity_tokens`; `None`: unknown, everything may.
#[must_use]
pub fn fits(tokens: u64, capacity_tokens: Option<u64>) -> bool {
    capacity_tokens.is_none_or(|capacity| tokens <= capacity)
}

/// How a bin is selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionRule {
    /// Which bin goes next.
    pub selection: BinSelection,
    /// Wait after which a request's bin goes before its turn, milliseconds.
    pub age_ms_max: u32,
}

/// A bin as its selection sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BinStatus {
    /// Requests that wait in it.
    pub waiting: usize,
    /// When the one waiting for longest arrived; meaningless when none waits.
    pub oldest_ms: u64,
}

/// Algorithm 5's selection: the bin to take from, `None` when all are empty. `next` is the bin whose
/// turn it is in round-robin order; a bin that goes before its turn leaves it as it is.
pub fn select(
    bins: &[BinStatus],
    next: &mut usize,
    rule: &SelectionRule,
    now_ms: u64,
) -> Option<usize> {
    let filled = || bins.iter().enumerate().filter(|(_, bin)| bin.waiting > 0);
    let is_aged = |bin: &BinStatus| now_ms.saturating_sub(bin.oldest_ms) >= rule.age_ms_max.into();
    let aged = filled().filter(|(_, bin)| is_aged(bin));
    if let Some((at, _)) = aged.min_by_key(|(_, bin)| bin.oldest_ms) {
        return Some(at);
    }
    match rule.selection {
        BinSelection::RoundRobin => {
            let at = (0..bins.len())
                .map(|offset| (*next + offset) % bins.len())
                .find(|at| bins[*at].waiting > 0)?;
            *next = (at + 1) % bins.len();
            Some(at)
        }
        // Of equals the first: `max_by_key` alone would answer the last.
        BinSelection::LongestQueue => filled()
            .rev()
            .max_by_key(|(_, bin)| bin.waiting)
            .map(|(at, _)| at),
    }
}

/// What a backend has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRoom {
    /// Requests: `min(b_mem, b_SLA)` less what runs.
    pub requests: u32,
    /// Tokens; `None`: unknown, they do not bound.
    pub tokens: Option<u64>,
}

impl BatchRoom {
    /// Algorithm 3: how many of the first candidates, by their tokens, there is room for.
    pub fn take(&self, candidates: impl Iterator<Item = u64>) -> usize {
        let mut sum = 0_u64;
        candidates
            .take(usize::try_from(self.requests).unwrap_or(usize::MAX))
            .take_while(|tokens| {
                sum = sum.saturating_add(*tokens);
                fits(sum, self.tokens)
            })
            .count()
    }
}

/// A request that waits in a bin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BinnedRequest<T> {
    /// When it arrived.
    pub arrived_ms: u64,
    /// Tokens it is expected to hold at its end: prompt and predicted output.
    pub tokens: u64,
    /// The request.
    pub item: T,
}

/// Requests that go to one backend together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch<T> {
    /// The bin they are of.
    pub bin: u16,
    /// In the order they arrived; not empty.
    pub candidates: Vec<BinnedRequest<T>>,
}

/// Queues by bin. Each is first come, first served.
#[derive(Debug, Clone)]
pub struct BinQueues<T> {
    queues: Vec<VecDeque<BinnedRequest<T>>>,
    next: usize,
}

impl<T> BinQueues<T> {
    /// `bins` empty queues, at least one.
    #[must_use]
    pub fn new(bins: u16) -> Self {
        Self {
            queues: (0..bins.max(1)).map(|_| VecDeque::new()).collect(),
            next: 0,
        }
    }

    /// Adds a request behind those of its bin; one beyond the last bin is of the last.
    pub fn push(&mut self, bin: u16, candidate: BinnedRequest<T>) {
        let last = self.queues.len() - 1;
        self.queues[usize::from(bin).min(last)].push_back(candidate);
    }

    /// Requests that wait, by bin.
    #[must_use]
    pub fn waiting(&self) -> Vec<usize> {
        self.queues.iter().map(VecDeque::len).collect()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Takes out the requests that `leaves` says.
    pub fn remove(&mut self, mut leaves: impl FnMut(&T) -> bool) {
        for queue in &mut self.queues {
            queue.retain(|candidate| !leaves(&candidate.item));
        }
    }

    /// Spreads what waits over other bins, in the order of arrival: boundaries have changed.
    pub fn rebin(&mut self, bins: u16, bin_of: impl Fn(&T) -> u16) {
        let mut all: Vec<_> = self.queues.drain(..).flatten().collect();
        all.sort_by_key(|candidate| candidate.arrived_ms);
        *self = Self {
            next: self.next % usize::from(bins.max(1)),
            ..Self::new(bins)
        };
        for candidate in all {
            self.push(bin_of(&candidate.item), candidate);
        }
    }

    /// Algorithms 5 and 3: the next batch that there is room for; `None` when nothing waits or the
    /// selected bin's first request has no room.
    pub fn form(
        &mut self,
        now_ms: u64,
        rule: &SelectionRule,
        room: &BatchRoom,
    ) -> Option<Batch<T>> {
        let standing = |queue: &VecDeque<BinnedRequest<T>>| BinStatus {
            waiting: queue.len(),
            oldest_ms: queue.front().map_or(0, |first| first.arrived_ms),
        };
        let bins: Vec<BinStatus> = self.queues.iter().map(standing).collect();
        let mut next = self.next;
        let at = select(&bins, &mut next, rule, now_ms)?;
        let queue = &mut self.queues[at];
        let taken = room.take(queue.iter().map(|candidate| candidate.tokens));
        if taken == 0 {
            // Its turn is not over: it was not served.
            return None;
        }
        self.next = next;
        Some(Batch {
            bin: u16::try_from(at).expect("bins are counted in 16 bits"),
            candidates: queue.drain(..taken).collect(),
        })
    }
}
