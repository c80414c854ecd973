//! Computes the block hashes and the number of tokens of a parsed body.

use std::borrow::Cow;
use std::sync::Arc;

use state::prefix::{self, Scope, model_key};
use state::ratios::TokenRatio;

use super::reader::PromptReader;
use super::{
    BlockUnit, ChainTail, ModelSettings, ParsedBody, Prompt, PromptBatch, PromptIdentity,
    ReplyJoin, ReplyShape, SpecialTokenCount, TokenScope, Tokenizer,
};

/// Default block size, in bytes.
const BLOCK_BYTES: u32 = 128;
/// Number of bytes in a text block per token id in a block of ids.
const BLOCK_BYTES_PER_ID: u32 = 4;

impl PromptReader {
    /// Identifies a prompt by its characters under the cluster's seed, or by its token ids if it
    /// consists of them. [`PromptReader::read`] tokenizes the text of a model with a tokenizer.
    ///
    /// With `character`, a block has `block_size` bytes of text, or a quarter as many token ids.
    /// With a tokenizer, a block has `block_size` ids, or four times as many bytes without ids.
    #[must_use]
    pub fn identify(&self, parsed: &ParsedBody) -> PromptIdentity {
        let cut = self.cut_of(&parsed.model);
        match &parsed.prompt {
            Prompt::Text(text) => self.characters(parsed, text, cut.bytes, BlockUnit::Characters),
            Prompt::Tokens(ids) => {
                let mut kept = Cow::Borrowed(ids.as_slice());
                if let Some(truncation) = parsed.truncation {
                    truncation.cut(kept.to_mut(), parsed.reply, SpecialTokenCount::default());
                }
                self.tokens(parsed, &kept, cut.tokens, None)
            }
        }
    }

    /// Identifies a prompt by its token `ids`. `seam` determines how a response continues them, if
    /// known.
    pub(super) fn identify_tokens(
        &self,
        parsed: &ParsedBody,
        ids: &[u32],
        seam: Option<ReplyJoin>,
    ) -> PromptIdentity {
        self.tokens(parsed, ids, self.cut_of(&parsed.model).tokens, seam)
    }

    fn characters(
        &self,
        parsed: &ParsedBody,
        text: &[u8],
        block_bytes: u32,
        unit: BlockUnit,
    ) -> PromptIdentity {
        let scope = Scope {
            model: &parsed.model,
            adapter: parsed.adapter.as_deref().unwrap_or(""),
            salt: parsed.cache_salt.as_deref().unwrap_or(""),
            tokenizer: "character",
            block_size: block_bytes,
        };
        let root = self.view.registry().hashing().root(&scope);
        let ratio = self.ratio_of(&parsed.model);
        let tokens = ratio.tokens(text.len());
        // The characters do not determine which part of the text the engine keeps.
        let kept = parsed.truncation.filter(|truncation| {
            // A text has at most one token per byte. Few come close to the context length.
            let most = match truncation.is_context {
                true => tokens as usize,
                false => text.len(),
            };
            most > truncation.tokens as usize
        });
        let kept = kept.map(|truncation| truncation.tokens);
        let (text, reply) = match kept {
            Some(_) => (&[][..], ReplyShape::None),
            None => (text, parsed.reply),
        };
        let tokens = u64::from(kept.unwrap_or(tokens).min(tokens));
        let mut chain = Vec::new();
        prefix::chain_bytes(&root, text, block_bytes as usize, &mut chain);
        let matchable = prefix::matchable_blocks(text.len() as u64, block_bytes);
        let rest = &text[chain.len() * block_bytes as usize..];
        PromptIdentity {
            root,
            isolation: None,
            tokens: with_batch(tokens, parsed, ratio),
            matchable: matchable_of(parsed, matchable),
            unit,
            tail: ChainTail {
                bytes: rest.to_vec(),
                block_bytes: block_bytes as usize,
                reply,
                tokens_per_block: ratio.block_tokens(block_bytes as usize),
                seam: None,
                is_partial: kept.is_some() || parsed.batch != PromptBatch::default(),
                skips_cache: parsed.skips_cache,
                has_samples: parsed.has_samples(),
                ratio,
            },
            chain: chain.into(),
        }
    }

