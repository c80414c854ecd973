//! The emulated tokenizer, and the sequences of tokens that an engine computes.
//!
//! One token is four bytes of the flattened prompt, so a block of 32 tokens is the 128 bytes that a
//! router with the `character` tokenizer hashes. The output consists of four-byte words
//! ([`super::output`]).
//!
//! A sequence is the bytes of prompt and output. If the prompt's length is not a multiple of four,
//! its last bytes count as a whole token, but the output follows without padding. A block is full
//! once it has all its *bytes*, so the bytes lag behind the token count by less than one token.

use std::ops::Range;
use std::sync::OnceLock;

use api::prompt::Prompt;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::output::Output;
pub use super::output::TOKEN_BYTES;

/// Chained hash of a full block and all blocks before it. Private to one engine, as in vLLM.
pub type EngineHash = u64;

/// The bytes of a request's prompt and output, hashed block by block as they arrive.
#[derive(Debug, Clone)]
pub struct Sequence {
    block_bytes: usize,
    root: u64,
    hashes: Vec<EngineHash>,
    /// Bytes after the last full block.
    tail: Vec<u8>,
    output: Output,
    prompt_tokens: u32,
    output_tokens: u32,
    /// Contents of the full blocks, if the sequence remembers them.
    remembered: Option<Remembered>,
}

#[derive(Debug, Clone)]
struct Remembered {
    bytes: Vec<u8>,
    salt: String,
    adapter: String,
}

/// Contents of consecutive blocks of a sequence, for KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockContent {
    /// Token ids of the blocks.
    pub tokens: Vec<u32>,
    /// Salt of the sequence; empty if it has none.
    pub salt: String,
    /// Adapter of the sequence; empty if it has none.
    pub adapter: String,
}

impl Sequence {
    /// Creates a sequence from a prompt for the base model. Sequences with different salts share no
    /// blocks. `seed` is the engine's.
    #[must_use]
    pub fn new(prompt: &[u8], salt: &str, block_tokens: u32, seed: u64) -> Self {
        Self::of_adapter(prompt, ("", salt), block_tokens, seed)
    }

    /// Creates a sequence from a prompt for the LoRA adapter `adapter`; empty for the base model.
    #[must_use]
    pub fn of_adapter(
        prompt: &[u8],
        (adapter, salt): (&str, &str),
        block_tokens: u32,
        seed: u64,
    ) -> Self {
        let root = match adapter {
            "" => xxh3_64(salt.as_bytes()),
            adapter => xxh3_64_with_seed(salt.as_bytes(), xxh3_64(adapter.as_bytes())),
        };
        let mut sequence = Self {
            block_bytes: block_tokens as usize * TOKEN_BYTES,
            root,
            hashes: Vec::with_capacity(prompt.len() / (block_tokens as usize * TOKEN_BYTES) + 1),
            tail: Vec::new(),
            output: Output::of(prompt, seed),
            prompt_tokens: token_count(prompt.len()),
            output_tokens: 0,
            remembered: None,
        };
        sequence.extend(prompt);
        sequence
    }

    /// Creates a sequence that remembers its contents, for an engine that publishes them.
    #[must_use]
    pub fn remembering(
        prompt: &[u8],
        (adapter, salt): (&str, &str),
        block_tokens: u32,
        seed: u64,
    ) -> Self {
        let mut sequence = Self::of_adapter(prompt, (adapter, salt), block_tokens, seed);
        let full = sequence.hashes.len() * sequence.block_bytes;
        sequence.remembered = Some(Remembered {
            bytes: prompt[..full].to_vec(),
            salt: salt.to_owned(),
            adapter: adapter.to_owned(),
        });
        sequence
    }

    /// Replaces the output by `output`, which goes on with words at the end of the prompt.
    #[must_use]
    pub fn with_output(mut self, output: Output) -> Self {
        self.output = output;
        self
    }

    /// Returns the contents of full blocks; `None` if the sequence does not remember them.
    #[must_use]
    pub fn content(&self, blocks: Range<usize>) -> Option<BlockContent> {
        let Remembered {
            bytes,
            salt,
            adapter,
        } = self.remembered.as_ref()?;
        let bytes = &bytes[blocks.start * self.block_bytes..blocks.end * self.block_bytes];
        Some(BlockContent {
            tokens: token_ids(bytes),
            salt: salt.clone(),
            adapter: adapter.clone(),
        })
    }

    /// Returns the chained hashes of the full blocks.
    #[must_use]
    pub fn hashes(&self) -> &[EngineHash] {
        &self.hashes
    }

    /// Returns the number of prompt tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Returns the number of output tokens so far.
    #[must_use]
    pub fn output_tokens(&self) -> u32 {
        self.output_tokens
    }

    /// Returns the number of prompt and output tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.prompt_tokens + self.output_tokens
    }

    /// Returns the output that follows the prompt.
    #[must_use]
    pub fn output(&self) -> Output {
        self.output
    }

    /// Appends the next output token.
    pub fn push_token(&mut self) {
        let next = self.output.word(self.output_tokens);
        self.extend(&next);
        self.output_tokens += 1;
    }

    fn extend(&mut self, mut bytes: &[u8]) {
        if !self.tail.is_empty() {
            let missing = self.block_bytes - self.tail.len();
            let (head, rest) = bytes.split_at(missing.min(bytes.len()));
            self.tail.extend_from_slice(head);
            bytes = rest;
            if self.tail.len() < self.block_bytes {
                return;
            }
            let full = std::mem::take(&mut self.tail);
            self.push_block(&full);
        }
        let mut blocks = bytes.chunks_exact(self.block_bytes);
        for block in &mut blocks {
            self.push_block(block);
        }
        self.tail.extend_from_slice(blocks.remainder());
    }

    fn push_block(&mut self, block: &[u8]) {
        let parent = self.hashes.last().copied().unwrap_or(self.root);
        self.hashes.push(xxh3_64_with_seed(block, parent));
        if let Some(remembered) = &mut self.remembered {
            remembered.bytes.extend_from_slice(block);
        }
    }
}

