//! Converts the items of `/v1/responses` to chat messages, as vLLM does before it renders them
//! (`entrypoints/openai/responses/utils.py` of 0.32; reimplemented, not copied).
//!
//! A turn of the assistant is several items there: reasoning, text and calls. They become one
//! message, for vLLM; SGLang leaves each call a message of its own.

use serde_json::{Map, Value, json};

use super::parts::{UnclearBodyError, message};
use super::sglang::ChatRenderer;

/// Takes `instructions` and `input` from a body, and returns them as messages.
pub(super) fn messages(
    body: &mut Map<String, Value>,
    renderer: ChatRenderer,
) -> Result<Vec<Value>, UnclearBodyError> {
    let mut messages = Vec::new();
    match body.remove("instructions") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if text.is_empty() && renderer == ChatRenderer::Vllm => {}
        Some(text) => messages.push(message(json!({"role": "system", "content": text}))?),
    }
    let items = match body.remove("input") {
        Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
        Some(Value::Array(items)) => items,
        _ => return Err(UnclearBodyError),
    };
    if renderer == ChatRenderer::Vllm {
        let is_continued = items.last().is_some_and(is_unfinished);
        body.insert("continue_final_message".to_owned(), is_continued.into());
        body.insert("add_generation_prompt".to_owned(), true.into());
        show_functions(body);
        // Special tokens come from the template and, unlike in chats, from the tokenizer as well.
        body.insert("add_special_tokens".to_owned(), true.into());
    }
    for item in items {
        let kind = item
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or("message");
        let is_assistants = item.get("role").is_some_and(|role| role == "assistant");
        match (kind, renderer) {
            ("function_call" | "custom_tool_call", ChatRenderer::Vllm) => {
                add_call(&mut messages, call(&item, true));
            }
            ("function_call" | "custom_tool_call", ChatRenderer::Sglang) => {
                messages.push(json!({"role": "assistant", "tool_calls": [call(&item, false)]}));
            }
            ("function_call_output" | "custom_tool_call_output", _) => {
                messages.push(message(json!({
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output").cloned().unwrap_or_default(),
                }))?);
            }
            ("reasoning", ChatRenderer::Vllm) => {
                let texts = ["content", "summary"].iter().filter_map(|it| item.get(*it));
                let text = texts.filter_map(first_text).next().unwrap_or_default();
                add_text(&mut messages, "reasoning", text);
            }
            // Templates drop the reasoning of earlier responses.
            ("reasoning", ChatRenderer::Sglang) => {}
            (_, ChatRenderer::Vllm) if is_assistants => {
                match item.get("content").and_then(first_text) {
                    Some(text) => add_text(&mut messages, "content", text),
                    None => messages.push(message(item)?),
                }
            }
            (_, _) => messages.push(message(item)?),
        }
    }
    Ok(messages)
}

/// Whether the engine continues the text of an item, which is the last one.
fn is_unfinished(item: &Value) -> bool {
    let is_text = matches!(item["type"].as_str(), None | Some("message" | "reasoning"));
    let status = item["status"].as_str();
    is_text && matches!(status, Some("in_progress" | "incomplete"))
}

/// Returns a content that is a text, or the text of its first part.
fn first_text(content: &Value) -> Option<&str> {
    content
        .as_str()
        .or_else(|| content.get(0)?.get("text")?.as_str())
}

/// Replaces the tools with the functions that vLLM shows the model in their stead
/// (`get_function_tools` in `tool_parsers/utils.py`). Tools that run elsewhere are not shown.
fn show_functions(body: &mut Map<String, Value>) {
    if let Some(Value::Array(tools)) = body.get_mut("tools") {
        let shown = std::mem::take(tools).into_iter().flat_map(functions);
        *tools = shown.collect();
    }
}

