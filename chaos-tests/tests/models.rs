//! Runs loom's models of hand-written concurrency in `api` and `raft`, like `cargo run --bin
//! models`. Those of the read view are a separate step in `.ci/run`.

use std::process::Command;

#[test]
fn loom_models_hold_in_every_interleaving() {
    let run = Command::new(env!("CARGO_BIN_EXE_models")).output().unwrap();
    let (told, why) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    assert!(run.status.success(), "{told}\n{why}");
}
