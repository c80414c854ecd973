//! `config print`: the effective config as a config file, with the source of each value.
//!
//! It connects to no cluster, so it only marks the keys for which a running cluster has its own
//! values.

use std::fmt::Write;

use serde_json::Value;

use super::Loaded;
use super::discovery::has_key;
use super::error::{Place, line_and_column};
use super::founding::founds;
use super::schema::{Section, join, sections};

/// Column in which the sources begin.
const SOURCE_COLUMN: usize = 56;

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

fn is_none(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(elements) => elements.is_empty(),
        Value::Object(labels) => labels.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn toml_of(value: &Value) -> String {
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
