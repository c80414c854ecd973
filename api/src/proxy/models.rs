//! `GET /v1/models`: the union of what the backends serve that get requests, answered here.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};
use state::{Backend, Registry};

use crate::backends::Backends;

#[derive(Serialize)]
struct ModelListBody<'a> {
    object: &'static str,
    data: Vec<ModelEntry<'a>>,
}

/// One model, with what vLLM says of its own beside what OpenAI does.
#[derive(Serialize)]
struct ModelEntry<'a> {
    id: &'a str,
    object: &'static str,
    /// Unix seconds at which the oldest engine that serves it started; 0 when none told.
    created: u64,
    owned_by: &'static str,
    /// As the first engine that lists it says, as the two below.
    root: Option<String>,
    parent: Option<String>,
    /// The least of what its engines say: any of them may get the next request.
    max_model_len: Option<u64>,
    permission: Value,
}

impl<'a> ModelEntry<'a> {
    fn new(id: &'a str) -> Self {
        Self {
            id,
            object: "model",
            created: u64::MAX,
            owned_by: "quorate",
            root: None,
            parent: None,
            max_model_len: None,
            permission: json!([]),
        }
    }

    /// Adds what an engine says that serves it.
    fn add(&mut self, backend: &Backend, backends: &Backends) {
        let started = backend.facts.started_at_s.unwrap_or(0);
        self.created = self.created.min(started);
        let Some(listed) = backends.listed(backend.handle.slot, self.id) else {
            return;
        };
        let lengths = self.max_model_len.into_iter().chain(listed.max_model_len);
        self.max_model_len = lengths.min();
        self.root = self.root.take().or(listed.root);
        self.parent = self.parent.take().or(listed.parent);
        if let (true, Some(permission)) = (self.permission == json!([]), listed.permission) {
            self.permission = permission;
        }
    }
}

/// All models by id.
fn union<'a>(registry: &'a Registry, backends: &Backends) -> BTreeMap<&'a str, ModelEntry<'a>> {
    let mut models: BTreeMap<&str, ModelEntry<'_>> = BTreeMap::new();
    let is_serving = |it: &&Backend| !it.draining && backends.is_up(registry, it);
    for backend in registry.backends.iter().filter(is_serving) {
        for model in backend.named_models() {
            let entry = models.entry(model);
            let entry = entry.or_insert_with(|| ModelEntry::new(model));
            entry.add(backend, backends);
        }
    }
    models
}

/// Whether the list is empty.
pub(super) fn is_empty(registry: &Registry, backends: &Backends) -> bool {
    union(registry, backends).is_empty()
}

/// The list in OpenAI's shape, ordered by id, of those that the client may use.
pub(super) fn list(
    registry: &Registry,
    backends: &Backends,
    is_allowed: &dyn Fn(&str) -> bool,
) -> Bytes {
    let all = union(registry, backends).into_values();
    let data = all.filter(|entry| is_allowed(entry.id)).collect();
    let list = ModelListBody {
        object: "list",
        data,
    };
    serde_json::to_vec(&list)
        .expect("texts, numbers and JSON values serialise")
        .into()
}

/// One model of the list; `None` when no backend serves it that gets requests.
pub(super) fn one(registry: &Registry, backends: &Backends, id: &str) -> Option<Bytes> {
    let found = union(registry, backends).remove(id)?;
    Some(
        serde_json::to_vec(&found)
            .expect("texts, numbers and JSON values serialise")
            .into(),
    )
}

/// A model's name as an error repeats it.
pub(super) fn shown_model(model: &str) -> String {
    model[..model.floor_char_boundary(state::command::NAME_BYTES_MAX)].to_owned()
}

/// Tokens of a model's longest prompt: what its engines say, and what fits their caches at
/// `tokens_per_block`.
pub(super) fn context_tokens_max(
    registry: &Registry,
    backends: &Backends,
    model: &str,
    tokens_per_block: u32,
) -> Option<u64> {
    let serving = || registry.backends.iter().filter(|it| it.serves(model));
    let tokens = |blocks: u32| u64::from(blocks) * u64::from(tokens_per_block.max(1));
    let fitting = serving().filter_map(Backend::capacity_blocks).map(tokens);
    let told = serving().filter_map(|it| backends.listed(it.handle.slot, model)?.max_model_len);
    let (fitting, told) = (fitting.max(), told.min());
    fitting.into_iter().chain(told).min()
}
