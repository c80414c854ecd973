//! The model's backends: which incarnation occupies which slot.

use std::collections::BTreeMap;

use state::command::{BackendSpec, EngineFacts};
use state::ids::{BackendRef, Incarnation, Slot};

/// All backends.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    /// By name.
    pub backends: BTreeMap<String, Backend>,
    /// Lives that ever began in each slot.
    lives: BTreeMap<u16, u32>,
}

/// A backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// How commands name it.
    pub handle: BackendRef,
    /// Whether it drains.
    pub draining: bool,
    spec: BackendSpec,
    facts: EngineFacts,
}

/// What a change means for the slot's blocks.
#[derive(Clone, Copy)]
pub(super) enum Change {
    None,
    Resized(u16, Option<u32>),
    Begun(u16, Option<u32>),
    Gone(u16),
}

impl Backend {
    fn capacity(&self) -> Option<u32> {
        self.spec.capacity_blocks.or(self.facts.capacity_blocks)
    }
}

impl Registry {
    pub(super) fn is_live(&self, handle: BackendRef) -> bool {
        self.backends.values().any(|it| it.handle == handle)
    }

    /// Whether what is measured of it may correct its capacity.
    pub(super) fn learns_capacity(&self, handle: BackendRef) -> bool {
        let mut backends = self.backends.values();
        backends.any(|it| it.handle == handle && it.spec.capacity_blocks.is_none())
    }

    pub(super) fn put(&mut self, spec: &BackendSpec) -> Change {
        let Some(known) = self.backends.get_mut(&spec.id) else {
            let taken = |slot: &u16| self.backends.values().any(|it| it.handle.slot.0 == *slot);
            let slot = (0..u16::MAX).find(|slot| !taken(slot)).unwrap_or(u16::MAX);
            let backend = Backend {
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

    pub(super) fn remove(&mut self, name: &str) -> Change {
        let gone = self.backends.remove(name);
        gone.map_or(Change::None, |it| Change::Gone(it.handle.slot.0))
    }

    pub(super) fn drain(&mut self, name: &str, draining: bool) {
        if let Some(backend) = self.backends.get_mut(name) {
            backend.draining = draining;
        }
    }

    /// Takes what an engine says; nothing of an earlier process than the known one.
    pub(super) fn observe(&mut self, handle: BackendRef, said: &EngineFacts) -> Change {
        let mut backends = self.backends.iter_mut();
        let Some((name, backend)) = backends.find(|(_, it)| it.handle == handle) else {
            return Change::None;
        };
        if said.capacity_blocks == Some(0) {
            return Change::None;
        }
        let before = backend.capacity();
        let facts = &mut backend.facts;
        let is_restarted = match (facts.started_at_s, said.started_at_s) {
            (Some(known), Some(said)) if said < known => return Change::None,
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

    fn begin(&mut self, name: &str) -> Change {
        let Some(backend) = self.backends.get_mut(name) else {
            return Change::None;
        };
        let slot = backend.handle.slot.0;
        let life = self.lives.entry(slot).or_default();
        *life += 1;
        backend.handle.incarnation = Incarnation(*life);
        Change::Begun(slot, backend.capacity())
    }
}

impl Backend {
    fn resized(&self, before: Option<u32>) -> Change {
        let capacity = self.capacity();
        if capacity == before {
            return Change::None;
        }
        Change::Resized(self.handle.slot.0, capacity)
    }
}
