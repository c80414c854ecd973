//! Filters that exclude backends before every policy, in a fixed order.
//!
//! A backend is excluded by the first filter that it fails: it serves other models, is not offered,
//! was tried, is unhealthy, drains, has an open circuit, has a role that does not fit, has not
//! loaded a model that others have, lacks a label, would not isolate the user's blocks, is too
//! small, would have to load an adapter that others have in memory, or is at its limit. `explain`
//! shows each verdict, and metrics count them.

use state::Backend;
use state::command::BackendRole;
use state::ids::BackendRef;
use state::outputs::batch::fits;
use state::policy::{Candidate, Handover};
use tokio::time::Instant;

use super::Decider;
use super::adapters::{AdapterCandidate, preferred};
use super::routing_table::{DecisionScratch, RoutingTable, ServingBackend, user_of};
use crate::engines::backends::{Doubt, HealthFlags};
use crate::model_names::ModelHealth;
use crate::planted::{self, Bug};
use crate::prompt::BlockUnit;
use crate::routing::verdict::FilterVerdict;
use crate::routing::{OfferedEndpoints, Room, RoutingRejection, RoutingRequest};

/// Factor by which the estimated size of a prompt may exceed a cache's capacity.
const ESTIMATE_MARGIN: u64 = 2;

/// Selects which backends with an open circuit are excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ejection {
    All,
    /// The backends in `DecisionScratch::open`.
    Listed,
    None,
}

/// Whether `refusal` means that no backend for the request, healthy or not, has been found.
fn is_unserved(refusal: RoutingRejection) -> bool {
    matches!(
        refusal,
        RoutingRejection::UnknownModel | RoutingRejection::NoneOffered
    )
}

/// The part of a request for which a pass selects backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Backends that answer requests.
    Answers,
    /// Backends that compute prompts for others and use this handover; `None` for any handover.
    Prefill(Option<Handover>),
}

/// One pass of a request through the filters.
struct FilterPass<'a, S> {
    side: Side,
    decider: &'a Decider,
    fleet: &'a RoutingTable,
    ask: &'a RoutingRequest<'a>,
    now: Instant,
    scratch: &'a mut DecisionScratch,
    /// Number of backends that passed the filters that examine each backend by itself.
    passed: usize,
    /// Receives the verdict on the backend at a registry index; a later verdict replaces it.
    seen: S,
}

impl Decider {
    /// Returns whether a request for `model` can be sent or wait, as far as this replica knows.
    /// `endpoints` are those that the asking gateway can use.
    pub(crate) fn model_health(
        &self,
        model: &str,
        endpoints: Option<&OfferedEndpoints>,
    ) -> ModelHealth {
        let fleet = self.fleet.table();
        let is_offered = |at| endpoints.is_none_or(|offered| offered.has(fleet.endpoint(at)));
        let health = |registered: &Backend| {
            let flags = self.backends.health_flags(registered.handle.slot);
            if flags.is_some_and(|flags| flags.is_healthy) {
                ModelHealth::Healthy
            } else if self.backends.is_up(&fleet.registry, registered) {
                ModelHealth::Doubtful
            } else {
                ModelHealth::Down
            }
        };
        fleet.with_serving(model, |serving| {
            let usable = serving.iter();
            let usable = usable.filter(|it| !it.is_draining && is_offered(it.at));
            let each = usable.map(|it| health(&fleet.registry.backends[it.at]));
            each.max().unwrap_or(ModelHealth::Down)
        })
    }

    /// Fills `scratch` with the backends that may take the request, with their load. `seen`
    /// receives the verdict on each backend that serves the model, by registry index. The last
    /// verdict counts.
    ///
    /// # Errors
    /// Returns a [`RoutingRejection`] if no candidate is left.
    pub(super) fn admit(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        now: Instant,
        scratch: &mut DecisionScratch,
        seen: impl FnMut(usize, FilterVerdict),
    ) -> Result<(), RoutingRejection> {
        let mut sieve = self.filter(fleet, ask, now, scratch, seen);
        sieve.admit()?;
        sieve.keep_below_limit()
    }

    /// Fills `scratch` as [`Decider::admit`] does, but keeps backends that are at their limit.
    ///
    /// # Errors
    /// Returns a [`RoutingRejection`] if no candidate is left.
    pub(super) fn admit_beyond_limit(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        now: Instant,
        scratch: &mut DecisionScratch,
    ) -> Result<(), RoutingRejection> {
        self.filter(fleet, ask, now, scratch, |_, _| {}).admit()
    }

