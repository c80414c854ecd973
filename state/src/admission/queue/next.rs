//! Selection of the request that goes next.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Bound;

use super::class::{ClassKey, MatchKey, UserQueue, UserQueueKey};
use super::{
    DispatchVerdict, Next, Queue, QueuedRequest, WaitingUser, class_of, is_gated, quantum,
};
use crate::admission::gate::{GATE_RETRY_MS, Gate};
use crate::admission::{BinSelection, Counters, Order, UserFigures};
use crate::ids::{Ticket, UserKey};

/// Maximum number of requests that one call examines and that cannot go.
const LOOKS_MAX: usize = 256;
/// Maximum number of requests behind blocked heads that one call examines per priority.
const BEHIND_MAX: usize = 64;

/// Position of a request in a class's order.
#[derive(Debug, Clone, Copy)]
enum Position {
    Head(UserQueueKey),
    Match(MatchKey, UserKey),
}

/// State of one search for the next request.
struct Search<F> {
    now_ms: u64,
    verdict: F,
    /// Number of requests examined that could not go.
    looks: usize,
    /// Whether the search found capacity for a request that the gate holds.
    is_held: bool,
    /// Requests deferred because their users are too far ahead of others here, by key.
    beyond: BTreeSet<(u64, Ticket)>,
    /// User queues with a request for which there is no capacity.
    stuck: Vec<(ClassKey, UserKey)>,
}

/// Outcome of a search that ended early.
enum SearchEnd {
    Go(Ticket),
    /// There is no capacity for any request.
    NoRoom,
    /// The search has examined [`LOOKS_MAX`] requests that cannot go.
    Enough,
}

impl<F> Search<F> {
    fn new(now_ms: u64, verdict: F) -> Self {
        Self {
            now_ms,
            verdict,
            looks: 0,
            is_held: false,
            beyond: BTreeSet::new(),
            stuck: Vec::new(),
        }
    }
}

impl Queue {
    /// Removes and returns the request that goes next. Asks `verdict` about one request after
    /// another, until one can go and the gate does not hold it.
    pub fn next(
        &mut self,
        now_ms: u64,
        counters: &impl Counters,
        gate: &mut Gate,
        verdict: impl FnMut(&QueuedRequest) -> DispatchVerdict,
    ) -> Next {
        if self.requests.is_empty() {
            return Next::Empty;
        }
        self.look(now_ms);
        self.refresh(now_ms, counters);
        let mut round = Search::new(now_ms, verdict);
        let priorities: BTreeSet<Reverse<i16>> = self.classes.keys().map(|(it, _)| *it).collect();
        let end = priorities
            .into_iter()
            .find_map(|priority| self.next_of(priority, counters, gate, &mut round));
        match end {
            Some(SearchEnd::Go(ticket)) => {
                let waiting = self.take(ticket, now_ms);
                let waiting = waiting.expect("it was just asked about");
                self.last_bin = waiting.bin;
                Next::Go(waiting)
            }
            Some(SearchEnd::NoRoom) => {
                gate.no_room();
                Next::NoRoom
            }
            Some(SearchEnd::Enough) | None if round.is_held => Next::Held {
                retry_ms: GATE_RETRY_MS,
            },
            Some(SearchEnd::Enough) | None => Next::NoRoom,
        }
    }

    /// Removes and returns the request that goes next of those in the bin and priority of `first`,
    /// which began a batch. Returns `None` if none can go, or `verdict` ends the batch.
    pub fn next_alike(
        &mut self,
        first: &QueuedRequest,
        now_ms: u64,
        counters: &impl Counters,
        gate: &mut Gate,
        verdict: impl FnMut(&QueuedRequest) -> DispatchVerdict,
    ) -> Option<QueuedRequest> {
        self.look(now_ms);
        self.refresh(now_ms, counters);
        let mut round = Search::new(now_ms, verdict);
        let end = self.next_in(class_of(first), u64::MAX, counters, gate, &mut round);
        match end {
            Some(SearchEnd::Go(ticket)) => self.take(ticket, now_ms),
            Some(SearchEnd::NoRoom | SearchEnd::Enough) | None => None,
        }
    }

    /// Searches the requests of one bin and priority in the queue's order.
    fn next_in(
        &mut self,
        place: ClassKey,
        least: u64,
        counters: &impl Counters,
        gate: &mut Gate,
        round: &mut Search<impl FnMut(&QueuedRequest) -> DispatchVerdict>,
    ) -> Option<SearchEnd> {
        let mut after = None;
        while let Some((at, ticket)) = self.candidate(place, after, counters, gate) {
            after = Some(at);
            let end = self.ask(ticket, least, counters, gate, round);
            if end.is_some() {
                return end;
            }
        }
        None
    }

