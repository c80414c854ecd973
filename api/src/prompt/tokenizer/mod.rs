//! Converts requests to the token ids that their engines process.
//!
//! `character` has no ids: prompts are flattened (see [`super`]) and cut into blocks of bytes. The
//! other tokenizers return token ids, so that blocks equal the engine's and match KV events:
//! `tiktoken:NAME` with a vocabulary in the binary, `huggingface:FILE` with a `tokenizer.json` and
//! the model's chat template, and `engine`, which queries the engine. `docs/guide/tokenizers.md`
//! describes how each tokenizer handles each kind of request.
//!
//! Without ids (the engine will reject the body, the template fails, the text is too long), a
//! prompt is identified by its characters, in a separate scope.

mod anthropic;
mod cache;
mod chat;
mod content_format;
mod developer;
#[cfg(test)]
mod effort_tests;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod huggingface;
mod parts;
mod python;
#[cfg(test)]
mod recorded_templates;
mod remote;
mod responses;
mod sampled_checks;
mod sglang;
mod template;
#[cfg(test)]
mod tests;
mod vllm;
mod vocabulary;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use tiktoken_rs::CoreBPE;

use self::cache::TokenCache;
use self::chat::{Chat, TokenizerInput};
use self::huggingface::{HuggingFace, TextPiece};
use self::parts::UnclearBodyError;
use self::template::ReplyRendering;
use super::SpecialTokenCount;

pub use self::remote::tokenize_question;
pub(crate) use self::remote::{
    DEADLINE, EngineTokenizer, TokenizeRequest, TokenizeResult, tokenize_request,
};
pub(crate) use self::sglang::ChatRenderer;
pub use self::vocabulary::Vocabulary;

/// Maximum size of the token cache of each tokenizer, in bytes.
const CACHE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Maximum length of a tokenized text, in bytes. A longer text takes seconds, and memory of a
/// hundred times its length.
pub(crate) const TOKENIZED_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Maximum length of a prompt's end that is tokenized again with the response, in bytes.
const SEAM_BYTES_MAX: usize = 8 * 1024;

/// Tokenizer named in the config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerSpec {
    /// `character`: no tokens; blocks consist of bytes.
    Character,
    /// `tiktoken:NAME`: a vocabulary in the binary.
    Tiktoken(Vocabulary),
    /// `huggingface:FILE`: a `tokenizer.json`.
    HuggingFace(PathBuf),
    /// `engine`: the engine's `POST /tokenize`.
    Engine,
    /// `engine:FILE`: a `tokenizer.json`, whose tokens are compared with the engine's.
    EngineOr(PathBuf),
}

/// Error for an unknown tokenizer name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected \"character\", \"tiktoken:cl100k_base\", \"tiktoken:o200k_base\", \
     \"huggingface:FILE\", \"engine\" or \"engine:FILE\""
)]
pub struct TokenizerSpecError;

impl FromStr for TokenizerSpec {
    type Err = TokenizerSpecError;

    fn from_str(text: &str) -> Result<Self, TokenizerSpecError> {
        match (text, text.split_once(':')) {
            ("character", _) => Ok(Self::Character),
            ("engine", _) => Ok(Self::Engine),
            (_, Some(("tiktoken", "cl100k_base"))) => Ok(Self::Tiktoken(Vocabulary::Cl100k)),
            (_, Some(("tiktoken", "o200k_base"))) => Ok(Self::Tiktoken(Vocabulary::O200k)),
            (_, Some(("huggingface", file))) if !file.is_empty() => {
                Ok(Self::HuggingFace(file.into()))
            }
            (_, Some(("engine", file))) if !file.is_empty() => Ok(Self::EngineOr(file.into())),
            _ => Err(TokenizerSpecError),
        }
    }
}

impl fmt::Display for TokenizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Character => f.write_str("character"),
            Self::Tiktoken(Vocabulary::Cl100k) => f.write_str("tiktoken:cl100k_base"),
            Self::Tiktoken(Vocabulary::O200k) => f.write_str("tiktoken:o200k_base"),
            Self::HuggingFace(file) => write!(f, "huggingface:{}", file.display()),
            Self::Engine => f.write_str("engine"),
            Self::EngineOr(file) => write!(f, "engine:{}", file.display()),
        }
    }
}

