//! Tests of the scheduler: progress, durations, and the release of all blocks.

use std::time::Duration;

use super::{ComputeJob, EngineShape, Finish, RequestId, RequestProgress, Scheduler};
use crate::engine::text::Sequence;
use proptest::prelude::*;

const SHAPE: EngineShape = EngineShape {
    num_gpu_blocks: 65,
    block_size: 4,
    max_num_seqs: 4,
    max_num_batched_tokens: 32,
    prefill_tokens_per_s: 1000,
    decode: Duration::from_millis(64),
};

/// Returns a prompt of `tokens` tokens. The first `shared` are common to all prompts.
fn job(tokens: u32, shared: u32, own: u8, max_tokens: u32) -> ComputeJob {
    let mut prompt = vec![0; (shared.min(tokens) * 4) as usize];
    prompt.resize((tokens * 4) as usize, own);
    let sequence = Sequence::new(&prompt, "", SHAPE.block_size, 1);
    ComputeJob {
        sequence,
        max_tokens,
        ending: Finish::Length,
        adapter: None,
        is_fetched: false,
    }
}

fn run_to_end(scheduler: &mut Scheduler) -> (Duration, Vec<RequestProgress>) {
    let (mut time, mut progress) = (Duration::ZERO, Vec::new());
    while let Some(step) = scheduler.begin_step() {
        time += step;
        progress.extend(scheduler.finish_step());
    }
    (time, progress)
}

#[test]
fn a_lone_request_takes_prefill_and_a_step_per_further_token() {
    let mut scheduler = Scheduler::new(SHAPE);
    let id = scheduler.submit(job(100, 0, 7, 3));
    let (time, progress) = run_to_end(&mut scheduler);
    assert_eq!(time, Duration::from_millis(100 + 2 * 65));
    let last = RequestProgress {
        id,
        output_tokens: 3,
        cached_tokens: 0,
        finish: Some(Finish::Length),
    };
    assert_eq!(progress.last(), Some(&last));
    assert_eq!(progress.len(), 3);
}

#[test]
fn prefill_is_chunked_and_shares_steps_with_decoding() {
    let mut scheduler = Scheduler::new(SHAPE);
    scheduler.submit(job(8, 0, 1, 10));
    assert_eq!(scheduler.begin_step(), Some(Duration::from_millis(8)));
    scheduler.finish_step();
    scheduler.submit(job(100, 0, 2, 1));
    // One token of the first and 31 of the second fill the budget of 32.
    assert_eq!(scheduler.begin_step(), Some(Duration::from_millis(65 + 31)));
    assert_eq!(scheduler.finish_step().len(), 1);
}

#[test]
fn a_repeated_prompt_is_cached_except_its_last_block() {
    let mut scheduler = Scheduler::new(SHAPE);
    scheduler.submit(job(12, 12, 0, 1));
    run_to_end(&mut scheduler);
    scheduler.submit(job(12, 12, 0, 1));
    let (_, progress) = run_to_end(&mut scheduler);
    assert_eq!(progress[0].cached_tokens, 8);
    assert_eq!(scheduler.stats().cache_hits, 8);
    assert_eq!(scheduler.stats().cache_queries, 24);
}

#[test]
fn a_conversation_finds_its_previous_answer_cached() {
    let mut scheduler = Scheduler::new(SHAPE);
    let mut first = job(10, 0, 3, 15).sequence;
    scheduler.submit(ComputeJob {
        sequence: first.clone(),
        max_tokens: 15,
        ending: Finish::Stop,
        adapter: None,
        is_fetched: false,
    });
    run_to_end(&mut scheduler);
    for _ in 0..15 {
        first.push_token();
    }
    // 25 tokens, the last of them never computed: six full blocks.
    assert_eq!(
        scheduler
            .pool
            .find(first.hashes(), 100)
            .tokens(&scheduler.pool),
        24
    );
}

#[test]
fn requests_beyond_the_running_limit_wait() {
    let mut scheduler = Scheduler::new(SHAPE);
    for own in 0..6 {
        scheduler.submit(job(4, 0, own, 2));
    }
    scheduler.begin_step();
    let stats = scheduler.stats();
    assert_eq!((stats.running, stats.waiting), (4, 2));
}

