//! The queue: what waits for one model at one replica, and who goes next.
//!
//! Requests are ordered by priority, then by their output-length bin's turn, then by user as
//! [`Order`] says, then by arrival. A user's requests of one class (priority and bin) stand in a
//! line; each line has a *key*, and the least key goes first.
//!
//! Keys come from counters that move while requests wait, by charges of every replica. The queue does
//! not follow each move. It keeps the keys as last seen, sorted, and looks again before it relies on
//! one: counters rise only, so a line whose key as last seen is the least, and is still that, is the
//! least. What can fall (requests of the last minute, requests in flight, a weight) is caught up with
//! by looking at a few lines on every call, and at all of them once in a while.
//!
//! Nothing here reads a clock or waits; the caller says what time it is and wakes whom it admits.

mod class;
mod deadlines;
mod next;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use self::class::{Class, ClassKey, MatchKey};
use super::overload::{CODEL_TARGET_MS, Overload};
use super::{
    AdmissionSettings, Backlog, BinSelection, Counters, Gate, Order, Pricing, UserFigures,
};
use crate::ids::{Ticket, UserKey};

pub use self::deadlines::{Expired, ExpiryReason, Forecast, QueueRejection};

/// Lines looked at again on every call.
const REFRESH_LINES: usize = 4;
/// All lines are looked at again after this time.
const REFRESH_MS: u64 = 1000;

/// A request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuedRequest {
    /// Names it.
    pub ticket: Ticket,
    /// Who pays.
    pub user: UserKey,
    /// Higher goes first.
    pub priority: i16,
    /// When it came.
    pub arrived_ms: u64,
    /// Prompt tokens not believed cached anywhere.
    pub input_tokens: u32,
    /// Output tokens it will make, as predicted.
    pub predicted_output: u32,
    /// Bin of that prediction; 0 without bins.
    pub bin: u16,
    /// Blocks of its prompt that some backend is believed to hold.
    pub matched_blocks: u32,
    /// When it is of no use to its client any more that it goes; `None`: that is not known.
    pub due_ms: Option<u64>,
    /// Whether it goes to some backends only: how soon, the queue as a whole does not tell.
    pub is_selective: bool,
}

/// What the queue goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSettings {
    /// Who goes first among requests of equal priority.
    pub order: Order,
    /// Requests that wait at most.
    pub queue_max: usize,
    /// Longest wait.
    pub wait_ms_max: u64,
    /// Longest wait in overload.
    pub target_ms: u64,
    /// How the next bin is selected.
    pub bin_selection: BinSelection,
    /// A request that has waited this long goes before its bin's turn.
    pub bin_age_ms_max: u64,
    /// What tokens cost: for orders that look at a request's own price.
    pub pricing: Pricing,
}

impl QueueSettings {
    /// As the replicated settings say.
    #[must_use]
    pub fn of(settings: &AdmissionSettings, pricing: Pricing) -> Self {
        Self {
            order: settings.order,
            queue_max: settings.queue_max as usize,
            wait_ms_max: u64::from(settings.wait_ms_max),
            target_ms: CODEL_TARGET_MS,
            bin_selection: settings.bin_selection,
            bin_age_ms_max: u64::from(settings.bin_age_ms_max),
            pricing,
        }
    }
}

/// Whether a request can go, as whoever knows the backends says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DispatchVerdict {
    /// There is room for it.
    Go,
    /// There is no room for this one; there may be for another.
    Skip,
    /// There is no room for any.
    Stop,
}

/// Who goes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// This one; it has left the queue.
    Go(QueuedRequest),
    /// There is room, and users who wait at other replicas have precedence. To be asked again when a
    /// peer tells something, at the latest after so many milliseconds.
    Held {
        /// When to ask again.
        retry_ms: u64,
    },
    /// There is room for nobody who waits.
    NoRoom,
    /// Nobody waits.
    Nobody,
}

/// Requests of one model that wait at one replica. See the module's documentation.
#[derive(Debug, Clone)]
pub struct Queue {
    rules: QueueSettings,
    requests: BTreeMap<Ticket, QueuedRequest>,
    classes: BTreeMap<ClassKey, Class>,
    users: BTreeMap<UserKey, WaitingUser>,
    /// All requests by arrival.
    ages: BTreeSet<(u64, Ticket)>,
    /// Requests with a deadline of their own, by it.
    dues: BTreeSet<(u64, Ticket)>,
    overload: Overload,
    /// Bin that went last.
    last_bin: u16,
    /// Line looked at last, of those looked at a few per call.
    last_looked: Option<(ClassKey, UserKey)>,
    /// When all lines were looked at; `None`: they are to be.
    refreshed_ms: Option<u64>,
}

/// A user who waits here.
#[derive(Debug, Clone, Copy)]
struct WaitingUser {
    waiting: usize,
    weight_milli: u32,
    /// Least counter of those who waited when this user came, until the state has lifted the user.
    floor_milli: u64,
    /// `dlpm`: the user may be served up to this counter before the next refill.
    served_to_milli: u64,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(rules: QueueSettings) -> Self {
        Self {
            rules,
            requests: BTreeMap::new(),
            classes: BTreeMap::new(),
            users: BTreeMap::new(),
            ages: BTreeSet::new(),
            dues: BTreeSet::new(),
            overload: Overload::default(),
            last_bin: 0,
            last_looked: None,
            refreshed_ms: None,
        }
    }

