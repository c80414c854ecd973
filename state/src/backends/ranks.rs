//! Data-parallel ranks: the parts of one engine that each have their own prefix cache.
//!
//! vLLM (`--data-parallel-size`) and SGLang (`--dp-size`) serve several copies of a model behind
//! one port, and compute a request on the rank given by its header. If the engine reports its
//! number of ranks, each rank is a backend (ADR 0027). The first rank is the registered backend
//! itself. Every further rank has its own slot and the id `ENGINE@RANK`, which no operator can
//! write. It follows its engine in everything: address, models, labels, facts, draining and
//! removal. Ownership, leases, load, limits and measurements are per slot and so per rank.
//!
//! The registry stores nothing else: the ids determine which slots belong together.

use std::collections::BTreeMap;

use super::{Backend, BackendSpec, Backends, SlotChange};
use crate::bounds::{BACKENDS_MAX, NAME_BYTES_MAX};
use crate::ids::{BackendRef, Slot};

/// Maximum number of data-parallel ranks of one engine.
pub const RANKS_MAX: u16 = 64;
/// Separator between the engine's id and the rank number. Operators cannot use it in ids.
const MARK: char = '@';
/// Maximum length of the suffix that names a rank, in bytes.
const END_BYTES_MAX: usize = 3;

/// Splits a backend id into the engine's id and, for a further rank, the rank number.
fn parse_rank_id(id: &str) -> (&str, Option<u16>) {
    match id.rsplit_once(MARK) {
        Some((engine, rank)) => (engine, rank.parse().ok()),
        None => (id, None),
    }
}

/// Returns the id of the engine, as operators know it, from the id of any of its ranks.
#[must_use]
pub fn engine_of(id: &str) -> &str {
    parse_rank_id(id).0
}

/// Slots of the engines with several ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankSlots {
    /// Slots of all ranks in rank order, by the slot of the first rank.
    by_engine: BTreeMap<Slot, Vec<Slot>>,
}

impl RankSlots {
    /// Returns the slots of the engine whose first rank is in `slot`, in rank order. Empty if the
    /// engine has only one rank, or if `slot` holds a further rank.
    #[must_use]
    pub fn of(&self, slot: Slot) -> &[Slot] {
        self.by_engine.get(&slot).map_or(&[], Vec::as_slice)
    }

    /// Returns the slots of the engine with any rank in `slot`. Empty if it has only one rank.
    #[must_use]
    pub fn slots_of_engine(&self, slot: Slot) -> &[Slot] {
        let mut engines = self.by_engine.values();
        let engine = engines.find(|slots| slots.contains(&slot));
        engine.map_or(&[], Vec::as_slice)
    }

    /// Derives the slots from the ids of all backends.
    pub(super) fn read(by_slot: &BTreeMap<Slot, Backend>) -> Self {
        let mut further: BTreeMap<&str, BTreeMap<u16, Slot>> = BTreeMap::new();
        for (slot, backend) in by_slot {
            if let (engine, Some(rank)) = parse_rank_id(&backend.spec.id) {
                further.entry(engine).or_default().insert(rank, *slot);
            }
        }
        let mut by_engine = BTreeMap::new();
        for (slot, backend) in by_slot {
            if let Some(ranks) = further.get(&*backend.spec.id) {
                let slots = std::iter::once(*slot).chain(ranks.values().copied());
                by_engine.insert(*slot, slots.collect());
            }
        }
        Self { by_engine }
    }
}

impl Backend {
    /// Whether the backend is a further rank, which follows the registered backend.
    #[must_use]
    pub fn is_further_rank(&self) -> bool {
        self.further_rank().is_some()
    }

    /// Returns the number of a further rank; `None` for the first one.
    #[must_use]
    pub fn further_rank(&self) -> Option<u16> {
        parse_rank_id(&self.spec.id).1
    }

    /// Returns the description of rank `rank` of the engine that this backend registers.
    fn spec_of(&self, rank: u16) -> BackendSpec {
        BackendSpec {
            id: format!("{}{MARK}{rank}", self.spec.id),
            ..self.spec.clone()
        }
    }
}

impl Backends {
    /// Returns the slots of the engines with several ranks.
    pub(crate) fn ranks(&self) -> &RankSlots {
        &self.ranks
    }

    /// Returns the backend of rank `rank` of the engine behind `backend`; `None` if it has fewer
    /// ranks. An engine with unknown ranks has one slot for all of them.
    pub(crate) fn rank_of(&self, backend: BackendRef, rank: u16) -> Option<BackendRef> {
        match self.ranks.of(backend.slot) {
            [] => Some(backend),
            slots => {
                let slot = slots.get(usize::from(rank))?;
                self.in_slot(*slot).map(|it| it.handle)
            }
        }
    }

