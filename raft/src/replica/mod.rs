//! A running replica: its parts, how it starts and how it stops.

mod formation;
mod leader_contact;
mod leadership;
mod maintenance;
mod member_info;
mod member_removal;
mod membership_change;
mod peer_discovery;
pub(crate) mod peers;
mod promotion;
mod propose;
mod rebuild;
mod removal_check;
#[cfg(test)]
mod tests;
mod timers;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use openraft::async_runtime::WatchReceiver;
use openraft::{Config as RaftConfig, SnapshotPolicy};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::leader_contact::LeaderContact;
use self::peer_discovery::PeerDiscovery;
#[cfg(feature = "fuzzing")]
pub use self::peers::forged_calls;
use crate::adapter::{Raft, SnapshotCounts, StateMachineAdapter};
use crate::determinism::blocking::BlockingMode;
use crate::determinism::watch;
use crate::error::StartError;
use crate::fault::FatalError;
use crate::files::{StoreLock, damaged, io_error};
use crate::identity::ReplicaIdentity;
use crate::locks::lock;
use crate::log::{LogStore, SyncTimes};
use crate::log_throttle::LogThrottle;
use crate::machine::{CheckCommand, PeerHandler, StateMachine};
use crate::net::snapshot_stream::SnapshotInstalls;
use crate::net::{Network, PeerLinks, Transport};
use crate::options::{Formation, Peers, ReplicaOptions};
use crate::snapshot::SnapshotFolder;
use crate::status::{Role, Status};
use crate::types::{self, Metrics, public_index};

/// Timeout for tasks and connections to end when a replica stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Handle to a running replica, cheap to clone. The replica runs until it is shut down, even if all
/// handles are dropped.
#[derive(Clone)]
pub struct Replica {
    inner: Arc<ReplicaInner>,
}

/// State that a replica's tasks share.
pub(crate) struct ReplicaInner {
    pub(crate) options: ReplicaOptions,
    pub(crate) blocking: BlockingMode,
    pub(crate) raft: Raft,
    pub(crate) log: LogStore,
    pub(crate) machine: StateMachineAdapter,
    pub(crate) links: Arc<PeerLinks>,
    pub(crate) fault: FatalError,
    pub(crate) heard: LeaderContact,
    pub(crate) handler: Arc<dyn PeerHandler>,
    check: CheckCommand,
    pub(crate) status: watch::WatchSender<Status>,
    /// Whether this replica leads and hears from a quorum.
    pub(crate) has_quorum: watch::WatchSender<bool>,
    /// Whether the machine's state may be wrong; see [`Replica::set_state_suspect`].
    pub(crate) is_state_suspect: watch::WatchSender<bool>,
    /// Newest message to send to the peers.
    pub(crate) outgoing: watch::WatchSender<Bytes>,
    /// Peers to which a message stream is open.
    pub(crate) connected: watch::WatchSender<BTreeSet<u64>>,
    /// Lock held while this replica, as the leader, changes the membership.
    pub(crate) changing: Mutex<()>,
    /// Permit that is held while the machine's state is sent to a peer whose own state is in doubt.
    pub(crate) state_transfer_permit: Arc<Semaphore>,
    /// Tracker of the snapshots that are being received.
    pub(crate) installing: SnapshotInstalls,
    /// Limiter of the log lines about refused calls.
    pub(crate) refusals: LogThrottle,
    pub(crate) is_stopping: AtomicBool,
    /// Result of the last search for a cluster or its members.
    search: std::sync::Mutex<PeerDiscovery>,
    /// Whether peers report that this replica is no longer a member.
    pub(crate) is_removed: AtomicBool,
    pub(crate) cancel: CancellationToken,
    pub(crate) tasks: TaskTracker,
    local_addr: SocketAddr,
    /// Lock on the store, held until the replica has stopped, even if handles remain.
    lock: std::sync::Mutex<Option<StoreLock>>,
}

