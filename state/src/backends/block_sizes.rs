//! Block size of each model in tokens, derived from the reports of its engines.
//!
//! The block size is part of every block hash, so all replicas must split a model's prompts alike,
//! and change the size at the same log index. Engines report their own size through the log, and a
//! model's size follows from the reports of all engines that serve it:
//!
//! - It is the greatest common divisor of their sizes. An engine whose blocks are a multiple of
//!   that size can be described exactly in blocks of it.
//! - Once set, it shrinks when an engine reports blocks that it does not divide, and otherwise
//!   changes only if no engine reports it any more. An engine that leaves changes nothing until
//!   another one reports something new. While an engine reports the size, it can only shrink to a
//!   divisor, so at least by half. It can thus not flap.
//! - It does not shrink below [`BLOCK_TOKENS_MIN`]: smaller blocks would cost more than they are
//!   worth. An engine that would need them has no exact ownership ([`BlockSizes::fits`]).

use std::collections::{BTreeMap, BTreeSet};

use bincode::{Decode, Encode};

use super::{Backend, Backends};
use crate::ids::Slot;

/// Tokens per block before any engine has reported: the default of vLLM.
pub const BLOCK_TOKENS_DEFAULT: u32 = 16;
/// Minimum tokens per block that the reports of engines can lead to.
pub const BLOCK_TOKENS_MIN: u32 = 8;
/// Maximum tokens per block that an engine may report.
pub const BLOCK_TOKENS_MAX: u32 = 65_536;
/// Maximum number of models with a recorded block size. Further models have the default.
pub const SIZED_MODELS_MAX: usize = 1024;

/// Block sizes that engines reported, and those of models that follow from them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct BlockSizes {
    by_engine: BTreeMap<Slot, u32>,
    by_model: BTreeMap<String, u32>,
}

impl BlockSizes {
    /// Returns the tokens per block of `model`, or the default if unknown.
    #[must_use]
    pub fn of(&self, model: &str) -> u32 {
        self.known(model).unwrap_or(BLOCK_TOKENS_DEFAULT)
    }

    /// Returns the tokens per block of `model`; `None` before one of its engines has reported.
    #[must_use]
    pub fn known(&self, model: &str) -> Option<u32> {
        self.by_model.get(model).copied()
    }

    /// Returns the tokens per block of a model whose only engine has blocks of `size` tokens.
    #[must_use]
    pub fn of_lone_engine(size: u32) -> u32 {
        Self::default().settled("", &[size])
    }

    /// Returns the tokens per block that the engine in `slot` reported, if it did.
    #[must_use]
    pub fn of_engine(&self, slot: Slot) -> Option<u32> {
        self.by_engine.get(&slot).copied()
    }

    /// Iterates by name over the models with a recorded block size.
    pub fn models(&self) -> impl Iterator<Item = (&str, u32)> {
        self.by_model.iter().map(|(model, size)| (&**model, *size))
    }

    /// Whether the blocks of the engine in `slot` are a multiple of those of `model`. True if the
    /// engine has not reported.
    #[must_use]
    pub fn fits(&self, slot: Slot, model: &str) -> bool {
        let own = self.of_engine(slot);
        own.is_none_or(|own| own.is_multiple_of(self.of(model)))
    }

    /// Records the block size reported by the engine in `slot`. Returns whether it is new, or
    /// `None`, without a change, if it is out of bounds.
    pub(crate) fn report(&mut self, slot: Slot, tokens: u32) -> Option<bool> {
        if !(1..=BLOCK_TOKENS_MAX).contains(&tokens) {
            return None;
        }
        Some(self.by_engine.insert(slot, tokens) != Some(tokens))
    }

    /// Forgets the report of the engine in `slot`. The block sizes of models stay.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.by_engine.remove(&slot);
    }

    /// Updates the block sizes of the models that the backend in `slot` serves. Returns the models
    /// whose size changed, with their previous sizes.
    pub(crate) fn settle(&mut self, slot: Slot, backends: &Backends) -> Vec<(String, u32)> {
        let Some(backend) = backends.in_slot(slot) else {
            return Vec::new();
        };
        if !self.by_engine.contains_key(&slot) {
            return Vec::new();
        }
        let own: BTreeSet<&str> = backend.named_models().collect();
        let mut sizes: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for other in backends.iter() {
            if let Some(size) = self.of_engine(other.handle.slot) {
                for name in other.named_models().filter(|name| own.contains(name)) {
                    sizes.entry(name).or_default().push(size);
                }
            }
        }
        let mut changed = Vec::new();
        for (model, sizes) in sizes {
            let (before, now) = (self.of(model), self.settled(model, &sizes));
            let is_new = self.known(model).is_none();
            if now != before {
                changed.push((model.to_owned(), before));
            }
            if now != before || is_new {
                self.set(model, now, backends);
            }
        }
        changed
    }

    fn settled(&self, model: &str, sizes: &[u32]) -> u32 {
        let common = sizes.iter().copied().reduce(common_divisor);
        let common = common.filter(|it| *it >= BLOCK_TOKENS_MIN);
        match (self.known(model), common) {
            (None, common) => common.unwrap_or(BLOCK_TOKENS_DEFAULT),
            (Some(known), Some(common)) if common % known != 0 => common,
            (Some(known), Some(common)) if !sizes.contains(&known) => common,
            (Some(known), _) => known,
        }
    }

    fn set(&mut self, model: &str, size: u32, backends: &Backends) {
        if self.by_model.len() >= SIZED_MODELS_MAX && !self.by_model.contains_key(model) {
            let served: BTreeSet<&str> = backends.iter().flat_map(Backend::named_models).collect();
            self.by_model.retain(|model, _| served.contains(&**model));
            if self.by_model.len() >= SIZED_MODELS_MAX {
                return;
            }
        }
        self.by_model.insert(model.to_owned(), size);
    }

    /// Checks the bounds, and that every slot with a block size is taken.
    ///
    /// # Errors
    /// Describes the first violation.
    pub(crate) fn check(&self, backends: &Backends) -> Result<(), String> {
        let is_size = |size: &u32| (1..=BLOCK_TOKENS_MAX).contains(size);
        let is_bounded = self.by_model.len() <= SIZED_MODELS_MAX
            && self.by_engine.values().all(is_size)
            && self.by_model.values().all(is_size);
        if !is_bounded {
            return Err("block sizes are out of bounds".to_owned());
        }
        let mut engines = self.by_engine.keys();
        match engines.find(|slot| backends.in_slot(**slot).is_none()) {
            Some(slot) => Err(format!("slot {slot} is empty and has a block size")),
            None => Ok(()),
        }
    }
}

