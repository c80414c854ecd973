//! The workload of a run: clients, operators and engines.
//!
//! Each client runs in the process of its replica and dies with it, so it does not know later
//! results. Engines outlive replicas. The history records clients' requests and the responses to
//! them.

mod chat;
mod crowd;
mod discoverer;
mod engines;
mod events;
mod fleet_source;
mod health;
mod limits;
mod operator;
mod planner;
mod publisher;
mod questions;
mod reader;
mod streams;
mod wait;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::ports::{ChangeError, Cluster};
use lab::rng::Rng;
use node::app::replica_core::ReplicaCore;
use state::command::BackendSpec;
use state::ids::ReplicaId;
use tokio::runtime::Handle;

pub use self::engines::SimEngines;
pub(in crate::sim) use self::questions::answers;
pub(in crate::sim) use self::reader::keys;
use super::apply_observer::RecordKeeper;
use super::node::SimTime;
use super::plan::WorldPlan;
use super::trace::Trace;
use crate::oracle::observation::ReplicaRun;

/// Number of backend names that operators use.
const BACKENDS: u64 = 6;
/// Number of backends that are registered at the beginning.
const FIRST_BACKENDS: u64 = 3;
/// Number of users.
const USERS: u64 = 6;
/// Number of API keys that are created and revoked. Ids of revoked keys are not reused.
const API_KEYS: u64 = 24;

/// A requested change of the membership.
#[derive(Debug, Clone, Copy)]
pub enum MembershipChange {
    /// Promotion of a learner to voter.
    Promote(ReplicaId),
    /// Removal of a member.
    Remove(ReplicaId),
    /// Transfer of leadership to a replica, or to any if `None`.
    Transfer(Option<ReplicaId>),
    /// Taking a snapshot.
    Snapshot,
}

/// Number of operations by kind and outcome.
pub type OutcomeCounts = BTreeMap<(&'static str, &'static str), u64>;

/// State shared by all clients of a world. Clones share it.
#[derive(Clone)]
pub struct WorkloadContext {
    pub(super) time: SimTime,
    pub(super) ledger: RecordKeeper,
    pub(super) trace: Trace,
    pub(super) engines: Arc<Mutex<SimEngines>>,
    seed: u64,
    clients: u8,
    /// Whether the workload is over, so that no new work may begin.
    is_over: Arc<AtomicBool>,
    outcomes: Arc<Mutex<OutcomeCounts>>,
    /// Replicas that were removed from the members since this was last read.
    removed: Arc<Mutex<Vec<u8>>>,
    last_client: Arc<Mutex<u32>>,
    waiting: wait::PendingWaits,
}

impl WorkloadContext {
    /// Creates the context of a workload that follows `plan`. No client has started yet.
    #[must_use]
    pub fn new(plan: &WorldPlan, time: SimTime, ledger: RecordKeeper, trace: Trace) -> Self {
        Self {
            time,
            ledger,
            trace,
            engines: Arc::new(Mutex::new(SimEngines::new(plan.seed))),
            seed: plan.seed,
            clients: plan.clients,
            is_over: Arc::default(),
            outcomes: Arc::default(),
            removed: Arc::default(),
            last_client: Arc::default(),
            waiting: wait::PendingWaits::default(),
        }
    }

    fn count(&self, what: &'static str, outcome: &'static str) {
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        *outcomes.entry((what, outcome)).or_default() += 1;
    }

    fn engines(&self) -> MutexGuard<'_, SimEngines> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn next_client(&self) -> u32 {
        let mut last = self
            .last_client
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        *last
    }
}

/// Handles of one replica, which its clients use.
#[derive(Clone)]
struct ReplicaHandles {
    context: WorkloadContext,
    run: ReplicaRun,
    cluster: Arc<dyn Cluster>,
    admission: Arc<api::admission::Admission>,
    router: Arc<api::routing::Router>,
    view: Arc<state::StateView>,
    backends: Arc<api::engines::backends::Backends>,
}

impl ReplicaHandles {
    /// Returns the random stream of the client with this kind and number, separate from all others.
    fn rng(&self, kind: u64, number: u64) -> Rng {
        let run = u64::from(self.run.number) << 8 | u64::from(self.run.replica.0);
        Rng::new(self.context.seed, kind << 48 | number << 40 | run)
    }

    fn now_us(&self) -> u64 {
        self.context.time.now_us()
    }
}

/// Driver that starts clients and operators at replicas that come up.
pub struct WorkloadDriver {
    context: WorkloadContext,
}

impl WorkloadDriver {
    /// Creates a driver that has started no clients.
    #[must_use]
    pub fn new(context: WorkloadContext) -> Self {
        Self { context }
    }

    fn handles(&self, run: ReplicaRun, core: &ReplicaCore) -> ReplicaHandles {
        ReplicaHandles {
            context: self.context.clone(),
            run,
            cluster: core.cluster(),
            admission: Arc::clone(core.admission()),
            router: Arc::clone(core.router()),
            view: Arc::clone(core.view()),
            backends: Arc::clone(core.backends()),
        }
    }

