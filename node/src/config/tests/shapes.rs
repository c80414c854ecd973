//! Values in the wrong place, and which keys must be set.

use expect_test::expect;
use serde_json::Value;

use super::*;

#[test]
fn tables_and_values_do_not_stand_for_each_other() {
    faults(
        r#"
listen = 5
models = [5, 6, { name = "m", tokeniser = "engine" }, { block_size = 0 }]
[node]
id = { is = 1 }
[[backends]]
id = "a"
url = "http://a:1"
models = []
labels = { zone = 1 }
[[backends]]
id = "b"
url = "http://b:1"
models = "m"
labels = "zone"
"#,
        expect![[""]],
    );
}

#[test]
fn errors_that_follow_from_others_are_left_out() {
    faults(
        r#"
[node]
id = 1
[listen]
data = "localhost"
admin = "127.0.0.1:8080"
[cluster]
peers = ["a"]
bootstrap_expect = 3
[circuit]
backoff = "1h"
max_backoff = "soon"
"#,
        expect![[""]],
    );
}

#[test]
fn four_keys_must_be_set_and_all_others_have_a_valid_default() {
    let mut required = Vec::new();
    for section in schema::sections() {
        let names = section.required.iter();
        required.extend(names.map(|name| schema::join(&section.path, name)));
        for (name, schema) in &section.keys {
            let (path, default) = (schema::join(&section.path, name), schema.get("default"));
            let values = match default {
                Some(Value::Array(elements)) => elements.iter().collect(),
                default => Vec::from_iter(default),
            };
            let schema = schema.get("items").unwrap_or(schema);
            for value in values {
                assert!(schema::fit(schema, value).is_some(), "{path} = {value}");
            }
        }
    }
    let expected = ["node.id", "models.name", "backends.id", "backends.url"];
    assert_eq!(required, expected);
}
