//! Replays of a stream: what a replay has shown, and when another one is requested.

use bytes::Bytes;
use state::kv_events::KvUncertainty;
use xxhash_rust::xxh3::xxh3_64;

use super::{EventStream, StreamContext, StreamEffect, StreamPhase};

/// Number of consecutive failed replays after which their messages count as lost.
pub(super) const REPLAY_ATTEMPTS_MAX: u32 = 5;

impl EventStream {
    /// Handles a message from a replay.
    pub fn replayed(&mut self, seq: u64, payload: &Bytes, around: &StreamContext<'_>) {
        let StreamPhase::Replaying { is_verified, .. } = self.phase else {
            return;
        };
        let mark = xxh3_64(payload);
        let Some(run) = self.run else {
            self.begin(seq, mark, payload, around);
            return;
        };
        let Some((last, last_mark)) = run.last else {
            match seq {
                0 => self.tell_message(seq, mark, payload, false, around),
                _ => self.begin(seq, mark, payload, around),
            }
            self.verified();
            return;
        };
        if seq <= last {
            if self.is_another(seq, mark) || (seq == last && mark != last_mark) {
                self.start_over();
            } else {
                self.blocks.learn_groups(payload);
                if seq == last {
                    self.verified();
                }
            }
        } else if !is_verified {
            // The engine only repeats later messages, so they cannot be matched to this run.
            self.begin(seq, mark, payload, around);
        } else {
            let is_after_loss = seq > run.next();
            self.tell_message(seq, mark, payload, is_after_loss, around);
        }
    }

    /// Handles the end of a replay.
    pub fn replay_ended(&mut self, around: &StreamContext<'_>) {
        let StreamPhase::Replaying { is_verified, .. } = self.phase else {
            return;
        };
        match self.run {
            None => self.begin_empty(around),
            Some(_) if !is_verified => {
                self.start_over();
                return;
            }
            Some(_) => {}
        }
        self.phase = StreamPhase::Following;
        self.release_held(around);
        self.confirm();
    }

    /// Handles a failed replay by requesting another one. The caller waits longer each time.
    pub fn replay_failed(&mut self, around: &StreamContext<'_>) {
        let StreamPhase::Replaying { attempts, .. } = self.phase else {
            return;
        };
        let attempts = attempts + 1;
        if attempts >= REPLAY_ATTEMPTS_MAX {
            self.doubt(KvUncertainty::Unreachable);
            if let Some((seq, payload)) = self.held.pop_first() {
                self.held_bytes -= payload.len();
                self.begin(seq, xxh3_64(&payload), &payload, around);
                self.phase = StreamPhase::Following;
                self.release_held(around);
                self.confirm();
                return;
            }
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
            is_verified: last.is_none(),
            attempts: 0,
        };
        self.counts.replays += 1;
        self.effects.push(StreamEffect::Replay { from });
    }

    pub(super) fn verified(&mut self) {
        if let StreamPhase::Replaying { is_verified, .. } = &mut self.phase {
            *is_verified = true;
        }
    }

    /// Starts over after a restart of the engine: held messages may be from either run.
    fn start_over(&mut self) {
        self.drop_held();
        self.run = None;
        self.marks.clear();
        self.ask(0);
    }
}
