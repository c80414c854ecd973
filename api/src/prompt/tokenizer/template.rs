//! Renders a model's chat template as `transformers` and vLLM do.
//!
//! The template is the operator's file, but its input is untrusted: a rendering is bounded in
//! instructions and output bytes, and a template error is an ordinary result.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, json};

use super::chat::Chat;
use super::content_format::PartReaders;
use super::sglang::{self, ChatRenderer};
use super::{developer, python};

/// Maximum number of instructions of one rendering.
const RENDER_FUEL_MAX: u64 = 4_000_000;
/// Maximum length of a rendered text, in bytes.
pub(super) const RENDERED_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Name of the template, as shown in error messages.
const NAME: &str = "chat_template";
/// Marker appended to a final message that is to be continued, to find its end in the output.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A compiled chat template.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Values of `bos_token` and similar variables.
    special_tokens: Map<String, serde_json::Value>,
    /// Engines that give the template contents as lists of parts.
    part_readers: PartReaders,
    /// Whether the template handles the role `developer`.
    names_developer: bool,
    /// How a response appears in the next turn's prompt.
    replies: ReplyRendering,
}

/// How a template renders a response in the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyRendering {
    /// The response follows the generation prompt directly and unchanged.
    Kept,
    /// The response follows the generation prompt unchanged if it has no white space at its ends.
    KeptTrimmed,
    /// The response appears in another form or not at all.
    Changed,
}

impl ChatTemplate {
    /// Compiles the template `source` and tries how it renders responses.
    pub(super) fn new(
        source: &str,
        special_tokens: Map<String, serde_json::Value>,
    ) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = environment.syntax().to_builder();
        let syntax = { syntax }.trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax.clone());
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(RENDER_FUEL_MAX));
        environment.add_filter("tojson", |value: &Value, kwargs: Kwargs| {
            python::tojson(value, &kwargs)
        });
        // minijinja takes `none` for iterable, and a text for no sequence.
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        environment.add_test("sequence", |value: &Value| {
            let kind = value.kind();
            let is_indexed = matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::String);
            is_indexed || value.is_undefined()
        });
        environment.add_function("raise_exception", |message: String| {
            Err::<Value, Error>(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: &str| {
            python::strftime(python::today(), format)
        });
        let plain = without_generation_marks(source);
        let part_readers = PartReaders::of(&plain, syntax)?;
        environment.add_template_owned(NAME, plain)?;
        let mut template = Self {
            environment,
            special_tokens,
            part_readers,
            names_developer: developer::is_named_in(source),
            replies: ReplyRendering::Changed,
        };
        template.replies = template.try_replies();
        Ok(template)
    }

    pub(super) fn replies(&self) -> ReplyRendering {
        self.replies
    }

    /// Renders a conversation as text. Fails if the template rejects it or exceeds a bound.
    pub(super) fn render(&self, chat: &Chat) -> Result<String, Error> {
        let mut messages = chat.for_template(self.part_readers.contain(chat.renderer));
        match chat.renderer {
            ChatRenderer::Vllm if !self.names_developer => {
                messages = developer::without(messages);
            }
            ChatRenderer::Vllm => {}
            ChatRenderer::Sglang => sglang::end_with_user(&mut messages),
        }
        self.render_messages(chat, messages)
    }

    fn render_messages(
        &self,
        chat: &Chat,
        mut messages: Vec<serde_json::Value>,
    ) -> Result<String, Error> {
        if chat.continue_final_message {
            mark_end(&mut messages)?;
        }
        let mut variables = self.special_tokens.clone();
        variables.extend(chat.kwargs.clone());
        variables.insert("messages".to_owned(), messages.into());
        let tools = chat.tools.clone().unwrap_or_default();
        variables.insert("tools".to_owned(), tools);
        let documents = chat.documents.clone().unwrap_or_default();
        variables.insert("documents".to_owned(), documents);
        let is_reply_wanted = chat.add_generation_prompt && !chat.continue_final_message;
        variables.insert("add_generation_prompt".to_owned(), is_reply_wanted.into());
        let template = self.environment.get_template(NAME)?;
        let mut out = BoundedWriter(Vec::new());
        template.render_captured_to(Value::from(Serde(variables)), &mut out)?;
        let text = String::from_utf8(out.0)
            .map_err(|_| Error::new(ErrorKind::BadSerialization, "the text is not UTF-8"))?;
        if chat.continue_final_message {
            return cut_at_mark(text);
        }
        Ok(text)
    }

    /// Determines by trial how a response appears in the next turn.
    fn try_replies(&self) -> ReplyRendering {
        let user = |text: &str| json!({"role": "user", "content": text});
        let first = self.render(&plain_chat(vec![user("first")], true));
        let Ok(first) = first else {
            return ReplyRendering::Changed;
        };
        let is_kept = |reply: &str| {
            let assistant = json!({"role": "assistant", "content": reply});
            let turns = vec![user("first"), assistant, user("second")];
            let next = self.render(&plain_chat(turns, true));
            next.is_ok_and(|next| next.starts_with(&format!("{first}{reply}")))
        };
        if !is_kept("the reply") {
            ReplyRendering::Changed
        } else if is_kept(" \n the reply \n ") {
            ReplyRendering::Kept
        } else {
            ReplyRendering::KeptTrimmed
        }
    }
}

