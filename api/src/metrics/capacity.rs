//! Metrics of the area `capacity`: how many engines each model needs.

use std::collections::BTreeSet;
use std::fmt;

use state::Backend;

use super::{MetricsPage, ScrapedReplica};

impl ScrapedReplica {
    /// Writes the figures of the models that a backend names or that have or had demand. They follow
    /// from the replicated state, so they are equal at every replica with the same applied index.
    pub(super) fn capacity(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let (registry, capacity) = (self.view.registry(), self.view.capacity());
        let named = registry.backends.iter().flat_map(Backend::named_models);
        let models: BTreeSet<&str> = named
            .chain(capacity.iter().map(|(model, _)| model))
            .collect();
        let rows = || models.iter().map(|model| (model, capacity.model(model)));
        page.gauges(
            "quorate_capacity_wanted_backends",
            "Engines that the model needs, the same number at every replica",
            "model",
            rows().map(|(model, it)| (model.to_string(), u64::from(it.wanted))),
        )?;
        page.gauges(
            "quorate_capacity_saturation_ratio",
            "Part of what the model's engines can do that its requests take, the same number at every replica",
            "model",
            rows().map(|(model, it)| {
                (model.to_string(), f64::from(it.saturation_permille) / 1000.0)
            }),
        )
    }
}
