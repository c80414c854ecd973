//! Application of commands and items on settings other than the policy, readers, measurements,
//! output lengths, users, grants and KV events. Most of them came with format version 2.
//!
//! The digest leaves out empty parts, so a state that uses none of them keeps its version 1 digest.

use std::borrow::Cow;

use bincode::{Decode, Encode};

use super::{AuditAction, RouterState};
use crate::backends::{Backend, SlotChange};
use crate::charge::Charge;
use crate::command::{Origin, UserChanges, UserSpec};
use crate::encoding;
use crate::exact::{KvBatch, KvDoubt};
use crate::grants::Wait;
use crate::ids::{ModelKey, ReplicaId, Slot, Ticket, UserKey};
use crate::policy::RoutingSettings;
use crate::prefix::user_key;
use crate::pricing::Pricing;
use crate::ratios::TextSample;
use crate::readers::Assignment;
use crate::reject::Rejection;
use crate::service::{
    AdaptiveLimit, BackendServiceView, BeliefSample, CapacityObservation, CapacitySource,
    LimitFigures, ServiceSample, ServiceView,
};
use crate::settings::AdmissionSettings;
use crate::settings::UserLimits;
use crate::users::ChargeTerms;
use crate::validate::{ensure, is_name};

/// Replicated settings that an operator can set; `None` while the defaults apply.
#[derive(Debug, Clone, PartialEq, Default, Encode, Decode)]
pub(super) struct LiveSettings {
    pub(super) routing: Option<RoutingSettings>,
    pub(super) admission: Option<AdmissionSettings>,
}

impl LiveSettings {
    /// Validates the settings that `apply` relies on. An error describes the first fault.
    pub(super) fn validate(&self) -> Result<(), String> {
        let routing = self
            .routing
            .as_ref()
            .map_or(Ok(()), RoutingSettings::validate);
        let admission = self
            .admission
            .as_ref()
            .map_or(Ok(()), AdmissionSettings::validate);
        routing.and(admission).map_err(|reject| reject.to_string())
    }
}

/// Appends the canonical encoding of `part` unless it is the default.
pub(super) fn append_unless_default<T: Encode + Default + PartialEq>(
    part: &T,
    bytes: &mut Vec<u8>,
) {
    if *part != T::default() {
        encoding::append_bytes(part, bytes);
    }
}

impl RouterState {
    /// Appends to the digest input the parts that change too often for the cold digest.
    pub(super) fn append_live_digest(&self, bytes: &mut Vec<u8>) {
        append_unless_default(&self.service, bytes);
        self.outputs.append_digest(bytes);
        if let Some(last_left) = self.users.last_left() {
            encoding::append_bytes(&last_left, bytes);
        }
        if !self.waiting.is_empty() {
            encoding::append_bytes(&self.waiting.digest(), bytes);
        }
        self.exact.append_digest(bytes);
        if let Some(staged) = &self.staged {
            staged.append_digest(bytes);
        }
        if let Some(paced) = &self.time.paced {
            encoding::append_bytes(paced, bytes);
        }
        append_unless_default(&self.ratios, bytes);
        append_unless_default(&self.assumed, bytes);
        append_unless_default(&self.beliefs, bytes);
        self.keys.append_digest(bytes);
        self.caches.append_digest(bytes);
        self.users.append_defaults_digest(bytes);
    }

    pub(super) fn put_routing(
        &mut self,
        origin: &Origin,
        settings: RoutingSettings,
    ) -> Result<(), Rejection> {
        settings.validate()?;
        self.settings.routing = Some(settings);
        self.note(origin, AuditAction::PutRouting, String::new());
        Ok(())
    }

    pub(super) fn put_admission(
        &mut self,
        origin: &Origin,
        settings: AdmissionSettings,
    ) -> Result<(), Rejection> {
        settings.validate()?;
        self.set_admission(settings);
        self.note(origin, AuditAction::PutAdmission, String::new());
        Ok(())
    }

    /// Replaces the admission settings with validated ones, and recomputes bins if necessary.
    pub(super) fn set_admission(&mut self, settings: AdmissionSettings) {
        if settings.bins != self.admission_settings().bins {
            self.outputs.rebin(settings.bins);
            self.is_outputs_changed = true;
        }
        self.settings.admission = Some(settings);
    }

    pub(super) fn put_user_limits(
        &mut self,
        origin: &Origin,
        name: String,
        limits: UserLimits,
    ) -> Result<(), Rejection> {
        ensure(is_name(&name), "name", "1 to 256 bytes")?;
        limits.validate()?;
        let key = user_key(self.config.hash_seed, &name);
        let limits = Some(limits).filter(|limits| !limits.is_unbounded());
        if !self.users.limit(key, &name, limits) {
            return Err(Rejection::TooManyUsers);
        }
        self.note(origin, AuditAction::PutUserLimits, name);
        Ok(())
    }

