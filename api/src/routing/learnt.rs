//! Tells from whom this replica knows a predicted prefix: from its own requests, from before its
//! restart, or from a peer. The difference is what sharing and durability are worth.
//!
//! The question is what the replica would know by itself. Every request that it sends to a backend
//! teaches it that the backend holds the prompt, whoever proposed the blocks first; so the next
//! turn of a session counts as a peer's only when the session moves to another replica. Of the
//! rest, what the state held when the replica had caught up after its start is from before the
//! restart. What remains came through the log: from peers, or from engines' KV events.
//!
//! Neither the log nor the index records who proposed a block: 16 million of them would pay for a
//! metric. Instead each replica keeps marks: fingerprints of (backend, block) at every
//! [`MARK_BLOCKS`]th block of a chain and at the chain's end. A mark stands for everything before
//! it, so a prefix is found by bisection, in at most about 20 loads, and a request adds marks only
//! for what is new to it. Nobody waits for a lock. Up to [`MARK_BLOCKS`] - 1 blocks before a branch
//! are attributed to a peer, as is a chain whose marks later ones have overwritten (after about a
//! million marks, which are some ten thousand long prompts).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use state::Registry;
use state::ids::{BackendRef, BlockHash, Incarnation};
use state::view::BlockView;

/// Distance of the marks along a chain, in blocks. Divides the length of the view's windows.
const MARK_BLOCKS: usize = 8;
/// Number of marks kept of this run's own requests: 4 MiB.
const OWN_MARKS_MAX: usize = 1 << 20;
/// Number of marks in a bucket, which fills a cache line.
const WAYS: usize = 16;

/// Whence a predicted prefix is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LearntFrom {
    /// This replica sent the blocks to the backend in this run.
    Here,
    /// A peer, or an engine's KV events, told them in this run.
    Peer,
    /// The state held them when this replica had caught up after its start.
    BeforeRestart,
}

impl LearntFrom {
    /// All origins, in the order of the counters in a backend's meter.
    pub(super) const ALL: [Self; 3] = [Self::Here, Self::Peer, Self::BeforeRestart];

    /// Returns the name used by metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Here => "here",
            Self::Peer => "peer",
            Self::BeforeRestart => "before-restart",
        }
    }
}

/// Parts of a predicted prefix by origin, in blocks. A prefix known here ends before one known
/// from before the restart, and that one before a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct LearntBlocks {
    /// Number of full blocks of the prompt.
    pub(super) prompt: usize,
    matched: usize,
    /// Number of leading blocks known from this replica's own requests.
    here: usize,
    /// Number of leading blocks known from these or from before the restart.
    without_peers: usize,
}

impl LearntBlocks {
    /// Splits the `predicted` tokens by origin, in the order of [`LearntFrom::ALL`].
    pub(super) fn tokens(self, predicted: u64) -> [u64; 3] {
        let of = |blocks: usize| {
            let part = u128::from(predicted) * blocks as u128 / self.matched.max(1) as u128;
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        let (here, without_peers) = (of(self.here), of(self.without_peers));
        [here, predicted - without_peers, without_peers - here]
    }
}

/// What this replica knows of the backends' blocks without its peers.
pub(super) struct KnownPrefixes {
    here: PrefixMarks,
    /// What the state held when this replica had caught up; unset before.
    before: OnceLock<PrefixMarks>,
}

impl Default for KnownPrefixes {
    fn default() -> Self {
        Self {
            here: PrefixMarks::with_room(OWN_MARKS_MAX),
            before: OnceLock::new(),
        }
    }
}

impl KnownPrefixes {
    /// Marks everything that the state holds as known from before the restart. Reads the whole
    /// index, some 20 ms for a million blocks. Only the first call has an effect.
    pub(super) fn caught_up(&self, view: &BlockView, registry: &Registry) {
        let incarnation = |slot| {
            let backends = &registry.backends;
            let at = backends.partition_point(|it| it.handle.slot < slot);
            let found = backends.get(at).filter(|it| it.handle.slot == slot);
            found.map_or(Incarnation(0), |it| it.handle.incarnation)
        };
        self.before.get_or_init(|| {
            let mut marks = 0;
            view.for_each_run(|_, _, blocks| marks += blocks.len() / MARK_BLOCKS + 1);
            // Twice the room: buckets fill unevenly.
            let before = PrefixMarks::with_room(2 * marks);
            view.for_each_run(|slot, from, blocks| {
                let incarnation = incarnation(slot);
                before.add(BackendRef { slot, incarnation }, from, blocks);
            });
            before
        });
    }

