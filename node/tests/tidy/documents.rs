//! Rules about documents: what they point at is there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::root;

/// Folders whose paths documents write from the root of the repository.
const FOLDERS: &[&str] = &[
    "state",
    "raft",
    "api",
    "node",
    "chaos-tests",
    "docs",
    "deploy",
];

/// Documents for readers of today; decisions in docs/adr stay as they were made.
fn documents() -> Vec<PathBuf> {
    let mut found = vec![root().join("README.md")];
    for entry in std::fs::read_dir(root().join("docs")).expect("list docs") {
        let path = entry.expect("list docs").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    assert!(found.len() > 5, "found only {found:?}");
    found
}

/// Paths in backquotes, `{a,b}` written out.
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

/// Targets of links to files, without the part that names a heading.
fn links(text: &str) -> BTreeSet<&str> {
    let targets = text.split("](").skip(1);
    let targets = targets.filter_map(|behind| behind.split(')').next());
    let files = targets.filter_map(|target| target.split('#').next());
    files
        .filter(|file| !file.is_empty() && !file.contains(":"))
        .collect()
}

#[test]
fn documents_point_at_what_is_there() {
    let mut missing = Vec::new();
    for document in documents() {
        let text = std::fs::read_to_string(&document).expect("read a document");
        let folder = document.parent().expect("a document is in a folder");
        let written = paths(&text).into_iter().map(|path| root().join(path));
        let linked = links(&text).into_iter().map(|file| folder.join(file));
        let gone = written.chain(linked).filter(|path| !path.exists());
        missing.extend(gone.map(|path| format!("{}: {}", name(&document), name(&path))));
    }
    assert!(
        missing.is_empty(),
        "documents name what is not there:\n{}",
        missing.join("\n")
    );
}

fn name(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

#[test]
fn paths_and_links_are_found_in_a_document() {
    let text = "`raft/src/{log,net}/` and `state/src/a.rs` of [0018](adr/0018.md#why), `api::x`, \
                [site](https://a.b/c), `node/src/*.rs`, `make x/y`\n```\nstate/a b\n```\n`api/b`";
    assert_eq!(
        paths(text).into_iter().collect::<Vec<_>>(),
        ["api/b", "raft/src/log/", "raft/src/net/", "state/src/a.rs"]
    );
    assert_eq!(links(text).into_iter().collect::<Vec<_>>(), ["adr/0018.md"]);
}
