//! Reads the KV events of the backends assigned to this replica.
//!
//! One task per backend queries the engine (`source`). One task per data-parallel rank connects the
//! sockets to an [`EventStream`] and reports to the cluster through the outbox. When the outbox is
//! full, the task waits, and with it the engine's publisher, which then drops messages. These are
//! replayed once there is room again. Nothing else waits for a reader.

mod rank;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use state::command::Item;
use state::ids::{BackendRef, Slot};
use state::kv_events::{
    KvBatch, KvCondition, KvRankStatus, KvReason, KvRejection, KvUncertainty, KvUpdate,
};
use state::{Backend, Registry, StateView};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::stream::{EventStream, HashIdentity};
use super::stream_status::{BackendStreams, StreamBoard};
use crate::base::clock::Clock;
use crate::engines::backends::{Backends, EngineKind};
use crate::engines::kv_transport::socket::Sockets;
use crate::engines::kv_transport::source::{self, EngineSources};
use crate::ports::Cluster;
use crate::prompt::PromptReader;
use crate::routing::SharedOutbox;
use rank::RankReader;

/// Interval at which the assignments of readers are checked.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Delay before an engine is queried again.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// Parts of a replica that the readers depend on.
#[derive(Clone)]
pub struct ReaderParts {
    /// Access to the log and the replicated state.
    pub cluster: Arc<dyn Cluster>,
    /// Published part of the state.
    pub view: Arc<StateView>,
    /// Outbox that receives the reports.
    pub outbox: Arc<SharedOutbox>,
    /// Prompt reader, which defines how the prompts of each model are cut into blocks.
    pub reader: Arc<PromptReader>,
    /// The replica's wall clock.
    pub clock: Clock,
    /// Registry of backends, with the keys for requests to engines.
    pub backends: Arc<Backends>,
    /// Transport to the engines' publishers.
    pub sockets: Arc<dyn Sockets>,
    /// Status board of the streams.
    pub board: Arc<StreamBoard>,
}

/// The task that reads one backend; aborted on drop.
struct ReaderTask {
    backend: Backend,
    /// Tokens per block of the backend's models when the task began.
    sizes: Vec<(String, u32)>,
    _task: AbortOnDropHandle<()>,
}

/// Runs a reader for each backend assigned to this replica until `stop`.
#[must_use]
pub fn run(parts: ReaderParts, stop: CancellationToken) -> BoxFuture<'static, ()> {
    supervise(parts, stop).boxed()
}

async fn supervise(parts: ReaderParts, stop: CancellationToken) {
    let mut readings: BTreeMap<Slot, ReaderTask> = BTreeMap::new();
    let mut seen: Option<Arc<Registry>> = None;
    let mut ticks = tokio::time::interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let registry = parts.view.registry();
        if seen
            .as_ref()
            .is_some_and(|seen| Arc::ptr_eq(seen, &registry))
        {
            continue;
        }
        let us = parts.cluster.status().id;
        let is_ours = |backend: &Backend| {
            // The first rank's task reads all ranks.
            backend.spec.kv_events.is_some()
                && !backend.is_further_rank()
                && registry.reader(backend.handle.slot) == Some(us)
        };
        let ours: Vec<&Backend> = registry.backends.iter().filter(|it| is_ours(it)).collect();
        readings.retain(|slot, reading| {
            let is_kept = ours.iter().any(|backend| {
                backend.handle == reading.backend.handle
                    && backend.spec == reading.backend.spec
                    && sizes_of(&registry, backend) == reading.sizes
            });
            if !is_kept {
                parts.board.take_down(*slot);
            }
            is_kept
        });
        for backend in ours {
            let start = || {
                let reading = read_backend(parts.clone(), backend.clone());
                ReaderTask {
                    backend: backend.clone(),
                    sizes: sizes_of(&registry, backend),
                    _task: AbortOnDropHandle::new(tokio::spawn(reading)),
                }
            };
            readings.entry(backend.handle.slot).or_insert_with(start);
        }
        seen = Some(registry);
    }
}

