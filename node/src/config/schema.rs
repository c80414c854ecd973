//! `config schema`: JSON Schema (draft 2020-12) of a config file, for editors.

use serde_json::{Map, Value, json};

use super::key::{Absent, Key, Kind};
use super::keys::{BACKEND_KEYS, KEYS, MODEL_KEYS};
use super::value::CONCURRENCY_MAX;

/// The schema as one JSON document.
#[must_use]
pub fn schema() -> Value {
    let mut root = object();
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    root["title"] = json!("Quorate config");
    for key in KEYS {
        let mut parts: Vec<_> = key.path.split('.').collect();
        let name = parts.pop().unwrap_or(key.path);
        let mut section = &mut root;
        for part in parts {
            let sections = section["properties"]
                .as_object_mut()
                .expect("object() makes one");
            section = sections.entry(part).or_insert_with(object);
        }
        put(section, name, key);
    }
    for (list, keys) in [("models", MODEL_KEYS), ("backends", BACKEND_KEYS)] {
        let mut entry = object();
        for key in keys {
            put(&mut entry, key.path, key);
        }
        root["properties"][list] = json!({ "type": "array", "items": entry });
    }
    root
}

fn object() -> Value {
    json!({ "type": "object", "additionalProperties": false, "properties": {} })
}

fn put(section: &mut Value, name: &str, key: &Key) {
    let mut property = kind(key.kind);
    property.insert("description".to_owned(), json!(key.about));
    if let Absent::Default(text) = key.absent {
        property.insert("default".to_owned(), default(key.kind, text));
    }
    // A key that must be set may be set by a variable, so the file alone is not held to it; within
    // an entry of a list it is.
    if key.absent == Absent::Required && !key.path.contains('.') {
        let required = section.as_object_mut().expect("object() makes one");
        let required = required.entry("required").or_insert_with(|| json!([]));
        required
            .as_array_mut()
            .expect("inserted as a list")
            .push(json!(name));
    }
    section["properties"][name] = Value::Object(property);
}

fn default(kind: Kind, text: &str) -> Value {
    if kind == Kind::Flag {
        return json!(text == "true");
    }
    let one = |text: &str| {
        text.parse::<i64>()
            .map_or_else(|_| json!(text), |number| json!(number))
    };
    if kind.is_list() {
        text.split(',').map(one).collect()
    } else {
        one(text)
    }
}

fn kind(kind: Kind) -> Map<String, Value> {
    let value = match kind {
        Kind::Integer { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Concurrency => json!({
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": CONCURRENCY_MAX },
                { "enum": ["adaptive", "unlimited"] },
            ]
        }),
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Text => json!({ "type": "string", "minLength": 1 }),
        Kind::Choice { now, .. } => json!({ "enum": now }),
        Kind::Duration | Kind::DurationOrZero => {
            json!({ "type": "string", "pattern": r"^\d+ *[a-zA-Z]+( *\d+ *[a-zA-Z]+)*$" })
        }
        Kind::DurationRange => json!({ "type": "string", "pattern": r"^.+\.\..+$" }),
        Kind::Size => json!({
            "anyOf": [
                { "type": "integer", "minimum": 1 },
                { "type": "string", "pattern": r"^\d+ *(B|kB|MB|GB|KiB|MiB|GiB)?$" },
            ]
        }),
        Kind::Address | Kind::HostPort => json!({ "type": "string", "pattern": r"^.+:\d+$" }),
        Kind::HostPorts => list(&json!({ "type": "string", "pattern": r"^.+:\d+$" })),
        Kind::Hosts => list(&json!({ "type": "string", "pattern": r"^[A-Za-z0-9._-]+$|^\[.+\]$" })),
        Kind::Identities => {
            list(&json!({ "type": "string", "pattern": "^(api_key|body:user|header:.+)$" }))
        }
        Kind::Prefixes => list(&json!({ "type": "string", "pattern": r"^[0-9a-fA-F.:]+(/\d+)?$" })),
        Kind::Names => list(&json!({ "type": "string", "pattern": "^[!-+\\--~]+$" })),
        Kind::Paths => list(&json!({ "type": "string", "pattern": "^/" })),
        Kind::Texts => list(&json!({ "type": "string", "minLength": 1 })),
        Kind::Statuses => list(&json!({ "type": "integer", "minimum": 400, "maximum": 599 })),
        Kind::Tokenizer => json!({
            "type": "string",
            "pattern": "^(character|engine|tiktoken:(cl100k|o200k)_base|huggingface:.+)$",
        }),
        Kind::Url => json!({ "type": "string", "pattern": "^http://[^/]+/?$" }),
        Kind::UrlPath => json!({ "type": "string", "pattern": "^/" }),
        Kind::Labels => json!({ "type": "object", "additionalProperties": { "type": "string" } }),
    };
    match value {
        Value::Object(map) => map,
        _ => unreachable!("every arm above is an object"),
    }
}

fn list(items: &Value) -> Value {
    json!({ "type": "array", "items": items })
}
