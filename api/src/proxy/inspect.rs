//! What is read of an answer's JSON: token usage and output text, in the shapes of the chat,
//! completions, responses and messages endpoints.

use std::borrow::Cow;
use std::ops::Range;

use serde::Deserialize;

use super::scan::{first_element, members, string, value_of};
use crate::routing::Usage;

/// What one JSON document, an event's payload or a whole answer, tells.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Findings<'a> {
    /// Tokens so far, when the document reports them.
    pub(super) usage: Option<Usage>,
    /// Text of the first choice.
    pub(super) text: Option<Cow<'a, str>>,
    /// The top-level `usage` member together with the comma that ties it to its neighbours.
    pub(super) usage_member: Option<Range<usize>>,
    /// Whether the top-level `usage` is there but null.
    pub(super) is_usage_null: bool,
    /// Whether there is a `choices` array without elements: the chunk exists for its usage.
    pub(super) has_no_choices: bool,
}

/// Reads a document.
pub(super) fn inspect(json: &[u8]) -> Findings<'_> {
    let mut findings = Findings::default();
    let mut previous_end = None;
    let mut cut_to_next_member = None;
    for member in members(json) {
        let key_start = member.key.start - 1;
        if let Some(start) = cut_to_next_member.take() {
            findings.usage_member = Some(start..key_start);
        }
        let value = &json[member.value.clone()];
        match &json[member.key] {
            b"usage" => {
                findings.is_usage_null = value == b"null";
                findings.usage = findings.usage.or_else(|| read_usage(value));
                match previous_end {
                    Some(end) => findings.usage_member = Some(end..member.value.end),
                    None => {
                        findings.usage_member = Some(key_start..member.value.end);
                        cut_to_next_member = Some(key_start);
                    }
                }
            }
            b"choices" => match first_element(value) {
                Some(choice) => findings.text = choice_text(choice),
                None => findings.has_no_choices = value.first() == Some(&b'['),
            },
            // `response.completed` of the responses endpoint, `message_start` of messages.
            b"response" | b"message" if value.first() == Some(&b'{') => {
                let nested = value_of(value, "usage").and_then(read_usage);
                findings.usage = findings.usage.or(nested);
            }
            _ => {}
        }
        previous_end = Some(member.value.end);
    }
    findings
}

/// Usage in a document whose beginning is missing: the last `"usage":` that holds an object.
pub(super) fn usage_in_tail(tail: &[u8]) -> Option<Usage> {
    let at = memchr::memmem::rfind(tail, b"\"usage\":")?;
    // A member list needs its opening brace; the closing one may be missing.
    let mut document = Vec::with_capacity(tail.len() - at + 1);
    document.push(b'{');
    document.extend_from_slice(&tail[at..]);
    value_of(&document, "usage").and_then(read_usage)
}

/// Text of a choice: a chunk's delta, a whole message or a completion. Only of the first choice:
/// the others continue the prompt each in their own way.
fn choice_text(choice: &[u8]) -> Option<Cow<'_, str>> {
    let mut text = None;
    for member in members(choice) {
        let value = &choice[member.value];
        match &choice[member.key] {
            b"index" if value != b"0" => return None,
            b"delta" | b"message" => text = value_of(value, "content").and_then(string),
            b"text" => text = string(value),
            _ => {}
        }
    }
    text.filter(|text| !text.is_empty())
}

