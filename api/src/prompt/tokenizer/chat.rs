//! Converts the prompt of a body to the form that templates and engines accept: OpenAI chat
//! messages, plain text or token ids.
//!
//! The steps follow vLLM (`vllm/entrypoints/chat_utils.py`, 0.11 and later; reimplemented, not
//! copied): text parts become text, arguments of tool calls become objects, system text of the
//! other APIs becomes a system message. Images and other media become a marker at their place in
//! the text, with a hash of their identifier. The router does not know how many tokens an engine
//! uses for an image, but it can distinguish two images.

use serde_json::{Map, Value, json};

use super::super::read::{PromptField, is_anthropic};
use super::anthropic;
use super::parts::{UnclearBodyError, array, message, text_part};
use super::sglang::{self, ChatRenderer};
use super::{responses, vllm};

/// Prompt of a body, as input for a tokenizer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TokenizerInput {
    /// A conversation.
    Chat(Box<Chat>),
    /// One text, or the first text of a batch.
    Plain {
        text: String,
        add_special_tokens: bool,
    },
    /// Token ids, or the first prompt of a batch of token ids.
    Ids(Vec<u32>),
    /// The body has no prompt.
    Nothing,
}

/// A conversation and its rendering options.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chat {
    /// Messages in OpenAI's format, with markers in place of media.
    pub(super) messages: Vec<Value>,
    /// Tools in OpenAI's format; `None` if there are none.
    pub(super) tools: Option<Value>,
    pub(super) documents: Option<Value>,
    /// Further variables for the template.
    pub(super) kwargs: Map<String, Value>,
    pub(super) add_generation_prompt: bool,
    pub(super) continue_final_message: bool,
    pub(super) add_special_tokens: bool,
    pub(super) renderer: ChatRenderer,
}

/// Reads the prompt from the body of a request to `path`, for an engine like `renderer`.
pub(super) fn read(
    path: &str,
    body: &[u8],
    renderer: ChatRenderer,
) -> Result<TokenizerInput, UnclearBodyError> {
    let mut body: Map<String, Value> =
        serde_json::from_slice(body).map_err(|_| UnclearBodyError)?;
    let surface = PromptField::of(path);
    match surface {
        PromptField::Chat if is_anthropic(path) => {
            let mut messages = anthropic::messages(&mut body)?;
            if renderer == ChatRenderer::Vllm {
                messages.iter_mut().for_each(vllm::order_calls);
            }
            let effort = match renderer {
                ChatRenderer::Vllm => anthropic::effort(&body),
                ChatRenderer::Sglang => {
                    sglang::set_thinking(&mut body);
                    None
                }
            };
            chat(messages, effort, body, (true, renderer))
        }
        PromptField::Chat => openai(body, (true, renderer)),
        PromptField::Responses => {
            let messages = responses::messages(&mut body, renderer)?;
            let effort = body.get("reasoning").and_then(|it| it.get("effort"));
            chat(messages, effort.cloned(), body, (true, renderer))
        }
        PromptField::Completions => plain(body.remove("prompt"), &body),
        PromptField::Pooling => {
            let text = ["prompt", "input", "query", "queries", "text_1", "data_1"]
                .iter()
                .find_map(|field| body.remove(*field).filter(|value| !value.is_null()));
            match text {
                Some(text) => plain(Some(text), &body),
                None if body.contains_key("messages") => {
                    openai(body, (path == "/tokenize", renderer))
                }
                None => Ok(TokenizerInput::Nothing),
            }
        }
        PromptField::Other => Ok(TokenizerInput::Nothing),
    }
}

fn flag(body: &Map<String, Value>, name: &str, default: bool) -> bool {
    body.get(name).and_then(Value::as_bool).unwrap_or(default)
}