/// Returns the functions that stand for a tool.
fn functions(tool: Value) -> Vec<Value> {
    let function = |function: Value| json!({"type": "function", "function": function});
    match tool["type"].as_str() {
        None | Some("function") => vec![function(tool)],
        Some("custom") => vec![function(json!({
            "name": tool["name"],
            "description": tool["description"],
            "parameters": {
                "type": "object",
                "properties": {"input": {
                    "type": "string",
                    "description": "The freeform text payload for this tool.",
                }},
                "required": ["input"],
                "additionalProperties": false,
            },
        }))],
        Some("namespace") => {
            let members = tool["tools"].as_array().into_iter().flatten();
            let members = members.filter(|member| member["type"] == "function");
            let named = members.cloned().map(|mut member| {
                member["name"] = in_namespace(&tool["name"], &member["name"]);
                function(member)
            });
            named.collect()
        }
        Some(_) => Vec::new(),
    }
}

/// Returns the name under which the model knows a function of a namespace.
fn in_namespace(namespace: &Value, name: &Value) -> Value {
    let [namespace, name] = [namespace, name].map(|it| it.as_str().unwrap_or_default());
    format!("{namespace}__{name}").into()
}

/// Returns a call as in a chat, with the namespace before its name if `is_flat`.
fn call(item: &Value, is_flat: bool) -> Value {
    let arguments = match item.get("type").and_then(Value::as_str) {
        // Its one argument is a text.
        Some("custom_tool_call") => Some(
            json!({"input": item["input"].as_str().unwrap_or_default()})
                .to_string()
                .into(),
        ),
        _ => item.get("arguments").cloned(),
    };
    let is_named = |namespace: &&Value| namespace.as_str().is_some_and(|it| !it.is_empty());
    let namespace = item.get("namespace").filter(is_named);
    let name = match namespace.filter(|_| is_flat && item["type"] == "function_call") {
        Some(namespace) => in_namespace(namespace, &item["name"]),
        None => item["name"].clone(),
    };
    json!({
        "id": item.get("call_id"),
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    })
}

/// Returns the last message, if it is the assistant's.
fn assistants_last(messages: &mut [Value]) -> Option<&mut Map<String, Value>> {
    let last = messages.last_mut()?.as_object_mut()?;
    (last.get("role")? == "assistant").then_some(last)
}

/// Adds a call to the assistant's turn.
fn add_call(messages: &mut Vec<Value>, call: Value) {
    let last = assistants_last(messages).and_then(|last| {
        let calls = last.entry("tool_calls").or_insert_with(|| json!([]));
        calls.as_array_mut()
    });
    match last {
        Some(calls) => calls.push(call),
        None => messages.push(json!({"role": "assistant", "tool_calls": [call]})),
    }
}

