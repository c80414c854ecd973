//! Fills a static batch: after its first request, more of the same bin go to the same backend.

use state::admission::{DispatchVerdict, Gate, QueuedRequest};
use state::ids::Slot;
use tokio::time::Instant;

use super::Admission;
use super::model_queue::ModelQueue;
use super::serve::{QueueScan, ServiceRate};
use super::waiter::DecisionTimes;
use crate::routing::{Room, RoutingRequest};

impl Admission {
    /// Dispatches more requests of the bin of `first` to its backend, in the queue's order, as long
    /// as the next one fits.
    pub(super) fn fill(
        &self,
        line: &mut ModelQueue,
        (gate, pace): (&mut Gate, &mut ServiceRate),
        first: &QueuedRequest,
        to: (Slot, u32),
        look: &QueueScan,
    ) {
        let (slot, tokens_per_block) = to;
        let tokens = |waiting: &QueuedRequest| {
            u64::from(waiting.input_tokens) + u64::from(waiting.predicted_output)
        };
        let mut room = self
            .decider
            .batch_room(slot, tokens(first), tokens_per_block);
        let bin_max = look.settings.bin_batch_max.get(usize::from(first.bin));
        let others_max = bin_max.map_or(u32::MAX, |most| most.saturating_sub(1));
        room.requests = room.requests.min(others_max);
        let others = self.decider.slots_but(slot);
        let counters = self.counters(look.pricing);
        loop {
            let ModelQueue { queue, entries, .. } = &mut *line;
            let mut placed = None;
            let next = queue.next_alike(first, look.now_ms, &counters, gate, |waiting| {
                let Some(entry) = entries.get(&waiting.ticket) else {
                    return DispatchVerdict::Skip;
                };
                if !room.fits(tokens(waiting)) {
                    return DispatchVerdict::Stop;
                }
                let ask = RoutingRequest {
                    room: Room::Here,
                    ..entry.candidate.ask(&others)
                };
                let began = entry.candidate.is_traced().then(Instant::now);
                match self.shares.place(&self.decider, &ask, look.now) {
                    Ok(at) => placed = Some((at, DecisionTimes::since(began))),
                    Err(_) => return DispatchVerdict::Skip,
                }
                DispatchVerdict::Go
            });
            let (Some(waiting), Some(placed)) = (next, placed) else {
                return;
            };
            room.take(tokens(&waiting));
            self.observe_gap(line, (gate, pace), &waiting, look);
            if let Some(entry) = line.entries.remove(&waiting.ticket) {
                self.settle(entry, Ok(placed), look.now);
            }
        }
    }
}