    /// Returns the slots of the engine whose first rank is in `slot`; only `slot` if it has no
    /// other.
    pub(crate) fn rank_slots(&self, slot: Slot) -> Vec<Slot> {
        match self.ranks.of(slot) {
            [] => vec![slot],
            slots => slots.to_vec(),
        }
    }

    /// Sets the number of ranks of the engine in `slot`, at least 1. If the number changes, each
    /// rank starts with an empty cache. Returns the changes that affect ownership. Returns `None`,
    /// without a change, if `slot` is empty, the engine's id is too long or the registry is full.
    pub(crate) fn set_ranks(&mut self, slot: Slot, ranks: u16) -> Option<Vec<SlotChange>> {
        let engine = self.in_slot(slot)?.clone();
        if engine.spec.id.len() + END_BYTES_MAX > NAME_BYTES_MAX {
            return None;
        }
        let known = self.ranks.of(slot).len().max(1);
        if known == usize::from(ranks) {
            return Some(Vec::new());
        }
        if self.by_slot.len() + usize::from(ranks) - known.min(ranks.into()) > BACKENDS_MAX {
            return None;
        }
        let mut changes = self.drop_ranks(slot);
        for rank in 1..ranks {
            let added = self.add(engine.spec_of(rank))?;
            if let SlotChange::Begun(slot) = added
                && let Some(backend) = self.by_slot.get_mut(&slot)
            {
                backend.draining = engine.draining;
                backend.moves_streams = engine.moves_streams;
                backend.facts = engine.facts.clone();
            }
            changes.push(added);
        }
        self.ranks = RankSlots::read(&self.by_slot);
        changes.push(self.begin(slot));
        Some(changes)
    }

    /// Removes the further ranks of the engine in `slot` and returns these removals.
    pub(super) fn drop_ranks(&mut self, slot: Slot) -> Vec<SlotChange> {
        let Some(slots) = self.ranks.by_engine.remove(&slot) else {
            return Vec::new();
        };
        let further = slots.into_iter().skip(1);
        further
            .map(|slot| {
                self.by_slot.remove(&slot);
                SlotChange::Gone(slot)
            })
            .collect()
    }

    /// Copies the engine in `slot` to its further ranks. Returns the ranks that change capacity.
    pub(super) fn align_ranks(&mut self, slot: Slot) -> Vec<SlotChange> {
        let Some(engine) = self.in_slot(slot).cloned() else {
            return Vec::new();
        };
        let mut changes = Vec::new();
        for (rank, slot) in (0..).zip(self.ranks.of(slot)).skip(1) {
            let Some(backend) = self.by_slot.get_mut(slot) else {
                continue;
            };
            let capacity_before = backend.capacity_blocks();
            backend.spec = engine.spec_of(rank);
            backend.draining = engine.draining;
            backend.moves_streams = engine.moves_streams;
            backend.facts = engine.facts.clone();
            if backend.capacity_blocks() != capacity_before {
                changes.push(SlotChange::Resized(*slot));
            }
        }
        changes
    }

    /// Starts new incarnations of all further ranks of the engine in `slot`.
    pub(super) fn begin_ranks(&mut self, slot: Slot) -> Vec<SlotChange> {
        let further: Vec<Slot> = self.ranks.of(slot).iter().skip(1).copied().collect();
        further.into_iter().map(|slot| self.begin(slot)).collect()
    }

    /// Checks I113: further ranks belong to an engine, without a gap, and follow it.
    ///
    /// # Errors
    /// Describes the first violation.
    pub(crate) fn check_ranks(&self) -> Result<(), String> {
        if self.ranks != RankSlots::read(&self.by_slot) {
            return Err("the slots of ranks are not those of the ids".to_owned());
        }
        let of_engines = self.ranks.by_engine.values().map(|slots| slots.len() - 1);
        let further = self.iter().filter(|it| it.spec.id.contains(MARK));
        if of_engines.sum::<usize>() != further.count() {
            return Err("a rank stands behind no engine, or twice".to_owned());
        }
        if self.iter().any(|it| it.moves_streams && !it.draining) {
            return Err("a backend moves its streams and does not drain".to_owned());
        }
        for (slot, slots) in &self.ranks.by_engine {
            let Some(engine) = self.in_slot(*slot) else {
                return Err(format!("slot {slot} is empty and has ranks"));
            };
            if slots.len() > usize::from(RANKS_MAX) {
                return Err(format!("{:?} has {} ranks", engine.spec.id, slots.len()));
            }
            for (rank, slot) in (0..).zip(slots).skip(1) {
                let follows = self.in_slot(*slot).is_some_and(|it| {
                    it.spec == engine.spec_of(rank)
                        && it.draining == engine.draining
                        && it.moves_streams == engine.moves_streams
                        && it.facts == engine.facts
                });
                if !follows {
                    return Err(format!(
                        "slot {slot} is no rank {rank} of slot {}",
                        slots[0]
                    ));
                }
            }
        }
        Ok(())
    }
}