fn plain_chat(messages: Vec<serde_json::Value>, add_generation_prompt: bool) -> Chat {
    Chat {
        messages,
        tools: None,
        documents: None,
        kwargs: Map::new(),
        add_generation_prompt,
        continue_final_message: false,
        add_special_tokens: false,
        renderer: ChatRenderer::Vllm,
    }
}

/// Replaces `{% generation %}`, which marks an assistant's text for training, by `{% if true %}`.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let Some(length) = rest[at + 2..].find("%}").map(|length| length + 2) else {
            break;
        };
        let (before, block) = (&rest[..at], &rest[at..at + length + 2]);
        out.push_str(before);
        let name = block[2..length].trim_matches(['-', '+', ' ', '\n', '\t']);
        match name {
            "generation" => out.push_str(&block.replace("generation", "if true")),
            "endgeneration" => out.push_str(&block.replace("endgeneration", "endif")),
            _ => out.push_str(block),
        }
        rest = &rest[at + length + 2..];
    }
    out.push_str(rest);
    out
}

fn mark_end(messages: &mut [serde_json::Value]) -> Result<(), Error> {
    let nothing = || Error::new(ErrorKind::InvalidOperation, "no final message to continue");
    let content = messages
        .last_mut()
        .and_then(|message| message.get_mut("content"))
        .ok_or_else(nothing)?;
    let text = match content {
        serde_json::Value::Array(parts) => {
            let last = parts.iter_mut().rev().find_map(|part| part.get_mut("text"));
            last.ok_or_else(nothing)?
        }
        text => text,
    };
    let marked = format!("{}{CONTINUE_TAG}", text.as_str().ok_or_else(nothing)?);
    *text = marked.into();
    Ok(())
}

