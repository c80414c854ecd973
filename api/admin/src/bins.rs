//! Output lengths and what is derived from them: bins per model, the requests waiting in those bins
//! at this replica, and the concurrency limit of each backend.

use std::collections::BTreeMap;

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::{LogIndex, ModelKey};
use state::outputs::Boundaries;
use state::prefix::model_key;
use state::service::LimitFigures;
use state::{Backend, Registry};

use super::AdminState;
use super::answer::{Answer, QueryParams, ReadQuery, registry_at};
use api::admission::ModelQueueView;
use api::error::Problem;

#[derive(Serialize, JsonSchema)]
pub(super) struct BinsResponse {
    index: LogIndex,
    models: Vec<ModelBins>,
    /// Requests waiting at this replica.
    waiting: Vec<ModelQueueView>,
    backends: Vec<BackendBins>,
}

#[derive(Serialize, JsonSchema)]
struct ModelBins {
    /// Hash of the name, 16 hex digits: the state does not store model names.
    key: String,
    /// Name of the model, if a backend is configured with it or lists it.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Lower bound of each bin but the first, in output tokens.
    boundaries: Boundaries,
    /// Number of outputs observed.
    seen: u64,
    /// Predicted output length of an unknown user, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    median: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
struct BackendBins {
    backend: String,
    #[serde(flatten)]
    limit: Option<LimitFigures>,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<BinsResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let names = model_names(&registry);
    let outputs = admin.view.outputs();
    let models = outputs.models().map(|(key, outputs)| ModelBins {
        key: format!("{:016x}", key.0),
        name: names.get(&key).cloned(),
        boundaries: outputs.boundaries().clone(),
        seen: outputs.seen(),
        median: outputs.histogram().median(),
    });
    let service = admin.view.service();
    let backends = registry.backends.iter().map(|backend| BackendBins {
        backend: backend.spec.id.clone(),
        limit: service.get(backend.handle.slot).map(|served| served.limits),
    });
    Ok(Answer(BinsResponse {
        index,
        models: models.collect(),
        waiting: admin.admission.queues(),
        backends: backends.collect(),
    }))
}

/// Returns the names of the models that backends have by their config or their engines' lists.
pub(super) fn model_names(registry: &Registry) -> BTreeMap<ModelKey, String> {
    let backends = registry.backends.iter();
    let listed = |it: &Backend| it.facts.models.clone().unwrap_or_default();
    let named = backends.flat_map(|it| it.spec.models.iter().cloned().chain(listed(it)));
    named
        .map(|name| (model_key(registry.hash_seed, &name), name))
        .collect()
}