/// Returns the number of tokens in `bytes` bytes, rounded up.
#[must_use]
pub fn token_count(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(TOKEN_BYTES)).unwrap_or(u32::MAX)
}

/// What follows the last message of a chat in the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatEnding {
    /// Nothing: the prompt is no chat, or no reply is to begin.
    Nothing,
    /// The heading of the assistant's reply (the generation prompt of a chat template).
    Heading,
    /// The rest of the last message, an assistant's, which ends with its content.
    Open,
}

/// Returns a parsed prompt as the bytes of a sequence. Token ids become four little-endian bytes
/// each. The text of a chat ends so that the next turn repeats prompt and output byte for byte.
#[must_use]
pub fn sequence_bytes(prompt: Prompt, ending: ChatEnding) -> Vec<u8> {
    match prompt {
        Prompt::Text(mut text) => {
            let frame = ReplyFrame::get();
            match ending {
                ChatEnding::Nothing => {}
                ChatEnding::Heading => text.extend_from_slice(&frame.heading),
                ChatEnding::Open => {
                    let closed = text.strip_suffix(&*frame.closing).map(<[u8]>::len);
                    text.truncate(closed.unwrap_or(text.len()));
                }
            }
            text
        }
        Prompt::Tokens(ids) => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
    }
}

/// Text around an assistant's reply in a flattened chat.
#[derive(Debug)]
struct ReplyFrame {
    heading: Vec<u8>,
    closing: Vec<u8>,
}

impl ReplyFrame {
    fn get() -> &'static Self {
        static FRAME: OnceLock<ReplyFrame> = OnceLock::new();
        FRAME.get_or_init(|| {
            let (mut one, mut other) = (Vec::new(), Vec::new());
            api::prompt::append_reply(&mut one, "a");
            api::prompt::append_reply(&mut other, "b");
            let common = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
            Self {
                heading: one[..common].to_vec(),
                closing: one[common + 1..].to_vec(),
            }
        })
    }
}

/// Returns the token ids of `bytes`: four bytes each, as a little-endian number, the last padded
/// with zeros.
#[must_use]
pub fn token_ids(bytes: &[u8]) -> Vec<u32> {
    let id = |chunk: &[u8]| {
        let mut padded = [0; TOKEN_BYTES];
        padded[..chunk.len()].copy_from_slice(chunk);
        u32::from_le_bytes(padded)
    };
    bytes.chunks(TOKEN_BYTES).map(id).collect()
}

/// Returns the text of token ids: the inverse of [`token_ids`], without trailing zeros.
#[must_use]
pub fn detokenize(ids: &[u32]) -> String {
    let mut bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let length = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1);
    bytes.truncate(length);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(bytes: &[u8], block: usize) -> Vec<u64> {
        let mut parent = xxh3_64(b"");
        let chain = |chunk: &[u8]| {
            parent = xxh3_64_with_seed(chunk, parent);
            parent
        };
        bytes.chunks_exact(block).map(chain).collect()
    }

    #[test]
    fn output_tokens_continue_the_prompts_blocks() {
        for length in 0..300 {
            let prompt = vec![7_u8; length];
            let mut sequence = Sequence::new(&prompt, "", 4, 9);
            let mut bytes = prompt.clone();
            for position in 0..40 {
                sequence.push_token();
                bytes.extend(sequence.output().word(position));
                assert_eq!(
                    sequence.hashes(),
                    reference(&bytes, 16),
                    "prompt of {length}"
                );
            }
            assert_eq!(sequence.tokens(), token_count(length) + 40);
        }
    }

    #[test]
    fn a_salt_separates_equal_prompts() {
        let one = Sequence::new(&[1; 64], "a", 4, 0);
        let other = Sequence::new(&[1; 64], "b", 4, 0);
        assert_ne!(one.hashes()[0], other.hashes()[0]);
        assert_eq!(one.output(), other.output());
    }

    #[test]
    fn chat_history_repeats_the_answer_byte_for_byte() {
        let mut turn = b"<|user|>\nhello there\n".to_vec();
        let before = sequence_bytes(Prompt::Text(turn.clone()), ChatEnding::Heading);
        let answer = Output::of(&before, 0).text(0, 9);
        api::prompt::append_reply(&mut turn, &answer);
        let answered = [before.as_slice(), answer.as_bytes()].concat();
        assert!(turn.starts_with(&answered));
        let open = sequence_bytes(Prompt::Text(turn), ChatEnding::Open);
        assert_eq!(open, answered);
    }

    #[test]
    fn tokens_and_text_round_trip() {
        for text in ["", "a", "four", "five5", "grüße"] {
            assert_eq!(detokenize(&token_ids(text.as_bytes())), text);
        }
        assert_eq!(token_ids(b"abcde").len(), 2);
    }
}
