//! Probes of SGLang engines, whose reports differ from vLLM's.

use super::*;
use crate::users::isolation::SaltedWork;

/// Returns an engine of SGLang `version` without metrics, which it exports only if enabled.
pub(super) fn sglang(
    version: &'static str,
) -> impl Fn(&str) -> (StatusCode, String) + Send + Sync + 'static {
    move |path| match path {
        "/ready" => (StatusCode::OK, String::new()),
        "/v1/models" => (StatusCode::OK, MODELS.replace("vllm", "sglang")),
        "/server_info" => {
            let info = json!({"disaggregation_mode": "null", "version": version});
            (StatusCode::OK, info.to_string())
        }
        _ => (StatusCode::NOT_FOUND, String::new()),
    }
}

#[tokio::test]
async fn the_version_tells_whether_salts_separate() {
    for (version, knows_salts) in [("0.5.23", true), ("0.5.22", false)] {
        let engine = Engine::start(sglang(version)).await;
        let bench = Bench::new(quick(), engine.addr);
        bench
            .until("a version", |backends| {
                let record = backends.record(Slot(0)).unwrap_or_default();
                record.version.as_deref() == Some(version)
            })
            .await;
        let registry = bench.cluster.state.view().registry();
        let knows = |work| bench.backends.knows_salts(&registry.backends[0], work);
        assert_eq!(knows(SaltedWork::Generation), knows_salts, "{version}");
        assert!(!knows(SaltedWork::Pooling), "{version}");
    }
}

/// Returns a llama.cpp engine without metrics, which it exports only if enabled.
fn llama_cpp(path: &str) -> (StatusCode, String) {
    match path {
        "/health" => (StatusCode::OK, String::new()),
        "/v1/models" => (StatusCode::OK, MODELS.replace("vllm", "llamacpp")),
        _ => (StatusCode::NOT_FOUND, String::new()),
    }
}

type EngineAnswers = Box<dyn Fn(&str) -> (StatusCode, String) + Send + Sync>;

#[tokio::test]
async fn an_engine_that_replaces_another_is_known_by_its_own_name() {
    let sglang = sglang("0.5.23");
    let engines: [(_, EngineAnswers); 3] = [
        (Some(EngineKind::Vllm), Box::new(vllm)),
        (Some(EngineKind::Sglang), Box::new(sglang)),
        // Its name alone tells nothing but that it is none of the others.
        (None, Box::new(llama_cpp)),
    ];
    let kinds = engines.each_ref().map(|(kind, _)| *kind);
    let running = Arc::new(AtomicUsize::new(0));
    let now = Arc::clone(&running);
    let engine = Engine::start(move |path| engines[now.load(Ordering::SeqCst)].1(path)).await;
    let bench = Bench::new(quick(), engine.addr);
    for next in [0, 1, 0, 2, 1, 2, 0] {
        running.store(next, Ordering::SeqCst);
        // As after a request that did not find its model, or a refused probe.
        bench.backends.doubt_list(Slot(0));
        let is_known = |backends: &Backends| backends.kind(Slot(0)) == kinds[next];
        bench.until("its kind", is_known).await;
    }
}
