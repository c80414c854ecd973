//! Output of one choice of a response, in the formats of the chat and the completions endpoints.

use std::borrow::Cow;

use super::json_scan::{elements, members, string, value_of};

/// Output of one choice, from a chunk's delta, a whole message or a completion.
pub(super) struct ChoiceOutput<'a> {
    pub(super) index: u64,
    pub(super) text: Option<Cow<'a, str>>,
    pub(super) token_ids: &'a [u8],
    pub(super) other_bytes: usize,
    pub(super) is_ended: bool,
    /// Whether there are token ids.
    pub(super) has_output: bool,
    /// Whether there is output that has no bytes of its own, such as the name of a tool.
    pub(super) has_call: bool,
}

impl<'a> ChoiceOutput<'a> {
    pub(super) fn of(choice: &'a [u8]) -> Self {
        let mut made = Self {
            index: 0,
            text: None,
            token_ids: &[],
            other_bytes: 0,
            is_ended: false,
            has_output: false,
            has_call: false,
        };
        for member in members(choice) {
            let value = &choice[member.value];
            match &choice[member.key] {
                b"index" => made.index = serde_json::from_slice(value).unwrap_or(0),
                b"delta" | b"message" => made.read_message(value),
                b"text" => made.text = string(value),
                b"finish_reason" => made.is_ended = value != b"null",
                b"token_ids" => {
                    made.token_ids = value;
                    made.has_output |= elements(value).next().is_some();
                }
                _ => {}
            }
        }
        made
    }

    fn read_message(&mut self, message: &'a [u8]) {
        // Engines write reasoning under its old and its new name at the same time.
        let mut reasoning_bytes = 0;
        for member in members(message) {
            let value = &message[member.value];
            match &message[member.key] {
                b"content" => self.text = string(value),
                b"reasoning" | b"reasoning_content" => {
                    reasoning_bytes = reasoning_bytes.max(literal_bytes(value));
                }
                b"refusal" => self.other_bytes += literal_bytes(value),
                b"audio" | b"function_call" => self.has_call |= value.first() == Some(&b'{'),
                b"tool_calls" => {
                    self.has_call |= elements(value).next().is_some();
                    let functions = elements(value).filter_map(|call| value_of(call, "function"));
                    let arguments = functions.filter_map(|it| value_of(it, "arguments"));
                    self.other_bytes += arguments.map(literal_bytes).sum::<usize>();
                }
                _ => {}
            }
        }
        self.other_bytes += reasoning_bytes;
    }
}

/// Returns the length in bytes of a string literal's text, with escapes as written; 0 for other
/// values.
pub(super) fn literal_bytes(literal: &[u8]) -> usize {
    if literal.first() == Some(&b'"') {
        literal.len().saturating_sub(2)
    } else {
        0
    }
}
