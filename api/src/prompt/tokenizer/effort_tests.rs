//! Tests that the fields by which the APIs limit reasoning reach the chat template as in vLLM.

use serde_json::{Value, json};

use super::chat::{self, TokenizerInput};
use super::sglang::ChatRenderer;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// Returns the template's variables for a body with these `fields`.
fn variables(path: &str, fields: &Value) -> Value {
    let mut body = json!({"messages": [], "input": []});
    let fields = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    let body = body.to_string();
    match chat::read(path, body.as_bytes(), ChatRenderer::Vllm).unwrap() {
        TokenizerInput::Chat(chat) => Value::Object(chat.kwargs),
        other => panic!("{other:?} is no chat"),
    }
}

#[track_caller]
fn check(path: &str, fields: &Value, expected: Option<(&str, bool)>) {
    let expected = expected.map_or_else(
        || json!({}),
        |(effort, thinks)| json!({"enable_thinking": thinks, "reasoning_effort": effort}),
    );
    assert_eq!(variables(path, fields), expected, "{path} {fields}");
}

#[test]
fn effort_turns_thinking_on_or_off() {
    for (effort, thinks) in [("low", true), ("max", true), ("none", false)] {
        let expected = Some((effort, thinks));
        check(CHAT, &json!({"reasoning_effort": effort}), expected);
        check(
            RESPONSES,
            &json!({"reasoning": {"effort": effort}}),
            expected,
        );
        check(
            MESSAGES,
            &json!({"output_config": {"effort": effort}}),
            expected,
        );
    }
    check(CHAT, &json!({"reasoning_effort": null}), None);
    check(
        RESPONSES,
        &json!({"reasoning": null, "reasoning_effort": "low"}),
        None,
    );
    check(RESPONSES, &json!({"reasoning": {"summary": "auto"}}), None);
    check(MESSAGES, &json!({"output_config": {"format": null}}), None);
}

#[test]
fn thinking_of_the_messages_api_is_turned_off_only() {
    let thinking = |kind: &str| json!({"thinking": {"type": kind, "budget_tokens": 2000}});
    check(MESSAGES, &thinking("disabled"), Some(("none", false)));
    check(MESSAGES, &thinking("enabled"), None);
    check(MESSAGES, &json!({"thinking": null}), None);
    for (kind, expected) in [("adaptive", ("low", true)), ("disabled", ("none", false))] {
        let mut both = thinking(kind);
        both["output_config"] = json!({"effort": "low"});
        check(MESSAGES, &both, Some(expected));
    }
}

#[test]
fn effort_leaves_thinking_as_the_client_sets_it() {
    let own = json!({"enable_thinking": true, "reasoning_effort": "max"});
    let fields = json!({"reasoning_effort": "none", "chat_template_kwargs": own});
    check(CHAT, &fields, Some(("none", true)));
}
