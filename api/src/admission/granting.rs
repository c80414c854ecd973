//! Implements `grants = "log"`: the log decides which request goes next, across all replicas.
//!
//! A replica proposes its waiting requests and its free room to the log. A grant charges the
//! request, which then goes before all others that wait here as soon as there is room. A grant to a
//! request that is gone is passed on, and its price becomes the user's credit. [`state::grants`]
//! describes the protocol.
//!
//! The replica where a request ended reports the room at once. Every replica with waiting requests
//! reports room that stays unused for [`UNUSED_MAX`], such as that of an added backend. Grants
//! beyond the available room wait at their replica.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use state::admission::QueuedRequest;
use state::command::Item;
use state::grants::{GrantsView, Wait};
use state::ids::{ModelKey, Ticket, UserKey};
use tokio::time::Instant;

use super::model_queue::ModelQueue;
use super::serve::{DecisionResult, QueueScan};
use super::waiter::Waiter;
use super::{Admission, ModelQueues};
use crate::routing::{RoutingRejection, WantedPlaces};

/// Time since the last request for grants after which a replica requests them for all free room,
/// although none of its own requests ended.
const UNUSED_MAX: Duration = Duration::from_millis(50);
/// Time after which a request that the log does not know is proposed again.
const PROPOSE_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Minimum time for which returned tickets are remembered.
const REMEMBERED: Duration = Duration::from_secs(10);
/// Maximum number of grants requested at once for a model.
const GRANTS_MAX: u64 = 256;

/// State of the requests for grants that this replica makes to the log.
#[derive(Debug, Default)]
pub(super) struct GrantRequests {
    /// Tickets of proposed requests that no longer wait, because they were dispatched or are gone.
    back: BTreeMap<Ticket, ReturnedTicket>,
    /// Number of this replica's requests that had ended at the last scan.
    ended: u64,
    /// Time at which grants for each model were last requested.
    asked: BTreeMap<ModelKey, Instant>,
}

#[derive(Debug)]
struct ReturnedTicket {
    at: Instant,
    /// Whether the grant was used or passed on.
    is_settled: bool,
}

impl Admission {
    /// Proposes a waiting request to the log.
    fn propose_wait(
        &self,
        line: &mut ModelQueue,
        model: ModelKey,
        waiting: &QueuedRequest,
        look: &QueueScan,
    ) {
        let input = u64::from(waiting.input_tokens);
        let tokens = look.pricing.input(input, 0);
        let wait = Wait {
            ticket: waiting.ticket,
            model,
            user: waiting.user,
            priority: waiting.priority,
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        };
        if let Some(entry) = line.entries.get_mut(&waiting.ticket) {
            // A request that does not fit into the outbox is proposed later.
            self.outbox.note(Item::Wait(wait));
            entry.told = Some(look.now);
        }
    }

    /// Withdraws a request that no longer waits, if it was proposed. A grant that still arrives for
    /// it is passed on, unless its grant was used.
    pub(super) fn withdraw_wait(&self, entry: &Waiter, now: Instant) {
        if entry.told.is_none() {
            return;
        }
        let ticket = entry.ticket;
        self.outbox.note(Item::Leave { ticket });
        let back = ReturnedTicket {
            at: now,
            is_settled: entry.granted.is_some(),
        };
        self.lock_requests().back.insert(ticket, back);
    }

    fn lock_requests(&self) -> MutexGuard<'_, GrantRequests> {
        self.grant_requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Proposes a model's requests, dispatches granted ones, and requests grants for free room.
    pub(super) fn serve_granted(
        &self,
        line: &mut ModelQueue,
        model: ModelKey,
        wanted: &mut WantedPlaces,
        look: &QueueScan,
    ) {
        let (grants, now) = (self.view.grants(), look.now);
        self.propose_waits(line, model, &grants, look);
        let open = self.use_grants(line, model, &grants, (wanted, look));
        let waiting = line.queue.len();
        let Some(first) = line.entries.values().next().filter(|_| waiting > 0) else {
            return;
        };
        let mut requests = self.lock_requests();
        let ended = self.load.ended().saturating_sub(requests.ended);
        let since = requests.asked.get(&model);
        let is_unused = since.is_none_or(|at| now.saturating_duration_since(*at) >= UNUSED_MAX);
        let wanted = if is_unused {
            GRANTS_MAX
        } else {
            ended.min(GRANTS_MAX)
        };
        let places = self.decider.free_places(&first.ask_among(waiting), now);
        let count = wanted.min(places.saturating_sub(open)).min(waiting as u64);
        if let Ok(count @ 1..) = u32::try_from(count) {
            self.outbox.note(Item::Grant { model, count });
            self.outbox.flush_now();
            requests.asked.insert(model, now);
        }
    }

