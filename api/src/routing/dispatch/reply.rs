//! Computes the blocks that a response completes: output continues the prompt's chain as it
//! streams.

use state::ids::BlockHash;
use state::prefix::{self, ChainRoot};
use xxhash_rust::xxh3::xxh3_64;

use crate::prompt::{PromptIdentity, ReplyJoin, ReplyShape};

/// Maximum number of blocks recorded per response. Omitting further blocks only reduces cache hits.
const REPLY_BLOCKS_MAX: usize = 8192;

/// Maximum length of a response that is tokenized, in bytes.
const TOKENIZED_BYTES_MAX: usize = 256 * 1024;
/// Maximum number of token ids that are kept of a response with ids.
const IDS_MAX: usize = 256 * 1024;
/// Maximum length of a response that is tokenized inline, in bytes; a longer one would delay other
/// connections on the same thread.
const INLINE_BYTES_MAX: usize = 1024;

/// The chain of a prompt's blocks, which the output continues.
#[derive(Debug)]
pub(super) enum ReplyChain {
    /// Blocks of bytes, hashed as the output arrives.
    Bytes(ByteChain),
    /// Blocks of token ids, known once the response ends.
    Tokens(TokenChain),
}

impl ReplyChain {
    /// Returns a chain that continues the prompt; `None` if output cannot continue it.
    pub(in crate::routing) fn of(identity: &PromptIdentity) -> Option<Self> {
        let tail = &identity.tail;
        if tail.reply == ReplyShape::None {
            return None;
        }
        if tail.block_bytes > 0 {
            return Some(Self::Bytes(ByteChain::of(identity)));
        }
        let seam = tail.seam.clone();
        Some(Self::Tokens(TokenChain {
            root: identity.root.clone(),
            block_size: tail.tokens_per_block,
            last: identity.chain.last().copied(),
            rest: tail.ids(),
            text: seam.is_some().then(String::new),
            seam,
            ids: Vec::new(),
            asked: None,
        }))
    }

    /// Whether blocks of an engine's KV events make this chain's superfluous.
    pub(super) fn has_engine_blocks(&self) -> bool {
        matches!(self, Self::Tokens(_))
    }

    /// Appends output text to the chain.
    pub(in crate::routing) fn push(&mut self, text: &str) {
        match self {
            Self::Bytes(chain) => chain.push(text),
            Self::Tokens(chain) => chain.push(text),
        }
    }

    /// Appends token ids that the engine returned with its output. They count instead of the text,
    /// unless the prompt is in the router's own frames.
    pub(in crate::routing) fn push_ids(&mut self, ids: &[u32]) {
        if let Self::Tokens(chain) = self
            && !matches!(&chain.seam, Some(ReplyJoin::Local(seam)) if seam.is_framed())
        {
            // Ids beyond the maximum are counted as missing.
            let room = IDS_MAX - chain.ids.len();
            chain.ids.extend(ids.iter().take(room));
            chain.text = None;
        }
    }

    /// Records output other than text. The engine's tokens then differ from those of the text, so
    /// token blocks end here. Has no effect on blocks of bytes, which are estimates anyway.
    pub(super) fn interrupt(&mut self) {
        if let Self::Tokens(chain) = self {
            chain.text = None;
        }
    }

    /// Whether [`ReplyChain::finish`] takes so long that it must not run inline.
    pub(super) fn is_long(&self) -> bool {
        match self {
            Self::Tokens(chain) if matches!(chain.seam, Some(ReplyJoin::Local(_))) => {
                let text = chain.text.as_ref();
                text.is_some_and(|text| text.len() > INLINE_BYTES_MAX)
            }
            Self::Bytes(_) | Self::Tokens(_) => false,
        }
    }

    /// Whether an engine must tokenize the response, see [`ReplyChain::ask`].
    pub(super) fn is_asked(&self) -> bool {
        match self {
            Self::Bytes(_) => false,
            Self::Tokens(chain) => {
                let is_asked = matches!(chain.seam, Some(ReplyJoin::FromEngine(_)));
                is_asked && chain.text.as_ref().is_some_and(|text| !text.is_empty())
            }
        }
    }

    /// Requests the tokens of the response from an engine. On failure, the response adds no blocks.
    pub(in crate::routing) async fn ask(&mut self) {
        if let Self::Tokens(chain) = self
            && let (Some(ReplyJoin::FromEngine(seam)), Some(text)) = (&chain.seam, &chain.text)
        {
            chain.asked = seam.continuation(text).await;
        }
    }

