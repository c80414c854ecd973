//! Links of the documentation, and paths of documents in code, must resolve.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::root;

/// Folders with content that is not ours.
const NOT_OURS: &[&str] = &[".git", "target", "corpus", "node_modules"];

/// Extensions of files that may name a document.
const MAY_NAME: &[&str] = &["rs", "toml", "md", "proto", "yml", "sh"];

/// Files without an extension that may name a document.
const MAY_NAME_TOO: &[&str] = &[".ci/run", "chaos-tests/fuzz/run", "justfile"];

fn files(wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let mut folders = vec![root()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("list a folder") {
            let path = entry.expect("list a folder").path();
            let name = path.file_name().and_then(|name| name.to_str());
            if path.is_dir() {
                let ours = name
                    .is_some_and(|name| !NOT_OURS.contains(&name) && !name.starts_with("target-"));
                folders.extend(ours.then_some(path));
            } else if wanted(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    ending.is_some_and(|ending| endings.contains(&ending))
}

fn pages() -> Vec<PathBuf> {
    let pages = files(|path| has_ending(path, &["md"]));
    assert!(pages.len() > 20, "found only {} pages", pages.len());
    pages
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("read a text file")
}

fn shown(path: &Path) -> String {
    let path = path.strip_prefix(root()).unwrap_or(path);
    path.display().to_string()
}

/// Returns the lines of a page outside its code blocks.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    page.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the targets of a line's links: the text in parentheses after a bracket.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let behind = line.split("](").skip(1);
    behind.filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

/// Returns GitHub's anchor for a heading.
fn slug(heading: &str) -> String {
    let kept = heading.chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        _ => letter
            .is_alphanumeric()
            .then(|| letter.to_ascii_lowercase()),
    });
    kept.collect()
}

fn anchors(page: &str) -> BTreeSet<String> {
    let headings = prose(page).filter(|line| line.starts_with('#'));
    headings
        .map(|line| slug(line.trim_start_matches('#').trim()))
        .collect()
}

/// Returns the fault of a link on `page`, if any.
fn broken(page: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = page.parent().expect("a page lies in a folder");
    let leads_to = match path {
        "" => page.to_owned(),
        path => folder.join(path),
    };
    if !leads_to.exists() {
        return Some(format!("{}: no such file: {target}", shown(page)));
    }
    if anchor.is_empty() || anchors(&read(&leads_to)).contains(anchor) {
        return None;
    }
    Some(format!("{}: no such heading: {target}", shown(page)))
}

#[test]
fn documentation_links_resolve() {
    let mut faults = Vec::new();
    for page in pages() {
        let text = read(&page);
        let targets = prose(&text).flat_map(targets);
        faults.extend(targets.filter_map(|target| broken(&page, target)));
    }
    assert!(faults.is_empty(), "broken links:\n{}", faults.join("\n"));
}

/// Returns the numbers of the decisions that a text names, such as 0004 in "ADR 0004".
fn named_decisions(text: &str) -> BTreeSet<&str> {
    let behind = text.split("ADR ").skip(1);
    let numbers = behind.filter_map(|rest| rest.get(..4));
    numbers
        .filter(|number| number.bytes().all(|it| it.is_ascii_digit()))
        .collect()
}

/// Returns the paths below `docs/` in a text, in the forms that code uses:
/// `docs/guide/admission.md`, `docs/adr/0004`.
fn named_documents(text: &str) -> BTreeSet<&str> {
    let belongs = |letter: char| letter.is_ascii_alphanumeric() || "/._-".contains(letter);
    let starts = text.match_indices("docs/").map(|(at, _)| at);
    let whole_words = starts.filter(|at| !text[..*at].ends_with(belongs));
    let named = whole_words.map(|at| {
        let rest = &text[at..];
        let end = rest.find(|letter| !belongs(letter)).unwrap_or(rest.len());
        rest[..end].trim_end_matches(['.', '-'])
    });
    named.collect()
}

/// Whether a path or an ADR like `docs/adr/0004` exists.
fn document_exists(named: &str) -> bool {
    let Some(number) = named.strip_prefix("docs/adr/") else {
        return root().join(named).exists();
    };
    let records = std::fs::read_dir(root().join("docs/adr")).expect("list the records");
    let mut names = records.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.any(|name| name == number || number.len() == 4 && name.starts_with(number))
        || number.is_empty()
}

#[test]
fn named_documents_exist() {
    let may_name = |path: &Path| {
        // This file names missing documents, to test that they are reported.
        if path.ends_with("tidy/docs.rs") {
            return false;
        }
        let is_listed = || MAY_NAME_TOO.contains(&shown(path).as_str());
        has_ending(path, MAY_NAME) || is_listed()
    };
    let mut found = 0;
    let mut faults = Vec::new();
    for path in files(may_name) {
        let text = read(&path);
        let decisions = named_decisions(&text).into_iter();
        let decisions = decisions.map(|number| format!("docs/adr/{number}"));
        let documents = named_documents(&text).into_iter().map(str::to_owned);
        for named in documents.chain(decisions) {
            found += 1;
            if !document_exists(&named) {
                faults.push(format!("{}: {named}", shown(&path)));
            }
        }
    }
    assert!(found > 50, "found only {found} names of documents");
    assert!(
        faults.is_empty(),
        "no such document:\n{}",
        faults.join("\n")
    );
}

#[test]
fn every_adr_has_a_number_status_and_date() {
    let mut faults = Vec::new();
    for record in pages() {
        let name = shown(&record);
        let Some(name) = name.strip_prefix("docs/adr/") else {
            continue;
        };
        if name == "README.md" {
            continue;
        }
        let text = read(&record);
        let lines: Vec<_> = text.lines().take(3).collect();
        let title = format!("# {} ", &name[..4]);
        let is_well_formed = matches!(lines[..], [first, "", status]
            if first.starts_with(&title) && status.starts_with("Status: ") && status.contains(", 20"));
        if !is_well_formed {
            faults.push(format!("{name} begins {lines:?}"));
        }
    }
    let form = "\"# NNNN Title\", an empty line, \"Status: accepted, YYYY-MM-DD\"";
    assert!(faults.is_empty(), "expected {form}:\n{}", faults.join("\n"));
}

#[test]
fn the_index_of_decisions_has_each_title() {
    let folder = root().join("docs/adr");
    let index = read(&folder.join("README.md"));
    let records = files(|path| path.starts_with(&folder) && !path.ends_with("README.md"));
    assert!(records.len() > 20, "found only {} records", records.len());
    let entry = |record: &PathBuf| {
        let file = record.file_name()?.to_str()?.to_owned();
        let title = read(record)
            .lines()
            .next()?
            .get("# NNNN ".len()..)?
            .to_owned();
        Some(format!("- [{}]({file}) {title}", &file[..4]))
    };
    let missing: Vec<_> = records
        .iter()
        .map(|record| entry(record).unwrap_or_else(|| shown(record)))
        .filter(|entry| !index.lines().any(|line| line == entry))
        .collect();
    assert!(missing.is_empty(), "not in the index: {missing:#?}");
}

#[test]
fn a_broken_link_is_detected() {
    let page = root().join("docs/ARCHITECTURE.md");
    assert_eq!(broken(&page, "adr/"), None);
    assert_eq!(broken(&page, "#invariants"), None);
    assert_eq!(broken(&page, "internals/invariants.md#whole-cluster"), None);
    assert!(broken(&page, "guide/nowhere.md").is_some());
    assert!(broken(&page, "#nowhere").is_some());
    assert!(broken(&page, "internals/invariants.md#nowhere").is_some());
    assert!(document_exists("docs/adr/0004"));
    assert!(!document_exists("docs/adr/9999"));
    let text = "see docs/adr/0004, mydocs/x and `docs/nowhere.md`.";
    let named: Vec<_> = named_documents(text).into_iter().collect();
    assert_eq!(named, ["docs/adr/0004", "docs/nowhere.md"]);
    let named: Vec<_> = named_decisions("ADR 0004, [ADR 9999](x), ADR x")
        .into_iter()
        .collect();
    assert_eq!(named, ["0004", "9999"]);
}
