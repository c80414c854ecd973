//! The queue: the requests waiting for one model at one replica, and their order.
//!
//! Requests are ordered by priority, then by the turn of their output-length bin, then by user as
//! [`Order`] specifies, then by turns of the user's trees of sessions (except with `fcfs`, with
//! `dlpm`, and in overload), then by arrival. A user's requests of one class (priority and bin) form a
//! user queue. Each user queue has a *key*, and the least key goes first.
//!
//! Keys come from counters, which every replica's charges move while requests wait. The queue does
//! not follow each move. It keeps the keys sorted as last seen and refreshes a key before relying
//! on it. Counters only rise, so if the least key as last seen is unchanged, it is the least.
//! Figures that can fall (requests of the last minute, requests in flight, a weight) are caught by
//! refreshing a few user queues on every call and all of them at intervals.
//!
//! Nothing here reads a clock or waits. The caller passes the time and wakes the requests it
//! admits.

mod class;
mod deadlines;
mod next;
mod tree_turns;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use self::class::{Class, ClassKey, MatchKey};
use super::overload::{CODEL_TARGET_MS, Overload};
use super::{
    AdmissionSettings, Backlog, BinSelection, Counters, Gate, Order, Pricing, UserFigures,
};
use crate::ids::{AgentSessionKey, Ticket, UserKey};

pub use self::deadlines::{Expired, ExpiryReason, Forecast, Prospect, QueueRejection};

/// Number of user queues refreshed on every call of [`Queue::refresh`].
const REFRESH_QUEUES: usize = 4;
/// Interval at which all user queues are refreshed, in milliseconds.
const REFRESH_MS: u64 = 1000;
/// Maximum number of requests examined by [`Queue::unheld`].
const UNHELD_LOOKS_MAX: usize = 512;

/// A request that waits in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuedRequest {
    /// Identifier of the request.
    pub ticket: Ticket,
    /// User to whom the request is charged.
    pub user: UserKey,
    /// Tree of the request's session; `None` without a session. A user's trees take turns.
    pub tree: Option<AgentSessionKey>,
    /// Priority; a higher one goes first.
    pub priority: i16,
    /// Arrival time, in milliseconds on the clock of `now_ms`.
    pub arrived_ms: u64,
    /// Number of prompt tokens not believed to be cached at any backend.
    pub input_tokens: u32,
    /// Predicted number of output tokens.
    pub predicted_output: u32,
    /// Output-length bin of `predicted_output`; 0 without bins.
    pub bin: u16,
    /// Number of prompt blocks that some backend is believed to hold.
    pub matched_blocks: u32,
    /// Time after which a dispatch is of no use to the client, in milliseconds on the clock of
    /// `now_ms`; `None` if unknown.
    pub due_ms: Option<u64>,
    /// Longest wait of a request that waits for an engine which is being started, in milliseconds, in
    /// place of every bound that is not the client's; `None` for other requests.
    pub hold_ms: Option<u64>,
    /// Whether only some backends can take the request, so that the queue does not determine its
    /// wait.
    pub is_selective: bool,
}

/// Settings that determine order, size and waits of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSettings {
    /// Order of requests of equal priority.
    pub order: Order,
    /// Maximum number of waiting requests.
    pub queue_max: usize,
    /// Longest wait, in milliseconds.
    pub wait_ms_max: u64,
    /// Longest wait in overload, in milliseconds.
    pub target_ms: u64,
    /// Rule that selects the next bin.
    pub bin_selection: BinSelection,
    /// Wait after which a request goes ahead of its bin's turn, in milliseconds.
    pub bin_age_ms_max: u64,
    /// Token prices, for orders that consider a request's own price.
    pub pricing: Pricing,
}

impl QueueSettings {
    /// Returns the queue's settings for replicated admission settings and prices.
    #[must_use]
    pub fn of(settings: &AdmissionSettings, pricing: Pricing) -> Self {
        Self {
            order: settings.order,
            queue_max: settings.max_queue as usize,
            wait_ms_max: u64::from(settings.max_wait_ms),
            target_ms: CODEL_TARGET_MS,
            bin_selection: settings.bin_selection,
            bin_age_ms_max: u64::from(settings.bin_max_age_ms),
            pricing,
        }
    }
}