    /// Sets weight and limits of a user, or neither if either is rejected.
    pub(super) fn set_user(
        &mut self,
        origin: &Origin,
        user: UserSpec,
        limits: UserLimits,
    ) -> Result<(), Rejection> {
        limits.validate()?;
        let name = user.name.clone();
        self.put_user(origin, user)?;
        // The user exists and both values are valid, so this call cannot be rejected.
        self.put_user_limits(origin, name, limits)
    }

    /// Applies all given changes to a user, or none if any is rejected.
    pub(super) fn configure_user(
        &mut self,
        origin: &Origin,
        changes: UserChanges,
    ) -> Result<(), Rejection> {
        changes.validate()?;
        let UserChanges {
            name,
            weight_milli,
            limits,
            budget,
            models,
        } = changes;
        let key = user_key(self.config.hash_seed, &name);
        if !self.users.plan(key, &name, (budget, models)) {
            return Err(Rejection::TooManyUsers);
        }
        // A user with a plan is already in the table. Otherwise, the first of these calls adds the
        // user, or rejects the command before anything has changed.
        if let Some(weight_milli) = weight_milli
            && !self.users.configure(key, &name, weight_milli)
        {
            return Err(Rejection::TooManyUsers);
        }
        if let Some(limits) = limits {
            let limits = Some(limits).filter(|limits| !limits.is_unbounded());
            if !self.users.limit(key, &name, limits) {
                return Err(Rejection::TooManyUsers);
            }
        }
        self.note(origin, AuditAction::ConfigureUser, name);
        Ok(())
    }

    pub(super) fn forgive_user(&mut self, origin: &Origin, name: String) -> Result<(), Rejection> {
        let key = user_key(self.config.hash_seed, &name);
        let is_known = is_name(&name) && self.users.forgive(key);
        ensure(is_known, "name", "a user who is known")?;
        self.note(origin, AuditAction::ForgiveUser, name);
        Ok(())
    }

    pub(super) fn delete_user(&mut self, origin: &Origin, name: String) -> Result<(), Rejection> {
        ensure(is_name(&name), "name", "1 to 256 bytes")?;
        let key = user_key(self.config.hash_seed, &name);
        match self.users.remove(key) {
            None => Err(Rejection::UnknownUser { name }),
            Some(false) => Err(Rejection::UserBusy { name }),
            Some(true) => {
                if self.view.caches().own(key).is_some() {
                    self.caches.set(key, None);
                }
                self.note(origin, AuditAction::DeleteUser, name);
                Ok(())
            }
        }
    }

    pub(super) fn assign_readers(
        &mut self,
        origin: &Origin,
        readers: &[Assignment],
    ) -> Result<(), Rejection> {
        let backends = &self.backends;
        let changed = self.readers.replace(readers, |it| backends.is_live(it))?;
        let slots = changed
            .into_iter()
            .flat_map(|it| self.backends.rank_slots(it));
        for slot in slots.collect::<Vec<_>>() {
            let spec = self.backends.in_slot(slot).map(|backend| &backend.spec);
            if spec.is_some_and(|spec| spec.kv_events.is_some()) {
                self.exact.doubt(slot, KvDoubt::Handover);
            } else if self.exact.forget(slot) {
                // Without a reader, nothing updates the reported blocks: start over with leases.
                self.follow(&[SlotChange::Begun(slot)]);
            }
        }
        self.note(origin, AuditAction::AssignReaders, String::new());
        Ok(())
    }

    pub(super) fn kv_events(&mut self, batch: &KvBatch) -> bool {
        if !self.backends.is_live(batch.backend) {
            return false;
        }
        let Some(backend) = self.backends.rank_of(batch.backend, batch.rank) else {
            return false;
        };
        let Some(changes) = self.exact.apply(backend, batch, &mut self.ownership) else {
            return false;
        };
        self.leases
            .forget_tips(backend.slot, &changes.closed_lease_tips);
        self.is_cold_changed |= changes.is_condition_changed;
        true
    }

