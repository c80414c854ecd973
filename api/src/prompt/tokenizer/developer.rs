//! Replaces the role `developer` for templates that do not handle it, as vLLM does since 0.32.
//!
//! Developer messages become system messages, which are then merged into one at the beginning,
//! because many templates accept a system message only there.

use serde_json::{Value, json};

use super::chat::as_text;
use super::sglang::ChatRenderer;

/// Whether `template` handles the role `developer` itself.
pub(super) fn is_named_in(template: &str) -> bool {
    template.contains("\"developer\"") || template.contains("'developer'")
}

fn has_role(message: &Value, role: &str) -> bool {
    message.get("role").is_some_and(|known| known == role)
}

/// Replaces the role `developer` in `messages`, if present.
pub(super) fn without(messages: Vec<Value>) -> Vec<Value> {
    if !messages.iter().any(|it| has_role(it, "developer")) {
        return messages;
    }
    let as_system = |mut message: Value| {
        if has_role(&message, "developer")
            && let Some(message) = message.as_object_mut()
        {
            message.insert("role".to_owned(), json!("system"));
            message.shift_remove("tools");
        }
        message
    };
    let messages: Vec<Value> = messages.into_iter().map(as_system).collect();
    let is_system = |message: &Value| has_role(message, "system");
    if messages.iter().skip(1).all(|message| !is_system(message)) {
        return messages;
    }
    let (system, others): (Vec<_>, Vec<_>) = messages.into_iter().partition(is_system);
    let texts = system
        .iter()
        .map(|message| as_text(message.get("content"), ChatRenderer::Vllm));
    let texts: Vec<_> = texts.filter(|text| !text.is_empty()).collect();
    let merged = json!({"role": "system", "content": texts.join("\n\n")});
    std::iter::once(merged).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: impl Into<Value>) -> Value {
        json!({"role": role, "content": content.into()})
    }

    #[test]
    fn developer_messages_merge_into_one_system_message() {
        let parts = json!([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]);
        let untouched = vec![
            message("system", "a"),
            message("user", "x"),
            message("system", "b"),
        ];
        assert_eq!(
            without(untouched.clone()),
            untouched,
            "nobody is a developer"
        );
        let first = vec![message("developer", parts.clone()), message("user", "x")];
        let expected = vec![message("system", parts.clone()), message("user", "x")];
        assert_eq!(without(first), expected);
        let several = vec![
            message("system", "a"),
            message("user", "x"),
            message("developer", parts),
            message("system", ""),
        ];
        let expected = vec![message("system", "a\n\nb\nc"), message("user", "x")];
        assert_eq!(without(several), expected);
    }
}
