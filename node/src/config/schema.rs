//! The keys there are: the JSON Schema (draft 2020-12) of a config file, made from the structs of its
//! sections. Values are checked by it, key by key, so that every wrong one is told at once; the
//! reference, `config print` and `config schema` follow it too.
//!
//! Of a field, its comment is the description, its type and attributes are the bounds. A default that
//! its own key would refuse, such as an empty name, says that the key must be set.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::file::ConfigFile;
use super::form::{self, NamedForm};

/// The schema of a file. A section's `required` also counts what variables and flags can set.
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

/// The schema as one JSON document. A file alone is not held to keys that variables may set.
#[must_use]
pub fn schema() -> Value {
    let mut schema = SCHEMA.clone();
    let sections = schema["properties"].as_object_mut();
    for section in sections.into_iter().flat_map(Map::values_mut) {
        if let Some(section) = section.as_object_mut() {
            section.remove("required");
        }
    }
    schema
}

/// A section, or the keys of each entry of a list of tables.
pub(super) struct Section {
    /// `routing.cost`.
    pub(super) path: String,
    /// Whether it is a list of tables.
    pub(super) is_list: bool,
    /// Schemas of its keys by their last part.
    pub(super) keys: Vec<(&'static String, &'static Value)>,
    /// Those of them that must be set.
    pub(super) required: Vec<&'static str>,
}

/// All sections, each before those below it.
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

/// Paths and schemas of all keys outside lists of tables.
pub(super) fn keys() -> Vec<(String, &'static Value)> {
    pick(|_, _| true)
}

/// Those of them that must be set.
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

/// The schema of the table, or of the entries of the list of tables, that this is one of.
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

/// What a value (for a list: one of its elements) looks like, in words.
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

/// The value of a key (of a list: of one of its elements) as the key has it, from TOML or the text of a
/// variable or flag; `None` when it does not fit.
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
        _ => {
            let is_fit = match schema["enum"].as_array() {
                Some(words) => words.contains(value),
                None => !text?.trim().is_empty(),
            };
            is_fit.then(|| value.clone())
        }
    }
}

/// Says the same as what was derived, the way a config has it: no nulls, words without comments,
/// integers with both bounds, no text that is empty.
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

/// Drops a default that stands for no value, or that does not fit: then it answers `false`.
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

/// TOML has no null: a key without a value is not there.
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
