//! Tokenizes with a `tokenizer.json` and its chat template.
//!
//! Tokenizing takes a millisecond per few kilobytes, and every turn repeats the conversation. So
//! text is cut at special tokens, where the tokenizer cuts it first anyway, and every piece in
//! between is looked up in a cache before it is tokenized. This is exact: a piece's tokens do not
//! depend on its surroundings. Text is not cut if special tokens absorb adjacent white space or
//! match only whole words, or if the pre-tokenizer treats the first piece differently.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::{Map, Value};

use super::TokenizerLoadError;
use super::template::ChatTemplate;
use crate::files::text::without_mark;

/// Maximum size of a tokenizer or template file, in bytes.
const FILE_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// A tokenizer loaded from files.
pub(super) struct HuggingFace {
    tokenizer: tokenizers::Tokenizer,
    /// Chat template of the model; `None` if it has none.
    pub(super) template: Option<ChatTemplate>,
    /// Special tokens at which text is cut; `None` if text must be tokenized as a whole.
    marks: Option<SpecialTokens>,
    /// Tokens that the post-processor adds before and after a text.
    around: (Vec<u32>, Vec<u32>),
}

/// Special tokens at which text is cut.
struct SpecialTokens {
    /// Matcher of the special tokens; `None` if there are none.
    matcher: Option<AhoCorasick>,
    /// Ids of the special tokens, by pattern index.
    ids: Vec<u32>,
}

/// A piece of a text: a special token, or a range of text between special tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TextPiece {
    Special(u32),
    Text(Range<usize>),
}

impl HuggingFace {
    /// Loads the tokenizer `file` and its chat template, from `chat_template` or, if it is `None`,
    /// from the same directory.
    pub(super) fn load(
        file: &Path,
        chat_template: Option<&Path>,
    ) -> Result<Self, TokenizerLoadError> {
        let bytes = read(file)?;
        let json: Value = serde_json::from_slice(&bytes)
            .map_err(|error| TokenizerLoadError::new(file, &error))?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|error| TokenizerLoadError::new(file, &error))?;
        if json["model"]["dropout"].as_f64().is_some_and(|it| it > 0.0) {
            let what = "model.dropout is set: tokens would be drawn at random";
            return Err(TokenizerLoadError::new(file, &what));
        }
        tokenizer
            .with_truncation(None)
            .map_err(|error| TokenizerLoadError::new(file, &error))?;
        tokenizer.with_padding(None);
        let marks = SpecialTokens::of(&tokenizer, &json)
            .map_err(|error| TokenizerLoadError::new(file, &error))?;
        let around = around(&tokenizer).map_err(|error| TokenizerLoadError::new(file, &error))?;
        Ok(Self {
            template: template(file, chat_template)?,
            tokenizer,
            marks,
            around,
        })
    }

    /// Returns the tokens that the post-processor adds before and after a text.
    pub(super) fn around(&self) -> (&[u32], &[u32]) {
        (&self.around.0, &self.around.1)
    }

    /// Cuts `text` into pieces whose tokens do not depend on each other.
    pub(super) fn cut(&self, text: &str) -> Vec<TextPiece> {
        let Some(SpecialTokens { matcher, ids }) = &self.marks else {
            return vec![TextPiece::Text(0..text.len())];
        };
        let mut pieces = Vec::new();
        let mut end = 0;
        let push = |pieces: &mut Vec<TextPiece>, range: Range<usize>| {
            if !range.is_empty() {
                pieces.push(TextPiece::Text(range));
            }
        };
        for found in matcher.iter().flat_map(|matcher| matcher.find_iter(text)) {
            push(&mut pieces, end..found.start());
            pieces.push(TextPiece::Special(ids[found.pattern().as_usize()]));
            end = found.end();
        }
        push(&mut pieces, end..text.len());
        pieces
    }

    /// Returns the tokens of `text`, without special tokens around it; `None` on failure.
    pub(super) fn encode(&self, text: &str) -> Option<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, false).ok()?;
        Some(encoding.get_ids().to_vec())
    }

    /// Decodes token ids, including special tokens; `None` on failure.
    pub(super) fn decode(&self, ids: &[u32]) -> Option<String> {
        self.tokenizer.decode(ids, false).ok()
    }
}

