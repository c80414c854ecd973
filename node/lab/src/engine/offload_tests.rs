//! Tests of the tiers below the GPU: what they keep, and what that saves a request.

use std::time::Duration;

use super::{OffloadEvent, OffloadOptions, OffloadTier, OffloadTiers, TierTokens};
use crate::engine::model::{ComputeJob, EngineShape, Finish, Scheduler};
use crate::engine::text::{EngineHash, Sequence};
use proptest::prelude::*;

/// An engine that computes a token in a millisecond, and whose requests can hold nine blocks.
const SHAPE: EngineShape = EngineShape {
    num_gpu_blocks: 10,
    block_size: 4,
    max_num_seqs: 4,
    max_num_batched_tokens: 64,
    prefill_tokens_per_s: 1000,
    decode: Duration::from_millis(64),
};

fn tiers(cpu_blocks: u32, disk_blocks: u32) -> OffloadOptions {
    OffloadOptions {
        cpu_blocks,
        disk_blocks,
        ..OffloadOptions::default()
    }
}

/// Returns the sequence of a prompt of `tokens` tokens, all of them `own`.
fn prompt(tokens: u32, own: u8) -> Sequence {
    Sequence::new(&vec![own; (tokens * 4) as usize], "", SHAPE.block_size, 1)
}

fn job(sequence: Sequence, max_tokens: u32) -> ComputeJob {
    ComputeJob {
        sequence,
        max_tokens,
        ending: Finish::Length,
        adapter: None,
        is_fetched: false,
    }
}

/// Serves a prompt for one output token. Returns the time that it takes, and where its tokens were
/// found, which is where they were predicted to be.
fn serve(scheduler: &mut Scheduler, sequence: Sequence) -> (Duration, TierTokens) {
    let predicted = scheduler.found_tokens(&sequence);
    let (time, found) = compute(scheduler, job(sequence, 1));
    assert_eq!(found, predicted);
    (time, found)
}

fn compute(scheduler: &mut Scheduler, job: ComputeJob) -> (Duration, TierTokens) {
    scheduler.submit(job);
    let mut time = Duration::ZERO;
    while let Some(step) = scheduler.begin_step() {
        time += step;
        let progress = scheduler.finish_step();
        if let [last] = progress[..] {
            let found = scheduler.found()[0];
            assert_eq!(last.cached_tokens, found.cached());
            return (time, found);
        }
    }
    panic!("the request makes no progress");
}

fn sorted(tiers: &OffloadTiers, tier: OffloadTier) -> Vec<EngineHash> {
    let mut hashes: Vec<EngineHash> = tiers.hashes(tier).collect();
    hashes.sort_unstable();
    hashes
}

fn sorted_hashes(sequence: &Sequence, blocks: usize) -> Vec<EngineHash> {
    let mut hashes = sequence.hashes()[..blocks].to_vec();
    hashes.sort_unstable();
    hashes
}

#[test]
fn evicted_blocks_are_loaded_at_their_tiers_price() {
    let options = OffloadOptions {
        cpu_load_ns: Some(10_000),
        disk_load_ns: Some(300_000),
        ..tiers(8, 16)
    };
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&options);
    let ms = Duration::from_millis;
    let gpu = |gpu| TierTokens {
        gpu,
        ..TierTokens::default()
    };
    // CPU memory has room for one prompt of 32 tokens.
    assert_eq!(serve(&mut scheduler, prompt(32, 1)), (ms(32), gpu(0)));
    assert_eq!(serve(&mut scheduler, prompt(32, 1)), (ms(4), gpu(28)));
    // Takes the last three blocks of the GPU, one of them in two copies; CPU memory evicts four.
    assert_eq!(serve(&mut scheduler, prompt(16, 2)), (ms(16), gpu(0)));
    let found = TierTokens { disk: 8, ..gpu(20) };
    let time = Duration::from_micros(8 * 300 + 4000);
    assert_eq!(serve(&mut scheduler, prompt(32, 1)), (time, found));
    // The load from disk brought all of the first prompt back to CPU memory.
    let kept = sorted_hashes(&prompt(32, 1), 8);
    assert_eq!(sorted(scheduler.tiers(), OffloadTier::Cpu), kept);
    assert_eq!(serve(&mut scheduler, prompt(32, 3)), (ms(32), gpu(0)));
    let found = TierTokens { disk: 24, ..gpu(4) };
    let time = Duration::from_micros(24 * 300 + 4000);
    assert_eq!(serve(&mut scheduler, prompt(32, 1)), (time, found));
    assert_eq!(serve(&mut scheduler, prompt(32, 1)), (ms(4), gpu(28)));
}