/// Error for a tokenizer or template file that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {what}", file.display())]
pub struct TokenizerLoadError {
    /// Path of the file.
    pub file: PathBuf,
    /// Description of the error.
    pub what: String,
}

impl TokenizerLoadError {
    fn new(file: &Path, what: &dyn fmt::Display) -> Self {
        Self {
            file: file.to_owned(),
            what: what.to_string(),
        }
    }
}

/// Reason why a prompt is identified by its characters although its model has a tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, JsonSchema, Encode, Decode)]
#[serde(rename_all = "kebab-case")]
pub enum Fallback {
    /// The body does not have the form that its path requires.
    Unclear,
    /// The chat template rejected the conversation.
    Template,
    /// The text exceeds the maximum length.
    TooLong,
    /// The tokenizer failed.
    Tokenizer,
    /// The engine did not respond, or not with tokens.
    Engine,
    /// The tokenizer was busy with other prompts for too long.
    Busy,
}

impl Fallback {
    /// Returns the name used by metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Unclear => "unclear",
            Self::Template => "template",
            Self::TooLong => "too-long",
            Self::Tokenizer => "tokenizer",
            Self::Engine => "no-answer",
            Self::Busy => "busy",
        }
    }
}

/// A loaded tokenizer, which all requests of its model share.
pub struct Tokenizer {
    spec: TokenizerSpec,
    /// Path of the chat template from the config; `None` for the default.
    chat_template: Option<PathBuf>,
    kind: TokenizerKind,
    cache: TokenCache,
}

enum TokenizerKind {
    Character,
    Tiktoken(&'static CoreBPE),
    HuggingFace(Box<HuggingFace>),
    Engine(Box<EngineTokenizer>, Option<Box<HuggingFace>>),
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("spec", &self.spec)
            .field("chat_template", &self.chat_template)
            .finish_non_exhaustive()
    }
}

/// Tokenizers loaded from the same source are equal.
impl PartialEq for Tokenizer {
    fn eq(&self, other: &Self) -> bool {
        (&self.spec, &self.chat_template) == (&other.spec, &other.chat_template)
    }
}

impl Eq for Tokenizer {}

/// Text of a prompt, with the properties that tokenizing it requires.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenizerText {
    /// Parts of the text, which are tokenized separately and concatenated.
    pub(super) parts: Vec<String>,
    adds_special: bool,
    after: ReplyPosition,
}

/// Position of a response relative to the text of its prompt in the next turn's prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplyPosition {
    /// The position is unknown.
    Unknown,
    /// The response follows directly after the text.
    Joined,
    /// The response follows directly after the text if the template leaves it unchanged.
    Rendered(ReplyRendering),
    /// The response follows as a framed message.
    Framed,
}

/// Content of a prompt, as far as a tokenizer needs it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TokenizerContent {
    Text(TokenizerText),
    Ids(Vec<u32>),
    Nothing,
}

/// Tokens of a text, and how a response continues them.
#[derive(Debug, Clone)]
pub(crate) struct Encoded {
    pub(crate) ids: Vec<u32>,
    /// Numbers of tokens in `ids` that the tokenizer added before and after the text.
    pub(crate) around: SpecialTokenCount,
    /// How a response's tokens continue the text; `None` if unknown.
    pub(crate) seam: Option<ReplyBoundary>,
}

/// Reason why a text was not tokenized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EncodeError {
    /// More of the text is new to the cache than the limit allows.
    MoreThanAllowed,
    /// The text can never be tokenized.
    Never(Fallback),
}

/// The boundary between a prompt and its response, from which the response's tokens follow.
#[derive(Debug, Clone)]
pub struct ReplyBoundary {
    tokenizer: Arc<Tokenizer>,
    /// Cache salt of the prompt.
    salt: String,
    /// Text after the prompt's last special token, which is tokenized together with the response.
    opening: String,
    /// Tokens of `opening` in the prompt.
    ids: Vec<u32>,
    closing: &'static str,
    after: ReplyPosition,
}

