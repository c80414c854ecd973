//! Tells what admission would do with a request, without doing it.

use std::sync::atomic::Ordering;

use schemars::JsonSchema;
use serde::Serialize;
use state::admission::{Gate, Prospect, Queue, QueueRejection};
use state::ids::Ticket;
use state::quotas::LimitKind;
use tokio::time::Instant;

use super::{Admission, AdmissionRejection, AdmissionRequest, AdmissionTry, due_ms};
use crate::routing::{Explanation, FilterVerdict, RoutingRejection};

/// What admission would do with a request that arrives now. Queues and gates are those of the
/// replica that answers; limits, budgets and counters are the cluster's, with what this replica has
/// charged and not applied yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AdmissionPreview {
    /// What is left of the user's limits and budgets; empty: there are none.
    pub limits: Vec<LimitPreview>,
    /// Whether the request would wait for its turn or for a backend with room.
    pub would_wait: bool,
    /// Place in this replica's queue, from 1; `null`: it would not wait.
    pub place: Option<u64>,
    /// Predicted wait, in milliseconds; 0 while too little was measured. `null`: it would not wait.
    pub predicted_wait_ms: Option<u64>,
    /// Number of requests for the model that wait at this replica.
    pub waiting: u64,
    /// Counter by which the queue orders the user's request. A user who returns is raised to the
    /// least counter of those who wait.
    pub counter_milli_tokens: u64,
    /// `V`: least counter of the users who wait, here or at a peer, with the same priority. `null`:
    /// nobody does, or the order does not compare counters.
    pub least_counter_milli_tokens: Option<u64>,
    /// `G`: how far above `V` this user may still be served. `null` without `V`.
    pub slack_milli_tokens: Option<u64>,
    /// Whether users who wait at peers go first.
    pub waits_for_peers: bool,
}

/// What is left of one limit or budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LimitPreview {
    /// Kind of limit or budget.
    pub limit: LimitKind,
    /// The limit itself, in requests or tokens.
    pub of: u64,
    /// Number of requests or tokens left.
    pub left: u64,
    /// Time until all of it is available again if nothing is used, in milliseconds. `null` for
    /// requests at once, which come back as they end.
    pub resets_in_ms: Option<u64>,
}

impl Admission {
    /// Returns what [`Admission::admit`] would do with a request that routing decided on as
    /// `explained`, and why it would refuse it. Changes nothing and counts nothing.
    #[must_use]
    pub fn preview(
        &self,
        candidate: &dyn AdmissionRequest,
        explained: &Explanation,
        now: Instant,
    ) -> (AdmissionPreview, Option<AdmissionRejection>) {
        let ask = candidate.ask(&[]);
        let over = self.check_quota(&ask).err();
        let user = ask.user.key(self.view.registry().hash_seed);
        let mut limits = self.limits_preview(user);
        limits.extend(self.tree_preview(user, ask.session));
        let (prospect, waiting) = self.prospect(candidate, now);
        let routed = explained.no_choice;
        let routed = routed.filter(|why| !self.is_held(&ask, AdmissionTry::First, *why));
        let is_full = explained.no_choice.is_some() && routed.is_none()
            || routed == Some(RoutingRejection::AtLimit)
            || self.is_between_batches(explained, now);
        let rejection = match (over, routed) {
            (Some(over), _) => Some(AdmissionRejection::OverLimit(over)),
            (None, Some(why)) if why != RoutingRejection::AtLimit => {
                Some(AdmissionRejection::NoBackend(why))
            }
            (None, _) => None,
        };
        let is_waiting = is_full || prospect.ahead > 0 || prospect.is_held;
        let rejection = rejection.or_else(|| self.not_queued(&prospect).filter(|_| is_waiting));
        let would_wait = is_waiting && rejection.is_none();
        let preview = AdmissionPreview {
            limits,
            would_wait,
            place: would_wait.then_some(prospect.ahead + 1),
            predicted_wait_ms: would_wait.then_some(prospect.wait_ms),
            waiting,
            counter_milli_tokens: prospect.counter_milli,
            least_counter_milli_tokens: prospect.least_milli,
            slack_milli_tokens: prospect.least_milli.map(|_| prospect.slack_milli),
            waits_for_peers: prospect.is_held,
        };
        (preview, rejection)
    }

    /// Returns where the request would stand in the queue of its model, and how many wait there.
    fn prospect(&self, candidate: &dyn AdmissionRequest, now: Instant) -> (Prospect, u64) {
        let (rules, pricing) = self.rules();
        let (now_ms, model) = (self.ms_of(now), self.model_key(candidate.ask(&[]).model));
        let mut waiting = self.waiting(Ticket(u64::MAX), model, candidate, now_ms);
        let counters = self.counters(pricing);
        let queues = self.lock();
        let no_gate = Gate::default();
        let gate = queues.gates.get(&model).unwrap_or(&no_gate);
        let fresh;
        let (queue, again, all) = match queues.by_model.get(&model) {
            Some(line) => (&line.queue, line.again.len(), line.entries.len()),
            None => {
                let learnt = queues.learnt.get(&model).cloned().unwrap_or_default();
                fresh = Queue::new(rules).with_overload(learnt);
                (&fresh, 0, 0)
            }
        };
        waiting.due_ms = due_ms(candidate, queue.service_ms(), now_ms);
        let hold_ms = self.hold_ms(candidate.ask(&[]).model);
        let lacks = || self.lack(candidate.ask(&[]).model).is_some();
        waiting.hold_ms = hold_ms.filter(|_| queue.holds_any() || lacks());
        let mut prospect = queue.prospect(&waiting, now_ms, &counters, gate);
        // Those who have had their turn go first.
        prospect.ahead += again as u64;
        (prospect, all as u64)
    }

    /// Whether backends receive requests only in batches and all that may take the request run one.
    fn is_between_batches(&self, explained: &Explanation, now: Instant) -> bool {
        if !self.is_batching() {
            return false;
        }
        let busy = self.decider.busy_slots(now);
        let candidates = explained.backends.iter();
        let mut candidates = candidates.filter(|it| it.verdict == FilterVerdict::Candidate);
        candidates.all(|it| busy.contains(&it.backend.slot))
    }

    /// Returns why the request could not wait; `None` if it could.
    fn not_queued(&self, prospect: &Prospect) -> Option<AdmissionRejection> {
        if self.is_leaving.load(Ordering::Acquire) {
            return Some(AdmissionRejection::Leaving);
        }
        Some(match prospect.rejection? {
            QueueRejection::Full => AdmissionRejection::QueueFull {
                retry_after_ms: prospect.drain_ms,
            },
            QueueRejection::TooLate {
                wait_ms,
                wait_ms_max,
            } => AdmissionRejection::TooLate {
                wait_ms,
                wait_ms_max,
            },
        })
    }
}
