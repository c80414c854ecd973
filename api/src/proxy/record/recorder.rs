//! Recordings of parsed requests, for operators to fetch: the running one, if any, and the last
//! finished ones.
//!
//! A recording holds decision records and the unchanged blocks of each prompt. They are anonymized
//! when the file is fetched. A request therefore costs a lock and a pointer, and nothing without a
//! recording.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use state::ids::BlockHash;
use tokio::time::Instant;

use super::request_record::RequestRecord;

/// Maximum number of recordings kept, including a running one. The oldest goes first.
pub(crate) const RECORDINGS_MAX: usize = 3;

/// A request with the blocks of its prompt.
#[derive(Debug, Clone)]
pub struct TakenRequest {
    /// Record of the request.
    pub record: Arc<RequestRecord>,
    /// Hashes of the prompt's full blocks.
    pub chain: Arc<[BlockHash]>,
}

/// Limits at which a recording ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordingLimits {
    /// Maximum duration, in seconds.
    pub seconds: u32,
    /// Number of requests.
    pub requests: u32,
    /// Maximum size in memory, in bytes.
    pub bytes: u64,
}

/// Reason why a recording ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordingEnd {
    /// Its time was over.
    Seconds,
    /// It had the maximum number of requests.
    Requests,
    /// It had its maximum size.
    Bytes,
    /// An operator ended it.
    Stopped,
}

/// State of a recording at one moment.
#[derive(Debug, Clone)]
pub struct RecordingState {
    /// Number of the recording.
    pub id: u64,
    /// Salt of its block ids.
    pub salt: Arc<str>,
    /// Limits at which it ends.
    pub limits: RecordingLimits,
    /// Start of the recording, in Unix milliseconds.
    pub from_ms: u64,
    /// Time at which the recording ended, or will end at the latest, in Unix milliseconds.
    pub until_ms: u64,
    /// Reason why the recording ended; `None` while it runs.
    pub end: Option<RecordingEnd>,
    /// Number of requests.
    pub requests: usize,
    /// Size in memory, in bytes.
    pub bytes: u64,
}

/// The running recording of a replica and the latest finished ones.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Whether a recording runs.
    is_on: AtomicBool,
    kept: Mutex<KeptRecordings>,
}

#[derive(Debug, Default)]
struct KeptRecordings {
    last_id: u64,
    /// Recordings, the newest last. Only the newest may run.
    all: VecDeque<RunRecording>,
}

#[derive(Debug)]
struct RunRecording {
    state: RecordingState,
    since: Instant,
    taken: Vec<TakenRequest>,
}

impl Recorder {
    /// Starts a recording, which may replace the oldest one.
    ///
    /// # Errors
    /// Returns the state of the running recording.
    pub fn start(
        &self,
        salt: Arc<str>,
        limits: RecordingLimits,
        now_ms: u64,
    ) -> Result<RecordingState, RecordingState> {
        let mut kept = self.present();
        if let Some(running) = kept.running() {
            return Err(running.state.clone());
        }
        if kept.all.len() == RECORDINGS_MAX {
            kept.all.pop_front();
        }
        kept.last_id += 1;
        let state = RecordingState {
            id: kept.last_id,
            salt,
            limits,
            from_ms: now_ms,
            until_ms: now_ms.saturating_add(u64::from(limits.seconds) * 1000),
            end: None,
            requests: 0,
            bytes: 0,
        };
        kept.all.push_back(RunRecording {
            state: state.clone(),
            since: Instant::now(),
            taken: Vec::new(),
        });
        self.is_on.store(true, Relaxed);
        Ok(state)
    }

    /// Whether a recording may be running.
    pub(in crate::proxy) fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Adds a request of `bytes` to the running recording, if any.
    pub(in crate::proxy) fn take(&self, request: TakenRequest, bytes: usize) {
        let mut kept = self.present();
        let Some(running) = kept.running() else {
            return;
        };
        let at_ms = request.record.at_ms;
        running.taken.push(request);
        running.state.requests += 1;
        running.state.bytes += bytes as u64;
        running.fill(at_ms);
        self.follow(&mut kept);
    }

    /// Adds `bytes` to the size of the running recording, if it holds the request.
    pub(in crate::proxy) fn grow(&self, record: &RequestRecord, bytes: usize, now_ms: u64) {
        let mut kept = self.present();
        let Some(running) = kept.running() else {
            return;
        };
        let first = running.taken.first().map(|first| first.record.number);
        if first.is_some_and(|first| first <= record.number) {
            running.state.bytes += bytes as u64;
            running.fill(now_ms);
            self.follow(&mut kept);
        }
    }

    /// Returns all kept recordings, the newest first.
    pub fn list(&self) -> Vec<RecordingState> {
        let kept = self.present();
        kept.all.iter().rev().map(|it| it.state.clone()).collect()
    }