/// Verdict of a caller that knows the backends: whether a request can be dispatched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DispatchVerdict {
    /// There is capacity for the request.
    Go,
    /// There is no capacity for this request, but perhaps for another one.
    Skip,
    /// There is no capacity for any request.
    Stop,
}

/// Result of [`Queue::next`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The request that goes next. It has left the queue.
    Go(QueuedRequest),
    /// There is capacity, but users waiting at other replicas take precedence. The caller asks
    /// again when a peer's report changes, or after `retry_ms` at the latest.
    Held {
        /// Delay before asking again, in milliseconds.
        retry_ms: u64,
    },
    /// There is no capacity for any request that was examined.
    NoRoom,
    /// The queue is empty.
    Empty,
}

/// The requests waiting for one model at one replica; see the module documentation.
#[derive(Debug, Clone)]
pub struct Queue {
    rules: QueueSettings,
    requests: BTreeMap<Ticket, QueuedRequest>,
    classes: BTreeMap<ClassKey, Class>,
    users: BTreeMap<UserKey, WaitingUser>,
    /// All requests by arrival, except held ones.
    ages: BTreeSet<(u64, Ticket)>,
    /// Held requests by the end of their wait.
    holds: BTreeSet<(u64, Ticket)>,
    /// Requests with their own deadline, by that deadline.
    dues: BTreeSet<(u64, Ticket)>,
    overload: Overload,
    /// Bin of the request that [`Queue::next`] last returned.
    last_bin: u16,
    /// User queue that was last refreshed in turn; `None` if the first one is next.
    last_looked: Option<(ClassKey, UserKey)>,
    /// Time when all user queues were last refreshed; `None` if a refresh is due.
    refreshed_ms: Option<u64>,
}

/// A user with requests waiting in this queue.
#[derive(Debug, Clone, Copy)]
struct WaitingUser {
    waiting: usize,
    weight_milli: u32,
    /// Lower bound of the user's counter: the least counter of the users waiting when this one
    /// arrived. Applies until the state has lifted this user's counter.
    floor_milli: u64,
    /// Counter up to which `dlpm` serves the user before the next refill.
    served_to_milli: u64,
}

impl Queue {
    /// Creates an empty queue.
    #[must_use]
    pub fn new(rules: QueueSettings) -> Self {
        Self {
            rules,
            requests: BTreeMap::new(),
            classes: BTreeMap::new(),
            users: BTreeMap::new(),
            ages: BTreeSet::new(),
            holds: BTreeSet::new(),
            dues: BTreeSet::new(),
            overload: Overload::default(),
            last_bin: 0,
            last_looked: None,
            refreshed_ms: None,
        }
    }

    /// Replaces the settings from the next call on.
    pub fn set_rules(&mut self, rules: QueueSettings) {
        if rules != self.rules {
            self.rules = rules;
            self.refreshed_ms = None;
        }
    }

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether a request is held: it waits for an engine that is being started.
    #[must_use]
    pub fn holds_any(&self) -> bool {
        !self.holds.is_empty()
    }

    /// Returns the number of waiting requests of one user.
    #[must_use]
    pub fn len_of(&self, user: UserKey) -> usize {
        self.users.get(&user).map_or(0, |presence| presence.waiting)
    }

    /// Returns the number of trees that are kept for `user`, waiting or not.
    #[cfg(test)]
    pub(crate) fn trees_of(&self, user: UserKey) -> usize {
        let queues = self
            .classes
            .values()
            .filter_map(|class| class.queues.get(&user));
        queues.map(|queue| queue.turns.len()).sum()
    }

    /// Returns the number of users waiting.
    #[must_use]
    pub fn users_len(&self) -> usize {
        self.users.len()
    }