impl Replica {
    /// Opens the store, restores the machine and starts serving peers over `transport`.
    ///
    /// # Errors
    /// Fails if the store cannot be opened or is damaged; the error names the file and the offset.
    pub fn start(
        options: ReplicaOptions,
        transport: Arc<dyn Transport>,
        machine: Box<dyn StateMachine>,
        handler: Arc<dyn PeerHandler>,
    ) -> BoxFuture<'static, Result<Self, StartError>> {
        Self::start_here(options, transport, machine, handler).boxed()
    }

    async fn start_here(
        options: ReplicaOptions,
        transport: Arc<dyn Transport>,
        machine: Box<dyn StateMachine>,
        handler: Arc<dyn PeerHandler>,
    ) -> Result<Self, StartError> {
        let config = prepare(&options)?;
        let (fault, cancel) = (FatalError::new(), CancellationToken::new());
        let blocking = options.storage.blocking();
        let check = machine.check();
        let opened = {
            let (options, fault, stop) = (options.clone(), fault.clone(), cancel.clone());
            blocking
                .run(move || open(&options, machine, fault, stop))
                .await
        };
        let failed = |source| io_error(&options.data_dir, source);
        let (lock, identity, log, machine) = opened.map_err(failed)??;

        let local_addr = transport.local_addr();
        let links = Arc::new(PeerLinks::new(Arc::new(identity), transport.clone()));
        let has_quorum = watch::WatchSender::new(false);
        let network = Network::new(links.clone(), has_quorum.subscribe(), blocking);
        let id = u64::from(options.id);
        let raft = Raft::new(id, Arc::new(config), network, log.clone(), machine.clone()).await;
        let raft = match raft {
            Ok(raft) => raft,
            Err(fatal) => {
                log.close().await;
                let why = fault.get().unwrap_or_else(|| fatal.to_string());
                return Err(failed(std::io::Error::other(why)));
            }
        };
        let status = watch::WatchSender::new(Status {
            id: options.id,
            purged: 1,
            ..Status::default()
        });
        let inner = Arc::new(ReplicaInner {
            blocking,
            raft,
            log,
            machine,
            links,
            fault,
            heard: LeaderContact::default(),
            handler,
            check,
            status,
            has_quorum,
            is_state_suspect: watch::WatchSender::new(false),
            outgoing: watch::WatchSender::default(),
            connected: watch::WatchSender::default(),
            changing: Mutex::default(),
            state_transfer_permit: Arc::new(Semaphore::new(1)),
            installing: SnapshotInstalls::default(),
            refusals: LogThrottle::default(),
            is_stopping: AtomicBool::new(false),
            search: std::sync::Mutex::default(),
            is_removed: AtomicBool::new(false),
            cancel,
            tasks: TaskTracker::new(),
            local_addr,
            lock: std::sync::Mutex::new(Some(lock)),
            options,
        });
        inner.refresh();
        inner.start_tasks(transport);
        tracing::info!(id, address = %local_addr, "replica started");
        Ok(Self { inner })
    }

    /// Returns the shared state, for tests.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn inner(&self) -> Arc<ReplicaInner> {
        self.inner.clone()
    }

    /// Returns the current status of the replica and its cluster.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut status = self.inner.status.borrow().clone();
        self.inner.with_metrics(|metrics| {
            status.committed = types::committed_index(metrics);
            status.applied = types::applied_index(metrics);
            status.last_log = types::last_log_index(metrics);
        });
        status
    }

    /// Returns a receiver that is notified of changes of the status. Changes of indices,
    /// lags, and a follower's quorum alone may be late by up to a heartbeat interval.
    #[must_use]
    pub fn watch(&self) -> watch::WatchReceiver<Status> {
        self.inner.status.subscribe()
    }

    /// Returns the last time this replica heard from a leader with a quorum, or was acknowledged as
    /// one, such that everything committed by then is applied here. `None` if there was none yet. A
    /// deposed leader may be mistaken for the leader for as long as its lease.
    #[must_use]
    pub fn confirmed(&self) -> Option<Instant> {
        self.inner.heard.confirmed()
    }

    /// Returns the last applied log index that each peer reported. Peers report it several times
    /// per second.
    #[must_use]
    pub fn peers_applied(&self) -> BTreeMap<u8, u64> {
        let applied = self.inner.links.reachability.all_applied().into_iter();
        applied
            .filter_map(|(id, index)| Some((u8::try_from(id).ok()?, index)))
            .collect()
    }

    /// Returns the histogram of the durations of log syncs so far.
    #[must_use]
    pub fn sync_times(&self) -> SyncTimes {
        self.inner.log.sync_times()
    }

    /// Returns the attempts to write a snapshot since the start.
    #[must_use]
    pub fn snapshot_counts(&self) -> SnapshotCounts {
        self.inner.machine.snapshot_counts()
    }

    /// Returns the file of the newest snapshot; `None` if there is none, or the folder cannot be
    /// read.
    #[must_use]
    pub fn newest_snapshot(&self) -> Option<PathBuf> {
        self.inner.machine.newest_snapshot()
    }

    /// Sends `bytes` to every connected peer, outside the log. Never waits. A slow peer receives
    /// only the newest message.
    pub fn broadcast(&self, bytes: Bytes) {
        self.inner.outgoing.send_replace(bytes);
    }

    /// Asks the peer `id` something outside the log, and waits at most `limit` for the answer, see
    /// [`PeerHandler::answer`](crate::PeerHandler::answer).
    ///
    /// # Errors
    /// Describes why there is no answer.
    pub fn ask(
        &self,
        id: u8,
        bytes: Bytes,
        limit: Duration,
    ) -> BoxFuture<'_, Result<Bytes, String>> {
        peers::ask(&self.inner, id.into(), bytes, limit).boxed()
    }

    /// Sets whether the machine's state may be wrong. If so, this replica requests no votes,
    /// accepts neither leadership nor proposals, and transfers leadership if it leads.
    pub fn set_state_suspect(&self, is_state_suspect: bool) {
        self.inner.is_state_suspect.send_replace(is_state_suspect);
        self.inner.may_elect();
    }

    /// Stops the replica: transfers leadership if it leads, finishes writes and closes the store.
    pub fn shutdown(&self) -> BoxFuture<'_, ()> {
        let stop = async {
            if !self.inner.is_stopping.swap(true, Ordering::AcqRel) {
                self.inner.hand_over().await;
            }
            self.inner.stop().await;
        };
        stop.boxed()
    }

    /// Stops the replica like a process crash, without transferring leadership. Acknowledged data
    /// is on disk. For tests and fault injection.
    pub async fn crash(&self) {
        self.inner.is_stopping.store(true, Ordering::Release);
        self.inner.stop().await;
    }

    /// Returns the address at which peers are served.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr
    }

    /// Returns the number of connection attempts so far; grows slowly while a peer is away.
    #[must_use]
    pub fn connect_attempts(&self) -> u64 {
        self.inner.links.attempts()
    }
}