    /// Returns a recording with its requests so far; `None` if it is not kept.
    pub fn get(&self, id: u64) -> Option<(RecordingState, Vec<TakenRequest>)> {
        let kept = self.present();
        let found = kept.all.iter().find(|it| it.state.id == id)?;
        Some((found.state.clone(), found.taken.clone()))
    }

    /// Ends a recording, unless it has ended already, and returns its state; `None` if it is not
    /// kept.
    pub fn stop(&self, id: u64, now_ms: u64) -> Option<RecordingState> {
        let mut kept = self.present();
        let found = kept.all.iter_mut().find(|it| it.state.id == id)?;
        if found.state.end.is_none() {
            found.ends(RecordingEnd::Stopped, now_ms);
        }
        let state = found.state.clone();
        self.follow(&mut kept);
        Some(state)
    }

    /// Ends and removes a recording, and returns its state; `None` if it is not kept.
    pub fn remove(&self, id: u64, now_ms: u64) -> Option<RecordingState> {
        let state = self.stop(id, now_ms)?;
        self.present().all.retain(|it| it.state.id != id);
        Some(state)
    }

    /// Locks the recordings after ending one whose time is over.
    fn present(&self) -> MutexGuard<'_, KeptRecordings> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = kept.running() {
            let limit = Duration::from_secs(running.state.limits.seconds.into());
            if running.since.elapsed() >= limit {
                let until_ms = running.state.until_ms;
                running.ends(RecordingEnd::Seconds, until_ms);
                self.follow(&mut kept);
            }
        }
        kept
    }

    fn follow(&self, kept: &mut KeptRecordings) {
        self.is_on.store(kept.running().is_some(), Relaxed);
    }
}

impl KeptRecordings {
    fn running(&mut self) -> Option<&mut RunRecording> {
        self.all.back_mut().filter(|it| it.state.end.is_none())
    }
}

impl RunRecording {
    /// Ends the recording if it has reached its maximum number of requests or bytes.
    fn fill(&mut self, now_ms: u64) {
        let limits = self.state.limits;
        if self.state.requests as u64 >= u64::from(limits.requests) {
            self.ends(RecordingEnd::Requests, now_ms);
        } else if self.state.bytes >= limits.bytes {
            self.ends(RecordingEnd::Bytes, now_ms);
        }
    }

    fn ends(&mut self, end: RecordingEnd, at_ms: u64) {
        self.state.end = Some(end);
        self.state.until_ms = at_ms.min(self.state.until_ms).max(self.state.from_ms);
    }
}

impl RecordingEnd {
    /// Returns the name of the reason in the admin API and in the file.
    pub fn label(self) -> &'static str {
        match self {
            Self::Seconds => "seconds",
            Self::Requests => "requests",
            Self::Bytes => "bytes",
            Self::Stopped => "stopped",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RecordingLimits = RecordingLimits {
        seconds: 5,
        requests: 10,
        bytes: 1000,
    };

    fn started(recorder: &Recorder) -> u64 {
        recorder.start("s".into(), LIMITS, 1_000).unwrap().id
    }

    fn ends(recorder: &Recorder) -> Vec<(u64, Option<RecordingEnd>)> {
        let all = recorder.list();
        all.iter().map(|it| (it.id, it.end)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_recording_runs_at_a_time_and_ends_by_itself() {
        let recorder = Recorder::default();
        let first = started(&recorder);
        assert!(recorder.is_on());
        let running = recorder.start("t".into(), LIMITS, 1_000).unwrap_err();
        assert_eq!((running.id, running.until_ms), (first, 6_000));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(ends(&recorder), [(1, Some(RecordingEnd::Seconds))]);
        assert!(!recorder.is_on());
        assert_eq!(recorder.get(1).unwrap().0.until_ms, 6_000);
        assert_eq!(started(&recorder), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_recordings_are_dropped_and_ended_ones_stay_ended() {
        let recorder = Recorder::default();
        for id in 1..=4 {
            assert_eq!(started(&recorder), id);
            let stopped = recorder.stop(id, 1_500).unwrap();
            assert_eq!(stopped.end, Some(RecordingEnd::Stopped));
            let again = recorder.stop(id, 9_000).unwrap();
            assert_eq!((stopped.until_ms, again.until_ms), (1_500, 1_500));
        }
        let stopped = Some(RecordingEnd::Stopped);
        assert_eq!(ends(&recorder), [(4, stopped), (3, stopped), (2, stopped)]);
        assert!(recorder.get(1).is_none() && recorder.stop(1, 0).is_none());
        assert!(recorder.remove(3, 2_000).is_some());
        assert_eq!(ends(&recorder), [(4, stopped), (2, stopped)]);
        let running = started(&recorder);
        recorder.remove(running, 2_000).unwrap();
        assert!(!recorder.is_on(), "one that runs ends when it is dropped");
    }
}