    /// Ends the chain and returns the blocks that the output completed.
    pub(in crate::routing) fn finish(self, end: ReplyEnd) -> Vec<BlockHash> {
        match self {
            Self::Bytes(chain) => chain.finish(end.is_whole),
            Self::Tokens(chain) => chain.finish(end),
        }
    }
}

/// How a response ended, and its reported length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReplyEnd {
    /// Whether the response is complete, so that its closing text follows in the next prompt.
    pub(in crate::routing) is_whole: bool,
    /// Number of output tokens that the engine reported, if any.
    pub(in crate::routing) tokens: Option<usize>,
}

/// A chain of blocks of token ids.
#[derive(Debug)]
pub(super) struct TokenChain {
    root: ChainRoot,
    block_size: u32,
    last: Option<BlockHash>,
    /// Tokens of the chain after its last full block.
    rest: Vec<u32>,
    /// How the tokens of text join those of the prompt; `None` if unknown.
    seam: Option<ReplyJoin>,
    /// Text of the response; `None` if it does not determine the tokens: without a seam, with other
    /// output, with ids, and if it is too long.
    text: Option<String>,
    /// Tokens that came with the response; empty if the engine returns none.
    ids: Vec<u32>,
    /// Tokens that an engine returned for the text; `None` if not requested or on failure.
    asked: Option<Vec<u32>>,
}

impl TokenChain {
    fn push(&mut self, text: &str) {
        if let Some(known) = &mut self.text {
            if known.len() + text.len() > TOKENIZED_BYTES_MAX {
                self.text = None;
            } else {
                known.push_str(text);
            }
        }
    }

    fn finish(mut self, end: ReplyEnd) -> Vec<BlockHash> {
        let mut blocks = Vec::new();
        let text = self.text.as_deref().filter(|text| !text.is_empty());
        let seed = text.map(|text| xxh3_64(text.as_bytes()));
        let taken = self.take_ids(end);
        let Some(mut ids) = taken.or_else(|| self.unknown_ids(end, seed?)) else {
            return blocks;
        };
        // An engine computes the KV cache of a token when it generates the next one. So the last
        // token has none: the token that ended the response, or a token of its text if the maximum
        // length ended it.
        let made = end.tokens.unwrap_or(ids.len());
        ids.truncate(made.saturating_sub(1));
        self.rest.extend(ids);
        let block_size = self.block_size as usize;
        prefix::continue_tokens(&self.root, self.last, &self.rest, block_size, &mut blocks);
        blocks.truncate(REPLY_BLOCKS_MAX);
        blocks
    }

    /// Returns the tokens of the response, without the token that ended it if that is not known.
    /// `None` if they are not those that the engine generated, as far as their number shows: an
    /// engine may generate other tokens than a tokenizer makes of the same text.
    fn take_ids(&mut self, end: ReplyEnd) -> Option<Vec<u32>> {
        if !self.ids.is_empty() {
            return Some(std::mem::take(&mut self.ids)).filter(|ids| end.tokens == Some(ids.len()));
        }
        let text = self.text.take().filter(|text| !text.is_empty())?;
        let (ids, is_framed) = match self.seam.as_ref()? {
            ReplyJoin::Local(seam) => (seam.continuation(&text, end.is_whole)?, seam.is_framed()),
            ReplyJoin::FromEngine(_) => (self.asked.take()?, false),
        };
        let is_same = |made: usize| made == ids.len() || made == ids.len() + 1;
        // Frames are the router's own, so the numbers say nothing.
        let is_believed = is_framed || end.tokens.is_none_or(is_same);
        is_believed.then_some(ids)
    }

    /// Returns as many ids as the engine reported for a text, which no prompt contains. Their blocks
    /// match nothing, but the engine's cache holds as many, for which it evicts others. Other output,
    /// such as a call of a tool, is often rendered into the next prompt as the tokens that it was.
    fn unknown_ids(&self, end: ReplyEnd, seed: u64) -> Option<Vec<u32>> {
        if matches!(&self.seam, Some(ReplyJoin::Local(seam)) if seam.is_framed()) {
            return None;
        }
        let made = end.tokens?.min(REPLY_BLOCKS_MAX * self.block_size as usize);
        Some(
            (0..made)
                .map(|position| unknown_id(seed, position))
                .collect(),
        )
    }
}

/// Returns an id that no vocabulary has.
fn unknown_id(seed: u64, position: usize) -> u32 {
    // Fibonacci hashing: the multiplier is 2^64 divided by the golden ratio.
    let mixed = (seed ^ position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 32) as u32 | 1 << 31
}

