//! Files and folders that pages name in backquotes must exist.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::root;

/// Folders whose paths in pages start at the root of the repository.
const FOLDERS: &[&str] = &[
    "state",
    "raft",
    "api",
    "node",
    "chaos-tests",
    "docs",
    "deploy",
];

/// Pages about the current code; decisions and reports stay as they were written.
const PAGES: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs",
    "docs/guide",
    "docs/internals",
    "docs/reference",
];

fn pages() -> Vec<PathBuf> {
    let list = |folder: &&str| match root().join(folder).read_dir() {
        Ok(entries) => entries.map(|it| it.expect("list pages").path()).collect(),
        Err(_) => vec![root().join(folder)],
    };
    let mut pages: Vec<_> = PAGES.iter().flat_map(list).collect();
    pages.retain(|path| path.extension().is_some_and(|ending| ending == "md"));
    assert!(pages.len() > 5, "found only {pages:?}");
    pages
}

/// Returns the paths in backquotes, with `{a,b}` expanded.
fn paths(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_path = |it: &&str| {
        let (first, rest) = it.split_once('/').unwrap_or_default();
        FOLDERS.contains(&first) && !rest.contains(|c: char| c.is_whitespace() || c == '*')
    };
    quoted.filter(is_path).flat_map(written_out).collect()
}

fn written_out(path: &str) -> Vec<String> {
    let braces = path
        .split_once('{')
        .and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    let Some((before, (names, behind))) = braces else {
        return vec![path.to_owned()];
    };
    let names = names.split(',');
    names
        .map(|name| format!("{before}{name}{behind}"))
        .collect()
}

#[test]
fn every_file_that_a_page_names_is_there() {
    let mut missing = Vec::new();
    for page in pages() {
        let text = std::fs::read_to_string(&page).expect("read a page");
        let gone = paths(&text)
            .into_iter()
            .filter(|path| !root().join(path).exists());
        missing.extend(gone.map(|path| format!("{}: {path}", page.display())));
    }
    assert!(missing.is_empty(), "no such file:\n{}", missing.join("\n"));
}

#[test]
fn paths_are_found_in_a_page() {
    let text = "`raft/src/{log,net}/` and `state/src/a.rs`, `api::x`, `node/src/*.rs`, \
                `make x/y`\n```\nstate/a b\n```\n`api/b`";
    assert_eq!(
        paths(text).into_iter().collect::<Vec<_>>(),
        ["api/b", "raft/src/log/", "raft/src/net/", "state/src/a.rs"]
    );
}
