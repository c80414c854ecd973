//! A publisher's stream as its reader follows it: which messages count, what is missing, and when
//! the engine restarted. Pure: messages and ends of replays go in, [`StreamEffect`]s come out.
//!
//! Each run of an engine numbers its messages from 0, and an engine repeats the last ten thousand
//! on request. Rules:
//!
//! - The next number is reported. A message reported before is dropped. If one is missing, a replay
//!   is requested from the last reported one on, and messages that arrive meanwhile are held.
//! - A replay begins with the last message reported. If that number now has another message, or the
//!   replay ends before it, the engine has restarted, and the new run is reported from its
//!   beginning.
//! - A ROUTER socket drops what exceeds its queue, so a replay may lack any message but its first
//!   ones, and even its end marker. A hole is requested again for as long as each replay brings a
//!   new message. A replay that ended after a new message is followed by another, because the engine
//!   may have dropped the rest, unless the subscription has come that far.
//! - Messages that the engine no longer repeats are lost: the first one of a replay is later than
//!   the one requested, or a replay does not bring the first missing one. The next message reports
//!   the loss, and the state is incomplete from there on.
//! - A connection may break without a trace, and a publisher drops what a slow subscriber does not
//!   fetch. The newest number is therefore requested after each connect and after each period of
//!   silence.

mod blocks;
mod replay;
#[cfg(test)]
mod replay_tests;
#[cfg(test)]
mod tests;

use schemars::JsonSchema;
use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use state::ids::{BlockHash, EngineHash};
use state::kv_events::{KvMessage, KvPosition, KvRejection, KvUncertainty, KvUpdate};
use xxhash_rust::xxh3::xxh3_64;

pub use blocks::HashIdentity;
use blocks::{PublishedBlocks, UnusableEventsError};
use replay::ReplayReach;

use crate::engines::kv_transport::wire;

/// Number of messages before the last reported one that the first replay also requests. They show
/// which groups of layers exist.
const RECALL_MESSAGES: u64 = 64;
/// Maximum number of marks of reported messages to remember.
const MARKS_MAX: usize = 256;
/// Maximum size of messages held during a replay, in bytes. Messages beyond it are dropped and
/// replayed.
const HELD_BYTES_MAX: usize = 16 << 20;

/// An action requested by the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEffect {
    /// Report news about a run of this publisher to the cluster.
    Tell {
        /// Run of the publisher.
        publisher: u64,
        /// News of the run.
        news: KvUpdate,
    },
    /// Request all messages from number `from` on. Each goes to [`EventStream::replayed`], and the
    /// end to [`EventStream::replay_ended`] or [`EventStream::replay_failed`]. A replay in progress
    /// is abandoned.
    Replay {
        /// First number to replay.
        from: u64,
    },
}

/// Environment of a call to the stream.
pub struct StreamContext<'a> {
    /// Unix time in milliseconds; used to number runs.
    pub now_ms: u64,
    /// Returns the router's hash of a block that the replicated state knows.
    pub known: &'a dyn Fn(EngineHash) -> Option<BlockHash>,
}

/// Counters of a stream, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, JsonSchema)]
pub struct StreamCounts {
    /// Messages reported.
    pub messages: u64,
    /// Blocks reported as stored, copies included.
    pub stored: u64,
    /// Blocks reported as removed, copies included.
    pub removed: u64,
    /// Messages received again.
    pub repeats: u64,
    /// Number of times that messages were missing.
    pub gaps: u64,
    /// Number of times that missing messages could not be recovered.
    pub losses: u64,
    /// Number of engine runs that the reader began to follow; a continued run does not count.
    pub runs: u64,
    /// Number of replays requested.
    pub replays: u64,
    /// Blocks whose hash cannot be computed from a prompt: with media, with adapters known only by
    /// number, or from malformed events.
    pub foreign: u64,
    /// Blocks whose parent was unknown.
    pub orphans: u64,
}

