//! Measures throughput and latency of commands, with one replica (the log alone) and with three on
//! loopback, each with 1 and 64 clients. Logs are on sled. Run `cargo bench -p raft --bench log`.

#![allow(missing_docs, reason = "the macro makes a public function")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use raft::Replica;
use tokio::runtime::Runtime;

const PATIENCE: Duration = Duration::from_secs(30);

/// Proposes `commands` commands of `bytes` bytes each, spread over `clients` concurrent clients.
/// Returns the time taken, and adds the latency of each command to `latencies`.
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
        let timeout = Duration::from_millis(300)..Duration::from_millis(600);
        let seats = runtime.block_on(common::cluster(size, timeout));
        let leader = runtime.block_on(common::leader(&seats));
        let leader = seats[leader].replica.clone();
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
            for seat in seats {
                seat.replica.shutdown().await;
            }
        });
    }
    group.finish();
}

criterion_group!(benches, propose);
criterion_main!(benches);
