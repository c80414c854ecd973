//! Fuzz targets for tokenizers, see [`crate::fuzzing`]: conversations and files from third parties.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::LazyLock;

use serde_json::{Map, json};

use super::chat::{self, TokenizerInput};
use super::huggingface::HuggingFace;
use super::remote::tokenize_request;
use super::sglang::ChatRenderer;
use super::template::ChatTemplate;
use super::{Tokenizer, TokenizerContent, TokenizerSpec};
use crate::fuzzing::path_of;

/// Chat template with common features: loops, conditions, filters, tools as JSON.
const TEMPLATE: &str = "{%- if tools %}{{ tools | tojson(indent=4) }}\n{% endif -%}
{% for message in messages %}{% if loop.first and message.role != 'system' %}<s>{% endif %}
<|{{ message['role'] }}|>{% if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}{{ part.text | default('') }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Renders a conversation and builds the request to an engine. Input: one byte for the path, then
/// the body.
pub fn chat(bytes: &[u8]) {
    static CHAT_TEMPLATE: LazyLock<ChatTemplate> = LazyLock::new(|| {
        ChatTemplate::new(TEMPLATE, Map::new()).expect("the template is well formed")
    });
    let Some((path, body)) = path_of(bytes) else {
        return;
    };
    for renderer in [ChatRenderer::Vllm, ChatRenderer::Sglang] {
        let asked = tokenize_request(path, "model", body, renderer);
        let Ok(wanted) = chat::read(path, body, renderer) else {
            assert!(asked.is_err());
            return;
        };
        if let TokenizerInput::Chat(chat) = wanted {
            // The template may reject the conversation.
            drop(CHAT_TEMPLATE.render(&chat));
        }
        if let Ok(TokenizerContent::Text(text)) =
            Tokenizer::character().content(path, body, renderer)
        {
            let read: usize = text.parts.iter().map(String::len).sum();
            // Frames and JSON escapes may lengthen a message.
            assert!(read <= 64 + 16 * body.len(), "{read} of {}", body.len());
        }
    }
}

/// Compiles a chat template and renders conversations with it.
pub fn chat_template(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else {
        return;
    };
    let special = json!({"bos_token": "<s>", "eos_token": "</s>"});
    let special = special.as_object().cloned().unwrap_or_default();
    let Ok(template) = ChatTemplate::new(source, special) else {
        return;
    };
    for body in [CHAT, TOOLS] {
        if let Ok(TokenizerInput::Chat(chat)) =
            chat::read("/v1/chat/completions", body.as_bytes(), ChatRenderer::Vllm)
        {
            drop(template.render(&chat));
        }
    }
}

/// Loads a `tokenizer.json` and, if it is valid, tokenizes texts with it.
pub fn tokenizer_file(bytes: &[u8]) {
    let scratch = Scratch::new();
    std::fs::write(&scratch.0, bytes).expect("the scratch folder can be written");
    let Ok(files) = HuggingFace::load(&scratch.0, None) else {
        return;
    };
    drop(files);
    let spec = TokenizerSpec::HuggingFace(scratch.0.clone());
    let Ok(tokenizer) = Tokenizer::load(spec, None) else {
        return;
    };
    let texts = [
        "",
        "a",
        "hello  world<s>x é\u{0}",
        "<s></s> abab",
        &"ab ".repeat(100),
    ];
    for text in texts {
        let body = json!({"prompt": text, "model": "m"}).to_string();
        let ids = Arc::clone(&tokenizer).encode_request("/v1/completions", body.as_bytes());
        if let Some(ids) = ids {
            let _text = tokenizer.decode(&ids);
        }
    }
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"hello"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]},{"role":"assistant","content":"hi"},{"role":"user","content":"bye"}],"max_tokens":7,"stream":true}"#;
const TOOLS: &str = r#"{"model":"m","messages":[{"role":"user","content":"weather?"},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"x\": [1, 2.5, null]}"}}]},{"role":"tool","tool_call_id":"c","content":"rain"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"x":{"type":"array"}}}}}],"chat_template_kwargs":{"enable_thinking":false},"documents":[{"text":"d"}],"continue_final_message":true,"add_generation_prompt":false}"#;

