//! Data-parallel ranks: the parts of one engine that have a prefix cache each.
//!
//! vLLM (`--data-parallel-size`) and SGLang (`--dp-size`) serve several copies of a model behind one
//! port, and compute a request on the rank that its header names. Where the engine tells how many
//! ranks it has, each is a backend (ADR 0073): the first is the backend that the operator
//! put, and every other one a backend with a slot of its own and the id `ENGINE@RANK`, which no
//! operator can write. It follows its engine in everything: address, models, labels, facts, draining
//! and end. Ownership, leases, load, limits and measurements go by slots and so by ranks.
//!
//! Nothing else is stored: which slots belong together follows from the ids.

use std::collections::BTreeMap;

use super::{Backend, BackendSpec, Backends, SlotChange};
use crate::bounds::{BACKENDS_MAX, NAME_BYTES_MAX};
use crate::ids::{BackendRef, Slot};

/// Maximum number of data-parallel ranks of one engine.
pub const RANKS_MAX: u16 = 64;
/// Stands between the id of an engine and the number of a rank. Not in any id of an operator.
const MARK: char = '@';
/// Longest end of an id that names a rank, in bytes.
const END_BYTES_MAX: usize = 3;

/// Splits the id of a backend into that of its engine and, where it is a further rank's, the rank.
fn split(id: &str) -> (&str, Option<u16>) {
    match id.rsplit_once(MARK) {
        Some((engine, rank)) => (engine, rank.parse().ok()),
        None => (id, None),
    }
}

/// Returns the id of the backend whose rank `id` names: what operators call it.
#[must_use]
pub fn engine_of(id: &str) -> &str {
    split(id).0
}

/// The slots of engines with several ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankSlots {
    /// By the slot of the first rank: the slots of all ranks, in order.
    by_engine: BTreeMap<Slot, Vec<Slot>>,
}

impl RankSlots {
    /// Returns the slots of the engine whose first rank is in `slot`, in order of ranks. Empty: it
    /// has one.
    #[must_use]
    pub fn of(&self, slot: Slot) -> &[Slot] {
        self.by_engine.get(&slot).map_or(&[], Vec::as_slice)
    }

    /// Returns the slots of all ranks of the engine that has one in `slot`. Empty: it has one only.
    #[must_use]
    pub fn around(&self, slot: Slot) -> &[Slot] {
        let mut engines = self.by_engine.values();
        let engine = engines.find(|slots| slots.contains(&slot));
        engine.map_or(&[], Vec::as_slice)
    }

    /// Reads them off the ids.
    pub(super) fn read(by_slot: &BTreeMap<Slot, Backend>) -> Self {
        let mut further: BTreeMap<&str, BTreeMap<u16, Slot>> = BTreeMap::new();
        for (slot, backend) in by_slot {
            if let (engine, Some(rank)) = split(&backend.spec.id) {
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
    /// Whether it is a rank of an engine other than the first, which follows the backend that
    /// operators put.
    #[must_use]
    pub fn is_further_rank(&self) -> bool {
        self.further_rank().is_some()
    }

    /// Returns its rank, if that is not the first.
    #[must_use]
    pub fn further_rank(&self) -> Option<u16> {
        split(&self.spec.id).1
    }

    /// The description of its engine's rank `rank`.
    fn spec_of(&self, rank: u16) -> BackendSpec {
        BackendSpec {
            id: format!("{}{MARK}{rank}", self.spec.id),
            ..self.spec.clone()
        }
    }
}

impl Backends {
    /// The slots of engines with several ranks.
    pub(crate) fn ranks(&self) -> &RankSlots {
        &self.ranks
    }

    /// Returns where rank `rank` of the engine behind `backend` is; `None` if it has fewer. An
    /// engine whose ranks are not known has one slot for all.
    pub(crate) fn rank_of(&self, backend: BackendRef, rank: u16) -> Option<BackendRef> {
        match self.ranks.of(backend.slot) {
            [] => Some(backend),
            slots => {
                let slot = slots.get(usize::from(rank))?;
                self.in_slot(*slot).map(|it| it.handle)
            }
        }
    }

    /// Returns the slots of all ranks of the engine whose first rank is in `slot`.
    pub(crate) fn rank_slots(&self, slot: Slot) -> Vec<Slot> {
        match self.ranks.of(slot) {
            [] => vec![slot],
            slots => slots.to_vec(),
        }
    }

    /// Gives the engine in `slot` so many ranks, at least one. Each begins with an empty cache: what
    /// was known of the engine as a whole is of no rank. `None` if there is no room; nothing
    /// changes then.
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
                backend.facts = engine.facts.clone();
            }
            changes.push(added);
        }
        self.ranks = RankSlots::read(&self.by_slot);
        changes.push(self.begin(slot));
        Some(changes)
    }

    /// Removes the further ranks of the engine in `slot`.
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

    /// Brings the further ranks of the engine in `slot` in line with it.
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
            backend.facts = engine.facts.clone();
            if backend.capacity_blocks() != capacity_before {
                changes.push(SlotChange::Resized(*slot));
            }
        }
        changes
    }

    /// Begins a new life of all further ranks of the engine in `slot`.
    pub(super) fn begin_ranks(&mut self, slot: Slot) -> Vec<SlotChange> {
        let further: Vec<Slot> = self.ranks.of(slot).iter().skip(1).copied().collect();
        further.into_iter().map(|slot| self.begin(slot)).collect()
    }

    /// Checks I113: further ranks stand behind an engine, without a gap, and follow it.
    pub(crate) fn check_ranks(&self) -> Result<(), String> {
        if self.ranks != RankSlots::read(&self.by_slot) {
            return Err("the slots of ranks are not those of the ids".to_owned());
        }
        let of_engines = self.ranks.by_engine.values().map(|slots| slots.len() - 1);
        let further = self.iter().filter(|it| it.spec.id.contains(MARK));
        if of_engines.sum::<usize>() != further.count() {
            return Err("a rank stands behind no engine, or twice".to_owned());
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