    /// Searches the requests of one priority, bin by bin. If a user is ahead of another waiting
    /// user by more than the gate's slack, the user's requests go only if no others can.
    fn next_of(
        &mut self,
        priority: Reverse<i16>,
        counters: &impl Counters,
        gate: &mut Gate,
        round: &mut Search<impl FnMut(&QueuedRequest) -> DispatchVerdict>,
    ) -> Option<SearchEnd> {
        let bins = self.bin_turns(priority);
        let least = self.least(priority, counters).unwrap_or_default();
        let aged = self.aged(priority, round.now_ms).filter(|_| bins.len() > 1);
        if let Some(ticket) = aged {
            let end = self.ask(ticket, least, counters, gate, round);
            if end.is_some() {
                return end;
            }
        }
        for bin in &bins {
            // With a single bin, the order itself keeps users from getting ahead.
            let least = if bins.len() > 1 { least } else { u64::MAX };
            let end = self.next_in((priority, *bin), least, counters, gate, round);
            if end.is_some() {
                return end;
            }
        }
        for (_, ticket) in std::mem::take(&mut round.beyond) {
            let end = self.ask(ticket, u64::MAX, counters, gate, round);
            if end.is_some() {
                return end;
            }
        }
        let behind = self.behind(&round.stuck);
        let end = behind
            .into_iter()
            .find_map(|ticket| self.ask(ticket, u64::MAX, counters, gate, round));
        round.stuck.clear();
        end
    }

    /// Returns a few requests behind the heads of the blocked user queues `stuck`: there may be
    /// capacity for them where there is none for the head. The search examines them after all
    /// heads, so that no user's requests are examined at the expense of others.
    fn behind(&self, stuck: &[(ClassKey, UserKey)]) -> Vec<Ticket> {
        let queues = stuck
            .iter()
            .filter_map(|(place, user)| self.classes.get(place)?.queues.get(user));
        let behind = |queue: &UserQueue| queue.behind(self.user_order());
        queues.flat_map(behind).take(BEHIND_MAX).collect()
    }

    /// Checks whether a request can go and returns the outcome if the search ends. Defers a request
    /// whose key exceeds `least` by more than the slack.
    fn ask(
        &self,
        ticket: Ticket,
        least: u64,
        counters: &impl Counters,
        gate: &mut Gate,
        round: &mut Search<impl FnMut(&QueuedRequest) -> DispatchVerdict>,
    ) -> Option<SearchEnd> {
        let waiting = self.requests.get(&ticket)?;
        let figures = counters.figures(waiting.user);
        let key = self.key(waiting, &figures);
        if key > least.saturating_add(figures.milli_of(gate.slack())) {
            round.beyond.insert((key, ticket));
            return None;
        }
        let (priority, weight_milli) = (waiting.priority, figures.weight_milli);
        let is_held =
            is_gated(self.rules.order) && gate.holds(priority, key, weight_milli, round.now_ms);
        // One held request with capacity is enough to report [`Next::Held`].
        let verdict = if is_held && round.is_held {
            DispatchVerdict::Skip
        } else {
            (round.verdict)(waiting)
        };
        match verdict {
            DispatchVerdict::Stop => return Some(SearchEnd::NoRoom),
            DispatchVerdict::Go if !is_held => return Some(SearchEnd::Go(ticket)),
            DispatchVerdict::Go => {
                gate.hold(priority, key, weight_milli, round.now_ms);
                if !gate.holds(priority, key, weight_milli, round.now_ms) {
                    return Some(SearchEnd::Go(ticket));
                }
                round.is_held = true;
            }
            DispatchVerdict::Skip => {
                let queue = (class_of(waiting), waiting.user);
                if !is_held && !round.stuck.contains(&queue) {
                    round.stuck.push(queue);
                }
            }
        }
        round.looks += 1;
        (round.looks >= LOOKS_MAX).then_some(SearchEnd::Enough)
    }

    /// Returns the bins of one priority in the order in which they are searched.
    fn bin_turns(&self, priority: Reverse<i16>) -> Vec<u16> {
        let classes = self.classes.range((priority, 0)..=(priority, u16::MAX));
        let mut bins: Vec<(u16, usize)> = classes
            .map(|((_, bin), class)| (*bin, class.waiting))
            .collect();
        match self.rules.bin_selection {
            BinSelection::RoundRobin => bins.sort_by_key(|(bin, _)| (*bin <= self.last_bin, *bin)),
            BinSelection::LongestQueue => bins.sort_by_key(|(bin, len)| (Reverse(*len), *bin)),
        }
        bins.into_iter().map(|(bin, _)| bin).collect()
    }

