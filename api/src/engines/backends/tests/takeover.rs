//! The list of models as a part of health: engines that refuse it, that come back as another one, or
//! that are registered under a client's base URL.

use state::command::Item;
use state::ids::{AttemptId, UserKey};

use super::*;

/// Starts an engine whose models are behind a key while the switch is on.
async fn locked() -> (Engine, Arc<AtomicBool>) {
    let is_locked = Arc::new(AtomicBool::new(true));
    let switch = Arc::clone(&is_locked);
    let engine = Engine::start(move |path| match path {
        "/v1/models" if switch.load(Ordering::SeqCst) => (
            StatusCode::UNAUTHORIZED,
            r#"{"error":"Unauthorized"}"#.to_owned(),
        ),
        path => vllm(path),
    });
    (engine.await, is_locked)
}

#[tokio::test]
async fn an_engine_that_refuses_the_key_is_unhealthy_and_says_what_to_set() {
    let (engine, is_locked) = locked().await;
    let bench = Bench::new(quick(), engine.addr);
    let is_told = |backends: &Backends| {
        let record = backends.record(Slot(0)).unwrap_or_default();
        let detail = record.detail.unwrap_or_default();
        let is_told = detail.starts_with("/v1/models: status 401; set api_key_file");
        // A passed liveness probe changes nothing.
        !record.is_healthy && is_told && record.probes_total > 2
    };
    bench.until("the reason", is_told).await;
    assert!(!bench.backends.health_flags(Slot(0)).unwrap().is_doubtful);
    is_locked.store(false, Ordering::SeqCst);
    bench.until_healthy(true).await;
    assert_eq!(bench.backends.health(Slot(0)).unwrap().detail, None);
    is_locked.store(true, Ordering::SeqCst);
    bench.backends.doubt_list(Slot(0));
    bench.until_healthy(false).await;
}

#[tokio::test]
async fn a_backend_is_healthy_once_its_models_are_listed() {
    let gate = Arc::new(AtomicBool::new(false));
    let listed = Arc::clone(&gate);
    let engine = Engine::start(move |path| {
        if path == "/v1/models" {
            listed.store(true, Ordering::SeqCst);
        }
        vllm(path)
    })
    .await;
    let bench = Bench::new(quick(), engine.addr);
    bench.until_healthy(true).await;
    assert!(gate.load(Ordering::SeqCst));
}

#[tokio::test]
async fn another_process_lists_its_models_at_once() {
    let runs = Arc::new(AtomicUsize::new(0));
    let run = Arc::clone(&runs);
    let engine = Engine::start(move |path| match (path, run.load(Ordering::SeqCst)) {
        ("/v1/models", 1..) => (StatusCode::OK, MODELS.replace("\"m\"", "\"other\"")),
        ("/metrics", 1) => (
            StatusCode::OK,
            PAGE.replace(
                "process_start_time_seconds 1.7",
                "process_start_time_seconds 1.8",
            ),
        ),
        _ => vllm(path),
    })
    .await;
    let hourly = ProbeSettings {
        models_interval: Duration::from_secs(3600),
        ..quick()
    };
    for is_told in [true, false] {
        runs.store(0, Ordering::SeqCst);
        let bench = Bench::new(hourly.clone(), engine.addr);
        let lists = |model: &'static str| {
            move |backends: &Backends| backends.listed(Slot(0), model).is_some()
        };
        bench.until("the first list", lists("m")).await;
        bench.until_healthy(true).await;
        // The second process tells its start, or a request finds that the model is gone.
        runs.store(if is_told { 1 } else { 2 }, Ordering::SeqCst);
        if !is_told {
            bench.backends.doubt_list(Slot(0));
        }
        bench.until("the second list", lists("other")).await;
    }
}

