//! Rules about the repository that no compiler or linter checks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[path = "tidy/alerts.rs"]
mod alerts;
#[path = "tidy/dependencies.rs"]
mod dependencies;
#[path = "tidy/docs.rs"]
mod docs;
#[path = "tidy/engines.rs"]
mod engines;
#[path = "tidy/modules.rs"]
mod modules;
#[path = "tidy/names.rs"]
mod names;
#[path = "tidy/paths.rs"]
mod paths;
#[path = "tidy/types.rs"]
mod types;

/// Maximum length of a source file, in lines.
const LINES_MAX: usize = 600;

/// Dependencies that the deterministic core may have: crates that hold data, none that does I/O.
const STATE_MAY_USE: &[&str] = &[
    "arc-swap",
    "bincode",
    "humantime",
    "schemars",
    "serde",
    "thiserror",
    "xxhash-rust",
];

/// Generated files. Tests compare them with the definitions that they are generated from.
const GENERATED: [&str; 3] = [
    "raft/proto/peer.rs",
    "api/proto/ext_proc.rs",
    "api/proto/externalscaler.rs",
];

/// Our own crates: name, folder, and the other own crates that each may use. Only `node` may use
/// all.
const OWN_CRATES: &[(&str, &str, &[&str])] = &[
    ("state", "state", &[]),
    ("raft", "raft", &[]),
    ("api", "api", &["state"]),
    ("admin", "api/admin", &["state", "api"]),
    ("lab", "node/lab", &["state", "api"]),
    ("node", "node", &["state", "raft", "api", "admin", "lab"]),
];

fn root() -> PathBuf {
    let node = Path::new(env!("CARGO_MANIFEST_DIR"));
    node.parent()
        .expect("the crate lies in the workspace")
        .to_owned()
}

