//! Deadlines of waiting requests: rejection by prediction, and expiry.
//!
//! A request is rejected if it would not be dispatched in time: what is ahead of it in the current
//! order, divided by the rate at which the queue is served, exceeds its allowed wait. That wait is
//! the least of [`wait_ms_max`](super::QueueSettings::wait_ms_max), the client's own deadline, the
//! clients' observed patience, and, in overload, the target.
//!
//! What is ahead depends on the order: a user with a low counter is not rejected just because many
//! requests of users with higher counters wait. Nothing is rejected while little is ahead or the
//! rate is unknown, and the rate is taken as the highest plausible one. In overload, a user's
//! newest request goes first, but the prediction still treats it as the last: one request of the
//! queue has to be rejected, and this one has not waited yet.

use std::cmp::Reverse;

use super::super::overload::{Overload, SHORT_QUEUE, WaitBounds};
use super::super::{Counters, Gate, Order, UserFigures, milli_tokens};
use super::class::{Class, UserOrder};
use super::{Queue, QueuedRequest, WaitingUser, class_of, is_gated};
use crate::ids::{Ticket, UserKey};

/// Reason why a request may not wait in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueRejection {
    /// The queue is full.
    #[error("the queue is full")]
    Full,
    /// The request would not be dispatched in time.
    #[error("the predicted wait of {wait_ms} ms exceeds the acceptable {wait_ms_max} ms")]
    TooLate {
        /// Predicted wait, in milliseconds.
        wait_ms: u64,
        /// Longest acceptable wait, in milliseconds.
        wait_ms_max: u64,
    },
}

/// A request that has reached the end of its allowed wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expired {
    /// The request that was removed from the queue.
    pub waiting: QueuedRequest,
    /// Reason why the wait ended.
    pub why: ExpiryReason,
}

/// Reason why a request stopped waiting without being dispatched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpiryReason {
    /// The request waited for the longest time allowed for any request.
    TooLong,
    /// The request passed its client's deadline, or the clients' observed patience.
    Deadline,
    /// The request waited for the target while the queue was overloaded.
    Overload,
}

/// Measured state of a queue, and the waits to expect from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// Predicted time until all waiting requests have been dispatched, in milliseconds.
    pub drain_ms: u64,
    /// Longest wait of a request without a client deadline, in milliseconds.
    pub wait_ms_max: u64,
    /// Number of departures per 1000 seconds; `None` if nothing has been measured.
    pub rate_milli: Option<u64>,
    /// Whether more requests arrive than can be served.
    pub is_overloaded: bool,
}

/// Where a request would stand in a queue, and how far its user is from a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prospect {
    /// Number of requests that would go before it.
    pub ahead: u64,
    /// Predicted wait, in milliseconds; 0 while the rate is unknown.
    pub wait_ms: u64,
    /// Predicted time until all requests that wait have gone, in milliseconds.
    pub drain_ms: u64,
    /// Counter by which the queue would order it, in thousandths of a priced token. A user who
    /// returns has at least the least counter of those who wait.
    pub counter_milli: u64,
    /// `V`: least counter of the users who wait with the same priority, here or at a peer; `None`
    /// if nobody does, or if the order does not compare counters.
    pub least_milli: Option<u64>,
    /// `G` at the user's weight: how far above `V` a user may still be served, in thousandths of a
    /// priced token.
    pub slack_milli: u64,
    /// Whether users who wait at peers go first.
    pub is_held: bool,
    /// Why it may not wait; `None` if it may.
    pub rejection: Option<QueueRejection>,
}

impl Queue {
    /// Returns where a request that arrives now would stand. Changes nothing, so the order is the
    /// one last seen.
    #[must_use]
    pub fn prospect(
        &self,
        waiting: &QueuedRequest,
        now_ms: u64,
        counters: &impl Counters,
        gate: &Gate,
    ) -> Prospect {
        let figures = counters.figures(waiting.user);
        let presence = self.arrive(waiting, &figures, now_ms, gate);
        let counter_milli = presence.counter_milli(&figures);
        let ahead = self.ahead(waiting, &presence, &figures);
        let key = self.key_at(waiting, &figures, counter_milli);
        let (priority, weight_milli) = (waiting.priority, figures.weight_milli);
        let is_gated = is_gated(self.rules.order);
        Prospect {
            ahead,
            wait_ms: self.overload.wait_ms(ahead, now_ms),
            drain_ms: self.forecast(now_ms).drain_ms,
            counter_milli,
            least_milli: self.least_seen(priority, now_ms, gate).filter(|_| is_gated),
            slack_milli: figures.milli_of(gate.slack()),
            is_held: is_gated && gate.holds(priority, key, weight_milli, now_ms),
            rejection: self.verdict(waiting, ahead, now_ms).err(),
        }
    }

