//! Checks what an engine reports about itself: health, models, kind, metrics.

use api::engines::backends::{EngineKind, EngineMetrics};
use serde_json::Value;

use super::client::{EngineClient, refusal};
use super::{CheckOutcome, CheckResult};

/// Health paths that a replica probes, in order.
const HEALTH_PATHS: [&str; 3] = ["/ready", "/health", "/v1/models"];

pub(super) async fn health(client: &EngineClient) -> anyhow::Result<CheckResult> {
    let mut found = String::new();
    for path in HEALTH_PATHS {
        // Without a connection, the check cannot continue.
        let answer = client.get(path).await?;
        if answer.status.is_success() {
            return Ok(CheckResult::new(
                "health",
                CheckOutcome::Yes,
                format!("{path}: {}", answer.status.as_u16()),
                format!("probes ask {path}"),
            ));
        }
        let is_unknown = matches!(answer.status.as_u16(), 404 | 405 | 501);
        found = format!("{path}: {}", refusal(&answer));
        if !is_unknown {
            break;
        }
    }
    let therefore =
        "it counts as unhealthy and gets no requests; probes.health_path names another path";
    Ok(CheckResult::new(
        "health",
        CheckOutcome::No,
        found,
        therefore,
    ))
}

/// The models that an engine lists.
#[derive(Debug, Default)]
pub(super) struct ListedModels(Vec<Value>);

impl ListedModels {
    fn is_adapter(model: &Value) -> bool {
        model["parent"].is_string() && model["parent"] != model["id"]
    }

    /// Returns the id of the first model that is not an adapter.
    pub(super) fn first_base(&self) -> Option<String> {
        let base = self.0.iter().find(|model| !Self::is_adapter(model))?;
        base["id"].as_str().map(str::to_owned)
    }
}

pub(super) async fn models(client: &EngineClient) -> (CheckResult, ListedModels) {
    let answer = client.get("/v1/models").await;
    let listed = match answer {
        Ok(answer) if answer.status.is_success() => answer.json().map_err(|it| it.to_string()),
        Ok(answer) => Err(refusal(&answer)),
        Err(error) => Err(error.to_string()),
    };
    let listed = listed.and_then(|list| match list["data"].as_array() {
        Some(models) if !models.is_empty() => Ok(models.clone()),
        _ => Err("no list of models".to_owned()),
    });
    let models = match listed {
        Ok(models) => models,
        Err(why) => {
            let therefore = "its models must be named in the config";
            let check = CheckResult::new("models", CheckOutcome::No, why, therefore);
            return (check, ListedModels::default());
        }
    };
    // Field names of vLLM, Dynamo and llama.cpp. 0 says that the engine does not know the length.
    let length = |model: &Value| {
        let told = [
            &model["max_model_len"],
            &model["context_window"],
            &model["meta"]["n_ctx"],
        ];
        let mut told = told.into_iter().filter_map(Value::as_u64);
        told.find(|tokens| *tokens > 0)
    };
    let name = |model: &Value| {
        let id = model["id"].as_str().unwrap_or("?");
        match (model["parent"].as_str(), length(model)) {
            (Some(parent), _) if parent != id => format!("{id} (adapts {parent})"),
            (_, Some(tokens)) => format!("{id} ({tokens} tokens)"),
            _ => id.to_owned(),
        }
    };
    let names: Vec<_> = models.iter().map(name).collect();
    let tells_length = models.iter().any(|model| length(model).is_some());
    let therefore = match tells_length {
        true => "requests for these models come here, and /v1/models reports their lengths",
        false => "requests for these models come here",
    };
    let check = CheckResult::new("models", CheckOutcome::Yes, names.join(", "), therefore);
    (check, ListedModels(models))
}

/// Returns the kind and version of the engine, as far as it reports them.
pub(super) async fn kind(
    client: &EngineClient,
    models: &ListedModels,
) -> (Option<EngineKind>, Option<String>) {
    let json = async |path: &str| {
        let answer = client.get(path).await.ok()?;
        answer.success().ok()
    };
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut version = json("/version").await.and_then(|it| text(&it["version"]));
    let owner = models.0.first().and_then(|model| text(&model["owned_by"]));
    let kind = owner.as_deref().and_then(EngineKind::named);
    if version.is_none() {
        version = match kind {
            Some(EngineKind::LlamaCpp) => {
                json("/props").await.and_then(|it| text(&it["build_info"]))
            }
            _ => json("/server_info")
                .await
                .and_then(|it| text(&it["version"])),
        };
    }
    (kind, version)
}

pub(super) async fn metrics(client: &EngineClient) -> (CheckResult, Option<EngineMetrics>) {
    let page = client.get("/metrics").await;
    let metrics = match page {
        Ok(page) if page.status.is_success() => {
            EngineMetrics::read(&page.body, None).map_err(|error| error.to_string())
        }
        Ok(page) => Err(refusal(&page)),
        Err(error) => Err(error.to_string()),
    };
    let metrics = match metrics {
        Ok(metrics) => metrics,
        Err(why) => {
            let therefore = "load is what Quorate sent; capacity is assumed and learned from misses; \
                             a restart shows in refused connections and cache misses";
            return (
                CheckResult::new("metrics", CheckOutcome::No, why, therefore),
                None,
            );
        }
    };
    let figures = [
        ("running", metrics.running.is_some(), None),
        (
            "waiting",
            metrics.waiting.is_some(),
            Some("its own queue is unknown"),
        ),
        (
            "cache usage",
            metrics.kv_usage_permille.is_some(),
            Some("cache pressure is unknown"),
        ),
        (
            "capacity",
            metrics.cache_tokens.is_some(),
            Some("capacity is assumed and learned from misses"),
        ),
        (
            "block size",
            metrics.block_size.is_some(),
            Some("blocks of 16 tokens unless block_size is set"),
        ),
        (
            "start time",
            metrics.started_at_s.is_some(),
            Some("a restart shows in falling counters and cache misses"),
        ),
    ];
    let told: Vec<_> = figures.iter().filter(|it| it.1).map(|it| it.0).collect();
    let missing: Vec<_> = figures.iter().filter(|it| !it.1).collect();
    let outcome = match (told.len(), missing.len()) {
        (_, 0) => CheckOutcome::Yes,
        (0, _) => CheckOutcome::No,
        _ => CheckOutcome::Partly,
    };
    let found = match told.is_empty() {
        true => "no figure that is known".to_owned(),
        false => told.join(", "),
    };
    let consequences: Vec<_> = missing.iter().filter_map(|it| it.2).collect();
    let therefore = match consequences.is_empty() {
        true => "policies see its queue and cache, capacity and restarts are known".to_owned(),
        false => consequences.join("; "),
    };
    let check = CheckResult::new("metrics", outcome, found, therefore);
    (check, Some(metrics))
}
