//! Waiting for a turn, and that it ends with who waits. I64.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::admission::{AdmissionRequest, Admitted};
use state::ids::Slot;
use tokio::time::timeout;

use super::ReplicaHandles;
use crate::oracle::observation::ReplicaRun;

/// How ended the wait of a client that gave up.
pub(super) const GAVE_UP: &str = "impatient";

/// How a request ended for which there was no place in the queue, one that would have waited for
/// too long, and one that did.
pub(super) const QUEUE_FULL: &str = "queue-full";
pub(super) const TOO_LATE: &str = "too-late";
pub(super) const WAITED_TOO_LONG: &str = "waited-too-long";
/// How a request ended that its user's limits did not allow.
pub(super) const OVER_LIMIT: &str = "over-limit";

/// Requests for which clients wait, by the run that they asked.
#[derive(Debug, Clone, Default)]
pub(super) struct PendingWaits(Arc<Mutex<BTreeMap<ReplicaRun, usize>>>);

impl PendingWaits {
    /// One more, or one less; answers how many there are then.
    fn change(&self, run: ReplicaRun, by: isize) -> usize {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = runs.entry(run).or_default();
        *waiting = waiting.saturating_add_signed(by);
        *waiting
    }
}

/// Waits for a turn for so long. Who has left must not keep a place in the queue: it would be sent
/// to an engine, or keep others from being.
pub(super) async fn admitted<C: AdmissionRequest>(
    desk: &ReplicaHandles,
    request: &Arc<C>,
    excluded: &[Slot],
    patience: Duration,
) -> Result<Admitted, &'static str> {
    desk.scene.waiting.change(desk.run, 1);
    let admitted = timeout(patience, desk.admission.admit(request, excluded)).await;
    let waiting = desk.scene.waiting.change(desk.run, -1);
    let lines = desk.admission.lines();
    let queued: usize = lines.iter().map(|line| line.waiting).sum();
    if queued > waiting {
        let run = desk.run;
        let detail =
            format!("{run}: {queued} requests are queued, of which {waiting} are waited for");
        desk.scene.ledger.blame(format!("I64: {detail}"));
    }
    match admitted {
        Ok(Ok(admitted)) => Ok(admitted),
        Ok(Err(why)) => Err(not_admitted(why)),
        Err(_) => {
            desk.scene.count("left while waiting", "queued no more");
            Err(GAVE_UP)
        }
    }
}

fn not_admitted(why: api::admission::AdmissionRejection) -> &'static str {
    use api::admission::AdmissionRejection;
    match why {
        AdmissionRejection::NoBackend(_) => "no-backend",
        AdmissionRejection::OverLimit(_) => OVER_LIMIT,
        AdmissionRejection::QueueFull { .. } => QUEUE_FULL,
        AdmissionRejection::TooLate { .. } => TOO_LATE,
        AdmissionRejection::WaitedTooLong { .. } => WAITED_TOO_LONG,
        AdmissionRejection::Leaving => "leaving",
    }
}