/// Returns the greatest common divisor of `a` and `b`.
fn common_divisor(a: u32, b: u32) -> u32 {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::{BackendSpec, EngineFacts};

    struct Fleet {
        backends: Backends,
        sizes: BlockSizes,
    }

    impl Fleet {
        /// Creates a fleet of `count` backends `0`, `1`, ... that serve `m`.
        fn new(count: u16) -> Self {
            let mut backends = Backends::default();
            for number in 0..count {
                backends.put(BackendSpec {
                    id: number.to_string(),
                    url: format!("http://a:{}", number + 1),
                    models: vec!["m".to_owned()],
                    labels: BTreeMap::new(),
                    capacity_blocks: None,
                    kv_events: None,
                    kv_replay: None,
                    role: crate::command::BackendRole::Both,
                });
            }
            let sizes = BlockSizes::default();
            Self { backends, sizes }
        }

        /// Reports the block size of an engine. Returns the size of `m` and whether it changed.
        fn report(&mut self, slot: u16, tokens: u32) -> (u32, bool) {
            let slot = Slot(slot);
            assert!(self.sizes.report(slot, tokens).is_some());
            let changed = self.sizes.settle(slot, &self.backends);
            assert_eq!(self.sizes.check(&self.backends), Ok(()));
            (self.sizes.of("m"), !changed.is_empty())
        }
    }

    #[test]
    fn block_size_does_not_depend_on_report_order() {
        let reports = [(0, 32), (1, 16), (2, 64)];
        for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [2, 0, 1]] {
            let mut fleet = Fleet::new(3);
            assert_eq!(fleet.sizes.of("m"), BLOCK_TOKENS_DEFAULT);
            for at in order {
                let (slot, tokens): (u16, u32) = reports[at];
                fleet.report(slot, tokens);
            }
            assert_eq!(fleet.sizes.of("m"), 16, "{order:?}");
            assert!((0..3).all(|slot| fleet.sizes.fits(Slot(slot), "m")));
        }
    }

    #[test]
    fn block_size_changes_only_when_all_engines_agree() {
        let mut fleet = Fleet::new(2);
        assert_eq!(fleet.report(0, 16), (16, false));
        assert_eq!(fleet.report(1, 16), (16, false));
        // All engines change, one after another.
        assert_eq!(fleet.report(0, 32), (16, false));
        assert_eq!(fleet.report(1, 32), (32, true));
        assert_eq!(fleet.report(1, 32), (32, false));
        // An engine that leaves changes nothing, even when another reports again.
        assert_eq!(fleet.report(1, 16), (16, true));
        fleet.sizes.forget(Slot(1));
        assert_eq!(fleet.sizes.of("m"), 16);
    }

    #[test]
    fn an_engine_with_tiny_blocks_does_not_shrink_the_block_size() {
        let mut fleet = Fleet::new(2);
        assert_eq!(fleet.report(0, 32), (32, true));
        assert_eq!(fleet.report(1, 1), (32, false));
        assert!(fleet.sizes.fits(Slot(0), "m") && !fleet.sizes.fits(Slot(1), "m"));
        assert_eq!(fleet.sizes.report(Slot(1), 0), None);
        assert_eq!(fleet.sizes.report(Slot(1), BLOCK_TOKENS_MAX + 1), None);
        let mut alone = Fleet::new(1);
        assert_eq!(alone.report(0, 1), (BLOCK_TOKENS_DEFAULT, false));
    }

    #[test]
    fn block_size_reports_affect_only_the_engines_models() {
        let mut fleet = Fleet::new(2);
        let handle = fleet.backends.in_slot(Slot(1)).unwrap().handle;
        let facts = EngineFacts {
            models: Some(vec!["other".to_owned()]),
            ..EngineFacts::default()
        };
        fleet.backends.observe(handle, facts);
        fleet.report(0, 32);
        assert_eq!(fleet.sizes.known("other"), None, "it is described as m");
        assert_eq!(fleet.sizes.known("m"), Some(32));
    }
}
