//! The model's backends: slots, incarnations, and what engines report.

use std::collections::BTreeMap;

use state::command::{BackendSpec, EngineFacts};
use state::ids::{BackendRef, Incarnation, Slot};

/// All registered backends, and the block sizes of their models.
#[derive(Debug, Clone, Default)]
pub struct ModelRegistry {
    /// Backends by name.
    pub backends: BTreeMap<String, ModelBackend>,
    /// Number of tokens per block by model.
    pub block_sizes: BTreeMap<String, u32>,
    /// Number of incarnations that ever began in each slot.
    lives: BTreeMap<u16, u32>,
}

/// A registered backend with the facts that its engine reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelBackend {
    /// Slot and incarnation of the backend.
    pub handle: BackendRef,
    /// Whether the backend drains.
    pub draining: bool,
    spec: BackendSpec,
    facts: EngineFacts,
    /// Number of tokens per block as reported by the engine; `None` if unknown.
    block_size: Option<u32>,
}

/// Effect of a change of backends on the blocks of a slot.
#[derive(Clone, Copy)]
pub(super) enum SlotChange {
    None,
    Resized(u16, Option<u32>),
    Begun(u16, Option<u32>),
    Gone(u16),
}

impl ModelBackend {
    /// Returns the names of the models that the backend serves.
    fn models(&self) -> Vec<String> {
        let (any, mut named): (Vec<_>, Vec<_>) =
            self.spec.models.iter().cloned().partition(|it| it == "*");
        if !any.is_empty() {
            named.extend(self.facts.models.clone().unwrap_or_default());
        }
        named
    }

    /// Returns the capacity that an operator set, or else that the engine reports.
    fn capacity(&self) -> Option<u32> {
        self.spec.capacity_blocks.or(self.facts.capacity_blocks)
    }
}

impl ModelRegistry {
    pub(super) fn is_live(&self, handle: BackendRef) -> bool {
        self.backends.values().any(|it| it.handle == handle)
    }

    /// Returns whether measurements of the backend may correct its capacity.
    pub(super) fn learns_capacity(&self, handle: BackendRef) -> bool {
        let mut backends = self.backends.values();
        backends.any(|it| it.handle == handle && it.spec.capacity_blocks.is_none())
    }

    /// Returns the slots of backends with unknown capacity, and the capacity assumed for each.
    pub(super) fn untold(&self) -> (Vec<u16>, u32) {
        let untold = self.backends.values().filter(|it| it.capacity().is_none());
        let slots: Vec<u16> = untold.map(|it| it.handle.slot.0).collect();
        let each = 200_000 / slots.len().max(1);
        let each = u32::try_from(each.clamp(1, 100_000)).unwrap_or(u32::MAX);
        (slots, each)
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
                block_size: None,
            };
            self.backends.insert(spec.id.clone(), backend);
            return self.begin(&spec.id);
        };
        let before = known.capacity();
        let is_moved = known.spec.url != spec.url;
        known.spec = spec.clone();
        if is_moved {
            known.facts = EngineFacts::default();
            known.block_size = None;
            return self.begin(&spec.id);
        }
        let change = known.resized(before);
        self.settle(&spec.id);
        change
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

    /// Records the facts that an engine reports, unless its process is older than the known one.
    /// Returns the effect on the slot.
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
        let facts_before = facts.clone();
        if said.models.is_some() {
            facts.models.clone_from(&said.models);
        }
        facts.capacity_blocks = said.capacity_blocks.or(facts.capacity_blocks);
        facts.started_at_s = said.started_at_s.or(facts.started_at_s);
        facts.drops_last_block = said.drops_last_block.or(facts.drops_last_block);
        let name = name.clone();
        let change = match is_restarted {
            true => SlotChange::None,
            false => backend.resized(before),
        };
        let change = if is_restarted {
            self.begin(&name)
        } else {
            change
        };
        if self
            .backends
            .get(&name)
            .is_some_and(|it| it.facts != facts_before)
        {
            self.settle(&name);
        }
        change
    }

    /// Records the block size that an engine reports, and updates the sizes of its models.
    pub(super) fn observe_block_size(&mut self, handle: BackendRef, tokens: u32) {
        let mut backends = self.backends.iter_mut();
        let Some((name, backend)) = backends.find(|(_, it)| it.handle == handle) else {
            return;
        };
        if (1..=65_536).contains(&tokens) && backend.block_size != Some(tokens) {
            backend.block_size = Some(tokens);
            let name = name.clone();
            self.settle(&name);
        }
    }

    /// Sets the block size of each of a backend's models to the greatest common divisor of its
    /// engines' sizes, unless the known size still divides them all and one engine has it.
    fn settle(&mut self, name: &str) {
        let Some(backend) = self.backends.get(name).filter(|it| it.block_size.is_some()) else {
            return;
        };
        for model in backend.models() {
            let others = self
                .backends
                .values()
                .filter(|it| it.models().contains(&model));
            let sizes: Vec<u32> = others.filter_map(|it| it.block_size).collect();
            let least = sizes.iter().copied().min().unwrap_or(0);
            let common = (8..=least)
                .rev()
                .find(|it| sizes.iter().all(|size| size % it == 0));
            let size = match (self.block_sizes.get(&model).copied(), common) {
                (None, common) => common.unwrap_or(16),
                (Some(known), Some(common)) if sizes.contains(&known) && common % known == 0 => {
                    known
                }
                (Some(_), Some(common)) => common,
                (Some(known), None) => known,
            };
            self.block_sizes.insert(model, size);
        }
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
