//! One name for one type: no crate defines two types of the same name outside its tests. `cfg`
//! alternatives in one file count as one type. Error types end in `Error` or `Rejection`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::{check, root, sources};

/// Returns the name of the type that a line outside all functions defines.
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

/// Returns the lines built without `cfg(test)`, and the sibling modules built only with it.
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
fn type_names_are_unique_within_a_crate() {
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
        if files.len() > 1 {
            faults.push(format!("{package}: {name}: {files:?}"));
        }
    }
    assert!(
        faults.is_empty(),
        "one name for one type of a crate:\n{}",
        faults.join("\n")
    );
}

#[test]
fn error_types_end_in_error_or_rejection() {
    check(
        "types of errors end in `Error` or `Rejection`",
        |path, text| {
            if path.iter().any(|part| part == "fuzz") {
                return None;
            }
            let mut is_error = false;
            for line in text.lines().map(str::trim_start) {
                is_error |= line.starts_with("#[derive(") && line.contains("thiserror::Error");
                let Some(name) = type_name(line) else {
                    continue;
                };
                let says_so = name.ends_with("Error") || name.ends_with("Rejection");
                if std::mem::take(&mut is_error) && !says_so {
                    return Some(name.to_owned());
                }
            }
            None
        },
    );
}
