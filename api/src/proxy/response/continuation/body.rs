//! The request that continues an answer: that of the client, with the answer so far.
//!
//! Only the fields are accepted of which it is known that an answer is continued exactly with them.
//! Others must have their neutral value. So a new field of an engine is an obstacle, not a fault.

use std::borrow::Cow;

use bytes::Bytes;

use super::{ContinueRejection, RelayedText};
use crate::proxy::response::json_scan::members;

/// Fields with which an answer can be continued, whatever their value.
const ANY_VALUE: &[&str] = &[
    "add_special_tokens",
    "agentic_context",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "logit_bias",
    "lora_path",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "model",
    "nvext",
    "parallel_tool_calls",
    "priority",
    "prompt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "request_id",
    "rid",
    "safety_identifier",
    "seed",
    "service_tier",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tools",
    "top_k",
    "top_p",
    "user",
    "verbosity",
];

/// Further values with which an answer can be continued, as JSON without white space.
const SOME_VALUES: &[(&str, &[&str])] = &[
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("repetition_penalty", &["1", "1.0"]),
    ("length_penalty", &["1", "1.0"]),
    ("add_generation_prompt", &["true"]),
    ("include_reasoning", &["true"]),
    ("separate_reasoning", &["true"]),
    ("stream_reasoning", &["true"]),
    ("tool_choice", &["\"auto\"", "\"none\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("modalities", &["[\"text\"]"]),
];

/// Values of any other field that mean as much as its absence.
const NEUTRAL: &[&str] = &["null", "false", "\"\"", "[]", "{}"];
/// Fields that hide reasoning if they are false. What is hidden cannot be sent back.
const HIDING: &[&str] = &[
    "include_reasoning",
    "separate_reasoning",
    "stream_reasoning",
];
/// Penalties that count tokens of the answer, which are tokens of the prompt once it is continued.
/// `0` is neutral.
const PENALTIES: &[&str] = &["presence_penalty", "frequency_penalty"];

/// Maximum number of tokens of `/v1/completions` in OpenAI's API if the request sets none.
pub(in crate::proxy) const COMPLETION_TOKENS: u64 = 16;

/// Texts in an answer of a chat that chat templates treat as a part of its own.
const REASONING: [&str; 2] = ["<think>", "</think>"];

/// A request that continues an answer.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::proxy) struct ContinuedBody {
    pub(in crate::proxy) bytes: Bytes,
    /// Maximum number of tokens that the engine has counted and held back, as the possible beginning
    /// of a stop string.
    pub(in crate::proxy) held_tokens_max: u64,
}

impl ContinuedBody {
    fn unchanged(bytes: &Bytes) -> Self {
        Self {
            bytes: bytes.clone(),
            held_tokens_max: 0,
        }
    }
}

/// Returns the body that continues what was `relayed` of the answer to `body`, which was sent to
/// `path`. Completions have at most `tokens_max` tokens if the request sets no maximum; `None` for
/// no limit.
///
/// # Errors
/// Returns the obstacle if the answer cannot be continued exactly.
pub(in crate::proxy) fn continued_body(
    path: &str,
    body: &Bytes,
    relayed: &RelayedText,
    tokens_max: Option<u64>,
) -> Result<ContinuedBody, ContinueRejection> {
    let text = relayed.text()?;
    if text.is_empty() {
        // The answer begins again.
        return Ok(ContinuedBody::unchanged(body));
    }
    let is_chat = path == "/v1/chat/completions";
    let kept = kept_text(text, is_chat)?;
    if is_chat && relayed.prompt_tokens().is_none() {
        return Err(ContinueRejection::NoUsage);
    }
    let open = memchr::memchr(b'{', body).map_or(0, |brace| brace + 1);
    let mut continued = body.slice(..open).to_vec();
    let (mut has_prompt, mut has_limit, mut held_tokens_max) = (false, false, 0);
    for member in members(body) {
        let name = std::str::from_utf8(&body[member.key.clone()]).unwrap_or_default();
        let value = std::str::from_utf8(&body[member.value.clone()]).unwrap_or_default();
        check_field(name, value)?;
        if name == "stop" && value != "null" {
            // A token has at least one byte.
            held_tokens_max = value.len() as u64;
        }
        let value: Cow<'_, str> = match name {
            // They are set below.
            "add_generation_prompt" | "continue_final_message" => continue,
            "max_tokens" | "max_completion_tokens" if value != "null" => {
                has_limit = true;
                tokens_left(name, value, relayed)?.into()
            }
            "min_tokens" if value != "null" => {
                let left = tokens_left(name, value, relayed);
                left.unwrap_or_else(|_| "0".to_owned()).into()
            }
            "messages" if is_chat => {
                has_prompt = true;
                with_answer(value, kept)?.into()
            }
            "prompt" if !is_chat => {
                has_prompt = true;
                with_text(value, kept)?.into()
            }
            _ => value.into(),
        };
        append(&mut continued, name, &value);
    }
    if !has_prompt {
        return Err(ContinueRejection::TokenPrompt);
    }
    if kept.is_empty() {
        // All white space is generated again.
        return Ok(ContinuedBody::unchanged(body));
    }
    if is_chat {
        append(&mut continued, "add_generation_prompt", "false");
        append(&mut continued, "continue_final_message", "true");
    } else if let Some(tokens_max) = tokens_max.filter(|_| !has_limit)
        && relayed.kept_tokens() < tokens_max
    {
        let left = tokens_max - relayed.kept_tokens();
        append(&mut continued, "max_tokens", &left.to_string());
    }
    continued.push(b'}');
    Ok(ContinuedBody {
        bytes: continued.into(),
        held_tokens_max,
    })
}

