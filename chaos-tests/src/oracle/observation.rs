//! The observation of a run: what replicas did, as seen from outside.
//!
//! Times are simulated microseconds since the world began; one clock for all. Lists are in the
//! order in which things happened.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use state::ids::{BlockHash, LogIndex, ReplicaId};
use xxhash_rust::xxh3::xxh3_128;

use super::image::StateImage;
use super::limits::LimitWatch;

/// One run of a replica: from its start until it is stopped, or crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaRun {
    /// The replica.
    pub replica: ReplicaId,
    /// Counts its runs, from 1.
    pub number: u32,
}

impl std::fmt::Display for ReplicaRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "replica {} (run {})", self.replica, self.number)
    }
}

/// What the world saw of the replicas.
#[derive(Debug, Default)]
pub struct Observation {
    /// Every command of the log, as the first replica that applied it saw it.
    pub log: BTreeMap<u64, LogEntry>,
    /// How every run changed its state, one after the other.
    pub steps: BTreeMap<ReplicaRun, Vec<StateStep>>,
    /// When runs began and ended.
    pub runs: BTreeMap<ReplicaRun, Span>,
    /// When the world took the state from a run, to see whether it gets it back.
    pub spoiled: Vec<(u64, ReplicaRun)>,
    /// Who led which term, as seen at a replica that took itself for the leader.
    pub leading: Vec<Leading>,
    /// When replicas could not reach a majority.
    pub cut_off: Vec<CutOff>,
    /// When a run's outbox was last seen with nothing in it: all that ended before is in the log.
    pub outbox_empty: BTreeMap<ReplicaRun, u64>,
    /// What states held, now and then.
    pub images: Vec<(u64, ReplicaRun, Arc<StateImage>)>,
    /// Whether there was a time in which it could not be said what time it is: so many clocks were
    /// wrong, or of replicas that others did not hear.
    pub are_clocks_doubted: bool,
    /// What the engines that publish KV events held once they had published a message, by its
    /// number and its mark, which no two messages share: all blocks in the cache, as the router
    /// calls them.
    pub engines: BTreeMap<(u64, u64), Arc<BTreeSet<BlockHash>>>,
    /// The newest format that each replica's build knows; empty where all are of one build.
    pub builds: BTreeMap<ReplicaId, u8>,
    /// What the least of these was when an entry was first applied.
    pub formats: BTreeMap<u64, u8>,
    /// Versions of the snapshots that were restored, each with what the replica's build knows.
    pub snapshots: Vec<(ReplicaRun, u16, u8)>,
    /// When builds could not read a message, and whose it was.
    pub unreadable: Vec<(u64, ReplicaRun, ReplicaId)>,
    /// Replicas that were started with an earlier build than before: others may hear of it late.
    pub downgraded: BTreeSet<ReplicaId>,
    /// Whether the backends' limits held.
    pub limits: LimitWatch,
    /// What the replicas are at the end, after everything was healed and nothing is under way: of
    /// all that are members. Empty before.
    pub at_rest: BTreeMap<ReplicaId, AtRest>,
}

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// When it was first applied anywhere.
    pub applied_at_us: u64,
    /// The command as proposed; `None`: an entry without one (a membership, a new leader's first).
    pub command: Option<Arc<[u8]>>,
}

/// How a state came to an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateStep {
    /// When.
    pub at_us: u64,
    /// Where it is now.
    pub index: u64,
    /// By what.
    pub cause: Cause,
    /// Digest of the state there; `None` while the world keeps the state spoiled on purpose.
    pub digest: Option<u128>,
}

/// By what a state came to an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It applied the command with this hash.
    Applied(u128),
    /// It passed an entry without a command.
    Skipped,
    /// It was read from a snapshot, its own or another's.
    Restored,
}

/// When something began and ended; `None`: not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// From when.
    pub from_us: u64,
    /// Until when.
    pub until_us: Option<u64>,
}