fn cut_at_mark(mut text: String) -> Result<String, Error> {
    let at = text.rfind(CONTINUE_TAG.trim_end()).ok_or_else(|| {
        let what = "the template drops the final message that is to be continued";
        Error::new(ErrorKind::InvalidOperation, what)
    })?;
    let is_exact = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !is_exact {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

/// A writer that fails beyond [`RENDERED_BYTES_MAX`].
struct BoundedWriter(Vec<u8>);

impl Write for BoundedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > RENDERED_BYTES_MAX {
            return Err(io::Error::other("the rendered prompt is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, Map::new()).unwrap()
    }

    fn user(text: &str) -> Chat {
        plain_chat(vec![json!({"role": "user", "content": text})], true)
    }

    #[test]
    fn a_render_is_bounded_in_steps_and_bytes() {
        const ENDLESS: &str = "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = a %}{% endfor %}{% endfor %}";
        let mut endless = template("");
        assert_eq!(endless.environment.fuel(), Some(RENDER_FUEL_MAX));
        endless.environment.set_fuel(Some(10_000));
        let source = ENDLESS.to_owned();
        endless
            .environment
            .add_template_owned(NAME, source)
            .unwrap();
        let error = endless.render(&user("x")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfFuel);
        let long = "{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}";
        let error = template(long)
            .render(&user(&"x".repeat(10_000)))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WriteFailure);
    }

    #[test]
    fn a_chat_template_may_raise_an_error() {
        let source =
            "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}yes";
        let error = template(source).render(&user("no")).unwrap_err();
        assert!(error.to_string().contains("not this"), "{error}");
        assert_eq!(template(source).render(&user("x")).unwrap(), "yes");
    }

    #[test]
    fn developer_messages_become_system_if_unsupported() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let messages = vec![
            json!({"role": "user", "content": "x"}),
            json!({"role": "developer", "content": "y"}),
        ];
        let chat = plain_chat(messages, true);
        assert_eq!(template(source).render(&chat).unwrap(), "<system>y<user>x");
        let knows = format!("{source}{{% if m == 'developer' %}}{{% endif %}}");
        assert_eq!(
            template(&knows).render(&chat).unwrap(),
            "<user>x<developer>y"
        );
    }

    #[test]
    fn tests_of_types_match_jinja2() {
        let values = json!({"none": null, "flag": true, "number": 3, "float": 1.5, "text": "a",
            "list": [1], "map": {"a": 1}});
        let values = values.as_object().unwrap();
        let names = "none flag number float text list map missing";
        // Printed by Jinja2 3.1.
        for (test, expected) in [
            ("iterable", "text list map missing"),
            ("sequence", "text list map missing"),
            ("mapping", "map"),
            ("string", "text"),
            ("number", "flag number float"),
            ("integer", "number"),
            ("float", "float"),
            ("boolean", "flag"),
            ("none", "none"),
            ("defined", "none flag number float text list map"),
        ] {
            let if_so = |name: &str| format!("{{% if {name} is {test} %}}{name} {{% endif %}}");
            let source = names.split(' ').map(if_so).collect::<String>();
            let mut chat = user("x");
            chat.kwargs = values.clone();
            let found = template(&source).render(&chat).unwrap();
            assert_eq!(found.trim_end(), expected, "{test}");
        }
    }

    #[test]
    fn a_template_may_ask_whether_there_are_tools() {
        // From the templates of Qwen3-Coder and Nemotron 3.
        let source = "{% if not tools is defined %}{% set tools = [] %}{% endif %}\
            {% if tools is iterable and tools | length > 0 %}tools{% else %}none{% endif %}";
        let mut chat = user("x");
        assert_eq!(template(source).render(&chat).unwrap(), "none");
        chat.tools = Some(json!([{"type": "function"}]));
        assert_eq!(template(source).render(&chat).unwrap(), "tools");
    }

    #[test]
    fn generation_marks_render_nothing() {
        let source =
            "a\n{%- generation -%}\n b \n{%- endgeneration %}c{% if true %}d{% endif %}{% x";
        let without = without_generation_marks(source);
        assert_eq!(
            without,
            "a\n{%- if true -%}\n b \n{%- endif %}c{% if true %}d{% endif %}{% x"
        );
        assert_eq!(without_generation_marks("{%}"), "{%}");
        assert!(ChatTemplate::new("{%}", Map::new()).is_err());
    }

    #[test]
    fn reply_rendering_is_detected_by_trial() {
        let kept = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        assert_eq!(template(kept).replies(), ReplyRendering::Kept);
        let trimmed = kept.replace("m.content", "m.content | trim");
        assert_eq!(template(&trimmed).replies(), ReplyRendering::KeptTrimmed);
        let changed = kept.replace("{{ m.content", "-{{ m.content");
        assert_eq!(template(&changed).replies(), ReplyRendering::Changed);
    }
}
