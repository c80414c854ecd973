//! Runs one target under libFuzzer, selected by the name of the binary. The targets are compiled in
//! here, so that the fuzzed product is the shipped one, without planted bugs.

#![no_main]

#[allow(
    dead_code,
    reason = "one of the targets is run, and no mutations are made here"
)]
#[path = "../../src/fuzzing/mod.rs"]
mod fuzzing;

use std::path::Path;
use std::sync::LazyLock;

static BODY: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let program = std::env::args().next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default();
    let target = fuzzing::named(&name.to_string_lossy());
    target.expect("every binary is named after a target").body
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| BODY(bytes));