/// A replica that leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leading {
    /// When it was seen first.
    pub at_us: u64,
    /// Who.
    pub run: ReplicaRun,
    /// Which term.
    pub term: u64,
}

/// A time in which no majority of the voters could hear of a replica and be heard by it, over
/// however many links and whenever in it each was open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutOff {
    /// Who.
    pub replica: ReplicaId,
    /// When; a span that has not ended lasts.
    pub span: Span,
}

/// A replica with nothing to do.
#[derive(Debug, Clone)]
pub struct AtRest {
    /// Which run of it.
    pub run: ReplicaRun,
    /// Its state.
    pub image: Arc<StateImage>,
    /// Items of its outbox that no log has.
    pub outbox_items: usize,
    /// Blocks it believes in before the log tells it.
    pub overlay_blocks: usize,
    /// Requests it counts as under way at backends, its own and those that others told of.
    pub in_flight: u64,
}

impl Observation {
    /// A replica starts.
    pub fn started(&mut self, at_us: u64, run: ReplicaRun) {
        let span = Span {
            from_us: at_us,
            until_us: None,
        };
        self.runs.insert(run, span);
    }

    /// It crashed or was stopped.
    pub fn ended(&mut self, at_us: u64, run: ReplicaRun) {
        if let Some(span) = self.runs.get_mut(&run) {
            span.until_us = Some(at_us);
        }
    }

    /// A state applied an entry; `command`: what the entry carries.
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

    /// A state was read from a snapshot.
    pub fn restored(&mut self, at_us: u64, run: ReplicaRun, index: u64, digest: Option<u128>) {
        self.step(run, at_us, index, Cause::Restored, digest);
    }

    /// The world takes the state from a run. Until it is restored, its digest does not count.
    pub fn spoiled(&mut self, at_us: u64, run: ReplicaRun) {
        self.spoiled.push((at_us, run));
    }

    /// Whether a run's state is not to be believed: it was taken and has not come back.
    #[must_use]
    pub fn is_spoiled(&self, run: ReplicaRun) -> bool {
        let mut spoiled = self.spoiled.iter().rev();
        let Some((since_us, _)) = spoiled.find(|(_, whose)| *whose == run) else {
            return false;
        };
        let last = self.steps.get(&run).and_then(|steps| steps.last());
        last.is_none_or(|last| last.digest.is_none() || last.at_us < *since_us)
    }

    /// A replica takes itself for the leader of a term. May be told again and again.
    pub fn leads(&mut self, at_us: u64, run: ReplicaRun, term: u64) {
        let of_run = self.leading.iter().rev().find(|it| it.run == run);
        if of_run.is_none_or(|it| it.term != term) {
            self.leading.push(Leading { at_us, run, term });
        }
    }

    /// Whether a replica can reach a majority of the voters, itself included if it is one. To be
    /// told whenever it changes. What is under way when a link is cut may arrive: it was sent
    /// before.
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

    /// A run's outbox holds nothing that is not known to be in the log.
    pub fn outbox_is_empty(&mut self, at_us: u64, run: ReplicaRun) {
        self.outbox_empty.insert(run, at_us);
    }

    /// Keeps what a state holds.
    pub fn image(&mut self, at_us: u64, run: ReplicaRun, image: StateImage) {
        self.images.push((at_us, run, Arc::new(image)));
    }

    /// An engine published a message; `mark` is that of its payload.
    pub fn published(&mut self, seq: u64, mark: u64, cached: Arc<BTreeSet<BlockHash>>) {
        self.engines.insert((seq, mark), cached);
    }

    /// Highest index applied anywhere.
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
    /// Whether all of `from_us..=until_us` lies within, and touches neither end: what happens in
    /// the same step of the world may come before or after.
    #[must_use]
    pub fn covers(&self, from_us: u64, until_us: u64) -> bool {
        self.from_us < from_us && self.until_us.is_none_or(|end_us| until_us < end_us)
    }
}
