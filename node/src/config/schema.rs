//! The JSON Schema (draft 2020-12) of a config file, generated from the structs of its sections.
//!
//! It is the list of all keys: values are validated against it one by one, so that every error is
//! found, and the reference, `config print` and `config schema` are made from it. A field's comment
//! is the key's description; its type and attributes are the bounds. If the default violates these
//! bounds, such as an empty name, the key must be set.

use std::sync::LazyLock;

use api::settings;
use serde_json::{Map, Value, json};

use super::file::ConfigFile;
use super::form;

pub(super) use api::settings::{join, properties, required, table};

/// The schema. `required` in a section includes keys that variables and flags can set.
pub(super) static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let mut schema = settings::schema_of::<ConfigFile>(form::named);
    schema["title"] = json!("Quorate config");
    schema
});

/// The schema for editors. It does not require keys that variables can set.
#[must_use]
pub fn schema() -> Value {
    let mut schema = SCHEMA.clone();
    let sections = schema["properties"].as_object_mut();
    for section in sections.into_iter().flat_map(Map::values_mut) {
        if let Some(section) = section.as_object_mut() {
            section.remove("required");
        }
    }
    remove_formats(&mut schema);
    schema
}

/// Formats have names of their own; validators may refuse those they do not know. Patterns remain.
fn remove_formats(schema: &mut Value) {
    if let Some(map) = schema.as_object_mut() {
        map.retain(|key, value| key != "format" || !value.is_string());
        map.values_mut().for_each(remove_formats);
    } else if let Some(list) = schema.as_array_mut() {
        list.iter_mut().for_each(remove_formats);
    }
}

/// A section, or the entries of a list of tables.
pub(super) struct Section {
    /// Path, such as `routing.cost`; empty for keys outside all sections.
    pub(super) path: String,
    /// Whether it is a list of tables.
    pub(super) is_list: bool,
    /// Names and schemas of its keys.
    pub(super) keys: Vec<(&'static String, &'static Value)>,
    /// Names of the keys that must be set.
    pub(super) required: Vec<&'static str>,
}

impl Section {
    /// Returns the section's table within all values.
    pub(super) fn table<'a>(&self, values: &'a Value) -> &'a Value {
        let parts = self.path.split('.').filter(|part| !part.is_empty());
        parts.fold(values, |table, part| &table[part])
    }
}

/// Returns all sections; a section comes before its subsections.
pub(super) fn sections() -> Vec<Section> {
    let mut sections = Vec::new();
    collect("", &SCHEMA, &mut sections);
    sections
}

fn collect(path: &str, schema: &'static Value, sections: &mut Vec<Section>) {
    let (tables, keys): (Vec<_>, Vec<_>) =
        properties(schema).partition(|(_, schema)| table(schema).is_some());
    if !keys.is_empty() {
        sections.push(Section {
            path: path.to_owned(),
            is_list: false,
            keys,
            required: required(schema),
        });
    }
    for (name, schema) in tables {
        let path = join(path, name);
        match schema.get("items") {
            None => collect(&path, schema, sections),
            Some(entry) => sections.push(Section {
                path,
                is_list: true,
                keys: properties(entry).collect(),
                required: required(entry),
            }),
        }
    }
}

/// Whether a first production cluster needs the key with this schema.
pub(super) fn is_basic(schema: &Value) -> bool {
    schema["x-basic"] == true
}

/// Returns paths and schemas of all keys outside lists of tables.
pub(super) fn keys() -> Vec<(String, &'static Value)> {
    pick(|_, _| true)
}

/// Returns those of them that must be set.
pub(super) fn required_keys() -> Vec<(String, &'static Value)> {
    pick(|section, name| section.required.contains(&name))
}

fn pick(is_wanted: impl Fn(&Section, &str) -> bool) -> Vec<(String, &'static Value)> {
    let mut picked = Vec::new();
    for section in sections().iter().filter(|section| !section.is_list) {
        let keys = section
            .keys
            .iter()
            .filter(|(name, _)| is_wanted(section, name));
        picked.extend(keys.map(|(name, schema)| (join(&section.path, name), *schema)));
    }
    picked
}

/// Describes valid values (for a list: elements) in words.
pub(super) fn expected(schema: &Value) -> String {
    settings::expected(form::named, schema)
}

/// Calls [`settings::fit`] with the formats of the config file; `None` if `value` is invalid.
pub(super) fn fit(schema: &Value, value: &Value) -> Option<Value> {
    settings::fit(form::named, schema, value)
}
