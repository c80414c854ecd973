//! Responses in vLLM's formats: chat and text completions, unary or as server-sent events, and
//! errors.
//!
//! The formats match those of a vLLM 0.32 server. Streams are formatted by hand: a JSON tree per
//! word would cost more than the model.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;
use serde_json::{Value, json};

use super::driver::{LatestProgress, RequestGuard};
use super::model::Finish;
use super::offload::TierTokens;
use super::output::Output;

/// Completion endpoint that a response belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CompletionKind {
    /// The chat endpoint `/v1/chat/completions`.
    Chat,
    /// The text endpoint `/v1/completions`.
    Text,
}

/// Properties of a response besides its words.
#[derive(Debug, Clone)]
pub(super) struct AnswerHeader {
    /// Response id, with the prefix of its endpoint.
    pub id: String,
    /// Creation time of the response, in Unix seconds.
    pub created_s: u64,
    /// Served model name.
    pub model: String,
    /// Output that follows the prompt.
    pub output: Output,
    /// Number of prompt tokens.
    pub prompt_tokens: u32,
}

/// The request's `stream_options`: which chunks of a stream report usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct UsageOptions {
    /// Whether a last chunk reports the usage of the whole response.
    pub include: bool,
    /// Whether every chunk reports the usage so far.
    pub continuous: bool,
}

impl CompletionKind {
    /// Returns the unary response with all the output up to `end`.
    #[must_use]
    pub(super) fn whole(self, header: &AnswerHeader, end: LatestProgress) -> Value {
        let text = header.output.text(0, end.output_tokens);
        let finish_reason = end.finish.map(reason);
        let usage = header.usage(end, true);
        match self {
            Self::Chat => json!({
                "id": header.id,
                "object": "chat.completion",
                "created": header.created_s,
                "model": header.model,
                "choices": [{
                    "index": 0,
                    "message": {
                        "role": "assistant", "content": text, "refusal": null,
                        "annotations": null, "audio": null, "function_call": null,
                        "tool_calls": [], "reasoning": null,
                    },
                    "logprobs": null, "finish_reason": finish_reason,
                    "stop_reason": null, "token_ids": null,
                }],
                "service_tier": null, "system_fingerprint": null, "usage": usage,
                "prompt_logprobs": null, "prompt_token_ids": null, "kv_transfer_params": null,
            }),
            Self::Text => json!({
                "id": header.id,
                "object": "text_completion",
                "created": header.created_s,
                "model": header.model,
                "choices": [{
                    "index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason,
                    "stop_reason": null, "token_ids": null, "prompt_logprobs": null,
                    "prompt_token_ids": null,
                }],
                "service_tier": null, "system_fingerprint": null, "usage": usage,
                "kv_transfer_params": null,
            }),
        }
    }
}

impl AnswerHeader {
    fn usage(&self, latest: LatestProgress, with_details: bool) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + latest.output_tokens,
            "completion_tokens": latest.output_tokens,
        });
        if with_details {
            let mut details = json!({ "cached_tokens": latest.cached_tokens });
            // With SGLang's names.
            if let Some(TierTokens { cpu, disk, .. }) = latest.by_tier {
                let device = latest.cached_tokens - cpu - disk;
                details["cached_tokens_details"] =
                    json!({ "device": device, "host": cpu, "storage": disk });
            }
            usage["prompt_tokens_details"] = details;
        }
        usage
    }
}

fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

/// Formats a response as server-sent events.
pub(super) trait AnswerWriter {
    /// Returns the events for the progress since the previous call, up to `latest`.
    fn write(&mut self, latest: LatestProgress) -> Bytes;
}

/// A response as server-sent events, produced as the model runs. Dropping it aborts the request.
#[derive(Debug)]
pub(super) struct AnswerStream<W> {
    ticket: RequestGuard,
    writer: W,
    is_over: bool,
}

