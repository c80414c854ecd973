//! Tests of values of the wrong type, and of required keys.

use expect_test::expect;
use serde_json::Value;

use super::*;

#[test]
fn tables_and_values_are_not_interchangeable() {
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
        expect![[r#"
            2:10: listen is 5 (expected a table: [listen])
            3:11: models[0] is 5 (expected a table: [[models]])
            3:14: models[1] is 6 (expected a table: [[models]])
            3:31: unknown key models[2].tokeniser (expected tokenizer, or another of aliases, block_size, chat_template, disaggregate, disaggregate_above_tokens, fallback, hold_at_zero, name, policy, select, tokenizer)
            3:55: models[3].name is not set (expected non-empty text)
            3:70: models[3].block_size is 0 (expected an integer from 1 to 65536)
            5:6: node.id is a table (expected an integer from 1 to 255, or "from-hostname")
            9:10: backends[0].models is empty (expected at least one element, each non-empty text)
            10:19: backends[0].labels.zone is 1 (expected a text)
            14:10: backends[1].models is "m" (expected a list, each non-empty text)
            15:10: backends[1].labels is "zone" (expected a table of strings)
        "#]],
    );
}

#[test]
fn consequential_errors_are_omitted() {
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
[timeouts]
connect = "soon"
"#,
        expect![[r#"
            5:8: listen.data is "localhost" (expected an IP address with a port, such as "127.0.0.1:8080")
            8:10: cluster.peers[0] is "a" (expected a host with a port, such as "10.0.0.1:8082")
            11:11: timeouts.connect is "soon" (expected a duration from 1ms to 1day, such as "20ms" or "1m 30s")
        "#]],
    );
}

#[test]
fn seven_keys_are_required_and_all_others_have_valid_defaults() {
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
    let expected = [
        "node.id",
        "sessions.headers.session",
        "models.name",
        "splits.model",
        "backends.id",
        "backends.url",
        "prices.name",
        "discovery.kind",
    ];
    assert_eq!(required, expected);
}
