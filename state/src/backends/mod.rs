//! The registry of backends: the occupant of each slot, and its incarnation.
//!
//! Slots are reused, lowest free one first. Incarnation counters are kept per slot and survive
//! removals, so that no two occupants ever share a [`BackendRef`]. An engine with several
//! data-parallel ranks has one slot per rank (`ranks`).

mod block_sizes;
mod ranks;
mod role;
mod spec;

use std::collections::BTreeMap;

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BackendRef, Incarnation, Slot};

pub use block_sizes::{
    BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, BlockSizes, SIZED_MODELS_MAX,
};
pub use ranks::{RANKS_MAX, RankSlots, engine_of};
pub use role::BackendRole;
pub use spec::{BackendSpec, EngineFacts};

/// A registered backend.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Backend {
    /// Slot and incarnation, by which commands refer to the backend.
    pub handle: BackendRef,
    /// Description given by the operator or by a discovery source.
    pub spec: BackendSpec,
    /// Whether the backend accepts no new requests.
    pub draining: bool,
    /// Whether its streams go on at other backends, as far as they can. Only while it drains.
    pub moves_streams: bool,
    /// Facts that the engine reported about itself.
    pub facts: EngineFacts,
}

impl Backend {
    /// Returns the cache capacity in blocks: the operator's value, else the engine's, if known.
    #[must_use]
    pub fn capacity_blocks(&self) -> Option<u32> {
        self.spec.capacity_blocks.or(self.facts.capacity_blocks)
    }

    /// Whether the cache capacity is unknown.
    pub(crate) fn has_unknown_capacity(&self) -> bool {
        self.capacity_blocks().is_none()
    }

    /// Whether the engine itself lists `model`, as a base model or an adapter.
    #[must_use]
    pub fn lists(&self, model: &str) -> bool {
        let listed = self.facts.models.as_ref();
        listed.is_some_and(|listed| listed.iter().any(|listed| listed == model))
    }

    /// Iterates over the models that the backend names: those of its description or, with `"*"`,
    /// those that its engine lists.
    pub fn named_models(&self) -> impl Iterator<Item = &str> {
        let models = &self.spec.models;
        let is_any = models.iter().any(|model| model == "*");
        let named = models.iter().filter(|model| *model != "*");
        let listed = self.facts.models.iter().flatten();
        let listed = listed.filter(move |_| is_any);
        named.chain(listed).map(String::as_str)
    }

    /// Whether the backend serves `model`, according to its description or, with `"*"`, to the
    /// engine's own list. An engine that has not been probed yet may serve any model.
    #[must_use]
    pub fn serves(&self, model: &str) -> bool {
        self.spec.models.iter().any(|served| {
            served == model || served == "*" && (self.facts.models.is_none() || self.lists(model))
        })
    }
}

/// Change of a backend that affects ownership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotChange {
    /// The engine in the slot is the same but has another capacity.
    Resized(Slot),
    /// The slot has a new backend or incarnation, whose cache is empty.
    Begun(Slot),
    /// The backend in the slot was removed.
    Gone(Slot),
}

/// Registry of the backends, by slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Backends {
    by_slot: BTreeMap<Slot, Backend>,
    /// Latest incarnation of every slot that ever held a backend.
    incarnations: BTreeMap<Slot, Incarnation>,
    /// Slots of engines with several ranks. Derived from `by_slot`, so not encoded.
    ranks: RankSlots,
}

impl Encode for Backends {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.by_slot.encode(encoder)?;
        self.incarnations.encode(encoder)
    }
}

impl<C> Decode<C> for Backends {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let by_slot = Decode::decode(decoder)?;
        let ranks = RankSlots::read(&by_slot);
        Ok(Self {
            by_slot,
            incarnations: Decode::decode(decoder)?,
            ranks,
        })
    }
}

bincode::impl_borrow_decode!(Backends);