    /// Returns the number of waiting requests of each bin.
    #[must_use]
    pub fn bins(&self) -> BTreeMap<u16, usize> {
        let mut bins = BTreeMap::new();
        for ((_, bin), class) in &self.classes {
            *bins.entry(*bin).or_default() += class.waiting;
        }
        bins
    }

    /// Returns the waiting request with this ticket, if any.
    #[must_use]
    pub fn get(&self, ticket: Ticket) -> Option<&QueuedRequest> {
        self.requests.get(&ticket)
    }

    /// Iterates by ticket over waiting requests that the gate does not hold. Examines only the
    /// first `UNHELD_LOOKS_MAX` requests.
    pub fn unheld<'a>(
        &'a self,
        now_ms: u64,
        counters: &'a impl Counters,
        gate: &'a Gate,
    ) -> impl Iterator<Item = &'a QueuedRequest> {
        let is_gated = is_gated(self.rules.order);
        let is_held = move |waiting: &QueuedRequest| {
            let figures = counters.figures(waiting.user);
            let key = self.key(waiting, &figures);
            gate.holds(waiting.priority, key, figures.weight_milli, now_ms)
        };
        let looked_at = self.requests.values().take(UNHELD_LOOKS_MAX);
        looked_at.filter(move |waiting| !is_gated || !is_held(waiting))
    }

    /// Iterates by ticket over all waiting requests.
    pub fn iter(&self) -> impl Iterator<Item = &QueuedRequest> {
        self.requests.values()
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    /// If the queue is full, or if the request would not be dispatched in time.
    ///
    /// # Panics
    /// If its ticket is in the queue already.
    pub fn push(
        &mut self,
        waiting: QueuedRequest,
        now_ms: u64,
        counters: &impl Counters,
        gate: &Gate,
    ) -> Result<(), QueueRejection> {
        let figures = counters.figures(waiting.user);
        let presence = self.arrive(&waiting, &figures, now_ms, gate);
        self.check(&waiting, &presence, &figures, now_ms)?;
        let ticket = waiting.ticket;
        let is_free = self.requests.insert(ticket, waiting).is_none();
        assert!(is_free, "ticket {ticket} waits already");
        match hold_end(&waiting) {
            Some(end_ms) => self.holds.insert((end_ms, ticket)),
            None => self.ages.insert((waiting.arrived_ms, ticket)),
        };
        self.dues
            .extend(waiting.due_ms.map(|due_ms| (due_ms, ticket)));
        self.users.insert(waiting.user, presence);
        let class = self.classes.entry(class_of(&waiting)).or_default();
        class.waiting += 1;
        class.remove_from_order(waiting.user);
        let line = class.queues.entry(waiting.user).or_default();
        line.arrivals.insert((waiting.arrived_ms, ticket));
        line.turns
            .insert(waiting.tree, (waiting.arrived_ms, ticket));
        line.matches.insert(match_of(&waiting));
        self.sort(class_of(&waiting), waiting.user, &figures);
        Ok(())
    }

    /// Returns the user's entry with this request counted. A returning user must not profit from
    /// its absence: until the state has lifted its counter, the entry raises it to the least
    /// counter of the waiting users.
    fn arrive(
        &self,
        waiting: &QueuedRequest,
        figures: &UserFigures,
        now_ms: u64,
        gate: &Gate,
    ) -> WaitingUser {
        if let Some(presence) = self.users.get(&waiting.user) {
            return WaitingUser {
                waiting: presence.waiting + 1,
                ..*presence
            };
        }
        let least = self.least_seen(waiting.priority, now_ms, gate);
        let floor_milli = match self.rules.order {
            Order::Vtc | Order::VtcMaxFair | Order::VtcPred | Order::Dlpm => {
                least.unwrap_or_default()
            }
            // The keys of these orders are not counters, or must not be lifted.
            Order::Lcf | Order::Rpm | Order::Fcfs => 0,
        };
        let mut presence = WaitingUser {
            waiting: 1,
            weight_milli: figures.weight_milli,
            floor_milli,
            served_to_milli: 0,
        };
        // The user starts one quantum ahead of the least counter, not of its own: a user who leaves
        // and returns for each request would never run out otherwise.
        presence.served_to_milli = least
            .unwrap_or_else(|| presence.counter_milli(figures))
            .saturating_add(figures.milli_of(quantum(gate)));
        presence
    }

    /// Returns the least key, as last seen, of those who wait with this priority here or at a peer.
    fn least_seen(&self, priority: i16, now_ms: u64, gate: &Gate) -> Option<u64> {
        let own = self
            .classes
            .range((Reverse(priority), 0)..=(Reverse(priority), u16::MAX))
            .filter_map(|(_, class)| class.heads.first())
            .map(|(key, ..)| *key);
        own.chain(gate.least(priority, now_ms)).min()
    }

    /// Removes and returns a request without recording a departure. `None` if it does not wait.
    pub fn remove(&mut self, ticket: Ticket) -> Option<QueuedRequest> {
        let waiting = self.requests.remove(&ticket)?;
        match hold_end(&waiting) {
            Some(end_ms) => self.holds.remove(&(end_ms, ticket)),
            None => self.ages.remove(&(waiting.arrived_ms, ticket)),
        };
        if let Some(due_ms) = waiting.due_ms {
            self.dues.remove(&(due_ms, ticket));
        }
        let order = self.user_order();
        let place = class_of(&waiting);
        let class = self.classes.get_mut(&place).expect("its class is there");
        class.waiting -= 1;
        class.remove_from_order(waiting.user);
        let line = class
            .queues
            .get_mut(&waiting.user)
            .expect("its line is there");
        line.arrivals.remove(&(waiting.arrived_ms, ticket));
        line.turns
            .remove(waiting.tree, (waiting.arrived_ms, ticket));
        line.matches.remove(&match_of(&waiting));
        if line.arrivals.is_empty() {
            class.queues.remove(&waiting.user);
        } else {
            class.insert_into_order(waiting.user, order);
        }
        if class.queues.is_empty() {
            self.classes.remove(&place);
        }
        let presence = self
            .users
            .get_mut(&waiting.user)
            .expect("who waits is present");
        presence.waiting -= 1;
        if presence.waiting == 0 {
            self.users.remove(&waiting.user);
        }
        Some(waiting)
    }

    /// Returns the report for peers; `None` if nothing waits or replicas do not compare the order.
    pub fn backlog(&mut self, now_ms: u64, counters: &impl Counters) -> Option<Backlog> {
        if !is_gated(self.rules.order) {
            return None;
        }
        self.refresh(now_ms, counters);
        let &(priority, _) = self.classes.first_key_value()?.0;
        Some(Backlog {
            priority: priority.0,
            least_milli: self.least(priority, counters)?,
            users: u32::try_from(self.users.len()).unwrap_or(u32::MAX),
            waiting: u32::try_from(self.requests.len()).unwrap_or(u32::MAX),
        })
    }

    /// Refreshes the keys of a few user queues, or of all if [`REFRESH_MS`] has passed.
    fn refresh(&mut self, now_ms: u64, counters: &impl Counters) {
        let is_due = |last_ms: u64| now_ms.saturating_sub(last_ms) >= REFRESH_MS;
        if self.refreshed_ms.is_none_or(is_due) {
            self.refreshed_ms = Some(now_ms);
            let lines = |(place, class): (&ClassKey, &Class)| {
                let place = *place;
                let users: Vec<UserKey> = class.queues.keys().copied().collect();
                users.into_iter().map(move |user| (place, user))
            };
            let all: Vec<(ClassKey, UserKey)> = self.classes.iter().flat_map(lines).collect();
            for (place, user) in all {
                self.sort(place, user, &counters.figures(user));
            }
            return;
        }
        for _ in 0..REFRESH_QUEUES {
            self.last_looked = self.line_after(self.last_looked);
            let Some((place, user)) = self.last_looked else {
                return;
            };
            self.sort(place, user, &counters.figures(user));
        }
    }

    fn line_after(&self, last: Option<(ClassKey, UserKey)>) -> Option<(ClassKey, UserKey)> {
        let from = last.map_or(Bound::Unbounded, |(place, _)| Bound::Included(place));
        self.classes
            .range((from, Bound::Unbounded))
            .find_map(|(place, class)| {
                let after = match last {
                    Some((last, user)) if last == *place => Bound::Excluded(user),
                    _ => Bound::Unbounded,
                };
                let (user, _) = class.queues.range((after, Bound::Unbounded)).next()?;
                Some((*place, *user))
            })
    }

    /// Sorts a user queue again by the user's current figures and returns its key.
    fn sort(&mut self, place: ClassKey, user: UserKey, figures: &UserFigures) -> u64 {
        let order = self.user_order();
        let head = |class: &Class| Some(class.queues.get(&user)?.head(order).1);
        let Some((ticket, presence)) = self
            .classes
            .get(&place)
            .and_then(head)
            .zip(self.users.get(&user).copied())
        else {
            return 0;
        };
        let key = self.key(&self.requests[&ticket], figures);
        let is_solvent = self.rules.order == Order::Dlpm
            && presence.counter_milli(figures) < presence.served_to_milli;
        if let Some(class) = self.classes.get_mut(&place) {
            class.remove_from_order(user);
            if let Some(line) = class.queues.get_mut(&user) {
                (line.key, line.is_solvent) = (key, is_solvent);
            }
            class.insert_into_order(user, order);
        }
        key
    }

    fn key(&self, waiting: &QueuedRequest, figures: &UserFigures) -> u64 {
        let presence = self.users.get(&waiting.user);
        let counter = presence.map_or(figures.counter_milli, |it| it.counter_milli(figures));
        self.key_at(waiting, figures, counter)
    }

    /// Returns the key of a request, with the user's counter taken to be `counter`.
    fn key_at(&self, waiting: &QueuedRequest, figures: &UserFigures, counter: u64) -> u64 {
        match self.rules.order {
            Order::Vtc | Order::VtcPred | Order::Dlpm => counter,
            Order::VtcMaxFair => {
                let price = self.price(waiting);
                let under_way = figures
                    .milli_of(price)
                    .saturating_mul(u64::from(figures.in_flight));
                counter.saturating_add(under_way)
            }
            Order::Lcf => figures.served_milli,
            Order::Rpm => u64::from(figures.requests_last_minute),
            Order::Fcfs => 0,
        }
    }

    /// Returns the expected price of a request, in priced tokens.
    fn price(&self, waiting: &QueuedRequest) -> u64 {
        let pricing = &self.rules.pricing;
        pricing.input(u64::from(waiting.input_tokens), 0)
            + pricing.output(u64::from(waiting.predicted_output))
    }
}

