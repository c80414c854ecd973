//! Tests several replicas that share a limit. Each is a whole router, and the test delivers their
//! reports to each other.

use std::sync::Barrier;
use std::time::Duration;

use state::admission::{AdmissionSettings, Batching, Concurrency};

use super::*;
use crate::routing::fixture::router_of;
use crate::routing::{LoadGuard, PlaceRejection, PlacedRequest, WaitingForPlace, WantedPlaces};

/// Limit of every backend.
const LIMIT: u32 = 6;
/// Interval between two exchanges of reports.
const EXCHANGE: Duration = Duration::from_millis(20);

struct Replica {
    port: Port,
    router: Arc<Router>,
    running: Vec<LoadGuard>,
}

struct Cluster {
    replicas: Vec<Replica>,
    now: Instant,
}

fn limited(log: &mut Log, limit: u32, batching: Batching) {
    log.admin(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(limit),
        batching,
        ..AdmissionSettings::default()
    }));
}

impl Cluster {
    fn new(replicas: u8, backends: usize) -> Self {
        let replica = |id| {
            let mut log = Log::new(&vec![None; backends]);
            limited(&mut log, LIMIT, Batching::Continuous);
            let port = Port::new(log);
            Replica {
                router: router_of(&port, id),
                port,
                running: Vec::new(),
            }
        };
        let mut cluster = Self {
            replicas: (1..=replicas).map(replica).collect(),
            now: Instant::now(),
        };
        (0..4).for_each(|_| cluster.exchange());
        cluster
    }

    fn ids(&self) -> Vec<ReplicaId> {
        let ids = self.replicas.iter().map(|it| it.router.replica());
        ids.collect()
    }

    /// Delivers one report from each replica to all others.
    fn exchange(&mut self) {
        self.now += EXCHANGE;
        let ids = self.ids();
        for from in &self.replicas {
            let me = from.router.replica();
            let others: Vec<ReplicaId> = ids.iter().copied().filter(|id| *id != me).collect();
            from.router.shares().turn(self.now, &others);
            let (shares, load) = (
                from.router.shares().report(),
                from.router.load().local_report(),
            );
            for to in self.replicas.iter().filter(|it| it.router.replica() != me) {
                to.router.shares().hear(me, &shares).unwrap();
                let merged = to.router.load().merge_report(me, &load, self.now);
                merged.unwrap();
            }
        }
    }

    fn place(&self, at: usize) -> Result<PlacedRequest, PlaceRejection> {
        let identity = bench_identity();
        let router = &self.replicas[at].router;
        router
            .shares()
            .place(router.decider(), &ask(&identity, &[]), self.now)
    }

    /// Starts as many requests as the replica may, up to `requests`.
    fn start(&mut self, at: usize, requests: usize) -> usize {
        let mut started = 0;
        while started < requests
            && let Ok(placed) = self.place(at)
        {
            self.replicas[at].running.push(placed.place.into_guard(0));
            started += 1;
        }
        started
    }

    fn want(&self, at: usize, requests: u32) {
        let backend = self.replicas[at].port.log.lock().unwrap().handle(0);
        let waiting = WaitingForPlace {
            requests,
            waited_ms: 1,
        };
        let wanted = WantedPlaces::from([(backend, waiting)]);
        self.replicas[at].router.shares().want(wanted);
    }

    fn running(&self) -> usize {
        self.replicas.iter().map(|it| it.running.len()).sum()
    }
}

fn bench_identity() -> PromptIdentity {
    Bench::new(1).identify("a prompt")
}

#[test]
fn simultaneous_dispatches_do_not_exceed_the_limit() {
    let mut cluster = Cluster::new(3, 1);
    // Issue 12: no replica has heard of any running request, and each has eight clients.
    let started: usize = (0..3).map(|at| cluster.start(at, 8)).sum();
    assert_eq!(started, 6);
    cluster.exchange();
    assert_eq!(cluster.place(0).unwrap_err(), AT_LIMIT);
    // Places that become free at all replicas at once are not filled twice.
    for at in 0..3 {
        cluster.replicas[at].running.clear();
    }
    let started: usize = (0..3).map(|at| cluster.start(at, 8)).sum();
    assert_eq!(started, 6);
}

