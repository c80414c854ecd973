//! Batches from bins: selection of the next bin (Algorithm 5), and of its requests (Algorithm 3).
//!
//! A batch comes from one bin, so that its requests end at about the same time. It is the longest
//! run from the front of the bin that fits; the rest stays at the front in order. Two things differ
//! from the original algorithms. A request whose own tokens exceed a backend's memory is rejected
//! on arrival ([`fits`]): in the queue it would never fit into a batch and would block its bin for
//! good. And a bin whose oldest request has waited longer than an age bound goes before its turn:
//! with the longest queue first, a bin of few requests would otherwise starve.
//!
//! The original keeps statistics per bin to estimate the size of a batch. This module adds up the
//! candidates' own tokens (prompt and predicted output), which is what the statistics estimate.

use std::collections::VecDeque;

use crate::settings::BinSelection;

/// Whether a request of `tokens` tokens, prompt and output, can ever run on a backend with a cache
/// of `capacity_tokens`. If the capacity is unknown (`None`), any request can.
#[must_use]
pub fn fits(tokens: u64, capacity_tokens: Option<u64>) -> bool {
    capacity_tokens.is_none_or(|capacity| tokens <= capacity)
}

/// Settings for the selection of a bin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionRule {
    /// Rule that selects the next bin.
    pub selection: BinSelection,
    /// Wait after which a request's bin goes before its turn, in milliseconds.
    pub age_ms_max: u32,
}

/// State of a bin that determines its selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BinStatus {
    /// Number of requests waiting in the bin.
    pub waiting: usize,
    /// Arrival time of the oldest waiting request, in milliseconds; meaningless if none waits.
    pub oldest_ms: u64,
}

/// Selects the bin to take requests from (Algorithm 5); `None` if all are empty. `next` is the bin
/// whose turn it is in round-robin order. A bin that goes before its turn does not change `next`.
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
        // Of equal bins, the first is selected: `max_by_key` alone would return the last.
        BinSelection::LongestQueue => filled()
            .rev()
            .max_by_key(|(_, bin)| bin.waiting)
            .map(|(at, _)| at),
    }
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
    /// Returns how many of the first `candidates`, given by their tokens, fit (Algorithm 3).
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
    /// Arrival time, in milliseconds.
    pub arrived_ms: u64,
    /// Number of tokens expected at the request's end: prompt and predicted output.
    pub tokens: u64,
    /// The request itself.
    pub item: T,
}

/// Requests of one bin that go to one backend together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch<T> {
    /// Bin from which the requests come.
    pub bin: u16,
    /// Requests of the batch in order of arrival; not empty.
    pub candidates: Vec<BinnedRequest<T>>,
}

/// Queues of waiting requests, one per bin, each first come, first served.
#[derive(Debug, Clone)]
pub struct BinQueues<T> {
    queues: Vec<VecDeque<BinnedRequest<T>>>,
    next: usize,
}

impl<T> BinQueues<T> {
    /// Creates `bins` empty queues, or one if `bins` is 0.
    #[must_use]
    pub fn new(bins: u16) -> Self {
        Self {
            queues: (0..bins.max(1)).map(|_| VecDeque::new()).collect(),
            next: 0,
        }
    }

    /// Adds a request to the end of its bin. An index beyond the last bin means the last bin.
    pub fn push(&mut self, bin: u16, candidate: BinnedRequest<T>) {
        let last = self.queues.len() - 1;
        self.queues[usize::from(bin).min(last)].push_back(candidate);
    }

    /// Returns the number of waiting requests of each bin.
    #[must_use]
    pub fn waiting(&self) -> Vec<usize> {
        self.queues.iter().map(VecDeque::len).collect()
    }

    /// Whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Removes the requests for which `leaves` returns `true`.
    pub fn remove(&mut self, mut leaves: impl FnMut(&T) -> bool) {
        for queue in &mut self.queues {
            queue.retain(|candidate| !leaves(&candidate.item));
        }
    }

    /// Redistributes the waiting requests to `bins` bins, in order of arrival, by `bin_of`.
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

    /// Removes and returns the next batch that fits (Algorithms 5 and 3). `None` if nothing waits,
    /// or if the first request of the selected bin does not fit.
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
            // The bin keeps its turn, because it was not served.
            return None;
        }
        self.next = next;
        Some(Batch {
            bin: u16::try_from(at).expect("bins are counted in 16 bits"),
            candidates: queue.drain(..taken).collect(),
        })
    }
}
