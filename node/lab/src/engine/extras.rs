//! Request fields that the routing parser ignores, but the engine needs.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::rejection::{RequestRejection, read};
use super::text::ChatEnding;
use super::transfer::TransferParams;

/// Extra fields of a request that generates text.
#[derive(Debug)]
pub(super) struct Extras {
    /// The client's limit of output tokens; `None` without one.
    pub(super) max_tokens: Option<u32>,
    pub(super) transfer: TransferParams,
    ending: EndingFields,
}

#[derive(Debug, serde::Deserialize)]
struct ExtraFields {
    kv_transfer_params: Option<TransferParams>,
    n: Option<i64>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    max_output_tokens: Option<i64>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

#[derive(Debug, serde::Deserialize)]
struct TokenizeFields {
    messages: Option<IgnoredAny>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

/// Fields that determine how a chat's prompt ends.
#[derive(Debug, Clone, Copy)]
struct EndingFields {
    begins_reply: bool,
    is_continued: bool,
}

#[derive(Debug, serde::Deserialize)]
struct MessageRoles {
    messages: Vec<MessageRole>,
}

#[derive(Debug, serde::Deserialize)]
struct MessageRole {
    role: Option<Value>,
}

impl Extras {
    /// Parses the extra fields of a request and rejects unsupported values.
    pub(super) fn read(body: &[u8]) -> Result<Self, RequestRejection> {
        let fields: ExtraFields = read(body, None)?;
        if fields.n.is_some_and(|n| n != 1) {
            return Err(RequestRejection::bad_request(
                "this engine makes one choice: n must be 1",
                Some("n"),
            ));
        }
        let wanted = fields
            .max_completion_tokens
            .or(fields.max_tokens)
            .or(fields.max_output_tokens);
        let whole = |wanted: i64| u32::try_from(wanted).ok().filter(|wanted| *wanted > 0);
        let max_tokens = wanted.map(|wanted| {
            whole(wanted).ok_or_else(|| {
                let message = format!("max_tokens must be at least 1, got {wanted}.");
                RequestRejection::bad_request(message, Some("max_tokens"))
            })
        });
        Ok(Self {
            max_tokens: max_tokens.transpose()?,
            transfer: fields.kv_transfer_params.unwrap_or_default(),
            ending: EndingFields::new(fields.add_generation_prompt, fields.continue_final_message),
        })
    }

    /// Returns how the prompt of the chat in `body` ends.
    ///
    /// # Errors
    /// If the last message cannot be continued.
    pub(super) fn chat_ending(&self, body: &[u8]) -> Result<ChatEnding, RequestRejection> {
        self.ending.ending(body)
    }
}

/// Returns how the prompt of a body of `/tokenize` ends, which may be a chat.
///
/// # Errors
/// If the last message cannot be continued.
pub(super) fn tokenize_ending(body: &[u8]) -> Result<ChatEnding, RequestRejection> {
    let fields: TokenizeFields = read(body, None)?;
    match fields.messages {
        Some(_) => EndingFields::new(fields.add_generation_prompt, fields.continue_final_message)
            .ending(body),
        None => Ok(ChatEnding::Nothing),
    }
}

impl EndingFields {
    fn new(add_generation_prompt: Option<bool>, continue_final_message: Option<bool>) -> Self {
        Self {
            begins_reply: add_generation_prompt.unwrap_or(true),
            is_continued: continue_final_message.unwrap_or(false),
        }
    }

    fn ending(self, body: &[u8]) -> Result<ChatEnding, RequestRejection> {
        let refused = |message: &str| {
            let param = Some("continue_final_message");
            Err(RequestRejection::bad_request(message, param))
        };
        match (self.is_continued, self.begins_reply) {
            (false, true) => return Ok(ChatEnding::Heading),
            (false, false) => return Ok(ChatEnding::Nothing),
            (true, false) => {}
            (true, true) => {
                return refused(
                    "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                );
            }
        }
        let MessageRoles { messages } = read(body, Some("messages"))?;
        match messages.last().and_then(|last| last.role.as_ref()) {
            Some(role) if role == "assistant" => Ok(ChatEnding::Open),
            _ => refused("`continue_final_message` needs a last message of the assistant."),
        }
    }
}
