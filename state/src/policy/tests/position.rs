//! Position hashing as the cache-aware design describes it, compared with the implemented search by
//! position over chained hashes.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::prefix::{ChainRoot, HashSecret, chain_bytes};

const BLOCK_BYTES: usize = 16;

/// The design's tracker. It names a block by position and content, treats the owner of a prefix's
/// last block as the owner of the whole, and does not check what precedes a block.
#[derive(Default)]
struct Literal(BTreeMap<(usize, Vec<u8>), BTreeSet<Slot>>);

impl Literal {
    fn record_request(&mut self, prompt: &str, backend: Slot) {
        for named in blocks(prompt) {
            self.0.entry(named).or_default().insert(backend);
        }
    }

    /// Returns the matched blocks like the design's `binary_search_backend_match`.
    fn matched(&self, prompt: &str, backend: Slot) -> usize {
        let names: Vec<_> = blocks(prompt).collect();
        let (mut low, mut high) = (0, names.len());
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            let holders = self.0.get(&names[middle - 1]);
            if holders.is_some_and(|holders| holders.contains(&backend)) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }
}

fn blocks(prompt: &str) -> impl Iterator<Item = (usize, Vec<u8>)> {
    let blocks = prompt.as_bytes().chunks_exact(BLOCK_BYTES);
    blocks.map(<[u8]>::to_vec).enumerate()
}

fn chain(prompt: &str) -> Vec<BlockHash> {
    let mut chain = Vec::new();
    let root = ChainRoot::new(7, HashSecret::of_number(7));
    chain_bytes(&root, prompt.as_bytes(), BLOCK_BYTES, &mut chain);
    chain
}

/// Returns a prompt: a system prompt, a field that changes with each request, and a long shared
/// text.
fn prompt(field: u32) -> String {
    let system = "You are a helper".repeat(4);
    format!(
        "{system:<64}request {field:08}{:>640}",
        "the same long text"
    )
}

#[test]
fn literal_position_hashing_overmatches_after_a_volatile_field() {
    let (first, second) = (prompt(1), prompt(2));
    let backend = Slot(3);
    let mut literal = Literal::default();
    literal.record_request(&first, backend);
    // All blocks but the one with the field match another request's. The tracker believes that 45
    // blocks are held; the engine can use the four before the field.
    assert_eq!(literal.matched(&second, backend), 45);
    let mut ownership = Ownership::new();
    ownership.add_backend(backend, None);
    ownership.acquire(backend, None, &chain(&first)).unwrap();
    let view = ownership.view();
    assert_eq!(view.match_by_position(&chain(&second), backend), 4);
    assert_eq!(view.match_by_position(&chain(&first), backend), 45);
    let mut by_mask = Vec::new();
    view.match_prefix(&chain(&second), |slot, blocks| by_mask.push((slot, blocks)));
    assert_eq!(by_mask, [(backend, 4)]);
}

#[test]
fn position_hashings_agree_without_a_volatile_field() {
    let backend = Slot(3);
    let (prompt, longer) = (prompt(1), format!("{}{:>64}", prompt(1), "and more"));
    let mut literal = Literal::default();
    literal.record_request(&prompt, backend);
    let mut ownership = Ownership::new();
    ownership.add_backend(backend, None);
    ownership.acquire(backend, None, &chain(&prompt)).unwrap();
    for queried in [
        &prompt[..100],
        &prompt,
        &longer,
        "another prompt altogether",
    ] {
        let literal = literal.matched(queried, backend);
        let sound = ownership.view().match_by_position(&chain(queried), backend);
        assert_eq!(sound as usize, literal, "{queried}");
    }
}