/// Checks that the answer to `body`, which was sent to `path`, can be continued as far as its fields
/// decide that.
///
/// # Errors
/// Returns the obstacle.
pub(in crate::proxy) fn may_continue(path: &str, body: &[u8]) -> Result<(), ContinueRejection> {
    let (prompt, opens_with) = match path {
        "/v1/chat/completions" => ("messages", b'['),
        _ => ("prompt", b'"'),
    };
    let mut has_prompt = false;
    for member in members(body) {
        let name = std::str::from_utf8(&body[member.key.clone()]).unwrap_or_default();
        let value = std::str::from_utf8(&body[member.value.clone()]).unwrap_or_default();
        check_field(name, value)?;
        has_prompt |= name == prompt && value.as_bytes().first() == Some(&opens_with);
    }
    match has_prompt {
        true => Ok(()),
        false => Err(ContinueRejection::TokenPrompt),
    }
}

/// Returns the part of an answer that the next engine is sent, unless chat templates may change it.
fn kept_text(text: &str, is_chat: bool) -> Result<&str, ContinueRejection> {
    let kept = RelayedText::kept(text, is_chat);
    if !is_chat {
        return Ok(kept);
    }
    let is_led = kept.starts_with(char::is_whitespace);
    if is_led || REASONING.iter().any(|mark| kept.contains(mark)) {
        return Err(ContinueRejection::Template);
    }
    Ok(kept)
}

/// Checks that an answer can be continued with the field `name` set to `value`.
fn check_field(name: &str, value: &str) -> Result<(), ContinueRejection> {
    let dense: String = value.split_ascii_whitespace().collect();
    let is_of = |(field, values): &(&str, &[&str])| *field == name && values.contains(&&*dense);
    let is_neutral = NEUTRAL.contains(&&*dense) && (dense == "null" || !HIDING.contains(&name));
    let is_fine = ANY_VALUE.contains(&name)
        || is_neutral
        || SOME_VALUES.iter().any(is_of)
        || PENALTIES.contains(&name) && matches!(value, "0" | "0.0");
    match is_fine {
        true => Ok(()),
        false => Err(ContinueRejection::Field(name.to_owned())),
    }
}

/// Returns what is left of the number of tokens `value`.
fn tokens_left(
    name: &str,
    value: &str,
    relayed: &RelayedText,
) -> Result<String, ContinueRejection> {
    let tokens: u64 = value
        .parse()
        .map_err(|_| ContinueRejection::Field(name.to_owned()))?;
    match tokens.saturating_sub(relayed.kept_tokens()) {
        0 => Err(ContinueRejection::AtLimit),
        left => Ok(left.to_string()),
    }
}

/// Returns the array `messages` with the answer so far.
fn with_answer(messages: &str, kept: &str) -> Result<String, ContinueRejection> {
    let before = messages
        .strip_suffix(']')
        .ok_or(ContinueRejection::TokenPrompt)?;
    let message = serde_json::json!({ "role": "assistant", "content": kept });
    Ok(format!("{before},{message}]"))
}

/// Returns the string `prompt` with the answer so far.
fn with_text(prompt: &str, kept: &str) -> Result<String, ContinueRejection> {
    let before = prompt.strip_suffix('"').filter(|it| it.starts_with('"'));
    let before = before.ok_or(ContinueRejection::TokenPrompt)?;
    let text = serde_json::Value::from(kept).to_string();
    Ok(format!("{before}{}", &text[1..]))
}

