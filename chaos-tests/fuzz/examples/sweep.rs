//! Runs targets over seeded mutations for longer than the tests, with any toolchain: `cargo run
//! --release --example sweep -- MUTATIONS SEED [TARGET...]`. Prints the first failing input of each
//! target, and the maximum memory of a run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use peak_alloc::PeakAlloc;

#[allow(
    dead_code,
    reason = "looking targets up by name is for the other users"
)]
#[path = "../../src/fuzzing/mod.rs"]
mod fuzzing;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| {
        let given = arguments.next().and_then(|text| text.parse().ok());
        given.unwrap_or(default)
    };
    let (mutations, seed) = (number(1000), number(1));
    let wanted: Vec<String> = arguments.collect();
    let mutations = u32::try_from(mutations).unwrap_or(u32::MAX);
    let mut broken = 0;
    for target in fuzzing::TARGETS {
        if !wanted.is_empty() && !wanted.iter().any(|name| name == target.name) {
            continue;
        }
        (target.seeds)().iter().for_each(|seed| (target.body)(seed));
        let (mut runs, mut most, mut found, began) = (0_u64, 0, None, Instant::now());
        fuzzing::sweep(target, seed, mutations, |bytes| {
            runs += 1;
            let before = ALLOCATOR.current_usage();
            ALLOCATOR.reset_peak_usage();
            let is_whole = catch_unwind(AssertUnwindSafe(|| (target.body)(bytes))).is_ok();
            let held = ALLOCATOR.peak_usage().saturating_sub(before);
            most = most.max(held);
            if found.is_none() && (!is_whole || held > target.held_bytes_max) {
                found = Some((held, bytes.to_vec()));
            }
        });
        let (seconds, name) = (began.elapsed().as_secs_f64(), target.name);
        println!(
            "{name:24} {runs:>9} runs {seconds:>7.1} s {:>5} MiB",
            most >> 20
        );
        if let Some((held, bytes)) = found {
            broken += 1;
            println!(
                "{name} breaks, {held} bytes held, at b\"{}\"",
                bytes.escape_ascii()
            );
        }
    }
    if broken > 0 {
        std::process::exit(1);
    }
}
