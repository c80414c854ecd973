//! Compares the block pool with a naive model, and with recordings of a real vLLM.

use std::collections::VecDeque;

use super::super::text::EngineHash;
use super::{BlockEvent, BlockPool, HeldBlocks, PrefixHit};
use proptest::prelude::*;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The pool's rules with lists instead of links and searches instead of an index.
struct Naive {
    block_tokens: u32,
    references: Vec<u32>,
    /// Hash of each block's content, and the time when it was registered.
    content: Vec<Option<(EngineHash, u64)>>,
    queue: VecDeque<usize>,
    clock: u64,
}

impl Naive {
    fn new(blocks: usize, block_tokens: u32) -> Self {
        Self {
            block_tokens,
            references: vec![0; blocks],
            content: vec![None; blocks],
            queue: (1..blocks).collect(),
            clock: 0,
        }
    }

    fn find(&self, hashes: &[EngineHash], tokens: u32) -> Vec<usize> {
        let most = (tokens.saturating_sub(1) / self.block_tokens) as usize;
        let oldest_copy = |hash: &EngineHash| {
            let copies = self.content.iter().enumerate();
            copies
                .filter_map(|(block, content)| content.map(|(held, at)| (at, block, held)))
                .filter(|(_, _, held)| held == hash)
                .min()
                .map(|(_, block, _)| block)
        };
        hashes.iter().take(most).map_while(oldest_copy).collect()
    }

    fn allocate(&mut self, held: &mut Vec<usize>, hit: &[usize], tokens: u32) -> bool {
        let wanted = tokens.div_ceil(self.block_tokens) as usize;
        let new = wanted.saturating_sub(held.len() + hit.len());
        let idle = hit
            .iter()
            .filter(|block| self.references[**block] == 0)
            .count();
        if new + idle > self.queue.len() {
            return false;
        }
        for &block in hit {
            self.queue.retain(|queued| *queued != block);
            self.references[block] += 1;
            held.push(block);
        }
        for _ in 0..new {
            let block = self.queue.pop_front().unwrap();
            self.content[block] = None;
            self.references[block] = 1;
            held.push(block);
        }
        true
    }

    fn register(&mut self, held: &[usize], registered: usize, hashes: &[EngineHash], full: usize) {
        for index in registered..full {
            self.clock += 1;
            self.content[held[index]] = Some((hashes[index], self.clock));
        }
    }

    fn release(&mut self, held: Vec<usize>) {
        for block in held.into_iter().rev() {
            self.references[block] -= 1;
            match (self.references[block], self.content[block]) {
                (0, Some(_)) => self.queue.push_back(block),
                (0, None) => self.queue.push_front(block),
                _ => {}
            }
        }
    }
}

/// One operation on a pool.
#[derive(Debug, Clone)]
enum Step {
    /// Adds a prompt and runs `scheduled` of its tokens. A family's prompts share their first
    /// blocks.
    Begin {
        family: u64,
        shared: usize,
        tokens: u32,
        scheduled: u32,
    },
    /// Continues a running request.
    Extend { which: usize, tokens: u32 },
    /// Ends a running request.
    Release { which: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_u64..3, 0_usize..6, 1_u32..40, 1_u32..40).prop_map(
            |(family, shared, tokens, scheduled)| Step::Begin { family, shared, tokens, scheduled }
        ),
        3 => (0_usize..8, 1_u32..10).prop_map(|(which, tokens)| Step::Extend { which, tokens }),
        2 => (0_usize..8).prop_map(|which| Step::Release { which }),
    ];
    prop::collection::vec(step, 1..120)
}

fn chain(family: u64, shared: usize, own: u64) -> Vec<EngineHash> {
    let mut parent = family;
    let next = |index: usize| {
        let block = if index < shared {
            index as u64
        } else {
            own << 8 | index as u64
        };
        parent = xxh3_64_with_seed(&block.to_le_bytes(), parent);
        parent
    };
    (0..16).map(next).collect()
}

struct Running {
    hashes: Vec<EngineHash>,
    held: HeldBlocks,
    naive: Vec<usize>,
    naive_registered: usize,
    tokens: u32,
}

