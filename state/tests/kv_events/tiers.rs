//! Blocks on tiers below the GPU: a prompt is found on the GPU first, then on ever slower tiers.

use proptest::prelude::*;
use state::ids::{BlockHash, EngineHash, Slot};
use state::kv_events::{KvEvent, KvMode, LOWER_TIERS, LowerTier};

use super::scenes::{Scene, hashes, removed, stored};
use crate::common::{restored, snapshot};

/// Number of blocks in the model: a binary tree, in which `n / 2` is the parent of `n`.
const BLOCKS: u64 = 16;

fn names(names: &[u64]) -> Vec<EngineHash> {
    names.iter().map(|name| EngineHash(1000 + name)).collect()
}

fn copied(tier: LowerTier, blocks: &[u64]) -> KvEvent {
    KvEvent::TierCopied {
        tier,
        blocks: names(blocks),
    }
}

fn taken(tier: LowerTier, blocks: &[u64]) -> KvEvent {
    KvEvent::TierRemoved {
        tier,
        blocks: names(blocks),
    }
}

fn described(tier: LowerTier, parent: Option<u64>, blocks: &[u64]) -> KvEvent {
    match stored(parent, blocks) {
        KvEvent::Stored { parent, blocks } => KvEvent::TierStored {
            tier,
            parent,
            blocks,
        },
        other => other,
    }
}

/// Returns how many leading blocks of `chain` the engine holds at each level, the GPU's first.
fn found(scene: &Scene, chain: &[BlockHash]) -> [u32; 1 + LOWER_TIERS] {
    let view = scene.driver.state.view();
    let [cpu, disk, store] = view.tiers.each_ref();
    [&view.blocks, cpu, disk, store].map(|level| level.match_by_position(chain, Slot(0)))
}

#[test]
fn a_block_evicted_to_the_cpu_is_found_there() {
    let mut scene = Scene::followed(None);
    let chain = hashes(&[1, 2, 3]);
    scene.hear(0, vec![stored(None, &[1, 2, 3])]);
    assert_eq!(found(&scene, &chain), [3, 0, 0, 0]);
    scene.hear(0, vec![copied(LowerTier::Cpu, &[1, 2, 3])]);
    assert_eq!(found(&scene, &chain), [3, 3, 0, 0]);
    scene.hear(0, vec![removed(&[3, 2])]);
    assert_eq!(found(&scene, &chain), [1, 3, 0, 0]);
    scene.hear(0, vec![copied(LowerTier::Disk, &[3])]);
    scene.hear(0, vec![taken(LowerTier::Cpu, &[3])]);
    assert_eq!(found(&scene, &chain), [1, 2, 3, 0]);
    scene.hear(0, vec![taken(LowerTier::Cpu, &[2])]);
    assert_eq!(found(&scene, &chain), [1, 1, 1, 0]);
    let ranks = scene.driver.state.kv_ranks(scene.backend);
    assert_eq!(ranks[0].lower_tier_blocks.disk, 1);
}

#[test]
fn a_tier_begins_with_the_blocks_of_the_gpu() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1, 2]), stored(Some(1), &[3])]);
    scene.hear(0, vec![copied(LowerTier::Disk, &[3])]);
    assert_eq!(found(&scene, &hashes(&[1, 2])), [2, 0, 2, 0]);
    scene.hear(0, vec![KvEvent::Cleared, stored(None, &[1])]);
    assert_eq!(found(&scene, &hashes(&[1, 2])), [1, 0, 0, 0]);
}

#[test]
fn unknown_blocks_of_a_tier_are_left_out_and_the_gpu_stays_exact() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![stored(None, &[1])]);
    let unknown = [
        copied(LowerTier::Cpu, &[7, 1]),
        described(LowerTier::Store, Some(9), &[10, 11]),
        taken(LowerTier::Cpu, &[8]),
    ];
    scene.hear(0, unknown.to_vec());
    let ranks = scene.driver.state.kv_ranks(scene.backend);
    assert_eq!(ranks[0].condition.mode, KvMode::Exact);
    assert_eq!(ranks[0].lower_tier_blocks_left_out, 3);
    assert_eq!(found(&scene, &hashes(&[1])), [1, 1, 0, 0]);
}

