//! Holds the blocks that this replica has routed and not applied yet, so that its next decision
//! sees them. Only the outbox writes to the overlay.
//!
//! A pending run of blocks is indexed by its first hash. That suffices: a hash identifies the whole
//! prefix before it, and the run begins where the backend's applied or pending prefix ended when
//! the request was routed. So a later match either ends right before the run or does not lead to
//! it. If another replica's commit moves a match into the middle of a run, the match misses the run
//! until it is applied; that costs a little locality and causes no wrong match.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use state::ids::{BackendRef, BlockHash};

use crate::sync::{AtomicUsize, Ordering::Relaxed, RwLock};

/// Consecutive blocks of a chain. Clones share the chain.
#[derive(Debug, Clone)]
pub(super) struct BlockRun {
    chain: Arc<[BlockHash]>,
    part: Range<usize>,
}

impl BlockRun {
    pub(super) fn new(chain: Arc<[BlockHash]>, part: Range<usize>) -> Self {
        assert!(
            part.end <= chain.len(),
            "part {part:?} of a chain of {}",
            chain.len()
        );
        Self { chain, part }
    }

    pub(super) fn blocks(&self) -> &[BlockHash] {
        &self.chain[self.part.clone()]
    }

    pub(super) fn len(&self) -> usize {
        self.part.len()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RunKey {
    backend: BackendRef,
    first: BlockHash,
}

/// Hasher for [`RunKey`]. Hashes are already uniform; one multiplication mixes in the backend.
#[derive(Default)]
struct RunKeyHasher(u64);

impl Hasher for RunKeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(29) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type RunMap = HashMap<RunKey, Vec<BlockRun>, BuildHasherDefault<RunKeyHasher>>;

/// The pending runs of all backends. Readers share the lock; a writer holds it for one change.
pub struct Overlay {
    /// Number of pending runs. Readers skip the lock while it is 0.
    count: AtomicUsize,
    runs: RwLock<PendingRuns>,
}

struct PendingRuns {
    by_start: RunMap,
    /// Number of pending blocks, by backend; absent if 0.
    blocks: HashMap<BackendRef, usize>,
}

/// Initial capacity of `PendingRuns::by_start`. It is large because growing the map blocks readers.
const STARTS_EXPECTED: usize = 8192;

impl Default for Overlay {
    fn default() -> Self {
        let by_start =
            RunMap::with_capacity_and_hasher(STARTS_EXPECTED, BuildHasherDefault::default());
        Self {
            count: AtomicUsize::new(0),
            runs: RwLock::new(PendingRuns {
                by_start,
                blocks: HashMap::new(),
            }),
        }
    }
}

impl Overlay {
    /// Adds a `run` that was routed to `backend`. Has no effect if it is empty.
    pub(super) fn add(&self, backend: BackendRef, run: &BlockRun) {
        let Some(&first) = run.blocks().first() else {
            return;
        };
        let mut runs = self.runs.write().unwrap_or_else(PoisonError::into_inner);
        *runs.blocks.entry(backend).or_default() += run.len();
        runs.by_start
            .entry(RunKey { backend, first })
            .or_default()
            .push(run.clone());
        self.count.fetch_add(1, Relaxed);
    }

    /// Removes a run that is applied or dropped. Has no effect if it is not pending.
    pub(super) fn remove(&self, backend: BackendRef, run: &BlockRun) {
        let Some(&first) = run.blocks().first() else {
            return;
        };
        let mut runs = self.runs.write().unwrap_or_else(PoisonError::into_inner);
        let start = RunKey { backend, first };
        let PendingRuns { by_start, blocks } = &mut *runs;
        let Some(same_start) = by_start.get_mut(&start) else {
            return;
        };
        let is_same =
            |other: &BlockRun| Arc::ptr_eq(&other.chain, &run.chain) && other.part == run.part;
        if let Some(at) = same_start.iter().position(is_same) {
            same_start.swap_remove(at);
            self.count.fetch_sub(1, Relaxed);
            if let Some(pending) = blocks.get_mut(&backend) {
                *pending -= run.len();
                if *pending == 0 {
                    blocks.remove(&backend);
                }
            }
        }
        if same_start.is_empty() {
            by_start.remove(&start);
        }
    }

    /// Extends `matched` of each `(backend, matched)`, the number of leading blocks of `chain` that
    /// the backend holds, by the pending runs.
    pub fn extend<'a>(
        &self,
        chain: &[BlockHash],
        matches: impl Iterator<Item = (BackendRef, &'a mut u32)>,
    ) {
        if self.is_empty() {
            return;
        }
        let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
        for (backend, matched) in matches {
            let mut at = *matched as usize;
            while let Some(&first) = chain.get(at) {
                let Some(same_start) = runs.by_start.get(&RunKey { backend, first }) else {
                    break;
                };
                let common = |run: &BlockRun| {
                    let pairs = run.blocks().iter().zip(&chain[at..]);
                    pairs
                        .take_while(|(pending, wanted)| pending == wanted)
                        .count()
                };
                at += same_start.iter().map(common).max().unwrap_or(0);
            }
            *matched = u32::try_from(at).unwrap_or(u32::MAX);
        }
    }

    /// Returns the number of blocks pending for `backend`.
    #[must_use]
    pub fn blocks(&self, backend: BackendRef) -> usize {
        if self.is_empty() {
            return 0;
        }
        let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
        runs.blocks.get(&backend).copied().unwrap_or(0)
    }

    /// Whether a run pending for `backend` follows `block`. Scans all pending runs.
    #[must_use]
    pub fn uses(&self, backend: BackendRef, block: BlockHash) -> bool {
        if self.is_empty() {
            return false;
        }
        let runs = self.runs.read().unwrap_or_else(PoisonError::into_inner);
        let mut of_backend = runs
            .by_start
            .iter()
            .filter(|(start, _)| start.backend == backend)
            .flat_map(|(_, runs)| runs);
        of_backend.any(|run| run.chain[..run.part.start].contains(&block))
    }

    /// Whether nothing is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Returns the number of pending runs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::ids::{Incarnation, Slot};

    const A: BackendRef = BackendRef {
        slot: Slot(0),
        incarnation: Incarnation(1),
    };
    const B: BackendRef = BackendRef {
        slot: Slot(1),
        incarnation: Incarnation(1),
    };

    fn chain(hashes: &[u64]) -> Arc<[BlockHash]> {
        hashes.iter().copied().map(BlockHash).collect()
    }

    fn run(hashes: &[u64]) -> BlockRun {
        BlockRun::new(chain(hashes), 0..hashes.len())
    }

    fn extended(overlay: &Overlay, backend: BackendRef, hashes: &[u64], matched: u32) -> u32 {
        let mut matched = matched;
        overlay.extend(&chain(hashes), std::iter::once((backend, &mut matched)));
        matched
    }

    #[test]
    fn a_pending_run_extends_the_match_of_its_backend_only() {
        let overlay = Overlay::default();
        overlay.add(A, &BlockRun::new(chain(&[1, 2, 3, 4]), 1..4));
        assert_eq!(extended(&overlay, A, &[1, 2, 3, 4, 5], 1), 4);
        assert_eq!(extended(&overlay, A, &[1, 2, 3, 9], 1), 3);
        assert_eq!(
            extended(&overlay, A, &[1, 2, 3], 0),
            0,
            "block 1 is not there"
        );
        assert_eq!(extended(&overlay, B, &[1, 2, 3], 1), 1);
        let next_life = BackendRef {
            incarnation: Incarnation(2),
            ..A
        };
        assert_eq!(extended(&overlay, next_life, &[1, 2, 3], 1), 1);
    }

    #[test]
    fn pending_runs_chain_and_branch() {
        let overlay = Overlay::default();
        overlay.add(A, &run(&[1, 2, 3]));
        overlay.add(A, &run(&[4, 5]));
        overlay.add(A, &run(&[14, 15]));
        assert_eq!(extended(&overlay, A, &[1, 2, 3, 4, 5, 6], 0), 5);
        assert_eq!(extended(&overlay, A, &[1, 2, 14, 15], 0), 4);
    }

    #[test]
    fn pending_blocks_are_counted_and_their_parents_in_use() {
        let overlay = Overlay::default();
        let pending = BlockRun::new(chain(&[1, 2, 3, 4]), 2..4);
        overlay.add(A, &pending);
        overlay.add(A, &run(&[7]));
        assert_eq!((overlay.blocks(A), overlay.blocks(B)), (3, 0));
        let used = |block| overlay.uses(A, BlockHash(block));
        assert_eq!([1, 2, 3, 7].map(used), [true, true, false, false]);
        assert!(!overlay.uses(B, BlockHash(1)));
        overlay.remove(A, &pending);
        assert_eq!(overlay.blocks(A), 1);
        assert!(!overlay.uses(A, BlockHash(1)));
    }

    #[test]
    fn each_addition_is_removed_once() {
        let overlay = Overlay::default();
        let (long, short) = (run(&[1, 2, 3]), run(&[1, 2]));
        overlay.add(A, &long);
        overlay.add(A, &short);
        assert_eq!(extended(&overlay, A, &[1, 2, 3], 0), 3);
        overlay.remove(A, &long);
        overlay.remove(A, &long);
        overlay.remove(B, &short);
        assert_eq!(extended(&overlay, A, &[1, 2, 3], 0), 2);
        overlay.remove(A, &short);
        assert!(overlay.is_empty());
        assert!(overlay.runs.read().unwrap().by_start.is_empty());
        overlay.add(A, &run(&[]));
        assert!(overlay.is_empty());
    }
}