/// The run of the publisher that is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PublisherRun {
    publisher: u64,
    /// Number and mark of the last message reported; `None` before the first.
    last: Option<(u64, u64)>,
}

impl PublisherRun {
    fn next(&self) -> u64 {
        self.last.map_or(0, |(seq, _)| seq.saturating_add(1))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamPhase {
    /// The subscription is not established.
    Detached,
    /// A replay is in progress or due.
    Replaying {
        reach: ReplayReach,
        /// Number of attempts at the replay that failed since the last new message.
        attempts: u32,
    },
    /// The stream is up to date, as far as is known.
    Following,
}

/// The stream of one publisher, as its reader follows it.
pub struct EventStream {
    has_replay: bool,
    /// Greatest run number so far.
    newest_run: u64,
    run: Option<PublisherRun>,
    phase: StreamPhase,
    held: BTreeMap<u64, Bytes>,
    held_bytes: usize,
    /// Newest message of this subscription, also if there was no room to hold it.
    newest_live: Option<u64>,
    /// Whether the subscription has lasted since the stream was last up to date, so that the engine
    /// has not restarted.
    is_attached: bool,
    marks: VecDeque<(u64, u64)>,
    /// First missing message when a hole was last requested.
    missing: Option<u64>,
    blocks: PublishedBlocks,
    /// Why newer messages may exist; `None` if nothing is missing. A stream begins in doubt.
    doubt: Option<KvUncertainty>,
    /// Why this run cannot be used; `None` if it can.
    refusal: Option<KvRejection>,
    counts: StreamCounts,
    effects: Vec<StreamEffect>,
}

impl EventStream {
    /// Creates a stream that continues from `position`, or from the beginning if nothing was
    /// reported for this publisher. `has_replay` is whether the engine can repeat messages.
    #[must_use]
    pub fn new(identity: HashIdentity, has_replay: bool, position: Option<KvPosition>) -> Self {
        let run = position.map(|position| PublisherRun {
            publisher: position.publisher,
            last: position.last,
        });
        Self {
            has_replay,
            newest_run: run.map_or(0, |run| run.publisher),
            run,
            phase: StreamPhase::Detached,
            held: BTreeMap::new(),
            held_bytes: 0,
            newest_live: None,
            is_attached: false,
            marks: run.and_then(|run| run.last).into_iter().collect(),
            missing: None,
            blocks: PublishedBlocks::new(identity),
            doubt: Some(KvUncertainty::Handover),
            refusal: None,
            counts: StreamCounts::default(),
            effects: Vec::new(),
        }
    }

    /// Creates a stream whose first run is later than `publisher`, whatever was reported for that
    /// run.
    #[must_use]
    pub fn anew(identity: HashIdentity, has_replay: bool, publisher: u64) -> Self {
        let mut stream = Self::new(identity, has_replay, None);
        stream.newest_run = publisher;
        stream
    }

    /// Continues from these counters.
    #[must_use]
    pub fn with_counts(self, counts: StreamCounts) -> Self {
        Self { counts, ..self }
    }

    /// Returns the counters of the stream.
    #[must_use]
    pub fn counts(&self) -> StreamCounts {
        self.counts
    }

    /// Returns the followed run and the number of its last reported message, as far as there are
    /// any.
    #[must_use]
    pub fn told(&self) -> Option<(u64, Option<u64>)> {
        let run = self.run?;
        Some((run.publisher, run.last.map(|(seq, _)| seq)))
    }

    /// Whether the stream is up to date, as far as is known.
    #[must_use]
    pub fn is_following(&self) -> bool {
        self.phase == StreamPhase::Following
    }

    /// Whether messages newer than the reported ones may exist.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.doubt.is_some()
    }

    /// Whether the run cannot be used. If so, nothing more is reported for it.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.refusal.is_some()
    }

    /// Takes the pending effects, in order.
    pub fn take_effects(&mut self) -> Vec<StreamEffect> {
        std::mem::take(&mut self.effects)
    }

