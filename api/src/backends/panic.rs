//! Panic mode, as Envoy calls it: probes that fail for too many of a model's backends at once are not
//! believed, because the network between is likelier to be broken than all these engines.
//!
//! A backend is *doubtful* when it is unhealthy although the last probe of it was not refused a
//! connection: it timed out, or was answered badly. When less than a share of a model's backends are
//! healthy ([`super::ProbeSettings::panic_threshold_percent`]; those that are surely gone, drain or were
//! never probed do not count), the doubtful ones that answered a request lately are used like healthy
//! ones. Circuits hold as ever.

use std::collections::BTreeSet;

use state::{Backend, Registry};
use tokio::time::Instant;

use super::{Backends, Glance};

/// Stands for every model that no backend names, as engines serve that were not asked yet.
const UNNAMED: &str = "";
/// How it is shown.
const SHOWN_UNNAMED: &str = "*";

impl Backends {
    /// Models in panic mode, by name; `"*"` for those that no backend names.
    #[must_use]
    pub fn panicking(&self, registry: &Registry) -> BTreeSet<String> {
        let now = Instant::now();
        let glance = |it: &Backend| self.glance(it.handle.slot);
        let is_doubtful = |it: &Backend| glance(it).is_some_and(|it| it.is_doubtful);
        if !registry.backends.iter().any(is_doubtful) {
            return BTreeSet::new();
        }
        let named = registry.backends.iter().flat_map(named_models);
        let models: BTreeSet<&str> = named.chain([UNNAMED]).collect();
        let panicking = models
            .into_iter()
            .filter(|model| self.is_panic(registry, model, now));
        let shown = panicking.map(|model| match model {
            UNNAMED => SHOWN_UNNAMED,
            model => model,
        });
        shown.map(str::to_owned).collect()
    }

    /// Whether `backend` gets requests as far as its health goes: it is healthy, or its probes are
    /// doubted for one of its models.
    #[must_use]
    pub fn is_up(&self, registry: &Registry, backend: &Backend) -> bool {
        let Some(glance) = self.glance(backend.handle.slot) else {
            return false;
        };
        let now = Instant::now();
        let is_needed = |model| self.is_panic(registry, model, now);
        glance.is_healthy
            || self.may_lie(backend, glance, now)
                && named_models(backend).chain([UNNAMED]).any(is_needed)
    }

    /// Whether the probes of the backends that serve `model` are doubted.
    pub(crate) fn is_panic(&self, registry: &Registry, model: &str, now: Instant) -> bool {
        let (mut healthy, mut doubtful, mut is_of_use) = (0, 0, false);
        for backend in &registry.backends {
            let Some(glance) = self.glance(backend.handle.slot) else {
                continue;
            };
            if backend.draining || !backend.serves(model) {
                continue;
            }
            healthy += usize::from(glance.is_healthy);
            doubtful += usize::from(glance.is_doubtful);
            is_of_use |= self.may_lie(backend, glance, now);
        }
        is_of_use && self.are_below_threshold(healthy, doubtful)
    }

    /// Whether only probes say that `backend` is unhealthy, while it answers requests.
    pub(crate) fn may_lie(&self, backend: &Backend, glance: Glance, now: Instant) -> bool {
        glance.is_doubtful && self.answered_lately(backend.handle, now)
    }
}

/// The models that the operator or, under `"*"`, the engine names.
pub(crate) fn named_models(backend: &Backend) -> impl Iterator<Item = &str> {
    let models = &backend.spec.models;
    let is_any = models.iter().any(|model| model == "*");
    let listed = backend
        .facts
        .models
        .iter()
        .flatten()
        .filter(move |_| is_any);
    let named = models.iter().filter(|model| *model != "*");
    named.chain(listed).map(String::as_str)
}
