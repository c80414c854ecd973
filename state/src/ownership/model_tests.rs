//! Compares the ownership with a naive model: sets of blocks in which leases and releases touch
//! whole paths, and eviction sorts everything.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::ids::{BlockHash, Slot};
use crate::ownership::{Lease, MissingTip, Ownership};

/// Slots in use: few enough to share blocks, far enough apart to need masks of every width.
const SLOTS: [u16; 6] = [0, 1, 5, 70, 130, 1023];

#[derive(Debug, Clone, Copy)]
struct Block {
    parent: Option<BlockHash>,
    depth: u32,
    /// Number of the last kept release of a path through the block; 0 if none.
    released: u64,
}

#[derive(Debug, Clone, Default)]
struct Naive {
    capacity: Option<u32>,
    releases: u64,
    blocks: BTreeMap<BlockHash, Block>,
    /// Number of open leases by tip.
    leases: BTreeMap<BlockHash, u32>,
}

impl Naive {
    fn path(&self, tip: Option<BlockHash>) -> BTreeSet<BlockHash> {
        std::iter::successors(tip, |block| self.blocks[block].parent).collect()
    }

    /// Returns the blocks held by some lease, or by the path to `walking`.
    fn held(&self, walking: Option<BlockHash>) -> BTreeSet<BlockHash> {
        let tips = self.leases.keys().copied().chain(walking);
        tips.flat_map(|tip| self.path(Some(tip))).collect()
    }

    fn has_children(&self, block: BlockHash) -> bool {
        self.blocks
            .values()
            .any(|other| other.parent == Some(block))
    }

    /// Evicts the least recently released block, the deepest first within one release.
    fn evict(&mut self, walking: Option<BlockHash>) -> bool {
        let held = self.held(walking);
        let free = self.blocks.iter().filter(|(hash, _)| !held.contains(hash));
        let first = free.min_by_key(|(_, block)| (block.released, u32::MAX - block.depth));
        let first = first.map(|(&hash, _)| hash);
        first.is_some_and(|hash| self.blocks.remove(&hash).is_some())
    }

    fn trim(&mut self, walking: Option<BlockHash>) {
        let capacity = self.capacity.unwrap_or(u32::MAX) as usize;
        while self.blocks.len() > capacity && self.evict(walking) {}
    }

    /// Removes the blocks from `tip` upwards that nothing holds and no lease kept.
    fn give_back(&mut self, mut tip: Option<BlockHash>) {
        while let Some(hash) = tip {
            let is_held = self.held(None).contains(&hash) || self.has_children(hash);
            if is_held || self.blocks[&hash].released > 0 {
                return;
            }
            tip = self.blocks.remove(&hash).and_then(|block| block.parent);
        }
    }

    fn walk(
        &mut self,
        others: usize,
        max: usize,
        from: Option<BlockHash>,
        chain: &[BlockHash],
    ) -> Option<BlockHash> {
        let mut tip = from;
        for &hash in chain {
            match self.blocks.get(&hash) {
                Some(block) if block.parent == tip => tip = Some(hash),
                Some(_) => break,
                None => {
                    if others + self.blocks.len() >= max {
                        self.trim(tip);
                    }
                    while others + self.blocks.len() >= max && self.evict(tip) {}
                    if others + self.blocks.len() >= max {
                        break;
                    }
                    let depth = tip.map_or(0, |tip| self.blocks[&tip].depth + 1);
                    self.blocks.insert(
                        hash,
                        Block {
                            parent: tip,
                            depth,
                            released: 0,
                        },
                    );
                    tip = Some(hash);
                }
            }
        }
        // The real trim runs every 32 blocks. Only longer contradictory chains would reveal it.
        self.trim(tip);
        tip
    }

    fn pin(&mut self, tip: BlockHash) {
        *self.leases.entry(tip).or_default() += 1;
    }

