//! The model's backends: which incarnation occupies which slot.

use std::collections::BTreeMap;

use state::command::{BackendSpec, EngineFacts};
use state::ids::{BackendRef, Incarnation, Slot};

/// All backends.
#[derive(Debug, Clone, Default)]
pub struct ModelRegistry {
    /// By name.
    pub backends: BTreeMap<String, ModelBackend>,
    /// Lives that ever began in each slot.
    lives: BTreeMap<u16, u32>,
}

/// A backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelBackend {
    /// How commands name it.
    pub handle: BackendRef,
    /// Whether it drains.
    pub draining: bool,
    spec: BackendSpec,
    facts: EngineFacts,
}

/// What a change means for the slot's blocks.
#[derive(Clone, Copy)]
pub(super) enum SlotChange {
    None,
    Resized(u16, Option<u32>),
    Begun(u16, Option<u32>),
    Gone(u16),
}

impl ModelBackend {
    fn capacity(&self) -> Option<u32> {
        self.spec.capacity_blocks.or(self.facts.capacity_blocks)
    }
}

impl ModelRegistry {
    pub(super) fn is_live(&self, handle: BackendRef) -> bool {
        self.backends.values().any(|it| it.handle == handle)
    }

    /// Whether what is measured of it may correct its capacity.
    pub(super) fn learns_capacity(&self, handle: BackendRef) -> bool {
        let mut backends = self.backends.values();
        backends.any(|it| it.handle == handle && it.spec.capacity_blocks.is_none())
    }

    pub(super) fn put(&mut self, spec: &BackendSpec) -> SlotChange {
        let Some(known) = self.backends.get_mut(&spec.id) else {
            let taken = |slot: &u16| self.backends.values().any(|it| it.handle.slot.0 == *slot);
            let slot = (0..u16::MAX).find(|slot| !taken(slot)).unwrap_or(u16::MAX);
            let backend = ModelBackend {
                handle: BackendRef {
                    slot: Slot(slot),
                    incarnation: Incarnation(0),
                },
                draining: false,
                spec: spec.clone(),
                facts: EngineFacts::default(),
            };
            self.backends.insert(spec.id.clone(), backend);
            return self.begin(&spec.id);
        };
        let before = known.capacity();
        let is_moved = known.spec.url != spec.url;
        known.spec = spec.clone();
        if is_moved {
            known.facts = EngineFacts::default();
            return self.begin(&spec.id);
        }
        known.resized(before)
    }

    pub(super) fn remove(&mut self, name: &str) -> SlotChange {
        let gone = self.backends.remove(name);
        gone.map_or(SlotChange::None, |it| SlotChange::Gone(it.handle.slot.0))
    }

    pub(super) fn drain(&mut self, name: &str, draining: bool) {
        if let Some(backend) = self.backends.get_mut(name) {
            backend.draining = draining;
        }
    }

    /// Takes what an engine says; nothing of an earlier process than the known one.
    pub(super) fn observe(&mut self, handle: BackendRef, said: &EngineFacts) -> SlotChange {
        let mut backends = self.backends.iter_mut();
        let Some((name, backend)) = backends.find(|(_, it)| it.handle == handle) else {
            return SlotChange::None;
        };
        if said.capacity_blocks == Some(0) {
            return SlotChange::None;
        }
        let before = backend.capacity();
        let facts = &mut backend.facts;
        let is_restarted = match (facts.started_at_s, said.started_at_s) {
            (Some(known), Some(said)) if said < known => return SlotChange::None,
            (Some(known), Some(said)) => said > known,
            _ => false,
        };
        if said.models.is_some() {
            facts.models.clone_from(&said.models);
        }
        facts.capacity_blocks = said.capacity_blocks.or(facts.capacity_blocks);
        facts.started_at_s = said.started_at_s.or(facts.started_at_s);
        if is_restarted {
            let name = name.clone();
            return self.begin(&name);
        }
        backend.resized(before)
    }

    fn begin(&mut self, name: &str) -> SlotChange {
        let Some(backend) = self.backends.get_mut(name) else {
            return SlotChange::None;
        };
        let slot = backend.handle.slot.0;
        let life = self.lives.entry(slot).or_default();
        *life += 1;
        backend.handle.incarnation = Incarnation(*life);
        SlotChange::Begun(slot, backend.capacity())
    }
}

impl ModelBackend {
    fn resized(&self, before: Option<u32>) -> SlotChange {
        let capacity = self.capacity();
        if capacity == before {
            return SlotChange::None;
        }
        SlotChange::Resized(self.handle.slot.0, capacity)
    }
}
