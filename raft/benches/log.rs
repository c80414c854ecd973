//! Commands per second and their latency: one replica (the log alone) and three on loopback, on
//! sled, at 1 and 64 clients. `cargo bench -p raft`.

#![allow(missing_docs, reason = "the macro makes a public function")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use raft::{
    CorruptSnapshot, Formation, FrozenMachine, Machine, Options, PeerHandler, Peers, Replica,
    StopReplica, Storage,
};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

const PATIENCE: Duration = Duration::from_secs(30);

/// Applies at no cost.
struct Nothing;

impl Machine for Nothing {
    fn apply(&mut self, _index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplica> {
        black_box(command);
        Ok(Vec::new())
    }

    fn skip(&mut self, _index: u64) {}

    fn freeze(&self) -> Box<dyn FrozenMachine> {
        Box::new(Nothing)
    }

    fn restore(&mut self, _snapshot: &mut dyn Read) -> Result<(), CorruptSnapshot> {
        Ok(())
    }
}

impl FrozenMachine for Nothing {
    fn write_to(&self, _out: &mut dyn Write) -> std::io::Result<()> {
        Ok(())
    }
}

impl PeerHandler for Nothing {
    fn message(&self, _from: u8, _bytes: &[u8]) {}
}

/// A founded cluster; answers its leader. The folders live as long as the replicas.
async fn cluster(size: u8) -> (Replica, Vec<Replica>, Vec<TempDir>) {
    let mut listeners = Vec::new();
    for _ in 0..size {
        listeners.push(
            TcpListener::bind("127.0.0.1:0")
                .await
                .expect("loopback has ports"),
        );
    }
    let address = |listener: &TcpListener| listener.local_addr().expect("it is bound").to_string();
    let peers: Vec<String> = listeners.iter().map(address).collect();
    let (mut replicas, mut folders) = (Vec::new(), Vec::new());
    for (id, listener) in (1..).zip(listeners) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = Options {
            id,
            data_dir: folder.path().to_path_buf(),
            advertise: address(&listener),
            labels: BTreeMap::new(),
            formation: Formation::Bootstrap {
                peers: Peers::List(peers.clone()),
                expect: size.into(),
                first_command: Vec::new(),
            },
            heartbeat: Duration::from_millis(50),
            election_timeout: Duration::from_millis(300)..Duration::from_millis(600),
            snapshot_every_entries: 50_000,
            snapshot_every_bytes: 256 << 20,
            storage: Storage::Sled,
        };
        let replica = Replica::start(options, listener, Nothing, Arc::new(Nothing)).await;
        replicas.push(replica.expect("a new replica starts"));
        folders.push(folder);
    }
    let mut status = replicas[0].watch();
    let led = status.wait_for(|status| status.leader.is_some() && status.has_quorum);
    let leader = led
        .await
        .expect("the replica runs")
        .leader
        .expect("it was waited for");
    (replicas[usize::from(leader) - 1].clone(), replicas, folders)
}

/// Has `clients` propose `commands` in all; answers the time and each latency.
async fn load(
    leader: &Replica,
    clients: u64,
    commands: u64,
    bytes: usize,
    latencies: &Arc<Mutex<Vec<Duration>>>,
) -> Duration {
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..clients {
        let share = commands / clients + u64::from(client < commands % clients);
        let (leader, latencies) = (leader.clone(), latencies.clone());
        tasks.spawn(async move {
            let mut own = Vec::new();
            for _ in 0..share {
                let sent = Instant::now();
                leader
                    .propose(vec![7; bytes], PATIENCE)
                    .await
                    .expect("the cluster is healthy");
                own.push(sent.elapsed());
            }
            latencies.lock().expect("no task panics").extend(own);
        });
    }
    tasks.join_all().await;
    began.elapsed()
}

fn propose(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("a runtime");
    let mut group = criterion.benchmark_group("propose");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(4))
        .throughput(Throughput::Elements(1));
    for size in [1_u8, 3] {
        let (leader, replicas, _folders) = runtime.block_on(cluster(size));
        for bytes in [1024, 16 * 1024] {
            for clients in [1, 64] {
                let latencies = Arc::default();
                let name = format!("{size} replicas, {clients} clients");
                group.bench_function(BenchmarkId::new(name, bytes), |bencher| {
                    bencher.iter_custom(|commands| {
                        runtime.block_on(load(&leader, clients, commands, bytes, &latencies))
                    });
                });
                let mut all = latencies.lock().expect("no task panics");
                all.sort_unstable();
                let at = |percent: usize| all[(all.len() - 1) * percent / 100];
                println!(
                    "  latency p50 {:?} p99 {:?} of {}",
                    at(50),
                    at(99),
                    all.len()
                );
            }
        }
        runtime.block_on(async {
            for replica in replicas {
                replica.shutdown().await;
            }
        });
    }
    group.finish();
}

criterion_group!(benches, propose);
criterion_main!(benches);
