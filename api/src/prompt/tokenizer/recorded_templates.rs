//! Chat templates of released models, against what vLLM's renderer made of them.
//!
//! The templates belong to the publishers of the models, so only hashes of the rendered texts are
//! in the repository (`tests/fixtures/templates`). `bash .ci/run templates` fetches the templates.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{env, fs};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::chat::{TokenizerInput, read};
use super::sglang::ChatRenderer;
use super::template::ChatTemplate;

const SHAPES: &str = include_str!("../../../tests/fixtures/templates/shapes.json");
const RECORDED: &str = include_str!("../../../tests/fixtures/templates/vllm.json");

/// Adds texts to ones that are marked `safe`, by which Jinja2 escapes them for HTML; minijinja does
/// not.
const ESCAPES: &str = "meetkai-functionary-medium-v3.1 ";

fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn special_tokens() -> Map<String, Value> {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    tokens
        .map(|(name, token)| (name.to_owned(), token.into()))
        .into_iter()
        .collect()
}

/// Renders the chat of a `shape` with `template`; the reason if the template cannot render it.
fn render(template: &ChatTemplate, shape: &Value) -> Result<String, String> {
    let (path, body) = (shape["path"].as_str().unwrap(), shape["body"].to_string());
    match read(path, body.as_bytes(), ChatRenderer::Vllm) {
        Ok(TokenizerInput::Chat(chat)) => template.render(&chat).map_err(|why| format!("{why:#}")),
        other => panic!("{other:?} is no chat"),
    }
}

#[test]
#[ignore = "needs the templates of released models in the directory QUORATE_TEMPLATES"]
fn released_templates_render_as_vllm_renders_them() {
    let folder = PathBuf::from(env::var_os("QUORATE_TEMPLATES").expect("QUORATE_TEMPLATES"));
    let shapes: BTreeMap<String, Value> = serde_json::from_str(SHAPES).unwrap();
    let recorded: BTreeMap<String, Value> = serde_json::from_str(RECORDED).unwrap();
    let (mut equal, mut refused, mut wrong) = (0, 0, Vec::new());
    for (name, row) in recorded.iter().filter(|(_, row)| row.is_object()) {
        let source = fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        assert_eq!(
            row["template"],
            digest(&source),
            "{name} is another version"
        );
        let template = ChatTemplate::new(&source, special_tokens()).unwrap();
        for (shape, asked) in &shapes {
            let rendered = render(&template, asked);
            let (expected, found) = (&row[shape], rendered.as_deref());
            match found {
                _ if expected.is_null() => refused += 1,
                Ok(text) if *expected == json!([text.len(), digest(text)]) => equal += 1,
                _ => {
                    let found = found.map(str::len);
                    wrong.push(format!("{name} {shape}: {expected} but {found:?}"));
                }
            }
        }
    }
    println!(
        "{equal} equal, {refused} refused by vLLM, {} differ",
        wrong.len()
    );
    wrong.retain(|it| !it.starts_with(ESCAPES));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