impl ReplicaInner {
    /// Starts the background tasks.
    fn start_tasks(self: &Arc<Self>, transport: Arc<dyn Transport>) {
        // Ends by itself once the calls in flight have ended.
        self.tasks.spawn(peers::serve(self.clone(), transport));
        self.spawn(timers::drive(self.clone()));
        self.spawn(maintenance::keep_status(self.clone()));
        self.spawn(maintenance::keep_snapshots(self.clone()));
        self.spawn(leadership::yield_leadership(self.clone()));
        self.spawn(leadership::transfer_to_better_connected(self.clone()));
        self.spawn(peers::keep_streams(self.clone()));
        self.spawn(formation::keep_membership(self.clone()));
        self.spawn(removal_check::notice(self.clone()));
        self.spawn(membership_change::finish_changes(self.clone()));
        self.spawn(promotion::promote_learners(self.clone()));
        self.spawn(formation::propose_first_command(self.clone()));
    }

    /// Runs `task` until it ends or the replica stops.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.cancel.clone();
        self.tasks.spawn(stop.run_until_cancelled_owned(task));
    }

    /// Returns why this replica is stopping or has failed; `None` while it runs.
    pub(crate) fn why_stopped(&self) -> Option<String> {
        if let Some(fault) = self.fault.get() {
            return Some(fault);
        }
        self.is_stopping
            .load(Ordering::Acquire)
            .then(|| "shutting down".to_owned())
    }

    /// Whether this replica knows the membership of its cluster. Still true after its removal.
    pub(crate) fn is_member(&self) -> bool {
        self.with_metrics(|metrics| metrics.membership_config.nodes().next().is_some())
    }

    /// Calls `look` with Raft's latest metrics, which are locked meanwhile.
    pub(crate) fn with_metrics<T>(&self, look: impl FnOnce(&Metrics) -> T) -> T {
        look(&self.raft.metrics().borrow_watched())
    }

    /// Stops all parts of the replica. Idempotent.
    async fn stop(&self) {
        self.cancel.cancel();
        // Raft may wait for its log, which may wait for space.
        self.log.stop_waiting();
        if let Err(error) = self.raft.shutdown().await {
            tracing::error!(%error, "raft shutdown failed");
        }
        self.log.close().await;
        self.tasks.close();
        if tokio::time::timeout(STOP_TIMEOUT, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!("tasks outlived the replica");
        }
        drop(lock(&self.lock).take());
        self.status
            .send_modify(|status| status.role = Role::Stopped);
        tracing::info!(id = self.options.id, "replica stopped");
    }
}

