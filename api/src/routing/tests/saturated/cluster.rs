//! Simulates three replicas with one backend or two. Each is a whole router with its admission and outbox.
//! The log and the network between them are simulated by delays.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use state::admission::AdmissionSettings;
use state::command::{Command, Committed, Envelope};
use state::ids::{BackendRef, ReplicaId, SessionId, Slot};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::super::{Bench, ask};
use crate::admission::{Admission, AdmissionRequest, AdmissionTry};
use crate::ports::{BoxFuture, Propose, ProposeError};
use crate::prompt::PromptIdentity;
use crate::routing::fixture::{Log, Port, router_in};
use crate::routing::{
    AttemptEnd, LoadReporter, PermitCell, Router, RoutingRequest, UserName, share_reports,
};

/// Limit of the only backend in most tests.
pub(super) const LIMIT: u32 = 6;
/// Repetitions of two words in the prompt, which is a few hundred tokens long.
const PROMPT_WORDS: usize = 200;
/// Number of replicas, with ids from 1.
const REPLICAS: u8 = 3;
/// Time until a message between replicas arrives.
const LATENCY: Duration = Duration::from_millis(1);
/// Time until a proposal is applied everywhere.
const COMMIT: Duration = Duration::from_millis(5);
/// Interval between two reports of a replica to its peers.
const EXCHANGE: Duration = Duration::from_millis(20);
/// Time until a process that refuses connections counts as unreachable.
const UNREACHABLE: Duration = Duration::from_millis(200);
/// Duration of a request.
const RUNS: Duration = Duration::from_millis(200);

/// Use of the backend that was observed in a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filled {
    /// Average share of [`LIMIT`] in use, in percent.
    pub(super) percent: u64,
    /// Maximum number of concurrent requests.
    pub(super) most: u32,
}

/// The log of all replicas, which applies each command to all states at once.
#[derive(Default)]
struct SharedLog {
    /// Number of backends.
    backends: usize,
    entries: Vec<Entry>,
    logs: BTreeMap<ReplicaId, Arc<Mutex<Log>>>,
}

enum Entry {
    Proposed(Envelope),
    Admin(Command),
}

impl SharedLog {
    fn commit(&mut self, entry: Entry) -> Option<Committed> {
        let mut committed = None;
        for log in self.logs.values() {
            committed = apply(&mut log.lock().unwrap(), &entry);
        }
        self.entries.push(entry);
        committed
    }

    /// Adds a replica's state, to which the whole log is applied.
    fn read_by(&mut self, replica: ReplicaId, settings: &AdmissionSettings) -> Port {
        let mut log = Log::new(&vec![None; self.backends]);
        log.admin(Command::PutAdmission(settings.clone()));
        for entry in &self.entries {
            apply(&mut log, entry);
        }
        let port = Port::new(log);
        self.logs.insert(replica, Arc::clone(&port.log));
        port
    }
}

fn apply(log: &mut Log, entry: &Entry) -> Option<Committed> {
    match entry {
        Entry::Proposed(envelope) => Some(log.apply(envelope.clone())),
        Entry::Admin(command) => {
            log.admin(command.clone());
            None
        }
    }
}

/// A replica's connection to the log.
struct LogPort(Arc<World>);

impl Propose for LogPort {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        Box::pin(async move {
            sleep(COMMIT).await;
            let mut log = self.0.log.lock().unwrap();
            let committed = log.commit(Entry::Proposed(envelope));
            Ok(committed.expect("who proposes has a log"))
        })
    }
}

#[derive(Clone)]
struct Seat {
    session: SessionId,
    router: Arc<Router>,
    admission: Arc<Admission>,
    /// Number of requests that have ended.
    ended: Arc<AtomicU64>,
    /// Token that is cancelled when the replica's process ends.
    end: CancellationToken,
}

struct World {
    settings: AdmissionSettings,
    /// Whether replicas exchange share reports.
    has_shares: bool,
    log: Mutex<SharedLog>,
    seats: Mutex<BTreeMap<ReplicaId, Seat>>,
    /// Replicas that are partitioned from all others.
    cut_off: Mutex<BTreeSet<ReplicaId>>,
    identity: PromptIdentity,
    starts: Mutex<u64>,
}

/// The replicas of a test. Dropping the cluster stops them.
pub(super) struct SaturatedCluster(Arc<World>);

impl Drop for SaturatedCluster {
    fn drop(&mut self) {
        let seats = std::mem::take(&mut *self.0.seats.lock().unwrap());
        seats.into_values().for_each(|seat| seat.end.cancel());
    }
}

impl SaturatedCluster {
    /// Starts replicas that have heard each other.
    pub(super) async fn start(settings: AdmissionSettings, has_shares: bool) -> Self {
        Self::start_with(1, settings, has_shares).await
    }