    /// Records that a request with the prompt `chain` goes to `backend`, and returns whence the
    /// first `matched` blocks were known.
    pub(super) fn sent(
        &self,
        backend: BackendRef,
        chain: &[BlockHash],
        matched: u32,
    ) -> LearntBlocks {
        let predicted = &chain[..chain.len().min(matched as usize)];
        let here = self.here.longest(backend, predicted);
        let before = match self.before.get() {
            Some(before) if here < predicted.len() => before.longest(backend, predicted),
            Some(_) | None => 0,
        };
        self.here.add(backend, 0, chain);
        LearntBlocks {
            prompt: chain.len(),
            matched: predicted.len(),
            here,
            without_peers: here.max(before),
        }
    }

    /// Records that `blocks`, which follow the first `from` blocks of a chain sent to `backend`,
    /// are there too: the output completed them.
    pub(super) fn extended(&self, backend: BackendRef, from: usize, blocks: &[BlockHash]) {
        self.here.add(backend, from, blocks);
    }
}

/// Marks of prefixes at backends: a set of bounded size in which later marks overwrite earlier
/// ones. Threads that change a bucket at once may lose a mark.
struct PrefixMarks(Box<[AtomicU32]>);

impl PrefixMarks {
    fn with_room(marks: usize) -> Self {
        let buckets = marks.div_ceil(WAYS).max(1);
        let marks = std::iter::repeat_with(|| AtomicU32::new(0));
        Self(marks.take(buckets * WAYS).collect())
    }

    /// Returns the bucket of a mark, and the mark's fingerprint, which is never 0.
    fn place(&self, backend: BackendRef, block: BlockHash) -> (&[AtomicU32], u32) {
        let backend = u64::from(backend.slot.0) << 32 | u64::from(backend.incarnation.0);
        let mixed = block.0 ^ backend.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let buckets = (self.0.len() / WAYS) as u64;
        let bucket = (((mixed >> 32) * buckets) >> 32) as usize * WAYS;
        (&self.0[bucket..bucket + WAYS], (mixed as u32).max(1))
    }

    fn contains(&self, backend: BackendRef, block: BlockHash) -> bool {
        let (bucket, mark) = self.place(backend, block);
        bucket.iter().any(|it| it.load(Relaxed) == mark)
    }

    fn insert(&self, backend: BackendRef, block: BlockHash) {
        let (bucket, mark) = self.place(backend, block);
        for entry in bucket {
            match entry.load(Relaxed) {
                0 => return entry.store(mark, Relaxed),
                known if known == mark => return,
                _ => {}
            }
        }
        bucket[mark as usize % WAYS].store(mark, Relaxed);
    }

    /// Marks the blocks of a chain that follow its first `from` blocks.
    fn add(&self, backend: BackendRef, from: usize, blocks: &[BlockHash]) {
        let Some(&last) = blocks.last() else { return };
        self.insert(backend, last);
        let marked = from / MARK_BLOCKS + 1..=(from + blocks.len()) / MARK_BLOCKS;
        for end in marked.rev().map(|mark| mark * MARK_BLOCKS) {
            let block = blocks[end - from - 1];
            // Its last request marked everything before it.
            if block != last && self.contains(backend, block) {
                return;
            }
            self.insert(backend, block);
        }
    }

