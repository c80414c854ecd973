//! `config print`: the effective config as a config file, with the source of each value; or only the
//! basic keys, with their descriptions.
//!
//! It connects to no cluster, so it only marks the keys for which a running cluster has its own
//! values.

use std::fmt::Write;

use serde_json::Value;

use super::Loaded;
use super::discovery::has_key;
use super::error::{Place, line_and_column};
use super::founding::founds;
use super::schema::{Section, expected, is_basic, join, sections};

/// Column in which the sources begin.
const SOURCE_COLUMN: usize = 56;
/// Maximum length of a line of a description, in characters.
const DESCRIPTION_COLUMNS: usize = 100;

/// Returns the effective config as TOML. Loading it again results in the same config.
#[must_use]
pub fn print(loaded: &Loaded) -> String {
    let mut out = String::new();
    for section in sections() {
        match section.table(&loaded.values) {
            Value::Array(entries) => {
                for (nth, entry) in entries.iter().enumerate() {
                    let path = format!("{}[{nth}]", section.path);
                    line(&mut out, format_args!("\n[[{}]]", section.path));
                    keys(&mut out, loaded, &section, &path, entry);
                }
            }
            table => {
                let gap = if out.is_empty() { "" } else { "\n" };
                if !section.path.is_empty() {
                    line(&mut out, format_args!("{gap}[{}]", section.path));
                }
                keys(&mut out, loaded, &section, &section.path, table);
            }
        }
    }
    out
}

fn keys(out: &mut String, loaded: &Loaded, section: &Section, path: &str, table: &Value) {
    let kind = table["kind"].as_str().unwrap_or_default();
    for (name, _) in &section.keys {
        let place = loaded.places.get(&join(path, name));
        let value = &table[name.as_str()];
        if place.is_none() && section.path == "discovery" && !has_key(kind, name) {
            continue;
        }
        if place.is_none() && is_none(value) {
            line(out, format_args!("# {name} is not set"));
            continue;
        }
        let source = match place {
            None | Some(Place::Nowhere) => "default".to_owned(),
            Some(Place::File(span)) => {
                let (line, _) = line_and_column(&loaded.text, span.start);
                format!("{}:{line}", loaded.file)
            }
            Some(Place::Variable(name)) => name.clone(),
            Some(Place::Flag(flag)) => format!("--set {flag}"),
            Some(Place::Backend(url)) => format!("--backend {url}"),
        };
        let source = match founds(&section.path, name) {
            true => format!("{source}; founds the cluster, see config diff"),
            false => source,
        };
        let assignment = format!("{name} = {}", toml_of(value));
        line(out, format_args!("{assignment:<SOURCE_COLUMN$} # {source}"));
    }
}

/// Returns the keys that a first production cluster needs, with their descriptions, as TOML.
/// Loading it again results in the same values of these keys.
#[must_use]
pub fn print_basic(loaded: &Loaded) -> String {
    let mut out = String::new();
    for mut section in sections() {
        section.keys.retain(|(_, schema)| is_basic(schema));
        if section.keys.is_empty() {
            continue;
        }
        let gap = if out.is_empty() { "" } else { "\n" };
        match section.table(&loaded.values) {
            Value::Array(entries) => {
                if entries.is_empty() {
                    line(&mut out, format_args!("{gap}# [[{}]]", section.path));
                    described(&mut out, &section, &Value::Null);
                }
                for entry in entries {
                    line(&mut out, format_args!("{gap}[[{}]]", section.path));
                    described(&mut out, &section, entry);
                }
            }
            table => {
                let is_unset = section.keys.iter().all(|(name, _)| is_none(&table[*name]));
                let mark = if is_unset { "# " } else { "" };
                line(&mut out, format_args!("{gap}{mark}[{}]", section.path));
                described(&mut out, &section, table);
            }
        }
    }
    out
}

/// Writes the keys of a table, each with its description above it.
fn described(out: &mut String, section: &Section, table: &Value) {
    for (name, schema) in &section.keys {
        comment(out, schema["description"].as_str().unwrap_or_default());
        match &table[name.as_str()] {
            unset if is_none(unset) => {
                let each = if schema["type"] == "array" {
                    "a list, each "
                } else {
                    ""
                };
                line(out, format_args!("# {name} = {each}{}", expected(schema)));
            }
            value => line(out, format_args!("{name} = {}", toml_of(value))),
        }
    }
}

/// Writes text as lines of comments.
fn comment(out: &mut String, text: &str) {
    let mut wrapped = "#".to_owned();
    for word in text.split_whitespace() {
        if wrapped.chars().count() + 1 + word.chars().count() > DESCRIPTION_COLUMNS {
            line(out, format_args!("{wrapped}"));
            wrapped = "#".to_owned();
        }
        wrapped = format!("{wrapped} {word}");
    }
    line(out, format_args!("{wrapped}"));
}

fn is_none(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(elements) => elements.is_empty(),
        Value::Object(labels) => labels.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Returns a value as TOML.
pub(super) fn toml_of(value: &Value) -> String {
    match value {
        Value::String(text) => toml::Value::String(text.clone()).to_string(),
        Value::Array(elements) => {
            let elements: Vec<_> = elements.iter().map(toml_of).collect();
            format!("[{}]", elements.join(", "))
        }
        Value::Object(labels) => {
            let quoted = |text: &str| toml::Value::String(text.to_owned());
            let pairs = labels.iter();
            let pairs: Vec<_> = pairs
                .map(|(name, text)| format!("{} = {}", quoted(name), toml_of(text)))
                .collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("writing to a String cannot fail");
}