impl SpecialTokens {
    /// Returns the special tokens of a tokenizer; `None` if text must not be cut at them.
    fn of(
        tokenizer: &tokenizers::Tokenizer,
        json: &Value,
    ) -> Result<Option<Self>, aho_corasick::BuildError> {
        if is_first_treated_alone(&json["pre_tokenizer"]) {
            return Ok(None);
        }
        let mut tokens: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        // The tokenizer finds normalized tokens within the pieces.
        tokens.retain(|(_, token)| !token.normalized && !token.content.is_empty());
        tokens.sort_unstable_by_key(|(id, _)| *id);
        if tokens
            .iter()
            .any(|(_, token)| token.lstrip || token.rstrip || token.single_word)
        {
            return Ok(None);
        }
        let ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
        let contents = tokens.iter().map(|(_, token)| token.content.as_str());
        let matcher = (!ids.is_empty()).then(|| {
            AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(contents)
        });
        Ok(Some(Self {
            matcher: matcher.transpose()?,
            ids,
        }))
    }
}

/// Whether a pre-tokenizer adds a space only before the first piece.
fn is_first_treated_alone(pre_tokenizer: &Value) -> bool {
    let is_first = pre_tokenizer["prepend_scheme"] == "first";
    let inner = pre_tokenizer["pretokenizers"].as_array();
    is_first || inner.is_some_and(|inner| inner.iter().any(is_first_treated_alone))
}

/// Determines by trial the tokens that the post-processor adds around a text.
fn around(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<(Vec<u32>, Vec<u32>)> {
    let plain = tokenizer.encode_fast("a", false)?.get_ids().to_vec();
    let whole = tokenizer.encode_fast("a", true)?.get_ids().to_vec();
    let at = whole
        .windows(plain.len().max(1))
        .position(|run| run == plain)
        .ok_or("the post-processor changes the tokens of a text")?;
    Ok((whole[..at].to_vec(), whole[at + plain.len()..].to_vec()))
}

fn read(file: &Path) -> Result<Vec<u8>, TokenizerLoadError> {
    let length = fs::metadata(file)
        .map_err(|error| TokenizerLoadError::new(file, &error))?
        .len();
    if length > FILE_BYTES_MAX {
        let what = format!("is longer than {FILE_BYTES_MAX} bytes");
        return Err(TokenizerLoadError::new(file, &what));
    }
    let bytes = fs::read(file).map_err(|error| TokenizerLoadError::new(file, &error))?;
    Ok(without_mark(&bytes).to_vec())
}

fn read_if_any(file: &Path) -> Result<Option<Vec<u8>>, TokenizerLoadError> {
    match fs::metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        _ => read(file).map(Some),
    }
}

/// Loads the chat template from `chosen`, else from `chat_template.jinja` or
/// `tokenizer_config.json` in the tokenizer's directory. `None` if there is none.
fn template(
    tokenizer: &Path,
    chosen: Option<&Path>,
) -> Result<Option<ChatTemplate>, TokenizerLoadError> {
    let beside = |name: &str| tokenizer.with_file_name(name);
    let config_file = beside("tokenizer_config.json");
    let config: Value = match read_if_any(&config_file)? {
        Some(bytes) => serde_json::from_slice(&bytes)
            .map_err(|error| TokenizerLoadError::new(&config_file, &error))?,
        None => Value::Null,
    };
    let (file, source) = match chosen {
        Some(chosen) => (chosen.to_owned(), Some(read(chosen)?)),
        None => {
            let jinja = beside("chat_template.jinja");
            let source = read_if_any(&jinja)?;
            (jinja, source)
        }
    };
    let (file, source): (PathBuf, String) = match source {
        Some(bytes) => {
            let source =
                String::from_utf8(bytes).map_err(|error| TokenizerLoadError::new(&file, &error))?;
            (file, source)
        }
        None => match config_template(&config["chat_template"]) {
            Some(source) => (config_file, source.to_owned()),
            None => return Ok(None),
        },
    };
    ChatTemplate::new(&source, special_tokens(&config))
        .map(Some)
        .map_err(|error| TokenizerLoadError::new(&file, &error))
}

/// Returns the template in the config: the only one, or the one named `default`.
fn config_template(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| {
        let named = value.as_array()?;
        let default = named.iter().find(|it| it["name"] == "default")?;
        default["template"].as_str()
    })
}

/// Returns `bos_token` and similar tokens from the config: strings, or objects with a string.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let fields = config.as_object().into_iter().flatten();
    let tokens = fields.filter_map(|(name, value)| {
        let text = value.as_str().or_else(|| value["content"].as_str())?;
        name.ends_with("_token")
            .then(|| (name.clone(), text.into()))
    });
    tokens.collect()
}