impl Backends {
    /// Iterates over the backends in ascending order of slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Backend> {
        self.by_slot.values()
    }

    pub(crate) fn in_slot(&self, slot: Slot) -> Option<&Backend> {
        self.by_slot.get(&slot)
    }

    /// Whether `handle` refers to the current incarnation of a registered backend.
    pub(crate) fn is_live(&self, handle: BackendRef) -> bool {
        self.in_slot(handle.slot)
            .is_some_and(|it| it.handle == handle)
    }

    /// Returns the backend to which its operator or source gave the id `name`, if there is one.
    /// Scans up to `BACKENDS_MAX` ids, so only rare commands use it.
    pub(crate) fn named(&self, name: &str) -> Option<&Backend> {
        let mut named = self.iter().filter(|backend| backend.spec.id == name);
        named.find(|backend| !backend.is_further_rank())
    }

    /// Adds or changes the backend that `spec` names. Returns the changes that affect ownership, or
    /// `None` if the registry is full.
    pub(crate) fn put(&mut self, spec: BackendSpec) -> Option<Vec<SlotChange>> {
        let Some(slot) = self.named(&spec.id).map(|backend| backend.handle.slot) else {
            return self.add(spec).map(|added| vec![added]);
        };
        let backend = self
            .by_slot
            .get_mut(&slot)
            .expect("the slot of a named backend is taken");
        let capacity_before = backend.capacity_blocks();
        let is_moved = backend.spec.url != spec.url;
        backend.spec = spec;
        if is_moved {
            backend.facts = EngineFacts::default();
            // The engine at the new URL has not reported its ranks yet.
            let mut changes = self.drop_ranks(slot);
            changes.push(self.begin(slot));
            return Some(changes);
        }
        let is_resized = backend.capacity_blocks() != capacity_before;
        let mut changes = self.align_ranks(slot);
        changes.extend(is_resized.then_some(SlotChange::Resized(slot)));
        Some(changes)
    }

    /// Removes a backend with all its ranks. Returns the changes, or `None` if it does not exist.
    pub(crate) fn remove(&mut self, name: &str) -> Option<Vec<SlotChange>> {
        let slot = self.named(name)?.handle.slot;
        let mut changes = self.drop_ranks(slot);
        self.by_slot.remove(&slot);
        changes.push(SlotChange::Gone(slot));
        Some(changes)
    }

    /// Sets whether a backend with all its ranks drains. Returns whether the backend exists.
    pub(crate) fn set_draining(&mut self, name: &str, draining: bool) -> bool {
        let Some(slot) = self.named(name).map(|backend| backend.handle.slot) else {
            return false;
        };
        if let Some(backend) = self.by_slot.get_mut(&slot) {
            backend.draining = draining;
            backend.moves_streams &= draining;
        }
        self.align_ranks(slot);
        true
    }

    /// Sets whether the streams of a backend that drains, with all its ranks, go on elsewhere.
    pub(crate) fn move_streams(&mut self, name: &str, moves_streams: bool) {
        let Some(slot) = self.named(name).map(|backend| backend.handle.slot) else {
            return;
        };
        if let Some(backend) = self.by_slot.get_mut(&slot) {
            backend.moves_streams = moves_streams && backend.draining;
        }
        self.align_ranks(slot);
    }

    /// Records facts reported by an engine and returns the changes that affect ownership. Returns
    /// `None` if `handle` is not a current incarnation or is a further rank.
    ///
    /// Facts from an earlier start than the known one are outdated and change nothing. A restarted
    /// engine keeps its known facts until it reports new ones: it is usually unchanged, and a
    /// backend without models would serve no requests.
    pub(crate) fn observe(
        &mut self,
        handle: BackendRef,
        facts: EngineFacts,
    ) -> Option<Vec<SlotChange>> {
        let backend = self
            .by_slot
            .get_mut(&handle.slot)
            .filter(|it| it.handle == handle && !it.is_further_rank())?;
        let known = &mut backend.facts;
        let is_restarted = match (known.started_at_s, facts.started_at_s) {
            (Some(known), Some(said)) if said < known => return Some(Vec::new()),
            (Some(known), Some(said)) => said > known,
            (None, _) | (_, None) => false,
        };
        let capacity_before = backend.spec.capacity_blocks.or(known.capacity_blocks);
        known.update(facts);
        let is_resized = backend.capacity_blocks() != capacity_before;
        let mut changes = self.align_ranks(handle.slot);
        if is_restarted {
            changes = self.begin_ranks(handle.slot);
            changes.push(self.begin(handle.slot));
        } else if is_resized {
            changes.push(SlotChange::Resized(handle.slot));
        }
        Some(changes)
    }

    fn add(&mut self, spec: BackendSpec) -> Option<SlotChange> {
        let limit = u16::try_from(BACKENDS_MAX).expect("BACKENDS_MAX fits a slot");
        let slot = (0..limit)
            .map(Slot)
            .find(|slot| !self.by_slot.contains_key(slot))?;
        let handle = BackendRef {
            slot,
            incarnation: Incarnation(0),
        };
        let facts = EngineFacts::default();
        self.by_slot.insert(
            slot,
            Backend {
                handle,
                spec,
                draining: false,
                moves_streams: false,
                facts,
            },
        );
        Some(self.begin(slot))
    }

    /// Starts a new incarnation of the backend in `slot`.
    fn begin(&mut self, slot: Slot) -> SlotChange {
        let last = self.incarnations.entry(slot).or_default();
        // The counter wraps after four billion incarnations in one slot.
        *last = Incarnation(last.0.wrapping_add(1));
        if let Some(backend) = self.by_slot.get_mut(&slot) {
            backend.handle.incarnation = *last;
        }
        SlotChange::Begun(slot)
    }

    /// Starts new incarnations of all backends, later than any that this registry or `others` has
    /// recorded. Commands in flight for earlier ones then have no effect.
    pub(crate) fn advance_incarnations_past(&mut self, others: &Self) {
        for (slot, last) in &others.incarnations {
            let known = self.incarnations.entry(*slot).or_default();
            *known = (*known).max(*last);
        }
        let slots: Vec<Slot> = self.by_slot.keys().copied().collect();
        for slot in slots {
            self.begin(slot);
        }
    }

    /// Checks the registry's part of I5: handles, names and bounds agree.
    ///
    /// # Errors
    /// Describes the first violation.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut names = std::collections::BTreeSet::new();
        for (slot, backend) in &self.by_slot {
            let is_last = self.incarnations.get(slot) == Some(&backend.handle.incarnation);
            if backend.handle.slot != *slot || !is_last {
                return Err(format!("slot {slot} holds {:?}", backend.handle));
            }
            if usize::from(slot.0) >= BACKENDS_MAX {
                return Err(format!("slot {slot} is above the limit"));
            }
            if !names.insert(&backend.spec.id) {
                return Err(format!("two backends are called {:?}", backend.spec.id));
            }
            // A further rank copies its engine's description, except for the id.
            let is_described = backend.is_further_rank() || backend.spec.validate().is_ok();
            if !is_described || !backend.facts.is_valid() {
                return Err(format!("backend {:?} is out of bounds", backend.spec.id));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(id: &str, port: u16) -> BackendSpec {
        BackendSpec {
            id: id.to_owned(),
            url: format!("http://127.0.0.1:{port}"),
            models: vec!["*".to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: None,
            kv_events: None,
            kv_replay: None,
            role: BackendRole::Both,
        }
    }

    fn started(at_s: u64) -> EngineFacts {
        EngineFacts {
            started_at_s: Some(at_s),
            ..EngineFacts::default()
        }
    }

    #[test]
    fn slots_are_reused_and_incarnations_never() {
        let mut backends = Backends::default();
        assert_eq!(
            backends.put(spec("a", 1)),
            Some(vec![SlotChange::Begun(Slot(0))])
        );
        assert_eq!(
            backends.put(spec("b", 2)),
            Some(vec![SlotChange::Begun(Slot(1))])
        );
        let first = backends.named("a").unwrap().handle;
        assert_eq!(backends.remove("a"), Some(vec![SlotChange::Gone(Slot(0))]));
        assert_eq!(backends.remove("a"), None);
        assert_eq!(
            backends.put(spec("c", 3)),
            Some(vec![SlotChange::Begun(Slot(0))])
        );
        assert!(!backends.is_live(first));
        assert_eq!(
            backends.named("c").unwrap().handle.incarnation,
            Incarnation(2)
        );
        assert_eq!(backends.check(), Ok(()));
    }

    #[test]
    fn only_a_new_url_begins_a_new_incarnation() {
        let mut backends = Backends::default();
        backends.put(spec("a", 1));
        let handle = backends.named("a").unwrap().handle;
        assert_eq!(backends.put(spec("a", 1)), Some(Vec::new()));
        let resized = BackendSpec {
            capacity_blocks: Some(9),
            ..spec("a", 1)
        };
        assert_eq!(
            backends.put(resized),
            Some(vec![SlotChange::Resized(Slot(0))])
        );
        assert!(backends.is_live(handle));
        assert_eq!(
            backends.put(spec("a", 2)),
            Some(vec![SlotChange::Begun(Slot(0))])
        );
        assert!(!backends.is_live(handle));
    }

    #[test]
    fn a_later_start_begins_an_incarnation_and_an_earlier_is_ignored() {
        let mut backends = Backends::default();
        backends.put(spec("a", 1));
        let handle = backends.named("a").unwrap().handle;
        assert_eq!(backends.observe(handle, started(100)), Some(Vec::new()));
        let sized = EngineFacts {
            capacity_blocks: Some(5),
            ..started(100)
        };
        assert_eq!(
            backends.observe(handle, sized),
            Some(vec![SlotChange::Resized(Slot(0))])
        );
        let old = EngineFacts {
            capacity_blocks: Some(6),
            ..started(99)
        };
        assert_eq!(backends.observe(handle, old), Some(Vec::new()));
        assert_eq!(backends.named("a").unwrap().capacity_blocks(), Some(5));
        assert_eq!(
            backends.observe(handle, started(101)),
            Some(vec![SlotChange::Begun(Slot(0))])
        );
        assert_eq!(backends.observe(handle, started(102)), None);
        assert_eq!(backends.named("a").unwrap().capacity_blocks(), Some(5));
    }

    #[test]
    fn registry_size_is_bounded() {
        let mut backends = Backends::default();
        for number in 0..BACKENDS_MAX {
            assert!(backends.put(spec(&number.to_string(), 1)).is_some());
        }
        assert_eq!(backends.put(spec("one-more", 1)), None);
        assert_eq!(backends.put(spec("7", 1)), Some(Vec::new()));
        assert_eq!(backends.iter().count(), BACKENDS_MAX);
    }
}
