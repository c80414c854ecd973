//! A run on one thread, with simulated time, disks and network, goes as it went before.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of a test, outside of its function"
)]

mod common;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Journal, Mailbox, PATIENCE};
use futures_util::future::BoxFuture;
use raft::{
    Formation, MemoryDisk, Options, PeerChannel, PeerRequest, PeerResponse, PeerService, Peers,
    Replica, Status, Storage, Transport, chance,
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::Status as Refusal;
use tower::{Service, ServiceExt, service_fn};

/// Who listens where, and every call and change of a status with its time.
#[derive(Clone)]
struct World {
    began: Instant,
    listening: Arc<Mutex<BTreeMap<String, PeerService>>>,
    trace: Arc<Mutex<Vec<String>>>,
}

fn within_ms(limit: u64) -> Duration {
    Duration::from_micros(chance::draw() % (limit * 1000))
}

impl World {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            listening: Arc::default(),
            trace: Arc::default(),
        }
    }

    fn note(&self, what: &str) {
        let at = self.began.elapsed();
        self.trace.lock().unwrap().push(format!("{at:?} {what}"));
    }

    fn service(&self, to: &str) -> Result<PeerService, String> {
        let listening = self.listening.lock().unwrap();
        listening.get(to).cloned().ok_or("refused".to_owned())
    }

    async fn call(self, to: String, request: PeerRequest) -> Result<PeerResponse, Refusal> {
        self.note(&format!("{to} {}", request.uri().path()));
        sleep(within_ms(5)).await;
        let mut service = self.service(&to).map_err(Refusal::unavailable)?;
        let answered = service.ready().await.expect("it is ready").call(request);
        let answer = answered.await.expect("it answers");
        sleep(within_ms(5)).await;
        Ok(answer)
    }
}

struct Port {
    world: World,
    local_addr: SocketAddr,
}

impl Transport for Port {
    fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, String>> {
        let world = self.world.clone();
        Box::pin(async move {
            sleep(within_ms(5)).await;
            drop(world.service(&address)?);
            let calls = service_fn(move |request| world.clone().call(address.clone(), request));
            Ok(PeerChannel::new(calls))
        })
    }

    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, std::io::Result<()>> {
        let (world, address) = (self.world.clone(), self.local_addr.to_string());
        Box::pin(async move {
            let listening = || world.listening.lock().unwrap();
            listening().insert(address.clone(), service);
            stop.cancelled().await;
            listening().remove(&address);
            Ok(())
        })
    }
}

fn address(id: u8) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 7000 + u16::from(id)))
}

async fn start(world: &World, id: u8, disk: &MemoryDisk) -> (Replica, Journal) {
    let options = Options {
        id,
        data_dir: "/data".into(),
        advertise: address(id).to_string(),
        cluster_name: raft::DEFAULT_NAME.to_owned(),
        labels: BTreeMap::from([("version".to_owned(), "1".to_owned())]),
        formation: Formation::Bootstrap {
            peers: Peers::List((1..=3).map(|id| address(id).to_string()).collect()),
            expect: 3,
            first_command: b"first".to_vec(),
        },
        heartbeat: Duration::from_millis(50),
        election_timeout: Duration::from_millis(150)..Duration::from_millis(300),
        snapshot_every_entries: 40,
        snapshot_every_bytes: 1 << 20,
        storage: Storage::Memory(disk.clone()),
    };
    let port = Port {
        world: world.clone(),
        local_addr: address(id),
    };
    let (journal, mailbox) = (Journal::default(), Arc::<Mailbox>::default());
    let started = Replica::start(options, Arc::new(port), journal.clone(), mailbox).await;
    let replica = started.unwrap();
    let (mut status, world) = (replica.watch(), world.clone());
    tokio::spawn(async move {
        while status.changed().await.is_ok() {
            let now = status.borrow_and_update().clone();
            world.note(&format!("{id} {now:?}"));
        }
    });
    (replica, journal)
}

async fn wait(replica: &Replica, wish: impl Fn(&Status) -> bool) -> Status {
    let mut status = replica.watch();
    let waiting = tokio::time::timeout(PATIENCE, status.wait_for(|status| wish(status)));
    let found = waiting.await.unwrap().unwrap();
    found.clone()
}

/// Proposes, crashes the leader and brings it back, until all agree. Answers the trace.
async fn run() -> Vec<String> {
    let world = World::new();
    let disks: Vec<MemoryDisk> = (0..3)
        .map(|_| MemoryDisk::with_sync(|| within_ms(8)))
        .collect();
    let mut replicas = Vec::new();
    for (id, disk) in (1..).zip(&disks) {
        replicas.push(start(&world, id, disk).await);
    }
    for round in 0..5 {
        for (replica, _) in &replicas {
            wait(replica, |status| {
                status.leader.is_some() && status.caught_up
            })
            .await;
        }
        let leader = usize::from(
            wait(&replicas[0].0, |s| s.leader.is_some())
                .await
                .leader
                .unwrap(),
        );
        let survivor = replicas[leader % 3].0.clone();
        let proposing = tokio::spawn(async move {
            for number in 0..30 {
                let command = format!("{round} {number}").into_bytes();
                // One that was lost with its leader is not missed.
                survivor.propose(command, Duration::from_secs(2)).await.ok();
            }
        });
        sleep(within_ms(300)).await;
        replicas[leader - 1].0.crash().await;
        disks[leader - 1].crash(|unsynced| chance::draw() as usize % (unsynced + 1));
        sleep(within_ms(1000)).await;
        replicas[leader - 1] = start(&world, leader as u8, &disks[leader - 1]).await;
        proposing.await.unwrap();
    }
    let (first, _) = &replicas[0];
    let last = first.propose(b"last".to_vec(), PATIENCE).await.unwrap();
    let mut journals = Vec::new();
    for (replica, journal) in &replicas {
        wait(replica, |status| status.applied >= last.index).await;
        journals.push(journal.commands());
    }
    assert!(journals[0].len() > 20, "{journals:?}");
    assert_eq!(journals[0], journals[1]);
    assert_eq!(journals[0], journals[2]);
    for (replica, _) in &replicas {
        replica.shutdown().await;
    }
    let trace = world.trace.lock().unwrap();
    trace.clone()
}

fn trace_of(seed: u64) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    chance::seed(seed);
    runtime.block_on(run())
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let [one, other] = [1, 2].map(|seed| {
        let first = trace_of(seed);
        let again = trace_of(seed);
        for (number, (one, other)) in first.iter().zip(&again).enumerate() {
            assert_eq!(one, other, "seed {seed}, line {number}");
        }
        assert_eq!(first.len(), again.len(), "seed {seed}");
        first
    });
    assert_ne!(one, other, "a seed decides");
}
