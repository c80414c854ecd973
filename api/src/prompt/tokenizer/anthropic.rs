//! Converts the messages of `/v1/messages` to OpenAI's, as vLLM does before it renders them.
//!
//! System text is joined without a separator and loses Claude Code's attribution. Tool uses,
//! results and reasoning, which are parts of messages there, become fields and messages. System
//! messages between the turns stay in their place.

use serde_json::{Map, Value, json};

use super::super::attribution::{is_attribution, without_attribution};
use super::parts::{UnclearBodyError, array, message};

/// Takes `system` and `messages` from a body, and returns them as messages.
pub(super) fn messages(body: &mut Map<String, Value>) -> Result<Vec<Value>, UnclearBodyError> {
    let mut messages = Vec::new();
    if let Some(content) = body.remove("system") {
        push_system(&mut messages, &content)?;
    }
    for turn in array(body.remove("messages"))? {
        let role = turn.get("role").and_then(Value::as_str);
        match (role.ok_or(UnclearBodyError)?, turn.get("content")) {
            ("system", Some(content)) => push_system(&mut messages, content)?,
            (role, Some(Value::Array(parts))) => push_turn(&mut messages, role, parts)?,
            (_, _) => messages.push(message(turn)?),
        }
    }
    Ok(messages)
}

/// Returns the reasoning effort that `thinking` and `output_config` of a body mean, if any.
pub(super) fn effort(body: &Map<String, Value>) -> Option<Value> {
    let is_off = body.get("thinking").and_then(|it| it.get("type")) == Some(&json!("disabled"));
    if is_off {
        return Some(json!("none"));
    }
    body.get("output_config")?.get("effort").cloned()
}

/// Adds a system message, unless it has no text.
fn push_system(messages: &mut Vec<Value>, content: &Value) -> Result<(), UnclearBodyError> {
    let text = match content {
        Value::Null => return Ok(()),
        Value::String(text) => without_attribution(text).to_owned(),
        Value::Array(parts) => {
            let texts = parts.iter().filter_map(|part| match part {
                Value::String(text) => Some(text.as_str()),
                part => part.get("text").and_then(Value::as_str),
            });
            texts.filter(|text| !is_attribution(text)).collect()
        }
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => return Err(UnclearBodyError),
    };
    if !text.is_empty() {
        messages.push(json!({"role": "system", "content": text}));
    }
    Ok(())
}

/// Adds the messages of a turn: results of tools first, then what its role says.
fn push_turn(
    messages: &mut Vec<Value>,
    role: &str,
    parts: &[Value],
) -> Result<(), UnclearBodyError> {
    let (mut content, mut calls, mut reasoning) = (Vec::new(), Vec::new(), None);
    for part in parts {
        match part.get("type").and_then(Value::as_str) {
            Some("tool_use") => calls.push(tool_call(part)),
            Some("tool_result") => messages.push(message(json!({
                "role": "tool",
                "tool_call_id": part.get("tool_use_id"),
                "content": part.get("content").cloned().unwrap_or_default(),
            }))?),
            Some("thinking") => {
                let thought = part.get("thinking").and_then(Value::as_str);
                let all: &mut String = reasoning.get_or_insert_default();
                all.push_str(thought.unwrap_or_default());
            }
            Some("redacted_thinking") => {}
            _ => content.push(part.clone()),
        }
    }
    if content.is_empty() && calls.is_empty() && reasoning.is_none() {
        return Ok(());
    }
    let mut whole = json!({"role": role});
    if let Some(reasoning) = reasoning {
        // Templates know it by one of these names.
        whole["reasoning_content"] = reasoning.clone().into();
        whole["reasoning"] = reasoning.into();
    }
    if !content.is_empty() {
        whole["content"] = content.into();
    }
    if !calls.is_empty() {
        whole["tool_calls"] = calls.into();
    }
    messages.push(message(whole)?);
    Ok(())
}

fn tool_call(part: &Value) -> Value {
    let input = part.get("input").filter(|input| !input.is_null());
    let arguments = input.map_or_else(|| "{}".to_owned(), Value::to_string);
    json!({
        "id": part.get("id"),
        "type": "function",
        "function": {"name": part.get("name"), "arguments": arguments},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(body: Value) -> Value {
        let Value::Object(mut body) = body else {
            panic!("{body} is no object")
        };
        messages(&mut body).unwrap().into()
    }

    const HEADER: &str = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;";

    #[test]
    fn system_text_is_joined_without_attribution() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let system = json!([text(HEADER), text("You are "), text("kind.")]);
        let expected = json!([{"role": "system", "content": "You are kind."}]);
        let alone = |system: Value| converted(json!({"system": system, "messages": []}));
        assert_eq!(alone(system.clone()), expected);
        assert_eq!(alone(json!(format!("{HEADER}\nYou are kind."))), expected);
        assert_eq!(alone(json!("You are kind.")), expected);
        for empty in [json!(HEADER), json!([text(HEADER)]), json!([]), json!("")] {
            assert_eq!(alone(empty), json!([]));
        }
        let within = json!({"messages": [
            {"role": "user", "content": HEADER},
            {"role": "system", "content": HEADER},
            {"role": "system", "content": system},
        ]});
        assert_eq!(
            converted(within),
            json!([{"role": "user", "content": HEADER}, expected[0]])
        );
    }

    #[test]
    fn reasoning_becomes_a_field_of_its_message() {
        let body = json!({"messages": [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "b", "signature": "s"},
            {"type": "tool_use", "id": "t", "name": "f"},
        ]}]});
        assert_eq!(
            converted(body),
            json!([{"role": "assistant", "reasoning_content": "ab", "reasoning": "ab",
                "tool_calls": [{"id": "t", "type": "function",
                    "function": {"name": "f", "arguments": "{}"}}]}])
        );
    }
}
