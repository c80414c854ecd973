//! Runs a [`StateMachine`] under openraft: applies committed entries, takes and restores snapshots.
//!
//! The machine is behind a lock so that a snapshot can be restored on a blocking thread, and frozen
//! again if the first attempt to write one failed. A snapshot is frozen between two entries and
//! written while later entries are applied.
//!
//! A failed snapshot write (the disk is full) stops nothing, since the log still holds all entries;
//! it is retried until it succeeds. Opening one is retried while file descriptors are short.
//!
//! A machine whose state is in doubt installs another replica's state
//! ([`StateMachineAdapter::install_state`]) outside Raft, because its log was never in doubt. The
//! machine is then ahead of what Raft has handed over, and skips the entries that it already has.
//! It takes no snapshot until Raft has caught up, because Raft would purge entries that it has not
//! handed over yet.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::determinism::blocking::BlockingMode;
use crate::determinism::watch;
use crate::error::StartError;
use crate::fault::FatalError;
use crate::files::{damaged, io_error, is_shortage};
use crate::locks::lock;
use crate::machine::{FrozenMachine, StateMachine};
use crate::planted::{self, Bug};
use crate::removed_members::RemovedMembers;
use crate::snapshot::{SnapshotFile, SnapshotFolder, SnapshotReader, SnapshotWriter};
use crate::types::{
    Config, Entry, LogId, Payload, Reply, SnapshotMeta, StoredMembership, public_index,
};
use crate::wire::{self, proto};

/// openraft's handle, with this crate's types and state machine.
pub(crate) type Raft = openraft::Raft<Config, StateMachineAdapter>;

type Snapshot = openraft::Snapshot<crate::types::LeaderId, u64, crate::types::Node, SnapshotFile>;

/// First pause after a failed attempt to write a snapshot; doubles up to the maximum.
const WRITE_AGAIN_FIRST: Duration = Duration::from_millis(500);
const WRITE_AGAIN_MAX: Duration = Duration::from_secs(30);
/// First pause after a failed attempt to open a snapshot; doubles up to the maximum.
const OPEN_AGAIN_FIRST: Duration = Duration::from_millis(50);
const OPEN_AGAIN_MAX: Duration = Duration::from_secs(1);

/// Adapter that presents a state machine and its position in the log to openraft. Clones share
/// both.
#[derive(Clone)]
pub(crate) struct StateMachineAdapter(Arc<AdapterShared>);

struct AdapterShared {
    /// State machine. Lock this before `position` if both are needed.
    machine: Mutex<Box<dyn StateMachine>>,
    position: Mutex<AppliedPosition>,
    folder: SnapshotFolder,
    blocking: BlockingMode,
    fault: FatalError,
    /// Number of command bytes applied since the last snapshot was frozen.
    bytes_since_snapshot: AtomicU64,
    /// Error of the last attempt to write a snapshot; `None` if it succeeded.
    unwritten: watch::WatchSender<Option<String>>,
    /// Attempts to write a snapshot.
    counts: Mutex<SnapshotCounts>,
    /// Whether applying is paused; see [`StateMachineAdapter::pause`].
    is_paused: watch::WatchSender<bool>,
    /// Cancelled when the replica stops.
    stop: CancellationToken,
}

/// Attempts of a replica to write a snapshot, since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotCounts {
    /// Number of snapshots that were written.
    pub written: u64,
    /// Number of attempts that failed; each is repeated.
    pub failed: u64,
    /// Duration of the last successful write; 0 if there was none.
    pub last_took: Duration,
}

/// Guard that pauses applying until it is dropped.
pub(crate) struct PausedApply(Arc<AdapterShared>);

impl Drop for PausedApply {
    fn drop(&mut self) {
        self.0.is_paused.send_replace(false);
    }
}

