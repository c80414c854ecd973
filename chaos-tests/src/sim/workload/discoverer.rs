//! Random changes by a source of backends. Every replica proposes them, as if several believed that
//! they lead, so changes overlap and arrive late.

use lab::rng::Rng;
use state::command::Command;
use state::discovery::{Discovery, DiscoveryChange};

use super::{ReplicaHandles, backend, operator, think};

/// Label of these draws, which separates them from those of other kinds of clients.
const KIND: u64 = 9;
/// Mean pause between two changes, in milliseconds.
const THINK_MS: u64 = 700;
/// Number of backends that the source may list.
pub(super) const DISCOVERED: u64 = 3;

/// Returns whether a world of this seed has a source. Other worlds are unchanged.
pub(super) fn is_in(seed: u64) -> bool {
    seed % 8 == 5
}

/// Returns the id of the source's backend with this number.
pub(super) fn name(number: u64) -> String {
    format!("s{number}")
}

/// Proposes changes of the source until the workload is over.
pub(super) async fn write(handles: ReplicaHandles) {
    let mut rng = handles.rng(KIND, 0);
    let client = handles.context.next_client();
    while !handles.context.is_over() {
        think(&mut rng, THINK_MS).await;
        if handles.view.registry().initialised && !handles.context.is_over() {
            let command = Command::Discover(Box::new(discovery(&mut rng)));
            operator::submit(&handles, client, command).await;
        }
    }
}

/// Draws a change of the source. No request is for the model of its backends.
fn discovery(rng: &mut Rng) -> Discovery {
    let number = rng.below(DISCOVERED);
    let mut spec = backend(number, rng.below(2), Some(24));
    spec.id = name(number);
    spec.models = vec!["unasked".to_owned()];
    (spec.kv_events, spec.kv_replay) = (None, None);
    let name = spec.id.clone();
    Discovery {
        source: "sim".to_owned(),
        change: match rng.below(5) {
            0..=1 => DiscoveryChange::Found(spec),
            2..=3 => DiscoveryChange::Lost { name },
            _ => DiscoveryChange::Forgotten { name },
        },
    }
}