fn grow(
    pool: &mut BlockPool,
    naive: &mut Naive,
    run: &mut Running,
    hit: (&PrefixHit, &[usize]),
    to: u32,
) {
    let to = to.min(16 * 4);
    let fits = pool.allocate(&mut run.held, hit.0, to);
    assert_eq!(fits, naive.allocate(&mut run.naive, hit.1, to));
    if fits {
        run.naive_registered += hit.1.len();
        run.tokens = to;
        pool.register(&mut run.held, &run.hashes, to);
        let full = ((to / 4) as usize).max(run.naive_registered);
        naive.register(&run.naive, run.naive_registered, &run.hashes, full);
        run.naive_registered = full;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_block_pool_equals_a_naive_model(blocks in 3_u32..24, steps in steps()) {
        let mut pool = BlockPool::new(blocks, 4);
        let mut naive = Naive::new(blocks as usize, 4);
        let mut running: Vec<Running> = Vec::new();
        let mut stored: Vec<EngineHash> = Vec::new();
        for (own, step) in steps.into_iter().enumerate() {
            match step {
                Step::Begin { family, shared, tokens, scheduled } => {
                    let hashes = chain(family, shared, own as u64);
                    let hit = pool.find(&hashes, tokens);
                    let naive_hit = naive.find(&hashes, tokens);
                    let same: Vec<usize> = hit.blocks.iter().map(|block| *block as usize).collect();
                    prop_assert_eq!(&same, &naive_hit);
                    let to = hit.tokens(&pool) + scheduled.min(tokens - hit.tokens(&pool));
                    let mut run = Running {
                        hashes, held: HeldBlocks::default(), naive: Vec::new(), naive_registered: 0,
                        tokens: 0,
                    };
                    grow(&mut pool, &mut naive, &mut run, (&hit, &naive_hit), to);
                    if !run.held.is_empty() {
                        running.push(run);
                    }
                }
                Step::Extend { which, tokens } => {
                    if let Some(run) = running.get_mut(which) {
                        let to = run.tokens + tokens;
                        grow(&mut pool, &mut naive, run, (&PrefixHit::default(), &[]), to);
                    }
                }
                Step::Release { which } => {
                    if which < running.len() {
                        let mut run = running.swap_remove(which);
                        pool.release(&mut run.held);
                        naive.release(run.naive);
                    }
                }
            }
            prop_assert_eq!(pool.free_blocks() as usize, naive.queue.len());
            replay_events(&mut stored, pool.take_events());
            let mut contents: Vec<EngineHash> =
                naive.content.iter().flatten().map(|(hash, _)| *hash).collect();
            contents.sort_unstable();
            stored.sort_unstable();
            prop_assert_eq!(&stored, &contents, "events do not add up to the content");
        }
        for mut run in running {
            pool.release(&mut run.held);
        }
        prop_assert_eq!(pool.free_blocks(), pool.usable_blocks());
    }
}

/// Maintains the multiset of cached hashes from events, as a subscriber does.
fn replay_events(stored: &mut Vec<EngineHash>, events: Vec<BlockEvent>) {
    for event in events {
        match event {
            BlockEvent::Stored { hashes, .. } => stored.extend(hashes),
            BlockEvent::Removed { hash } => {
                let copy = stored.iter().position(|held| *held == hash);
                stored.swap_remove(copy.expect("removed what was never stored"));
            }
            BlockEvent::Cleared => stored.clear(),
        }
    }
}

/// One line of the recording: requests sent to a vLLM 0.32 server with 1,024 blocks of 32 tokens,
/// in order, and how many blocks its KV events stored and removed.
#[derive(Debug, serde::Deserialize)]
struct Recorded {
    name: String,
    requests: Vec<RecordedRequest>,
    stored: usize,
    removed: usize,
    /// Cached tokens of all requests together, if not recorded per request.
    cached: Option<u32>,
}

#[derive(Debug, serde::Deserialize)]
struct RecordedRequest {
    #[serde(default)]
    prompt: Vec<u32>,
    /// Length in tokens of a unique prompt, in place of `prompt`.
    #[serde(default)]
    distinct: u32,
    out: Vec<u32>,
    #[serde(default)]
    salt: String,
    cached: Option<u32>,
}

const RECORDED_BLOCK_TOKENS: usize = 32;
const RECORDED_BATCH_TOKENS: u32 = 2048;

fn recorded_hashes(ids: &[u32], salt: &str) -> Vec<EngineHash> {
    let mut parent = xxh3_64(salt.as_bytes());
    let hash = |block: &[u32]| {
        let bytes: Vec<u8> = block.iter().flat_map(|id| id.to_le_bytes()).collect();
        parent = xxh3_64_with_seed(&bytes, parent);
        parent
    };
    ids.chunks_exact(RECORDED_BLOCK_TOKENS).map(hash).collect()
}

/// Prefills and decodes one recorded request. Returns its blocks and cached tokens.
fn run_recorded(
    pool: &mut BlockPool,
    ids: &[u32],
    prompt_tokens: u32,
    salt: &str,
) -> (HeldBlocks, u32) {
    let hashes = recorded_hashes(ids, salt);
    let mut held = HeldBlocks::default();
    let mut hit = pool.find(&hashes, prompt_tokens);
    let cached = hit.tokens(pool);
    let mut computed = cached;
    // The last output token is never computed.
    let last = u32::try_from(ids.len()).unwrap() - 1;
    while computed < last {
        let next = if computed < prompt_tokens {
            prompt_tokens.min(computed + RECORDED_BATCH_TOKENS)
        } else {
            computed + 1
        };
        assert!(pool.allocate(&mut held, &std::mem::take(&mut hit), next));
        pool.register(&mut held, &hashes, next);
        computed = next;
    }
    (held, cached)
}

#[test]
fn the_block_pool_matches_a_recorded_vllm() {
    let mut pool = BlockPool::new(1024, 32);
    let mut fresh = 1_000_000;
    for line in include_str!("recorded/vllm032_bs32.jsonl").lines() {
        let recorded: Recorded = serde_json::from_str(line).unwrap();
        let mut together = Vec::new();
        let mut cached_in_all = 0;
        for request in &recorded.requests {
            let mut ids = request.prompt.clone();
            ids.extend(fresh..fresh + request.distinct);
            fresh += request.distinct;
            let prompt_tokens = u32::try_from(ids.len()).unwrap();
            ids.extend(&request.out);
            let (held, cached) = run_recorded(&mut pool, &ids, prompt_tokens, &request.salt);
            if let Some(expected) = request.cached {
                assert_eq!(cached, expected, "cached tokens of {}", recorded.name);
            }
            cached_in_all += cached;
            together.push(held);
        }
        if let Some(expected) = recorded.cached {
            assert_eq!(
                cached_in_all, expected,
                "cached tokens of {}",
                recorded.name
            );
        }
        for mut held in together {
            pool.release(&mut held);
        }
        let (mut stored, mut removed) = (0, 0);
        for event in pool.take_events() {
            match event {
                BlockEvent::Stored { hashes, .. } => stored += hashes.len(),
                BlockEvent::Removed { .. } => removed += 1,
                BlockEvent::Cleared => panic!("nobody resets the cache"),
            }
        }
        let expected = (recorded.stored, recorded.removed);
        assert_eq!(
            (stored, removed),
            expected,
            "stored and removed by {}",
            recorded.name
        );
    }
}