    /// Proposes the waiting requests that the log does not know.
    fn propose_waits(
        &self,
        line: &mut ModelQueue,
        model: ModelKey,
        grants: &GrantsView,
        look: &QueueScan,
    ) {
        let (now, replica) = (look.now, self.replica);
        let is_due = |waiting: &&QueuedRequest| {
            let told = line.entries.get(&waiting.ticket).and_then(|it| it.told);
            told.is_none_or(|at| {
                let is_late = now.saturating_duration_since(at) >= PROPOSE_AGAIN_AFTER;
                is_late && !grants.knows(replica, waiting.ticket)
            })
        };
        let due: Vec<QueuedRequest> = line.queue.iter().filter(is_due).copied().collect();
        for waiting in &due {
            self.propose_wait(line, model, waiting, look);
        }
        if !due.is_empty() {
            self.outbox.flush_now();
        }
    }

    /// Dispatches granted requests as far as there is room. Returns the number that are left.
    fn use_grants(
        &self,
        line: &mut ModelQueue,
        model: ModelKey,
        grants: &GrantsView,
        (wanted, look): (&mut WantedPlaces, &QueueScan),
    ) -> u64 {
        let mut open = 0;
        let granted = grants.granted(self.replica);
        for wait in granted.filter(|wait| wait.model == model) {
            // Until this run's first command is applied, grants of the previous run may exist,
            // whose tickets also began at 1.
            let is_its = |it: &QueuedRequest| (it.user, it.priority) == (wait.user, wait.priority);
            if !line.queue.get(wait.ticket).is_some_and(is_its) {
                continue;
            }
            let Some(entry) = line.entries.get(&wait.ticket) else {
                continue;
            };
            let waiting = line.entries.len();
            let asked = match self.ask((entry, waiting), look) {
                Err(RoutingRejection::AtLimit) => {
                    open += 1;
                    self.want((entry, waiting), 1, wanted, look);
                    continue;
                }
                Err(why) => DecisionResult::Never(why),
                Ok(placed) => DecisionResult::Goes(placed),
            };
            line.queue.take(wait.ticket, look.now_ms);
            if let Some(mut entry) = line.entries.remove(&wait.ticket) {
                if matches!(asked, DecisionResult::Goes(_)) && !entry.answer.is_closed() {
                    entry.granted = Some(u64::from(wait.tokens));
                    self.metrics.grants.inc();
                }
                self.settle(entry, asked, look.now);
            }
        }
        open
    }

    /// Passes on the grants to requests that are gone, and records how many requests have ended.
    pub(super) fn settle_grants(&self, queues: &ModelQueues, now: Instant) {
        let grants = self.view.grants();
        let replica = self.replica;
        let mut requests = self.lock_requests();
        for wait in grants.granted(replica) {
            let line = queues.by_model.get(&wait.model);
            if line.is_some_and(|line| line.entries.contains_key(&wait.ticket)) {
                continue;
            }
            let is_known = requests.back.contains_key(&wait.ticket);
            let back = requests.back.entry(wait.ticket).or_insert(ReturnedTicket {
                at: now,
                is_settled: false,
            });
            if !std::mem::replace(&mut back.is_settled, true) {
                if !is_known {
                    let ticket = wait.ticket;
                    self.outbox.note(Item::Leave { ticket });
                }
                self.hand_on(wait.model, wait.user, u64::from(wait.tokens));
            }
        }
        requests.back.retain(|ticket, back| {
            let age = now.saturating_duration_since(back.at);
            age < REMEMBERED || grants.knows(replica, *ticket)
        });
        requests.ended = self.load.ended();
    }

    fn hand_on(&self, model: ModelKey, user: UserKey, tokens: u64) {
        self.dispatcher.credit(user, tokens);
        self.outbox.note(Item::Grant { model, count: 1 });
        self.outbox.flush_now();
    }
}
