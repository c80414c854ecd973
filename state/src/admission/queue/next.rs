//! Looking for who goes next.

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

/// Requests looked at that cannot go before a call gives up.
const LOOKS_MAX: usize = 256;
/// Of these, such as stand behind one of the same user that cannot go.
const BEHIND_MAX: usize = 64;

/// Where in a class's order a request stands.
#[derive(Debug, Clone, Copy)]
enum Position {
    Head(UserQueueKey),
    Match(MatchKey, UserKey),
}

/// One look for who goes next.
struct Search<F> {
    now_ms: u64,
    verdict: F,
    /// Requests that could not go.
    looks: usize,
    /// Whether there is room for somebody who is held by the gate.
    is_held: bool,
    /// By key, those put off because they are too far ahead of others here.
    beyond: BTreeSet<(u64, Ticket)>,
    /// Lines of which a request was asked about that there is no room for.
    stuck: Vec<(ClassKey, UserKey)>,
}

/// How a look ends.
enum SearchEnd {
    Go(Ticket),
    /// There is none for anybody.
    NoRoom,
    /// Looked at as many as one call may.
    Enough,
}

impl Queue {
    /// Takes out who goes next. `verdict` is asked about one request after the other until one can
    /// go and the gate lets it.
    pub fn next(
        &mut self,
        now_ms: u64,
        counters: &impl Counters,
        gate: &mut Gate,
        verdict: impl FnMut(&QueuedRequest) -> DispatchVerdict,
    ) -> Next {
        if self.requests.is_empty() {
            return Next::Nobody;
        }
        self.look(now_ms);
        self.refresh(now_ms, counters);
        let mut round = Search {
            now_ms,
            verdict,
            looks: 0,
            is_held: false,
            beyond: BTreeSet::new(),
            stuck: Vec::new(),
        };
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

    /// Who goes next of one priority: bin by bin, but nobody whose user is further ahead of another
    /// who waits than the gate's slack, unless none of those can go.
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
            let place = (priority, *bin);
            // With one bin the order itself sees to it that nobody gets ahead.
            let least = if bins.len() > 1 { least } else { u64::MAX };
            let mut after = None;
            while let Some((at, ticket)) = self.candidate(place, after, counters, gate) {
                after = Some(at);
                let end = self.ask(ticket, least, counters, gate, round);
                if end.is_some() {
                    return end;
                }
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

    /// Requests behind the first of their queues: there may be room for them where there is none for
    /// that one. A few only, after all firsts, so that nobody's are looked at instead of others'.
    fn behind(&self, stuck: &[(ClassKey, UserKey)]) -> Vec<Ticket> {
        let queues = stuck
            .iter()
            .filter_map(|(place, user)| self.classes.get(place)?.queues.get(user));
        let behind = |queue: &UserQueue| queue.behind(self.is_newest_first());
        queues.flat_map(behind).take(BEHIND_MAX).collect()
    }

    /// Asks whether a request can go; one too far ahead of `least` is put off instead.
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
        // That there is room for somebody who is held need be known of one only.
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

    /// Bins of one priority in their turn.
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

    /// The oldest request, if it is of this priority and has waited longer than for its bin's turn.
    fn aged(&self, priority: Reverse<i16>, now_ms: u64) -> Option<Ticket> {
        let &(arrived_ms, ticket) = self.ages.first()?;
        let is_old = now_ms.saturating_sub(arrived_ms) >= self.rules.bin_age_ms_max;
        let waiting = self.requests.get(&ticket)?;
        (is_old && Reverse(waiting.priority) == priority).then_some(ticket)
    }

    /// The next request of a class after the place of another, and its place.
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

    /// The first queue whose key is after `after`, looked at again.
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

    /// Least key of one priority, looked at again.
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

    /// `dlpm`: the longest match among users with deficit left; when nobody has any, after a refill.
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

    /// `dlpm`: nobody has deficit left. Gives everyone as many quanta as it takes for one to have.
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
