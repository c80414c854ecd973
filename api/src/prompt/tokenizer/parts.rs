//! Messages and the parts of their contents, which the APIs have in common.

use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// Error for a body that cannot be converted, so that its prompt is identified by its characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnclearBodyError;

pub(super) fn array(value: Option<Value>) -> Result<Vec<Value>, UnclearBodyError> {
    match value {
        Some(Value::Array(items)) => Ok(items),
        _ => Err(UnclearBodyError),
    }
}

/// Converts the parts of a message's content to text parts and markers, and removes null fields and
/// `cache_control`. Fails unless the message has a role.
pub(super) fn message(message: Value) -> Result<Value, UnclearBodyError> {
    let Value::Object(mut message) = message else {
        return Err(UnclearBodyError);
    };
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(UnclearBodyError);
    }
    if let Some(Value::Array(parts)) = message.get_mut("content") {
        let whole = std::mem::take(parts).into_iter().filter_map(part);
        *parts = whole.collect();
    }
    message.retain(|_, value| !value.is_null());
    message.shift_remove("cache_control");
    Ok(Value::Object(message))
}

pub(super) fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Converts one part of a message's content to a text part; `None` if it has no text.
fn part(part: Value) -> Option<Value> {
    let part = match part {
        Value::String(text) => return Some(text_part(&text)),
        Value::Object(part) => part,
        other => return Some(text_part(&other.to_string())),
    };
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("");
    let field = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        _ => return Some(text_part(&marker(&part))),
    };
    part.get(field).and_then(Value::as_str).map(text_part)
}

/// Returns the marker for an image or other media: its kind and a hash of the client's `uuid`
/// (vLLM's cache key), else of its URL (which may contain the data), else of the whole part.
fn marker(part: &Map<String, Value>) -> String {
    const KINDS: [&str; 4] = ["image", "audio", "video", "file"];
    let names = || part.keys().map(String::as_str);
    let kind = part.get("type").and_then(Value::as_str);
    let is_of = |kind_of: &&&str| {
        kind.into_iter()
            .chain(names())
            .any(|it| it.contains(**kind_of))
    };
    let kind = KINDS.iter().find(is_of).copied().or(kind);
    let url = ["image_url", "audio_url", "video_url"]
        .iter()
        .find_map(|field| part.get(*field))
        .and_then(|it| it.as_str().or_else(|| it.get("url")?.as_str()));
    let uuid = part.get("uuid").and_then(Value::as_str);
    let hash = match uuid.or(url) {
        Some(uuid) if Some(uuid) != url => xxh3_64(format!("uuid:{uuid}").as_bytes()),
        Some(url) => xxh3_64(url.as_bytes()),
        None => {
            let mut rest = part.clone();
            rest.retain(|field, _| !matches!(field.as_str(), "type" | "cache_control"));
            xxh3_64(Value::Object(rest).to_string().as_bytes())
        }
    };
    format!("<|{}:{hash:016x}|>", kind.unwrap_or("part"))
}