    pub(super) fn observe_service(&mut self, sample: &ServiceSample) -> bool {
        let slot = sample.backend.slot;
        if !self.backends.is_live(sample.backend) || !sample.is_plausible() {
            return false;
        }
        let holding = self.capacity_observation(slot);
        let capacity_before = self.capacity_blocks(slot);
        let off_permille = self.routing_settings().prediction_off_permille;
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
        let settings = self.admission_settings().into_owned();
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

    /// Whether the capacity of the backend in `slot` is learned from its responses: neither the
    /// operator nor the engine states it, and its contents are predicted.
    fn learns_assumed(&self, slot: Slot) -> bool {
        let backend = self.backends.in_slot(slot);
        let is_taught = |it: &Backend| it.has_unknown_capacity() && it.spec.kv_events.is_none();
        self.time.paced.is_some() && backend.is_some_and(is_taught)
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

    /// Returns the routing settings other than the live policy, or the defaults if not set.
    fn routing_settings(&self) -> Cow<'_, RoutingSettings> {
        let settings = self.settings.routing.as_ref();
        settings.map_or_else(|| Cow::Owned(RoutingSettings::default()), Cow::Borrowed)
    }

    /// Returns the admission settings, or the defaults if not set.
    pub(super) fn admission_settings(&self) -> Cow<'_, AdmissionSettings> {
        let settings = self.settings.admission.as_ref();
        settings.map_or_else(|| Cow::Owned(AdmissionSettings::default()), Cow::Borrowed)
    }

    /// Returns the cache capacity of the backend in `slot` in blocks, as configured or as reported
    /// by the engine, without correction. Running requests can use all of it, even if less is
    /// predicted to stay cached.
    fn uncorrected_capacity_blocks(&self, slot: Slot) -> Option<u32> {
        self.backends
            .in_slot(slot)
            .and_then(Backend::capacity_blocks)
    }

    /// Returns the request limit of the backend in `slot`, and the figures that lead to it.
    fn limits(&self, slot: Slot, settings: &AdmissionSettings) -> LimitFigures {
        let capacity = self.uncorrected_capacity_blocks(slot);
        match self.service.figures(slot) {
            Some(figures) => figures.limit.figures(settings, capacity),
            None => AdaptiveLimit::default().figures(settings, capacity),
        }
    }

    /// Returns the service figures to publish.
    pub(super) fn service_view(&self) -> ServiceView {
        let settings = self.admission_settings();
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

    pub(super) fn observe_outputs(
        &mut self,
        user: UserKey,
        model: ModelKey,
        tokens: &[u32],
    ) -> bool {
        let bins = self.admission_settings().bins;
        let is_taken = self.outputs.observe(user, model, tokens, bins);
        self.is_outputs_changed |= is_taken;
        is_taken
    }

    pub(super) fn observe_text(&mut self, sample: &TextSample) -> bool {
        let is_taken = self.ratios.observe(sample);
        self.is_ratios_changed |= is_taken;
        is_taken
    }

    /// Returns the prices, limits and time that apply to charges.
    pub(super) fn terms(&self) -> ChargeTerms {
        let admission = self.settings.admission.as_ref();
        ChargeTerms {
            pricing: Pricing {
                prices: self.config.fairness,
                charge: admission.map(|it| it.charge).unwrap_or_default(),
            },
            limits: admission.map(|it| it.user_limits).unwrap_or_default(),
            calendar_ms: self.time.stamped_ms,
        }
    }

    pub(super) fn wait_for_grant(&mut self, replica: ReplicaId, wait: Wait) -> bool {
        self.is_waiting_changed = true;
        self.waiting.wait(replica, wait)
    }

    pub(super) fn leave(&mut self, replica: ReplicaId, ticket: Ticket) -> bool {
        self.is_waiting_changed = true;
        self.waiting.leave(replica, ticket)
    }

    pub(super) fn grant(&mut self, model: ModelKey, count: u32) -> bool {
        self.is_waiting_changed = true;
        let terms = self.terms();
        for _ in 0..count {
            let users = &self.users;
            let granted = self
                .waiting
                .grant(model, |user| users.counter(user).unwrap_or_default());
            let Some((replica, wait)) = granted else {
                break;
            };
            let price = Charge {
                user: wait.user,
                advance: u64::from(wait.tokens),
                ..Charge::default()
            };
            self.users.charge(replica, &price, &terms, self.time.now_ms);
        }
        true
    }

    /// Removes a lost replica from the waiting list. Passes its open grants on to waiting requests.
    pub(super) fn close_waiting(&mut self, replica: ReplicaId) {
        for model in self.waiting.close_replica(replica) {
            self.grant(model, 1);
        }
        self.is_waiting_changed = true;
    }

    /// Publishes grants and users if they changed, or unconditionally if `is_anew`. Users are
    /// published only if a reader wants them.
    pub(super) fn publish_for_admission(&mut self, is_anew: bool) {
        if std::mem::take(&mut self.is_waiting_changed) || is_anew {
            self.view.publish_grants(&self.waiting);
        }
        if !self.view.wants_users() {
            return;
        }
        let is_anew = is_anew || !self.view.publishes_users();
        let limits = self.terms().limits;
        if let Some(users) = self.users.publish(self.time.now_ms, limits, is_anew) {
            self.view.publish_users(users);
        }
    }
}
