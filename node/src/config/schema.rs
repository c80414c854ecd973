//! The JSON Schema (draft 2020-12) of a config file, generated from the structs of its sections.
//!
//! It is the list of all keys: values are validated against it one by one, so that every error is
//! found, and the reference, `config print` and `config schema` are made from it. A field's comment
//! is the key's description; its type and attributes are the bounds. A default that violates its own
//! key's bounds, such as an empty name, means that the key must be set.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::file::ConfigFile;
use super::form::{self, NamedForm};

/// The schema. `required` in a section includes keys that variables and flags can set.
pub(super) static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings
        .into_generator()
        .into_root_schema_for::<ConfigFile>();
    let mut schema = schema.to_value();
    simplify(&mut schema);
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
    /// Path, such as `routing.cost`.
    pub(super) path: String,
    /// Whether it is a list of tables.
    pub(super) is_list: bool,
    /// Names and schemas of its keys.
    pub(super) keys: Vec<(&'static String, &'static Value)>,
    /// Names of the keys that must be set.
    pub(super) required: Vec<&'static str>,
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

pub(super) fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flatten()
}

pub(super) fn required(schema: &Value) -> Vec<&str> {
    let required = schema["required"].as_array().into_iter().flatten();
    required.filter_map(Value::as_str).collect()
}

/// Returns the schema of a table, or of the entries of a list of tables; `None` for other values.
pub(super) fn table(schema: &Value) -> Option<&Value> {
    let table = schema.get("items").unwrap_or(schema);
    table.get("properties").map(|_| table)
}

pub(super) fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        _ => format!("{path}.{name}"),
    }
}

fn form_of(schema: &Value) -> Option<&'static NamedForm> {
    form::named(schema["format"].as_str()?)
}

/// Describes valid values (for a list: elements) in words.
pub(super) fn expected(schema: &Value) -> String {
    let schema = schema.get("items").unwrap_or(schema);
    if let Some(form) = form_of(schema) {
        return form.expected.to_owned();
    }
    if let Some(words) = schema["enum"].as_array() {
        let words: Vec<_> = words.iter().map(Value::to_string).collect();
        return words.join(" or ");
    }
    match schema["type"].as_str() {
        Some("integer") => {
            let (min, max) = (&schema["minimum"], &schema["maximum"]);
            format!("an integer from {min} to {max}")
        }
        Some("boolean") => "true or false".to_owned(),
        Some("object") => "a table of strings".to_owned(),
        _ => "non-empty text".to_owned(),
    }
}

/// Converts a TOML value, or the text of a variable or flag, to a value of the key (for a list: an
/// element). `None` if it is not valid.
pub(super) fn fit(schema: &Value, value: &Value) -> Option<Value> {
    if let Some(form) = form_of(schema) {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) if form.takes_integers => number.to_string(),
            _ => return None,
        };
        return (form.is_read)(&text).then_some(Value::String(text));
    }
    let text = value.as_str();
    match schema["type"].as_str() {
        Some("integer") => {
            let number = value.as_i64().or_else(|| text?.parse().ok())?;
            let (min, max) = (schema["minimum"].as_i64()?, schema["maximum"].as_i64()?);
            (min..=max).contains(&number).then(|| json!(number))
        }
        Some("boolean") => {
            let is_set = value.as_bool().or_else(|| text?.parse().ok())?;
            Some(json!(is_set))
        }
        Some("string") => {
            let is_fit = match schema["enum"].as_array() {
                Some(words) => words.contains(value),
                None => !text?.trim().is_empty(),
            };
            is_fit.then(|| value.clone())
        }
        _ => None,
    }
}

/// Simplifies a generated schema: no nulls, plain lists of words, integers with both bounds, no empty
/// strings.
fn simplify(schema: &mut Value) {
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    without_null(map);
    words(map);
    integer_bounds(map);
    if let Some(Value::String(text)) = map.get_mut("description") {
        *text = text.replace('\n', " ");
    }
    let is_any_text = map.get("type") == Some(&json!("string"))
        && !["enum", "format"].iter().any(|key| map.contains_key(*key));
    if is_any_text {
        map.insert("minLength".to_owned(), json!(1));
    }
    if let Some(items) = map.get_mut("items") {
        simplify(items);
    }
    let Some(Value::Object(properties)) = map.get_mut("properties") else {
        return;
    };
    let mut required = Vec::new();
    for (name, property) in properties {
        simplify(property);
        if !settle_default(property) {
            required.push(json!(name));
        }
    }
    map.remove("required");
    if !required.is_empty() {
        map.insert("required".to_owned(), required.into());
    }
    map.insert("additionalProperties".to_owned(), json!(false));
}

/// Removes a default that means "no value" or is not valid. Returns `false` if it is not valid.
fn settle_default(property: &mut Value) -> bool {
    let default = property.as_object_mut().and_then(|it| it.remove("default"));
    let default = default.unwrap_or_default();
    let is_unset = match &default {
        Value::Null | Value::Object(_) => true,
        Value::Array(elements) => elements.is_empty() || table(property).is_some(),
        _ => false,
    };
    if is_unset {
        return true;
    }
    if !default.is_array() && fit(property, &default).is_none() {
        return false;
    }
    property["default"] = default;
    true
}

/// TOML has no null.
fn without_null(map: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = map.get("type")
        && let Some(single) = types.iter().find(|it| **it != "null").cloned()
    {
        map.insert("type".to_owned(), single);
    }
    if let Some(Value::Array(any)) = map.get_mut("anyOf") {
        any.retain(|it| it["type"] != "null");
        if any.len() == 1
            && let Some(Value::Object(single)) = any.pop()
        {
            map.remove("anyOf");
            for (key, value) in single {
                map.entry(key).or_insert(value);
            }
        }
    }
}

fn words(map: &mut Map<String, Value>) {
    if let Some(Value::Array(variants)) = map.remove("oneOf") {
        let words = variants.iter().map(|it| it["const"].clone());
        map.insert("enum".to_owned(), words.collect());
        map.insert("type".to_owned(), json!("string"));
    }
}

fn integer_bounds(map: &mut Map<String, Value>) {
    let (min, max) = match map.get("format").and_then(Value::as_str) {
        Some("uint8") => (0, i64::from(u8::MAX)),
        Some("uint16") => (0, i64::from(u16::MAX)),
        Some("uint32") => (0, i64::from(u32::MAX)),
        Some("int16") => (i64::from(i16::MIN), i64::from(i16::MAX)),
        _ => return,
    };
    map.remove("format");
    map.entry("minimum").or_insert(json!(min));
    map.entry("maximum").or_insert(json!(max));
}