/// A chain of blocks of bytes.
#[derive(Debug)]
pub(super) struct ByteChain {
    root: ChainRoot,
    block_bytes: usize,
    shape: ReplyShape,
    last: Option<BlockHash>,
    /// Bytes of the chain after its last full block.
    rest: Vec<u8>,
    is_open: bool,
    blocks: Vec<BlockHash>,
}

impl ByteChain {
    fn of(identity: &PromptIdentity) -> Self {
        let tail = &identity.tail;
        Self {
            root: identity.root.clone(),
            block_bytes: tail.block_bytes,
            shape: tail.reply,
            last: identity.chain.last().copied(),
            rest: tail.bytes.clone(),
            is_open: false,
            blocks: Vec::new(),
        }
    }

    fn push(&mut self, text: &str) {
        if text.is_empty() || self.blocks.len() >= REPLY_BLOCKS_MAX {
            return;
        }
        if !self.is_open {
            self.is_open = true;
            self.rest.extend_from_slice(self.shape.opening().as_bytes());
        }
        let room = (REPLY_BLOCKS_MAX - self.blocks.len()) * self.block_bytes;
        self.rest
            .extend_from_slice(&text.as_bytes()[..room.min(text.len())]);
        self.hash_full_blocks();
    }

    fn finish(mut self, is_whole: bool) -> Vec<BlockHash> {
        if is_whole && self.is_open && self.blocks.len() < REPLY_BLOCKS_MAX {
            self.rest.extend_from_slice(self.shape.closing().as_bytes());
            self.hash_full_blocks();
        }
        self.blocks
    }

    fn hash_full_blocks(&mut self) {
        let full = self.rest.len() - self.rest.len() % self.block_bytes;
        if full == 0 {
            return;
        }
        let bytes = &self.rest[..full];
        prefix::continue_bytes(
            &self.root,
            self.last,
            bytes,
            self.block_bytes,
            &mut self.blocks,
        );
        self.last = self.blocks.last().copied();
        self.rest.drain(..full);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::prompt::{ParsedBody, parse};
    use crate::routing::OutboxSettings;
    use crate::routing::fixture::{Log, Port, router};

    const WHOLE: ReplyEnd = ReplyEnd {
        is_whole: true,
        tokens: None,
    };

    fn chat(turns: &[(&str, &str)]) -> ParsedBody {
        let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
        let messages: Vec<_> = turns.iter().map(message).collect();
        let body = json!({"model": "m", "messages": messages}).to_string();
        parse("/v1/chat/completions", &Bytes::from(body)).unwrap()
    }

    fn completion(prompt: &str) -> ParsedBody {
        let body = json!({"model": "m", "prompt": prompt}).to_string();
        parse("/v1/completions", &Bytes::from(body)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn prompt_and_reply_are_the_start_of_the_next_turn(
            question in ".{0,60}",
            parts in proptest::collection::vec(".{0,30}", 0..8),
            is_chat in any::<bool>(),
        ) {
            let router = router(&Port::new(Log::new(&[])), OutboxSettings::default());
            let reply = parts.concat();
            let next = "and what comes next is longer than a block";
            let (first, second) = if is_chat {
                let turns = [("user", &*question), ("assistant", &*reply), ("user", next)];
                (chat(&turns[..1]), chat(&turns))
            } else {
                (completion(&question), completion(&format!("{question}{reply}{next}")))
            };
            let (first, second) = (router.reader().identify(&first), router.reader().identify(&second));
            let mut known = first.chain.to_vec();
            let mut output = ReplyChain::of(&first).unwrap();
            parts.iter().for_each(|part| output.push(part));
            known.extend(output.finish(WHOLE));
            let mut text = vec![0; first.chain.len() * 16];
            text.extend(&first.tail.bytes);
            if !reply.is_empty() {
                first.tail.reply.append(&mut text, &reply);
            }
            prop_assert_eq!(known.len(), text.len() / 16);
            prop_assert_eq!(&known[..], &second.chain[..known.len()]);
        }
    }

    #[test]
    fn an_unbounded_reply_is_truncated() {
        let router = router(&Port::new(Log::new(&[])), OutboxSettings::default());
        let mut output = ReplyChain::of(&router.reader().identify(&completion(""))).unwrap();
        let text = "x".repeat(16 * 1000);
        (0..20).for_each(|_| output.push(&text));
        let ReplyChain::Bytes(bytes) = &output else {
            panic!("{output:?}");
        };
        assert!(bytes.rest.is_empty());
        assert_eq!(output.finish(WHOLE).len(), REPLY_BLOCKS_MAX);
    }
}
