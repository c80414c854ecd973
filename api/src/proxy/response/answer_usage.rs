//! Extraction of token usage and output text from a response's JSON, in the formats of the chat,
//! completions, responses and messages endpoints.

use std::borrow::Cow;
use std::ops::Range;

use http::StatusCode;
use serde::Deserialize;

use super::choice_output::{ChoiceOutput, literal_bytes};
use super::engine_error::{EngineError, is_reported};
use super::json_scan::{elements, members, string, value_of};
use crate::routing::Usage;

/// Usage and output found in one JSON document: an event's payload or a whole response.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::proxy) struct AnswerDelta<'a> {
    /// Tokens used so far, if the document reports them.
    pub(in crate::proxy) usage: Option<Usage>,
    /// Text that continues the prompt: that of choice 0, or of the only output; `None` if there is
    /// none.
    pub(in crate::proxy) text: Option<Cow<'a, str>>,
    /// Array of the token ids of choice 0, as written; empty without, as without vLLM's
    /// `return_token_ids`.
    pub(in crate::proxy) token_ids: &'a [u8],
    /// The members `id` and `created`, as JSON; empty without.
    pub(in crate::proxy) id: &'a [u8],
    pub(in crate::proxy) created: &'a [u8],
    /// Whether the document has output other than the text of choice 0.
    pub(in crate::proxy) has_other_output: bool,
    /// Number of bytes of other output: other choices, reasoning, refusals, arguments of tool
    /// calls.
    pub(in crate::proxy) other_bytes: usize,
    /// Index of the document's choice, if it has exactly one.
    pub(in crate::proxy) choice: Option<u64>,
    /// Range of the top-level `usage` member with the comma that joins it to its neighbours; `None`
    /// without such a member.
    pub(in crate::proxy) usage_member: Option<Range<usize>>,
    /// Whether the top-level `usage` is present but null.
    pub(super) is_usage_null: bool,
    /// Whether the document has an empty `choices` array, as in chunks that only report usage.
    pub(super) has_no_choices: bool,
    /// Whether a choice has a finish reason.
    pub(super) ends_choice: bool,
    /// Whether this is the last event of a stream of the responses or the messages endpoint.
    pub(super) ends_stream: bool,
    /// Whether the event has output: text, reasoning, a tool call, or content unknown to the router.
    pub(in crate::proxy) has_output: bool,
    /// Whether the event only begins or frames output, so that an error may still come instead.
    pub(super) is_structural: bool,
    /// Whether the event only keeps the connection alive, like a comment.
    pub(super) is_ping: bool,
    /// Whether the document has members other than those of a chunk that only reports usage.
    pub(super) has_further_members: bool,
    /// Status that the error in the document stands for; `None` if it reports none.
    pub(in crate::proxy) error: Option<StatusCode>,
}

/// Types of the last event of a stream, as JSON strings.
const LAST_EVENTS: [&[u8]; 4] = [
    br#""response.completed""#,
    br#""response.incomplete""#,
    br#""response.failed""#,
    br#""message_stop""#,
];

/// Types of events that precede output, or end a stream, as JSON strings. Those that announce a
/// tool call are output.
const STRUCTURAL_EVENTS: [&[u8]; 14] = [
    br#""response.created""#,
    br#""response.queued""#,
    br#""response.in_progress""#,
    br#""response.output_item.added""#,
    br#""response.content_part.added""#,
    br#""response.reasoning_part.added""#,
    br#""response.reasoning_summary_part.added""#,
    br#""response.completed""#,
    br#""response.incomplete""#,
    br#""message_start""#,
    br#""content_block_start""#,
    br#""content_block_stop""#,
    br#""message_delta""#,
    br#""message_stop""#,
];