/// Adds a text to the assistant's turn, or begins another if the turn has such a text already.
fn add_text(messages: &mut Vec<Value>, field: &str, text: &str) {
    match assistants_last(messages).filter(|last| !last.contains_key(field)) {
        Some(last) => {
            last.insert(field.to_owned(), text.into());
        }
        None => messages.push(json!({"role": "assistant", field: text})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(items: &Value, renderer: ChatRenderer) -> (Value, Map<String, Value>) {
        let mut body = json!({"input": items}).as_object().unwrap().clone();
        let messages = messages(&mut body, renderer).unwrap();
        (messages.into(), body)
    }

    #[test]
    fn items_of_a_turn_become_one_message_for_vllm() {
        let text = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
        let items = json!([
            {"role": "user", "content": text("input_text", "hi")},
            {"type": "reasoning", "summary": text("summary_text", "s"),
                "content": text("reasoning_text", "hm")},
            {"type": "message", "role": "assistant", "content": text("output_text", "well")},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "x"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": "so"},
            {"role": "assistant", "content": "be it", "status": "incomplete"},
        ]);
        let call = |id: &str, name: &str, arguments: &str| {
            json!({"id": id, "function": {"name": name, "arguments": arguments},
                "type": "function"})
        };
        let calls = [call("1", "f", "{}"), call("2", "g", r#"{"input":"x"}"#)];
        let user = json!({"role": "user", "content": text("text", "hi")});
        let result = json!({"role": "tool", "tool_call_id": "1", "content": "a"});
        let (messages, body) = read(&items, ChatRenderer::Vllm);
        assert_eq!(
            messages,
            json!([
                user,
                {"role": "assistant", "reasoning": "hm", "content": "well", "tool_calls": calls},
                result,
                {"role": "assistant", "reasoning": "", "content": "so"},
                {"role": "assistant", "content": "be it"},
            ])
        );
        assert_eq!(body["continue_final_message"], true);
        let (messages, body) = read(&items, ChatRenderer::Sglang);
        assert_eq!(messages.as_array().unwrap().len(), 7);
        assert_eq!(
            messages[2],
            json!({"role": "assistant", "tool_calls": [calls[0]]})
        );
        assert!(body.is_empty());
    }

    #[test]
    fn tools_become_the_functions_that_vllm_shows() {
        let body = json!({
            "input": [{"type": "function_call", "call_id": "1", "name": "g", "namespace": "ns"}],
            "tools": [
                {"type": "web_search"},
                {"type": "function", "name": "f", "defer_loading": true},
                {"type": "custom", "name": "c", "format": {"type": "text"}},
                {"type": "namespace", "name": "ns", "description": "n", "tools": [
                    {"type": "function", "name": "g"}, {"type": "custom", "name": "h"}]},
            ],
        });
        let read = |renderer| {
            let mut body = body.as_object().unwrap().clone();
            let messages = messages(&mut body, renderer).unwrap();
            let name = messages[0]["tool_calls"][0]["function"]["name"].clone();
            (name, body["tools"].as_array().unwrap().clone())
        };
        let (called, shown) = read(ChatRenderer::Vllm);
        assert_eq!(called, "ns__g");
        let names: Vec<_> = shown.iter().map(|it| &it["function"]["name"]).collect();
        assert_eq!(names, ["f", "c", "ns__g"]);
        assert_eq!(
            shown[0].get("defer_loading"),
            None,
            "it stays in the function"
        );
        assert_eq!(
            shown[1]["function"]["parameters"]["required"],
            json!(["input"])
        );
        let (called, shown) = read(ChatRenderer::Sglang);
        assert_eq!((called, shown.len()), (json!("g"), 4));
    }

    #[test]
    fn malformed_tools_never_panic() {
        for tool in [
            json!(1),
            json!({"type": "namespace", "tools": [1, {"type": "function"}]}),
        ] {
            let body = json!({"input": "hi", "tools": [tool]});
            let mut body = body.as_object().unwrap().clone();
            messages(&mut body, ChatRenderer::Vllm).unwrap();
        }
    }

    #[test]
    fn empty_instructions_are_no_message_for_vllm() {
        for (instructions, renderer, count) in [
            (json!(""), ChatRenderer::Vllm, 1),
            (json!(null), ChatRenderer::Vllm, 1),
            (json!("be brief"), ChatRenderer::Vllm, 2),
            (json!(""), ChatRenderer::Sglang, 2),
        ] {
            let body = json!({"instructions": instructions, "input": "hi"});
            let mut body = body.as_object().unwrap().clone();
            let messages = messages(&mut body, renderer).unwrap();
            assert_eq!(messages.len(), count, "{instructions} {renderer:?}");
        }
    }

    #[test]
    fn a_finished_turn_is_not_continued() {
        for last in [
            json!({"role": "assistant", "content": "so", "status": "completed"}),
            json!({"type": "function_call", "name": "f", "status": "incomplete"}),
            json!({"role": "user", "content": "so"}),
        ] {
            let (_, body) = read(&json!([last]), ChatRenderer::Vllm);
            assert_eq!(body["continue_final_message"], false, "{last}");
        }
    }
}
