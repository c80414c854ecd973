//! The observation of a run: the actions of replicas, as seen from outside.
//!
//! Times are simulated microseconds since the world began, on one clock. Lists are in chronological
//! order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use state::ids::{AgentSessionKey, BlockHash, LogIndex, ReplicaId};
use state::trees::AgentSession;
use xxhash_rust::xxh3::xxh3_128;

use super::image::StateImage;
use super::limits::LimitWatch;

/// Unix time at which every simulated world begins, in milliseconds.
pub const EPOCH_MS: u64 = 1_700_000_000_000;

/// One run of a replica, from its start until it stops or crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaRun {
    /// Replica that runs.
    pub replica: ReplicaId,
    /// Number of the run, counted from 1.
    pub number: u32,
}

impl std::fmt::Display for ReplicaRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "replica {} (run {})", self.replica, self.number)
    }
}

/// Blocks that an engine can find, on its GPU and below.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineCache {
    /// Blocks on the GPU.
    pub gpu: BTreeSet<BlockHash>,
    /// Blocks on the GPU or in memory of its host that follow one another from a first block; empty
    /// if nothing was ever copied to that memory.
    pub with_cpu: BTreeSet<BlockHash>,
}

/// Observations of all replicas of a simulated world.
#[derive(Debug, Default)]
pub struct Observation {
    /// Every entry of the log by index, as first applied.
    pub log: BTreeMap<u64, LogEntry>,
    /// State changes of every run, in chronological order.
    pub steps: BTreeMap<ReplicaRun, Vec<StateStep>>,
    /// Start and end of every run.
    pub runs: BTreeMap<ReplicaRun, Span>,
    /// Times at which the world corrupted the state of a run, to see whether the run recovers it.
    pub spoiled: Vec<(u64, ReplicaRun)>,
    /// Leaders of terms, as observed at replicas that believed they led.
    pub leading: Vec<Leading>,
    /// Times in which a replica could not reach a majority.
    pub cut_off: Vec<CutOff>,
    /// Last time at which each run's outbox was seen empty. All requests that ended earlier are in
    /// the log.
    pub outbox_empty: BTreeMap<ReplicaRun, u64>,
    /// Images of states, each with its time and the replica's run.
    pub images: Vec<(u64, ReplicaRun, Arc<StateImage>)>,
    /// Whether the time was ever unknowable, because too many clocks were wrong, or replicas with
    /// correct clocks were unreachable.
    pub are_clocks_doubted: bool,
    /// Blocks in the caches of engines with KV events after they published a message, named as the
    /// router names them. The key is the message's number and its mark, which is unique.
    pub engines: BTreeMap<(u64, u64), Arc<EngineCache>>,
    /// Newest format that each replica's build knows; empty if all replicas run one build.
    pub builds: BTreeMap<ReplicaId, u8>,
    /// Oldest of the formats in `builds` at the time when each entry was first applied, by index.
    pub formats: BTreeMap<u64, u8>,
    /// Versions of restored snapshots, each with the newest version that the replica's build knows.
    pub snapshots: Vec<(ReplicaRun, u16, u8)>,
    /// Messages that a build could not read, each with its time, receiver and sender.
    pub unreadable: Vec<(u64, ReplicaRun, ReplicaId)>,
    /// Observations of the backends' limits.
    pub limits: LimitWatch,
    /// Members at the end, after healing and without requests in flight; empty until then.
    pub at_rest: BTreeMap<ReplicaId, AtRest>,
}

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// Time at which any replica first applied the entry, in microseconds.
    pub applied_at_us: u64,
    /// The proposed command; `None` for a membership change or a new leader's first entry.
    pub command: Option<Arc<[u8]>>,
}

/// A step in which a state reached an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateStep {
    /// Time of the step, in microseconds.
    pub at_us: u64,
    /// Index that the state reached.
    pub index: u64,
    /// Way in which the state reached the index.
    pub cause: Cause,
    /// Digest of the state; `None` while the world keeps the state corrupted on purpose.
    pub digest: Option<u128>,
}

/// Way in which a state moved to an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The state applied the command with this hash.
    Applied(u128),
    /// The state passed an entry without a command.
    Skipped,
    /// The state was read from a snapshot, its own or another replica's.
    Restored,
}

/// A span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Start of the span, in microseconds.
    pub from_us: u64,
    /// End of the span, in microseconds; `None` if it has not ended.
    pub until_us: Option<u64>,
}

/// An observation of a replica that leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leading {
    /// Time at which the replica was first seen leading, in microseconds.
    pub at_us: u64,
    /// Run of the replica that leads.
    pub run: ReplicaRun,
    /// Term that the replica leads.
    pub term: u64,
}

/// A span of time in which no majority of the voters could exchange messages with a replica in both
/// directions, over any number of links and whenever each was open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutOff {
    /// Replica that was cut off.
    pub replica: ReplicaId,
    /// Span in which it was cut off, without an end if it still is.
    pub span: Span,
}

