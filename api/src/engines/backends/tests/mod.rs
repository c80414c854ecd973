//! Probes against engines on loopback: when a backend becomes healthy, unhealthy and gone, and what
//! is reported to the cluster.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::extract::Request;
use axum::response::IntoResponse;
use http::StatusCode;
use serde_json::json;
use state::RouterState;
use state::command::{BackendRole, BackendSpec, Command, Envelope, Founding, Lane, Origin, Reply};
use state::ids::{LogIndex, ReplicaId, SessionId};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::*;

mod sglang;
mod takeover;

const PAGE: &str = include_str!("../samples/vllm.txt");
const MODELS: &str = r#"{"object":"list","data":[{"id":"m","owned_by":"vllm"}]}"#;
/// Timeout of every wait. Nothing here takes long, and a hanging test must fail.
const PATIENCE: Duration = Duration::from_secs(30);

/// A replicated state with a registry, which commands change as the log would.
struct Cluster {
    state: RouterState,
    seq: u64,
}

impl Cluster {
    fn new() -> Self {
        Self {
            state: RouterState::new(),
            seq: 0,
        }
    }

    fn apply(&mut self, command: Command) {
        self.seq += 1;
        let lane = match command {
            Command::Batch { .. } => Lane::Outbox,
            _ => Lane::Admin,
        };
        let reply = self.state.apply(
            LogIndex(self.seq),
            Envelope {
                origin: Origin {
                    replica: ReplicaId(1),
                    session: SessionId(1),
                    lane,
                    seq: self.seq,
                },
                proposed_at_ms: self.seq,
                command,
            },
        );
        assert!(
            matches!(reply, Reply::Applied | Reply::Batch(_)),
            "{reply:?}"
        );
    }

    fn put(&mut self, id: &str, addr: SocketAddr) {
        self.put_as(BackendRole::Both, BTreeMap::new(), (id, addr));
    }

    fn put_as(
        &mut self,
        role: BackendRole,
        labels: BTreeMap<String, String>,
        (id, addr): (&str, SocketAddr),
    ) {
        self.apply(Command::PutBackend(BackendSpec {
            id: id.to_owned(),
            url: format!("http://{addr}"),
            models: vec!["*".to_owned()],
            labels,
            capacity_blocks: None,
            kv_events: None,
            kv_replay: None,
            role,
        }));
    }
}

/// Probes of a cluster with one backend, and the reports that they send.
struct Bench {
    cluster: Cluster,
    backends: Arc<Backends>,
    told: mpsc::UnboundedReceiver<(BackendRef, EngineFacts)>,
    stop: CancellationToken,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn quick() -> ProbeSettings {
    ProbeSettings {
        interval: Duration::from_millis(5),
        registry_interval: Duration::from_millis(5),
        ..ProbeSettings::default()
    }
}

impl Bench {
    fn new(settings: ProbeSettings, addr: SocketAddr) -> Self {
        let mut cluster = Cluster::new();
        cluster.apply(Command::from(Founding::of_seed(
            1,
            state::policy::PolicyConfig::LeastRequest,
        )));
        cluster.put("gpu-1", addr);
        let backends = Arc::new(Backends::new(settings));
        let (tell, told) = mpsc::unbounded_channel();
        let hooks = Hooks {
            tokens_per_block: Arc::new(|_| 32.0),
            token_block_size: Arc::new(|_| None),
            observe_block_size: Arc::new(|_, _| {}),
            observe: Arc::new(move |backend, facts| drop(tell.send((backend, facts)))),
            is_leader: Arc::new(|| true),
            clock: crate::base::clock::Clock::default(),
        };
        let stop = CancellationToken::new();
        tokio::spawn(Arc::clone(&backends).run(cluster.state.view(), hooks, stop.clone()));
        Self {
            cluster,
            backends,
            told,
            stop,
        }
    }

    async fn until(&self, what: &str, holds: impl Fn(&Backends) -> bool) {
        let mut changes = self.backends.watch();
        let waiting = changes.wait_for(|_| holds(&self.backends));
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        waited
            .unwrap_or_else(|_| panic!("{what} did not come: {:?}", self.backends.record(Slot(0))))
            .unwrap();
    }

    async fn until_healthy(&self, is_healthy: bool) {
        let what = format!("healthy = {is_healthy}");
        self.until(&what, |backends| {
            backends
                .health_flags(Slot(0))
                .is_some_and(|g| g.is_healthy == is_healthy)
        })
        .await;
    }
}

/// An engine that serves a fixed response for each path and counts the requests.
struct Engine {
    addr: SocketAddr,
    asked: Arc<Mutex<BTreeMap<String, usize>>>,
    task: AbortHandle,
}

impl Engine {
    async fn start(answer: impl Fn(&str) -> (StatusCode, String) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(BTreeMap::new()));
        let answer = Arc::new(answer);
        let counted = Arc::clone(&asked);
        let service = axum::Router::new().fallback(move |request: Request| {
            let path = request.uri().path().to_owned();
            *counted.lock().unwrap().entry(path.clone()).or_default() += 1;
            let answer = Arc::clone(&answer);
            async move { answer(&path).into_response() }
        });
        let task = tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
        Self {
            addr,
            asked,
            task: task.abort_handle(),
        }
    }

