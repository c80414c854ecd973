//! What SGLang does differently from vLLM with a chat before it renders the template
//! (`entrypoints/openai/serving_chat.py` and `protocol.py` of 0.5.23; reimplemented, not copied).
//!
//! The final message is always a user's: an assistant's is passed off as one, or, to be continued,
//! is left out of the template and tokenized alone.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{Tokenizer, TokenizerContent};
use crate::engines::backends::EngineKind;

/// Engine whose way of rendering chats is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ChatRenderer {
    /// vLLM, and engines without a way that is known.
    #[default]
    Vllm,
    Sglang,
}

impl ChatRenderer {
    /// Returns the way in which an engine of `kind` renders chats.
    pub(crate) fn of(kind: Option<EngineKind>) -> Self {
        match kind {
            Some(EngineKind::Sglang) => Self::Sglang,
            Some(EngineKind::Vllm | EngineKind::LlamaCpp | EngineKind::Dynamo) | None => Self::Vllm,
        }
    }

    /// Returns the text between the parts of a content that the template wants as one text.
    pub(super) fn between_parts(self) -> &'static str {
        match self {
            Self::Vllm => "\n",
            Self::Sglang => " ",
        }
    }

    /// Whether contents that are one text become lists for a template that reads lists.
    pub(super) fn wraps_texts(self) -> bool {
        self == Self::Vllm
    }
}

impl Tokenizer {
    /// Returns the token ids of a request to an engine of `kind`, as [`Self::encode_request`] does.
    #[must_use]
    pub fn encode_request_for(
        self: &Arc<Self>,
        path: &str,
        body: &[u8],
        kind: Option<EngineKind>,
    ) -> Option<Vec<u32>> {
        match self.content(path, body, ChatRenderer::of(kind)).ok()? {
            TokenizerContent::Text(text) => Some(self.encode(&text, "", usize::MAX).ok()?.ids),
            TokenizerContent::Ids(ids) => Some(ids),
            TokenizerContent::Nothing => None,
        }
    }
}

/// Adds what `effort` means to the variables of the template. Those that the client set stay.
pub(super) fn set_effort(kwargs: &mut Map<String, Value>, effort: String) {
    switch_thinking(kwargs, effort != "none");
    kwargs.entry("reasoning_effort").or_insert(effort.into());
}

/// Sets both names of the switch that templates read, unless the client did.
fn switch_thinking(kwargs: &mut Map<String, Value>, is_thinking: bool) {
    for name in ["thinking", "enable_thinking"] {
        kwargs.entry(name).or_insert(is_thinking.into());
    }
}

/// Adds what `thinking` and `output_config` of a body for `/v1/messages` mean to its variables of
/// the template (`entrypoints/anthropic/serving.py`). Those that the client set stay.
pub(super) fn set_thinking(body: &mut Map<String, Value>) {
    let thinking = body.get("thinking").and_then(|it| it["type"].as_str());
    let is_thinking = match thinking {
        Some("disabled") => Some(false),
        Some("enabled" | "adaptive") => Some(true),
        _ => None,
    };
    let effort = body.get("output_config").map(|it| it["effort"].clone());
    let effort = effort.filter(Value::is_string);
    let effort = effort.map(|it| if it == "xhigh" { json!("max") } else { it });
    let kwargs = body.entry("chat_template_kwargs").or_insert(Value::Null);
    if kwargs.is_null() {
        *kwargs = json!({});
    }
    let Some(kwargs) = kwargs.as_object_mut() else {
        return;
    };
    if let Some(is_thinking) = is_thinking {
        switch_thinking(kwargs, is_thinking);
    }
    if let Some(effort) = effort {
        kwargs.entry("reasoning_effort").or_insert(effort);
    }
}

/// Returns those of `tools` that `choice` leaves in the prompt.
pub(super) fn chosen(mut tools: Vec<Value>, choice: Option<&Value>) -> Vec<Value> {
    match choice {
        Some(Value::String(choice)) if choice == "none" => Vec::new(),
        Some(choice @ Value::Object(_)) => {
            let name = &choice["function"]["name"];
            tools.retain(|tool| &tool["function"]["name"] == name);
            tools
        }
        _ => tools,
    }
}

/// Converts a tool as SGLang serializes it: the fields of the function in the client's order.
pub(super) fn tool(mut function: Map<String, Value>, deferred: Option<&Value>) -> Value {
    const ALWAYS: [&str; 3] = ["description", "name", "parameters"];
    function.retain(|field, value| match field.as_str() {
        "strict" | "defer_loading" => !value.is_null(),
        field => ALWAYS.contains(&field),
    });
    for field in ALWAYS {
        function.entry(field).or_insert(Value::Null);
    }
    json!({"type": "function", "function": function, "defer_loading": deferred})
}

/// Passes a final message of the assistant off as the user's, as long as it is one text.
pub(super) fn end_with_user(messages: &mut [Value]) {
    if let Some(last) = messages.last_mut().filter(|it| is_assistants(it))
        && let content @ Value::String(_) = &last["content"]
    {
        *last = json!({"role": "user", "content": content});
    }
}