    /// Handles an established subscription.
    pub fn connected(&mut self) {
        self.drop_held();
        self.missing = None;
        if self.has_replay {
            self.ask(RECALL_MESSAGES);
        } else {
            self.phase = StreamPhase::Following;
        }
    }

    /// Handles a broken subscription.
    pub fn disconnected(&mut self) {
        self.drop_held();
        self.phase = StreamPhase::Detached;
        self.doubt(KvUncertainty::Unreachable);
    }

    /// Requests the newest message number after a period of silence, or because the cluster doubts
    /// the stream (`is_in_doubt`). If no messages are missing, this doubt is then ended.
    pub fn check(&mut self, is_in_doubt: bool) {
        if is_in_doubt && self.doubt.is_none() {
            self.doubt = Some(KvUncertainty::Handover);
        }
        if self.phase == StreamPhase::Following && self.has_replay {
            self.ask(0);
        }
    }

    /// Repeats the doubt because the cluster considers the state exact: a reader's task was
    /// restarted, or another reader's report arrived late.
    pub fn object(&mut self) {
        if let Some(doubt) = self.doubt {
            self.tell(KvUpdate::Doubt(doubt));
        }
    }

    /// Handles a report that was not accepted: the stream is in doubt until it has caught up.
    /// Returns whether this needs to be reported.
    pub fn fall_behind(&mut self) -> bool {
        let is_news = self.doubt.is_none() && self.run.is_some();
        self.doubt = self.doubt.or(Some(KvUncertainty::Behind));
        is_news
    }

    /// Handles a message from the subscription.
    pub fn live(&mut self, seq: u64, payload: Bytes, around: &StreamContext<'_>) {
        self.newest_live = self.newest_live.max(Some(seq));
        match self.phase {
            StreamPhase::Detached => {}
            StreamPhase::Replaying { .. } => self.hold(seq, payload),
            StreamPhase::Following => self.follow(seq, payload, around),
        }
    }

    fn follow(&mut self, seq: u64, payload: Bytes, around: &StreamContext<'_>) {
        let mark = xxh3_64(&payload);
        let Some(run) = self.run else {
            // This happens only without replays: other streams know their run before they follow.
            self.begin(seq, mark, &payload, around);
            self.confirm();
            return;
        };
        let next = run.next();
        if seq == next {
            self.tell_message(seq, mark, &payload, false, around);
            if !self.has_replay {
                self.confirm();
            }
        } else if seq < next && self.marks.contains(&(seq, mark)) {
            self.counts.repeats += 1;
        } else if self.has_replay && seq < next {
            // The engine may have restarted.
            self.doubt(KvUncertainty::Gap);
            self.hold(seq, payload);
            self.ask(0);
        } else if self.has_replay {
            if self.ask_for_missing() {
                self.hold(seq, payload);
            } else {
                self.tell_message(seq, mark, &payload, true, around);
            }
        } else if seq > next || seq == 0 || self.is_another(seq, mark) {
            self.counts.gaps += 1;
            self.begin(seq, mark, &payload, around);
            self.confirm();
        } else {
            self.counts.repeats += 1;
        }
    }

    /// Whether a message other than that of `mark` was reported under the number `seq`.
    fn is_another(&self, seq: u64, mark: u64) -> bool {
        let told = self.marks.iter().find(|(told, _)| *told == seq);
        told.is_some_and(|(_, told)| *told != mark)
    }

    fn hold(&mut self, seq: u64, payload: Bytes) {
        if self.held_bytes + payload.len() <= HELD_BYTES_MAX {
            self.held_bytes += payload.len();
            if let Some(before) = self.held.insert(seq, payload) {
                self.held_bytes -= before.len();
            }
        }
    }

    fn drop_held(&mut self) {
        self.held.clear();
        self.held_bytes = 0;
        self.newest_live = None;
        self.is_attached = false;
    }