    fn asked(&self, path: &str) -> usize {
        self.asked.lock().unwrap().get(path).copied().unwrap_or(0)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn vllm(path: &str) -> (StatusCode, String) {
    match path {
        "/health" => (StatusCode::OK, String::new()),
        "/metrics" => (StatusCode::OK, PAGE.to_owned()),
        "/v1/models" => (StatusCode::OK, MODELS.to_owned()),
        "/version" => (StatusCode::OK, r#"{"version":"0.32.0"}"#.to_owned()),
        _ => (
            StatusCode::NOT_FOUND,
            "{\"detail\":\"Not Found\"}".to_owned(),
        ),
    }
}

#[tokio::test]
async fn a_vllm_engine_becomes_healthy_and_is_described() {
    let engine = Engine::start(vllm).await;
    let mut bench = Bench::new(quick(), engine.addr);
    bench.until_healthy(true).await;
    bench
        .until("figures", |backends| {
            backends
                .health_flags(Slot(0))
                .is_some_and(|g| g.waiting == 3)
        })
        .await;
    let health = bench.backends.health(Slot(0)).unwrap();
    assert_eq!(
        *health,
        Health {
            is_healthy: true,
            detail: None,
            waiting: 3,
            running: 7,
            kv_usage_permille: 418,
            adapters: None,
        }
    );
    let (backend, facts) = bench.told.recv().await.unwrap();
    assert_eq!(backend.slot, Slot(0));
    assert_eq!(
        facts,
        EngineFacts {
            models: Some(vec!["m".to_owned()]),
            capacity_blocks: Some(27_520 / 2),
            started_at_s: Some(1_763_630_102),
            ..EngineFacts::default()
        }
    );
}

#[tokio::test]
async fn engine_kind_and_version_are_detected() {
    let engine = Engine::start(vllm).await;
    let bench = Bench::new(quick(), engine.addr);
    bench
        .until("a version", |backends| {
            let record = backends.record(Slot(0)).unwrap_or_default();
            record.version.as_deref() == Some("0.32.0")
        })
        .await;
    let listed = bench.backends.listed(Slot(0), "m").unwrap();
    let owner = listed.owned_by.as_deref();
    assert_eq!(owner.and_then(EngineKind::named), Some(EngineKind::Vllm));
}

#[tokio::test]
async fn an_engines_role_is_known_before_it_gets_requests() {
    // SGLang without metrics, which it exports only if enabled.
    let sglang = |mode: &'static str| {
        move |path: &str| match path {
            "/ready" => (StatusCode::OK, String::new()),
            "/v1/models" => (StatusCode::OK, MODELS.replace("vllm", "sglang")),
            "/server_info" => {
                let info = json!({
                    "disaggregation_mode": mode, "disaggregation_bootstrap_port": 9001,
                });
                (StatusCode::OK, info.to_string())
            }
            _ => (StatusCode::NOT_FOUND, String::new()),
        }
    };
    let label = |port: &str| BTreeMap::from([(BOOTSTRAP_PORT_LABEL.to_owned(), port.to_owned())]);
    let (prefill, none) = (BackendRole::Prefill, BTreeMap::new());
    for (mode, role, labels, expected) in [
        ("prefill", prefill, none.clone(), Some(9001)),
        ("prefill", prefill, label("7"), Some(7)),
        ("null", prefill, none.clone(), None),
        ("null", prefill, label("no port"), Some(9001)),
        ("prefill", BackendRole::Both, label("7"), None),
    ] {
        let engine = Engine::start(sglang(mode)).await;
        let mut bench = Bench::new(quick(), engine.addr);
        bench.cluster.put_as(role, labels, ("gpu-1", engine.addr));
        bench.until_healthy(true).await;
        let registry = bench.cluster.state.view().registry();
        let (backend, backends) = (&registry.backends[0], &bench.backends);
        let meets = backends.meets_in_rooms(backend);
        let port = meets.then(|| backends.bootstrap_port(backend));
        assert_eq!(port, expected, "{mode} {role:?}");
    }
}

#[tokio::test]
async fn the_liveness_path_is_detected() {
    for known in ["/ready", "/health", "/v1/models"] {
        let engine = Engine::start(move |path| match path == known {
            true => (StatusCode::OK, MODELS.to_owned()),
            false => (StatusCode::NOT_FOUND, String::new()),
        })
        .await;
        let bench = Bench::new(quick(), engine.addr);
        bench
            .until(known, |backends| {
                backends
                    .record(Slot(0))
                    .is_some_and(|r| r.is_healthy && r.probes_total >= 3)
            })
            .await;
        match known {
            "/ready" => assert_eq!(engine.asked("/health"), 0, "it would generate a token"),
            _ => assert_eq!(engine.asked("/ready"), 1, "found out once"),
        }
    }
}

#[tokio::test]
async fn an_engine_outage_and_recovery_is_detected() {
    let is_up = Arc::new(AtomicBool::new(true));
    let switch = Arc::clone(&is_up);
    let engine = Engine::start(move |path| match switch.load(Ordering::SeqCst) {
        true => vllm(path),
        false => (StatusCode::SERVICE_UNAVAILABLE, String::new()),
    })
    .await;
    let bench = Bench::new(quick(), engine.addr);
    bench.until_healthy(true).await;
    is_up.store(false, Ordering::SeqCst);
    bench.until_healthy(false).await;
    is_up.store(true, Ordering::SeqCst);
    bench.until_healthy(true).await;
}

#[tokio::test]
async fn a_refused_connection_is_a_probe_failure() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = free.local_addr().unwrap();
    drop(free);
    let bench = Bench::new(quick(), addr);
    bench
        .until("a refusal", |backends| {
            let record = backends.record(Slot(0)).unwrap_or_default();
            !record.is_healthy
                && record
                    .detail
                    .is_some_and(|why| why.starts_with("connect: "))
        })
        .await;
}

#[tokio::test]
async fn a_failed_request_advances_the_next_probe() {
    let engine = Engine::start(vllm).await;
    let settings = ProbeSettings {
        interval: PATIENCE * 10,
        ..quick()
    };
    let bench = Bench::new(settings, engine.addr);
    bench.until_healthy(true).await;
    let before = bench.backends.record(Slot(0)).unwrap().probes_total;
    bench.backends.report_failure(Slot(0));
    bench.backends.report_failure(Slot(0));
    assert!(!bench.backends.health_flags(Slot(0)).unwrap().is_healthy);
    bench.until_healthy(true).await;
    assert!(bench.backends.record(Slot(0)).unwrap().probes_total > before);
}

#[tokio::test]
async fn an_error_status_makes_an_engine_unhealthy() {
    let engine = Engine::start(|_| (StatusCode::UNAUTHORIZED, String::new())).await;
    let bench = Bench::new(quick(), engine.addr);
    let said = |backends: &Backends| {
        let detail = backends.health(Slot(0)).and_then(|h| h.detail.clone());
        detail.as_deref() == Some("/ready: status 401")
    };
    bench.until("the status", said).await;
    assert!(!bench.backends.health(Slot(0)).unwrap().is_healthy);
}

#[tokio::test]
async fn an_oversize_metrics_page_does_not_make_unhealthy() {
    let engine = Engine::start(|path| match path {
        "/metrics" => (
            StatusCode::OK,
            "\n".repeat(prometheus_text::PAGE_BYTES_MAX + 1),
        ),
        path => vllm(path),
    })
    .await;
    let bench = Bench::new(quick(), engine.addr);
    bench
        .until("a refused page", |backends| {
            let record = backends.record(Slot(0)).unwrap_or_default();
            record.is_healthy && record.metrics_detail.is_some()
        })
        .await;
    let record = bench.backends.record(Slot(0)).unwrap();
    assert_eq!(
        record.metrics_detail.as_deref(),
        Some("body is longer than 4194304 bytes")
    );
    assert_eq!(record.metrics, EngineMetrics::default());
}

/// Listens for connections, passes each to `talk` and counts the open ones.
async fn raw<F>(talk: impl Fn(TcpStream) -> F + Send + 'static) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let open = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&open);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let talking = talk(stream);
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                talking.await;
                counted.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    (addr, open)
}

#[tokio::test]
async fn garbage_and_silence_are_probe_failures() {
    let (garbage, _) = raw(|mut stream| async move {
        use tokio::io::AsyncWriteExt;
        drop(stream.write_all(b"\x16\x03\x01 no http\r\n\r\n").await);
    })
    .await;
    let (silence, _) = raw(|mut stream| async move {
        let mut sink = tokio::io::sink();
        drop(tokio::io::copy(&mut stream, &mut sink).await);
    })
    .await;
    for (addr, expected) in [(garbage, "http: "), (silence, "no response within")] {
        let settings = ProbeSettings {
            timeout: Duration::from_millis(50),
            ..quick()
        };
        let bench = Bench::new(settings, addr);
        bench
            .until(expected, |backends| {
                let record = backends.record(Slot(0)).unwrap_or_default();
                record.failures_in_row >= 2
                    && record
                        .detail
                        .is_some_and(|detail| detail.starts_with(expected))
            })
            .await;
        assert!(!bench.backends.health_flags(Slot(0)).unwrap().is_healthy);
    }
}

#[tokio::test]
async fn removing_a_backend_closes_its_connections() {
    // Responds to everything, keeps the connection, and ends when the other side closes it.
    let (closed, mut closings) = mpsc::unbounded_channel();
    let (addr, open) = raw(move |mut stream| {
        let closed = closed.clone();
        async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut request = [0; 4096];
            while matches!(stream.read(&mut request).await, Ok(1..)) {
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                if stream.write_all(answer).await.is_err() {
                    break;
                }
            }
            closed.send(()).ok();
        }
    })
    .await;
    let mut bench = Bench::new(quick(), addr);
    bench.until_healthy(true).await;
    bench
        .until("both connections", |_| open.load(Ordering::SeqCst) == 2)
        .await;
    bench.cluster.apply(Command::DeleteBackend {
        name: "gpu-1".to_owned(),
    });
    bench
        .until("the end", |backends| backends.health(Slot(0)).is_none())
        .await;
    for _ in 0..2 {
        let closing = tokio::time::timeout(PATIENCE, closings.recv()).await;
        closing.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_moved_backend_is_probed_afresh_at_its_new_url() {
    let first = Engine::start(vllm).await;
    let second = Engine::start(|_| (StatusCode::SERVICE_UNAVAILABLE, String::new())).await;
    let mut bench = Bench::new(quick(), first.addr);
    bench.until_healthy(true).await;
    bench.cluster.put("gpu-1", second.addr);
    bench.until_healthy(false).await;
    bench.until("a probe", |_| second.asked("/ready") > 0).await;
}

#[tokio::test]
async fn health_changes_are_published() {
    let engine = Engine::start(vllm).await;
    let bench = Bench::new(quick(), engine.addr);
    let events = EventBus::default();
    let mut stream = events.subscribe();
    bench.backends.announce(events);
    bench.until_healthy(true).await;
    bench.backends.report_failure(Slot(0));
    bench.backends.report_failure(Slot(0));
    let unhealthy = loop {
        let event = tokio::time::timeout(PATIENCE, stream.recv()).await;
        if let ClusterEvent::BackendHealth {
            is_healthy: false,
            detail,
            id,
        } = &event.unwrap().unwrap().event
        {
            break (id.clone(), detail.clone());
        }
    };
    assert_eq!(
        unhealthy,
        ("gpu-1".to_owned(), Some("a request failed".to_owned()))
    );
}

#[tokio::test]
async fn a_backend_reusing_slot_and_engine_has_its_own_name() {
    let engine = Engine::start(vllm).await;
    let mut bench = Bench::new(quick(), engine.addr);
    bench.until_healthy(true).await;
    // Between two checks of the registry, so that the slot is never seen empty.
    bench.cluster.apply(Command::DeleteBackend {
        name: "gpu-1".to_owned(),
    });
    bench.cluster.put("gpu-2", engine.addr);
    bench
        .until("the new name", |backends| {
            backends
                .record(Slot(0))
                .is_some_and(|record| record.id == "gpu-2" && record.is_healthy)
        })
        .await;
}

#[tokio::test]
async fn adapter_changes_are_detected_by_the_next_probe() {
    let is_loaded = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_loaded);
    let engine = Engine::start(move |path| match path {
        "/metrics" => {
            let adapters = "vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"\",\
                            waiting_lora_adapters=\"\"} 1.0\n";
            (StatusCode::OK, format!("{PAGE}{adapters}"))
        }
        "/v1/models" if switch.load(Ordering::SeqCst) => {
            let list = r#"{"data":[{"id":"m"},{"id":"a","parent":"m"}]}"#;
            (StatusCode::OK, list.to_owned())
        }
        path => vllm(path),
    })
    .await;
    let settings = ProbeSettings {
        models_interval: PATIENCE * 10,
        ..quick()
    };
    let mut bench = Bench::new(settings, engine.addr);
    let first = bench.told.recv().await.unwrap();
    assert_eq!(first.1.models, Some(vec!["m".to_owned()]));
    for (loaded, models) in [(true, &["a", "m"][..]), (false, &["m"])] {
        is_loaded.store(loaded, Ordering::SeqCst);
        let expected = Some(models.iter().map(ToString::to_string).collect());
        let told = async {
            while let Some((_, facts)) = bench.told.recv().await {
                if facts.models == expected {
                    return;
                }
            }
        };
        tokio::time::timeout(PATIENCE, told).await.unwrap();
    }
}
