//! Substitute for probes, which reports to a replica which engines are up, and makes engines fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::engines::backends::{Fault, Occupancy, SlotTable};
use state::command::EngineFacts;
use state::ids::Slot;

use super::ReplicaHandles;

/// Interval at which the engines are checked.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Label of these draws, which separates them from those of other kinds of clients.
const KIND: u64 = 1;
/// Cache capacity that an engine reports, in blocks.
const CAPACITY_BLOCKS: u32 = 128;

struct ProbedBackend {
    stay: Occupancy,
    url: String,
}

/// Reports the state of the engines until the replica stops.
pub(super) async fn watch(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let mut roster = SlotTable::new(Arc::clone(&handles.backends));
    let mut told: BTreeMap<Slot, u64> = BTreeMap::new();
    loop {
        let registry = handles.view.registry();
        roster.follow(Arc::clone(&registry), |stay, backend| ProbedBackend {
            stay,
            url: backend.spec.url.clone(),
        });
        for (slot, watched) in roster.watchers() {
            let Some(started_at_s) = handles.context.engines().look(&watched.url) else {
                let why = "connection refused".to_owned();
                watched.stay.failed(Fault::Unreachable, why);
                continue;
            };
            watched.stay.passed();
            // The leader reports engines to the others, again after a restart of an engine.
            let status = handles.cluster.status();
            if status.leader == Some(status.id)
                && told.insert(slot, started_at_s) != Some(started_at_s)
                && let Some(backend) = registry.backends.iter().find(|it| it.handle.slot == slot)
            {
                let facts = EngineFacts {
                    models: None,
                    capacity_blocks: Some(CAPACITY_BLOCKS),
                    started_at_s: Some(started_at_s),
                    ..EngineFacts::default()
                };
                handles.router.outbox().observe(backend.handle, facts);
            }
        }
        if rng.below(100) == 0 && !handles.context.is_over() {
            let turned = handles.context.engines().turn(handles.now_us() / 1000);
            let now_us = handles.now_us();
            handles
                .context
                .trace
                .event(now_us, format_args!("engine {turned:?} turns"));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