/// Whether a message is the assistant's.
pub(super) fn is_assistants(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

#[cfg(test)]
mod tests {
    use super::super::chat::{self, Chat};
    use super::super::template::ChatTemplate;
    use super::*;

    /// A template that prints what it gets.
    const PRINTED: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
        {% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<>{% endif %}";

    fn read(body: &Value) -> Chat {
        let body = body.to_string();
        let path = "/v1/chat/completions";
        match chat::read(path, body.as_bytes(), ChatRenderer::Sglang).unwrap() {
            chat::TokenizerInput::Chat(chat) => *chat,
            other => panic!("{other:?} is no chat"),
        }
    }

    fn printed(body: &Value) -> String {
        let template = ChatTemplate::new(PRINTED, Map::new()).unwrap();
        template.render(&read(body)).unwrap()
    }

    #[test]
    fn thinking_of_messages_sets_the_switch_and_an_effort_only_itself() {
        let kwargs = |fields: Value| {
            let mut body = fields.as_object().unwrap().clone();
            set_thinking(&mut body);
            body["chat_template_kwargs"].clone()
        };
        let on = json!({"thinking": true, "enable_thinking": true});
        assert_eq!(kwargs(json!({"thinking": {"type": "adaptive"}})), on);
        let off = json!({"thinking": false, "enable_thinking": false, "reasoning_effort": "max"});
        let effort = json!({"effort": "xhigh"});
        let both = json!({"thinking": {"type": "disabled"}, "output_config": effort});
        assert_eq!(kwargs(both), off);
        let only_effort = json!({"output_config": {"effort": "low"}});
        assert_eq!(kwargs(only_effort), json!({"reasoning_effort": "low"}));
        let own = json!({"chat_template_kwargs": {"thinking": 1, "enable_thinking": 2}});
        assert_eq!(kwargs(own), json!({"thinking": 1, "enable_thinking": 2}));
    }

    #[test]
    fn tools_keep_the_order_of_their_fields() {
        let function = json!({"parameters": {}, "name": "f", "x_vendor": 1, "strict": null});
        let tools = json!([{"type": "function", "function": function, "x": 1}]);
        let body = |choice: Value| json!({"messages": [], "tools": tools, "tool_choice": choice});
        let expected = r#"[{"type": "function", "function": {"parameters": {}, "name": "f", "description": null}, "defer_loading": null}]<>"#;
        assert_eq!(printed(&body(json!("auto"))), expected);
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        assert_eq!(printed(&body(named("f"))), expected);
        assert_eq!(printed(&body(named("g"))), "<>");
        assert_eq!(printed(&body(json!("none"))), "<>");
        let deferred = json!({"function": {"name": "f"}, "defer_loading": true});
        let tools = read(&json!({"messages": [], "tools": [deferred]})).tools;
        assert_eq!(tools.unwrap()[0]["function"]["defer_loading"], true);
    }

    #[test]
    fn parts_are_joined_by_blanks_and_developers_stay() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let body = json!({"messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
        ]});
        assert_eq!(printed(&body), "<developer>be brief<user>a b<>");
    }

    #[test]
    fn a_text_stays_one_for_a_template_that_reads_lists() {
        let source = "{% for m in messages %}{% if m.content is string %}text{% else %}\
            {% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}";
        let template = ChatTemplate::new(source, Map::new()).unwrap();
        let body = json!({"messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
        ]});
        assert_eq!(template.render(&read(&body)).unwrap(), "textb");
    }

    #[test]
    fn a_final_message_of_the_assistant_becomes_the_users_or_is_continued() {
        let body = |more: Value| {
            let turns = [("user", "hi"), ("assistant", "well")];
            let turn = |(role, content)| json!({"role": role, "content": content});
            let mut body = json!({"messages": turns.map(turn)});
            body.as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            body
        };
        assert_eq!(printed(&body(json!({}))), "<user>hi<user>well<>");
        // The field is not one of SGLang's chats.
        let ignored = body(json!({"add_generation_prompt": false}));
        assert_eq!(printed(&ignored), "<user>hi<user>well<>");
        let continued = body(json!({"continue_final_message": true})).to_string();
        let path = "/v1/chat/completions";
        let text = Tokenizer::character().content(path, continued.as_bytes(), ChatRenderer::Sglang);
        let Ok(TokenizerContent::Text(text)) = text else {
            panic!("{text:?}");
        };
        // Without a template, each message is a frame.
        assert_eq!(text.parts, ["<|user|>\nhi\n", "well"]);
    }

    #[test]
    fn effort_sets_both_names_of_thinking_that_are_not_set() {
        let own = json!({"thinking": true});
        let body = |effort: &str| json!({"messages": [], "reasoning_effort": effort, "chat_template_kwargs": own});
        let kwargs = |effort: &str| Value::Object(read(&body(effort)).kwargs);
        let expected =
            json!({"thinking": true, "enable_thinking": false, "reasoning_effort": "none"});
        assert_eq!(kwargs("none"), expected);
        assert_eq!(kwargs("high")["enable_thinking"], true);
    }
}
