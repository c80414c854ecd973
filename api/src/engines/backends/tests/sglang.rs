//! Probes of SGLang engines, whose reports differ from vLLM's.

use super::*;
use crate::users::isolation::SaltedWork;

/// Returns an engine of SGLang `version` without metrics, which it exports only if enabled.
fn sglang(version: &'static str) -> impl Fn(&str) -> (StatusCode, String) + Send + Sync + 'static {
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