/// Position of the machine in the log, and the replicated state that belongs to it.
#[derive(Debug, Clone, Default)]
struct AppliedPosition {
    applied: Option<LogId>,
    membership: StoredMembership,
    removed: RemovedMembers,
    has_commands: bool,
    /// Last entry that Raft has handed over or knows from a snapshot; `None` if there is none.
    /// Behind `applied` only after another replica's state was installed.
    handed_over: Option<LogId>,
}

impl AppliedPosition {
    fn is_ahead(&self) -> bool {
        self.applied > self.handed_over
    }
}

/// Reason why another replica's state was not installed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InstallError {
    /// The state is older than the one applied here; the caller must fetch it again.
    #[error("the state ends at index {theirs}, but {ours} is already applied here")]
    Behind { theirs: u64, ours: u64 },
    /// The state cannot be read.
    #[error(transparent)]
    Unreadable(#[from] StartError),
}

impl StateMachineAdapter {
    /// Opens the adapter and restores the newest snapshot. Blocks.
    pub(crate) fn open(
        machine: Box<dyn StateMachine>,
        folder: SnapshotFolder,
        blocking: BlockingMode,
        fault: FatalError,
        stop: CancellationToken,
    ) -> Result<Self, StartError> {
        let adapter = Self(Arc::new(AdapterShared {
            machine: Mutex::new(machine),
            position: Mutex::default(),
            folder,
            blocking,
            fault,
            bytes_since_snapshot: AtomicU64::new(0),
            unwritten: watch::WatchSender::new(None),
            counts: Mutex::default(),
            is_paused: watch::WatchSender::new(false),
            stop,
        }));
        if let Some(file) = adapter.newest()? {
            adapter.restore(&file)?;
        }
        Ok(adapter)
    }

    /// Whether a command was ever applied, before or after the last snapshot.
    pub(crate) fn has_commands(&self) -> bool {
        self.position().has_commands
    }

    /// Whether `store` of replica `id` was a member, and was removed after the entry `asked`.
    pub(crate) fn is_removed_since(&self, id: u64, store: u64, requested_at: LogId) -> bool {
        self.position()
            .removed
            .is_removed_since(id, store, requested_at)
    }

    /// Returns the last applied entry, if there is one.
    pub(crate) fn applied(&self) -> Option<LogId> {
        self.position().applied
    }

    /// Returns the number of command bytes applied since the last snapshot was frozen.
    pub(crate) fn bytes_since_snapshot(&self) -> u64 {
        self.0.bytes_since_snapshot.load(Ordering::Relaxed)
    }

    /// Watches the error of the last attempt to write a snapshot; `None` if it succeeded.
    pub(crate) fn unwritten(&self) -> watch::WatchReceiver<Option<String>> {
        self.0.unwritten.subscribe()
    }

    /// Returns the attempts to write a snapshot since the start.
    pub(crate) fn snapshot_counts(&self) -> SnapshotCounts {
        *lock(&self.0.counts)
    }

    /// Returns the file of the newest snapshot; `None` if there is none, or the folder cannot be
    /// read.
    pub(crate) fn newest_snapshot(&self) -> Option<PathBuf> {
        Some(self.0.folder.newest().ok()??.path)
    }

    /// Returns a new file in which to receive a snapshot.
    pub(crate) fn unfinished_snapshot(&self) -> SnapshotFile {
        self.0.folder.unfinished()
    }

