//! Files and folders that pages name in backquotes must exist.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::{root, sources};

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

/// Returns what stands in backquotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the paths in backquotes, with `{a,b}` expanded.
fn paths(text: &str) -> BTreeSet<String> {
    let is_path = |it: &&str| {
        let (first, rest) = it.split_once('/').unwrap_or_default();
        FOLDERS.contains(&first) && !rest.contains(|c: char| c.is_whitespace() || c == '*')
    };
    quoted(text).filter(is_path).flat_map(written_out).collect()
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
fn files_named_by_documentation_exist() {
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

/// Returns the bare names of Rust files in backquotes, with the folders before them if there are any.
fn rust_files(text: &str) -> BTreeSet<String> {
    let is_file = |it: &&str| it.ends_with(".rs") && !it.contains(['*', '{', ' ']);
    quoted(text).filter(is_file).map(str::to_owned).collect()
}

/// Returns the names of the items in backquotes of the form `Type::name`.
fn items(text: &str) -> BTreeSet<(String, String)> {
    let is_name =
        |it: &str| !it.is_empty() && it.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let is_type = |it: &str| is_name(it) && it.starts_with(|c: char| c.is_ascii_uppercase());
    let item = |it: &str| {
        let (of, name) = it.split_once("::")?;
        (is_type(of) && is_name(name)).then(|| (of.to_owned(), name.to_owned()))
    };
    quoted(text).filter_map(item).collect()
}

#[test]
fn files_and_items_named_by_the_architecture_exist() {
    let pages = ["docs/ARCHITECTURE.md", "docs/internals/invariants.md"];
    let page = pages
        .map(|page| std::fs::read_to_string(root().join(page)).expect("read a page"))
        .concat();
    let sources = sources();
    let texts: Vec<_> = sources
        .iter()
        .map(|path| std::fs::read_to_string(path).expect("read a source"))
        .collect();
    let is_file = |name: &String| sources.iter().any(|path| path.ends_with(name));
    let files = rust_files(&page);
    let gone: Vec<_> = files.iter().filter(|name| !is_file(name)).collect();
    assert!(
        files.len() > 20 && gone.is_empty(),
        "no such file: {gone:?}"
    );
    let words: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
        .collect();
    let items = items(&page);
    let is_there = |(of, name): &&(String, String)| {
        words.contains(of.as_str()) && words.contains(name.as_str())
    };
    let gone: Vec<_> = items.iter().filter(|item| !is_there(item)).collect();
    assert!(
        items.len() > 10 && gone.is_empty(),
        "no such item: {gone:?}"
    );
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
