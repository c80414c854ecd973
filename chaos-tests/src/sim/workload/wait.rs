//! Waits for admission, and checks that a wait ends when its client leaves (I64).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::admission::{AdmissionRejection, AdmissionRequest, AdmissionTry, Admitted};
use state::ids::Slot;
use state::prefix::user_key;
use state::quotas::PendingUse;
use tokio::time::timeout;

use super::ReplicaHandles;
use crate::oracle::observation::ReplicaRun;

/// Outcome of a client that gave up waiting.
pub(super) const GAVE_UP: &str = "impatient";

/// Outcome of a request for which the queue was full. In the next two outcomes, the expected or the
/// actual wait was too long.
pub(super) const QUEUE_FULL: &str = "queue-full";
pub(super) const TOO_LATE: &str = "too-late";
pub(super) const WAITED_TOO_LONG: &str = "waited-too-long";
/// Outcome of a request that exceeded its user's limits.
pub(super) const OVER_LIMIT: &str = "over-limit";

/// Number of requests for whose admission clients wait, by run.
#[derive(Debug, Clone, Default)]
pub(super) struct PendingWaits(Arc<Mutex<BTreeMap<ReplicaRun, usize>>>);

impl PendingWaits {
    /// Changes the number of a run by `by` and returns the new one.
    fn change(&self, run: ReplicaRun, by: isize) -> usize {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = runs.entry(run).or_default();
        *waiting = waiting.saturating_add_signed(by);
        *waiting
    }
}

/// Waits for admission for at most `patience`. Reports an error if a client that has left still has
/// a request in the queue, which would reach an engine or block others (I64).
pub(super) async fn admitted<C: AdmissionRequest>(
    handles: &ReplicaHandles,
    request: &Arc<C>,
    (excluded, which): (&[Slot], AdmissionTry),
    patience: Duration,
) -> Result<Admitted, &'static str> {
    let is_first = which == AdmissionTry::First;
    // No time passes between this check and that of admission.
    let is_used_up = is_first && is_budget_used_up(handles, &**request);
    handles.context.waiting.change(handles.run, 1);
    let admitting = handles.admission.admit(request, (excluded, which));
    let admitted = timeout(patience, admitting).await;
    let waiting = handles.context.waiting.change(handles.run, -1);
    let lines = handles.admission.queues();
    let queued: usize = lines.iter().map(|line| line.waiting).sum();
    if queued > waiting {
        let run = handles.run;
        let detail =
            format!("{run}: {queued} requests are queued, of which {waiting} are waited for");
        handles
            .context
            .ledger
            .report_error(format!("I64: {detail}"));
    }
    if is_used_up {
        judge_used_up(handles, admitted.as_ref().ok());
    }
    match admitted {
        Ok(Ok(admitted)) => Ok(admitted),
        Ok(Err(why)) => Err(not_admitted(why)),
        Err(_) => {
            handles
                .context
                .count("left while waiting", "queued no more");
            Err(GAVE_UP)
        }
    }
}

/// Returns whether the applied state has no budget left for the user, by admission's clock.
fn is_budget_used_up<C: AdmissionRequest>(handles: &ReplicaHandles, request: &C) -> bool {
    let asked = request.ask(&[]);
    let user = user_key(handles.view.registry().hash_seed, asked.user.as_str());
    let unix_ms = handles.router.clock().unix_ms();
    let quota = handles.view.quota(user);
    quota.check_budget(unix_ms, &PendingUse::default()).is_err()
}

/// Reports an error if a replica admits a user whose budget is used up (I106).
fn judge_used_up(
    handles: &ReplicaHandles,
    admitted: Option<&Result<Admitted, AdmissionRejection>>,
) {
    match admitted {
        Some(Err(AdmissionRejection::OverLimit(_))) => handles.context.count("budget", "used up"),
        how => {
            let let_in = if matches!(how, Some(Ok(_))) {
                "is let in"
            } else {
                "is not refused"
            };
            let detail = format!("{}: a user whose budget is used up {let_in}", handles.run);
            handles
                .context
                .ledger
                .report_error(format!("I106: {detail}"));
        }
    }
}

fn not_admitted(why: AdmissionRejection) -> &'static str {
    match why {
        AdmissionRejection::NoBackend(_) => "no-backend",
        AdmissionRejection::OverLimit(_) => OVER_LIMIT,
        AdmissionRejection::QueueFull { .. } => QUEUE_FULL,
        AdmissionRejection::TooLate { .. } => TOO_LATE,
        AdmissionRejection::WaitedTooLong { .. } => WAITED_TOO_LONG,
        AdmissionRejection::Leaving => "leaving",
    }
}