    /// Starts replicas with `backends` backends that have heard each other.
    pub(super) async fn start_with(
        backends: usize,
        settings: AdmissionSettings,
        has_shares: bool,
    ) -> Self {
        let log = SharedLog {
            backends,
            ..SharedLog::default()
        };
        let cluster = Self(Arc::new(World {
            settings,
            has_shares,
            log: Mutex::new(log),
            seats: Mutex::default(),
            cut_off: Mutex::default(),
            identity: Bench::new(1).identify(&"a prompt ".repeat(PROMPT_WORDS)),
            starts: Mutex::default(),
        }));
        (1..=REPLICAS).for_each(|id| cluster.start_again(id));
        sleep(Duration::from_millis(200)).await;
        cluster
    }

    /// Starts a replica again, in a new run.
    pub(super) fn start_again(&self, id: u8) {
        let world = &self.0;
        let replica = ReplicaId(id);
        let session = {
            let mut starts = world.starts.lock().unwrap();
            *starts += 1;
            SessionId(*starts)
        };
        let mut log = world.log.lock().unwrap();
        let port = log.read_by(replica, &world.settings);
        drop(log);
        let router = router_in(&port, replica, session);
        let admission = Arc::new(Admission::new(&router));
        let end = CancellationToken::new();
        let seat = Seat {
            session,
            router,
            admission,
            ended: Arc::default(),
            end,
        };
        world.seats.lock().unwrap().insert(replica, seat.clone());
        spawn_until(&seat.end, tell(Arc::clone(world), seat.clone()));
        let served = Arc::clone(&seat.admission);
        spawn_until(&seat.end, async move {
            served.run(CancellationToken::new()).await;
        });
        let (emptied, propose) = (Arc::clone(&seat.router), LogPort(Arc::clone(world)));
        spawn_until(&seat.end, async move {
            let stop = CancellationToken::new();
            emptied
                .run_outbox(Arc::new(propose), stop, Duration::ZERO)
                .await;
        });
    }

    /// Ends a replica's process and its requests in flight. The log learns of it once the replica
    /// counts as unreachable.
    pub(super) fn kill(&self, id: u8) {
        let replica = ReplicaId(id);
        let seat = self.0.seats.lock().unwrap().remove(&replica);
        let seat = seat.expect("it runs");
        seat.end.cancel();
        self.0.log.lock().unwrap().logs.remove(&replica);
        let (world, session) = (Arc::clone(&self.0), seat.session);
        tokio::spawn(async move {
            sleep(UNREACHABLE).await;
            let gone = Command::ExpireSession { replica, session };
            world.log.lock().unwrap().commit(Entry::Admin(gone));
        });
    }

    /// Starts clients at a replica, each of which sends one request after another.
    pub(super) fn come(&self, id: u8, clients: usize) {
        let seat = self.0.seats.lock().unwrap()[&ReplicaId(id)].clone();
        for number in 0..clients {
            let name = format!("user-{id}-{number}");
            spawn_until(&seat.end, client(Arc::clone(&self.0), seat.clone(), name));
        }
    }

    /// Sends `requests` equal requests at once through a replica and waits until they have ended.
    /// Returns the slot of the backend and the wait of each.
    pub(super) async fn burst(&self, id: u8, requests: usize) -> Vec<(Slot, Duration)> {
        let seat = self.0.seats.lock().unwrap()[&ReplicaId(id)].clone();
        let sent = (0..requests).map(|number| {
            let (seat, world) = (seat.clone(), Arc::clone(&self.0));
            tokio::spawn(async move {
                let came = Instant::now();
                let request = world.request(&format!("user-{id}"), number as u64);
                let admitted = seat
                    .admission
                    .admit(&request, (&[], AdmissionTry::First))
                    .await
                    .unwrap();
                let waited = came.elapsed();
                let (decision, attempt) = admitted.into_parts();
                sleep(RUNS).await;
                attempt.end(AttemptEnd::Finished, Instant::now());
                (decision.backend.slot, waited)
            })
        });
        let sent: Vec<_> = sent.collect();
        let mut ended = Vec::new();
        for request in sent {
            ended.push(request.await.unwrap());
        }
        ended
    }

    /// Drops all messages from and to a replica. Its access to the log remains.
    pub(super) fn cut_off(&self, id: u8) {
        self.0.cut_off.lock().unwrap().insert(ReplicaId(id));
    }

    /// Ends all partitions, so that all messages are delivered again.
    pub(super) fn reunite(&self) {
        self.0.cut_off.lock().unwrap().clear();
    }

    /// Applies an operator's command to the log.
    pub(super) fn admin(&self, command: Command) {
        self.0.log.lock().unwrap().commit(Entry::Admin(command));
    }