    /// Starts the clients of a replica that has come up.
    pub(super) fn enter(&self, run: ReplicaRun, core: &ReplicaCore, handle: &Handle) {
        let handles = self.handles(run, core);
        handle.spawn(health::watch(handles.clone()));
        handle.spawn(operator::write(handles.clone()));
        if planner::is_in(self.context.seed) {
            handle.spawn(planner::write(handles.clone()));
        }
        if discoverer::is_in(self.context.seed) {
            handle.spawn(discoverer::write(handles.clone()));
        }
        if fleet_source::is_in(self.context.seed) {
            handle.spawn(fleet_source::follow(handles.clone()));
        }
        handle.spawn(reader::read(handles.clone()));
        handle.spawn(events::read(handles.clone()));
        for number in 0..self.context.clients {
            handle.spawn(chat::talk(handles.clone(), number));
        }
        for manner in crowd::ClientBehaviour::of(self.context.seed) {
            handle.spawn(crowd::live(handles.clone(), manner));
        }
        if streams::are_in(self.context.seed) {
            handle.spawn(streams::watch(handles.clone()));
        }
    }

    /// Requests a change of the membership through a replica.
    pub(super) fn change(
        &self,
        cluster: Arc<dyn Cluster>,
        handle: &Handle,
        change: MembershipChange,
    ) {
        let context = self.context.clone();
        handle.spawn(async move {
            let (what, done) = match change {
                MembershipChange::Promote(id) => {
                    ("promote", cluster.promote_member(id).await.map(drop))
                }
                MembershipChange::Remove(id) => {
                    let removed = cluster.remove_member(id).await;
                    if removed.is_ok() {
                        let mut gone = context
                            .removed
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner);
                        gone.push(id.0);
                    }
                    ("remove", removed.map(drop))
                }
                MembershipChange::Transfer(to) => {
                    ("transfer", cluster.transfer_leader(to).await.map(drop))
                }
                MembershipChange::Snapshot => ("snapshot", cluster.snapshot().await.map(drop)),
            };
            let outcome = match &done {
                Ok(()) => "ok",
                Err(ChangeError::Refused(_)) => "refused",
                Err(ChangeError::Unknown(_)) => "unknown",
            };
            let now_us = context.time.now_us();
            context
                .trace
                .event(now_us, format_args!("{change:?}: {done:?}"));
            context.count(what, outcome);
        });
    }

    /// Returns the replicas removed since the last call.
    pub(super) fn take_removed(&self) -> Vec<u8> {
        let mut removed = self
            .context
            .removed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *removed)
    }

    /// Reads every key at a replica, runs the final checks, and then sets the returned flag.
    pub(super) fn read_all(
        &self,
        run: ReplicaRun,
        core: &ReplicaCore,
        handle: &Handle,
    ) -> Arc<AtomicBool> {
        let (handles, done) = (self.handles(run, core), Arc::new(AtomicBool::new(false)));
        let is_done = Arc::clone(&done);
        let client = self.context.next_client();
        handle.spawn(async move {
            reader::read_all(&handles, client).await;
            chat::ask_once(&handles).await;
            crowd::is_served(&handles).await;
            limits::wait_out(&handles, client).await;
            fleet_source::settle(&handles, client).await;
            done.store(true, Ordering::Relaxed);
        });
        is_done
    }

    /// Ends the workload: no new work begins, and all engines are up.
    pub(super) fn close(&self) {
        self.context.is_over.store(true, Ordering::Relaxed);
        self.context.engines().all_up();
    }

    /// Returns the number of operations by kind and outcome.
    pub(super) fn outcomes(&self) -> OutcomeCounts {
        let outcomes = self.context.outcomes.lock();
        outcomes.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Returns the backends that are registered at the beginning.
fn first_backends() -> Vec<BackendSpec> {
    (0..FIRST_BACKENDS)
        .map(|number| backend(number, 0, Some(96)))
        .collect()
}

/// Returns the backend with this number. Each `life` of it has another address.
fn backend(number: u64, life: u64, capacity_blocks: Option<u32>) -> BackendSpec {
    // Every other backend publishes KV events. It serves one model, because events name one.
    let publishes = number % 2 == 1;
    let models: &[&str] = match number % 3 {
        _ if publishes => &["m0"],
        0 => &["m0", "m1"],
        _ => &["m1", "m0"],
    };
    let host = format!("10.1.{life}.{number}");
    let endpoint = |port: u16| publishes.then(|| format!("tcp://{host}:{port}"));
    BackendSpec {
        id: format!("b{number}"),
        url: format!("http://{host}:8000"),
        models: models.iter().copied().map(str::to_owned).collect(),
        labels: BTreeMap::new(),
        capacity_blocks,
        kv_events: endpoint(5557),
        kv_replay: endpoint(5558),
        role: state::command::BackendRole::Both,
    }
}

fn user(rng: &mut Rng) -> String {
    // A few users send most of the requests.
    let number = rng.below(USERS).min(rng.below(USERS));
    format!("u{number}")
}

async fn think(rng: &mut Rng, mean_ms: u64) {
    let wait_ms = mean_ms as f64 * -(1.0 - rng.unit()).ln();
    tokio::time::sleep(Duration::from_millis(1 + wait_ms as u64)).await;
}
