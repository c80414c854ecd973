//! What vLLM makes of the fields of a message before it renders the template
//! (`entrypoints/openai/chat_completion/protocol.py` and `renderers/chat_utils.py` of 0.32;
//! reimplemented, not copied).
//!
//! A template sees these fields only, and some print a whole tool call as JSON, in the order of its
//! fields.

use serde_json::{Map, Value};

/// Fields that templates see of every message.
const OF_ALL: [&str; 4] = ["role", "content", "name", "task"];

/// Leaves the fields of `message` that the template sees. Reasoning gets both of its names.
pub(super) fn keep_known_fields(message: &mut Value) {
    let Value::Object(fields) = message else {
        return;
    };
    let role = fields.get("role").and_then(Value::as_str);
    let own: &[&str] = match role {
        Some("assistant") => &["tool_calls", "reasoning", "reasoning_content"],
        Some("tool") => &["tool_call_id"],
        Some("developer") => &["tools"],
        _ => &[],
    };
    fields.retain(|field, _| OF_ALL.contains(&field.as_str()) || own.contains(&field.as_str()));
    let reasoning = ["reasoning", "reasoning_content"].iter();
    let reasoning = reasoning.filter_map(|name| fields.get(*name)).next();
    if let Some(reasoning) = reasoning.cloned() {
        fields.insert("reasoning".to_owned(), reasoning.clone());
        fields.insert("reasoning_content".to_owned(), reasoning);
    }
}

/// Orders the fields of the tool calls in `message` as vLLM does when it reads a chat.
pub(super) fn order_calls(message: &mut Value) {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten().filter_map(Value::as_object_mut) {
        put_first(call, &["id", "function", "type"]);
        if let Some(Value::Object(function)) = call.get_mut("function") {
            put_first(function, &["arguments", "name"]);
        }
    }
}

fn put_first(fields: &mut Map<String, Value>, names: &[&str]) {
    let mut ordered = Map::new();
    for name in names {
        ordered.extend(fields.shift_remove_entry(*name));
    }
    ordered.append(fields);
    *fields = ordered;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_see_known_fields_only_and_both_names_of_reasoning() {
        let known = |mut message: Value| {
            keep_known_fields(&mut message);
            message
        };
        let all = |role: &str| {
            json!({"role": role, "content": "a", "name": "n", "tool_calls": [], "tools": [],
                "tool_call_id": "c", "reasoning_content": "b", "prefix": true})
        };
        let seen = |role: &str, more: &[&str]| {
            let fields = ["role", "content", "name"].iter().chain(more);
            let mut seen = all(role);
            seen["reasoning"] = "b".into();
            let fields = fields.map(|name| ((*name).to_owned(), seen[*name].clone()));
            Value::Object(fields.collect())
        };
        for (role, more) in [
            ("user", &[][..]),
            ("system", &[]),
            ("developer", &["tools"]),
            ("tool", &["tool_call_id"]),
            (
                "assistant",
                &["tool_calls", "reasoning_content", "reasoning"],
            ),
        ] {
            assert_eq!(known(all(role)), seen(role, more), "{role}");
        }
        let both = json!({"role": "assistant", "reasoning_content": "x", "reasoning": "y"});
        let expected = json!({"role": "assistant", "reasoning_content": "y", "reasoning": "y"});
        assert_eq!(known(both), expected);
    }

    #[test]
    fn calls_of_a_chat_are_in_the_order_of_the_types_fields() {
        let call = r#"{"type":"function","index":0,"id":"c","function":{"name":"f","x":1,"arguments":"{}"}}"#;
        let mut message = json!({"role": "assistant", "tool_calls": [null]});
        message["tool_calls"][0] = serde_json::from_str(call).unwrap();
        order_calls(&mut message);
        let ordered = r#"{"id":"c","function":{"arguments":"{}","name":"f","x":1},"type":"function","index":0}"#;
        assert_eq!(message["tool_calls"][0].to_string(), ordered);
    }
}