    /// Fills `scratch` with the backends that may compute the request's prompt, with their load.
    /// `needed` is the handover that the request requires. If it is `None`, the request can be
    /// served without a prefill backend, so probes and circuits are always trusted.
    ///
    /// # Errors
    /// Returns a [`RoutingRejection`] if no candidate is left.
    pub(super) fn admit_prefill(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        now: Instant,
        needed: Option<Handover>,
        scratch: &mut DecisionScratch,
    ) -> Result<(), RoutingRejection> {
        let mut pass = self.filter(fleet, ask, now, scratch, |_, _| {});
        pass.side = Side::Prefill(needed);
        if needed.is_some() {
            pass.admit()?;
            return pass.keep_below_limit();
        }
        pass.doubt(Doubt::Nobody);
        pass.apply_filters(Ejection::All)?;
        self.weigh(fleet, now, pass.scratch);
        pass.keep_below_limit()
    }

    /// Fills `scratch` with the prefill backends that a handover through rooms requires, including
    /// those at their limit.
    ///
    /// # Errors
    /// Returns a [`RoutingRejection`] if no candidate is left.
    pub(super) fn admit_prefill_beyond_limit(
        &self,
        fleet: &RoutingTable,
        ask: &RoutingRequest<'_>,
        now: Instant,
        scratch: &mut DecisionScratch,
    ) -> Result<(), RoutingRejection> {
        let mut pass = self.filter(fleet, ask, now, scratch, |_, _| {});
        pass.side = Side::Prefill(Some(Handover::Room));
        pass.admit()
    }

    fn filter<'a, S: FnMut(usize, FilterVerdict)>(
        &'a self,
        fleet: &'a RoutingTable,
        ask: &'a RoutingRequest<'a>,
        now: Instant,
        scratch: &'a mut DecisionScratch,
        seen: S,
    ) -> FilterPass<'a, S> {
        FilterPass {
            side: Side::Answers,
            decider: self,
            fleet,
            ask,
            now,
            scratch,
            passed: 0,
            seen,
        }
    }
}

