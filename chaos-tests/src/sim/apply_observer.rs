//! Observers that record how the states of replicas change.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use node::app::replica_core::ApplyObserver;
use state::RouterState;
use state::ids::ReplicaId;

use super::node::SimTime;
use super::trace::Trace;
use crate::invariants::sound_state;
use crate::oracle::RunRecord;
use crate::oracle::observation::ReplicaRun;

/// Number of entries after which a state is checked in full again.
const LOOK_THROUGH_EVERY: u64 = 16;
/// Offset of the version in a snapshot, after eight bytes of magic.
const SNAPSHOT_VERSION_AT: usize = 8;

/// The record of a world, and its first error. Clones share both.
#[derive(Clone, Default)]
pub struct RecordKeeper(Arc<Mutex<RecordKeeperInner>>);

#[derive(Default)]
struct RecordKeeperInner {
    record: RunRecord,
    wrong: Option<String>,
    states_checked: u64,
}

impl RecordKeeper {
    fn lock(&self) -> MutexGuard<'_, RecordKeeperInner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `change` with the record, which may read or change it.
    pub fn with<R>(&self, change: impl FnOnce(&mut RunRecord) -> R) -> R {
        change(&mut self.lock().record)
    }

    /// Reports an error. Only the first one is kept.
    pub fn report_error(&self, what: String) {
        self.lock().wrong.get_or_insert(what);
    }

    /// Returns the first error, if any.
    #[must_use]
    pub fn wrong(&self) -> Option<String> {
        self.lock().wrong.clone()
    }

    /// Returns the number of states that were checked in full.
    #[must_use]
    pub fn states_checked(&self) -> u64 {
        self.lock().states_checked
    }
}

/// Observer of the state changes in one run of a replica.
pub(super) struct RunWatcher {
    run: ReplicaRun,
    ledger: RecordKeeper,
    trace: Trace,
    time: SimTime,
    /// Whether the state was corrupted on purpose and is not restored yet.
    is_spoiled: Arc<AtomicBool>,
    /// Whether the first restore reads the run's own snapshot, which may be of a corrupted state.
    restores_own: AtomicBool,
    seen: AtomicU64,
}

impl RunWatcher {
    /// Creates an observer. `is_spoiled` states whether the previous run ended with a corrupted
    /// state, which its snapshot may contain.
    #[must_use]
    pub(super) fn new(
        run: ReplicaRun,
        is_spoiled: bool,
        ledger: RecordKeeper,
        trace: Trace,
        time: SimTime,
    ) -> Self {
        Self {
            run,
            ledger,
            trace,
            time,
            is_spoiled: Arc::new(AtomicBool::new(is_spoiled)),
            restores_own: AtomicBool::new(is_spoiled),
            seen: AtomicU64::new(0),
        }
    }

    /// Returns the flag to set when the state is corrupted on purpose.
    #[must_use]
    pub(super) fn is_spoiled(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_spoiled)
    }

    fn digest(&self, state: &RouterState) -> Option<u128> {
        (!self.is_spoiled.load(Ordering::Relaxed)).then(|| state.digest())
    }

    fn look_through(&self, state: &RouterState) {
        self.ledger.lock().states_checked += 1;
        if let Err(violation) = sound_state::check(self.run, state) {
            self.ledger.report_error(violation.to_string());
        }
    }

    fn replica(&self) -> ReplicaId {
        self.run.replica
    }
}

impl ApplyObserver for RunWatcher {
    fn applied(&self, state: &RouterState, index: u64, command: Option<&[u8]>) {
        self.restores_own.store(false, Ordering::Relaxed);
        let (now_us, digest) = (self.time.now_us(), self.digest(state));
        self.trace.event(
            now_us,
            format_args!(
                "{} applied {index} {:x}",
                self.replica(),
                digest.unwrap_or(0)
            ),
        );
        self.ledger.with(|record| {
            let observation = &mut record.observation;
            observation.applied(now_us, self.run, index, command, digest);
        });
        let seen = self.seen.fetch_add(1, Ordering::Relaxed);
        if seen.is_multiple_of(LOOK_THROUGH_EVERY) {
            self.look_through(state);
        }
    }

    fn restored(&self, state: &RouterState) {
        if !self.restores_own.swap(false, Ordering::Relaxed) {
            self.is_spoiled.store(false, Ordering::Relaxed);
        }
        let (now_us, index) = (self.time.now_us(), state.applied().0);
        let digest = self.digest(state);
        self.trace.event(
            now_us,
            format_args!(
                "{} restored {index} {:x}",
                self.replica(),
                digest.unwrap_or(0)
            ),
        );
        self.ledger.with(|record| {
            let observation = &mut record.observation;
            observation.restored(now_us, self.run, index, digest);
            if let Some(known) = observation.builds.get(&self.replica()) {
                let restored = (self.run, snapshot_version(state), *known);
                observation.snapshots.push(restored);
            }
        });
        self.look_through(state);
    }

    fn message_unreadable(&self, from: u8) {
        let now_us = self.time.now_us();
        self.trace.event(
            now_us,
            format_args!("{} cannot read a message of {from}", self.replica()),
        );
        self.ledger.with(|record| {
            let observation = &mut record.observation;
            observation
                .unreadable
                .push((now_us, self.run, ReplicaId(from)));
        });
    }
}

/// Returns the version in which a state is written as a snapshot.
fn snapshot_version(state: &RouterState) -> u16 {
    let mut bytes = Vec::new();
    let written = state.freeze().write_to(&mut bytes);
    written.expect("writing into memory cannot fail");
    u16::from_le_bytes([bytes[SNAPSHOT_VERSION_AT], bytes[SNAPSHOT_VERSION_AT + 1]])
}