fn plain(
    prompt: Option<Value>,
    body: &Map<String, Value>,
) -> Result<TokenizerInput, UnclearBodyError> {
    let first = match prompt {
        Some(Value::Array(items)) if items.iter().all(Value::is_number) => {
            let ids = items.iter().map(token_id).collect::<Option<Vec<u32>>>();
            return ids.map(TokenizerInput::Ids).ok_or(UnclearBodyError);
        }
        Some(Value::Array(items)) => items.into_iter().next(),
        other => other,
    };
    match first {
        Some(Value::String(text)) => Ok(TokenizerInput::Plain {
            text,
            add_special_tokens: flag(body, "add_special_tokens", true),
        }),
        Some(Value::Array(ids)) => {
            let ids = ids.iter().map(token_id).collect::<Option<Vec<u32>>>();
            ids.map(TokenizerInput::Ids).ok_or(UnclearBodyError)
        }
        None | Some(Value::Null | Value::Object(_)) => Ok(TokenizerInput::Nothing),
        Some(_) => Err(UnclearBodyError),
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn openai(
    mut body: Map<String, Value>,
    how: (bool, ChatRenderer),
) -> Result<TokenizerInput, UnclearBodyError> {
    let messages = array(body.remove("messages"))?;
    let messages = messages.into_iter().map(message);
    let mut messages = messages.collect::<Result<Vec<Value>, _>>()?;
    if how.1 == ChatRenderer::Vllm {
        messages.iter_mut().for_each(vllm::order_calls);
    }
    let effort = body.remove("reasoning_effort");
    chat(messages, effort, body, how)
}

/// Combines `messages` with the other fields of the body of a chat. `effort` is the requested
/// reasoning effort, if any.
fn chat(
    mut messages: Vec<Value>,
    effort: Option<Value>,
    mut body: Map<String, Value>,
    (is_reply_wanted, renderer): (bool, ChatRenderer),
) -> Result<TokenizerInput, UnclearBodyError> {
    let mut kwargs = match body.remove("chat_template_kwargs") {
        Some(Value::Object(kwargs)) => kwargs,
        None | Some(Value::Null) => Map::new(),
        Some(_) => return Err(UnclearBodyError),
    };
    match (effort, renderer) {
        (Some(Value::String(effort)), ChatRenderer::Sglang) => {
            sglang::set_effort(&mut kwargs, effort);
        }
        (Some(Value::String(effort)), ChatRenderer::Vllm) => {
            // Some templates think only if told so, others unless told otherwise.
            let is_thinking = effort != "none";
            kwargs
                .entry("enable_thinking")
                .or_insert(is_thinking.into());
            kwargs.insert("reasoning_effort".to_owned(), effort.into());
        }
        (_, ChatRenderer::Sglang | ChatRenderer::Vllm) => {}
    }
    let is_list = |value: &Value| value.as_array().is_some_and(|items| !items.is_empty());
    let mut offered = match body.remove("tools").filter(is_list) {
        Some(listed) => tools(listed, renderer)?,
        None => Vec::new(),
    };
    let add_generation_prompt = match renderer {
        ChatRenderer::Vllm => {
            messages.iter_mut().for_each(vllm::keep_known_fields);
            flag(&body, "add_generation_prompt", is_reply_wanted)
        }
        ChatRenderer::Sglang => {
            offered = sglang::chosen(offered, body.get("tool_choice"));
            is_reply_wanted
        }
    };
    Ok(TokenizerInput::Chat(Box::new(Chat {
        messages,
        tools: (!offered.is_empty()).then(|| offered.into()),
        documents: body.remove("documents").filter(is_list),
        kwargs,
        add_generation_prompt,
        continue_final_message: flag(&body, "continue_final_message", false),
        add_special_tokens: flag(&body, "add_special_tokens", false),
        renderer,
    })))
}

/// Converts tools as vLLM serializes them: known fields only, in a fixed order, absent ones as
/// `null`. `strict` and `defer_loading` are omitted if absent.
fn tools(tools: Value, renderer: ChatRenderer) -> Result<Vec<Value>, UnclearBodyError> {
    let tool = |tool: Value| {
        let Value::Object(mut tool) = tool else {
            return Err(UnclearBodyError);
        };
        let deferred = tool
            .get("defer_loading")
            .filter(|it| !it.is_null())
            .cloned();
        let function = match tool.remove("function") {
            Some(function) => function,
            // `/v1/messages` and `/v1/responses` do not nest the function in the tool.
            None => {
                if let Some(schema) = tool.shift_remove("input_schema") {
                    tool.insert("parameters".to_owned(), schema);
                }
                tool.retain(|field, _| !matches!(field.as_str(), "type" | "cache_control"));
                Value::Object(std::mem::take(&mut tool))
            }
        };
        let Value::Object(mut function) = function else {
            return Err(UnclearBodyError);
        };
        if let Some(deferred) = &deferred {
            let own = function.entry("defer_loading").or_insert(Value::Null);
            if own.is_null() {
                *own = deferred.clone();
            }
        }
        if renderer == ChatRenderer::Sglang {
            return Ok(sglang::tool(function, deferred.as_ref()));
        }
        let mut ordered = Map::new();
        for field in ["name", "description", "parameters"] {
            let value = function.shift_remove(field).unwrap_or(Value::Null);
            ordered.insert(field.to_owned(), value);
        }
        for field in ["strict", "defer_loading"] {
            let value = function.get(field).filter(|value| !value.is_null());
            ordered.extend(value.map(|value| (field.to_owned(), value.clone())));
        }
        let mut tool = json!({"type": "function", "function": ordered});
        if let Some(deferred) = deferred {
            tool["defer_loading"] = deferred;
        }
        Ok(tool)
    };
    array(Some(tools))?.into_iter().map(tool).collect()
}

impl Chat {
    /// Returns the messages for a template. With `has_parts`, their contents are lists of parts.
    /// Otherwise, they are texts, with what the engine puts between parts.
    pub(super) fn for_template(&self, has_parts: bool) -> Vec<Value> {
        let convert = |message: &Value| {
            let mut message = message.as_object().cloned().unwrap_or_default();
            let is_tool = message.get("role").is_some_and(|role| role == "tool");
            let content = message.get("content");
            let is_kept = match content {
                Some(Value::String(_)) => !self.renderer.wraps_texts(),
                _ => false,
            };
            let content = if has_parts && !is_tool && !is_kept {
                as_parts(content)
            } else {
                Value::String(as_text(content, self.renderer))
            };
            message.insert("content".to_owned(), content);
            parse_arguments(&mut message);
            Value::Object(message)
        };
        self.messages.iter().map(convert).collect()
    }

    /// Takes the final message out if it is to be continued and the engine tokenizes its text alone,
    /// after the others. Returns the text.
    pub(super) fn take_continued(&mut self) -> Option<String> {
        if self.renderer != ChatRenderer::Sglang || !self.continue_final_message {
            return None;
        }
        self.continue_final_message = false;
        let last = self.messages.pop_if(|it| sglang::is_assistants(it))?;
        Some(as_text(last.get("content"), self.renderer))
    }

    /// Returns the messages as frames, for use without a template. Each frame is tokenized
    /// separately, so that its tokens stay the same as the conversation grows.
    pub(super) fn framed(&self) -> Vec<String> {
        let tools = self.tools.iter();
        let tools = tools.map(|tools| format!("<|tools|>\n{tools}\n"));
        let messages = self.messages.iter().map(|message| {
            let role = message["role"].as_str().unwrap_or_default();
            let content = as_text(message.get("content"), self.renderer);
            let calls = message.get("tool_calls").map(ToString::to_string);
            format!("<|{role}|>\n{content}{}\n", calls.unwrap_or_default())
        });
        tools.chain(messages).collect()
    }
}

fn as_parts(content: Option<&Value>) -> Value {
    match content {
        Some(Value::String(text)) => Value::Array(vec![text_part(text)]),
        Some(parts @ Value::Array(_)) => parts.clone(),
        _ => Value::Array(Vec::new()),
    }
}

/// Returns the text of a message's content, if any, with what `renderer` puts between parts.
pub(super) fn as_text(content: Option<&Value>, renderer: ChatRenderer) -> String {
    match content {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            texts.collect::<Vec<_>>().join(renderer.between_parts())
        }
        _ => String::new(),
    }
}

/// Parses the arguments of tool calls, which arrive as JSON strings, into objects for templates.
fn parse_arguments(message: &mut Map<String, Value>) {
    if message.get("role").is_none_or(|role| role != "assistant") {
        return;
    }
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else {
        return;
    };
    if calls.is_empty() {
        message.shift_remove("tool_calls");
        return;
    }
    for call in calls {
        let Some(Value::Object(function)) = call.get_mut("function") else {
            continue;
        };
        let parsed = match function.get("arguments") {
            Some(Value::String(text)) => serde_json::from_str(text).ok(),
            Some(whole @ (Value::Object(_) | Value::Array(_))) => Some(whole.clone()),
            _ => None,
        };
        let arguments = parsed.unwrap_or_else(|| json!({}));
        function.insert("arguments".to_owned(), arguments);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, body: &Value) -> Value {
        match read(path, body.to_string().as_bytes(), ChatRenderer::Vllm).unwrap() {
            TokenizerInput::Chat(chat) => chat.messages.into(),
            other => panic!("{other:?} is no chat"),
        }
    }

    #[test]
    fn the_three_apis_give_equal_messages() {
        let expected = json!([
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function",
                "function": {"name": "look", "arguments": "{\"at\":\"home\"}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]);
        let openai = json!({"model": "m", "messages": expected});
        assert_eq!(messages("/v1/chat/completions", &openai), expected);
        let anthropic = json!({"model": "m", "system": "be brief", "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "home"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
        ]});
        assert_eq!(messages("/v1/messages", &anthropic), expected);
        let responses = json!({"model": "m", "instructions": "be brief", "input": [
            {"role": "user", "content": "weather?"},
            {"type": "function_call", "call_id": "c1", "name": "look",
                "arguments": "{\"at\":\"home\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]});
        assert_eq!(messages("/v1/responses", &responses), expected);
    }

    #[test]
    fn media_are_distinguished_by_their_source() {
        let one = |part: Value| {
            let body = json!({"messages": [{"role": "user", "content": [part]}]});
            messages("/v1/chat/completions", &body)[0]["content"][0]["text"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        let image = |url: &str, detail: &str| json!({"type": "image_url", "image_url": {"url": url, "detail": detail}});
        let data = one(image("data:image/png;base64,AAAA", "auto"));
        assert!(data.starts_with("<|image:"), "{data}");
        assert_eq!(data, one(image("data:image/png;base64,AAAA", "high")));
        assert_ne!(data, one(image("data:image/png;base64,AAAB", "auto")));
        let named = |url: &str, uuid: &str| {
            let mut part = image(url, "auto");
            part["uuid"] = uuid.into();
            one(part)
        };
        assert_ne!(named("http://x/a", "1"), named("http://x/a", "2"));
        assert_eq!(named("http://x/a", "1"), named("http://x/b", "1"));
        assert_ne!(named("http://x/a", "1"), one(image("http://x/a", "auto")));
        let input = json!({"type": "input_image", "image_url": "data:image/png;base64,AAAA"});
        assert_eq!(data, one(input));
        let sound = json!({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}});
        assert!(one(sound).starts_with("<|audio:"));
    }

    #[test]
    fn arguments_become_objects_and_text_parts_lines() {
        let body = json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"function": {"name": "f", "arguments": "{\"x\": 1}"}},
                {"function": {"name": "g", "arguments": "broken"}},
                {"function": {"name": "h"}}]},
            {"role": "assistant", "content": "x", "tool_calls": []},
        ]});
        let wanted = read(
            "/v1/chat/completions",
            body.to_string().as_bytes(),
            ChatRenderer::Vllm,
        )
        .unwrap();
        let TokenizerInput::Chat(chat) = wanted else {
            panic!()
        };
        let arguments =
            |name: &str, value: Value| json!({"function": {"name": name, "arguments": value}});
        let calls = [("f", json!({"x": 1})), ("g", json!({})), ("h", json!({}))];
        let calls = calls.map(|(name, value)| arguments(name, value));
        assert_eq!(
            Value::from(chat.for_template(false)),
            json!([
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "tool_calls": calls, "content": ""},
                {"role": "assistant", "content": "x"},
            ])
        );
        assert_eq!(
            chat.for_template(true)[0]["content"],
            json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
        );
    }

    #[test]
    fn tools_keep_only_fields_known_to_engines() {
        let tool = |tool: Value| {
            let body = json!({"messages": [], "tools": [tool]}).to_string();
            match read("/v1/chat/completions", body.as_bytes(), ChatRenderer::Vllm).unwrap() {
                TokenizerInput::Chat(chat) => chat.tools.unwrap()[0].to_string(),
                other => panic!("{other:?} is no chat"),
            }
        };
        let plain = json!({"parameters": {}, "name": "f", "x_vendor": 1, "strict": null});
        assert_eq!(
            tool(json!({"type": "function", "function": plain, "x": 1})),
            r#"{"type":"function","function":{"name":"f","description":null,"parameters":{}}}"#
        );
        let strict = json!({"strict": true, "name": "f", "defer_loading": null});
        assert_eq!(
            tool(json!({"function": strict, "defer_loading": true})),
            r#"{"type":"function","function":{"name":"f","description":null,"parameters":null,"strict":true,"defer_loading":true},"defer_loading":true}"#
        );
    }

    #[test]
    fn malformed_chats_are_unclear_and_never_panic() {
        for body in [
            json!([]),
            json!({"messages": 3}),
            json!({"messages": ["x"]}),
            json!({"messages": [{"role": 1}]}),
            json!({"messages": [], "chat_template_kwargs": 1}),
            json!({"messages": [], "tools": [1]}),
            json!({"messages": [], "tools": [{"function": 1}]}),
        ] {
            let read = read(
                "/v1/chat/completions",
                body.to_string().as_bytes(),
                ChatRenderer::Vllm,
            );
            assert_eq!(read, Err(UnclearBodyError), "{body}");
        }
    }

    #[test]
    fn prompts_are_text_or_ids_or_the_first_of_a_batch() {
        let read = |prompt: Value| {
            let body = json!({"prompt": prompt}).to_string();
            read("/v1/completions", body.as_bytes(), ChatRenderer::Vllm).unwrap()
        };
        let text = |text: &str| TokenizerInput::Plain {
            text: text.to_owned(),
            add_special_tokens: true,
        };
        assert_eq!(read(json!("a")), text("a"));
        assert_eq!(read(json!(["a", "b"])), text("a"));
        assert_eq!(read(json!([1, 2])), TokenizerInput::Ids(vec![1, 2]));
        assert_eq!(read(json!([[1], [2]])), TokenizerInput::Ids(vec![1]));
        assert_eq!(read(json!(null)), TokenizerInput::Nothing);
    }
}