impl<S: FnMut(usize, FilterVerdict)> FilterPass<'_, S> {
    /// Applies all filters but the limit, ignores doubtful probes and circuits, and adds the load.
    fn admit(&mut self) -> Result<(), RoutingRejection> {
        let sieve = self;
        let (decider, fleet, now) = (sieve.decider, sieve.fleet, sieve.now);
        sieve.doubt(Doubt::Nobody);
        let mut filtered = sieve.apply_filters(Ejection::All);
        if sieve.may_panic() {
            let model = sieve.ask.model;
            sieve.doubt(decider.backends.doubt(&fleet.registry, model, now));
            if sieve.scratch.doubt != Doubt::Nobody {
                filtered = sieve.apply_filters(Ejection::All);
            }
        }
        if sieve.scratch.doubt == Doubt::Tried {
            // Circuits stay in force: they let one request through at a time.
            filtered?;
            decider.weigh(fleet, now, sieve.scratch);
            return Ok(());
        }
        let open = sieve.scratch.open.len();
        let ejected_max = decider.backends.ejected_max(open + sieve.passed);
        if open > ejected_max {
            // So many failures at once point to the requests. Only the first backends to fail stay
            // out.
            sieve.scratch.open.sort_unstable();
            sieve.scratch.open.truncate(ejected_max);
            filtered = sieve.apply_filters(Ejection::Listed);
        }
        if filtered.is_err() && sieve.scratch.tally.count(FilterVerdict::CircuitOpen) > 0 {
            // If every eligible backend fails, circuits do not separate the bad ones from the good.
            filtered = sieve.apply_filters(Ejection::None);
        }
        filtered?;
        decider.weigh(fleet, now, sieve.scratch);
        Ok(())
    }

    fn doubt(&mut self, doubt: Doubt) {
        self.scratch.doubt = doubt;
        self.scratch.is_panic = doubt == Doubt::Answering;
    }

    /// Applies all filters but the limit.
    fn apply_filters(&mut self, ejected: Ejection) -> Result<(), RoutingRejection> {
        if let Some(refusal) = self.collect_candidates(ejected) {
            return Err(refusal);
        }
        self.keep_answering();
        self.exclude_inseparable()?;
        self.keep_loaded();
        self.keep_labelled()?;
        self.keep_isolating()?;
        self.keep_large_enough()?;
        self.keep_resident();
        Ok(())
    }

    /// Whether so many backends may be excluded by their probes alone that the probes are doubtful.
    /// Uses only the counts of verdicts.
    fn may_panic(&self) -> bool {
        let out = |verdict| self.scratch.tally.count(verdict) as usize;
        let healthy = self.passed + out(FilterVerdict::CircuitOpen);
        let doubtful = out(FilterVerdict::Unhealthy) + out(FilterVerdict::Tried);
        self.decider.backends.are_below_threshold(healthy, doubtful)
    }

    /// Applies the filters that examine each backend by itself. Returns the reason if no candidate
    /// is left.
    fn collect_candidates(&mut self, ejected: Ejection) -> Option<RoutingRejection> {
        self.scratch.clear();
        self.scratch.are_circuits_kept = ejected == Ejection::All;
        if ejected == Ejection::All {
            self.scratch.open.clear();
        }
        let (fleet, model) = (self.fleet, self.ask.model);
        let refusal = fleet.with_serving(model, |serving| {
            self.collect_candidates_of(serving, ejected)
        });
        self.passed = self.scratch.candidates.len();
        self.scratch.candidates.is_empty().then_some(refusal)
    }

    /// Applies the filters that examine each backend by itself to the backends that serve the
    /// model. Returns the reason to give if no candidate is left.
    fn collect_candidates_of(
        &mut self,
        serving: &[ServingBackend],
        ejected: Ejection,
    ) -> RoutingRejection {
        let others = self.fleet.registry.backends.len() - serving.len();
        let others = u32::try_from(others).unwrap_or(u32::MAX);
        self.scratch
            .tally
            .add_many(FilterVerdict::OtherModel, others);
        let mut refusal = RoutingRejection::UnknownModel;
        for backend in serving {
            let flags = self.decider.backends.health_flags(backend.handle.slot);
            let verdict = self.verdict(backend, flags, ejected);
            (self.seen)(backend.at, verdict);
            self.scratch.tally.add(verdict);
            match (verdict, flags) {
                (FilterVerdict::Candidate, Some(flags)) => {
                    self.scratch.places.push(backend.at);
                    self.scratch.has_adapters |= flags.has_adapters;
                    self.scratch.has_rooms |= self.needs_another(backend);
                    self.scratch.has_listed |= backend.is_listed;
                    self.scratch.candidates.push(Candidate {
                        slot: backend.handle.slot,
                        waiting: flags.waiting,
                        kv_usage_permille: flags.kv_usage_permille,
                        is_model_listed: backend.is_listed,
                        ..Candidate::default()
                    });
                }
                (FilterVerdict::NotOffered, _) if refusal == RoutingRejection::UnknownModel => {
                    refusal = RoutingRejection::NoneOffered;
                }
                (FilterVerdict::NotOffered, _) => {}
                (FilterVerdict::Tried, _) => refusal = RoutingRejection::AllTried,
                (FilterVerdict::CircuitOpen, _) if ejected == Ejection::All => {
                    let opened_at = self.decider.backends.opened_at(backend.handle);
                    self.scratch.open.push((opened_at, backend.handle.slot));
                    if is_unserved(refusal) {
                        refusal = RoutingRejection::NoneHealthy;
                    }
                }
                _ if is_unserved(refusal) => refusal = RoutingRejection::NoneHealthy,
                _ => {}
            }
        }
        refusal
    }

    /// Whether the backend's engine needs another engine to serve this request.
    fn needs_another(&self, backend: &ServingBackend) -> bool {
        let needs = || (self.decider).needs_another(self.registered(backend), self.ask);
        backend.role != BackendRole::Both && needs()
    }

    fn registered(&self, backend: &ServingBackend) -> &Backend {
        &self.fleet.registry.backends[backend.at]
    }

    fn verdict(
        &self,
        backend: &ServingBackend,
        flags: Option<HealthFlags>,
        ejected: Ejection,
    ) -> FilterVerdict {
        let user = || user_of(self.fleet, self.ask);
        let is_up = |flags: HealthFlags| {
            let (backends, doubt) = (&self.decider.backends, self.scratch.doubt);
            let doubted = || backends.is_doubted(self.registered(backend), flags, doubt, self.now);
            flags.is_healthy || doubted()
        };
        let is_open = |handle: BackendRef| match ejected {
            Ejection::All => !self.decider.backends.is_let_through(handle, user, self.now),
            Ejection::Listed => self
                .scratch
                .open
                .iter()
                .any(|(_, slot)| *slot == handle.slot),
            Ejection::None => false,
        };
        if !self.is_offered(backend.at) {
            FilterVerdict::NotOffered
        } else if self.ask.excluded.contains(&backend.handle.slot) {
            FilterVerdict::Tried
        } else if !flags.is_some_and(is_up) {
            FilterVerdict::Unhealthy
        } else if backend.is_draining && !planted::is(Bug::DrainingChosen) {
            FilterVerdict::Draining
        } else if is_open(backend.handle) {
            FilterVerdict::CircuitOpen
        } else if !self.is_of_side(backend) {
            FilterVerdict::OtherRole
        } else {
            FilterVerdict::Candidate
        }
    }

    /// Whether the caller can send the request to the backend at registry index `at`.
    fn is_offered(&self, at: usize) -> bool {
        let offered = self.ask.endpoints;
        offered.is_none_or(|offered| offered.has(self.fleet.endpoint(at)))
    }

    /// Whether the backend can take part in the request on `self.side`.
    fn is_of_side(&self, backend: &ServingBackend) -> bool {
        let is_prefill = backend.role == BackendRole::Prefill;
        let handover = || self.decider.handover(self.registered(backend));
        match self.side {
            Side::Answers => !is_prefill || !self.needs_another(backend),
            Side::Prefill(None) => is_prefill,
            Side::Prefill(Some(by)) => is_prefill && handover() == by,
        }
    }

    /// Excludes engines that need another engine if the request cannot be split.
    fn exclude_inseparable(&mut self) -> Result<(), RoutingRejection> {
        let is_apart = self.ask.stages.are_handed_over(Handover::Room);
        if self.side != Side::Answers || !self.scratch.has_rooms || is_apart {
            return Ok(());
        }
        let (decider, ask) = (self.decider, self.ask);
        self.retain(FilterVerdict::OtherRole, |_, backend| {
            !decider.needs_another(backend, ask)
        });
        if self.scratch.candidates.is_empty() {
            return Err(RoutingRejection::NotSeparable);
        }
        Ok(())
    }

    /// Excludes prefill backends if other backends can answer. Otherwise they answer too, because
    /// an engine with the prefill role can serve whole requests.
    fn keep_answering(&mut self) {
        if self.side != Side::Answers || !self.fleet.has_prefill() {
            return;
        }
        let answers = |at: &usize| self.fleet.role(*at) != BackendRole::Prefill;
        if self.scratch.places.iter().any(answers) {
            self.retain(FilterVerdict::OtherRole, |_, backend| {
                backend.spec.role != BackendRole::Prefill
            });
        }
    }

    /// Excludes engines that do not list the model if others list it; an adapter is listed once it
    /// is loaded. The operator's spec takes precedence: an engine under `"*"` that lists the model
    /// excludes no backend whose spec names it.
    fn keep_loaded(&mut self) {
        if !self.scratch.has_listed {
            return;
        }
        let DecisionScratch {
            candidates, places, ..
        } = &*self.scratch;
        let model = self.ask.model;
        let names = |backend: &Backend| backend.spec.models.iter().any(|named| named == model);
        let backends = places.iter().map(|at| &self.fleet.registry.backends[*at]);
        let mut listed = candidates
            .iter()
            .zip(backends)
            .filter(|(candidate, _)| candidate.is_model_listed);
        let is_named_listed = listed.any(|(_, backend)| names(backend));
        self.retain(FilterVerdict::NotLoaded, |candidate, backend| {
            candidate.is_model_listed || (!is_named_listed && names(backend))
        });
    }

    fn keep_labelled(&mut self) -> Result<(), RoutingRejection> {
        let wanted = self.decider.select.wanted(self.ask);
        if wanted.is_any() {
            return Ok(());
        }
        self.retain(FilterVerdict::OtherLabels, |_, backend| wanted.has(backend));
        if self.scratch.candidates.is_empty() {
            return Err(RoutingRejection::NoneSelected);
        }
        Ok(())
    }

    /// Excludes engines that do not support salts if the user's cached blocks must be isolated.
    fn keep_isolating(&mut self) -> Result<(), RoutingRejection> {
        let Some(work) = self.ask.identity.isolation else {
            return Ok(());
        };
        let backends = &self.decider.backends;
        self.retain(FilterVerdict::Unsalted, |_, backend| {
            backends.knows_salts(backend, work)
        });
        if self.scratch.candidates.is_empty() {
            return Err(RoutingRejection::NoneIsolating);
        }
        Ok(())
    }

    /// Excludes backends whose cache cannot hold the prompt: it would never run, and would block
    /// requests behind it. Uses the stated capacity, not the learned one.
    fn keep_large_enough(&mut self) -> Result<(), RoutingRejection> {
        let identity = self.ask.identity;
        // Text with long tokens has fewer tokens than estimated.
        let margin = match identity.unit {
            BlockUnit::Tokens => 1,
            BlockUnit::Characters | BlockUnit::CharactersFor(_) => ESTIMATE_MARGIN,
        };
        let blocks = identity.chain.len() as u64;
        let smallest = self.fleet.smallest_cache();
        if fits(blocks, smallest.map(|blocks| u64::from(blocks) * margin)) {
            return Ok(());
        }
        self.retain(FilterVerdict::TooSmall, |_, backend| {
            let capacity = backend.capacity_blocks();
            fits(blocks, capacity.map(|blocks| u64::from(blocks) * margin))
        });
        if self.scratch.candidates.is_empty() {
            return Err(RoutingRejection::TooLarge);
        }
        Ok(())
    }

    /// Excludes backends that do not have the adapter in memory, or room for it, if others do and
    /// have short queues. Engines list every adapter that they can load, so [`Self::keep_loaded`]
    /// does not suffice.
    fn keep_resident(&mut self) {
        if !self.scratch.has_adapters {
            return;
        }
        let (backends, ask) = (&self.decider.backends, self.ask);
        let threshold = backends.queueing_threshold_lora();
        let seen = |candidate: &Candidate| AdapterCandidate {
            place: backends.adapter_place(candidate.slot, ask.model),
            queue: candidate.waiting.saturating_add(ask.waiting_here),
        };
        let Some(wanted) = preferred(&self.scratch.candidates.iter().map(seen), threshold) else {
            return;
        };
        self.retain(FilterVerdict::NotResident, |candidate, _| {
            seen(candidate).is(wanted, threshold)
        });
    }

    /// Excludes backends that run as many requests as their limit, over all known replicas. With
    /// [`Room::Here`], also excludes those at which this replica has no free place.
    fn keep_below_limit(&mut self) -> Result<(), RoutingRejection> {
        let (decider, room) = (self.decider, self.ask.room);
        let service = decider.view.service();
        if service.is_unlimited() {
            return Ok(());
        }
        decider.load.with_gauges(|gauges| {
            let has_place = |backend: &Backend, limit| {
                room == Room::Cluster
                    || gauges.may_have_place(backend.handle, limit)
                    || planted::is(Bug::ShareIgnored)
            };
            self.retain(FilterVerdict::AtLimit, |candidate, backend| {
                let limit = service.limit(candidate.slot);
                limit.is_none_or(|limit| candidate.running < limit && has_place(backend, limit))
            });
        });
        if self.scratch.candidates.is_empty() {
            return Err(RoutingRejection::AtLimit);
        }
        Ok(())
    }

    /// Keeps the candidates for which `stays` returns true; records `verdict` for the others.
    fn retain(&mut self, verdict: FilterVerdict, stays: impl Fn(&Candidate, &Backend) -> bool) {
        let DecisionScratch {
            candidates,
            places,
            tally,
            ..
        } = &mut *self.scratch;
        let (mut looked_at, mut kept) = (0, 0);
        candidates.retain(|candidate| {
            let at = places[looked_at];
            looked_at += 1;
            if stays(candidate, &self.fleet.registry.backends[at]) {
                places[kept] = at;
                kept += 1;
                return true;
            }
            (self.seen)(at, verdict);
            tally.add(verdict);
            false
        });
        places.truncate(kept);
    }
}