impl Tokenizer {
    /// Loads the tokenizer `spec`. `chat_template` replaces the template in its directory.
    ///
    /// # Errors
    /// Returns a [`TokenizerLoadError`] if a file cannot be read or is invalid.
    pub fn load(
        spec: TokenizerSpec,
        chat_template: Option<&Path>,
    ) -> Result<Arc<Self>, TokenizerLoadError> {
        let kind = match &spec {
            TokenizerSpec::Character => TokenizerKind::Character,
            TokenizerSpec::Tiktoken(vocabulary) => TokenizerKind::Tiktoken(vocabulary.tokenizer()),
            TokenizerSpec::HuggingFace(file) => {
                TokenizerKind::HuggingFace(Box::new(HuggingFace::load(file, chat_template)?))
            }
            TokenizerSpec::Engine => TokenizerKind::Engine(Box::default(), None),
            TokenizerSpec::EngineOr(file) => {
                let files = HuggingFace::load(file, chat_template)?;
                TokenizerKind::Engine(Box::default(), Some(Box::new(files)))
            }
        };
        Ok(Arc::new(Self {
            spec,
            chat_template: chat_template.map(Path::to_owned),
            kind,
            cache: TokenCache::new(CACHE_BYTES_MAX),
        }))
    }

    /// Returns the tokenizer `character`, which has no tokens.
    #[must_use]
    pub fn character() -> Arc<Self> {
        Arc::new(Self {
            spec: TokenizerSpec::Character,
            chat_template: None,
            kind: TokenizerKind::Character,
            cache: TokenCache::new(0),
        })
    }

    /// Returns the spec from which the tokenizer was loaded.
    #[must_use]
    pub fn spec(&self) -> &TokenizerSpec {
        &self.spec
    }

    /// Whether this is `character`, whose blocks consist of bytes instead of tokens.
    #[must_use]
    pub fn is_character(&self) -> bool {
        matches!(self.kind, TokenizerKind::Character)
    }

    /// Returns the token ids of a request, computed on the calling thread, for engine simulations.
    /// `None` without local files or vocabulary, or if the body has no readable prompt.
    #[must_use]
    pub fn encode_request(self: &Arc<Self>, path: &str, body: &[u8]) -> Option<Vec<u32>> {
        self.encode_request_for(path, body, None)
    }

    /// Returns the token ids of `text` without special tokens around it; `None` on failure.
    #[must_use]
    pub fn encode_text(&self, text: &str) -> Option<Vec<u32>> {
        self.encode_salted(text, "")
    }

    /// Returns the token ids of `text`, cached under the salt of a prompt; `None` on failure.
    fn encode_salted(&self, text: &str, salt: &str) -> Option<Vec<u32>> {
        let (mut ids, mut no_limit) = (Vec::new(), usize::MAX);
        self.encode_part(text, salt, &mut no_limit, &mut ids).ok()?;
        Some(ids)
    }

