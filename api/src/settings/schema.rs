//! JSON Schemas generated from the structs of settings, and the validation of documents against
//! them.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use state::form::{FormLookup, NamedForm};

/// An unknown key, or a key with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingError {
    /// Path of the key, such as `limits.window`; empty for the document itself.
    pub key: String,
    /// Description of the value, or `an unknown key`.
    pub found: String,
    /// Description of the valid values, or of the known keys.
    pub expected: String,
}

/// Generates the schema (draft 2020-12) of a struct of settings, in the form that [`simplify`]
/// describes. `forms` must know the formats of all fields.
#[must_use]
pub fn schema_of<T: JsonSchema>(forms: FormLookup) -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let mut schema = schema.to_value();
    simplify(forms, &mut schema);
    schema
}

/// Iterates over the names and schemas of a table's keys.
pub fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flatten()
}

/// Returns the names of a table's required keys.
#[must_use]
pub fn required(schema: &Value) -> Vec<&str> {
    let required = schema["required"].as_array().into_iter().flatten();
    required.filter_map(Value::as_str).collect()
}

/// Returns the schema of a table, or of the elements of a list of tables; `None` for other values.
#[must_use]
pub fn table(schema: &Value) -> Option<&Value> {
    let table = schema.get("items").unwrap_or(schema);
    table.get("properties").map(|_| table)
}

/// Returns the path of the key `name` in the table at `path`.
#[must_use]
pub fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        _ => format!("{path}.{name}"),
    }
}

fn form_of(forms: FormLookup, schema: &Value) -> Option<&'static NamedForm> {
    forms(schema["format"].as_str()?)
}

/// Describes the valid values, or the valid elements of a list, for error messages.
#[must_use]
pub fn expected(forms: FormLookup, schema: &Value) -> String {
    let schema = schema.get("items").unwrap_or(schema);
    if let Some(form) = form_of(forms, schema) {
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

/// Converts a TOML or JSON value, or the text of an environment variable or flag, to the value from
/// which its field is deserialized. `None` if it is invalid. Pass the elements of a list one by
/// one.
#[must_use]
pub fn fit(forms: FormLookup, schema: &Value, value: &Value) -> Option<Value> {
    if let Some(form) = form_of(forms, schema) {
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

/// Returns the valid part of `document`, and every fault of the rest. A null counts as absent. Does
/// not check for required keys.
#[must_use]
pub fn valid_part(
    forms: FormLookup,
    schema: &Value,
    document: &Value,
) -> (Value, Vec<SettingError>) {
    let mut faults = Vec::new();
    let valid = walk(forms, schema, ("", document), &mut faults);
    (valid.unwrap_or_default(), faults)
}

fn walk(
    forms: FormLookup,
    schema: &Value,
    (path, value): (&str, &Value),
    faults: &mut Vec<SettingError>,
) -> Option<Value> {
    let mut refuse = |expected: String| {
        faults.push(SettingError {
            key: path.to_owned(),
            found: shown(value),
            expected,
        });
        None
    };
    if value.is_null() {
        return None;
    }
    if table(schema).is_none() {
        let fitting = match (schema.get("items"), value) {
            (Some(items), Value::Array(elements)) => {
                let elements = elements.iter().map(|it| fit(forms, items, it));
                elements.collect::<Option<Vec<_>>>().map(Value::from)
            }
            _ => fit(forms, schema, value),
        };
        return fitting.or_else(|| refuse(expected(forms, schema)));
    }
    let Value::Object(members) = value else {
        return refuse("an object".to_owned());
    };
    let mut valid = Map::new();
    for (name, value) in members {
        let key = join(path, name);
        let Some(schema) = schema["properties"].get(name) else {
            let mut names: Vec<_> = properties(schema).map(|(it, _)| it.as_str()).collect();
            names.sort_unstable();
            faults.push(SettingError {
                key,
                found: "an unknown key".to_owned(),
                expected: format!("one of {}", names.join(", ")),
            });
            continue;
        };
        if let Some(value) = walk(forms, schema, (&key, value), faults) {
            valid.insert(name.clone(), value);
        }
    }
    Some(valid.into())
}

fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::String(text) if text.len() > 60 => "a long text".to_owned(),
        value => value.to_string(),
    }
}

/// Simplifies a generated schema in place: removes nulls, lists the words of an enum in `enum`,
/// gives integers both bounds, and excludes empty strings and unknown keys. Keys without a valid
/// default become required, unless they are optional.
pub fn simplify(forms: FormLookup, schema: &mut Value) {
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
        simplify(forms, items);
    }
    let Some(Value::Object(properties)) = map.get_mut("properties") else {
        return;
    };
    let mut required = Vec::new();
    for (name, property) in properties {
        simplify(forms, property);
        if !settle_default(forms, property) {
            required.push(json!(name));
        }
    }
    map.remove("required");
    if !required.is_empty() {
        map.insert("required".to_owned(), required.into());
    }
    map.insert("additionalProperties".to_owned(), json!(false));
}

/// Removes the default of a property if it is invalid, or if it means "not set": null, a table or
/// an empty list. Returns whether the property may be absent.
fn settle_default(forms: FormLookup, property: &mut Value) -> bool {
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
    if !default.is_array() && fit(forms, property, &default).is_none() {
        return false;
    }
    property["default"] = default;
    true
}

/// Removes null from the types of a value, because TOML has no null.
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
        Some("uint") => (0, i64::from(u32::MAX)),
        Some("uint64") => (0, i64::MAX),
        Some("int16") => (i64::from(i16::MIN), i64::from(i16::MAX)),
        _ => return,
    };
    map.remove("format");
    map.entry("minimum").or_insert(json!(min));
    map.entry("maximum").or_insert(json!(max));
}
