//! Responses of `/v1/responses` and `/v1/messages`, unary or as named server-sent events, in vLLM's
//! format.

use std::fmt::Write as _;

use bytes::Bytes;
use serde_json::{Value, json};

use super::answer::{AnswerHeader, AnswerWriter};
use super::driver::LatestProgress;
use super::model::Finish;

/// API dialect whose streams consist of named server-sent events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NamedDialect {
    /// The Responses API, `/v1/responses`.
    Responses,
    /// The Messages API, `/v1/messages`.
    Messages,
}

impl NamedDialect {
    /// Returns the unary response with all the output up to `end`.
    #[must_use]
    pub(super) fn whole(self, header: &AnswerHeader, end: LatestProgress) -> Value {
        match self {
            Self::Responses => response(header, end, "completed"),
            Self::Messages => message(header, end),
        }
    }

    /// Returns the events before the first word.
    fn opening(self, header: &AnswerHeader, first: LatestProgress) -> Vec<Value> {
        match self {
            Self::Responses => {
                let begun = response(header, LatestProgress::default(), "in_progress");
                let mut item = output_item(header, "", "in_progress");
                item["content"] = json!([]);
                vec![
                    json!({ "type": "response.created", "response": begun }),
                    json!({ "type": "response.in_progress", "response": begun }),
                    json!({ "type": "response.output_item.added", "output_index": 0, "item": item }),
                    json!({
                        "type": "response.content_part.added", "item_id": item_id(header),
                        "output_index": 0, "content_index": 0, "part": part(""),
                    }),
                ]
            }
            Self::Messages => {
                let before = LatestProgress {
                    output_tokens: 0,
                    finish: None,
                    ..first
                };
                vec![
                    json!({ "type": "message_start", "message": message(header, before) }),
                    json!({
                        "type": "content_block_start", "index": 0,
                        "content_block": { "type": "text", "text": "" },
                    }),
                ]
            }
        }
    }

    /// Returns the events after the last word.
    fn closing(self, header: &AnswerHeader, end: LatestProgress) -> Vec<Value> {
        match self {
            Self::Responses => {
                let text = header.output.text(0, end.output_tokens);
                let (id, item) = (item_id(header), output_item(header, &text, "completed"));
                vec![
                    json!({
                        "type": "response.output_text.done", "item_id": id, "output_index": 0,
                        "content_index": 0, "text": text, "logprobs": [],
                    }),
                    json!({
                        "type": "response.content_part.done", "item_id": id, "output_index": 0,
                        "content_index": 0, "part": part(&text),
                    }),
                    json!({ "type": "response.output_item.done", "output_index": 0, "item": item }),
                    json!({
                        "type": "response.completed", "response": response(header, end, "completed"),
                    }),
                ]
            }
            Self::Messages => vec![
                json!({ "type": "content_block_stop", "index": 0 }),
                json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": stop_reason(end), "stop_sequence": null },
                    "usage": message_usage(header, end),
                }),
                json!({ "type": "message_stop" }),
            ],
        }
    }

    /// Writes to `out` the event for the words `text`, which need no escaping.
    fn write_words(self, header: &AnswerHeader, number: u64, text: &str, out: &mut String) {
        let _ = match self {
            Self::Responses => write!(
                out,
                "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\
                 \"sequence_number\":{number},\"item_id\":{},\"output_index\":0,\
                 \"content_index\":0,\"delta\":\"{text}\",\"logprobs\":[]}}\n\n",
                Value::from(item_id(header)),
            ),
            Self::Messages => write!(
                out,
                "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":0,\
                 \"delta\":{{\"type\":\"text_delta\",\"text\":\"{text}\"}}}}\n\n"
            ),
        };
    }
}

