//! Warm caches: what engines hold, and replicas know that they hold, at the start of a run.

use state::command::{Command, Envelope, Item, Lane, LeaseOutcome, Origin};
use state::ids::{AttemptId, BackendRef, BlockHash, ReplicaId, SessionId};

use crate::simulate::clock::EPOCH_MS;
use crate::simulate::engine::SimEngine;
use crate::simulate::replica::state_of;
use crate::simulate::workload::WarmPrefix;

/// Maximum number of blocks in one item of a batch.
const ITEM_BLOCKS_MAX: usize = 4096;

/// Puts the blocks of `warm` into the engines' caches.
pub(super) fn fill(engines: &mut [SimEngine], warm: &[WarmPrefix]) {
    let count = engines.len().max(1);
    for prefix in warm {
        if let Some(engine) = engines.get_mut(prefix.engine % count) {
            engine.hold(&prefix.prompt);
        }
    }
}

/// Returns entries after `setup` from which the state learns the blocks of `warm`.
pub(super) fn entries(setup: &[Envelope], warm: &[WarmPrefix]) -> Vec<Envelope> {
    if warm.is_empty() {
        return Vec::new();
    }
    let registry = state_of(setup).view().registry();
    let backends: Vec<BackendRef> = registry.backends.iter().map(|it| it.handle).collect();
    let items = warm.iter().flat_map(|prefix| {
        let backend = backends[prefix.engine % backends.len()];
        let chain = &prefix.prompt.identity.chain;
        let parts = chain.chunks(ITEM_BLOCKS_MAX).enumerate();
        parts.map(move |(nth, new)| {
            let tip = (nth * ITEM_BLOCKS_MAX)
                .checked_sub(1)
                .map(|last| chain[last]);
            lease(backend, tip, new)
        })
    });
    let envelope = |(seq, items): (u64, [Item; 2])| Envelope {
        origin: Origin {
            replica: ReplicaId(u8::MAX),
            session: SessionId(1),
            lane: Lane::Outbox,
            seq,
        },
        proposed_at_ms: EPOCH_MS,
        command: Command::Batch {
            base_attempt: AttemptId(seq),
            items: items.into(),
        },
    };
    (1..).zip(items).map(envelope).collect()
}

/// Returns the beginning and the end of an attempt that brought the blocks `new` after `tip`.
fn lease(backend: BackendRef, tip: Option<BlockHash>, new: &[BlockHash]) -> [Item; 2] {
    [
        Item::Acquire {
            attempt: 0,
            backend,
            tip,
            new: new.to_vec(),
        },
        Item::Release {
            attempt: 0,
            outcome: LeaseOutcome::Kept,
        },
    ]
}