#[test]
fn the_latest_request_is_preempted_and_still_finishes() {
    let shape = EngineShape {
        num_gpu_blocks: 9,
        ..SHAPE
    };
    let mut scheduler = Scheduler::new(shape);
    let first = scheduler.submit(job(16, 0, 1, 12));
    let second = scheduler.submit(job(16, 0, 2, 12));
    let (_, progress) = run_to_end(&mut scheduler);
    let ended = |id: RequestId| {
        progress
            .iter()
            .position(|p| p.id == id && p.finish.is_some())
            .expect("it ends")
    };
    assert!(ended(first) < ended(second));
    assert!(scheduler.stats().preemptions > 0);
    assert_eq!(scheduler.stats().used_blocks, 0);
}

#[test]
fn an_abort_frees_its_blocks_at_once_even_within_a_step() {
    let mut scheduler = Scheduler::new(SHAPE);
    let id = scheduler.submit(job(100, 0, 1, 5));
    scheduler.begin_step();
    assert!(scheduler.stats().used_blocks > 0);
    scheduler.abort(id);
    let stats = scheduler.stats();
    assert_eq!(
        (
            stats.running,
            stats.waiting,
            stats.used_blocks,
            stats.aborted
        ),
        (0, 0, 0, 1)
    );
    assert_eq!(scheduler.finish_step(), []);
    assert_eq!(scheduler.begin_step(), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn every_request_finishes_or_aborts_and_frees_its_blocks(
        blocks in 17_u32..80,
        jobs in prop::collection::vec(
            (1_u32..40, 0_u32..40, 0_u8..3, 1_u32..24, 0_u32..6, prop::bool::weighted(0.2)),
            1..40,
        ),
    ) {
        let mut scheduler = Scheduler::new(EngineShape { num_gpu_blocks: blocks, ..SHAPE });
        let mut expected = Vec::new();
        let mut progress = Vec::new();
        for (tokens, shared, own, max_tokens, steps, is_aborted) in jobs {
            let id = scheduler.submit(job(tokens, shared, own, max_tokens));
            for _ in 0..steps {
                let Some(time) = scheduler.begin_step() else { break };
                prop_assert!(time > Duration::ZERO);
                progress.extend(scheduler.finish_step());
            }
            if is_aborted {
                scheduler.abort(id);
            } else {
                expected.push((id, tokens, max_tokens));
            }
        }
        progress.extend(run_to_end(&mut scheduler).1);
        for (id, tokens, max_tokens) in expected {
            let own: Vec<&RequestProgress> = progress.iter().filter(|p| p.id == id).collect();
            let counts: Vec<u32> = own.iter().map(|p| p.output_tokens).collect();
            prop_assert_eq!(counts, (1..=max_tokens).collect::<Vec<_>>());
            prop_assert!(own.iter().all(|p| p.cached_tokens < tokens && p.cached_tokens % 4 == 0));
            prop_assert_eq!(own.iter().filter(|p| p.finish.is_some()).count(), 1);
        }
        let stats = scheduler.stats();
        prop_assert_eq!((stats.running, stats.waiting, stats.used_blocks), (0, 0, 0));
    }
}

#[test]
fn an_adapter_is_loaded_once_and_waits_for_room() {
    let lora = crate::engine::LoraOptions {
        max_loras: 1,
        load: Duration::from_millis(100),
        ..Default::default()
    };
    let mut scheduler = Scheduler::new(SHAPE).with_lora(&lora);
    for (own, adapter) in [(1, "a"), (2, "b"), (3, "a")] {
        scheduler.submit(ComputeJob {
            adapter: Some(adapter.into()),
            ..job(8, 0, own, 2)
        });
    }
    // The second has no slot; the third passes it.
    assert_eq!(scheduler.begin_step(), Some(Duration::from_millis(116)));
    let (running, waiting) = scheduler.adapters();
    assert_eq!((running.count(), waiting.count()), (2, 1));
    scheduler.finish_step();
    let (time, _) = run_to_end(&mut scheduler);
    // Two decode; then the second is loaded, computed and decoded.
    assert_eq!(time, Duration::from_millis(66 + 108 + 65));
    assert_eq!(scheduler.stats().adapter_loads, 2);
}

#[test]
fn a_prompt_can_be_prefilled_without_an_answer() {
    let mut scheduler = Scheduler::new(SHAPE);
    let id = scheduler.submit(job(8, 8, 1, 0));
    let (time, progress) = run_to_end(&mut scheduler);
    assert_eq!(time, Duration::from_millis(8));
    let done = RequestProgress {
        id,
        output_tokens: 0,
        cached_tokens: 0,
        finish: Some(Finish::Length),
    };
    assert_eq!(progress, [done]);
    assert_eq!(scheduler.stats().generation_tokens, 0);
}