#[test]
fn described_blocks_of_a_tier_need_not_have_been_on_the_gpu() {
    let mut scene = Scene::followed(None);
    scene.hear(0, vec![described(LowerTier::Store, None, &[1, 2])]);
    assert_eq!(found(&scene, &hashes(&[1, 2])), [0, 0, 0, 2]);
    scene.hear(0, vec![stored(None, &[1, 2])]);
    assert_eq!(found(&scene, &hashes(&[1, 2])), [2, 0, 0, 2]);
    scene.hear(0, vec![removed(&[2, 1]), taken(LowerTier::Store, &[1, 2])]);
    assert_eq!(found(&scene, &hashes(&[1, 2])), [0; 4]);
    let map = scene.driver.state.kv_map(Slot(0), 0).expect("it is known");
    assert_eq!(map.iter().count(), 0);
}

/// Number of copies of each block on each tier, the GPU first.
type Held = [[u32; 1 + LOWER_TIERS]; BLOCKS as usize];

/// Whether the router knows a block: a tier holds it, or one behind it.
fn is_known(held: &Held, name: u64) -> bool {
    name < BLOCKS
        && (held[name as usize].iter().any(|copies| *copies > 0)
            || is_known(held, 2 * name)
            || is_known(held, 2 * name + 1))
}

/// One random event: what happens (stored, described, copied, removed), on which tier, to which
/// block.
type Step = (u8, usize, u64);

/// Returns the number of copies after a tier with `copies` stored a block. Below the host's memory,
/// engines report what they hold again.
fn stored_copies(tier: LowerTier, copies: u32) -> u32 {
    match tier {
        LowerTier::Cpu => copies + 1,
        LowerTier::Disk | LowerTier::Store => 1,
    }
}

/// Applies `step` to the model. Returns the event that an engine would publish; `None` if an engine
/// could not do that.
fn event_of(held: &mut Held, (kind, tier, name): Step) -> Option<KvEvent> {
    let parent = (name > 1).then_some(name / 2);
    let follows = parent.is_none_or(|parent| is_known(held, parent));
    let lower = (tier > 0).then(|| LowerTier::ALL[tier - 1]);
    let copies = &mut held[name as usize][tier];
    match (kind, lower) {
        (0, None) if follows => {
            *copies += 1;
            Some(stored(parent, &[name]))
        }
        (0 | 1, Some(lower)) if follows => {
            *copies = stored_copies(lower, *copies);
            Some(described(lower, parent, &[name]))
        }
        (2, Some(lower)) => {
            if is_known(held, name) {
                let copies = &mut held[name as usize][tier];
                *copies = stored_copies(lower, *copies);
            }
            Some(copied(lower, &[name]))
        }
        (3, lower) => {
            *copies = copies.saturating_sub(1);
            Some(lower.map_or(removed(&[name]), |lower| taken(lower, &[name])))
        }
        _ => None,
    }
}

proptest! {
    #[test]
    fn each_level_holds_what_its_tiers_hold(
        steps in prop::collection::vec((0_u8..4, 0_usize..4, 1..BLOCKS), 0..40),
    ) {
        let mut scene = Scene::followed(None);
        let (mut held, mut begun) = (Held::default(), [true, false, false, false]);
        for step in steps {
            let Some(event) = event_of(&mut held, step) else {
                continue;
            };
            scene.hear(0, vec![event]);
            for level in 1..=LOWER_TIERS {
                begun[level] |= held.iter().any(|it| it[level] > 0);
            }
            for leaf in BLOCKS / 2..BLOCKS {
                let path: Vec<u64> = (0..4).rev().map(|up| leaf >> up).collect();
                let expected: [u32; 1 + LOWER_TIERS] = std::array::from_fn(|level| {
                    let is_held = |name: &&u64| {
                        held[**name as usize][..=level].iter().any(|copies| *copies > 0)
                    };
                    let count = path.iter().take_while(is_held).count() as u32;
                    if begun[level] { count } else { 0 }
                });
                prop_assert_eq!(found(&scene, &hashes(&path)), expected);
            }
        }
        let before = snapshot(&scene.driver.state);
        let mut copy = restored(&before);
        prop_assert_eq!(copy.check(), Ok(()));
        prop_assert_eq!(snapshot(&copy), before.clone());
        let views = copy.view();
        copy.restore(&mut &*before).expect("it was written");
        for (was, is) in views.tiers.iter().zip(&scene.driver.state.view().tiers) {
            for leaf in BLOCKS / 2..BLOCKS {
                let path: Vec<u64> = (0..4).rev().map(|up| leaf >> up).collect();
                let matched = [was, is].map(|it| it.match_by_position(&hashes(&path), Slot(0)));
                prop_assert_eq!(matched[0], matched[1], "a handle from before the restore");
            }
        }
    }
}