impl WaitingUser {
    fn counter_milli(&self, figures: &UserFigures) -> u64 {
        if figures.is_lifted {
            figures.counter_milli
        } else {
            figures.counter_milli.max(self.floor_milli)
        }
    }
}

fn class_of(waiting: &QueuedRequest) -> ClassKey {
    (Reverse(waiting.priority), waiting.bin)
}

/// Returns when the wait of a held request ends; `None` if it is not held.
fn hold_end(waiting: &QueuedRequest) -> Option<u64> {
    let hold_ms = waiting.hold_ms?;
    Some(waiting.arrived_ms.saturating_add(hold_ms))
}

fn match_of(waiting: &QueuedRequest) -> MatchKey {
    (
        Reverse(waiting.matched_blocks),
        waiting.arrived_ms,
        waiting.ticket,
    )
}

/// Returns the amount of one `dlpm` refill, in priced tokens at weight 1.
fn quantum(gate: &Gate) -> u64 {
    gate.slack().max(1)
}

/// Whether replicas compare the keys of `order` with those of their peers.
fn is_gated(order: Order) -> bool {
    match order {
        Order::Vtc | Order::VtcMaxFair | Order::VtcPred | Order::Dlpm | Order::Lcf => true,
        Order::Rpm | Order::Fcfs => false,
    }
}
