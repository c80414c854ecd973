//! Cost of probing: parsing an engine's metrics page, and reading health in the candidate loop of a
//! decision. `cargo bench -p api --bench probes`.

// The macros of the bench harness generate items that cannot be documented.
#![allow(missing_docs)]

use std::hint::black_box;

use api::engines::backends::{Backends, EngineMetrics, Health, ProbeSettings};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use state::ids::Slot;

/// Returns a page as long as a busy vLLM's (about 60 KB), made of the recorded sample.
fn page() -> Vec<u8> {
    include_str!("../src/engines/backends/samples/vllm.txt")
        .repeat(10)
        .into_bytes()
}

fn read_page(criterion: &mut Criterion) {
    let page = page();
    let mut group = criterion.benchmark_group("metrics-page");
    group.throughput(Throughput::Bytes(page.len() as u64));
    group.bench_function("read", |bench| {
        bench.iter(|| EngineMetrics::read(black_box(&page), None));
    });
    group.finish();
}

fn flags(criterion: &mut Criterion) {
    let backends = Backends::new(ProbeSettings::default());
    let health = Health {
        is_healthy: true,
        detail: None,
        waiting: 1,
        running: 2,
        kv_usage_permille: 3,
        adapters: None,
    };
    for slot in 0..1024 {
        backends.assume(Slot(slot), &health);
    }
    let mut group = criterion.benchmark_group("health");
    for slots in [8u16, 1024] {
        group.throughput(Throughput::Elements(slots.into()));
        group.bench_function(format!("flags-at-{slots}"), |bench| {
            bench.iter(|| {
                (0..slots)
                    .filter_map(|slot| backends.health_flags(black_box(Slot(slot))))
                    .filter(|flags| flags.is_healthy)
                    .count()
            });
        });
        group.bench_function(format!("health-of-{slots}"), |bench| {
            bench.iter(|| {
                (0..slots)
                    .filter_map(|slot| backends.health(black_box(Slot(slot))))
                    .filter(|health| health.is_healthy)
                    .count()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, read_page, flags);
criterion_main!(benches);
