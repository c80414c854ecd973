//! Puts the commit into the version that `quorate --version` prints.
//!
//! Only release builds have it: a commit rebuilds this crate, which would slow down debug builds.
//! `QUORATE_COMMIT` sets the commit if there is no repository, as in a container.

mod commit;

use std::env;
use std::path::Path;

use commit::TreeCommit;

fn main() {
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    println!("cargo::rerun-if-env-changed=QUORATE_COMMIT");
    println!("cargo::rerun-if-changed=build");
    let named = env::var("QUORATE_COMMIT").ok().filter(|id| !id.is_empty());
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let found = match (named, is_release) {
        (Some(id), _) => Some(id),
        (None, true) => {
            let package = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
            let tree = TreeCommit::of(&Path::new(&package).join(".."));
            for file in &tree.watched {
                println!("cargo::rerun-if-changed={}", file.display());
            }
            tree.id
        }
        (None, false) => Some("debug build".to_owned()),
    };
    let told = found.map_or_else(|| version.clone(), |found| format!("{version} ({found})"));
    println!("cargo::rustc-env=QUORATE_VERSION={told}");
}