    fn position(&self) -> MutexGuard<'_, AppliedPosition> {
        lock(&self.0.position)
    }

    fn machine(&self) -> MutexGuard<'_, Box<dyn StateMachine>> {
        lock(&self.0.machine)
    }

    /// Replaces the machine's state with that of a snapshot file. Blocks.
    fn restore(&self, file: &SnapshotFile) -> Result<(), StartError> {
        let whole = |_: &AppliedPosition, _: Option<LogId>| Ok(());
        let restored = self.replace(file, whole)?;
        let mut position = self.position();
        // A machine that was ahead of the snapshot stays ahead.
        position.handed_over = position.handed_over.max(restored);
        Ok(())
    }

    /// Pauses applying until the returned guard is dropped, so that this machine does not overtake
    /// a state that is being fetched.
    pub(crate) fn pause(&self) -> PausedApply {
        self.0.is_paused.send_replace(true);
        PausedApply(Arc::clone(&self.0))
    }

    /// Waits until applying is not paused.
    async fn unpaused(&self) {
        if !*self.0.is_paused.borrow() {
            return;
        }
        let mut is_paused = self.0.is_paused.subscribe();
        tokio::select! {
            biased;
            () = self.0.stop.cancelled() => {}
            // The sender lives as long as the adapter.
            _ = is_paused.wait_for(|is_paused| !is_paused) => {}
        }
    }

    /// Replaces the machine's state with that of another replica and returns its index. The file
    /// must reach at least as far as this machine. It becomes the newest snapshot, since the
    /// previous one may contain the replaced state. Blocks, and delays applying.
    pub(crate) fn install_state(&self, file: &SnapshotFile) -> Result<u64, InstallError> {
        let is_far_enough = |position: &AppliedPosition, theirs: Option<LogId>| {
            if theirs >= position.applied || planted::is(Bug::OlderStateTakenOver) {
                return Ok(());
            }
            Err(InstallError::Behind {
                theirs: public_index(theirs.as_ref()),
                ours: public_index(position.applied.as_ref()),
            })
        };
        let last = self.replace(file, is_far_enough)?;
        let adopted = self.0.folder.adopt(&file.path, last);
        adopted.map_err(|error| io_error(&file.path, error))?;
        Ok(public_index(last.as_ref()))
    }

    /// Writes the machine's current state to `file`. Blocks.
    pub(crate) fn write_state(&self, file: &SnapshotFile) -> io::Result<()> {
        let (machine, position) = self.freeze_aside();
        write_file(file, &*machine, &position)
    }

    /// Restores the machine from a file, unless `accept` rejects the last entry that the file
    /// covers. Returns that entry.
    fn replace<E: From<StartError>>(
        &self,
        file: &SnapshotFile,
        accept: impl FnOnce(&AppliedPosition, Option<LogId>) -> Result<(), E>,
    ) -> Result<Option<LogId>, E> {
        let (mut reader, mut head) = SnapshotReader::open(file)?;
        let has_commands = head.has_commands;
        let removed = RemovedMembers::from_wire(std::mem::take(&mut head.removals));
        let meta = SnapshotMeta::try_from(head)
            .map_err(|error| damaged(&file.path, 0, error.to_string()))?;
        // Hold the lock until the position is updated: a snapshot may be frozen at any time.
        let mut machine = self.machine();
        accept(&self.position(), meta.last_log_id)?;
        if let Err(error) = machine.restore(&mut reader) {
            return Err(match reader.damage() {
                Some(damage) => damaged(&file.path, damage.offset, damage.what.clone()),
                None => damaged(&file.path, 0, error.to_string()),
            }
            .into());
        }
        reader
            .check_rest()
            .map_err(|error| reader.start_error(&error))?;
        let mut position = self.position();
        position.applied = meta.last_log_id;
        position.membership = meta.last_membership;
        position.removed = removed;
        position.has_commands = has_commands;
        self.0.bytes_since_snapshot.store(0, Ordering::Relaxed);
        Ok(meta.last_log_id)
    }

    fn apply_entry(&self, entry: &Entry) -> io::Result<Reply> {
        // Public indexes start at 1.
        let index = entry.log_id.index + 1;
        let mut machine = self.machine();
        let mut position = self.position();
        position.handed_over = Some(entry.log_id);
        if position.applied >= Some(entry.log_id) {
            // Already part of an installed state. A replica that installs one does not lead, so no
            // one waits for the reply.
            return Ok(Reply::default());
        }
        let reply = match &entry.payload {
            Payload::Blank => {
                machine.skip(index);
                Reply::default()
            }
            Payload::Normal(command) => {
                let reply = machine.apply(index, &command.0).map_err(|stop| {
                    self.0
                        .fault
                        .set(format!("machine stopped at log index {index}: {stop}"));
                    io::Error::other(stop)
                })?;
                position.has_commands = true;
                let bytes = command.0.len() as u64;
                self.0
                    .bytes_since_snapshot
                    .fetch_add(bytes, Ordering::Relaxed);
                Reply(reply)
            }
            Payload::Membership(membership) => {
                let before = position.membership.membership().clone();
                position.removed.note(&before, membership, entry.log_id);
                position.membership = StoredMembership::new(Some(entry.log_id), membership.clone());
                machine.skip(index);
                Reply::default()
            }
        };
        position.applied = Some(entry.log_id);
        Ok(reply)
    }

    /// Freezes the machine for a snapshot. Returns `None` while the machine is ahead of Raft.
    fn freeze(&self) -> Option<FrozenSnapshot> {
        let machine = self.machine();
        let position = self.position();
        if position.is_ahead() {
            return None;
        }
        self.0.bytes_since_snapshot.store(0, Ordering::Relaxed);
        Some((machine.freeze(), position.clone()))
    }

    /// Freezes the machine for another replica or for reading, even while it is ahead of Raft.
    fn freeze_aside(&self) -> FrozenSnapshot {
        let machine = self.machine();
        let position = self.position();
        (machine.freeze(), position.clone())
    }

    /// Runs `work` on snapshot files. Retries it while file descriptors or disk space are short.
    async fn retry_on_shortage<T: Send + 'static>(
        &self,
        work: impl Fn(&Self) -> Result<T, StartError> + Clone + Send + 'static,
    ) -> io::Result<T> {
        let mut backoff = Backoff::new(OPEN_AGAIN_FIRST, OPEN_AGAIN_MAX);
        loop {
            let (adapter, work) = (self.clone(), work.clone());
            let error = match self.0.blocking.run(move || work(&adapter)).await? {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let is_short = matches!(&error, StartError::Io { source, .. } if is_shortage(source));
            if !is_short || self.0.stop.is_cancelled() {
                return Err(io::Error::other(error));
            }
            tracing::warn!(%error, again_in = ?backoff.next(), "snapshot cannot be used yet");
            backoff.pause(&self.0.stop).await;
        }
    }

    fn newest(&self) -> Result<Option<SnapshotFile>, StartError> {
        let newest = self.0.folder.newest();
        newest.map_err(|error| io_error(Path::new("snapshots"), error))
    }

    fn current(&self) -> Result<Option<Snapshot>, StartError> {
        let Some(mut file) = self.newest()? else {
            return Ok(None);
        };
        let (_, head) = loop {
            match SnapshotReader::open(&file) {
                // A newer snapshot has just replaced it.
                Err(error) if is_gone(&error) => match self.newest()? {
                    Some(newer) if newer.path != file.path => file = newer,
                    Some(_) | None => return Err(error),
                },
                opened => break opened?,
            }
        };
        let meta = SnapshotMeta::try_from(head)
            .map_err(|error| damaged(&file.path, 0, error.to_string()))?;
        Ok(Some(Snapshot {
            meta,
            snapshot: file,
        }))
    }
}