/// A replica at rest, without requests in flight.
#[derive(Debug, Clone)]
pub struct AtRest {
    /// Run of the replica.
    pub run: ReplicaRun,
    /// Image of the replica's state.
    pub image: Arc<StateImage>,
    /// Number of outbox items that are not known to be in the log.
    pub outbox_items: usize,
    /// Number of blocks in the overlay.
    pub overlay_blocks: usize,
    /// Number of requests that the replica counts as running at backends, its own and those that
    /// peers reported.
    pub in_flight: u64,
    /// Sessions of agents that the replica knows.
    pub agent_sessions: BTreeMap<AgentSessionKey, AgentSession>,
    /// How the replica would route requests that nobody sends, without what it alone can know. All
    /// replicas are asked the same.
    pub answers: Vec<String>,
}

impl Observation {
    /// Records the start of a run.
    pub fn started(&mut self, at_us: u64, run: ReplicaRun) {
        let span = Span {
            from_us: at_us,
            until_us: None,
        };
        self.runs.insert(run, span);
    }

    /// Records the end of a run by crash or stop.
    pub fn ended(&mut self, at_us: u64, run: ReplicaRun) {
        if let Some(span) = self.runs.get_mut(&run) {
            span.until_us = Some(at_us);
        }
    }

    /// Records that a state applied the entry at `index`, which contains `command`.
    pub fn applied(
        &mut self,
        at_us: u64,
        run: ReplicaRun,
        index: u64,
        command: Option<&[u8]>,
        digest: Option<u128>,
    ) {
        let least = self.builds.values().min().copied();
        self.log.entry(index).or_insert_with(|| {
            self.formats.extend(least.map(|least| (index, least)));
            LogEntry {
                applied_at_us: at_us,
                command: command.map(Arc::from),
            }
        });
        let cause = command.map_or(Cause::Skipped, |bytes| Cause::Applied(xxh3_128(bytes)));
        self.step(run, at_us, index, cause, digest);
    }

    /// Records that a state was read from a snapshot.
    pub fn restored(&mut self, at_us: u64, run: ReplicaRun, index: u64, digest: Option<u128>) {
        self.step(run, at_us, index, Cause::Restored, digest);
    }

    /// Records that the world corrupted the state of a run. The state's digest does not count until
    /// it is restored.
    pub fn spoiled(&mut self, at_us: u64, run: ReplicaRun) {
        self.spoiled.push((at_us, run));
    }

    /// Returns whether a run's state was corrupted and is not restored yet.
    #[must_use]
    pub fn is_spoiled(&self, run: ReplicaRun) -> bool {
        let mut spoiled = self.spoiled.iter().rev();
        let Some((since_us, _)) = spoiled.find(|(_, whose)| *whose == run) else {
            return false;
        };
        let last = self.steps.get(&run).and_then(|steps| steps.last());
        last.is_none_or(|last| last.digest.is_none() || last.at_us < *since_us)
    }

    /// Records that a replica believes that it leads a term. May be called repeatedly.
    pub fn leads(&mut self, at_us: u64, run: ReplicaRun, term: u64) {
        let of_run = self.leading.iter().rev().find(|it| it.run == run);
        if of_run.is_none_or(|it| it.term != term) {
            self.leading.push(Leading { at_us, run, term });
        }
    }

    /// Records whether a replica can reach a majority of the voters, including itself if it is a
    /// voter. Must be called on every change. Messages sent before a link is cut may still arrive.
    pub fn reaches_majority(&mut self, at_us: u64, replica: ReplicaId, does: bool) {
        let open = self
            .cut_off
            .iter_mut()
            .rev()
            .find(|it| it.replica == replica && it.span.until_us.is_none());
        match (open, does) {
            (Some(cut), true) => cut.span.until_us = Some(at_us),
            (None, false) => self.cut_off.push(CutOff {
                replica,
                span: Span {
                    from_us: at_us,
                    until_us: None,
                },
            }),
            (Some(_), false) | (None, true) => {}
        }
    }

    /// Records that a run's outbox contains nothing that is not known to be in the log.
    pub fn outbox_is_empty(&mut self, at_us: u64, run: ReplicaRun) {
        self.outbox_empty.insert(run, at_us);
    }

    /// Records an image of a state.
    pub fn image(&mut self, at_us: u64, run: ReplicaRun, image: StateImage) {
        self.images.push((at_us, run, Arc::new(image)));
    }

    /// Records that an engine published message `seq`, whose payload has the mark `mark`, while it
    /// held the blocks `cached`.
    pub fn published(&mut self, seq: u64, mark: u64, cached: Arc<EngineCache>) {
        self.engines.insert((seq, mark), cached);
    }

    /// Returns the highest index that any replica has applied.
    #[must_use]
    pub fn applied_max(&self) -> LogIndex {
        LogIndex(self.log.last_key_value().map_or(0, |(index, _)| *index))
    }

    fn step(
        &mut self,
        run: ReplicaRun,
        at_us: u64,
        index: u64,
        cause: Cause,
        digest: Option<u128>,
    ) {
        self.steps.entry(run).or_default().push(StateStep {
            at_us,
            index,
            cause,
            digest,
        });
    }
}

impl Span {
    /// Returns whether `from_us..=until_us` lies strictly within the span. Strictly, because events
    /// in the same step of the world may come before or after each other.
    #[must_use]
    pub fn covers(&self, from_us: u64, until_us: u64) -> bool {
        self.from_us < from_us && self.until_us.is_none_or(|end_us| until_us < end_us)
    }
}