/// Types of events that keep a connection alive, as JSON strings.
const PINGS: [&[u8]; 2] = [br#""ping""#, br#""keepalive""#];

/// Types of output items and content blocks that begin before their first token, as JSON strings.
const EMPTY_ITEMS: [&[u8]; 4] = [
    br#""message""#,
    br#""reasoning""#,
    br#""text""#,
    br#""thinking""#,
];

/// Extracts usage and output from a JSON document.
pub(in crate::proxy) fn inspect(json: &[u8]) -> AnswerDelta<'_> {
    let mut findings = AnswerDelta::default();
    let mut previous_end = None;
    let mut cut_to_next_member = None;
    let (mut kind, mut delta, mut item) = (&b""[..], None, None);
    let (mut has_error, mut has_choices) = (false, false);
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
            b"choices" => {
                has_choices = true;
                findings.read_choices(value);
            }
            b"type" => kind = value,
            b"delta" => delta = Some(value),
            b"item" | b"content_block" => item = Some(value),
            b"error" => has_error = is_reported(value),
            b"object" => has_error |= value == br#""error""#,
            b"id" => findings.id = value,
            b"created" => findings.created = value,
            b"model" | b"system_fingerprint" | b"service_tier" => {}
            // Whole responses of the messages and the responses endpoint.
            b"content" => findings.read_parts(value),
            b"output" => {
                for content in elements(value).filter_map(|item| value_of(item, "content")) {
                    findings.read_parts(content);
                }
            }
            // `response.completed` of the responses endpoint, `message_start` of messages.
            b"response" | b"message" if value.first() == Some(&b'{') => {
                let nested = value_of(value, "usage").and_then(read_usage);
                findings.usage = findings.usage.or(nested);
            }
            _ => findings.has_further_members |= value != b"null",
        }
        previous_end = Some(member.value.end);
    }
    if let Some(delta) = delta {
        findings.read_delta(kind, delta);
    }
    findings.ends_stream = LAST_EVENTS.contains(&kind);
    if has_error || matches!(kind, br#""error""# | br#""response.failed""#) {
        findings.error = EngineError::read(json, false).map(|error| error.status);
    }
    findings.classify(kind, has_choices, delta, item);
    findings
}

impl<'a> AnswerDelta<'a> {
    /// Returns what is known of an event of type `kind` that is too long to be parsed.
    pub(super) fn of_long_event(
        kind: &[u8],
        usage: Option<Usage>,
        error: Option<StatusCode>,
    ) -> Self {
        Self {
            usage,
            error,
            ends_stream: LAST_EVENTS.contains(&kind),
            has_output: error.is_none() && !STRUCTURAL_EVENTS.contains(&kind),
            has_other_output: true,
            ..Self::default()
        }
    }

