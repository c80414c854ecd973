//! Panic mode, as Envoy calls it: probes that fail for too many of a model's backends at once are not
//! believed, because the way they take is likelier to be broken than all these engines.
//!
//! A backend is *doubtful* when it is unhealthy although the last probe of it was not refused a
//! connection: it timed out, or was answered badly. When less than a share of a model's backends are
//! healthy ([`crate::backends::ProbeSettings::panic_threshold_percent`]; those that are surely gone,
//! drain or were never probed do not count), the doubtful ones that answered a request lately are used
//! like healthy ones. Circuits hold as ever.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use state::{Backend, Registry};
use tokio::time::Instant;

use super::Router;
use crate::backends::Glance;

/// Stands for every model that nobody names, as engines serve that were not asked yet.
const UNNAMED: &str = "";
/// How it is shown.
const SHOWN_UNNAMED: &str = "*";

/// Models in panic mode as they were last seen, for log and metrics.
#[derive(Default)]
pub(super) struct Panics {
    models: Mutex<BTreeSet<String>>,
    /// How many these are: a look at it is all that a decision takes while there are none.
    count: AtomicUsize,
}

impl Panics {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Router {
    /// Models in panic mode, by name; `"*"` for those that nobody names.
    #[must_use]
    pub fn panicking(&self) -> BTreeSet<String> {
        let (registry, now) = (self.view.registry(), Instant::now());
        let is_doubtful = |it: &Backend| self.glance(it).is_some_and(|it| it.is_doubtful);
        if !registry.backends.iter().any(is_doubtful) {
            return BTreeSet::new();
        }
        let named = registry.backends.iter().flat_map(names);
        let models: BTreeSet<&str> = named.chain([UNNAMED]).collect();
        let panicking = models
            .into_iter()
            .filter(|model| self.is_panic(&registry, model, now));
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
        let Some(glance) = self.glance(backend) else {
            return false;
        };
        let now = Instant::now();
        let is_needed = |model| self.is_panic(registry, model, now);
        glance.is_healthy
            || self.may_lie(backend, glance, now) && names(backend).chain([UNNAMED]).any(is_needed)
    }

    /// Whether the probes of the backends that serve `model` are doubted.
    pub(super) fn is_panic(&self, registry: &Registry, model: &str, now: Instant) -> bool {
        let (mut healthy, mut doubtful, mut is_of_use) = (0, 0, false);
        for backend in &registry.backends {
            let Some(glance) = self.glance(backend) else {
                continue;
            };
            if backend.draining || !backend.serves(model) {
                continue;
            }
            healthy += usize::from(glance.is_healthy);
            doubtful += usize::from(glance.is_doubtful);
            is_of_use |= self.may_lie(backend, glance, now);
        }
        is_of_use && self.backends.are_below_threshold(healthy, doubtful)
    }

    /// Whether all that speaks against `backend` is probes, while requests speak for it.
    pub(super) fn may_lie(&self, backend: &Backend, glance: Glance, now: Instant) -> bool {
        glance.is_doubtful && self.backends.answered_lately(backend.handle, now)
    }

    /// Takes down whether a named model is in panic mode, as a decision has found.
    pub(super) fn note_panic(&self, registry: &Registry, model: &str, is_panic: bool) {
        if !is_panic && self.panics.count.load(Relaxed) == 0 {
            return;
        }
        let mut named = registry.backends.iter().flat_map(names);
        if named.any(|name| name == model) {
            self.tell_panic(model, is_panic);
        }
    }

    /// The same for all models, also for those that nobody asks for: called before a scrape.
    pub(super) fn note_panics(&self) {
        let panicking = self.panicking();
        let over: Vec<_> = self.panics.lock().difference(&panicking).cloned().collect();
        for model in over {
            self.tell_panic(&model, false);
        }
        for model in panicking {
            self.tell_panic(&model, true);
        }
    }

    /// The log tells of changes only.
    fn tell_panic(&self, model: &str, is_panic: bool) {
        let mut models = self.panics.lock();
        if models.contains(model) == is_panic {
            return;
        }
        if is_panic {
            models.insert(model.to_owned());
            tracing::warn!(model, "panic mode: probes fail while requests are answered");
        } else {
            models.remove(model);
            tracing::info!(model, "panic mode is over: probes are believed");
        }
        self.panics.count.store(models.len(), Relaxed);
        self.metrics.shows_panic(model, is_panic);
    }

    fn glance(&self, backend: &Backend) -> Option<Glance> {
        self.backends.glance(backend.handle.slot)
    }
}

/// The models that the operator or, under `"*"`, the engine names.
fn names(backend: &Backend) -> impl Iterator<Item = &str> {
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
