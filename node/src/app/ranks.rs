//! Gives each engine one backend per data-parallel rank that it reports: the leader compares probe
//! results with the registry, and proposes the differences.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::engines::backends::Backends;
use api::ports::Cluster;
use state::command::{Command, Reply};
use state::ids::{BackendRef, Slot};
use state::{RANKS_MAX, Registry, StateView};
use tokio_util::sync::CancellationToken;

use super::intervals::every;

/// Interval at which probe results are compared with the registry.
const INTERVAL: Duration = Duration::from_millis(200);

/// Registers the engines' ranks while this replica leads, until `stop`.
pub(super) async fn follow(
    cluster: Arc<dyn Cluster>,
    view: Arc<StateView>,
    backends: Arc<Backends>,
    stop: CancellationToken,
) {
    // Changes that the state had no room for, so that they are not proposed again and again.
    let mut refused: BTreeMap<BackendRef, u16> = BTreeMap::new();
    let mut ticks = every(INTERVAL);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let status = cluster.status();
        if status.leader != Some(status.id) {
            continue;
        }
        let told = |slot| backends.record(slot)?.metrics.ranks;
        for (backend, ranks) in news(&view.registry(), told) {
            if refused.get(&backend) == Some(&ranks) {
                continue;
            }
            let submitted = cluster.submit(Command::SetRanks { backend, ranks });
            match stop.run_until_cancelled(submitted).await {
                None => return,
                Some(Ok(committed)) => {
                    if let Reply::Rejected(rejection) = committed.reply {
                        tracing::warn!(slot = backend.slot.0, ranks, %rejection, "no slots for ranks");
                        refused.insert(backend, ranks);
                    } else {
                        tracing::info!(slot = backend.slot.0, ranks, "engine has ranks");
                    }
                }
                // Without a quorum, ranks share a slot until the next round.
                Some(Err(error)) => tracing::debug!(%error, "could not follow ranks yet"),
            }
        }
    }
}

/// Returns the backends whose engines report a number of ranks other than the registry's, with that
/// number. `told` returns the number that an engine reports, or `None` if it reports none.
fn news(registry: &Registry, told: impl Fn(Slot) -> Option<u16>) -> Vec<(BackendRef, u16)> {
    let first = registry.backends.iter().filter(|it| !it.is_further_rank());
    let differs = first.filter_map(|backend| {
        let slot = backend.handle.slot;
        let ranks = told(slot).filter(|ranks| *ranks <= RANKS_MAX)?;
        let known = registry.ranks.of(slot).len().max(1);
        (usize::from(ranks) != known).then_some((backend.handle, ranks))
    });
    differs.collect()
}