#[test]
fn the_default_prices_are_parts_of_computing() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(64, 0));
    serve(&mut scheduler, prompt(32, 1));
    serve(&mut scheduler, prompt(32, 2));
    let (time, found) = serve(&mut scheduler, prompt(32, 1));
    assert_eq!((found.cpu, found.disk), (24, 0));
    assert_eq!(time, Duration::from_micros(24 * 50 + 4000));
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(8, 64));
    serve(&mut scheduler, prompt(32, 1));
    serve(&mut scheduler, prompt(32, 2));
    let (time, found) = serve(&mut scheduler, prompt(32, 1));
    assert_eq!((found.cpu, found.disk), (0, 24));
    assert_eq!(time, Duration::from_micros(24 * 200 + 4000));
}

#[test]
fn a_full_tier_evicts_the_ends_of_the_oldest_prompts() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(8, 4));
    for (tokens, own) in [(20, 1), (20, 2), (20, 3)] {
        serve(&mut scheduler, prompt(tokens, own));
    }
    let [first, second, third] = [1, 2, 3].map(|own| prompt(20, own));
    let mut kept = [&second.hashes()[..3], third.hashes()].concat();
    kept.sort_unstable();
    assert_eq!(sorted(scheduler.tiers(), OffloadTier::Cpu), kept);
    // Seven blocks went to disk; the last ones of the first prompt are gone.
    let mut kept = [&first.hashes()[..2], &second.hashes()[3..]].concat();
    kept.sort_unstable();
    assert_eq!(sorted(scheduler.tiers(), OffloadTier::Disk), kept);
}

#[test]
fn without_a_disk_evicted_blocks_are_dropped() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(5, 0));
    serve(&mut scheduler, prompt(20, 1));
    serve(&mut scheduler, prompt(8, 2));
    let kept = [&prompt(20, 1).hashes()[..3], prompt(8, 2).hashes()].concat();
    assert_eq!(scheduler.tiers().hashes(OffloadTier::Cpu).count(), 5);
    assert!(
        scheduler
            .tiers()
            .hashes(OffloadTier::Cpu)
            .all(|it| kept.contains(&it))
    );
    assert_eq!(scheduler.tiers().hashes(OffloadTier::Disk).count(), 0);
}

#[test]
fn a_prompt_longer_than_a_tier_leaves_its_beginning_there() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(3, 0));
    let long = prompt(28, 1);
    serve(&mut scheduler, long.clone());
    let kept = sorted_hashes(&long, 3);
    assert_eq!(sorted(scheduler.tiers(), OffloadTier::Cpu), kept);
}

#[test]
fn output_blocks_are_offloaded_and_aborted_ones_are_not() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(8, 0));
    scheduler.submit(job(prompt(6, 1), 7));
    while scheduler.begin_step().is_some() {
        scheduler.finish_step();
    }
    // Of 13 tokens, the last was never computed.
    assert_eq!(scheduler.tiers().hashes(OffloadTier::Cpu).count(), 3);
    let id = scheduler.submit(job(prompt(8, 2), 1));
    scheduler.begin_step();
    scheduler.abort(id);
    scheduler.finish_step();
    assert_eq!(scheduler.tiers().hashes(OffloadTier::Cpu).count(), 3);
}

#[test]
fn a_restarted_engine_has_empty_tiers() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(4, 4));
    serve(&mut scheduler, prompt(16, 1));
    serve(&mut scheduler, prompt(16, 2));
    assert!(scheduler.reset_cache());
    assert_eq!(scheduler.found_tokens(&prompt(16, 1)).disk, 12);
    scheduler.forget_events();
    assert_eq!(scheduler.found_tokens(&prompt(16, 1)).cached(), 0);
    assert_eq!(scheduler.take_offload_events(), []);
}

#[test]
fn a_fetched_prompt_loads_nothing() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(64, 0));
    serve(&mut scheduler, prompt(32, 1));
    serve(&mut scheduler, prompt(32, 2));
    let fetched = ComputeJob {
        is_fetched: true,
        ..job(prompt(32, 1), 1)
    };
    let (time, found) = compute(&mut scheduler, fetched);
    assert_eq!((found.gpu, found.cpu, found.peer), (4, 0, 27));
    assert_eq!(time, Duration::from_millis(1));
}

