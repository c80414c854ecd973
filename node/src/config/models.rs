//! Checks of `[[models]]`. Tokenizers are loaded while the config is checked, so that an unusable
//! file is reported like any other error.

use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use state::policy::PairSettings;

use super::file::ModelConfig;
use super::read::Settings;

/// Default `block_size` with the `character` tokenizer, in bytes.
const CHARACTER_BLOCK_BYTES: u32 = 128;

/// Returns the settings of all valid entries; without entries, those of one entry for all models.
pub(super) fn models(models: &[ModelConfig], found: &mut Settings) -> Vec<ModelSettings> {
    found.unique("models", "name", models.iter().map(|model| &*model.name));
    everything_last(models, found);
    if models.is_empty() {
        return vec![ModelSettings::characters("*", CHARACTER_BLOCK_BYTES)];
    }
    let settings = |(nth, model)| settings(&format!("models[{nth}]"), model, found);
    models.iter().enumerate().filter_map(settings).collect()
}

/// Rejects an entry after `"*"`, which would have no effect: the first entry that matches a model
/// applies.
fn everything_last(models: &[ModelConfig], found: &mut Settings) {
    let everything = models.iter().position(|model| model.name == "*");
    let behind = everything.filter(|nth| nth + 1 < models.len());
    if let Some(nth) = behind {
        let behind = format!("models[{}]", nth + 1);
        let message = format!("{behind} comes after models[{nth}], whose name is \"*\"");
        found.refuse(&format!("{behind}.name"), message, "the name \"*\" last");
    }
}

/// Returns the settings of an entry, with its tokenizer loaded; `None` if there is an error.
fn settings(path: &str, model: &ModelConfig, found: &mut Settings) -> Option<ModelSettings> {
    if !found.is_sound(&format!("{path}.tokenizer")) {
        return None;
    }
    let (spec, template) = (model.tokenizer.clone(), model.chat_template.as_deref());
    let has_files = matches!(
        spec,
        TokenizerSpec::HuggingFace(_) | TokenizerSpec::EngineOr(_)
    );
    if template.is_some() && !has_files {
        let key = format!("{path}.chat_template");
        let message = format!("{key} has no effect with {spec}");
        found.refuse(&key, message, "tokenizer = \"huggingface:FILE\" beside it");
        return None;
    }
    match Tokenizer::load(spec, template) {
        Ok(tokenizer) => Some(ModelSettings {
            name: model.name.clone(),
            tokenizer,
            block_size: model.block_size,
            pairs: PairSettings {
                disaggregate: model.disaggregate,
                above_tokens: model.disaggregate_above_tokens,
            },
        }),
        Err(failure) => {
            let (key, expected) = if template == Some(&failure.file) {
                ("chat_template", "a chat template in Jinja")
            } else {
                ("tokenizer", "a tokenizer.json with the files beside it")
            };
            let key = format!("{path}.{key}");
            found.refuse(&key, format!("{key}: {failure}"), expected);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use expect_test::{Expect, expect};
    use state::policy::Disaggregate;

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
            Err(errors) => {
                let messages = errors
                    .errors
                    .iter()
                    .map(|error| shown(error.message.clone()));
                Err(messages.collect::<Vec<_>>().join("\n"))
            }
        }
    }

    #[test]
    fn block_sizes_default_to_the_engines() {
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
        assert_eq!(sizes, [None, Some(32), None, None]);
        assert!(models[3].tokenizer.is_character());
    }

    #[test]
    fn disaggregation_settings_are_read_per_model() {
        let config = read(
            r#"
[[models]]
name = "a"
disaggregate = "always"
[[models]]
name = "b"
disaggregate_above_tokens = 2048
[[models]]
name = "*"
disaggregate = "off"
"#,
        );
        let models = config.expect("the config is right").models;
        let pairs = models
            .iter()
            .map(|it| (it.pairs.disaggregate, it.pairs.above_tokens));
        let expected = [
            (Disaggregate::Always, 512),
            (Disaggregate::Auto, 2048),
            (Disaggregate::Off, 512),
        ];
        assert!(pairs.eq(expected));
    }

    fn refused(models: &str, expected: &Expect) {
        let messages = read(models).expect_err("the config must be refused");
        expected.assert_eq(&messages);
    }

    #[test]
    fn unusable_tokenizer_files_are_config_errors() {
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
            &expect![[r#"models[1] comes after models[0], whose name is "*""#]],
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