fn is_gone(error: &StartError) -> bool {
    matches!(error, StartError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

type FrozenSnapshot = (Box<dyn FrozenMachine>, AppliedPosition);

/// Builder of a snapshot from a frozen state. If writing fails, a retry writes a newer one.
pub(crate) struct SnapshotBuilder {
    adapter: StateMachineAdapter,
    /// State to write. Locked only because openraft requires builders to be `Sync`.
    frozen: Mutex<Option<FrozenSnapshot>>,
}

impl RaftSnapshotBuilder<Config> for SnapshotBuilder {
    type SnapshotData = SnapshotFile;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let mut frozen = self
            .frozen
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut backoff = Backoff::new(WRITE_AGAIN_FIRST, WRITE_AGAIN_MAX);
        loop {
            let (adapter, now) = (self.adapter.clone(), frozen.take());
            let began = tokio::time::Instant::now();
            let blocking = adapter.0.blocking;
            let built = blocking.try_run(move || {
                // Not kept during a pause: a frozen state costs memory as the machine continues.
                let Some((machine, position)) = now.or_else(|| adapter.freeze()) else {
                    return Err(io::Error::other(
                        "the machine is ahead of the log handed over",
                    ));
                };
                write(&adapter.0.folder, &*machine, &position)
            });
            let error = match built.await {
                Ok(snapshot) => {
                    let mut counts = lock(&self.adapter.0.counts);
                    counts.written += 1;
                    counts.last_took = began.elapsed();
                    drop(counts);
                    self.adapter.0.unwritten.send_replace(None);
                    return Ok(snapshot);
                }
                Err(error) => error,
            };
            lock(&self.adapter.0.counts).failed += 1;
            tracing::error!(%error, again_in = ?backoff.next(), "snapshot not written");
            self.adapter
                .0
                .unwritten
                .send_replace(Some(error.to_string()));
            backoff.pause(&self.adapter.0.stop).await;
            if self.adapter.0.stop.is_cancelled() || self.adapter.0.fault.get().is_some() {
                return Err(error);
            }
        }
    }
}

fn write(
    folder: &SnapshotFolder,
    machine: &dyn FrozenMachine,
    position: &AppliedPosition,
) -> io::Result<Snapshot> {
    let meta = SnapshotMeta {
        last_log_id: position.applied,
        last_membership: position.membership.clone(),
    };
    let file = folder.unfinished();
    let written = write_file(&file, machine, position);
    let snapshot = written.and_then(|()| folder.adopt(&file.path, meta.last_log_id))?;
    Ok(Snapshot { meta, snapshot })
}

/// Writes a frozen state to `file`, completely or not at all.
fn write_file(
    file: &SnapshotFile,
    machine: &dyn FrozenMachine,
    position: &AppliedPosition,
) -> io::Result<()> {
    let meta = SnapshotMeta {
        last_log_id: position.applied,
        last_membership: position.membership.clone(),
    };
    let head: proto::SnapshotMeta =
        wire::snapshot_meta(&meta, position.has_commands, position.removed.to_wire());
    let written = SnapshotWriter::create(file, &head).and_then(|mut writer| {
        machine.write_to(&mut writer)?;
        writer.finish()
    });
    if written.is_err() {
        // A partial file would occupy the space that the next attempt needs.
        file.remove();
    }
    written
}

impl RaftStateMachine<Config> for StateMachineAdapter {
    type SnapshotData = SnapshotFile;
    type SnapshotBuilder = SnapshotBuilder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        let position = self.position();
        Ok((position.applied, position.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<Config>>> + Unpin + Send,
    {
        while let Some(item) = entries.next().await {
            let (entry, responder) =
                item.inspect_err(|error| self.0.fault.set(format!("log: {error}")))?;
            self.unpaused().await;
            let reply = self.apply_entry(&entry)?;
            if let Some(responder) = responder {
                responder.send(reply);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder {
        SnapshotBuilder {
            adapter: self.clone(),
            frozen: Mutex::new(self.freeze()),
        }
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: SnapshotFile,
    ) -> io::Result<()> {
        let last = meta.last_log_id;
        let installed = async {
            // The file is complete and synced. It is renamed once the machine has restored it.
            let file = snapshot.clone();
            self.retry_on_shortage(move |adapter| adapter.restore(&file))
                .await?;
            if planted::is(Bug::SnapshotNotAdopted) {
                return Ok(());
            }
            self.retry_on_shortage(move |adapter| {
                let adopted = adapter.0.folder.adopt(&snapshot.path, last);
                adopted
                    .map(drop)
                    .map_err(|error| io_error(&snapshot.path, error))
            })
            .await
        };
        let installed: io::Result<()> = installed.await;
        installed.inspect_err(|error| self.0.fault.set(format!("snapshot: {error}")))?;
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        self.retry_on_shortage(Self::current).await
    }
}
