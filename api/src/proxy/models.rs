//! `GET /v1/models`: the union of what the backends serve that get requests, answered here.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;
use state::{Backend, Registry};

#[derive(Serialize)]
struct ModelListBody<'a> {
    object: &'static str,
    data: Vec<ModelEntry<'a>>,
}

#[derive(Serialize)]
struct ModelEntry<'a> {
    id: &'a str,
    object: &'static str,
    /// Unix seconds at which the oldest engine that serves it started; 0 when none told.
    created: u64,
    owned_by: &'static str,
}

/// All models by id, each with its `created`.
fn union(registry: &Registry, is_up: impl Fn(&Backend) -> bool) -> BTreeMap<&str, u64> {
    let mut models: BTreeMap<&str, u64> = BTreeMap::new();
    let serving = registry.backends.iter().filter(|b| !b.draining && is_up(b));
    for backend in serving {
        let told = backend.facts.models.iter().flatten();
        let is_any = backend.spec.models.iter().any(|model| model == "*");
        let named = backend.spec.models.iter().filter(|model| *model != "*");
        let started = backend.facts.started_at_s.unwrap_or(0);
        for model in named.chain(told.filter(|_| is_any)) {
            let created = models.entry(model.as_str()).or_insert(started);
            *created = (*created).min(started);
        }
    }
    models
}

fn entry((id, created): (&str, u64)) -> ModelEntry<'_> {
    ModelEntry {
        id,
        object: "model",
        created,
        owned_by: "quorate",
    }
}

/// The list in OpenAI's shape, ordered by id.
pub(super) fn list(registry: &Registry, is_up: impl Fn(&Backend) -> bool) -> Bytes {
    let data = union(registry, is_up).into_iter().map(entry).collect();
    let list = ModelListBody {
        object: "list",
        data,
    };
    serde_json::to_vec(&list)
        .expect("strings and numbers serialise")
        .into()
}

/// One model of the list; `None` when no backend serves it that gets requests.
pub(super) fn one(
    registry: &Registry,
    is_up: impl Fn(&Backend) -> bool,
    id: &str,
) -> Option<Bytes> {
    let models = union(registry, is_up);
    let found = models.into_iter().find(|(model, _)| *model == id)?;
    Some(
        serde_json::to_vec(&entry(found))
            .expect("strings and numbers serialise")
            .into(),
    )
}