/// Returns seeds for [`chat()`]: conversations in the formats of all APIs.
#[must_use]
pub fn chat_seeds() -> Vec<Vec<u8>> {
    let bodies: [(u8, &str); 8] = [
        (0, CHAT),
        (0, TOOLS),
        (1, r#"{"model":"m","prompt":["one","two"]}"#),
        (1, r#"{"model":"m","prompt":[1,2,300000]}"#),
        (
            2,
            r#"{"model":"m","instructions":"be brief","input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]},{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"x"}]}"#,
        ),
        (
            3,
            r#"{"model":"m","max_tokens":9,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"r"},{"type":"text","text":"q"}]},{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"a":1}}]}]}"#,
        ),
        (5, r#"{"model":"m","input":["a","b"]}"#),
        (7, r#"{"model":"m","text_1":"a","text_2":["b"]}"#),
    ];
    let seed = |(path, body): (u8, &str)| [&[path][..], body.as_bytes()].concat();
    bodies.map(seed).to_vec()
}

/// Returns seeds for [`chat_template()`]: valid templates.
#[must_use]
pub fn chat_template_seeds() -> Vec<Vec<u8>> {
    let sources = [
        TEMPLATE,
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.role ~ ': ' ~ m.content }}{% generation %}{{ eos_token }}{% endgeneration %}{% endfor %}{{ ns.n }}",
        "{% macro show(m) %}{{ m.content[:3] | upper | replace('a', 'b') }}{% endmacro %}{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}{{ strftime_now('%d %b %Y') }}{{ raise_exception('no') if not messages }}",
        "{% for i in range(10) %}{{ 'ab' * i }}{{ messages | length }}{{ (1, 2) | join(',') }}{{ messages | map(attribute='role') | list }}{% endfor %}",
    ];
    sources.map(|source| source.as_bytes().to_vec()).to_vec()
}

/// Returns seeds for [`tokenizer_file`]: small tokenizers of the common model types.
#[must_use]
pub fn tokenizer_file_seeds() -> Vec<Vec<u8>> {
    let added = json!([{
        "id": 9, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    }]);
    let file = |normalizer, pre_tokenizer, post_processor, decoder, model| {
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor, "decoder": decoder, "model": model,
        });
        file.to_string().into_bytes()
    };
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    let pairs = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "ignore_merges": false, "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "abab": 4},
        "merges": [["a", "b"], ["ab", "ab"]],
    });
    let words = json!({
        "type": "WordLevel", "vocab": {"hello": 0, "world": 1, "a": 2, "[UNK]": 3},
        "unk_token": "[UNK]",
    });
    let around = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [9], "tokens": ["<s>"]}},
    });
    let split = json!({
        "type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false},
            bytes,
        ],
    });
    let pieces = json!({
        "type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["▁", -2.0], ["a", -1.5], ["ab", -1.0]],
    });
    let meta =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let null = || serde_json::Value::Null;
    vec![
        file(null(), bytes.clone(), null(), bytes.clone(), pairs.clone()),
        file(json!({"type": "NFC"}), split, around, bytes, pairs),
        file(
            json!({"type": "Lowercase"}),
            json!({"type": "Whitespace"}),
            null(),
            null(),
            words,
        ),
        file(null(), meta.clone(), null(), meta, pieces),
    ]
}

/// A temporary file of this thread, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let (process, thread) = (std::process::id(), std::thread::current().id());
        let folder = std::env::temp_dir().join(format!("quorate-fuzzing-{process}-{thread:?}"));
        std::fs::create_dir_all(&folder).expect("the scratch folder can be made");
        Self(folder.join("tokenizer.json"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
        self.0.parent().map(std::fs::remove_dir);
    }
}