#[tokio::test]
async fn a_base_url_of_clients_is_pointed_out() {
    let engine = Engine::start(|path| match path {
        "/health" | "/v1/models" => vllm(path),
        _ => (StatusCode::NOT_FOUND, String::new()),
    })
    .await;
    let mut bench = Bench::new(quick(), engine.addr);
    bench.cluster.apply(Command::PutBackend(BackendSpec {
        id: "gpu-1".to_owned(),
        url: format!("http://{}/v1", engine.addr),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks: None,
        kv_events: None,
        kv_replay: None,
        role: BackendRole::Both,
    }));
    bench
        .until("the hint", |backends| {
            let detail = backends.health(Slot(0)).and_then(|it| it.detail.clone());
            detail.is_some_and(|it| it.ends_with("leave /v1 out of the backend's URL"))
        })
        .await;
}

#[test]
fn an_engine_that_refuses_credentials_is_unhealthy() {
    let board = HealthTable::new(1);
    let occupancy = Some(board.register(Slot(0), "a"));
    board.update(Slot(0), occupancy, ProbeRecord::passed);
    let why = || Some("status 401".to_owned());
    let locked = board.update(Slot(0), occupancy, |record| record.locked_out(why()));
    assert_eq!(locked, Some(false));
    assert_eq!(board.update(Slot(0), occupancy, ProbeRecord::passed), None);
    assert_eq!(board.health(Slot(0)).unwrap().detail, why());
    for _ in 0..FAILURES_MAX {
        board.update(Slot(0), occupancy, |r| {
            r.probe_failed(Fault::Unwell, "slow".into());
        });
    }
    assert!(!board.flags(Slot(0)).unwrap().is_doubtful);
    board.update(Slot(0), occupancy, |record| record.locked_out(None));
    assert_eq!(
        board.update(Slot(0), occupancy, ProbeRecord::passed),
        Some(true)
    );
    assert_eq!(
        board.record(Slot(0)).unwrap().list_doubts_total,
        1,
        "it had failed"
    );
}

/// Waits until the cluster was told what the engine does with the last block of hits.
async fn told_drop(bench: &mut Bench) -> bool {
    let telling = async {
        loop {
            let (backend, facts) = bench.told.recv().await.unwrap();
            let drops = facts.drops_last_block;
            bench.cluster.apply(Command::Batch {
                base_attempt: AttemptId(0),
                items: vec![Item::ObserveEngine { backend, facts }],
            });
            if let Some(drops) = drops {
                return drops;
            }
        }
    };
    tokio::time::timeout(PATIENCE, telling).await.unwrap()
}

/// Runs, one after the other at an address, an engine that speculates and drops blocks, and
/// `successor`.
async fn told_of_successor(
    successor: impl Fn(&str) -> (StatusCode, String) + Send + Sync + 'static,
) -> bool {
    let is_first = Arc::new(AtomicBool::new(true));
    let switch = Arc::clone(&is_first);
    let engine = Engine::start(move |path| match (switch.load(Ordering::SeqCst), path) {
        (true, "/metrics") => (
            StatusCode::OK,
            format!("{PAGE}vllm:spec_decode_num_drafts_total 5\n"),
        ),
        (true, path) => vllm(path),
        (false, path) => successor(path),
    })
    .await;
    let mut bench = Bench::new(quick(), engine.addr);
    bench.until_healthy(true).await;
    let has_page = |backends: &Backends| {
        let record = backends.record(Slot(0)).unwrap_or_default();
        record.metrics.block_size == Some(16)
    };
    bench.until("a metrics page", has_page).await;
    let backend = bench.cluster.state.view().registry().backends[0].handle;
    for user in 0..16 {
        let found = FoundTokens {
            user: UserKey(user),
            predicted: 512,
            cached: 496,
            leaves_out: Some(false),
        };
        bench.backends.found_cached(backend, found);
    }
    assert!(told_drop(&mut bench).await);
    is_first.store(false, Ordering::SeqCst);
    // As after a request that did not find its model.
    bench.backends.doubt_list(Slot(0));
    told_drop(&mut bench).await
}

#[tokio::test]
async fn shorter_hits_show_that_an_engine_drops_its_last_block() {
    assert!(!told_of_successor(vllm).await, "it has no speculator");
}

#[tokio::test]
async fn an_engine_of_another_kind_does_not_inherit_dropped_blocks() {
    // SGLang exports no metrics unless told to.
    let sglang = sglang::sglang("0.5.23");
    assert!(!told_of_successor(sglang).await);
}
