//! From a request body to what routing needs: model, stream flag, user and the prompt's blocks.
//!
//! The body is read, never rewritten; engines get the client's bytes.

use std::sync::Arc;

use bytes::Bytes;
use state::ids::BlockHash;

/// What is read of a JSON body. Spans are byte ranges of the body.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parsed {
    /// The `model` field.
    pub model: String,
    /// The `stream` field.
    pub stream: bool,
    /// `stream_options.include_usage` as the client set it; `None` when absent.
    pub include_usage: Option<bool>,
    /// `stream_options.continuous_usage_stats` as the client set it; `None` when absent.
    pub continuous_usage: Option<bool>,
    /// Where the `stream_options` object stands, braces included.
    pub stream_options_span: Option<(usize, usize)>,
    /// The `user` field.
    pub user: Option<String>,
    /// The `cache_salt` field.
    pub cache_salt: Option<String>,
    /// `max_completion_tokens`, `max_tokens` or `max_output_tokens`.
    pub max_tokens: Option<u32>,
    /// The prompt, flattened.
    pub prompt: Prompt,
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
pub struct BadBody {
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
    /// `character` in this version.
    pub tokenizer: String,
    /// Tokens (for `character`: bytes) per block.
    pub block_size: u32,
}

/// A prompt's identity.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Seed of the chain.
    pub root: u64,
    /// All full blocks, chained.
    pub chain: Arc<[BlockHash]>,
    /// Estimated prompt tokens.
    pub tokens: u32,
    /// How many of `chain` an engine can have (last-token rule).
    pub matchable: u32,
}

/// Reads a body posted to `path`.
///
/// # Errors
/// [`BadBody`] for malformed JSON, a missing or ill-typed `model`, ill-typed known fields.
pub fn parse(path: &str, body: &Bytes) -> Result<Parsed, BadBody> {
    let _ = (path, body);
    unimplemented!("routing helper")
}