fn response(header: &AnswerHeader, latest: LatestProgress, status: &str) -> Value {
    let is_cut = latest.finish == Some(Finish::Length);
    let output = match latest.finish {
        Some(_) => {
            let text = header.output.text(0, latest.output_tokens);
            json!([output_item(header, &text, "completed")])
        }
        None => json!([]),
    };
    let usage = latest.finish.map(|_| {
        json!({
            "input_tokens": header.prompt_tokens,
            "input_tokens_details": { "cached_tokens": latest.cached_tokens },
            "output_tokens": latest.output_tokens,
            "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": header.prompt_tokens + latest.output_tokens,
        })
    });
    json!({
        "id": header.id, "object": "response", "created_at": header.created_s,
        "status": if is_cut { "incomplete" } else { status },
        "incomplete_details": is_cut.then(|| json!({ "reason": "max_output_tokens" })),
        "error": null, "instructions": null, "metadata": null, "model": header.model,
        "output": output, "parallel_tool_calls": true, "previous_response_id": null,
        "tool_choice": "auto", "tools": [], "truncation": "disabled", "background": false,
        "service_tier": "auto", "usage": usage, "user": null,
    })
}

fn item_id(header: &AnswerHeader) -> String {
    format!("{}-item", header.id)
}

fn output_item(header: &AnswerHeader, text: &str, status: &str) -> Value {
    json!({
        "id": item_id(header), "type": "message", "role": "assistant", "status": status,
        "content": [part(text)],
    })
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": null })
}

fn message(header: &AnswerHeader, latest: LatestProgress) -> Value {
    let text = header.output.text(0, latest.output_tokens);
    let content = match latest.finish {
        Some(_) => json!([{ "type": "text", "text": text }]),
        None => json!([]),
    };
    json!({
        "id": header.id, "type": "message", "role": "assistant", "model": header.model,
        "content": content, "stop_reason": stop_reason(latest), "stop_sequence": null,
        "usage": message_usage(header, latest),
    })
}

/// Returns the usage of a message. In this dialect, cached tokens are not part of the input tokens.
fn message_usage(header: &AnswerHeader, latest: LatestProgress) -> Value {
    json!({
        "input_tokens": header.prompt_tokens - latest.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": latest.cached_tokens,
        "output_tokens": latest.output_tokens,
    })
}

fn stop_reason(latest: LatestProgress) -> Option<&'static str> {
    latest.finish.map(|finish| match finish {
        Finish::Stop => "end_turn",
        Finish::Length => "max_tokens",
    })
}

/// Formats a response as named events.
#[derive(Debug)]
pub(super) struct NamedEvents {
    header: AnswerHeader,
    dialect: NamedDialect,
    sent: u32,
    /// Sequence number of the next event.
    number: u64,
}

impl NamedEvents {
    /// Creates a writer for a response that has not started.
    #[must_use]
    pub(super) fn new(header: AnswerHeader, dialect: NamedDialect) -> Self {
        Self {
            header,
            dialect,
            sent: 0,
            number: 0,
        }
    }

    fn write_all(&mut self, events: Vec<Value>, out: &mut String) {
        for mut event in events {
            if self.dialect == NamedDialect::Responses {
                event["sequence_number"] = self.number.into();
            }
            self.number += 1;
            let name = event["type"].as_str().unwrap_or_default();
            let _ = write!(out, "event: {name}\ndata: {event}\n\n");
        }
    }
}

impl AnswerWriter for NamedEvents {
    fn write(&mut self, latest: LatestProgress) -> Bytes {
        let mut out = String::with_capacity(512);
        if self.sent == 0 {
            let opening = self.dialect.opening(&self.header, latest);
            self.write_all(opening, &mut out);
        }
        let text = self.header.output.text(self.sent, latest.output_tokens);
        self.dialect
            .write_words(&self.header, self.number, &text, &mut out);
        self.number += 1;
        self.sent = latest.output_tokens;
        if latest.finish.is_some() {
            let closing = self.dialect.closing(&self.header, latest);
            self.write_all(closing, &mut out);
        }
        Bytes::from(out)
    }
}
