//! Panic mode, as in Envoy: if probes fail for too many of a model's backends at once, they are not
//! trusted, because a broken network in between is more likely than the failure of all these
//! engines.
//!
//! A backend is *doubtful* if it is unhealthy, but its last probe was not refused a connection: the
//! probe timed out or got a bad response. Panic mode starts when less than a given share of a
//! model's backends is healthy ([`super::ProbeSettings::panic_threshold_percent`]). Backends that
//! are certainly gone, draining or were never probed do not count. Doubtful backends that answered
//! a request recently are then used like healthy ones. Circuit breakers apply as usual.
//!
//! If none is healthy and none has answered recently, because there were no requests, backends that
//! once answered are tried, each with one request at a time as if its circuit were half-open. A
//! response is the evidence that panic mode needs.

use std::collections::BTreeSet;

use state::{Backend, Registry};
use tokio::time::Instant;

use super::{Backends, HealthFlags};

/// Stands for the models that no backend names. Engines that were not queried yet may serve them.
const UNNAMED: &str = "";
/// Displayed form of [`UNNAMED`].
const SHOWN_UNNAMED: &str = "*";

/// Specifies which doubtful backends of a model may get requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Doubt {
    /// No backends: probes are trusted.
    #[default]
    Nobody,
    /// Panic mode: the backends that answered a request recently.
    Answering,
    /// The backends that ever answered a request, with one request at a time each.
    Tried,
}

impl Backends {
    /// Returns the names of the models in panic mode; `"*"` stands for those that no backend names.
    #[must_use]
    pub fn panicking(&self, registry: &Registry) -> BTreeSet<String> {
        let now = Instant::now();
        let flags = |it: &Backend| self.health_flags(it.handle.slot);
        let is_doubtful = |it: &Backend| flags(it).is_some_and(|it| it.is_doubtful);
        if !registry.backends.iter().any(is_doubtful) {
            return BTreeSet::new();
        }
        let named = registry.backends.iter().flat_map(Backend::named_models);
        let models: BTreeSet<&str> = named.chain([UNNAMED]).collect();
        let panicking = models
            .into_iter()
            .filter(|model| self.doubt(registry, model, now) == Doubt::Answering);
        let shown = panicking.map(|model| match model {
            UNNAMED => SHOWN_UNNAMED,
            model => model,
        });
        shown.map(str::to_owned).collect()
    }

    /// Whether `backend` may get requests according to its health: it is healthy, or its probes are
    /// doubted for one of its models, so that it may at least be tried.
    #[must_use]
    pub fn is_up(&self, registry: &Registry, backend: &Backend) -> bool {
        let Some(flags) = self.health_flags(backend.handle.slot) else {
            return false;
        };
        let now = Instant::now();
        let is_needed = |model| {
            let doubt = self.doubt(registry, model, now);
            self.is_doubted(backend, flags, doubt, now)
        };
        flags.is_healthy
            || flags.is_doubtful && backend.named_models().chain([UNNAMED]).any(is_needed)
    }

    /// Returns whether, and for which backends of `model`, probes are doubted.
    pub(crate) fn doubt(&self, registry: &Registry, model: &str, now: Instant) -> Doubt {
        let (mut healthy, mut doubtful) = (0, 0);
        let (mut is_answering, mut is_known) = (false, false);
        for backend in &registry.backends {
            let Some(flags) = self.health_flags(backend.handle.slot) else {
                continue;
            };
            if backend.draining || !backend.serves(model) {
                continue;
            }
            healthy += usize::from(flags.is_healthy);
            doubtful += usize::from(flags.is_doubtful);
            is_answering |= self.is_doubted(backend, flags, Doubt::Answering, now);
            is_known |= self.is_doubted(backend, flags, Doubt::Tried, now);
        }
        if !self.are_below_threshold(healthy, doubtful) {
            Doubt::Nobody
        } else if is_answering {
            Doubt::Answering
        } else if healthy == 0 && is_known {
            Doubt::Tried
        } else {
            Doubt::Nobody
        }
    }

    /// Whether only probes consider `backend` unhealthy, and it may get requests nevertheless.
    pub(crate) fn is_doubted(
        &self,
        backend: &Backend,
        flags: HealthFlags,
        doubt: Doubt,
        now: Instant,
    ) -> bool {
        flags.is_doubtful
            && match doubt {
                Doubt::Nobody => false,
                Doubt::Answering => self.answered_lately(backend.handle, now),
                Doubt::Tried => self.has_answered(backend.handle),
            }
    }
}