    /// Decodes token ids; `None` if an id is unknown, or without local files or vocabulary.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> Option<String> {
        if let TokenizerKind::Tiktoken(bpe) = &self.kind {
            let bytes = bpe.decode_bytes(ids).ok()?;
            return Some(String::from_utf8_lossy(&bytes).into_owned());
        }
        self.files().and_then(|files| files.decode(ids))
    }

    pub(crate) fn remote(&self) -> Option<&EngineTokenizer> {
        match &self.kind {
            TokenizerKind::Engine(remote, _) => Some(remote),
            TokenizerKind::Character
            | TokenizerKind::Tiktoken(_)
            | TokenizerKind::HuggingFace(_) => None,
        }
    }

    /// Returns the tokenizer's local files, if any.
    fn files(&self) -> Option<&HuggingFace> {
        match &self.kind {
            TokenizerKind::HuggingFace(files) | TokenizerKind::Engine(_, Some(files)) => {
                Some(files)
            }
            TokenizerKind::Character
            | TokenizerKind::Tiktoken(_)
            | TokenizerKind::Engine(_, None) => None,
        }
    }

    /// Whether the tokenizer has a local `tokenizer.json`.
    pub(crate) fn has_files(&self) -> bool {
        self.files().is_some()
    }

    /// Reads the prompt of a request to `path`, and renders a conversation as text, as an engine like
    /// `renderer` does.
    pub(crate) fn content(
        &self,
        path: &str,
        body: &[u8],
        renderer: ChatRenderer,
    ) -> Result<TokenizerContent, Fallback> {
        let wanted = chat::read(path, body, renderer);
        let wanted = wanted.map_err(|UnclearBodyError| Fallback::Unclear)?;
        match wanted {
            TokenizerInput::Nothing => Ok(TokenizerContent::Nothing),
            TokenizerInput::Ids(ids) => Ok(TokenizerContent::Ids(ids)),
            TokenizerInput::Plain {
                text,
                add_special_tokens,
            } => Ok(TokenizerContent::Text(TokenizerText {
                parts: vec![text],
                adds_special: add_special_tokens,
                after: if path.starts_with("/v1/completions") {
                    ReplyPosition::Joined
                } else {
                    ReplyPosition::Unknown
                },
            })),
            TokenizerInput::Chat(mut chat) => {
                let continued = chat.take_continued();
                let mut text = self.render(&chat)?;
                if let Some(continued) = continued {
                    text.parts.push(continued);
                    text.after = ReplyPosition::Unknown;
                }
                Ok(TokenizerContent::Text(text))
            }
        }
    }

    fn render(&self, chat: &Chat) -> Result<TokenizerText, Fallback> {
        let template = self.files().and_then(|files| files.template.as_ref());
        let Some(template) = template else {
            return Ok(TokenizerText {
                parts: chat.framed(),
                adds_special: chat.add_special_tokens,
                after: ReplyPosition::Framed,
            });
        };
        // A library processes untrusted text: a panic must not end the replica.
        let rendered = catch_unwind(AssertUnwindSafe(|| template.render(chat)));
        let text = rendered.map_err(|_| Fallback::Template)?.map_err(|error| {
            tracing::debug!(%error, "chat template refused a conversation");
            Fallback::Template
        })?;
        let is_open = chat.add_generation_prompt && !chat.continue_final_message;
        Ok(TokenizerText {
            parts: vec![text],
            adds_special: chat.add_special_tokens,
            after: if is_open {
                ReplyPosition::Rendered(template.replies())
            } else {
                ReplyPosition::Unknown
            },
        })
    }

    /// Tokenizes a text. At most `fresh_bytes_max` bytes may be new to the cache under `salt`.
    pub(crate) fn encode(
        self: &Arc<Self>,
        text: &TokenizerText,
        salt: &str,
        mut fresh_bytes_max: usize,
    ) -> Result<Encoded, EncodeError> {
        let bytes: usize = text.parts.iter().map(String::len).sum();
        if bytes > TOKENIZED_BYTES_MAX {
            return Err(EncodeError::Never(Fallback::TooLong));
        }
        let around = match self.files() {
            Some(files) if text.adds_special => files.around(),
            _ => (&[][..], &[][..]),
        };
        let mut ids = around.0.to_vec();
        let mut last = 0..0;
        for part in &text.parts {
            last = self.encode_part(part, salt, &mut fresh_bytes_max, &mut ids)?;
        }
        let seam = if around.1.is_empty() {
            self.seam(text, salt, last, &ids)
        } else {
            None
        };
        ids.extend_from_slice(around.1);
        let around = SpecialTokenCount {
            before: around.0.len(),
            behind: around.1.len(),
        };
        Ok(Encoded { ids, around, seam })
    }

    /// Returns the boundary between `text` and its response, if known. `tail` is the range after
    /// the last special token of the last part; its tokens are the last of `ids`.
    fn seam(
        self: &Arc<Self>,
        text: &TokenizerText,
        salt: &str,
        tail: std::ops::Range<usize>,
        ids: &[u32],
    ) -> Option<ReplyBoundary> {
        let seam = |opening: &str, ids: &[u32], closing| ReplyBoundary {
            tokenizer: Arc::clone(self),
            salt: salt.to_owned(),
            opening: opening.to_owned(),
            ids: ids.to_vec(),
            closing,
            after: text.after,
        };
        match text.after {
            ReplyPosition::Unknown | ReplyPosition::Rendered(ReplyRendering::Changed) => None,
            ReplyPosition::Framed => Some(seam("<|assistant|>\n", &[], "\n")),
            ReplyPosition::Joined
            | ReplyPosition::Rendered(ReplyRendering::Kept | ReplyRendering::KeptTrimmed) => {
                let opening = text.parts.last()?.get(tail)?;
                if opening.len() > SEAM_BYTES_MAX {
                    return None;
                }
                let (mut joined, mut no_limit) = (Vec::new(), usize::MAX);
                self.encode_part(opening, salt, &mut no_limit, &mut joined)
                    .ok()?;
                ids.ends_with(&joined).then(|| seam(opening, &joined, ""))
            }
        }
    }

    /// Appends the tokens of `text` to `ids`. Returns the range after its last special token.
    fn encode_part(
        &self,
        text: &str,
        salt: &str,
        fresh_bytes_max: &mut usize,
        ids: &mut Vec<u32>,
    ) -> Result<std::ops::Range<usize>, EncodeError> {
        let pieces = match self.files() {
            Some(files) => files.cut(text),
            None => vec![TextPiece::Text(0..text.len())],
        };
        let mut tail = text.len()..text.len();
        for piece in pieces {
            match piece {
                TextPiece::Special(id) => {
                    ids.push(id);
                    tail = text.len()..text.len();
                }
                TextPiece::Text(range) => {
                    let piece = &text[range.clone()];
                    ids.extend_from_slice(&self.encode_piece(piece, salt, fresh_bytes_max)?);
                    tail = range;
                }
            }
        }
        Ok(tail)
    }

    fn encode_piece(
        &self,
        piece: &str,
        salt: &str,
        fresh_bytes_max: &mut usize,
    ) -> Result<Arc<[u32]>, EncodeError> {
        let key = self.cache.key(piece.as_bytes(), salt);
        if let Some(tokens) = self.cache.get(key) {
            return Ok(tokens);
        }
        *fresh_bytes_max = fresh_bytes_max
            .checked_sub(piece.len())
            .ok_or(EncodeError::MoreThanAllowed)?;
        // A library processes untrusted text: a panic must not end the replica.
        let tokens = catch_unwind(AssertUnwindSafe(|| match &self.kind {
            TokenizerKind::Character | TokenizerKind::Engine(_, None) => None,
            TokenizerKind::Tiktoken(bpe) => {
                let nothing_special = std::collections::HashSet::new();
                bpe.encode(piece, &nothing_special).ok().map(|(ids, _)| ids)
            }
            TokenizerKind::HuggingFace(files) | TokenizerKind::Engine(_, Some(files)) => {
                files.encode(piece)
            }
        }));
        let tokens: Arc<[u32]> = tokens
            .ok()
            .flatten()
            .ok_or(EncodeError::Never(Fallback::Tokenizer))?
            .into();
        self.cache.insert(key, &tokens);
        Ok(tokens)
    }
}

