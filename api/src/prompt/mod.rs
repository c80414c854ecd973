//! Parses request bodies into what routing needs: model, stream flag, user and the prompt's blocks.
//!
//! [`PromptReader`] does all of it for one request. [`parse`] alone reads a body; how a prompt is
//! cut into blocks follows from the settings of its model.
//!
//! The body is read, never rewritten; engines get the client's bytes. It is read in one pass
//! without a document tree: strings that are not needed are skipped, the prompt is flattened as it
//! is met.
//!
//! Flattening replaces the engine's chat template, which the router does not know: it need not look
//! like it, but must change where the template's output changes, and grow at the end as a
//! conversation grows. Per message it is `<|role|>\n`, the content's text, the JSON of tool calls
//! as sent, and `\n`; `tools` and system text come first, as templates put them. Images and other
//! media are replaced by a hash of what names them. Message names, tool call ids and earlier
//! reasoning are left out: templates mostly drop them.
//!
//! Where a JSON object names a field twice the last one counts, as in the engines' Python parser.

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

use crate::isolation::CacheIsolation;

pub use cache_use::Truncation;
pub use flatten::append_reply;
pub use further_fields::{BodyMember, FurtherFields, MEMBERS_MAX, members, name_hash};
pub use multipart::{FormFields, read_form};
pub use read::{is_read, parse, parse_routed};
pub use reader::{ParsedRequest, PromptReader, ReadError, ReadRequest};
pub use tokenize_client::{ReplyQuery, ReplySeam};
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
    DEADLINE, EncodeError, Encoded, EngineTokenizer, TokenizeRequest, TokenizeResult,
    TokenizerContent, question,
};

/// What is read of a JSON body. Spans are byte ranges of the body.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParsedBody {
    /// The `model` field.
    pub model: String,
    /// The `stream` field; `false` when it is nothing that an engine takes for a flag.
    pub stream: bool,
    /// `stream_options.include_usage` as the client set it; `None` when absent.
    pub include_usage: Option<bool>,
    /// `stream_options.continuous_usage_stats` as the client set it; `None` when absent.
    pub continuous_usage: Option<bool>,
    /// Where the `stream_options` object stands, braces included; `None` when absent or `null`.
    pub stream_options_span: Option<(usize, usize)>,
    /// Where the `null` of `"stream_options": null` stands: an object may be put in its place.
    pub stream_options_null_span: Option<(usize, usize)>,
    /// Whether `stream_options` is nothing that can be read: it goes to an engine as it is.
    pub are_options_unclear: bool,
    /// Right behind the body's opening brace: where `"stream_options":{...},` may be inserted when
    /// both spans are `None` (the object of a stream is never empty, it has a `stream`).
    pub insert_at: usize,
    /// The fields that the router does not read.
    pub further: FurtherFields,
    /// The `user` field.
    pub user: Option<String>,
    /// The `cache_salt` field; of a user whose cached blocks are kept apart the salt that stands in
    /// its place.
    pub cache_salt: Option<String>,
    /// Whether the body has a `cache_salt`, be it `null`.
    pub has_cache_salt: bool,
    /// The `lora_path` field of SGLang, as JSON: an adapter beside the model.
    pub adapter: Option<String>,
    /// `max_completion_tokens`, `max_tokens` or `max_output_tokens`; `None` when absent or unclear.
    pub max_tokens: Option<u32>,
    /// Answers it asks for at once: `n` or `best_of`, for each prompt of a batch; at least 1.
    pub choices: u32,
    /// Whether its engine does not look into its prefix cache for it.
    pub skips_cache: bool,
    /// What its engine keeps of the prompt; `None`: all.
    pub truncation: Option<Truncation>,
    /// The prompt, flattened. Of a batch of prompts the first; empty when the path has none.
    pub prompt: Prompt,
    /// The other prompts of a batch.
    pub batch: PromptBatch,
    /// How an answer continues the prompt.
    pub reply: ReplyShape,
}

/// How much a batch holds beside its first prompt. Only the first one's blocks are known, but all
/// are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptBatch {
    /// Bytes of text.
    pub bytes: u64,
    /// Token ids.
    pub ids: u64,
    /// Further prompts.
    pub prompts: u32,
}