#[test]
fn a_single_busy_replica_uses_the_whole_limit() {
    let mut cluster = Cluster::new(3, 1);
    assert_eq!(cluster.start(1, 8), 2);
    cluster.want(1, 6);
    cluster.exchange();
    cluster.exchange();
    assert_eq!(cluster.start(1, 6), 4);
    assert_eq!(cluster.running(), 6);
    cluster.want(1, 0);
    // A replica that needs a place gets the next free one, before its holder can take it again.
    cluster.want(1, 9);
    cluster.want(0, 1);
    cluster.exchange();
    cluster.replicas[1].running.pop();
    assert_eq!(cluster.start(1, 1), 0);
    cluster.exchange();
    assert_eq!(cluster.start(0, 1), 1);
}

#[test]
fn an_unusable_free_place_is_handed_over_at_once() {
    let mut cluster = Cluster::new(3, 1);
    (0..3).for_each(|at| assert_eq!(cluster.start(at, 2), 2));
    // One more than its fair share: no replica owes it a free place.
    cluster.want(1, 1);
    cluster.exchange();
    cluster.replicas[0].running.pop();
    // Requests that wait there cannot go: the gate holds them back.
    cluster.want(0, 0);
    assert_eq!(cluster.start(0, 1), 0, "it is handed over");
    cluster.exchange();
    assert_eq!(cluster.start(1, 1), 1);
}

#[test]
fn no_request_waits_while_places_are_plenty() {
    let mut cluster = Cluster::new(3, 4);
    for turn in 0..60 {
        assert_eq!(cluster.start(turn % 3, 1), 1, "turn {turn}");
        cluster.exchange();
        if cluster.running() > 12 {
            let most = (0..3).max_by_key(|at| cluster.replicas[*at].running.len());
            cluster.replicas[most.unwrap()].running.pop();
        }
    }
}

#[test]
fn a_lone_or_isolated_replica_has_the_whole_limit() {
    let mut cluster = Cluster::new(3, 1);
    assert_eq!(cluster.start(0, 8), 2);
    cluster.replicas.truncate(1);
    for _ in 0..30 {
        cluster.exchange();
    }
    assert_eq!(cluster.start(0, 8), 4);
    let mut alone = Cluster::new(1, 1);
    assert_eq!(alone.start(0, 8), 6);
}

#[test]
fn a_changed_limit_applies_at_once() {
    let mut cluster = Cluster::new(3, 1);
    for replica in &cluster.replicas {
        let mut log = replica.port.log.lock().unwrap();
        limited(&mut log, 9, Batching::Continuous);
    }
    let started: usize = (0..3).map(|at| cluster.start(at, 8)).sum();
    assert_eq!(started, 9);
}

#[test]
fn a_batch_waits_for_all_places_of_its_backend() {
    let mut cluster = Cluster::new(2, 1);
    for replica in &cluster.replicas {
        let mut log = replica.port.log.lock().unwrap();
        limited(&mut log, LIMIT, Batching::Static);
    }
    cluster.exchange();
    let divided = |cluster: &Cluster, at: usize| {
        let decider = cluster.replicas[at].router.decider();
        decider.divided_slots()
    };
    assert_eq!(divided(&cluster, 1), [Slot(0)]);
    cluster.want(1, 4);
    cluster.exchange();
    cluster.exchange();
    assert_eq!(divided(&cluster, 1), []);
    assert_eq!(divided(&cluster, 0), [Slot(0)]);
    assert_eq!(cluster.start(1, 9), 6);
}

#[test]
fn concurrent_requests_cannot_both_take_the_last_place() {
    let cluster = Arc::new(Cluster::new(1, 1));
    let barrier = Arc::new(Barrier::new(8));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (cluster, barrier) = (Arc::clone(&cluster), Arc::clone(&barrier));
            std::thread::spawn(move || {
                barrier.wait();
                std::iter::from_fn(|| cluster.place(0).ok())
                    .take(8)
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    let held: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
    assert_eq!(held.iter().map(Vec::len).sum::<usize>(), 6);
    drop(held);
    assert!(cluster.place(0).is_ok());
}