    /// Goes by other rules from the next call on.
    pub fn set_rules(&mut self, rules: QueueSettings) {
        if rules != self.rules {
            self.rules = rules;
            self.refreshed_ms = None;
        }
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests of one user that wait.
    #[must_use]
    pub fn len_of(&self, user: UserKey) -> usize {
        self.users.get(&user).map_or(0, |presence| presence.waiting)
    }

    /// Users who wait.
    #[must_use]
    pub fn users_len(&self) -> usize {
        self.users.len()
    }

    /// Requests that wait, by bin.
    #[must_use]
    pub fn bins(&self) -> BTreeMap<u16, usize> {
        let mut bins = BTreeMap::new();
        for ((_, bin), class) in &self.classes {
            *bins.entry(*bin).or_default() += class.waiting;
        }
        bins
    }

    /// A request that waits.
    #[must_use]
    pub fn get(&self, ticket: Ticket) -> Option<&QueuedRequest> {
        self.requests.get(&ticket)
    }

    /// All requests that wait, by ticket.
    pub fn iter(&self) -> impl Iterator<Item = &QueuedRequest> {
        self.requests.values()
    }

    /// Takes a request in.
    ///
    /// # Errors
    /// When it may not wait.
    ///
    /// # Panics
    /// When its ticket waits already.
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
        self.ages.insert((waiting.arrived_ms, ticket));
        self.dues
            .extend(waiting.due_ms.map(|due_ms| (due_ms, ticket)));
        self.users.insert(waiting.user, presence);
        let class = self.classes.entry(class_of(&waiting)).or_default();
        class.waiting += 1;
        class.unhook(waiting.user);
        let line = class.queues.entry(waiting.user).or_default();
        line.arrivals.insert((waiting.arrived_ms, ticket));
        line.matches.insert(match_of(&waiting));
        self.sort(class_of(&waiting), waiting.user, &figures);
        Ok(())
    }

    /// How the request's user would wait with it. A user who comes back is not to profit from the
    /// time away: until the state has lifted the counter, it is taken to be at least that of those who
    /// wait.
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
        let own = self
            .classes
            .range((Reverse(waiting.priority), 0)..=(Reverse(waiting.priority), u16::MAX))
            .filter_map(|(_, class)| class.heads.first())
            .map(|(key, ..)| *key);
        let least = own.chain(gate.least(waiting.priority, now_ms)).min();
        let floor_milli = match self.rules.order {
            Order::Vtc | Order::VtcMaxFair | Order::VtcPred | Order::Dlpm => {
                least.unwrap_or_default()
            }
            // Their keys are no counters, or not to be lifted.
            Order::Lcf | Order::Rpm | Order::Fcfs => 0,
        };
        let mut presence = WaitingUser {
            waiting: 1,
            weight_milli: figures.weight_milli,
            floor_milli,
            served_to_milli: 0,
        };
        // A quantum ahead of the least, not of the user's own counter: whoever comes anew for each
        // request would never run out.
        presence.served_to_milli = least
            .unwrap_or_else(|| presence.counter_milli(figures))
            .saturating_add(figures.milli_of(quantum(gate)));
        presence
    }

    /// Takes a request out.
    pub fn remove(&mut self, ticket: Ticket) -> Option<QueuedRequest> {
        let waiting = self.requests.remove(&ticket)?;
        self.ages.remove(&(waiting.arrived_ms, ticket));
        if let Some(due_ms) = waiting.due_ms {
            self.dues.remove(&(due_ms, ticket));
        }
        let is_newest_first = self.is_newest_first();
        let place = class_of(&waiting);
        let class = self.classes.get_mut(&place).expect("its class is there");
        class.waiting -= 1;
        class.unhook(waiting.user);
        let line = class
            .queues
            .get_mut(&waiting.user)
            .expect("its line is there");
        line.arrivals.remove(&(waiting.arrived_ms, ticket));
        line.matches.remove(&match_of(&waiting));
        if line.arrivals.is_empty() {
            class.queues.remove(&waiting.user);
        } else {
            class.hook(waiting.user, is_newest_first);
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

    /// What the peers are to know; `None`: nothing waits, or the order knows no precedence over
    /// replicas.
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

    /// Looks at lines again: all of them once in a while, a few at any time.
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
        for _ in 0..REFRESH_LINES {
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

    /// Puts a line where it belongs by the user's present figures; answers its key.
    fn sort(&mut self, place: ClassKey, user: UserKey, figures: &UserFigures) -> u64 {
        let is_newest_first = self.is_newest_first();
        let head = |class: &Class| Some(class.queues.get(&user)?.head(is_newest_first).1);
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
            class.unhook(user);
            if let Some(line) = class.queues.get_mut(&user) {
                (line.key, line.is_solvent) = (key, is_solvent);
            }
            class.hook(user, is_newest_first);
        }
        key
    }

    fn key(&self, waiting: &QueuedRequest, figures: &UserFigures) -> u64 {
        let presence = self.users.get(&waiting.user);
        let counter = presence.map_or(figures.counter_milli, |it| it.counter_milli(figures));
        self.key_at(waiting, figures, counter)
    }

    /// The key of a request whose user's counter is taken to be `counter`.
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

    /// What a request will come to, in priced tokens.
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

fn match_of(waiting: &QueuedRequest) -> MatchKey {
    (
        Reverse(waiting.matched_blocks),
        waiting.arrived_ms,
        waiting.ticket,
    )
}

/// `dlpm`: what a refill gives, in priced tokens.
fn quantum(gate: &Gate) -> u64 {
    gate.slack().max(1)
}

/// Whether keys of the order are compared over replicas.
fn is_gated(order: Order) -> bool {
    match order {
        Order::Vtc | Order::VtcMaxFair | Order::VtcPred | Order::Dlpm | Order::Lcf => true,
        Order::Rpm | Order::Fcfs => false,
    }
}
