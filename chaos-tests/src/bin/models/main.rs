//! Model checks of hand-written concurrency under every interleaving that loom explores: `cargo run
//! --release -p chaos-tests --bin models [NAME...]`. The models of the read view are in `state`,
//! the only crate whose dependencies build under loom.
//!
//! A model compiles the production file itself next to a module `sync`, which replaces types of the
//! standard library, arc-swap and tokio by loom counterparts. The rest of the crate thus need not
//! build for loom, which tokio does not support. docs/internals/testing.md lists what is modelled
//! and what is not.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "production files are compiled in whole, and used in part"
)]

mod sync;

#[path = "../../../../api/src/engines/backends/activity.rs"]
mod activity;
#[path = "../../../../api/src/engines/backends/adapters.rs"]
mod adapters;
#[path = "../../../../api/src/engines/backends/circuit/mod.rs"]
mod circuit;
#[path = "../../../../api/src/engines/backends/engine.rs"]
mod engine;
#[path = "../../../../api/src/engines/backends/engine_kind.rs"]
mod engine_kind;
#[path = "../../../../api/src/engines/backends/health.rs"]
mod health;
#[path = "../../../../api/src/routing/load/mod.rs"]
mod load;
#[path = "../../../../api/src/engines/backends/modes.rs"]
mod modes;
#[path = "../../../../api/src/routing/outbox/overlay.rs"]
mod overlay;
#[path = "../../../../api/src/engines/backends/prometheus_text.rs"]
mod prometheus_text;
#[path = "../../../../raft/src/determinism/watch.rs"]
mod watch;

mod board_models;
mod circuit_models;
mod load_models;
mod overlay_models;
mod watch_models;

use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

/// Name of a model, and the function that explores it.
type ModelRun = (&'static str, fn());

const MODELS: &[&[ModelRun]] = &[
    circuit_models::ALL,
    load_models::ALL,
    overlay_models::ALL,
    board_models::ALL,
    watch_models::ALL,
];

/// Maximum number of preemptions per execution. Two find almost every fault, three take minutes.
const PREEMPTIONS_MAX: usize = 3;

/// Runs `body` under every interleaving with at most [`PREEMPTIONS_MAX`] preemptions.
fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(body);
}

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let mut broken = 0;
    for (name, model) in MODELS.iter().copied().flatten() {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let began = Instant::now();
        let is_held = catch_unwind(model).is_ok();
        broken += usize::from(!is_held);
        let verdict = if is_held { "holds" } else { "BROKEN" };
        println!(
            "{verdict:7} {:6.1} s  {name}",
            began.elapsed().as_secs_f64()
        );
    }
    ExitCode::from(u8::from(broken > 0))
}