/// Returns the tokens per block of the models that `backend` serves, as engines report them.
fn sizes_of(registry: &Registry, backend: &Backend) -> Vec<(String, u32)> {
    let models = registry.block_sizes.models();
    let own = models.filter(|(model, _)| backend.serves(model));
    own.map(|(model, size)| (model.to_owned(), size)).collect()
}

/// Reads one backend until the task is aborted.
async fn read_backend(parts: ReaderParts, backend: Backend) {
    loop {
        read_while_sound(&parts, &backend).await;
        tracing::error!(backend = %backend.spec.id, "KV event reader failed; restarting it");
        object(&parts, backend.handle);
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Reads one backend until the task of a rank ends, which only a fault causes.
async fn read_while_sound(parts: &ReaderParts, backend: &Backend) {
    let slot = backend.handle.slot;
    parts.board.show(slot, BackendStreams::default());
    let found = loop {
        let key = parts.backends.keys();
        let key = key.of_probes(&backend.spec.id, &backend.spec.url);
        match source::find(backend, key, parts.backends.dialer()).await {
            Ok(found) => break found,
            Err(why) => {
                let detail = Some(why);
                parts.board.show(
                    slot,
                    BackendStreams {
                        detail,
                        ranks: Vec::new(),
                    },
                );
                object(parts, backend.handle);
                tokio::time::sleep(ASK_AGAIN).await;
            }
        }
    };
    let identity = match identify(parts, slot, &found) {
        Ok(identity) => identity,
        Err(refusal) => {
            refuse(parts, backend.handle, &found, refusal).await;
            // Wait until the backend changes.
            return std::future::pending().await;
        }
    };
    name_ranks(parts, backend.handle, &found).await;
    parts.board.show(slot, BackendStreams::default());
    let mut ranks = JoinSet::new();
    for source in found.ranks {
        let stream = ResumePoint {
            parts,
            backend: backend.handle,
            identity: &identity,
        };
        let stream = stream.stream(source.rank, source.replay.is_some());
        let rank = RankReader::new(
            parts.clone(),
            backend.handle,
            identity.clone(),
            source,
            stream,
        );
        ranks.spawn(rank.run());
    }
    ranks.join_next().await;
}

/// Returns the replicated status of the ranks of this incarnation.
fn known_ranks(parts: &ReaderParts, backend: BackendRef) -> Vec<KvRankStatus> {
    let mut ranks = Vec::new();
    parts
        .cluster
        .with_state(&mut |state| ranks = state.kv_ranks(backend));
    ranks
}

/// Reports doubt about the ranks that count as exact although no reader follows them.
fn object(parts: &ReaderParts, backend: BackendRef) {
    for rank in known_ranks(parts, backend) {
        if rank.condition == KvCondition::EXACT {
            // If the outbox has no room, the next attempt reports the doubt.
            parts.outbox.note(Item::KvEvents(KvBatch {
                backend,
                rank: rank.rank,
                publisher: rank.publisher,
                news: KvUpdate::Doubt(KvUncertainty::Unreachable),
            }));
        }
    }
}

/// Registers exactly the ranks that the engine reports, so that an unreachable rank keeps the
/// backend from being exact, and a removed one counts as empty.
async fn name_ranks(parts: &ReaderParts, backend: BackendRef, found: &EngineSources) {
    let known = known_ranks(parts, backend);
    let is_known = |rank: u16| known.iter().any(|it| it.rank == rank);
    let mut news = Vec::new();
    if found.ranks.len() > 1 {
        let unknown = found.ranks.iter().filter(|it| !is_known(it.rank));
        // Any run found later has a greater number.
        news.extend(unknown.map(|it| (it.rank, 0, KvUpdate::Doubt(KvUncertainty::Unreachable))));
    }
    for gone in &known {
        if found.ranks.iter().all(|it| it.rank != gone.rank) {
            let publisher = parts.clock.unix_ms().max(gone.publisher.saturating_add(1));
            news.push((gone.rank, publisher, KvUpdate::Begin));
            news.push((gone.rank, publisher, KvUpdate::Current { seq: None }));
        }
    }
    for (rank, publisher, news) in news {
        let batch = KvBatch {
            backend,
            rank,
            publisher,
            news,
        };
        tell(parts, batch).await;
    }
}

/// Sends a report to the cluster, waiting until the outbox has room.
async fn tell(parts: &ReaderParts, batch: KvBatch) {
    while !parts.outbox.note(Item::KvEvents(batch.clone())) {
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Determines the model and block size for hashing this engine's blocks.
fn identify(
    parts: &ReaderParts,
    slot: Slot,
    found: &EngineSources,
) -> Result<HashIdentity, KvRejection> {
    let model = found.model.clone().ok_or(KvRejection::Models)?;
    let block_size = parts.reader.token_block_size(&model);
    let block_size = block_size.ok_or(KvRejection::Tokenizer)?;
    let registry = parts.view.registry();
    let engine = registry.block_sizes.of_engine(slot);
    Ok(HashIdentity {
        hashing: registry.hashing(),
        model,
        has_qualified_adapters: found.is_sglang
            || parts.backends.kind(slot) == Some(EngineKind::Sglang),
        block_size,
        parts: engine.map_or(1, |engine| engine / block_size),
    })
}

/// Context for creating streams that resume at the position in the replicated state.
struct ResumePoint<'a> {
    parts: &'a ReaderParts,
    backend: BackendRef,
    identity: &'a HashIdentity,
}

impl ResumePoint<'_> {
    fn stream(&self, rank: u16, has_replay: bool) -> EventStream {
        let mut position = None;
        self.parts.cluster.with_state(&mut |state| {
            let positions = state.kv_positions(self.backend.slot);
            position = positions.into_iter().find(|it| it.rank == rank);
        });
        let identity = self.identity.clone();
        let known = known_ranks(self.parts, self.backend);
        let known = known.iter().find(|it| it.rank == rank);
        match known.and_then(|it| it.condition.reason) {
            Some(KvReason::Refused(refusal)) if is_void(refusal, &identity) => {
                EventStream::anew(identity, has_replay, position.map_or(0, |it| it.publisher))
            }
            _ => EventStream::new(identity, has_replay, position),
        }
    }
}

/// Whether the reason for refusing an engine no longer holds. Otherwise a refusal lasts as long as
/// the run.
fn is_void(refusal: KvRejection, identity: &HashIdentity) -> bool {
    match refusal {
        KvRejection::Tokenizer | KvRejection::Models => true,
        KvRejection::BlockSize { engine, router } => {
            router != identity.block_size || engine.is_multiple_of(router)
        }
        KvRejection::Unreadable => false,
    }
}

/// Reports that this engine's events cannot be used, waiting until the outbox has room.
async fn refuse(
    parts: &ReaderParts,
    backend: BackendRef,
    found: &EngineSources,
    refusal: KvRejection,
) {
    let detail = Some(format!("{refusal:?}"));
    parts.board.show(
        backend.slot,
        BackendStreams {
            detail,
            ranks: Vec::new(),
        },
    );
    let known = known_ranks(parts, backend);
    let unix_ms = || parts.clock.unix_ms();
    for source in &found.ranks {
        // The report uses the followed run. Another one would empty the cache, which also holds
        // blocks known from leases.
        let followed = known.iter().find(|it| it.rank == source.rank);
        let batch = KvBatch {
            backend,
            rank: source.rank,
            publisher: followed.map_or_else(unix_ms, |it| it.publisher),
            news: KvUpdate::Refuse(refusal),
        };
        tell(parts, batch).await;
    }
}