    /// Returns how many requests have ended at a replica since it started.
    pub(super) fn ended_at(&self, id: u8) -> u64 {
        let seats = self.0.seats.lock().unwrap();
        seats[&ReplicaId(id)].ended.load(Ordering::Relaxed)
    }

    /// Samples the use of the backend every millisecond.
    pub(super) async fn watch(&self, looks: u64) -> Filled {
        let (mut sum, mut most) = (0, 0);
        for _ in 0..looks {
            sleep(Duration::from_millis(1)).await;
            let seats = self.0.seats.lock().unwrap();
            let running: u32 = seats.values().map(running).sum();
            most = most.max(running);
            sum += u64::from(running);
        }
        let percent = 100 * sum / (looks * u64::from(LIMIT));
        Filled { percent, most }
    }
}

fn running(seat: &Seat) -> u32 {
    seat.router.load().here(backend(&seat.router)).running
}

fn backend(router: &Router) -> BackendRef {
    router.view().registry().backends[0].handle
}

/// Spawns a task that runs until it or its process has ended.
fn spawn_until(end: &CancellationToken, task: impl Future<Output = ()> + Send + 'static) {
    let end = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = end.cancelled() => {}
            () = task => {}
        }
    });
}

/// Sends a replica's reports to all others while it runs, as replicas do in production.
async fn tell(world: Arc<World>, own: Seat) {
    let me = own.router.replica();
    let others: Vec<ReplicaId> = (1..=REPLICAS)
        .map(ReplicaId)
        .filter(|id| *id != me)
        .collect();
    let sharers = if world.has_shares { &others[..] } else { &[] };
    let mut ticks = tokio::time::interval(EXCHANGE);
    let mut reporter = LoadReporter::default();
    let (mut told, mut told_shares) = (Vec::new(), Vec::new());
    loop {
        tokio::select! {
            biased;
            () = own.admission.waiting_changed() => {}
            () = own.router.load().report_due().notified() => {}
            _ = ticks.tick() => {}
        }
        let now = Instant::now();
        own.router.shares().turn(now, sharers);
        let shares = own.router.shares().report();
        let backlog = own.admission.report();
        let is_news = backlog != told || !share_reports::is_same(&shares, &told_shares);
        let load = match reporter.due(own.router.load(), now) {
            Some(report) => report,
            None if is_news => own.router.load().local_report(),
            None => continue,
        };
        (told, told_shares) = (backlog.clone(), shares.clone());
        let world = Arc::clone(&world);
        tokio::spawn(async move {
            sleep(LATENCY).await;
            world.deliver(me, (&shares, &load, &backlog));
        });
    }
}

impl World {
    fn request(&self, user: &str, number: u64) -> Arc<Request> {
        Arc::new(Request {
            identity: self.identity.clone(),
            id: format!("{user}-{number}"),
            user: UserName::bounded(user.to_owned()),
            permit: PermitCell::new(),
        })
    }

    fn deliver(&self, from: ReplicaId, (shares, load, backlog): (&[u8], &[u8], &[u8])) {
        let cut_off = self.cut_off.lock().unwrap().clone();
        let seats = self.seats.lock().unwrap().clone();
        let is_reached = |id: &ReplicaId| *id != from && !cut_off.contains(id);
        for (_, to) in seats.iter().filter(|(id, _)| is_reached(id)) {
            if cut_off.contains(&from) {
                continue;
            }
            if self.has_shares {
                to.router.shares().hear(from, shares).unwrap();
            }
            let merged = to.router.load().merge_report(from, load, Instant::now());
            merged.unwrap();
            to.admission.apply_peer_report(from, backlog).unwrap();
        }
    }
}

struct Request {
    identity: PromptIdentity,
    id: String,
    user: UserName,
    permit: PermitCell,
}

impl AdmissionRequest for Request {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            request_id: &self.id,
            user: &self.user,
            ..ask(&self.identity, excluded)
        }
    }

    fn permit(&self) -> &PermitCell {
        &self.permit
    }

    fn priority(&self) -> i16 {
        0
    }

    fn tokens_max(&self) -> Option<u32> {
        None
    }

    fn is_selective(&self) -> bool {
        false
    }
}

async fn client(world: Arc<World>, seat: Seat, name: String) {
    for turn in 0_u64.. {
        let request = world.request(&name, turn);
        let Ok(admitted) = seat
            .admission
            .admit(&request, (&[], AdmissionTry::First))
            .await
        else {
            sleep(RUNS).await;
            continue;
        };
        let (_, attempt) = admitted.into_parts();
        sleep(RUNS).await;
        attempt.end(AttemptEnd::Finished, Instant::now());
        seat.ended.fetch_add(1, Ordering::Relaxed);
    }
}