    fn tokens(
        &self,
        parsed: &ParsedBody,
        ids: &[u32],
        block_size: u32,
        seam: Option<ReplyJoin>,
    ) -> PromptIdentity {
        let scope = TokenScope {
            model: &parsed.model,
            salt: parsed.cache_salt.as_deref().unwrap_or(""),
            block_size,
        };
        let adapter = parsed.adapter.as_deref().unwrap_or("");
        let root = scope.root_with(&self.view.registry().hashing(), adapter);
        let ratio = self.ratio_of(&parsed.model);
        let mut chain = Vec::new();
        prefix::chain_tokens(&root, ids, block_size as usize, &mut chain);
        let matchable = prefix::matchable_blocks(ids.len() as u64, block_size);
        let rest = &ids[chain.len() * block_size as usize..];
        PromptIdentity {
            root,
            isolation: None,
            tokens: with_batch(ids.len() as u64, parsed, ratio),
            matchable: matchable_of(parsed, matchable),
            unit: BlockUnit::Tokens,
            tail: ChainTail {
                bytes: rest.iter().flat_map(|id| id.to_le_bytes()).collect(),
                block_bytes: 0,
                reply: parsed.reply,
                tokens_per_block: block_size,
                seam: seam.filter(|_| parsed.reply != ReplyShape::None),
                is_partial: true,
                skips_cache: parsed.skips_cache,
                has_samples: parsed.has_samples(),
                ratio,
            },
            chain: chain.into(),
        }
    }

    /// Returns the number of tokens per block of `model`'s prompts, the unit of a backend's
    /// capacity. For text, it follows from the replicated bytes per token, so replicas agree at the
    /// same index.
    #[must_use]
    pub fn tokens_per_block(&self, model: &str) -> f64 {
        match self.settings_of(model) {
            Some(settings) if !settings.tokenizer.is_character() => {
                f64::from(self.tokens_of(settings, model))
            }
            _ => {
                let milli_bytes = f64::from(self.cut_of(model).bytes) * 1000.0;
                milli_bytes / f64::from(self.ratio_of(model).milli_bytes())
            }
        }
    }

    /// Returns the number of token ids per block of `model`'s prompts, with which blocks of KV
    /// events are hashed. `None` if the model has no tokenizer.
    #[must_use]
    pub fn token_block_size(&self, model: &str) -> Option<u32> {
        let settings = self.settings_of(model)?;
        (!settings.tokenizer.is_character()).then(|| self.tokens_of(settings, model))
    }

    /// Returns the number of token ids per block of a model with a tokenizer: the configured value,
    /// else the one that its engines report.
    fn tokens_of(&self, settings: &ModelSettings, model: &str) -> u32 {
        let learnt = || self.view.registry().block_sizes.of(model);
        settings.block_size.unwrap_or_else(learnt).max(1)
    }

    /// Returns the tokenizer of `model`; `None` if its prompts are identified by characters.
    pub(super) fn tokenizer_of(&self, model: &str) -> Option<&Arc<Tokenizer>> {
        let settings = self.settings_of(model)?;
        (!settings.tokenizer.is_character()).then_some(&settings.tokenizer)
    }

    /// Returns the name of the tokenizer of `model`, as in the config.
    #[must_use]
    pub fn tokenizer_name(&self, model: &str) -> String {
        let tokenizer = self.tokenizer_of(model);
        tokenizer.map_or_else(|| "character".to_owned(), |it| it.spec().to_string())
    }

    fn cut_of(&self, model: &str) -> BlockLength {
        let settings = self.settings_of(model);
        match settings.filter(|it| !it.tokenizer.is_character()) {
            None => {
                let told = settings.and_then(|it| it.block_size);
                let bytes = told.unwrap_or(BLOCK_BYTES).max(1);
                BlockLength {
                    bytes,
                    tokens: (bytes / BLOCK_BYTES_PER_ID).max(1),
                }
            }
            Some(settings) => {
                let tokens = self.tokens_of(settings, model);
                BlockLength {
                    bytes: tokens.saturating_mul(BLOCK_BYTES_PER_ID),
                    tokens,
                }
            }
        }
    }

    fn ratio_of(&self, model: &str) -> TokenRatio {
        let hash_seed = self.view.registry().hash_seed;
        self.view.ratio(model_key(hash_seed, model))
    }

    fn settings_of(&self, model: &str) -> Option<&ModelSettings> {
        self.models
            .iter()
            .find(|settings| settings.name == model || settings.name == "*")
    }
}

/// Lengths of a model's blocks, in bytes of text and in token ids.
struct BlockLength {
    bytes: u32,
    tokens: u32,
}

/// Returns how many blocks may be cached: `matchable`, or 0 if the engine skips its cache.
fn matchable_of(parsed: &ParsedBody, matchable: u64) -> u32 {
    match parsed.skips_cache {
        true => 0,
        false => u32::try_from(matchable).unwrap_or(u32::MAX),
    }
}

/// Returns the number of tokens of a prompt, `tokens`, and of the further prompts of its batch.
fn with_batch(tokens: u64, parsed: &ParsedBody, ratio: TokenRatio) -> u32 {
    let PromptBatch { bytes, ids, .. } = parsed.batch;
    let further = match usize::try_from(bytes) {
        Ok(0) => 0,
        Ok(bytes) => u64::from(ratio.tokens(bytes)),
        Err(_) => u64::MAX,
    };
    let all = tokens.saturating_add(further).saturating_add(ids);
    u32::try_from(all).unwrap_or(u32::MAX)
}