    fn unpin(&mut self, tip: BlockHash) -> bool {
        let Some(leases) = self.leases.get_mut(&tip) else {
            return false;
        };
        *leases -= 1;
        if *leases == 0 {
            self.leases.remove(&tip);
        }
        true
    }

    fn release(&mut self, tip: BlockHash, keep: bool) {
        if !self.unpin(tip) {
            return;
        }
        if keep {
            self.releases += 1;
            for hash in self.path(Some(tip)) {
                self.blocks
                    .get_mut(&hash)
                    .expect("a path is owned")
                    .released = self.releases;
            }
        } else {
            self.give_back(Some(tip));
        }
        self.trim(None);
    }

    fn remove(&mut self, top: BlockHash) {
        let Some(block) = self.blocks.get(&top).copied() else {
            return;
        };
        let below = |hash: &BlockHash| self.path(Some(*hash)).contains(&top);
        let gone: Vec<_> = self.blocks.keys().copied().filter(below).collect();
        for hash in gone {
            self.blocks.remove(&hash);
            self.leases.remove(&hash);
        }
        self.give_back(block.parent);
        self.trim(None);
    }
}

/// A call to both sides. `path` names a chain by the branch taken at each block.
#[derive(Debug, Clone)]
enum Op {
    Acquire {
        slot: usize,
        path: Vec<u8>,
        known: usize,
    },
    AcquireForged {
        slot: usize,
        hashes: Vec<u8>,
    },
    Extend {
        lease: usize,
        branches: Vec<u8>,
    },
    Release {
        lease: usize,
        keep: bool,
    },
    SetCapacity {
        slot: usize,
        capacity: Option<u32>,
    },
    Remove {
        slot: usize,
        path: Vec<u8>,
    },
    Clear {
        slot: usize,
    },
    Replace {
        slot: usize,
    },
    Restore {
        into_new: bool,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let path = || prop::collection::vec(0_u8..3, 0..7);
    let slot = || 0..SLOTS.len();
    let capacity = prop_oneof![Just(None), (0_u32..12).prop_map(Some)];
    let op = prop_oneof![
        10 => (slot(), path(), 0_usize..7)
            .prop_map(|(slot, path, known)| Op::Acquire { slot, path, known }),
        2 => (slot(), prop::collection::vec(0_u8..5, 0..6))
            .prop_map(|(slot, hashes)| Op::AcquireForged { slot, hashes }),
        4 => (0_usize..9, path()).prop_map(|(lease, branches)| Op::Extend { lease, branches }),
        9 => (0_usize..9, prop::bool::weighted(0.8))
            .prop_map(|(lease, keep)| Op::Release { lease, keep }),
        1 => (slot(), capacity).prop_map(|(slot, capacity)| Op::SetCapacity { slot, capacity }),
        1 => (slot(), path()).prop_map(|(slot, path)| Op::Remove { slot, path }),
        1 => slot().prop_map(|slot| Op::Clear { slot }),
        1 => slot().prop_map(|slot| Op::Replace { slot }),
        1 => any::<bool>().prop_map(|into_new| Op::Restore { into_new }),
    ];
    prop::collection::vec(op, 1..60)
}

fn extend_path(mut hash: u64, branches: &[u8]) -> Vec<BlockHash> {
    let mut next = |branch: &u8| {
        hash = xxh3_64_with_seed(&[*branch], hash);
        BlockHash(hash)
    };
    branches.iter().map(&mut next).collect()
}

fn chain(path: &[u8]) -> Vec<BlockHash> {
    extend_path(7, path)
}

/// The ownership and its model, with the open leases.
struct Pair {
    real: Ownership,
    naive: BTreeMap<u16, Naive>,
    max: usize,
    leases: Vec<Lease>,
    seen: BTreeSet<BlockHash>,
}

impl Pair {
    fn new(max: usize, capacity: Option<u32>) -> Self {
        let mut real = Ownership::with_limits(4, max as u64);
        let mut naive = BTreeMap::new();
        for slot in SLOTS {
            real.add_backend(Slot(slot), capacity);
            naive.insert(
                slot,
                Naive {
                    capacity,
                    ..Naive::default()
                },
            );
        }
        Self {
            real,
            naive,
            max,
            leases: Vec::new(),
            seen: BTreeSet::new(),
        }
    }

