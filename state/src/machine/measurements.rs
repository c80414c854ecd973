//! Application of what replicas measured: service times, cache hits, output lengths and text.
//! Capacities and request limits follow from it.

use super::RouterState;
use crate::backends::Backend;
use crate::ids::{ModelKey, Slot, UserKey};
use crate::ratios::TextSample;
use crate::service::{
    self, Accuracy, AdaptiveLimit, BackendServiceView, BeliefSample, CapacityObservation,
    CapacitySource, LimitFigures, LimitSettings, ServiceSample, ServiceView,
};

impl RouterState {
    pub(super) fn observe_service(&mut self, sample: &ServiceSample) -> bool {
        let slot = sample.backend.slot;
        if !self.backends.is_live(sample.backend) || !sample.is_plausible() {
            return false;
        }
        let holding = self.capacity_observation(slot);
        let capacity_before = self.capacity_blocks(slot);
        let off_permille = self.settings.routing.prediction_off_permille;
        let figures = self.service.figures_mut(slot);
        figures.learning.observe(sample);
        figures.accuracy.observe(sample, off_permille, holding);
        if self.learns_assumed(slot) {
            let share = self.initial_capacity_share();
            self.assumed.observe(slot, sample, share, holding.owned);
        }
        let capacity = self.capacity_blocks(slot);
        if capacity != capacity_before {
            self.ownership.set_capacity(slot, capacity);
        }
        let settings = LimitSettings::from(&self.settings.admission);
        let told = self.uncorrected_capacity_blocks(slot);
        let limit = &mut self.service.figures_mut(slot).limit;
        limit.observe(sample, &settings, told);
        self.is_service_changed = true;
        true
    }

    pub(super) fn observe_belief(&mut self, sample: &BeliefSample) -> bool {
        let slot = sample.backend.slot;
        if !self.backends.is_live(sample.backend) || !sample.is_plausible() {
            return false;
        }
        let capacity_before = self.capacity_blocks(slot);
        self.beliefs
            .observe(sample, self.capacity_observation(slot));
        let capacity = self.capacity_blocks(slot);
        if capacity != capacity_before {
            self.ownership.set_capacity(slot, capacity);
            self.is_service_changed = true;
        }
        true
    }

    pub(super) fn observe_outputs(
        &mut self,
        user: UserKey,
        model: ModelKey,
        tokens: &[u32],
    ) -> bool {
        let bins = self.settings.admission.bins;
        let is_taken = self.outputs.observe(user, model, tokens, bins);
        self.is_outputs_changed |= is_taken;
        is_taken
    }

    pub(super) fn observe_text(&mut self, sample: &TextSample) -> bool {
        let is_taken = self.ratios.observe(sample);
        self.is_ratios_changed |= is_taken;
        is_taken
    }

    /// Whether the capacity of the backend in `slot` is learned from its responses: neither the
    /// operator nor the engine states it, and no KV events report the contents.
    fn learns_assumed(&self, slot: Slot) -> bool {
        let backend = self.backends.in_slot(slot);
        let is_taught = |it: &Backend| it.has_unknown_capacity() && it.spec.kv_events.is_none();
        backend.is_some_and(is_taught)
    }

    /// Returns the inputs for correcting the capacity that the engine in `slot` reports. Its
    /// `capacity` is `None` if the operator sets the value, or if KV events make predictions
    /// unnecessary.
    fn capacity_observation(&self, slot: Slot) -> CapacityObservation {
        let is_told = |backend: &&Backend| {
            backend.facts.capacity_blocks.is_some()
                && backend.spec.capacity_blocks.is_none()
                && backend.spec.kv_events.is_none()
        };
        let backend = self.backends.in_slot(slot).filter(is_told);
        CapacityObservation {
            owned: self.ownership.owned(slot),
            capacity: backend.and_then(|_| self.capacity_blocks(slot)),
        }
    }

    /// Returns the cache capacity of the backend in `slot`, in blocks: the operator's value, else
    /// the engine's as corrected by its responses, else an assumed one. `None` if there is no
    /// backend.
    pub(super) fn capacity_blocks(&self, slot: Slot) -> Option<u32> {
        let backend = self.backends.in_slot(slot)?;
        if backend.spec.capacity_blocks.is_some() {
            return backend.spec.capacity_blocks;
        }
        let Some(told) = backend.facts.capacity_blocks else {
            return Some(self.assumed.blocks(slot, self.initial_capacity_share()));
        };
        let (figures, belief) = (self.service.figures(slot), self.beliefs.permille(slot));
        let corrected = match figures {
            Some(figures) => figures.accuracy.corrected(told, belief),
            None => Accuracy::default().corrected(told, belief),
        };
        Some(corrected)
    }

    /// Returns the cache capacity of the backend in `slot` in blocks, as configured or as reported
    /// by the engine, without correction. Running requests can use all of it, even if less is
    /// predicted to stay cached.
    fn uncorrected_capacity_blocks(&self, slot: Slot) -> Option<u32> {
        self.backends
            .in_slot(slot)
            .and_then(Backend::capacity_blocks)
    }

    /// Returns the capacity that is first assumed for each backend with an unknown one, in blocks.
    fn initial_capacity_share(&self) -> u32 {
        let untold = self.backends.iter().filter(|it| it.has_unknown_capacity());
        service::share(untold.count(), &self.settings.routing)
    }

    /// Updates all unknown capacities, after the number of backends with one changed.
    pub(super) fn resize_unknown_capacities(&mut self) {
        let share = self.initial_capacity_share();
        for backend in self.backends.iter().filter(|it| it.has_unknown_capacity()) {
            let slot = backend.handle.slot;
            let blocks = self.assumed.blocks(slot, share);
            self.ownership.set_capacity(slot, Some(blocks));
        }
        self.is_service_changed = true;
    }

    /// Returns the request limit of the backend in `slot`, and the figures that lead to it.
    pub(super) fn limits(&self, slot: Slot, settings: &LimitSettings) -> LimitFigures {
        let capacity = self.uncorrected_capacity_blocks(slot);
        match self.service.figures(slot) {
            Some(figures) => figures.limit.figures(settings, capacity),
            None => AdaptiveLimit::default().figures(settings, capacity),
        }
    }

    /// Returns the service figures to publish.
    pub(super) fn service_view(&self) -> ServiceView {
        let settings = LimitSettings::from(&self.settings.admission);
        ServiceView::of(self.backends.iter().map(|backend| {
            let slot = backend.handle.slot;
            let figures = self.service.figures(slot);
            let limits = self.limits(slot, &settings);
            BackendServiceView {
                backend: backend.handle,
                limit: limits.limit,
                limits,
                capacity_blocks: self.capacity_blocks(slot),
                capacity_from: if backend.spec.capacity_blocks.is_some() {
                    CapacitySource::Config
                } else if backend.has_unknown_capacity() {
                    CapacitySource::Assumed
                } else {
                    CapacitySource::Engine
                },
                learnt: figures.and_then(|figures| figures.learning.learnt()),
                accuracy: figures.map(|it| it.accuracy.view(self.beliefs.permille(slot))),
            }
        }))
    }
}