    /// Counts the request as arrived and checks whether it may wait.
    ///
    /// # Errors
    /// If the queue is full, or if the request would not be dispatched in time.
    pub(super) fn check(
        &mut self,
        waiting: &QueuedRequest,
        presence: &WaitingUser,
        figures: &UserFigures,
        now_ms: u64,
    ) -> Result<(), QueueRejection> {
        if self.requests.is_empty() {
            self.overload.begin(now_ms);
        }
        self.overload.arrived();
        self.look(now_ms);
        let ahead = self.ahead(waiting, presence, figures);
        self.verdict(waiting, ahead, now_ms)
    }

    /// Checks whether a request with `ahead` requests before it may wait.
    fn verdict(
        &self,
        waiting: &QueuedRequest,
        ahead: u64,
        now_ms: u64,
    ) -> Result<(), QueueRejection> {
        if self.requests.len() >= self.rules.queue_max {
            return Err(QueueRejection::Full);
        }
        if waiting.is_selective || waiting.hold_ms.is_some() || ahead <= SHORT_QUEUE {
            return Ok(());
        }
        let left_ms = |due_ms: u64| due_ms.saturating_sub(now_ms);
        let due_ms = waiting.due_ms.map_or(u64::MAX, left_ms);
        let wait_ms_max = self.overload.wait_ms_max(&self.bounds()).min(due_ms);
        let wait_ms = self.overload.wait_ms(ahead, now_ms);
        if wait_ms > wait_ms_max {
            return Err(QueueRejection::TooLate {
                wait_ms,
                wait_ms_max,
            });
        }
        Ok(())
    }

    /// Returns how many requests would go before this one, by the keys as last seen. The request is
    /// taken to be its tree's last, and the last of its user where trees take no turns.
    fn ahead(&self, waiting: &QueuedRequest, presence: &WaitingUser, figures: &UserFigures) -> u64 {
        let own = Reverse(waiting.priority);
        let higher = self.classes.range(..(own, 0));
        let higher: u64 = higher.map(|(_, class)| class.waiting as u64).sum();
        let equal = self.classes.range((own, 0)..=(own, u16::MAX));
        if self.rules.order == Order::Fcfs {
            return higher + equal.map(|(_, class)| class.waiting as u64).sum::<u64>();
        }
        let price = self.price(waiting);
        let step = |weight_milli| match self.rules.order {
            Order::Rpm => 1,
            _ => milli_tokens(price, weight_milli).max(1),
        };
        let order = self.user_order();
        let of_user = |(_, class): (_, &Class)| {
            let queue = class.queues.get(&waiting.user)?;
            Some(queue.before(waiting.tree, order))
        };
        let before: u64 = equal.clone().filter_map(of_user).sum();
        let counter = presence.counter_milli(figures);
        let raised = before.saturating_mul(step(presence.weight_milli));
        // Key of the user when the turn of this request comes.
        let reached = self
            .key_at(waiting, figures, counter)
            .saturating_add(raised);
        let upto = (reached, u64::MAX, Ticket(u64::MAX), UserKey(u64::MAX));
        let heads = equal.flat_map(|(_, class)| {
            let heads = class.heads.range(..=upto);
            heads.filter_map(|(key, _, _, user)| Some((*key, *user, class.queues.get(user)?)))
        });
        let others = heads.filter(|(_, user, _)| *user != waiting.user);
        let going = others.map(|(key, user, queue)| {
            let weight_milli = self.users.get(&user).map_or(0, |it| it.weight_milli);
            let turns = 1 + (reached - key) / step(weight_milli);
            turns.min(queue.len())
        });
        higher + before + going.sum::<u64>()
    }

    fn bounds(&self) -> WaitBounds {
        WaitBounds {
            wait_ms_max: self.rules.wait_ms_max,
            target_ms: self.rules.target_ms,
        }
    }

    /// Re-evaluates overload, and marks all keys for a refresh if it changed. Requests that wait for
    /// the first engine are no overload: more engines follow.
    pub(super) fn look(&mut self, now_ms: u64) {
        if self.holds_any() {
            return;
        }
        let (waiting, bounds) = (self.requests.len(), self.bounds());
        if self.overload.evaluate(now_ms, waiting, &bounds) {
            // Overload reverses the order within each user queue.
            self.refreshed_ms = None;
        }
    }

    /// Returns the order of each user's own requests.
    pub(super) fn user_order(&self) -> UserOrder {
        if self.overload.is_on() {
            UserOrder::NewestFirst
        } else if matches!(self.rules.order, Order::Fcfs | Order::Dlpm) {
            UserOrder::OldestFirst
        } else {
            UserOrder::Turns
        }
    }