/// Appends a member to an object.
fn append(object: &mut Vec<u8>, name: &str, value: &str) {
    let separator = if object.ends_with(b"{") { "" } else { "," };
    object.extend_from_slice(format!("{separator}\"{name}\":{value}").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::response::answer_usage::inspect;

    const CHAT: &str = "/v1/chat/completions";
    const COMPLETIONS: &str = "/v1/completions";

    /// Returns an answer of these texts, one token each.
    fn relayed(texts: &[&str]) -> RelayedText {
        let mut relayed = RelayedText::new(1000);
        for text in texts {
            let event = serde_json::json!({
                "choices": [{"index": 0, "text": text}],
                "usage": {"prompt_tokens": 5, "completion_tokens": relayed.tokens() + 1},
            });
            relayed.note(&inspect(event.to_string().as_bytes()));
        }
        relayed
    }

    fn continued(path: &str, body: &str, texts: &[&str]) -> Result<String, ContinueRejection> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let body = continued_body(path, &body, &relayed(texts), Some(COMPLETION_TOKENS))?;
        Ok(String::from_utf8(body.bytes.to_vec()).unwrap())
    }

    #[test]
    fn a_chat_gets_its_answer_as_an_open_message() {
        let body = r#" {"model":"m", "messages": [{"role":"user","content":"a"}],"max_tokens":9,"min_tokens":3,"add_generation_prompt":true,"stream":true}"#;
        assert_eq!(
            continued(CHAT, body, &["b\"", "c", "\n"]).unwrap(),
            r#" {"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b\"c"}],"max_tokens":7,"min_tokens":1,"stream":true,"add_generation_prompt":false,"continue_final_message":true}"#
        );
    }

    #[test]
    fn a_completion_gets_its_answer_behind_its_prompt() {
        for (limit, limit_left) in [("\"max_tokens\":20", 18), ("\"max_tokens\":null", 14)] {
            let body = format!(r#"{{"prompt":"é\\u0041\n",{limit},"stream":true}}"#);
            let body = continued(COMPLETIONS, &body, &["b ", "\u{1f600} "]).unwrap();
            let body: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!(body["prompt"], "é\\u0041\nb \u{1f600} ");
            assert_eq!(body["max_tokens"], limit_left);
        }
    }

    #[test]
    fn an_answer_without_text_begins_again() {
        let body = r#"{"messages": [{"role":"user","content":"a"}], "max_tokens": 5}"#;
        for texts in [&[] as &[&str], &["\n", " "]] {
            assert_eq!(continued(CHAT, body, texts).unwrap(), body);
        }
    }

    #[test]
    fn fields_without_an_exact_continuation_are_obstacles() {
        for (member, is_fine) in [
            (r#""n":1"#, true),
            (r#""n":2"#, false),
            (r#""logprobs":true"#, false),
            (r#""logprobs":false"#, true),
            (r#""logprobs":0"#, false),
            (r#""top_logprobs":null"#, true),
            (r#""echo":true"#, false),
            (r#""best_of":2"#, false),
            (r#""use_beam_search":true"#, false),
            (r#""response_format":{"type": "text" }"#, true),
            (r#""include_reasoning":false"#, false),
            (r#""include_reasoning":true"#, true),
            (r#""response_format":{"type":"json_object"}"#, false),
            (r#""guided_json":{"a":1}"#, false),
            (r#""structured_outputs":{"regex":"a"}"#, false),
            (r#""structured_outputs":null"#, true),
            (r#""tool_choice":"auto""#, true),
            (r#""tool_choice":"required""#, false),
            (r#""tools":[{"type":"function"}]"#, true),
            (r#""presence_penalty":0"#, true),
            (r#""presence_penalty":0.5"#, false),
            (r#""repetition_penalty":1.0"#, true),
            (r#""modalities":["audio"]"#, false),
            (r#""continue_final_message":true"#, false),
            (r#""return_token_ids":true"#, false),
            (r#""field_of_tomorrow":1"#, false),
            (r#""n\u":3"#, false),
        ] {
            let body = format!(r#"{{"messages":[{{}}],{member}}}"#);
            let found = continued(CHAT, &body, &["a"]);
            assert_eq!(found.is_ok(), is_fine, "{member}: {found:?}");
            assert_eq!(may_continue(CHAT, body.as_bytes()).is_ok(), is_fine);
        }
        let ids = continued(COMPLETIONS, r#"{"prompt":[1,2]}"#, &["a"]);
        assert_eq!(ids, Err(ContinueRejection::TokenPrompt));
    }

    #[test]
    fn an_answer_without_output_begins_again_with_any_field() {
        let body = r#"{"prompt":[1,2],"logprobs":1,"n":2}"#;
        assert_eq!(continued(COMPLETIONS, body, &[]).unwrap(), body);
    }

    #[test]
    fn a_chat_whose_engine_reports_no_usage_is_not_continued() {
        let mut relayed = RelayedText::new(1000);
        relayed.note(&inspect(br#"{"choices":[{"index":0,"text":"a"}]}"#));
        let body = Bytes::from_static(br#"{"messages":[{}],"prompt":"p"}"#);
        let continued = |path| continued_body(path, &body, &relayed, None);
        assert_eq!(continued(CHAT), Err(ContinueRejection::NoUsage));
        assert_eq!(
            continued(COMPLETIONS).unwrap().bytes,
            r#"{"messages":[{}],"prompt":"pa"}"#
        );
    }

    #[test]
    fn a_text_that_templates_change_is_an_obstacle() {
        let body = r#"{"messages":[{}],"prompt":"a"}"#;
        for text in [" a", "<think>a", "a</think>b"] {
            assert_eq!(
                continued(CHAT, body, &[text]),
                Err(ContinueRejection::Template)
            );
            let body = r#"{"prompt":"a"}"#;
            assert!(continued(COMPLETIONS, body, &[text]).is_ok());
        }
    }

    #[test]
    fn an_answer_of_the_maximum_length_is_not_continued() {
        let body = r#"{"messages":[{}],"max_tokens":2}"#;
        assert_eq!(
            continued(CHAT, body, &["a", "b"]),
            Err(ContinueRejection::AtLimit)
        );
        assert!(continued(CHAT, body, &["a", " "]).is_ok());
    }
}
