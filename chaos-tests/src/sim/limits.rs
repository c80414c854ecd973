//! Observation of the requests that run at limited backends, in every step.

use std::collections::BTreeMap;

use state::ids::BackendRef;

use super::world::World;
use crate::oracle::limits::ShareObservation;

impl World {
    /// Records how many requests each replica runs, and may run, at each limited backend.
    pub(super) fn observe_limits(&self) {
        let mut looks: BTreeMap<BackendRef, Vec<ShareObservation>> = BTreeMap::new();
        for seat in self.seats.values() {
            // Requests of a paused process still run.
            let Some(core) = seat.machine.core_at_rest() else {
                continue;
            };
            let (router, service) = (core.router(), core.view().service());
            let status = router.shares().status();
            for backend in &core.view().registry().backends {
                let handle = backend.handle;
                let Some(limit) = service.limit(handle.slot) else {
                    continue;
                };
                let Some((_, allowed)) = router.load().places(handle, limit) else {
                    continue;
                };
                looks.entry(handle).or_default().push(ShareObservation {
                    replica: seat.run.replica,
                    epoch: status.epoch,
                    members: status.members,
                    is_settled: status.is_settled,
                    limit,
                    running: router.load().here(handle).running,
                    allowed,
                });
            }
        }
        let now_us = self.now_us();
        self.ledger
            .with(|record| record.observation.limits.look(now_us, &looks));
    }
}