    /// Moves the turn of a request's tree on by the request's price.
    fn take_turn(&mut self, ticket: Ticket) {
        let Some(waiting) = self.requests.get(&ticket) else {
            return;
        };
        let (price, user, tree) = (self.price(waiting), waiting.user, waiting.tree);
        let class = self.classes.get_mut(&class_of(waiting));
        let Some(class) = class else { return };
        class.remove_from_order(user);
        if let Some(line) = class.queues.get_mut(&user) {
            line.turns.served(tree, price);
        }
    }

    /// Removes and returns a request that goes to a backend, and records its departure. Returns
    /// `None` if the request is not waiting.
    pub fn take(&mut self, ticket: Ticket, now_ms: u64) -> Option<QueuedRequest> {
        self.take_turn(ticket);
        let waiting = self.remove(ticket)?;
        self.overload.departed(now_ms);
        self.stayed(&waiting, now_ms);
        self.note_empty(now_ms);
        Some(waiting)
    }

    /// Removes and returns a request whose client has left, and records the client's patience.
    /// Returns `None` if the request is not waiting.
    pub fn left(&mut self, ticket: Ticket, now_ms: u64) -> Option<QueuedRequest> {
        let waiting = self.remove(ticket)?;
        let waited_ms = now_ms.saturating_sub(waiting.arrived_ms);
        self.overload.client_timeouts.left(waited_ms);
        self.note_empty(now_ms);
        Some(waiting)
    }

    fn note_empty(&mut self, now_ms: u64) {
        if self.requests.is_empty() {
            self.overload.emptied(now_ms);
        }
    }

    fn stayed(&mut self, waiting: &QueuedRequest, now_ms: u64) {
        let waited_ms = now_ms.saturating_sub(waiting.arrived_ms);
        self.overload.client_timeouts.stayed(waited_ms);
    }

    /// Removes and returns the requests that have waited as long as they may, oldest first, then held
    /// ones, then those past their client's deadline.
    pub fn expire(&mut self, now_ms: u64) -> Vec<Expired> {
        self.look(now_ms);
        let bounds = self.bounds();
        let wait_ms_max = self.overload.wait_ms_max(&bounds);
        let mut expired = Vec::new();
        while let Some(&(arrived_ms, ticket)) = self.ages.first() {
            let waited_ms = now_ms.saturating_sub(arrived_ms);
            if waited_ms < wait_ms_max {
                break;
            }
            let why = if waited_ms >= bounds.wait_ms_max {
                ExpiryReason::TooLong
            } else if self.overload.is_on() && waited_ms >= bounds.target_ms {
                ExpiryReason::Overload
            } else {
                ExpiryReason::Deadline
            };
            expired.extend(self.remove(ticket).map(|waiting| Expired { waiting, why }));
        }
        while let Some(&(end_ms, ticket)) = self.holds.first()
            && end_ms <= now_ms
        {
            let why = ExpiryReason::TooLong;
            expired.extend(self.remove(ticket).map(|waiting| Expired { waiting, why }));
        }
        while let Some(&(due_ms, ticket)) = self.dues.first()
            && due_ms <= now_ms
        {
            let why = ExpiryReason::Deadline;
            expired.extend(self.remove(ticket).map(|waiting| Expired { waiting, why }));
        }
        for gone in &expired {
            self.stayed(&gone.waiting, now_ms);
        }
        if !expired.is_empty() {
            self.note_empty(now_ms);
        }
        expired
    }

    /// Returns the measured state of the queue.
    #[must_use]
    pub fn forecast(&self, now_ms: u64) -> Forecast {
        Forecast {
            drain_ms: self.overload.wait_ms(self.requests.len() as u64, now_ms),
            wait_ms_max: self.overload.wait_ms_max(&self.bounds()),
            rate_milli: self.overload.rate_milli(now_ms),
            is_overloaded: self.overload.is_on(),
        }
    }

    /// Sets the backends' mean response time, in milliseconds. A dispatch less than this time
    /// before a client leaves is too late.
    pub fn set_service_ms(&mut self, service_ms: u64) {
        self.overload.set_service_ms(service_ms);
    }

    /// Returns the time set by [`Queue::set_service_ms`], in milliseconds.
    #[must_use]
    pub fn service_ms(&self) -> u64 {
        self.overload.service_ms()
    }

    /// Returns the measurements of the load, for the next queue of the same model.
    #[must_use]
    pub fn into_overload(self) -> Overload {
        self.overload
    }

    /// Replaces the measurements of the load with those of an earlier queue.
    #[must_use]
    pub fn with_overload(mut self, overload: Overload) -> Self {
        self.overload = overload;
        self
    }
}