/// Opens the store and restores the machine. Blocks.
fn open(
    options: &ReplicaOptions,
    machine: Box<dyn StateMachine>,
    fault: FatalError,
    stop: CancellationToken,
) -> Result<(StoreLock, ReplicaIdentity, LogStore, StateMachineAdapter), StartError> {
    let layout = options.storage.layout(&options.data_dir);
    layout.create()?;
    // Lock before anything is read or removed: another process may be using it.
    let lock = layout.lock()?;
    let identity = ReplicaIdentity::open(&layout, u64::from(options.id), &options.cluster_name)?;
    let folder = layout.snapshots();
    let snapshots = SnapshotFolder::open(layout.files.clone(), folder.clone())
        .map_err(|error| io_error(&folder, error))?;
    let blocking = options.storage.blocking();
    let machine = StateMachineAdapter::open(machine, snapshots, blocking, fault.clone(), stop)?;
    let log = options.storage.open_log(&layout, fault)?;
    if log.purged() > machine.applied() {
        let (begin, reached) = (
            public_index(log.purged().as_ref()),
            public_index(machine.applied().as_ref()),
        );
        log.close_blocking();
        let what = format!("the newest snapshot reaches {reached}, the log begins after {begin}");
        return Err(damaged(&folder, reached, what));
    }
    Ok((lock, identity, log, machine))
}

/// Checks the options and derives openraft's config.
fn prepare(options: &ReplicaOptions) -> Result<RaftConfig, StartError> {
    check_formation(&options.formation)?;
    member_info::check_told(&options.advertise, &options.labels).map_err(StartError::Options)?;
    raft_config(options)
}

fn raft_config(options: &ReplicaOptions) -> Result<RaftConfig, StartError> {
    let ms = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let every = options.snapshot_every_entries.max(1);
    let config = RaftConfig {
        cluster_name: "quorate".to_owned(),
        heartbeat_interval: ms(options.heartbeat),
        election_timeout_min: ms(options.election_timeout.start),
        election_timeout_max: ms(options.election_timeout.end),
        snapshot_policy: SnapshotPolicy::LogsSinceLast(every),
        // A follower that lags only slightly is cheaper to serve from the log.
        max_in_snapshot_log_to_keep: (every / 4).min(1000),
        // Like etcd's check-quorum: a leader that hears no quorum for a lease stops sending, long
        // enough for two elections among the others, before it retries.
        quorum_loss_probe_interval: Some(4 * ms(options.election_timeout.end)),
        replication_lag_threshold: every.saturating_mul(2),
        max_payload_entries: 1024,
        enable_pre_vote: Some(true),
        // A restarted leader no longer knows its lease.
        enable_leader_restore: Some(false),
        backoff: "50ms 100ms 200ms ...500ms".to_owned(),
        ..RaftConfig::default()
    };
    config
        .validate()
        .map_err(|error| StartError::Options(format!("timers: {error}")))
}

/// Refuses a formation that could end in two clusters: the founders must be more than half of the
/// peers. The list is assumed to include this replica; a missing entry is detected when a cluster
/// is founded.
fn check_formation(formation: &Formation) -> Result<(), StartError> {
    let Formation::Bootstrap { peers, expect, .. } = formation else {
        return Ok(());
    };
    if *expect == 0 {
        return Err(StartError::Options("a cluster of no replicas".to_owned()));
    }
    match peers {
        Peers::List(list) => {
            formation::check_majority(*expect, list.len()).map_err(StartError::Options)
        }
        Peers::Dns(_) => Ok(()),
    }
}
