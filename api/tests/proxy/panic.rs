//! Probes that fail while requests are answered.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::engines::backends::{Fault, ProbeSettings};
use prometheus_client::registry::Registry;

use super::client::chat;
use super::engine::{Engine, json};
use super::fleet::{Fleet, eventually};

const ENGINES: usize = 3;

/// Three engines that answer every request, and probes only while `are_well`.
struct Bench {
    engines: Vec<Engine>,
    are_well: Arc<AtomicBool>,
    fleet: Fleet,
}

impl Bench {
    /// Starts the engines and lets each answer a request.
    async fn start(panic_threshold_percent: u32) -> Self {
        let are_well = Arc::new(AtomicBool::new(true));
        let mut engines = Vec::new();
        for _ in 0..ENGINES {
            let are_well = Arc::clone(&are_well);
            let answer = move |request: &str| {
                let is_answered = request.starts_with("POST") || are_well.load(Ordering::SeqCst);
                let status = if is_answered { "200 OK" } else { "500 Oops" };
                vec![json(status, "{}")]
            };
            engines.push(Engine::answering(answer).await);
        }
        let probes = ProbeSettings {
            interval: Duration::from_millis(5),
            registry_interval: Duration::from_millis(5),
            panic_threshold_percent,
            ..ProbeSettings::default()
        };
        let fleet = Fleet::start_probed(&engines.iter().collect::<Vec<_>>(), probes).await;
        let bench = Self {
            engines,
            are_well,
            fleet,
        };
        let mut client = bench.fleet.client().await;
        let mut answered = BTreeSet::new();
        while answered.len() < ENGINES {
            let answer = client.ask(chat("")).await;
            assert_eq!(answer.status, 200);
            answered.extend(answer.header("x-quorate-backend").map(str::to_owned));
        }
        bench
    }

    async fn until(&self, what: &str, holds: impl Fn(usize, bool, Option<Fault>) -> bool) {
        let record = |at| {
            let slot = self.fleet.backend(at).slot;
            self.fleet.backends.record(slot).unwrap()
        };
        let holds = |at| {
            let record = record(at);
            holds(at, record.is_healthy, record.fault)
        };
        eventually(what, || (0..ENGINES).all(holds)).await;
    }

    fn metrics(&self) -> String {
        let router = &self.fleet.router;
        router.decider().refresh_metrics(&router.outbox().status());
        let mut registry = Registry::default();
        self.fleet.router.metrics().register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }
}

#[tokio::test]
async fn answering_engines_are_used_while_all_probes_fail() {
    let bench = Bench::start(50).await;
    assert!(!bench.metrics().contains("quorate_route_panic{"));
    bench.are_well.store(false, Ordering::SeqCst);
    bench
        .until("unhealthy", |_, is_healthy, _| !is_healthy)
        .await;
    let mut client = bench.fleet.client().await;
    for _ in 0..20 {
        assert_eq!(client.ask(chat("")).await.status, 200);
    }
    let models = client
        .ask("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        .await;
    assert!(models.body.contains("\"id\":\"m\""), "{}", models.body);
    let told = "quorate_route_panic{model=\"m\"} 1\n";
    assert!(bench.metrics().contains(told));
    bench.are_well.store(true, Ordering::SeqCst);
    bench.until("healthy", |_, is_healthy, _| is_healthy).await;
    assert!(!bench.metrics().contains("quorate_route_panic{"));
    bench.fleet.is_idle().await;
}

#[tokio::test]
async fn a_panic_threshold_of_zero_trusts_probes() {
    let bench = Bench::start(0).await;
    bench.are_well.store(false, Ordering::SeqCst);
    bench
        .until("unhealthy", |_, is_healthy, _| !is_healthy)
        .await;
    let answer = bench.fleet.client().await.ask(chat("")).await;
    answer.refuses(503, "no_healthy_backend");
}

#[tokio::test]
async fn engines_that_refuse_connections_are_not_used_in_panic() {
    let bench = Bench::start(50).await;
    bench.are_well.store(false, Ordering::SeqCst);
    bench.engines[1].kill();
    bench.engines[2].kill();
    let faults = [Fault::Unwell, Fault::Unreachable, Fault::Unreachable];
    let is_so = |at: usize, is_healthy: bool, fault| !is_healthy && fault == Some(faults[at]);
    bench.until("two are gone", is_so).await;
    let mut client = bench.fleet.client().await;
    for _ in 0..20 {
        let answer = client.ask(chat("")).await;
        let by = answer.header("x-quorate-backend");
        assert_eq!((answer.status, by), (200, Some("e0")));
    }
    assert_eq!(
        bench.fleet.metrics.retries.get(),
        0,
        "nobody else was tried"
    );
    bench.engines[0].kill();
    let is_gone = |_, _, fault| fault == Some(Fault::Unreachable);
    bench.until("all are gone", is_gone).await;
    let answer = client.ask(chat("")).await;
    answer.refuses(503, "no_healthy_backend");
    bench.fleet.is_idle().await;
}