    /// Returns the queue's oldest request if it has this priority and has waited `bin_age_ms_max`.
    fn aged(&self, priority: Reverse<i16>, now_ms: u64) -> Option<Ticket> {
        let &(arrived_ms, ticket) = self.ages.first()?;
        let is_old = now_ms.saturating_sub(arrived_ms) >= self.rules.bin_age_ms_max;
        let waiting = self.requests.get(&ticket)?;
        (is_old && Reverse(waiting.priority) == priority).then_some(ticket)
    }

    /// Returns the next request of a class after the position `after`, with its position, or `None`
    /// if there are no more. An `after` of `None` starts at the first request.
    fn candidate(
        &mut self,
        place: ClassKey,
        after: Option<Position>,
        counters: &impl Counters,
        gate: &Gate,
    ) -> Option<(Position, Ticket)> {
        match (self.rules.order, after) {
            (Order::Dlpm, None) => self.first_solvent(place, counters, gate),
            (Order::Dlpm, Some(Position::Match(best, user))) => self
                .next_solvent(place, Some((best, user)), counters)
                .or_else(|| self.next_head(place, None, counters)),
            (_, Some(Position::Head(head))) => self.next_head(place, Some(head), counters),
            (_, None | Some(Position::Match(..))) => self.next_head(place, None, counters),
        }
    }

    /// Returns the head of the first user queue after `after` whose refreshed key is unchanged, or
    /// `None` if there is no such queue. An `after` of `None` starts at the first queue.
    fn next_head(
        &mut self,
        place: ClassKey,
        after: Option<UserQueueKey>,
        counters: &impl Counters,
    ) -> Option<(Position, Ticket)> {
        loop {
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            let heads = &self.classes.get(&place)?.heads;
            let &head = heads.range((from, Bound::Unbounded)).next()?;
            let (key, _, ticket, user) = head;
            if self.sort(place, user, &counters.figures(user)) == key {
                return Some((Position::Head(head), ticket));
            }
        }
    }

    /// Returns the least refreshed key among the requests of one priority, if there are any.
    pub(super) fn least(
        &mut self,
        priority: Reverse<i16>,
        counters: &impl Counters,
    ) -> Option<u64> {
        let classes = self.classes.range((priority, 0)..=(priority, u16::MAX));
        let places: Vec<ClassKey> = classes.map(|(place, _)| *place).collect();
        places
            .into_iter()
            .filter_map(|place| match self.next_head(place, None, counters)? {
                (Position::Head((key, ..)), _) => Some(key),
                (Position::Match(..), _) => None,
            })
            .min()
    }

    /// Returns the request with the longest match among `dlpm` users with deficit left. Refills all
    /// users first if none has any.
    fn first_solvent(
        &mut self,
        place: ClassKey,
        counters: &impl Counters,
        gate: &Gate,
    ) -> Option<(Position, Ticket)> {
        let first = self.next_solvent(place, None, counters);
        if first.is_some() {
            return first;
        }
        self.refill(place, counters, gate);
        self.next_solvent(place, None, counters)
    }

    fn next_solvent(
        &mut self,
        place: ClassKey,
        after: Option<(MatchKey, UserKey)>,
        counters: &impl Counters,
    ) -> Option<(Position, Ticket)> {
        loop {
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            let solvent = &self.classes.get(&place)?.solvent;
            let &(best, user) = solvent.range((from, Bound::Unbounded)).next()?;
            self.sort(place, user, &counters.figures(user));
            let is_solvent = |queue: &UserQueue| queue.is_solvent;
            if self
                .classes
                .get(&place)?
                .queues
                .get(&user)
                .is_some_and(is_solvent)
            {
                return Some((Position::Match(best, user), best.2));
            }
        }
    }

    /// Gives every user the same number of `dlpm` quanta: the least that leaves one with deficit.
    fn refill(&mut self, place: ClassKey, counters: &impl Counters, gate: &Gate) {
        let Some(class) = self.classes.get(&place) else {
            return;
        };
        let users: Vec<UserKey> = class.queues.keys().copied().collect();
        let quanta = |figures: &UserFigures, presence: &WaitingUser| {
            let quantum = figures.milli_of(quantum(gate)).max(1);
            let behind = presence
                .counter_milli(figures)
                .saturating_sub(presence.served_to_milli);
            (quantum, behind / quantum + 1)
        };
        let rounds = users
            .iter()
            .filter_map(|user| Some(quanta(&counters.figures(*user), self.users.get(user)?).1))
            .min();
        for user in users {
            let figures = counters.figures(user);
            if let (Some(rounds), Some(presence)) = (rounds, self.users.get_mut(&user)) {
                let more = quanta(&figures, presence).0.saturating_mul(rounds);
                presence.served_to_milli = presence.served_to_milli.saturating_add(more);
            }
            self.sort(place, user, &figures);
        }
    }
}
