//! Replays of a stream: what a replay has shown, and when another one is requested.

use bytes::Bytes;
use state::kv_events::KvUncertainty;
use xxhash_rust::xxh3::xxh3_64;

use super::{EventStream, StreamContext, StreamEffect, StreamPhase};

/// Number of consecutive failed replays without a new message after which the missing ones count as
/// lost.
pub(super) const REPLAY_ATTEMPTS_MAX: u32 = 5;

/// How far a replay has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReplayReach {
    /// It has brought nothing.
    Nothing,
    /// It has repeated messages before the last one reported.
    Earlier,
    /// It has repeated the last one, or none was reported.
    Last,
    /// It has brought new messages.
    New,
}

impl EventStream {
    /// Handles a message from a replay.
    pub fn replayed(&mut self, seq: u64, payload: &Bytes, around: &StreamContext<'_>) {
        let StreamPhase::Replaying { reach, attempts } = self.phase else {
            return;
        };
        let (mark, next) = (xxh3_64(payload), self.next());
        if seq < next {
            if self.is_another(seq, mark) {
                self.start_over();
                return;
            }
            self.blocks.learn_groups(payload);
            let reach = reach.max(match seq.saturating_add(1) == next {
                true => ReplayReach::Last,
                false => ReplayReach::Earlier,
            });
            self.phase = StreamPhase::Replaying { reach, attempts };
            return;
        }
        let has_last = self.run.is_some_and(|run| run.last.is_some());
        let is_same_run = self.run.is_some() && reach >= ReplayReach::Last;
        if is_same_run && seq == next {
            self.tell_message(seq, mark, payload, false, around);
        } else if has_last && reach > ReplayReach::Nothing && self.ask_for_missing() {
            return;
        } else if has_last && is_same_run {
            self.tell_message(seq, mark, payload, true, around);
        } else {
            // The engine repeats only later messages, so they cannot be matched to this run.
            self.begin(seq, mark, payload, around);
        }
        self.drop_repeated();
        self.phase = StreamPhase::Replaying {
            reach: ReplayReach::New,
            attempts: 0,
        };
    }

    /// Handles the end of a replay.
    pub fn replay_ended(&mut self, around: &StreamContext<'_>) {
        let StreamPhase::Replaying { reach, .. } = self.phase else {
            return;
        };
        match self.run {
            None => self.begin_empty(around),
            Some(_) if reach < ReplayReach::Last => {
                self.start_over();
                return;
            }
            Some(_) if reach == ReplayReach::New && !self.has_live_joined() => {
                self.ask(0);
                return;
            }
            Some(_) => {}
        }
        self.follow_held(around);
    }

    /// Handles a failed replay by requesting another one. The caller waits longer each time.
    pub fn replay_failed(&mut self, around: &StreamContext<'_>) {
        let StreamPhase::Replaying { reach, attempts } = self.phase else {
            return;
        };
        let is_same_run = self.run.is_some() && (self.is_attached || reach >= ReplayReach::Last);
        if is_same_run {
            self.drop_repeated();
            if self.held.contains_key(&self.next()) {
                // The subscription continues where the reports stopped.
                self.follow_held(around);
                return;
            }
        }
        let attempts = attempts + 1;
        if attempts >= REPLAY_ATTEMPTS_MAX || !self.held.is_empty() {
            self.doubt(KvUncertainty::Unreachable);
        }
        if attempts >= REPLAY_ATTEMPTS_MAX
            && let Some((seq, payload)) = self.held.pop_first()
        {
            self.held_bytes -= payload.len();
            self.begin(seq, xxh3_64(&payload), &payload, around);
            self.follow_held(around);
            return;
        }
        self.ask(0);
        if let StreamPhase::Replaying {
            attempts: tried, ..
        } = &mut self.phase
        {
            *tried = attempts;
        }
    }

    pub(super) fn ask(&mut self, recall: u64) {
        let last = self.run.and_then(|run| run.last);
        let from = last.map_or(0, |(seq, _)| seq.saturating_sub(recall));
        self.phase = StreamPhase::Replaying {
            reach: match last {
                Some(_) => ReplayReach::Nothing,
                None => ReplayReach::Last,
            },
            attempts: 0,
        };
        self.counts.replays += 1;
        self.effects.push(StreamEffect::Replay { from });
    }

    /// Requests the missing messages behind the last one reported. Returns false if they were
    /// requested before and not one came: they are lost.
    pub(super) fn ask_for_missing(&mut self) -> bool {
        let next = self.next();
        if self.missing.replace(next) == Some(next) {
            return false;
        }
        self.counts.gaps += 1;
        self.doubt(KvUncertainty::Gap);
        self.ask(0);
        true
    }

    /// Whether the subscription has come as far as the reports.
    fn has_live_joined(&self) -> bool {
        let newest = self.newest_live;
        newest.is_some_and(|seq| seq.saturating_add(1) >= self.next())
    }

    /// Returns the number of the first message that was not reported.
    pub(super) fn next(&self) -> u64 {
        self.run.map_or(0, |run| run.next())
    }

    /// Starts over after a restart of the engine: held messages may be from either run.
    fn start_over(&mut self) {
        self.drop_held();
        self.run = None;
        self.marks.clear();
        self.ask(0);
    }
}
