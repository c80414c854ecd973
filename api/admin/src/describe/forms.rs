//! Rewrites schemas into the forms that client generators support, without changing their meaning.

use serde_json::{Map, Value, json};

/// Prefix of references to schemas in the document.
const AT: &str = "#/components/schemas/";

/// Merges the string constants of every `oneOf` within `schema` into one `enum`, whose description
/// lists those of the constants. `schemars` generates a schema for each constant that has a
/// description, and client generators would make each of them a type.
pub(super) fn merge_words(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(merge_words);
            let Some(Value::Array(branches)) = fields.remove("oneOf") else {
                return;
            };
            let (words, mut others): (Vec<Value>, Vec<Value>) = branches
                .into_iter()
                .partition(|it| it["type"] == "string" && it["const"].is_string());
            let mut merged = words_of(&words);
            if words.is_empty() {
                fields.insert("oneOf".to_owned(), others.into());
            } else if others.is_empty() {
                let described = [fields.get("description"), merged.get("description")];
                let described = described.into_iter().flatten().filter_map(Value::as_str);
                let description = described.collect::<Vec<_>>().join("\n\n");
                merged.insert("description".to_owned(), description.into());
                fields.append(&mut merged);
            } else {
                others.insert(0, merged.into());
                fields.insert("oneOf".to_owned(), others.into());
            }
        }
        Value::Array(all) => all.iter_mut().for_each(merge_words),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn words_of(words: &[Value]) -> Map<String, Value> {
    let all: Vec<&Value> = words.iter().map(|it| &it["const"]).collect();
    let mut schema = Map::from_iter([("type".to_owned(), json!("string"))]);
    schema.insert("enum".to_owned(), json!(all));
    let lines = words.iter().filter_map(|it| {
        let (word, what) = (it["const"].as_str()?, it["description"].as_str()?);
        Some(format!("- `{word}`: {what}"))
    });
    let lines: Vec<_> = lines.collect();
    if !lines.is_empty() {
        schema.insert("description".to_owned(), lines.join("\n").into());
    }
    schema
}

/// Moves each object schema within the branches of a `oneOf` to a schema of its own, named after
/// the enum and the field, for example `KvRefusalBlockSize`.
pub(super) fn name_objects(schemas: &mut Map<String, Value>) {
    let mut found = Vec::new();
    for (name, schema) in schemas.iter_mut() {
        let branches = schema.get_mut("oneOf").and_then(Value::as_array_mut);
        for branch in branches.into_iter().flatten() {
            let fields = branch.get_mut("properties");
            let fields = fields.and_then(Value::as_object_mut);
            for (field, inner) in fields.into_iter().flatten() {
                if inner["type"] == "object" && inner["properties"].is_object() {
                    let name = format!("{name}{}", camel(field));
                    let reference = json!({ "$ref": format!("{AT}{name}") });
                    found.push((name, std::mem::replace(inner, reference)));
                }
            }
        }
    }
    schemas.extend(found);
}

fn camel(name: &str) -> String {
    let parts = name.split(['-', '_']).map(|part| {
        let (first, rest) = part.split_at(part.len().min(1));
        first.to_uppercase() + rest
    });
    parts.collect()
}
