//! Assigns KV event readers: the leader spreads backends evenly over connected replicas, and moves
//! no more readers than that requires.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::ports::Cluster;
use state::command::Command;
use state::ids::{BackendRef, ReplicaId, Slot};
use state::reader_assignment::Assignment;
use state::{Registry, StateView};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::intervals::every;

/// Interval at which the presence of replicas is checked.
const INTERVAL: Duration = Duration::from_millis(100);
/// Time without a connection after which another replica takes over a replica's backends.
const SILENT_MAX: Duration = Duration::from_millis(500);

/// Assigns readers while this replica leads, until `stop`.
pub(super) async fn assign(
    cluster: Arc<dyn Cluster>,
    view: Arc<StateView>,
    stop: CancellationToken,
) {
    let mut heard: BTreeMap<ReplicaId, Instant> = BTreeMap::new();
    let mut ticks = every(INTERVAL);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let status = cluster.status();
        if status.leader != Some(status.id) {
            heard.clear();
            continue;
        }
        let now = Instant::now();
        let members = status.members.iter();
        let present = members.filter(|(id, member)| member.is_connected || **id == status.id);
        heard.extend(present.map(|(id, _)| (*id, now)));
        heard.retain(|id, at| {
            status.members.contains_key(id) && now.duration_since(*at) <= SILENT_MAX
        });
        let registry = view.registry();
        let (backends, current) = looked_up(&registry);
        let replicas: Vec<ReplicaId> = heard.keys().copied().collect();
        let wanted = spread(&backends, &current, &replicas);
        if !registry.initialised || wanted == registry.readers {
            continue;
        }
        // If the outcome is unknown, the next round decides again.
        let submitted = cluster.submit(Command::AssignReaders(wanted));
        match stop.run_until_cancelled(submitted).await {
            None => return,
            Some(Ok(committed)) => {
                tracing::info!(log_index = committed.index.0, "assigned KV event readers");
            }
            Some(Err(error)) => tracing::debug!(%error, "could not assign KV event readers yet"),
        }
    }
}

/// Returns the backends that need a reader, and the current readers by slot.
fn looked_up(registry: &Registry) -> (Vec<BackendRef>, BTreeMap<Slot, ReplicaId>) {
    let read = registry
        .backends
        .iter()
        .filter(|it| it.spec.kv_events.is_some() && !it.is_further_rank());
    let readers = registry.readers.iter();
    (
        read.map(|backend| backend.handle).collect(),
        readers.map(|it| (it.backend.slot, it.replica)).collect(),
    )
}

/// Returns the new assignment of `backends` to `replicas`, in the order of `backends`. Connected
/// readers keep their backends, except for the few that must move to balance the load.
fn spread(
    backends: &[BackendRef],
    current: &BTreeMap<Slot, ReplicaId>,
    replicas: &[ReplicaId],
) -> Vec<Assignment> {
    let mut load: BTreeMap<ReplicaId, usize> = replicas.iter().map(|id| (*id, 0)).collect();
    let mut readers: BTreeMap<Slot, ReplicaId> = BTreeMap::new();
    for backend in backends {
        if let Some(reader) = current.get(&backend.slot)
            && let Some(count) = load.get_mut(reader)
        {
            *count += 1;
            readers.insert(backend.slot, *reader);
        }
    }
    let least = |load: &BTreeMap<ReplicaId, usize>| {
        let (id, count) = load.iter().min_by_key(|(id, count)| (**count, **id))?;
        Some((*id, *count))
    };
    for backend in backends {
        if !readers.contains_key(&backend.slot)
            && let Some((id, count)) = least(&load)
        {
            load.insert(id, count + 1);
            readers.insert(backend.slot, id);
        }
    }
    while let (Some((idle, fewest)), Some((busy, most))) = (
        least(&load),
        load.iter()
            .max_by_key(|(id, count)| (**count, **id))
            .map(|(id, count)| (*id, *count)),
    ) && most > fewest + 1
    {
        let moved = readers
            .iter_mut()
            .rev()
            .find(|(_, reader)| **reader == busy);
        let (_, reader) = moved.expect("who reads most reads something");
        *reader = idle;
        load.insert(busy, most - 1);
        load.insert(idle, fewest + 1);
    }
    let reader = |backend: &BackendRef| {
        Some(Assignment {
            backend: *backend,
            replica: *readers.get(&backend.slot)?,
        })
    };
    backends.iter().filter_map(reader).collect()
}

#[cfg(test)]
mod tests {
    use state::ids::Incarnation;

    use super::*;

    fn backends(count: u16) -> Vec<BackendRef> {
        let backend = |slot| BackendRef {
            slot: Slot(slot),
            incarnation: Incarnation(1),
        };
        (0..count).map(backend).collect()
    }

    /// Returns the readers of `count` backends, by slot.
    fn spread_over(current: &[u8], count: u16, replicas: &[u8]) -> Vec<u8> {
        let current = (0..).map(Slot).zip(current.iter().copied().map(ReplicaId));
        let replicas: Vec<ReplicaId> = replicas.iter().copied().map(ReplicaId).collect();
        let readers = spread(&backends(count), &current.collect(), &replicas);
        readers.iter().map(|it| it.replica.0).collect()
    }

    #[test]
    fn backends_are_spread_evenly() {
        assert_eq!(spread_over(&[], 5, &[1, 2, 3]), [1, 2, 3, 1, 2]);
        assert!(spread_over(&[], 2, &[]).is_empty());
    }

    #[test]
    fn present_readers_keep_their_backends() {
        assert_eq!(spread_over(&[3, 2, 1, 3], 4, &[1, 2, 3]), [3, 2, 1, 3]);
        assert_eq!(spread_over(&[3, 2, 1, 3], 4, &[1, 2]), [1, 2, 1, 2]);
    }

    #[test]
    fn a_joining_replica_takes_the_fewest_readers_for_balance() {
        assert_eq!(spread_over(&[1, 1, 1, 1], 4, &[1, 2]), [1, 1, 2, 2]);
        assert_eq!(spread_over(&[1, 2, 1, 2], 4, &[1, 2, 3]), [1, 2, 1, 3]);
    }
}
