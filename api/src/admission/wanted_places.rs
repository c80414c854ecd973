//! Collects the requests that wait for places. The other replicas, which receive the numbers, hand
//! over places that they do not need.
//!
//! A request counts only if it would go with a place. A request that the gate holds back would keep
//! places from requests that may go elsewhere.

use state::admission::{Gate, QueuedRequest};
use state::ids::BackendRef;

use super::Admission;
use super::model_queue::ModelQueue;
use super::serve::QueueScan;
use super::waiter::Waiter;
use crate::routing::WantedPlaces;

/// Maximum number of requests counted per queue. More places than this are rarely free at once.
const WANTED_MAX: usize = 256;
/// Maximum number of requests per queue that are checked one by one, where only some backends fit.
const SELECTIVE_MAX: usize = 16;

impl Admission {
    /// Records that `requests` requests like `entry`, one of `waiting`, wait for places at all
    /// backends that may take it.
    pub(super) fn want(
        &self,
        (entry, waiting): (&Waiter, usize),
        requests: u32,
        wanted: &mut WantedPlaces,
        look: &QueueScan,
    ) {
        let backends = self
            .decider
            .wanted_backends(&entry.ask_among(waiting, look.now), look.now);
        want_at(backends, (entry, requests), wanted, look);
    }

    /// Records the places for which requests that have had their turn wait.
    pub(super) fn want_again(
        &self,
        line: &ModelQueue,
        wanted: &mut WantedPlaces,
        look: &QueueScan,
    ) {
        let again = line
            .again
            .iter()
            .filter_map(|ticket| line.entries.get(ticket));
        let is_patient = |entry: &&Waiter| {
            let seeking = entry.seeking.as_ref();
            seeking.is_some_and(|seeking| look.now < seeking.until)
        };
        let (seeking, others): (Vec<&Waiter>, Vec<&Waiter>) = again.partition(is_patient);
        for entry in seeking {
            let backends = entry.seeking.iter().map(|it| it.backend);
            want_at(backends, (entry, 1), wanted, look);
        }
        for entry in others.into_iter().take(SELECTIVE_MAX) {
            self.want((entry, line.entries.len()), 1, wanted, look);
        }
    }

    /// Records the places for which the next requests wait that the gate does not hold back.
    pub(super) fn want_next(
        &self,
        line: &ModelQueue,
        gate: &Gate,
        wanted: &mut WantedPlaces,
        look: &QueueScan,
    ) {
        let counters = self.counters(look.pricing);
        let waiting = line.queue.unheld(look.now_ms, &counters, gate);
        let entry = |waiting: &QueuedRequest| line.entries.get(&waiting.ticket);
        let entries = waiting.take(WANTED_MAX).filter_map(entry);
        let (selective, common): (Vec<&Waiter>, Vec<&Waiter>) =
            entries.partition(|entry| entry.is_selective());
        if let Some(first) = common.first() {
            let requests = u32::try_from(common.len()).unwrap_or(u32::MAX);
            self.want((first, line.entries.len()), requests, wanted, look);
        }
        for entry in selective.into_iter().take(SELECTIVE_MAX) {
            self.want((entry, line.entries.len()), 1, wanted, look);
        }
    }
}

/// Records that `requests` requests like `entry` wait for places at `backends`.
fn want_at(
    backends: impl IntoIterator<Item = BackendRef>,
    (entry, requests): (&Waiter, u32),
    wanted: &mut WantedPlaces,
    look: &QueueScan,
) {
    let waited = look.now.saturating_duration_since(entry.since).as_millis();
    let waited_ms = u32::try_from(waited).unwrap_or(u32::MAX);
    for backend in backends {
        let waiting = wanted.entry(backend).or_default();
        waiting.requests = waiting.requests.saturating_add(requests);
        waiting.waited_ms = waiting.waited_ms.max(waited_ms);
    }
}
