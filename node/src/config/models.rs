//! `[[models]]`: tokenizers are loaded while the config is checked, so that a file that cannot be used
//! is told like every other fault.

use std::path::PathBuf;

use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};

use super::fault::Fault;
use super::layers::Entry;
use super::read::{count, refuse, text, unique};

/// `block_size` with `character`.
const CHARACTER_BLOCK_BYTES: u32 = 128;
/// `block_size` with a tokenizer: vLLM's own.
const BLOCK_TOKENS: u32 = 16;

/// Every entry's settings.
pub(super) fn models(entries: &[Entry], faults: &mut Vec<Fault>) -> Vec<ModelSettings> {
    unique("models", "name", entries, faults);
    everything_last(entries, faults);
    if entries.is_empty() {
        return vec![ModelSettings::characters("*", CHARACTER_BLOCK_BYTES)];
    }
    let model = |(nth, entry)| model(nth, entry, faults);
    entries.iter().enumerate().filter_map(model).collect()
}

/// The first entry that matches a model counts, so that one behind `"*"` never does.
fn everything_last(entries: &[Entry], faults: &mut Vec<Fault>) {
    let is_everything = |entry: &Entry| text(&entry.values, "name").is_some_and(|name| name == "*");
    let Some(nth) = entries.iter().position(is_everything) else {
        return;
    };
    if let Some(behind) = entries.get(nth + 1) {
        let message = format!(
            "models[{}] stands behind models[{nth}], whose name is \"*\"",
            nth + 1
        );
        refuse(
            &behind.values,
            "name",
            message,
            "the name \"*\" last",
            faults,
        );
    }
}

/// Loads the entry's tokenizer: a file that is missing or no tokenizer is a fault of the config.
fn model(nth: usize, entry: &Entry, faults: &mut Vec<Fault>) -> Option<ModelSettings> {
    let values = &entry.values;
    let name = text(values, "name");
    let spec: TokenizerSpec = text(values, "tokenizer")?.parse().ok()?;
    let chat_template = text(values, "chat_template").map(PathBuf::from);
    if chat_template.is_some() && !matches!(spec, TokenizerSpec::HuggingFace(_)) {
        let message = format!("models[{nth}].chat_template has no effect with {spec}");
        let expected = "tokenizer = \"huggingface:FILE\" beside it";
        refuse(values, "chat_template", message, expected, faults);
        return None;
    }
    let default = match spec {
        TokenizerSpec::Character => CHARACTER_BLOCK_BYTES,
        TokenizerSpec::Tiktoken(_) | TokenizerSpec::HuggingFace(_) | TokenizerSpec::Engine => {
            BLOCK_TOKENS
        }
    };
    match Tokenizer::load(spec, chat_template.as_deref()) {
        Ok(tokenizer) => Some(ModelSettings {
            name: name?,
            tokenizer,
            block_size: count(values, "block_size").unwrap_or(default),
        }),
        Err(failure) => {
            let is_template = chat_template.is_some_and(|file| file == failure.file);
            let (key, expected) = if is_template {
                ("chat_template", "a chat template in Jinja")
            } else {
                ("tokenizer", "a tokenizer.json with what stands beside it")
            };
            let message = format!("models[{nth}].{key}: {failure}");
            refuse(values, key, message, expected, faults);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use expect_test::{Expect, expect};

    use crate::config::{Config, Origin, load};

    fn read(models: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("make a folder");
        let file = folder.path().join("quorate.toml");
        let fixtures =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/tests/fixtures/tokenizers");
        let models = models.replace("FIXTURES", &fixtures.to_string_lossy());
        std::fs::write(folder.path().join("broken.json"), "{}").expect("write a file");
        let models = models.replace("DIR", &folder.path().to_string_lossy());
        std::fs::write(&file, format!("[node]\nid = 1\n{models}")).expect("write a file");
        let origin = Origin {
            file: Some(file),
            ..Origin::default()
        };
        let shown = |text: String| text.replace(&*folder.path().to_string_lossy(), "DIR");
        match load(&origin) {
            Ok(loaded) => Ok(loaded.config),
            Err(faults) => {
                let messages = faults
                    .faults
                    .iter()
                    .map(|fault| shown(fault.message.clone()));
                Err(messages.collect::<Vec<_>>().join("\n"))
            }
        }
    }

    #[test]
    fn block_sizes_follow_the_tokenizer_unless_they_are_set() {
        let config = read(
            r#"
[[models]]
name = "a"
tokenizer = "huggingface:FIXTURES/chatml/tokenizer.json"
chat_template = "FIXTURES/parts/chat_template.jinja"
[[models]]
name = "b"
tokenizer = "tiktoken:o200k_base"
block_size = 32
[[models]]
name = "c"
tokenizer = "engine"
[[models]]
name = "*"
"#,
        );
        let models = config.expect("the config is right").models;
        let sizes: Vec<_> = models.iter().map(|it| it.block_size).collect();
        assert_eq!(sizes, [16, 32, 16, 128]);
        assert!(models[3].tokenizer.is_character());
    }

    fn refused(models: &str, expected: &Expect) {
        let messages = read(models).expect_err("the config must be refused");
        expected.assert_eq(&messages);
    }

    #[test]
    fn files_that_cannot_be_used_are_faults_of_the_config() {
        refused(
            r#"
[[models]]
name = "a"
tokenizer = "huggingface:DIR/missing.json"
[[models]]
name = "b"
tokenizer = "huggingface:FIXTURES/chatml/tokenizer.json"
chat_template = "DIR/missing.jinja"
[[models]]
name = "c"
tokenizer = "engine"
chat_template = "DIR/missing.jinja"
[[models]]
name = "d"
tokenizer = "tiktoken:gpt2"
"#,
            &expect![[r#"
                models[0].tokenizer: DIR/missing.json: No such file or directory (os error 2)
                models[1].chat_template: DIR/missing.jinja: No such file or directory (os error 2)
                models[2].chat_template has no effect with engine
                models[3].tokenizer is "tiktoken:gpt2""#]],
        );
        refused(
            "[[models]]\nname = \"*\"\n[[models]]\nname = \"a\"\n",
            &expect![[r#"models[1] stands behind models[0], whose name is "*""#]],
        );
        let broken =
            read("[[models]]\nname = \"a\"\ntokenizer = \"huggingface:DIR/broken.json\"\n");
        let broken = broken.expect_err("the config must be refused");
        assert!(
            broken.starts_with("models[0].tokenizer: DIR/broken.json: "),
            "{broken}"
        );
    }
}
