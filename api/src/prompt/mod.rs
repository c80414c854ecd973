//! Parses request bodies into what routing needs: model, stream flag, user and the prompt's blocks.
//!
//! [`PromptReader`] handles a request: it parses the body and cuts the prompt into blocks, as the
//! settings of the model require. [`parse`] only parses a body.
//!
//! This module never changes a body; the few changes that engines receive are made in
//! [`crate::proxy`]. A body is read in one pass without a document tree: unneeded strings are
//! skipped, and the prompt is flattened while reading.
//!
//! Flattening replaces the engine's chat template, which the router does not know. The result may
//! differ from the template's output, but must change when that output changes, and must grow only
//! at the end as a conversation grows. A message becomes `<|role|>\n`, the content's text, the JSON
//! of tool calls as sent, and `\n`; `tools` and system text come first, as in templates. Images and
//! other media are replaced by a hash of their identifier. Message names, tool call ids and earlier
//! reasoning are omitted, because most templates drop them.
//!
//! If a JSON object repeats a field, the last one counts, as in the engines' Python parser.

#[cfg(test)]
mod agent_tests;
mod attribution;
mod borrowed;
mod cache_use;
mod completion_prompt;
mod flatten;
mod further_fields;
mod identify;
mod multipart;
mod pydantic_lax;
mod read;
mod reader;
mod session_fields;
#[cfg(test)]
mod tests;
mod tokenize_client;
mod tokenizer;
mod tokens;

use schemars::JsonSchema;
use std::sync::Arc;

use state::ids::BlockHash;
use state::policy::PairSettings;
use state::prefix::ChainRoot;
use state::ratios::TokenRatio;

use crate::sessions::BodySessionNames;
use crate::users::isolation::SaltedWork;

pub use cache_use::Truncation;
pub use flatten::append_reply;
pub use further_fields::{BodyMember, FurtherFields, MEMBERS_MAX, members, name_hash};
pub use multipart::{FormFields, read_form};
pub use read::{is_read, parse, parse_routed};
pub use reader::{ParsedRequest, PromptReader, ReadError, ReadRequest};
pub use tokenize_client::{ReplyJoin, ReplyQuery};
pub use tokenizer::{
    Fallback, ReplyBoundary, Tokenizer, TokenizerLoadError, TokenizerSpec, TokenizerSpecError,
    Vocabulary, tokenize_question,
};
pub use tokens::{TokenScope, chain_of_tokens};

pub(crate) use cache_use::SpecialTokenCount;
pub(crate) use reader::TokenizingMetrics;
#[cfg(feature = "fuzzing")]
pub(crate) use tokenizer::fuzzing;
pub(crate) use tokenizer::{
    ChatRenderer, DEADLINE, EncodeError, Encoded, EngineTokenizer, TokenizeRequest, TokenizeResult,
    TokenizerContent, tokenize_request,
};

/// Fields of a parsed JSON body. Spans are byte ranges of the body.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParsedBody {
    /// The `model` field.
    pub model: String,
    /// The `stream` field; `false` unless an engine would read it as true.
    pub stream: bool,
    /// `stream_options.include_usage` as the client set it; `None` if absent.
    pub include_usage: Option<bool>,
    /// `stream_options.continuous_usage_stats` as the client set it; `None` if absent.
    pub continuous_usage: Option<bool>,
    /// Span of the `stream_options` object, braces included; `None` if absent or `null`.
    pub stream_options_span: Option<(usize, usize)>,
    /// Span of the `null` in `"stream_options": null`, which an object may replace; `None` without
    /// it.
    pub stream_options_null_span: Option<(usize, usize)>,
    /// Whether `stream_options` cannot be read; engines receive it unchanged.
    pub are_options_unclear: bool,
    /// Position after the body's opening brace, at which `"stream_options":{...},` may be inserted
    /// if both spans are `None` (the object of a stream is never empty, because it has a `stream`).
    pub insert_at: usize,
    /// Names of the fields that the router does not read.
    pub further: FurtherFields,
    /// The `user` field; `None` if absent or `null`.
    pub user: Option<String>,
    /// The `cache_salt` field, or the salt that replaces it if the user's cached blocks are kept
    /// apart.
    pub cache_salt: Option<String>,
    /// Whether the body has a `cache_salt`, even if it is `null`.
    pub has_cache_salt: bool,
    /// The `lora_path` field of SGLang, as JSON: an adapter in addition to the model. `None` if
    /// absent or `null`.
    pub adapter: Option<String>,
    /// The `previous_response_id` field of `/v1/responses`: a stored response that the request
    /// continues. `None` if absent or `null`.
    pub previous_response: Option<String>,
    /// Fields that may name the session of the request; `None` without any.
    pub session: Option<Box<BodySessionNames>>,
    /// `max_completion_tokens`, `max_tokens` or `max_output_tokens`; `None` if absent or invalid.
    pub max_tokens: Option<u32>,
    /// Number of choices requested: `n` or `best_of`, for each prompt of a batch; at least 1.
    pub choices: u32,
    /// Whether the engine skips its prefix cache for the prompt.
    pub skips_cache: bool,
    /// Part of the prompt that the engine keeps; `None` for all of it.
    pub truncation: Option<Truncation>,
    /// The flattened prompt, or the first prompt of a batch; empty if the path has none.
    pub prompt: Prompt,
    /// Size of the other prompts of a batch.
    pub batch: PromptBatch,
    /// How the text of a response continues the prompt.
    pub reply: ReplyShape,
}