    /// Returns the length of the longest marked prefix of `chain`, in blocks.
    fn longest(&self, backend: BackendRef, chain: &[BlockHash]) -> usize {
        let has = |end: usize| end == 0 || self.contains(backend, chain[end - 1]);
        if has(chain.len()) {
            return chain.len();
        }
        // The last mark before which everything is known lies in `from..to`.
        let (mut from, mut to) = (0, chain.len() / MARK_BLOCKS + 1);
        while to - from > 1 {
            let middle = from.midpoint(to);
            if has(middle * MARK_BLOCKS) {
                from = middle;
            } else {
                to = middle;
            }
        }
        let from = from * MARK_BLOCKS;
        let ends = from + 1..chain.len().min(from + MARK_BLOCKS);
        ends.rev().find(|end| has(*end)).unwrap_or(from)
    }
}

#[cfg(test)]
mod tests {
    use state::ids::Slot;

    use super::*;

    const A: BackendRef = BackendRef {
        slot: Slot(0),
        incarnation: Incarnation(1),
    };
    const B: BackendRef = BackendRef {
        slot: Slot(1),
        incarnation: Incarnation(1),
    };

    /// Returns the chain of a prompt that shares its first `common` blocks with every other one.
    fn chain(name: u64, common: usize, blocks: usize) -> Vec<BlockHash> {
        let block = |at: usize| match at < common {
            true => BlockHash(at as u64 + 1),
            false => BlockHash(name << 32 | at as u64),
        };
        (0..blocks).map(block).collect()
    }

    fn split(known: &KnownPrefixes, chain: &[BlockHash], matched: u32) -> [u64; 3] {
        known
            .sent(A, chain, matched)
            .tokens(u64::from(matched) * 16)
    }

    #[test]
    fn a_session_that_stays_is_known_here_to_the_block() {
        let known = KnownPrefixes::default();
        let all = chain(1, 0, 100);
        assert_eq!(split(&known, &all[..21], 0), [0, 0, 0]);
        known.extended(A, 21, &all[21..30]);
        assert_eq!(split(&known, &all[..50], 30), [30 * 16, 0, 0]);
        assert_eq!(known.here.longest(B, &all), 0, "B was sent nothing");
    }

    #[test]
    fn a_session_that_comes_from_a_peer_is_known_here_from_then_on() {
        let known = KnownPrefixes::default();
        let all = chain(1, 0, 100);
        split(&known, &all[..21], 0);
        assert_eq!(split(&known, &all[..60], 50), [21 * 16, 29 * 16, 0]);
        assert_eq!(split(&known, &all[..80], 60), [60 * 16, 0, 0]);
    }

    #[test]
    fn a_shared_start_is_known_here_up_to_a_mark() {
        let known = KnownPrefixes::default();
        split(&known, &chain(1, 37, 90), 0);
        let [here, peer, before] = split(&known, &chain(2, 37, 70), 60);
        assert_eq!((here, peer, before), (32 * 16, 28 * 16, 0));
    }

    #[test]
    fn marks_beyond_the_room_replace_others() {
        let marks = PrefixMarks::with_room(64);
        for name in 0..1000 {
            marks.add(A, 0, &chain(name, 0, 9));
        }
        let is_kept = |name| marks.longest(A, &chain(name, 0, 9)) == 9;
        assert!(is_kept(999));
        assert!((0..1000).filter(|name| is_kept(*name)).count() <= 64);
    }

    #[test]
    fn parts_add_up_to_the_prediction() {
        let learnt = LearntBlocks {
            prompt: 9,
            matched: 7,
            here: 2,
            without_peers: 5,
        };
        assert_eq!(learnt.tokens(100), [28, 29, 43]);
        assert_eq!(LearntBlocks::default().tokens(0), [0; 3]);
    }
}