impl ReplyBoundary {
    /// Whether the reply is framed as a message, so that its tokens are not the engine's.
    pub(crate) fn is_framed(&self) -> bool {
        self.after == ReplyPosition::Framed
    }

    /// Returns the tokens that `reply` adds to those of its prompt; `None` if they are not known
    /// exactly. `is_whole` is whether the reply is complete.
    pub(crate) fn continuation(&self, reply: &str, is_whole: bool) -> Option<Vec<u32>> {
        let is_same_later = match self.after {
            ReplyPosition::Unknown | ReplyPosition::Rendered(ReplyRendering::Changed) => false,
            ReplyPosition::Joined | ReplyPosition::Framed => true,
            // Templates remove the reasoning of earlier responses.
            ReplyPosition::Rendered(ReplyRendering::Kept) => !reply.contains("</think>"),
            ReplyPosition::Rendered(ReplyRendering::KeptTrimmed) => {
                !reply.contains("</think>") && reply.trim().len() == reply.len()
            }
        };
        if !is_same_later {
            return None;
        }
        let closing = if is_whole { self.closing } else { "" };
        let text = format!("{}{reply}{closing}", self.opening);
        let mut ids = self.tokenizer.encode_salted(&text, &self.salt)?;
        ids.starts_with(&self.ids)
            .then(|| ids.split_off(self.ids.len()))
    }
}
