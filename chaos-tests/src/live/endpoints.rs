//! Ways to send a chat to an engine: endpoints with their request bodies and responses.

use anyhow::Context as _;
use serde_json::{Map, Value, json};

/// Name of the function that clients of [`Way::Tools`] offer.
const FUNCTION: &str = "search";

/// The way in which the client of a chat sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/chat/completions` with tools, calls of them and their results.
    Tools,
    /// `/v1/completions` with a text.
    Text,
    /// `/v1/completions` with token ids.
    Ids,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
}

/// All ways.
pub(super) const ALL: &[Way] = &[
    Way::Chat,
    Way::Tools,
    Way::Text,
    Way::Ids,
    Way::Responses,
    Way::Messages,
];
/// Ways that let a client restrict the tokens of a response.
pub(super) const RESTRICTABLE: &[Way] = &[Way::Chat, Way::Tools, Way::Text, Way::Ids];
/// Ways without tools, whose share of a prompt's characters says little of their share of its
/// tokens.
pub(super) const PROSE: &[Way] = &[Way::Chat, Way::Text, Way::Responses, Way::Messages];
/// Ways that every engine serves. llama.cpp refuses a response's input with an assistant's text,
/// and a message of which the first token is part of a character lacks its first event.
pub(super) const COMMON: &[Way] = &[Way::Chat, Way::Tools, Way::Text];

/// What a response tells.
#[derive(Debug)]
pub(super) struct Said {
    /// Number of the prompt's tokens.
    pub(super) prompt: u64,
    /// Number of those that the engine found in its cache.
    pub(super) cached: u64,
    pub(super) text: String,
    /// Token ids of the text, of an engine that returns them on request.
    pub(super) ids: Vec<u64>,
}

impl Way {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat | Self::Tools => "/v1/chat/completions",
            Self::Text | Self::Ids => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }

    /// Returns whether the prompt is one text or one list of ids, rather than messages.
    pub(super) fn is_plain(self) -> bool {
        matches!(self, Self::Text | Self::Ids)
    }

    /// Returns a body with a chat's `messages`, the first of which is the system prompt.
    pub(super) fn chat_body(self, messages: &[Value], max_tokens: u32) -> Map<String, Value> {
        let (system, rest) = messages.split_at(messages.len().min(1));
        let body = match self {
            Self::Tools => {
                json!({ "messages": messages, "tools": [tool()], "max_tokens": max_tokens })
            }
            Self::Messages => {
                let system = system.first().map(|it| &it["content"]);
                json!({ "system": system, "messages": rest, "max_tokens": max_tokens })
            }
            Self::Responses => {
                json!({ "input": messages, "max_output_tokens": max_tokens, "store": false })
            }
            Self::Chat | Self::Text | Self::Ids => {
                json!({ "messages": messages, "max_tokens": max_tokens })
            }
        };
        object(body)
    }

    /// Adds what a body needs to have the response streamed.
    pub(super) fn stream(self, body: &mut Map<String, Value>) {
        body.insert("stream".to_owned(), json!(true));
        if matches!(self, Self::Chat | Self::Tools | Self::Text | Self::Ids) {
            let options = json!({ "include_usage": true });
            body.insert("stream_options".to_owned(), options);
        }
    }

    /// Reads a streamed response, which is a body of server-sent events.
    pub(super) fn read_stream(self, body: &str) -> anyhow::Result<Said> {
        let (mut text, mut ids, mut usage) = (String::new(), Vec::new(), Map::new());
        let lines = body.lines().filter_map(|line| line.strip_prefix("data: "));
        for data in lines.filter(|data| *data != "[DONE]") {
            let event: Value = serde_json::from_str(data).context("an event is not JSON")?;
            if event["type"] == "response.completed" {
                return self.read(&event["response"]);
            }
            for place in [&event, &event["message"]] {
                let reported = place["usage"].as_object().cloned().unwrap_or_default();
                usage.extend(reported.into_iter().filter(|(_, value)| !value.is_null()));
            }
            let choice = &event["choices"][0];
            let places = [
                &choice["delta"]["content"],
                &choice["text"],
                &event["delta"]["text"],
            ];
            text.extend(places.iter().filter_map(|place| place.as_str()));
            ids.extend(numbers(&choice["token_ids"]));
        }
        let said = self.read(&json!({ "usage": usage }))?;
        Ok(Said { text, ids, ..said })
    }

    /// Reads a response.
    pub(super) fn read(self, answer: &Value) -> anyhow::Result<Said> {
        let usage = &answer["usage"];
        // Engines omit zeros.
        let number = |at: &Value| at.as_u64().unwrap_or(0);
        let (prompt, details) = match self {
            Self::Messages => {
                let cached = number(&usage["cache_read_input_tokens"]);
                let rest = usage["input_tokens"].as_u64().context("no input_tokens")?;
                return Ok(Said {
                    prompt: rest + cached + number(&usage["cache_creation_input_tokens"]),
                    cached,
                    text: texts(&answer["content"]),
                    ids: Vec::new(),
                });
            }
            Self::Responses => (&usage["input_tokens"], &usage["input_tokens_details"]),
            _ => (&usage["prompt_tokens"], &usage["prompt_tokens_details"]),
        };
        let choice = &answer["choices"][0];
        let text = match self {
            Self::Responses => {
                let outputs = answer["output"].as_array().map_or(&[][..], Vec::as_slice);
                outputs.iter().map(|it| texts(&it["content"])).collect()
            }
            Self::Chat | Self::Tools => choice["message"]["content"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            _ => choice["text"].as_str().unwrap_or_default().to_owned(),
        };
        Ok(Said {
            prompt: prompt.as_u64().context("no number of prompt tokens")?,
            cached: number(&details["cached_tokens"]),
            text,
            ids: numbers(&choice["token_ids"]),
        })
    }
}

/// Returns an answer that calls the tool and the result of this call, as messages.
pub(super) fn call_and_result(answer: &str, query: &str, number: usize) -> [Value; 2] {
    let id = format!("call_{number}");
    let arguments = json!({ "query": query, "limit": number }).to_string();
    let call = json!({
        "id": id,
        "type": "function",
        "function": { "name": FUNCTION, "arguments": arguments },
    });
    let answer = json!({ "role": "assistant", "content": answer, "tool_calls": [call] });
    let result = json!({ "role": "tool", "tool_call_id": id, "content": query });
    [answer, result]
}

fn tool() -> Value {
    json!({
        "type": "function",
        "function": {
            "name": FUNCTION,
            "description": "Search the files for a text",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": { "type": "string", "description": "The text" },
                    "limit": { "type": "integer" },
                },
                "required": ["query"],
            },
        },
    })
}

fn numbers(list: &Value) -> Vec<u64> {
    let list = list.as_array().map_or(&[][..], Vec::as_slice);
    list.iter().filter_map(Value::as_u64).collect()
}

/// Joins the texts of content parts.
fn texts(parts: &Value) -> String {
    let parts = parts.as_array().map_or(&[][..], Vec::as_slice);
    parts.iter().filter_map(|it| it["text"].as_str()).collect()
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}