impl ParsedBody {
    /// Whether several answers to each prompt are requested.
    pub(crate) fn has_samples(&self) -> bool {
        self.choices > self.batch.prompts.saturating_add(1)
    }
}

/// Size of a batch without its first prompt. Only the first prompt's blocks are known, but engines
/// compute all prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptBatch {
    /// Number of bytes of text.
    pub bytes: u64,
    /// Number of token ids.
    pub ids: u64,
    /// Number of further prompts.
    pub prompts: u32,
}

/// How the text of a response appears in the prompt of the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplyShape {
    /// The response does not appear in a prompt: embeddings, scores, tokens.
    #[default]
    None,
    /// The response appears as an assistant message, see [`append_reply`].
    Message,
    /// The response follows the prompt directly and unchanged, as with `/v1/completions`.
    Continuation,
}

impl ReplyShape {
    /// Appends `reply` to a flattened prompt exactly as the next turn flattens it.
    pub fn append(self, text: &mut Vec<u8>, reply: &str) {
        if self != Self::None {
            text.extend_from_slice(self.opening().as_bytes());
            text.extend_from_slice(reply.as_bytes());
            text.extend_from_slice(self.closing().as_bytes());
        }
    }

    /// Returns the flattened text between a prompt and its reply.
    pub(crate) fn opening(self) -> &'static str {
        match self {
            Self::Message => "<|assistant|>\n",
            Self::None | Self::Continuation => "",
        }
    }

    /// Returns the flattened text after a complete reply.
    pub(crate) fn closing(self) -> &'static str {
        match self {
            Self::Message => "\n",
            Self::None | Self::Continuation => "",
        }
    }
}

/// Content of a prompt from which its identity is computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text of a `prompt` string, or flattened chat messages.
    Text(Vec<u8>),
    /// Token ids of a `prompt`.
    Tokens(Vec<u32>),
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Text(Vec::new())
    }
}

/// Error for a body that cannot be routed (status 400).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BodyRejection {
    /// Description of the error, with line and column for syntax errors, and of what was expected.
    pub message: String,
    /// Name of the invalid field, for the error's `param`; `None` if no field is at fault.
    pub param: Option<String>,
}

/// Settings of one `[[models]]` table: how a model's prompts are cut into blocks and served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSettings {
    /// Model id, or `"*"` for all models.
    pub name: String,
    /// Tokenizer of the model's prompts.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens (for `character`: bytes) per block. `None` for the engines' block size (for
    /// `character`: the default).
    pub block_size: Option<u32>,
    /// Settings that determine when prompts use a prefill backend.
    pub pairs: PairSettings,
}

impl ModelSettings {
    /// Returns settings of the model `name` without a tokenizer, with blocks of `block_size` bytes.
    #[must_use]
    pub fn characters(name: &str, block_size: u32) -> Self {
        Self {
            name: name.to_owned(),
            tokenizer: Tokenizer::character(),
            block_size: Some(block_size),
            pairs: PairSettings::default(),
        }
    }
}

/// Identity of a prompt: the hashes of its blocks, and data that depends on them.
#[derive(Debug, Clone)]
pub struct PromptIdentity {
    /// Root of the chain of blocks, which identifies its scope.
    pub root: ChainRoot,
    /// Chained hashes of all full blocks.
    pub chain: Arc<[BlockHash]>,
    /// Number of prompt tokens of the whole batch; an estimate unless `unit` is
    /// [`BlockUnit::Tokens`].
    pub tokens: u32,
    /// Number of leading blocks of `chain` that an engine can have cached (last-token rule).
    pub matchable: u32,
    /// Unit of the blocks.
    pub unit: BlockUnit,
    /// Work for which engines must isolate the prompt's blocks from other users' by a salt; `None`
    /// if they need not.
    pub isolation: Option<SaltedWork>,
    /// Data with which a response continues the chain.
    pub tail: ChainTail,
}

/// Unit of blocks.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    serde::Serialize,
    JsonSchema,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "kebab-case")]
pub enum BlockUnit {
    /// Bytes of text: the model has no tokenizer.
    Characters,
    /// Token ids, as in the engines.
    Tokens,
    /// Bytes of text, because the tokens are not available.
    CharactersFor(Fallback),
}

/// Data after a prompt's last full block with which its chain continues.
#[derive(Debug, Clone, Default)]
pub struct ChainTail {
    /// Prompt after the last full block: bytes of text, or token ids of four bytes each.
    pub bytes: Vec<u8>,
    /// Number of bytes per block; 0 if blocks consist of token ids.
    pub block_bytes: usize,
    /// How the text of a response continues the prompt.
    pub reply: ReplyShape,
    /// Number of tokens per block; an estimate if blocks consist of bytes.
    pub tokens_per_block: u32,
    /// How the response's tokens join those of the prompt; `None` if unknown or if blocks consist
    /// of bytes.
    pub seam: Option<ReplyJoin>,
    /// Whether `bytes` and the chain do not show the length of the text: for token ids, batches and
    /// truncated prompts.
    pub is_partial: bool,
    /// Whether the engine skips its cache for the prompt, so that its report is not informative.
    pub skips_cache: bool,
    /// Whether several answers to the prompt are requested.
    pub has_samples: bool,
    /// The model's bytes per token when the prompt was identified.
    pub ratio: TokenRatio,
}

impl ChainTail {
    /// Returns the token ids after the last full block. Blocks must consist of token ids.
    #[must_use]
    pub fn ids(&self) -> Vec<u32> {
        let id = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("chunks of four"));
        self.bytes.chunks_exact(4).map(id).collect()
    }
}
