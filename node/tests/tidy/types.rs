//! One name for one type: no crate defines two types of the same name outside its tests.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::{root, sources};

/// Crates, by their top folder, with names that still stand for two types: a list that only shrinks.
/// `cfg` alternatives in one file are one type.
const TYPE_NAMES_TWICE: &[(&str, &str)] = &[
    ("api", "Answer"),
    ("api", "Asked"),
    ("api", "Cell"),
    ("api", "Entry"),
    ("api", "Labels"),
    ("api", "Outcome"),
    ("api", "Piece"),
    ("api", "Source"),
    ("chaos-tests", "Answer"),
    ("chaos-tests", "Args"),
    ("chaos-tests", "Change"),
    ("chaos-tests", "End"),
    ("chaos-tests", "Engine"),
    ("chaos-tests", "Held"),
    ("chaos-tests", "Host"),
    ("chaos-tests", "Image"),
    ("chaos-tests", "Inner"),
    ("chaos-tests", "Ledger"),
    ("chaos-tests", "Manner"),
    ("chaos-tests", "Message"),
    ("chaos-tests", "Model"),
    ("chaos-tests", "Network"),
    ("chaos-tests", "Options"),
    ("chaos-tests", "Outcome"),
    ("chaos-tests", "Piece"),
    ("chaos-tests", "Register"),
    ("chaos-tests", "Replica"),
    ("chaos-tests", "Reply"),
    ("chaos-tests", "Report"),
    ("chaos-tests", "Request"),
    ("chaos-tests", "Run"),
    ("chaos-tests", "Scene"),
    ("chaos-tests", "Stage"),
    ("chaos-tests", "Step"),
    ("chaos-tests", "Tally"),
    ("chaos-tests", "Time"),
    ("chaos-tests", "User"),
    ("chaos-tests", "Waiting"),
    ("chaos-tests", "Way"),
    ("node", "Args"),
    ("node", "Ask"),
    ("node", "Command"),
    ("node", "Comparison"),
    ("node", "Core"),
    ("node", "Ended"),
    ("node", "Engine"),
    ("node", "EngineArgs"),
    ("node", "Faults"),
    ("node", "Inner"),
    ("node", "Job"),
    ("node", "Kind"),
    ("node", "Line"),
    ("node", "Message"),
    ("node", "Model"),
    ("node", "Outcome"),
    ("node", "Place"),
    ("node", "Plan"),
    ("node", "Progress"),
    ("node", "Replica"),
    ("node", "Request"),
    ("node", "Run"),
    ("node", "Shared"),
    ("node", "Stops"),
    ("node", "Tally"),
    ("node", "Target"),
    ("node", "Times"),
    ("node", "Turn"),
    ("node", "Users"),
    ("raft", "Found"),
    ("raft", "Sender"),
    ("raft", "Shared"),
    ("raft", "Snapshot"),
    ("raft", "State"),
    ("state", "Order"),
    ("state", "Rank"),
];

/// The type that a line outside all functions defines.
fn type_name(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.strip_prefix(' ')?,
        None => line,
    };
    let (keyword, rest) = line.split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&keyword);
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    is_type.then(|| &rest[..end.unwrap_or(rest.len())])
}

/// What of a file is built without `cfg(test)`, and the modules beside it that are not.
fn without_tests<'a>(path: &Path, text: &'a str) -> (Vec<&'a str>, Vec<PathBuf>) {
    let is_root = ["mod", "lib", "main"]
        .iter()
        .any(|it| path.file_stem() == Some(it.as_ref()));
    let folder = match is_root {
        true => path.with_file_name(""),
        false => path.with_extension(""),
    };
    let (mut lines, mut modules) = (Vec::new(), Vec::new());
    let mut all = text.lines().peekable();
    while let Some(line) = all.next() {
        let module = all
            .peek()
            .and_then(|next| next.trim_start_matches("pub ").strip_prefix("mod "));
        match (line.starts_with("#[cfg(test)]"), module) {
            (true, Some(module)) if module.ends_with('{') => break,
            (true, Some(module)) => modules.push(folder.join(module.trim_end_matches(';'))),
            _ => lines.push(line),
        }
    }
    (lines, modules)
}

#[test]
fn no_type_name_has_two_meanings_in_a_crate() {
    let (mut tests, mut defined) = (Vec::new(), BTreeMap::new());
    for path in sources() {
        let name = path.strip_prefix(root()).unwrap_or(&path);
        let Some(package) = name.iter().next().and_then(|it| it.to_str()) else {
            continue;
        };
        let is_test = |part: &OsStr| ["tests", "benches", "fuzz"].iter().any(|it| part == *it);
        let stem = name.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        if name.iter().any(is_test) || stem.ends_with("tests") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("read a source file");
        let (lines, modules) = without_tests(name, &text);
        tests.extend(modules);
        for found in lines.into_iter().filter_map(type_name) {
            let key = (package.to_owned(), found.to_owned());
            let files: &mut BTreeSet<PathBuf> = defined.entry(key).or_default();
            files.insert(name.to_owned());
        }
    }
    let is_test = |file: &Path| {
        let module = file.with_extension("");
        tests.iter().any(|test| module.starts_with(test))
    };
    let mut faults = Vec::new();
    for ((package, name), mut files) in defined {
        files.retain(|file| !is_test(file));
        let is_allowed = TYPE_NAMES_TWICE
            .iter()
            .any(|it| (it.0, it.1) == (&package, &name));
        if files.len() > 1 && !is_allowed {
            faults.push(format!("{name}: {files:?}"));
        }
    }
    assert!(
        faults.is_empty(),
        "one name for one type of a crate:\n{}",
        faults.join("\n")
    );
}