    fn naive(&mut self, slot: u16) -> (&mut Naive, usize) {
        let total: usize = self.naive.values().map(|naive| naive.blocks.len()).sum();
        let naive = self.naive.get_mut(&slot).expect("every slot is modelled");
        let others = total - naive.blocks.len();
        (naive, others)
    }

    fn acquire(&mut self, slot: u16, tip: Option<BlockHash>, new: &[BlockHash]) {
        self.seen.extend(new);
        let max = self.max;
        let real = self.real.acquire(Slot(slot), tip, new);
        let (naive, others) = self.naive(slot);
        if tip.is_some_and(|tip| !naive.blocks.contains_key(&tip)) {
            assert_eq!(real, Err(MissingTip));
            return;
        }
        let tip = naive.walk(others, max, tip, new);
        let lease = real.expect("the tip is owned");
        assert_eq!(lease.tip, tip);
        if let Some(tip) = tip {
            naive.pin(tip);
        }
        self.leases.push(lease);
    }

    fn extend(&mut self, lease: usize, branches: &[u8]) {
        if self.leases.is_empty() {
            return;
        }
        let at = lease % self.leases.len();
        let new = extend_path(self.leases[at].tip.map_or(7, |tip| tip.0), branches);
        self.seen.extend(&new);
        let before = self.leases[at].tip;
        self.real.extend(&mut self.leases[at], &new);
        let (slot, max, after) = (self.leases[at].slot.0, self.max, self.leases[at].tip);
        let (naive, others) = self.naive(slot);
        if before.is_some_and(|tip| !naive.blocks.contains_key(&tip)) {
            assert_eq!(after, before);
            return;
        }
        let tip = naive.walk(others, max, before, &new);
        assert_eq!(after, tip);
        if tip != before {
            naive.pin(tip.expect("a walk does not end before its start"));
            if let Some(before) = before {
                naive.unpin(before);
            }
        }
    }

    fn release(&mut self, lease: usize, keep: bool) {
        if self.leases.is_empty() {
            return;
        }
        let lease = self.leases.swap_remove(lease % self.leases.len());
        if let Some(tip) = lease.tip {
            self.naive(lease.slot.0).0.release(tip, keep);
        }
        self.real.release(lease, keep);
    }