fn sources() -> Vec<PathBuf> {
    let crates = ["state", "raft", "api", "node", "chaos-tests"];
    let mut folders: Vec<_> = crates.iter().map(|name| root().join(name)).collect();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("list a source folder") {
            let path = entry.expect("list a source folder").path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.retain(|path| !GENERATED.iter().any(|file| path.ends_with(file)));
    assert!(files.len() > 50, "found only {} source files", files.len());
    files.sort();
    files
}

/// Reports every file that breaks a rule, not only the first.
fn check(rule: &str, broken: impl Fn(&Path, &str) -> Option<String>) {
    let mut faults = Vec::new();
    for path in sources() {
        let text = std::fs::read_to_string(&path).expect("read a source file");
        let name = path.strip_prefix(root()).unwrap_or(&path).to_owned();
        faults.extend(broken(&name, &text).map(|fault| format!("{}: {fault}", name.display())));
    }
    assert!(faults.is_empty(), "{rule}:\n{}", faults.join("\n"));
}

#[test]
fn every_file_begins_with_a_module_comment() {
    check("files must begin with `//!`", |_, text| {
        (!text.starts_with("//! ")).then(|| format!("begins with {:?}", text.lines().next()))
    });
}

#[test]
fn files_are_bounded_in_length() {
    check("files must be split", |_, text| {
        let lines = text.lines().count();
        (lines > LINES_MAX).then(|| format!("{lines} lines, at most {LINES_MAX}"))
    });
}

#[test]
fn no_leftover_markers_remain() {
    // Assembled here, so that this file does not contain the searched text.
    let words = [
        ["FIX", "ME"].concat(),
        ["dbg", "!("].concat(),
        ["unimplemented", "!("].concat(),
    ];
    check("leftovers", |_, text| {
        let found = words.iter().find(|word| text.contains(word.as_str()))?;
        Some(format!("holds {found}"))
    });
}

/// Folders of a replica's own code, which must run identically in every simulation.
const SIMULATED: &[&str] = &[
    "state/src",
    "raft/src",
    "api/src",
    "api/admin/src",
    "node/src/app",
];

#[test]
fn simulated_code_is_deterministic() {
    // Assembled here, so that this file does not contain the searched text.
    let select = ["select", "! {"].concat();
    check("what may differ from run to run", |path, text| {
        if !SIMULATED.iter().any(|folder| path.starts_with(folder)) {
            return None;
        }
        let at_random = |after: &str| !after.trim_start().starts_with("biased;");
        if text.split(&select).skip(1).any(at_random) {
            return Some(format!(
                "{select} without `biased;` polls in a random order"
            ));
        }
        let mut lines = text.lines().map(str::trim_start);
        let is_of_the_system = |line: &&str| {
            line.starts_with("use std::time::") && line.contains("Instant")
                || line.contains("std::time::Instant")
        };
        let found = lines.find(is_of_the_system)?;
        Some(format!("`{found}`: time that stands still goes by tokio's"))
    });
}

/// Files of `api/src/routing` that may read a clock once; the rest of `decide` and `dispatch` gets
/// the time as an argument (I76).
const READS_A_CLOCK: &[&str] = &[
    // For an attempt that is dropped without an end.
    "dispatch/attempt/mod.rs",
    // For the loop that queues samples.
    "dispatch/mod.rs",
];

#[test]
fn routing_reads_no_clock() {
    let clock = ["Instant", "::now"].concat();
    check("what routing is told the time for", |path, text| {
        let name = path.strip_prefix("api/src/routing").ok()?;
        if !name.starts_with("decide") && !name.starts_with("dispatch") {
            return None;
        }
        let product = text.split("#[cfg(test)]").next().unwrap_or(text);
        let reads = product.matches(&clock).count();
        let at_most = READS_A_CLOCK
            .iter()
            .filter(|file| name == Path::new(file))
            .count();
        (reads > at_most).then(|| format!("reads the clock {reads} times, at most {at_most}"))
    });
}

fn dependencies(folder: &str) -> BTreeSet<String> {
    let manifest = root().join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(manifest).expect("read a manifest");
    let manifest: toml::Table = text.parse().expect("cargo has read this manifest too");
    let section = manifest.get("dependencies").and_then(toml::Value::as_table);
    section
        .map(|section| section.keys().cloned().collect())
        .unwrap_or_default()
}

#[test]
fn the_core_is_built_from_data_only_crates() {
    let allowed: BTreeSet<_> = STATE_MAY_USE
        .iter()
        .map(|name| (*name).to_owned())
        .collect();
    let beyond: Vec<_> = dependencies("state")
        .difference(&allowed)
        .cloned()
        .collect();
    assert!(beyond.is_empty(), "state depends on {beyond:?}");
}

#[test]
fn crates_depend_only_on_allowed_crates() {
    let ours: BTreeSet<_> = OWN_CRATES
        .iter()
        .map(|(name, ..)| (*name).to_owned())
        .collect();
    for (package, folder, allowed) in OWN_CRATES {
        let used = dependencies(folder);
        let beyond: Vec<_> = used
            .intersection(&ours)
            .filter(|name| !allowed.contains(&name.as_str()))
            .collect();
        assert!(beyond.is_empty(), "{package} depends on {beyond:?}");
    }
}

#[test]
fn every_test_file_belongs_to_its_crates_one_program() {
    for name in ["state", "raft"] {
        let folder = root().join(name).join("tests");
        let main = std::fs::read_to_string(folder.join("main.rs")).expect("read the program");
        for entry in std::fs::read_dir(&folder).expect("list the tests") {
            let path = entry.expect("list the tests").path();
            let stem = path.file_stem().expect("files have names");
            let module = format!("mod {};", stem.to_string_lossy());
            let is_data = path.is_dir() && !path.join("mod.rs").exists();
            let is_known = is_data || path.ends_with("main.rs") || main.contains(&module);
            assert!(is_known, "{}: missing in main.rs", path.display());
        }
    }
}