/// Token counts under the names of all endpoints.
#[derive(Deserialize)]
struct Reported {
    #[serde(alias = "input_tokens")]
    prompt_tokens: Option<u64>,
    #[serde(alias = "output_tokens")]
    completion_tokens: Option<u64>,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<Details>,
    /// Messages endpoint: not part of its `input_tokens`.
    cache_read_input_tokens: Option<u64>,
    /// Messages endpoint: not part of its `input_tokens`.
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

fn read_usage(json: &[u8]) -> Option<Usage> {
    let reported: Option<Reported> = serde_json::from_slice(json).ok()?;
    let reported = reported?;
    if reported.prompt_tokens.is_none() && reported.completion_tokens.is_none() {
        return None;
    }
    let beside = reported.cache_read_input_tokens.unwrap_or(0)
        + reported.cache_creation_input_tokens.unwrap_or(0);
    let details = reported
        .prompt_tokens_details
        .and_then(|details| details.cached_tokens);
    Some(Usage {
        prompt_tokens: reported.prompt_tokens.unwrap_or(0).saturating_add(beside),
        cached_tokens: details.or(reported.cache_read_input_tokens),
        completion_tokens: reported.completion_tokens.unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(prompt_tokens: u64, cached_tokens: Option<u64>, completion_tokens: u64) -> Usage {
        Usage {
            prompt_tokens,
            cached_tokens,
            completion_tokens,
        }
    }

    #[test]
    fn a_chat_chunk_tells_its_text_and_running_usage() {
        let chunk = br#"{"id":"c","choices":[{"index":0,"delta":{"content":"h\"i"}}],"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2}}"#;
        let findings = inspect(chunk);
        assert_eq!(findings.text.as_deref(), Some("h\"i"));
        assert_eq!(findings.usage, Some(usage(9, None, 2)));
        let cut = findings.usage_member.unwrap();
        assert_eq!(
            chunk[cut],
            *br#","usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2}"#
        );
    }

    #[test]
    fn the_usage_member_is_cut_with_one_comma_wherever_it_stands() {
        for (json, rest) in [
            (r#"{"usage":null,"a":1}"#, r#"{"a":1}"#),
            (r#"{"a":1, "usage" : {} ,"b":2}"#, r#"{"a":1 ,"b":2}"#),
            (r#"{"a":1,"usage":{}}"#, r#"{"a":1}"#),
            (r#"{"usage":{}}"#, "{}"),
        ] {
            let cut = inspect(json.as_bytes()).usage_member.unwrap();
            assert_eq!(format!("{}{}", &json[..cut.start], &json[cut.end..]), rest);
        }
    }

    #[test]
    fn usage_is_read_under_every_endpoints_names() {
        for (json, expected) in [
            (
                r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0}}}"#,
                usage(3, Some(0), 4),
            ),
            (
                r#"{"type":"response.completed","response":{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":5},"output_tokens":1}}}"#,
                usage(7, Some(5), 1),
            ),
            (
                r#"{"type":"message_start","message":{"usage":{"input_tokens":2,"cache_read_input_tokens":10,"cache_creation_input_tokens":3,"output_tokens":1}}}"#,
                usage(15, Some(10), 1),
            ),
            (
                r#"{"type":"message_delta","usage":{"output_tokens":6}}"#,
                usage(0, None, 6),
            ),
        ] {
            assert_eq!(inspect(json.as_bytes()).usage, Some(expected), "{json}");
        }
        assert_eq!(inspect(br#"{"usage":null}"#).usage, None);
        assert_eq!(inspect(br#"{"usage":{"prompt_tokens":-1}}"#).usage, None);
        assert!(inspect(br#"{"choices":[]}"#).has_no_choices);
        assert!(!inspect(br#"{"choices":null}"#).has_no_choices);
    }

    #[test]
    fn other_choices_than_the_first_have_no_text() {
        let json = br#"{"choices":[{"index":1,"delta":{"content":"x"}}]}"#;
        assert_eq!(inspect(json).text, None);
        let json = br#"{"choices":[{"text":"whole","index":0}]}"#;
        assert_eq!(inspect(json).text.as_deref(), Some("whole"));
    }

    #[test]
    fn usage_is_found_at_the_end_of_a_body_whose_beginning_is_gone() {
        let tail = br#"0.123,0.5]}],"usage":{"prompt_tokens":12,"total_tokens":12}}"#;
        assert_eq!(usage_in_tail(tail), Some(usage(12, None, 0)));
        assert_eq!(usage_in_tail(b"no such thing"), None);
    }
}