    /// Forgets the leases reported as over, which must be exactly those whose tip is gone.
    fn forget(&mut self, slot: u16, closed_lease_tips: &[BlockHash]) {
        let view = self.real.view();
        self.leases.retain(|lease| {
            let Some(tip) = lease.tip.filter(|_| lease.slot.0 == slot) else {
                return true;
            };
            assert_ne!(view.owns(lease.slot, tip), closed_lease_tips.contains(&tip));
            !closed_lease_tips.contains(&tip)
        });
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Acquire { slot, path, known } => {
                let chain = chain(path);
                let (known, new) = chain.split_at((*known).min(chain.len()));
                self.acquire(SLOTS[*slot], known.last().copied(), new);
            }
            Op::AcquireForged { slot, hashes } => {
                let hashes: Vec<_> = hashes.iter().map(|&h| BlockHash(u64::from(h))).collect();
                self.acquire(SLOTS[*slot], None, &hashes);
            }
            Op::Extend { lease, branches } => self.extend(*lease, branches),
            Op::Release { lease, keep } => self.release(*lease, *keep),
            Op::SetCapacity { slot, capacity } => {
                let slot = SLOTS[*slot];
                self.real.set_capacity(Slot(slot), *capacity);
                let naive = self.naive(slot).0;
                naive.capacity = *capacity;
                naive.trim(None);
            }
            Op::Remove { slot, path } => {
                let (slot, chain) = (SLOTS[*slot], chain(path));
                if let Some(&block) = chain.last() {
                    let mut closed_lease_tips = Vec::new();
                    self.real.remove(Slot(slot), block, &mut closed_lease_tips);
                    self.naive(slot).0.remove(block);
                    self.forget(slot, &closed_lease_tips);
                }
            }
            Op::Clear { slot } => {
                let mut closed_lease_tips = Vec::new();
                self.real.clear(Slot(SLOTS[*slot]), &mut closed_lease_tips);
                self.forget(SLOTS[*slot], &closed_lease_tips);
                let naive = self.naive(SLOTS[*slot]).0;
                naive.blocks.clear();
                naive.leases.clear();
            }
            Op::Replace { slot } => {
                let slot = SLOTS[*slot];
                self.real.remove_backend(Slot(slot));
                self.real.add_backend(Slot(slot), Some(8));
                self.leases.retain(|lease| lease.slot != Slot(slot));
                *self.naive(slot).0 = Naive {
                    capacity: Some(8),
                    ..Naive::default()
                };
            }
            Op::Restore { into_new } => self.restore(*into_new),
        }
    }

    fn restore(&mut self, into_new: bool) {
        let mut image = Vec::new();
        self.real
            .freeze()
            .write_to(&mut image)
            .expect("memory does not fail");
        let digest = self.real.digest();
        if into_new {
            self.real = Ownership::with_limits(4, self.max as u64);
        }
        let mut rest = &image[..];
        self.real
            .restore(&mut rest)
            .expect("it was written just now");
        assert_eq!((rest.len(), self.real.digest()), (0, digest));
    }

    fn compare(&self) {
        let view = self.real.view();
        for (&slot, naive) in &self.naive {
            assert_eq!(self.real.owned(Slot(slot)), naive.blocks.len() as u64);
            for &block in &self.seen {
                let owns = naive.blocks.contains_key(&block);
                assert_eq!(view.owns(Slot(slot), block), owns, "{slot} {block}");
            }
        }
        let leases = self.naive.iter().flat_map(|(&slot, naive)| {
            let each = naive.leases.iter();
            each.flat_map(move |(&tip, &n)| (0..n).map(move |_| (Slot(slot), tip)))
        });
        assert_eq!(self.real.check(leases), Ok(()));
    }

    /// Compares matching by bisection with checking one block after another.
    fn compare_match(&self, path: &[u8]) {
        let chain = chain(path);
        let linear = self.naive.iter().filter_map(|(&slot, naive)| {
            let owned = chain
                .iter()
                .take_while(|block| naive.blocks.contains_key(block));
            let owned = owned.count() as u32;
            let by_position = self.real.view().match_by_position(&chain, Slot(slot));
            assert_eq!(by_position, owned);
            (owned > 0).then_some((Slot(slot), owned))
        });
        let mut bisected = Vec::new();
        self.real
            .view()
            .match_prefix(&chain, |slot, blocks| bisected.push((slot, blocks)));
        assert_eq!(bisected, linear.collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn ownership_equals_a_naive_model(
        ops in ops(),
        max in prop_oneof![Just(25_usize), Just(10_000)],
        capacity in prop_oneof![Just(None), (1_u32..16).prop_map(Some)],
        probe in prop::collection::vec(0_u8..3, 0..7),
    ) {
        let mut pair = Pair::new(max, capacity);
        for op in &ops {
            pair.apply(op);
            pair.compare();
            pair.compare_match(&probe);
            if let Op::Acquire { path, .. } = op {
                pair.compare_match(path);
            }
        }
        // After all leases are released, everything fits again.
        while !pair.leases.is_empty() {
            pair.release(0, true);
        }
        pair.compare();
    }
}