    /// Determines whether an event of type `kind` has output, or only frames it. `item` is the output
    /// item or content block that it begins, if any.
    fn classify(
        &mut self,
        kind: &[u8],
        has_choices: bool,
        delta: Option<&[u8]>,
        item: Option<&[u8]>,
    ) {
        self.is_ping = PINGS.contains(&kind);
        if self.error.is_some() || self.is_ping {
            self.is_structural = self.is_ping;
            return;
        }
        self.has_output |= self.text.is_some() || self.other_bytes > 0;
        self.has_other_output |= self.other_bytes > 0;
        if has_choices {
            self.has_output |= self.usage.is_some_and(|usage| usage.completion_tokens > 0);
            self.is_structural = !self.has_output && !self.ends_choice;
        } else if STRUCTURAL_EVENTS.contains(&kind) {
            let item = item.and_then(|item| value_of(item, "type"));
            self.has_output |= item.is_some_and(|item| !EMPTY_ITEMS.contains(&item));
            self.is_structural = !self.has_output && !self.ends_stream;
        } else {
            let is_empty = |delta: &[u8]| matches!(delta, br#""""# | b"{}" | b"null");
            self.has_output |= !delta.is_some_and(is_empty);
            self.is_structural = !self.has_output;
        }
    }

    fn read_choices(&mut self, choices: &'a [u8]) {
        let mut count = 0_usize;
        for choice in elements(choices) {
            count += 1;
            let made = ChoiceOutput::of(choice);
            self.other_bytes += made.other_bytes;
            self.ends_choice |= made.is_ended;
            self.has_output |= made.has_output || made.has_call;
            self.has_other_output |= made.has_call;
            if made.index == 0 {
                self.token_ids = made.token_ids;
            }
            match made.text {
                Some(text) if made.index == 0 => self.add_text(text),
                text => self.other_bytes += text.map_or(0, |text| text.len()),
            }
            self.choice = (count == 1).then_some(made.index);
        }
        self.has_no_choices = count == 0 && choices.first() == Some(&b'[');
    }

    /// Adds the text of a whole response's content parts.
    fn read_parts(&mut self, parts: &'a [u8]) {
        for part in elements(parts) {
            let kind = value_of(part, "type").unwrap_or_default();
            if matches!(kind, br#""text""# | br#""output_text""#)
                && let Some(text) = value_of(part, "text").and_then(string)
            {
                self.add_text(text);
            }
        }
    }

    /// Adds the output in an event's `delta`: a string on the responses endpoint, an object on the
    /// messages endpoint.
    fn read_delta(&mut self, kind: &[u8], delta: &'a [u8]) {
        if delta.first() == Some(&b'"') {
            if kind == br#""response.output_text.delta""# {
                string(delta)
                    .into_iter()
                    .for_each(|text| self.add_text(text));
            } else if memchr::memmem::find(kind, b"audio").is_none() {
                self.other_bytes += literal_bytes(delta);
            }
            return;
        }
        for member in members(delta) {
            let value = &delta[member.value];
            match &delta[member.key] {
                b"text" => string(value)
                    .into_iter()
                    .for_each(|text| self.add_text(text)),
                b"thinking" | b"partial_json" => self.other_bytes += literal_bytes(value),
                _ => {}
            }
        }
    }

    fn add_text(&mut self, text: Cow<'a, str>) {
        if text.is_empty() {
            return;
        }
        match &mut self.text {
            Some(earlier) => earlier.to_mut().push_str(&text),
            none => *none = Some(text),
        }
    }
}

/// Token counts under the names that the endpoints use.
#[derive(Deserialize)]
struct ReportedUsage {
    #[serde(alias = "input_tokens")]
    prompt_tokens: Option<u64>,
    #[serde(alias = "output_tokens")]
    completion_tokens: Option<u64>,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<TokenDetails>,
    /// Prompt tokens read from the cache, on the messages endpoint. `input_tokens` excludes them.
    cache_read_input_tokens: Option<u64>,
    /// Prompt tokens written to the cache, on the messages endpoint. `input_tokens` excludes them.
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct TokenDetails {
    cached_tokens: Option<u64>,
}

/// Parses the value of a `usage` member; `None` if it reports no counts.
pub(in crate::proxy) fn read_usage(json: &[u8]) -> Option<Usage> {
    let reported: Option<ReportedUsage> = serde_json::from_slice(json).ok()?;
    let reported = reported?;
    if reported.prompt_tokens.is_none() && reported.completion_tokens.is_none() {
        return None;
    }
    let beside = reported
        .cache_read_input_tokens
        .unwrap_or(0)
        .saturating_add(reported.cache_creation_input_tokens.unwrap_or(0));
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
    fn a_chat_chunk_has_text_and_running_usage() {
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
    fn the_usage_member_is_removed_with_one_comma() {
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
    fn usage_is_read_for_every_api() {
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
    fn only_the_first_choice_has_text() {
        let json = br#"{"choices":[{"index":1,"delta":{"content":"x"}}]}"#;
        assert_eq!(inspect(json).text, None);
        let json = br#"{"choices":[{"text":"whole","token_ids":[7, 8],"index":0},{"token_ids":[9],"index":1}]}"#;
        let found = inspect(json);
        assert_eq!(
            (found.text.as_deref(), found.token_ids),
            (Some("whole"), &b"[7, 8]"[..])
        );
    }

    #[test]
    fn text_is_found_for_every_api() {
        for (json, text, other_bytes) in [
            (
                r#"{"delta":"a\nb","type":"response.output_text.delta"}"#,
                Some("a\nb"),
                0,
            ),
            (
                r#"{"type":"response.reasoning_text.delta","delta":"hmm"}"#,
                None,
                3,
            ),
            (r#"{"type":"response.audio.delta","delta":"AAAA"}"#, None, 0),
            (
                r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}"#,
                Some("hi"),
                0,
            ),
            (
                r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{\"a"}}"#,
                None,
                4,
            ),
            (
                r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":6}}"#,
                None,
                0,
            ),
            (
                r#"{"type":"message","content":[{"type":"thinking","thinking":"x"},{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
                Some("ab"),
                0,
            ),
            (
                r#"{"output":[{"type":"reasoning"},{"type":"message","content":[{"type":"output_text","text":"c"}]}]}"#,
                Some("c"),
                0,
            ),
        ] {
            let found = inspect(json.as_bytes());
            assert_eq!(
                (found.text.as_deref(), found.other_bytes),
                (text, other_bytes),
                "{json}"
            );
        }
    }

    #[track_caller]
    fn has_output(json: &str) -> bool {
        let findings = inspect(json.as_bytes());
        let (has_output, is_error) = (findings.has_output, findings.error.is_some());
        assert_eq!(findings.is_structural, !has_output && !is_error, "{json}");
        has_output
    }

    #[test]
    fn only_output_of_a_choice_is_a_first_token() {
        for (choice, expected) in [
            (r#""delta":{"role":"assistant","content":""}"#, false),
            (
                r#""delta":{"role":"assistant","content":null,"tool_calls":[]}"#,
                false,
            ),
            (r#""delta":{"content":"a"}"#, true),
            (r#""delta":{"reasoning_content":"a"}"#, true),
            (
                r#""delta":{"tool_calls":[{"function":{"name":"f","arguments":""}}]}"#,
                true,
            ),
            (r#""text":"""#, false),
            (r#""text":"","token_ids":[7]"#, true),
        ] {
            let json = format!(r#"{{"choices":[{{"index":0,{choice}}}]}}"#);
            assert_eq!(has_output(&json), expected, "{json}");
        }
        assert!(has_output(
            r#"{"choices":[],"usage":{"completion_tokens":3}}"#
        ));
        assert!(!has_output(r#"{"error":{"code":503}}"#));
    }

    #[test]
    fn only_named_events_with_output_are_a_first_token() {
        for (event, expected) in [
            (r#""response.created","response":{"usage":null}"#, false),
            (
                r#""response.output_item.added","item":{"type":"message"}"#,
                false,
            ),
            (
                r#""response.output_item.added","item":{"type":"function_call"}"#,
                true,
            ),
            (r#""response.output_text.delta","delta":"a""#, true),
            (r#""response.output_text.delta","delta":"""#, false),
            (r#""response.reasoning_text.delta","delta":"a""#, true),
            (r#""response.audio.delta","delta":"AAAA""#, true),
            (
                r#""message_start","message":{"usage":{"output_tokens":1}}"#,
                false,
            ),
            (
                r#""content_block_start","content_block":{"type":"thinking"}"#,
                false,
            ),
            (
                r#""content_block_start","content_block":{"type":"tool_use"}"#,
                true,
            ),
            (
                r#""content_block_delta","delta":{"type":"text_delta","text":"a"}"#,
                true,
            ),
            (r#""ping""#, false),
            (r#""something.new""#, true),
        ] {
            let json = format!(r#"{{"type":{event}}}"#);
            assert_eq!(has_output(&json), expected, "{json}");
        }
    }

    #[test]
    fn all_output_bytes_are_counted() {
        let json = br#"{"choices":[{"index":0,"delta":{"content":"ab","reasoning":"xyz","reasoning_content":"xyz","tool_calls":[{"function":{"arguments":"1234"}},{"function":{"arguments":"5"}}]}}]}"#;
        let found = inspect(json);
        assert_eq!((found.choice, found.other_bytes), (Some(0), 8));
        let json = br#"{"choices":[{"index":0,"text":"a"},{"index":1,"text":"bcd"}]}"#;
        let found = inspect(json);
        assert_eq!(
            (found.choice, found.text.as_deref(), found.other_bytes),
            (None, Some("a"), 3)
        );
    }

    #[test]
    fn absurd_token_counts_do_not_overflow() {
        let json = br#"{"usage":{"input_tokens":1,"cache_read_input_tokens":18446744073709551615,"cache_creation_input_tokens":1}}"#;
        assert_eq!(inspect(json).usage.unwrap().prompt_tokens, u64::MAX);
    }
}
