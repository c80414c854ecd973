//! Runs every fuzz target over seeded mutations of real encodings, with the same inputs in every
//! run. Memory is counted, because a reader that trusts a forged length allocates for it.
//!
//! `chaos-tests/fuzz` runs the same targets under libFuzzer for any length of time.

use std::panic::{AssertUnwindSafe, catch_unwind};

use chaos_tests::fuzzing::{FuzzTarget, TARGETS, named, sweep};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const SEED: u64 = 1;

fn run(target: &FuzzTarget, bytes: &[u8]) {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.body)(bytes)));
    let held = ALLOCATOR.peak_usage().saturating_sub(before);
    let name = target.name;
    assert!(outcome.is_ok(), "{name} panics at {}", shown(bytes));
    assert!(
        held <= target.held_bytes_max,
        "{name} holds {held} bytes at {}",
        shown(bytes)
    );
}

/// Formats bytes so that they can be pasted into a test.
fn shown(bytes: &[u8]) -> String {
    format!("b\"{}\"", bytes.escape_ascii())
}

/// A single test, because allocations are counted for the whole process.
#[test]
fn fuzz_targets_read_any_bytes_within_their_time_bound() {
    for target in TARGETS {
        let name = target.name;
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "{name}");
        assert!(std::ptr::eq(named(name).unwrap(), target), "{name}");
        // Runs once uncounted, for what is created on first use and kept.
        (target.body)(&[]);
        seeds.iter().for_each(|seed| (target.body)(seed));
        sweep(target, SEED, target.mutations, |bytes| run(target, bytes));
    }
    // Every target must also be a target of cargo-fuzz.
    let manifest = include_str!("../fuzz/Cargo.toml");
    assert_eq!(manifest.matches("[[bin]]").count(), TARGETS.len());
    for target in TARGETS {
        let line = format!("name = \"{}\"", target.name);
        assert!(manifest.contains(&line), "no bin of {}", target.name);
    }
}