    /// Drops the held messages that a replay of the followed run has repeated.
    fn drop_repeated(&mut self) {
        let next = self.next();
        while let Some(first) = self.held.first_entry().filter(|it| *it.key() < next) {
            self.held_bytes -= first.remove().len();
            self.counts.repeats += 1;
        }
    }

    /// Follows the subscription from the held messages on. If it brought a message for which there
    /// was no room, requests it.
    fn follow_held(&mut self, around: &StreamContext<'_>) {
        self.phase = StreamPhase::Following;
        self.is_attached = true;
        self.drop_repeated();
        for (seq, payload) in std::mem::take(&mut self.held) {
            self.held_bytes -= payload.len();
            self.live(seq, payload, around);
        }
        let is_behind = self.newest_live >= Some(self.next());
        if !(self.phase == StreamPhase::Following && is_behind && self.ask_for_missing()) {
            self.confirm();
        }
    }

    /// Starts a run whose first available message is `seq`.
    fn begin(&mut self, seq: u64, mark: u64, payload: &Bytes, around: &StreamContext<'_>) {
        self.begin_run(around);
        if seq == 0 {
            self.tell(KvUpdate::Begin);
        }
        self.tell_message(seq, mark, payload, seq > 0, around);
    }

    fn begin_empty(&mut self, around: &StreamContext<'_>) {
        self.begin_run(around);
        self.tell(KvUpdate::Begin);
    }

    fn begin_run(&mut self, around: &StreamContext<'_>) {
        let publisher = around.now_ms.max(self.newest_run.saturating_add(1));
        self.newest_run = publisher;
        self.run = Some(PublisherRun {
            publisher,
            last: None,
        });
        self.marks.clear();
        self.missing = None;
        self.blocks.forget();
        self.refusal = None;
        // A run counts as caught up only once that fact is reported.
        self.doubt = Some(KvUncertainty::Gap);
        self.counts.runs += 1;
    }

    fn tell_message(
        &mut self,
        seq: u64,
        mark: u64,
        payload: &Bytes,
        is_after_loss: bool,
        around: &StreamContext<'_>,
    ) {
        if is_after_loss {
            self.counts.losses += 1;
            self.blocks.forget();
        }
        if let Some(run) = &mut self.run {
            run.last = Some((seq, mark));
        }
        if self.marks.len() >= MARKS_MAX {
            self.marks.pop_front();
        }
        self.marks.push_back((seq, mark));
        if self.refusal.is_some() {
            return;
        }
        let converted = wire::decode(payload)
            .map_err(|_| UnusableEventsError(KvRejection::Unreadable))
            .and_then(|payload| {
                self.blocks
                    .convert(payload.events, around, &mut self.counts)
            });
        let parts = match converted {
            Ok(parts) => parts,
            Err(UnusableEventsError(why)) => {
                self.refusal = Some(why);
                self.tell(KvUpdate::Refuse(why));
                return;
            }
        };
        self.counts.messages += 1;
        let last = parts.len() - 1;
        for (part, events) in parts.into_iter().enumerate() {
            self.tell(KvUpdate::Message(KvMessage {
                seq,
                mark,
                part: u16::try_from(part).expect("a bounded message has few parts"),
                is_last: part == last,
                is_after_loss: is_after_loss && part == 0,
                events,
            }));
        }
    }

    fn doubt(&mut self, why: KvUncertainty) {
        if self.doubt.is_none() && self.run.is_some() {
            self.doubt = Some(why);
            self.tell(KvUpdate::Doubt(why));
        }
    }

    /// Ends the doubt if nothing is missing.
    fn confirm(&mut self) {
        if self.phase == StreamPhase::Following
            && self.refusal.is_none()
            && let Some(run) = self.run
            && self.doubt.take().is_some()
        {
            let seq = run.last.map(|(seq, _)| seq);
            self.tell(KvUpdate::Current { seq });
        }
    }

    fn tell(&mut self, news: KvUpdate) {
        if let Some(run) = self.run {
            let publisher = run.publisher;
            self.effects.push(StreamEffect::Tell { publisher, news });
        }
    }
}