/// How the text of an answer stands in the prompt of the next request of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReplyShape {
    /// Not at all: embeddings, scores, tokens.
    #[default]
    None,
    /// As an assistant message, see [`append_reply`].
    Message,
    /// Right behind the prompt, as it is: `/v1/completions`.
    Continuation,
}

impl ReplyShape {
    /// Appends `reply` to a flattened prompt the way the next turn's flattening has it.
    pub fn append(self, text: &mut Vec<u8>, reply: &str) {
        if self != Self::None {
            text.extend_from_slice(self.opening().as_bytes());
            text.extend_from_slice(reply.as_bytes());
            text.extend_from_slice(self.closing().as_bytes());
        }
    }

    /// What stands between a prompt and its reply.
    pub(crate) fn opening(self) -> &'static str {
        match self {
            Self::Message => "<|assistant|>\n",
            Self::None | Self::Continuation => "",
        }
    }

    /// What stands behind a reply.
    pub(crate) fn closing(self) -> &'static str {
        match self {
            Self::Message => "\n",
            Self::None | Self::Continuation => "",
        }
    }
}

/// A prompt as prefix identity sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text: a `prompt` string, or chat messages flattened in a fixed way.
    Text(Vec<u8>),
    /// A `prompt` given as token ids.
    Tokens(Vec<u32>),
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Text(Vec::new())
    }
}

/// A body that cannot be routed: becomes a 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BodyRejection {
    /// What is wrong, where (line and column for syntax), and what was expected.
    pub message: String,
    /// The field, for the error's `param`.
    pub param: Option<String>,
}

/// How a model's prompts are turned into blocks: one `[[models]]` table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSettings {
    /// A model id, or `"*"`.
    pub name: String,
    /// What cuts prompts into tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens (for `character`: bytes) per block. `None`: as the model's engines say (for
    /// `character`: the default).
    pub block_size: Option<u32>,
    /// When its prompts go through a prefill backend.
    pub pairs: PairSettings,
}

impl ModelSettings {
    /// Settings of `name` without a tokenizer: blocks of `block_size` bytes.
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

/// A prompt's identity.
#[derive(Debug, Clone)]
pub struct PromptIdentity {
    /// Seed of the chain.
    pub root: ChainRoot,
    /// All full blocks, chained.
    pub chain: Arc<[BlockHash]>,
    /// Prompt tokens, of a batch all prompts': counted where [`BlockUnit::Tokens`], else estimated.
    pub tokens: u32,
    /// How many of `chain` an engine can have (last-token rule).
    pub matchable: u32,
    /// What the blocks are made of.
    pub unit: BlockUnit,
    /// How far engines must keep it apart from other users' prompts.
    pub isolation: CacheIsolation,
    /// What is needed to go on with the chain when the answer is known.
    pub tail: ChainTail,
}

/// What blocks are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BlockUnit {
    /// Bytes of text: the model has no tokenizer.
    Characters,
    /// Token ids, as engines have them.
    Tokens,
    /// Bytes of text, in place of tokens that could not be had.
    CharactersFor(Fallback),
}

/// Where a prompt's last full block ends, and how the chain goes on from there.
#[derive(Debug, Clone, Default)]
pub struct ChainTail {
    /// What follows the last full block: bytes of text, or token ids of four bytes each.
    pub bytes: Vec<u8>,
    /// Bytes per block; 0 when blocks are of token ids.
    pub block_bytes: usize,
    /// How an answer continues the prompt.
    pub reply: ReplyShape,
    /// Tokens of one block, estimated where blocks are of bytes.
    pub tokens_per_block: u32,
    /// How an answer's tokens continue the prompt's; `None`: in no known way, or blocks are of
    /// bytes.
    pub seam: Option<ReplySeam>,
    /// Whether the text measured is not all that the engine counts.
    pub is_partial: bool,
    /// Whether the engine does not look into its cache: what it finds there tells nothing.
    pub skips_cache: bool,
    /// The model's bytes per token when the prompt was identified.
    pub ratio: TokenRatio,
}

impl ChainTail {
    /// The token ids behind the last full block, where blocks are of token ids.
    #[must_use]
    pub fn ids(&self) -> Vec<u32> {
        let id = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("chunks of four"));
        self.bytes.chunks_exact(4).map(id).collect()
    }
}