impl<W> AnswerStream<W> {
    /// Creates the response stream for the request of `ticket`, formatted by `writer`.
    #[must_use]
    pub(super) fn new(ticket: RequestGuard, writer: W) -> Self {
        Self {
            ticket,
            writer,
            is_over: false,
        }
    }
}

impl<W: AnswerWriter + Unpin> Stream for AnswerStream<W> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let stream = self.get_mut();
        if stream.is_over {
            return Poll::Ready(None);
        }
        let latest = std::task::ready!(Pin::new(&mut stream.ticket).poll_next(cx));
        stream.is_over = latest.finish.is_some();
        Poll::Ready(Some(Ok(stream.writer.write(latest))))
    }
}

/// Formats a completion as chunks of an event stream.
#[derive(Debug)]
pub(super) struct CompletionEvents {
    heading: AnswerHeader,
    kind: CompletionKind,
    usage: UsageOptions,
    /// Beginning of every chunk, up to its `choices`.
    opening: String,
    sent: u32,
}

impl CompletionEvents {
    /// Creates a writer for a response that has not started.
    #[must_use]
    pub(super) fn new(heading: AnswerHeader, kind: CompletionKind, usage: UsageOptions) -> Self {
        let object = match kind {
            CompletionKind::Chat => "chat.completion.chunk",
            CompletionKind::Text => "text_completion",
        };
        let opening = format!(
            "data: {{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},\"choices\":[",
            Value::from(heading.id.as_str()),
            heading.created_s,
            Value::from(heading.model.as_str()),
        );
        Self {
            heading,
            kind,
            usage,
            opening,
            sent: 0,
        }
    }

    fn close_chunk(&self, out: &mut String, latest: LatestProgress, extra: &str) {
        out.push_str(extra);
        if self.usage.continuous {
            let _ = write!(out, ",\"usage\":{}", self.heading.usage(latest, false));
        } else if self.kind == CompletionKind::Text {
            out.push_str(",\"usage\":null");
        }
        out.push_str("}\n\n");
    }
}

impl AnswerWriter for CompletionEvents {
    fn write(&mut self, latest: LatestProgress) -> Bytes {
        let mut out = String::with_capacity(768);
        if self.sent == 0 && self.kind == CompletionKind::Chat {
            out.push_str(&self.opening);
            out.push_str(
                "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\
                 \"logprobs\":null,\"finish_reason\":null}]",
            );
            let before = LatestProgress {
                output_tokens: 0,
                ..latest
            };
            self.close_chunk(
                &mut out,
                before,
                ",\"prompt_token_ids\":null,\"prompt_text\":null",
            );
        }
        let text = self.heading.output.text(self.sent, latest.output_tokens);
        out.push_str(&self.opening);
        // Words are lower-case letters and spaces, so they need no escaping.
        let _ = match self.kind {
            CompletionKind::Chat => write!(
                out,
                "{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,"
            ),
            CompletionKind::Text => {
                write!(out, "{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,")
            }
        };
        let _ = match latest.finish {
            Some(finish) => write!(
                out,
                "\"finish_reason\":\"{}\",\"stop_reason\":null,\"token_ids\":null}}]",
                reason(finish)
            ),
            None => write!(out, "\"finish_reason\":null,\"token_ids\":null}}]"),
        };
        self.close_chunk(&mut out, latest, "");
        self.sent = latest.output_tokens;
        if latest.finish.is_some() {
            if self.usage.include {
                let usage = self.heading.usage(latest, true);
                let _ = write!(out, "{}],\"usage\":{usage}}}\n\n", self.opening);
            }
            out.push_str("data: [DONE]\n\n");
        }
        Bytes::from(out)
    }
}

/// Returns the body of an error response in vLLM's format. `param` names the field at fault; `None`
/// if there is none.
#[must_use]
pub(super) fn error_body(status: u16, message: &str, param: Option<&str>) -> Value {
    let kind = match status {
        404 => "NotFoundError",
        500.. => "InternalServerError",
        _ => "BadRequestError",
    };
    json!({ "error": { "message": message, "type": kind, "param": param, "code": status } })
}
