//! Tests over each row of each table.

use super::super::super::others::{Fate, Row, Unit};
use super::super::super::schema::{join, sections};
use super::*;

/// Returns whether the path is a key of the config.
pub(super) fn is_key(path: &str) -> bool {
    let bare = ["[0]", "[1]", "[2]", "[]"];
    let bare = bare
        .iter()
        .fold(path.to_owned(), |path, it| path.replace(it, ""));
    let mut sections = sections().into_iter();
    sections.any(|section| {
        let mut keys = section.keys.iter();
        keys.any(|(key, _)| join(&section.path, key) == bare)
    })
}

fn paths(row: &Row) -> Vec<&'static str> {
    match &row.fate {
        Fate::Key(path, _) | Fate::Hand(path) => vec![path],
        Fate::Set(values) => values.iter().map(|(path, _)| *path).collect(),
        Fate::Unneeded | Fate::Missing => Vec::new(),
    }
}

fn kinds() -> impl Iterator<Item = (ImportKind, &'static Table)> {
    let kinds = ImportKind::value_variants().iter();
    kinds.map(|kind| (*kind, kind.table()))
}

#[test]
fn tables_name_each_setting_once_and_only_keys_of_ours() {
    for (kind, table) in kinds() {
        let mut seen = std::collections::BTreeSet::new();
        for row in &table.rows {
            for path in paths(row) {
                assert!(is_key(path), "{kind:?}: {path}");
            }
            for name in &row.names {
                assert!(!name.is_empty() && seen.insert(name), "{kind:?}: {name:?}");
            }
        }
        for (path, ..) in &table.implied {
            assert!(is_key(path), "{kind:?}: {path}");
        }
    }
}

/// Returns a value that the key takes, as another router has it.
fn sample(path: &str, unit: Unit) -> &'static str {
    match (unit, path) {
        (Unit::Text, "probes.health_path") => "/ping",
        (Unit::Text, "admission.max_wait") => "61s",
        (Unit::Text, _) => "x-sample",
        (Unit::Selector, _) => "app=vllm",
        (Unit::Texts, _) => "https://a.example",
        (Unit::Host, _) => "10.0.0.1",
        (Unit::Urls | Unit::Url, _) => "http://gpu:8000",
        (Unit::Tokenizer, _) => "/models/m",
        (Unit::Collector, _) => "collector:4317",
        (Unit::Decimal, _) => "0.5",
        _ => "7",
    }
}

/// Returns a file with this one setting.
fn file(kind: ImportKind, name: &str, value: &str) -> (&'static str, String) {
    match kind {
        ImportKind::Aibrix if !name.starts_with("--") => ("a.env", format!("{name}={value}\n")),
        ImportKind::Aibrix => {
            let text = format!("- image: aibrix\n  args: [\"{name}={value}\"]\n");
            ("a.yaml", text)
        }
        ImportKind::Smg => ("a.sh", format!("smg launch {name} {value}\n")),
        ImportKind::VllmRouter => ("a.sh", format!("vllm-router {name} {value}\n")),
        ImportKind::Epp => ("a.yaml", picker_config(name, value)),
    }
}

fn picker_config(name: &str, value: &str) -> String {
    let kind = "kind: EndpointPickerConfig\n";
    let (first, rest) = name.split_once('.').unwrap_or((name, ""));
    let nested = |path: &str| {
        let (open, close) = (
            path.replace('.', ": {"),
            "}".repeat(path.matches('.').count()),
        );
        format!("{open}: {value}{close}")
    };
    let sections = [
        "flowControl",
        "saturationDetector",
        "dataLayer",
        "requestHandler",
        "parser",
    ];
    // Without any profile, a scorer has a weight.
    let profile = "schedulingProfiles: [{plugins: []}]\n";
    match rest {
        _ if first == "featureGates" => format!("{kind}featureGates: [{rest}]\n"),
        _ if sections.contains(&first) => format!("{kind}{first}: {{{}}}\n", nested(rest)),
        "weight" => format!(
            "{kind}plugins: [{{type: {first}}}]\nschedulingProfiles: [{{plugins: [{{pluginRef: \
             {first}, weight: {value}}}]}}]\n"
        ),
        "" => format!("{kind}plugins: [{{type: {first}}}]\n{profile}"),
        _ => format!(
            "{kind}plugins: [{{type: {first}, parameters: {{{}}}}}]\n{profile}",
            nested(rest)
        ),
    }
}

#[test]
fn every_row_lands_in_the_config_or_in_the_report() {
    for (kind, table) in kinds() {
        for row in &table.rows {
            for name in &row.names {
                let (names, values) = match name.split_once('=') {
                    Some((names, values)) => (names.to_owned(), values.split(',').collect()),
                    None => {
                        let value = match &row.fate {
                            Fate::Key(path, unit) => sample(path, *unit),
                            Fate::Set(_) => "true",
                            Fate::Hand(_) | Fate::Unneeded | Fate::Missing => "7",
                        };
                        (name.replace('*', "sample"), vec![value])
                    }
                };
                for name in names.split(',') {
                    for value in &values {
                        row_lands(kind, row, name, value);
                    }
                }
            }
        }
    }
}

fn row_lands(kind: ImportKind, row: &Row, name: &str, value: &str) {
    let (file, text) = file(kind, name, value);
    let imported = imported(kind, file, &text);
    let config = &imported.config;
    assert!(imported.unknown.is_empty(), "{text}{config}");
    let (_, values) = config.split_once("\n[node]").expect("a config has a node");
    let (values, report) = values.split_once("\n# ").unwrap_or((values, ""));
    let place = format!("{file}:");
    let is_found = |text: &str| {
        let mut lines = text.lines().filter(|line| line.contains(&place));
        lines.any(|line| line.contains(name))
    };
    if matches!(row.fate, Fate::Key(..) | Fate::Set(_)) {
        let set = imported.carried + imported.refused.len();
        assert!(set > 0 && is_found(config), "{text}{config}");
    } else {
        assert!(is_found(report) && !is_found(values), "{text}{config}");
    }
}
