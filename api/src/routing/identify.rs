//! From a parsed body to block hashes and a token estimate.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use state::command::NAME_BYTES_MAX;
use state::prefix::{self, Scope};

use super::Router;
use super::decide::serves;
use crate::prompt::{BYTES_PER_TOKEN, Identity, ModelSettings, Parsed, Prompt, Tail, TokenRatio};

/// Bytes per block where no `[[models]]` entry applies.
const BLOCK_BYTES: u32 = 128;
/// Token ids per block relative to the bytes of a text block.
const BLOCK_BYTES_PER_ID: u32 = 4;
/// Models whose ratio is learnt; further ones, and those no backend serves, share one.
const MODELS_MAX: usize = 1024;

/// Ratios by model.
#[derive(Default)]
pub(super) struct Ratios {
    by_model: RwLock<HashMap<String, TokenRatio>>,
    others: TokenRatio,
}

impl Ratios {
    /// Models with a ratio of their own.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_model
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// `is_served` says whether the name is worth remembering: clients may ask for any.
    fn of(&self, model: &str, is_served: impl FnOnce() -> bool) -> TokenRatio {
        let known = self.by_model.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(ratio) = known.get(model) {
            return ratio.clone();
        }
        if known.len() >= MODELS_MAX {
            return self.others.clone();
        }
        drop(known);
        if model.len() > NAME_BYTES_MAX || !is_served() {
            return self.others.clone();
        }
        let mut known = self
            .by_model
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known.entry(model.to_owned()).or_default().clone()
    }
}

impl Router {
    /// The prompt's identity under the model's settings and the cluster's seed.
    ///
    /// Text is cut into blocks of `block_size` bytes. A prompt given as token ids is no text: it
    /// gets blocks of a quarter as many ids, in a scope of its own, and output cannot continue it.
    #[must_use]
    pub fn identify(&self, parsed: &Parsed) -> Identity {
        let settings = self.settings_of(&parsed.model);
        let block_size = settings
            .map_or(BLOCK_BYTES, |settings| settings.block_size)
            .max(1);
        let tokenizer = settings.map_or("character", |settings| settings.tokenizer.as_str());
        let scope = Scope {
            model: &parsed.model,
            adapter: "",
            salt: parsed.cache_salt.as_deref().unwrap_or(""),
            tokenizer,
            block_size,
        };
        let hash_seed = self.view.registry().hash_seed;
        match &parsed.prompt {
            Prompt::Text(text) => {
                let ratio = self
                    .ratios
                    .of(&parsed.model, || self.is_served(&parsed.model));
                text_identity(
                    prefix::root(hash_seed, &scope),
                    text,
                    block_size,
                    parsed,
                    ratio,
                )
            }
            Prompt::Tokens(ids) => {
                let block_size = (block_size / BLOCK_BYTES_PER_ID).max(1);
                let scope = Scope {
                    tokenizer: "token-ids",
                    block_size,
                    ..scope
                };
                ids_identity(prefix::root(hash_seed, &scope), ids, block_size)
            }
        }
    }

    /// Tokens that one block of `model`'s prompts stands for where all replicas must agree, as in a
    /// backend's capacity: from the config alone, not from what this replica has learnt.
    #[must_use]
    pub fn tokens_per_block(&self, model: &str) -> f64 {
        let block_size = self
            .settings_of(model)
            .map_or(BLOCK_BYTES, |it| it.block_size)
            .max(1);
        f64::from(block_size) / f64::from(BYTES_PER_TOKEN)
    }

    fn is_served(&self, model: &str) -> bool {
        let registry = self.view.registry();
        registry.backends.iter().any(|it| serves(it, model))
    }

    fn settings_of(&self, model: &str) -> Option<&ModelSettings> {
        self.models
            .iter()
            .find(|settings| settings.name == model || settings.name == "*")
    }
}

fn text_identity(
    root: u64,
    text: &[u8],
    block_size: u32,
    parsed: &Parsed,
    ratio: TokenRatio,
) -> Identity {
    let block_bytes = block_size as usize;
    let mut chain = Vec::new();
    prefix::chain_bytes(root, text, block_bytes, &mut chain);
    let matchable = prefix::matchable_blocks(text.len() as u64, block_size);
    let rest = &text[chain.len() * block_bytes..];
    Identity {
        root,
        tokens: ratio.tokens(text.len()),
        matchable: u32::try_from(matchable).unwrap_or(u32::MAX),
        tail: Tail {
            bytes: rest.to_vec(),
            block_bytes,
            reply: parsed.reply,
            tokens_per_block: ratio.block_tokens(block_bytes),
            ratio,
        },
        chain: chain.into(),
    }
}

fn ids_identity(root: u64, ids: &[u32], block_size: u32) -> Identity {
    let mut chain = Vec::new();
    prefix::chain_tokens(root, ids, block_size as usize, &mut chain);
    let matchable = prefix::matchable_blocks(ids.len() as u64, block_size);
    Identity {
        root,
        tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX),
        matchable: u32::try_from(matchable).unwrap_or(u32::MAX),
        tail: Tail {
            tokens_per_block: block_size,
            ..Tail::default()
        },
        chain: chain.into(),
    }
}
