//! Matching over windows of 64 blocks: chains of some hundred blocks that branch anywhere, compared
//! with sets of paths. The unit tests of the view do the same with windows of four.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use state::ids::{BlockHash, Slot};
use state::ownership::{Lease, Ownership};

const SLOTS: u16 = 5;

/// Chain of a tree: its first `from` blocks are those of another chain, the others its own.
#[derive(Debug, Clone)]
struct Branch {
    of: usize,
    from: usize,
    length: usize,
}

fn branches() -> impl Strategy<Value = Vec<Branch>> {
    let branch = (any::<prop::sample::Index>(), 0_usize..300, 1_usize..300);
    prop::collection::vec(branch, 1..12).prop_map(|branches| {
        let branches = branches.into_iter().enumerate();
        let branch = |(nth, (of, from, length)): (usize, (prop::sample::Index, _, _))| Branch {
            of: of.index(nth + 1).min(nth.saturating_sub(1)),
            from,
            length,
        };
        branches.map(branch).collect()
    })
}

fn chains(branches: &[Branch]) -> Vec<Vec<BlockHash>> {
    let mut chains: Vec<Vec<BlockHash>> = Vec::new();
    for (nth, branch) in (1_u64..).zip(branches) {
        let mut chain = chains.get(branch.of).cloned().unwrap_or_default();
        chain.truncate(branch.from);
        let own = (0..branch.length as u64)
            .map(|at| BlockHash((nth << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        chain.extend(own);
        chains.push(chain);
    }
    chains
}

#[derive(Debug, Clone)]
enum Op {
    /// Slot, chain, number of its blocks.
    Acquire(u16, prop::sample::Index, usize),
    /// Lease, whether its blocks are kept.
    Release(prop::sample::Index, bool),
    /// Slot, chain, first block to remove.
    Remove(u16, prop::sample::Index, usize),
    Clear(u16),
    Restore,
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        8 => (0..SLOTS, index(), 1_usize..600).prop_map(|(slot, at, n)| Op::Acquire(slot, at, n)),
        5 => (index(), prop::bool::weighted(0.8)).prop_map(|(at, keep)| Op::Release(at, keep)),
        3 => (0..SLOTS, index(), 0_usize..600).prop_map(|(slot, at, n)| Op::Remove(slot, at, n)),
        1 => (0..SLOTS).prop_map(Op::Clear),
        1 => Just(Op::Restore),
    ]
}

fn apply(ownership: &mut Ownership, leases: &mut Vec<Lease>, chains: &[Vec<BlockHash>], op: &Op) {
    let mut outlived = Vec::new();
    let mut cleared = None;
    match op {
        Op::Acquire(slot, at, blocks) => {
            let chain = at.get(chains);
            let chain = &chain[..(*blocks).min(chain.len())];
            let lease = ownership.acquire(Slot(*slot), None, chain);
            leases.push(lease.expect("no tip is named"));
        }
        Op::Release(at, keep) if !leases.is_empty() => {
            let lease = leases.swap_remove(at.index(leases.len()));
            ownership.release(lease, *keep);
        }
        Op::Release(..) => {}
        Op::Remove(slot, at, block) => {
            let chain = at.get(chains);
            let block = chain[(*block).min(chain.len() - 1)];
            ownership.remove(Slot(*slot), block, &mut outlived);
            cleared = Some(*slot);
        }
        Op::Clear(slot) => {
            ownership.clear(Slot(*slot), &mut outlived);
            cleared = Some(*slot);
        }
        Op::Restore => {
            let mut image = Vec::new();
            let frozen = ownership.freeze();
            frozen.write_to(&mut image).expect("memory does not fail");
            ownership
                .restore(&mut &image[..])
                .expect("it was just written");
        }
    }
    leases.retain(|lease| {
        let is_over = lease.tip.is_none_or(|tip| outlived.contains(&tip));
        !(is_over && cleared == Some(lease.slot.0))
    });
}

/// Owned blocks by slot, from the writer's records.
fn owned(ownership: &Ownership) -> BTreeMap<u16, BTreeSet<BlockHash>> {
    let of = |slot| {
        ownership
            .blocks(Slot(slot))
            .map(|owned| owned.block)
            .collect()
    };
    (0..SLOTS).map(|slot| (slot, of(slot))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn readers_match_the_writers_owned_blocks(
        branches in branches(),
        ops in prop::collection::vec(op(), 1..40),
        capacity in prop_oneof![Just(None), (50_u32..400).prop_map(Some)],
    ) {
        let chains = chains(&branches);
        let mut ownership = Ownership::new();
        (0..SLOTS).for_each(|slot| ownership.add_backend(Slot(slot), capacity));
        let view = ownership.view();
        let mut leases = Vec::new();
        for op in &ops {
            apply(&mut ownership, &mut leases, &chains, op);
            let owned = owned(&ownership);
            for chain in &chains {
                let prefix = |slot: u16| {
                    let blocks = chain.iter().take_while(|block| owned[&slot].contains(block));
                    blocks.count() as u32
                };
                let expected: Vec<_> = (0..SLOTS)
                    .map(|slot| (Slot(slot), prefix(slot)))
                    .filter(|it| it.1 > 0)
                    .collect();
                let mut matched = Vec::new();
                view.match_prefix(chain, |slot, blocks| matched.push((slot, blocks)));
                prop_assert_eq!(&matched, &expected);
                for slot in 0..SLOTS {
                    let by_position = view.match_by_position(chain, Slot(slot));
                    prop_assert_eq!(by_position, prefix(slot));
                    for known in [1, by_position / 2, by_position] {
                        let known = known.min(by_position);
                        let further = view.match_from(chain, Slot(slot), known);
                        prop_assert_eq!(further, by_position, "from {}", known);
                    }
                }
            }
        }
        let open = leases.iter().filter_map(|lease| Some((lease.slot, lease.tip?)));
        prop_assert_eq!(ownership.check(open), Ok(()));
        let tips: Vec<_> = chains.iter().filter_map(|chain| chain.last().copied()).collect();
        let owned = owned(&ownership);
        for (block, owners) in view.owners(&tips) {
            let expected = owned.iter().filter(|(_, blocks)| blocks.contains(&block));
            let expected: Vec<_> = expected.map(|(slot, _)| Slot(*slot)).collect();
            prop_assert_eq!(owners, expected);
        }
    }
}
