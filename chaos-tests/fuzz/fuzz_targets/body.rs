//! One body under libFuzzer: which one, the name says that the binary is run by. The bodies are
//! compiled in here, so that what is fuzzed is the product as it ships, without the bugs that tests
//! plant.

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