#[test]
fn blocks_are_stored_in_prompt_order_after_others_made_room() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(4, 0));
    let [first, second] = [1, 2].map(|own| prompt(16, own));
    serve(&mut scheduler, first.clone());
    scheduler.take_offload_events();
    serve(&mut scheduler, second.clone());
    let events = scheduler.take_offload_events();
    let [
        OffloadEvent::Removed(OffloadTier::Cpu, removed),
        OffloadEvent::Stored(OffloadTier::Cpu, stored),
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert!(removed.iter().eq(first.hashes().iter().rev()));
    assert!(stored.iter().map(|it| &it.hash).eq(second.hashes()));
    let parents = stored.iter().map(|it| it.parent);
    let before = second.hashes().iter().copied().map(Some);
    assert!(parents.eq(std::iter::once(None).chain(before).take(4)));
}

#[test]
fn blocks_are_on_disk_before_they_leave_cpu_memory() {
    let mut scheduler = Scheduler::new(SHAPE).with_offload(&tiers(4, 8));
    let [first, second] = [1, 2].map(|own| prompt(16, own));
    serve(&mut scheduler, first.clone());
    scheduler.take_offload_events();
    serve(&mut scheduler, second);
    let events = scheduler.take_offload_events();
    let [
        OffloadEvent::Stored(OffloadTier::Disk, stored),
        OffloadEvent::Removed(OffloadTier::Cpu, removed),
        OffloadEvent::Stored(OffloadTier::Cpu, _),
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    assert!(removed.iter().eq(first.hashes().iter().rev()));
    assert!(stored.iter().map(|it| &it.hash).eq(removed));
}

/// The rules of the tiers with lists, least recently touched first.
#[derive(Default)]
struct NaiveTiers {
    cpu: Vec<EngineHash>,
    disk: Vec<EngineHash>,
}

impl NaiveTiers {
    fn touch(&mut self, hashes: &[EngineHash]) {
        for tier in [&mut self.cpu, &mut self.disk] {
            for hash in hashes.iter().rev() {
                if let Some(place) = tier.iter().position(|held| held == hash) {
                    let hash = tier.remove(place);
                    tier.push(hash);
                }
            }
        }
    }

    fn store(&mut self, hashes: &[EngineHash], (cpu_max, disk_max): (usize, usize)) {
        for hash in hashes.iter().take(cpu_max).rev() {
            self.cpu.retain(|held| held != hash);
            self.cpu.push(*hash);
        }
        let excess = self.cpu.len().saturating_sub(cpu_max);
        for hash in self.cpu.drain(..excess) {
            self.disk.retain(|held| *held != hash);
            self.disk.push(hash);
        }
        let excess = self.disk.len().saturating_sub(disk_max);
        self.disk.drain(..excess);
    }
}

/// Maintains the blocks of both tiers from events, as a subscriber does.
fn follow(known: &mut [Vec<EngineHash>; 2], events: Vec<OffloadEvent>) {
    for event in events {
        match event {
            OffloadEvent::Stored(tier, blocks) => {
                for block in blocks {
                    assert!(!known[tier as usize].contains(&block.hash), "stored twice");
                    known[tier as usize].push(block.hash);
                }
            }
            OffloadEvent::Removed(tier, hashes) => {
                let before = known[tier as usize].len();
                known[tier as usize].retain(|held| !hashes.contains(held));
                assert_eq!(known[tier as usize].len() + hashes.len(), before);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_tiers_equal_a_naive_model_and_their_events(
        cpu_max in 0_u32..12,
        disk_max in 0_u32..12,
        steps in prop::collection::vec((0_u8..4, 1_u32..60, 0_u32..15, any::<bool>()), 1..80),
    ) {
        let mut tiers = OffloadTiers::new(&tiers(cpu_max, disk_max), 1000);
        let mut naive = NaiveTiers::default();
        let mut known = [Vec::new(), Vec::new()];
        let limits = (cpu_max as usize, disk_max as usize);
        for (own, tokens, blocks, is_load) in steps {
            let sequence = prompt(tokens, own);
            let blocks = (blocks as usize).min(sequence.hashes().len());
            if is_load {
                let found = TierTokens { disk: 4, ..TierTokens::default() };
                tiers.load(&sequence, found, blocks);
                naive.touch(sequence.hashes());
            } else {
                tiers.offload(&sequence, 0..blocks);
            }
            naive.store(&sequence.hashes()[..blocks], limits);
            follow(&mut known, tiers.take_events());
            for (tier, list) in [(OffloadTier::Cpu, &naive.cpu), (OffloadTier::Disk, &naive.disk)] {
                let mut expected = list.clone();
                expected.sort_unstable();
                prop_assert_eq!(&sorted(&tiers, tier), &expected);
                known[tier as usize].sort_unstable();
                prop_assert_eq!(&known[tier as usize], &expected);
            }
        }
    }
}
