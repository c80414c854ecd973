//! Replicas on one thread, over simulated time, disks and a network that can be cut.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::Frame;
use raft::{
    ConnectError, ConnectFailure, MemoryDisk, PeerChannel, PeerRequest, PeerResponse, PeerService,
    Replica, ReplicaOptions, Status, Storage, Transport, random,
};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::Status as Refusal;
use tonic::body::Body;
use tower::{Service, ServiceExt, service_fn};

use super::{Journal, Mailbox, PATIENCE, bootstrap, options};

/// The simulated network: its listeners, its cuts, and a timed trace of calls and status changes.
#[derive(Clone)]
pub struct World {
    began: Instant,
    listening: Arc<Mutex<BTreeMap<String, PeerService>>>,
    trace: Arc<Mutex<Vec<String>>>,
    cut: Arc<Mutex<Cut>>,
}

#[derive(Default)]
struct Cut {
    /// Directions (from, to) in which nothing passes, neither calls nor responses.
    ways: BTreeSet<(u8, u8)>,
    /// Replicas that no call reaches.
    deaf: BTreeSet<u8>,
}

pub fn within_ms(limit: u64) -> Duration {
    Duration::from_micros(random::draw() % (limit * 1000))
}

impl World {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            listening: Arc::default(),
            trace: Arc::default(),
            cut: Arc::default(),
        }
    }

    /// Returns the trace so far.
    pub fn trace(&self) -> Vec<String> {
        self.trace.lock().unwrap().clone()
    }

    /// Drops all calls and responses from `from` to `to` from now on.
    pub fn cut(&self, from: u8, to: u8) {
        self.cut.lock().unwrap().ways.insert((from, to));
    }

    /// Drops all calls to `id` from now on; responses to its own calls still arrive.
    pub fn deafen(&self, id: u8) {
        self.cut.lock().unwrap().deaf.insert(id);
    }

    fn note(&self, what: &str) {
        let at = self.began.elapsed();
        self.trace.lock().unwrap().push(format!("{at:?} {what}"));
    }

    /// Whether a call of `from` reaches `to`.
    fn passes(&self, from: u8, to: u8) -> bool {
        let cut = self.cut.lock().unwrap();
        !cut.ways.contains(&(from, to)) && !cut.deaf.contains(&to)
    }

    /// Whether the response to a call of `from` to `to` reaches `from`.
    fn is_answered(&self, from: u8, to: u8) -> bool {
        !self.cut.lock().unwrap().ways.contains(&(to, from))
    }

    fn service(&self, to: u8) -> Result<PeerService, ConnectError> {
        let listening = self.listening.lock().unwrap();
        let address = address(to).to_string();
        let refused = || ConnectError {
            why: "refused".to_owned(),
            kind: ConnectFailure::Refused,
        };
        listening.get(&address).cloned().ok_or_else(refused)
    }

    async fn call(self, from: u8, to: u8, request: PeerRequest) -> Result<PeerResponse, Refusal> {
        self.note(&format!("{from} to {to} {}", request.uri().path()));
        sleep(within_ms(5)).await;
        if !self.passes(from, to) {
            std::future::pending::<()>().await;
        }
        let mut service = self
            .service(to)
            .map_err(|error| Refusal::unavailable(error.why))?;
        let world = self.clone();
        let request = request.map(|body| {
            Body::new(Way {
                body,
                world,
                ends: (from, to),
            })
        });
        let answered = service.ready().await.expect("it is ready").call(request);
        let answer = answered.await.expect("it answers");
        sleep(within_ms(5)).await;
        if !self.is_answered(from, to) {
            std::future::pending::<()>().await;
        }
        Ok(answer)
    }
}

/// Body of a call in transit. A stream over a link that is cut breaks at its next message.
struct Way {
    body: Body,
    world: World,
    ends: (u8, u8),
}

impl http_body::Body for Way {
    type Data = Bytes;
    type Error = Refusal;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Refusal>>> {
        let polled = http_body::Body::poll_frame(Pin::new(&mut self.body), context);
        let (from, to) = self.ends;
        match polled {
            Poll::Ready(Some(_)) if !self.world.passes(from, to) => {
                Poll::Ready(Some(Err(Refusal::unavailable("cut"))))
            }
            polled => polled,
        }
    }
}

struct Port {
    world: World,
    id: u8,
}

impl Transport for Port {
    fn local_addr(&self) -> SocketAddr {
        address(self.id)
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        let (world, from) = (self.world.clone(), self.id);
        Box::pin(async move {
            let to = id_of(&address);
            sleep(within_ms(5)).await;
            if !world.passes(from, to) || !world.is_answered(from, to) {
                std::future::pending::<()>().await;
            }
            drop(world.service(to)?);
            let calls = service_fn(move |request| world.clone().call(from, to, request));
            Ok(PeerChannel::new(calls))
        })
    }

    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, std::io::Result<()>> {
        let (world, address) = (self.world.clone(), self.local_addr().to_string());
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

fn id_of(address: &str) -> u8 {
    let address: SocketAddr = address.parse().unwrap();
    u8::try_from(address.port() - 7000).unwrap()
}

/// Starts a replica of a cluster founded by `voters`.
pub async fn start(world: &World, id: u8, voters: u8, disk: &MemoryDisk) -> (Replica, Journal) {
    let peers: Vec<String> = (1..=voters).map(|id| address(id).to_string()).collect();
    let formation = bootstrap(&peers, voters.into());
    let options = ReplicaOptions {
        advertise: address(id).to_string(),
        election_timeout: Duration::from_millis(150)..Duration::from_millis(300),
        snapshot_every_entries: 40,
        snapshot_every_bytes: 1 << 20,
        storage: Storage::Memory(disk.clone()),
        ..options(id, Path::new("/data"), formation)
    };
    let port = Port {
        world: world.clone(),
        id,
    };
    let (journal, mailbox) = (Journal::default(), Arc::<Mailbox>::default());
    let started = Replica::start(options, Arc::new(port), Box::new(journal.clone()), mailbox).await;
    let replica = started.unwrap();
    let (mut status, world) = (replica.watch(), world.clone());
    tokio::spawn(async move {
        while status.changed().await.is_ok() {
            let mut now = status.borrow_and_update().clone();
            // Times print as those of this machine.
            now.members
                .values_mut()
                .for_each(|it| it.silent_since = None);
            world.note(&format!("{id} {now:?}"));
        }
    });
    (replica, journal)
}

pub async fn wait(replica: &Replica, wish: impl Fn(&Status) -> bool) -> Status {
    let mut status = replica.watch();
    let waiting = tokio::time::timeout(PATIENCE, status.wait_for(|status| wish(status)));
    let found = waiting.await.unwrap().unwrap();
    found.clone()
}

/// Runs `test` in simulated time, with random numbers from `seed`.
pub fn simulate<T>(seed: u64, test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    random::seed(seed);
    runtime.block_on(test)
}
