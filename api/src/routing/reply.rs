//! Blocks that an answer completes: the chain of the prompt goes on with the output as it streams.

use state::ids::BlockHash;
use state::prefix;

use crate::prompt::{Identity, ReplyShape};

/// Most blocks recorded of one answer; what is longer is cut there, which loses only locality.
const REPLY_BLOCKS_MAX: usize = 8192;

/// The chain of one conversation, growing with the output.
#[derive(Debug)]
pub(super) struct ReplyChain {
    root: u64,
    block_bytes: usize,
    shape: ReplyShape,
    last: Option<BlockHash>,
    /// Bytes behind the last full block.
    rest: Vec<u8>,
    is_open: bool,
    blocks: Vec<BlockHash>,
}

impl ReplyChain {
    /// `None` when output cannot continue this prompt.
    pub(super) fn of(identity: &Identity) -> Option<Self> {
        let tail = &identity.tail;
        if tail.block_bytes == 0 || tail.reply == ReplyShape::None {
            return None;
        }
        Some(Self {
            root: identity.root,
            block_bytes: tail.block_bytes,
            shape: tail.reply,
            last: identity.chain.last().copied(),
            rest: tail.bytes.clone(),
            is_open: false,
            blocks: Vec::new(),
        })
    }

    /// Takes in output text.
    pub(super) fn push(&mut self, text: &str) {
        if text.is_empty() || self.blocks.len() >= REPLY_BLOCKS_MAX {
            return;
        }
        if !self.is_open {
            self.is_open = true;
            self.rest.extend_from_slice(self.shape.opening().as_bytes());
        }
        self.rest.extend_from_slice(text.as_bytes());
        self.hash_full_blocks();
    }

    /// The blocks completed. `is_whole`: the answer came to its end, and what follows an answer in
    /// the next turn's prompt follows here.
    pub(super) fn finish(mut self, is_whole: bool) -> Vec<BlockHash> {
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
            self.root,
            self.last,
            bytes,
            self.block_bytes,
            &mut self.blocks,
        );
        self.last = self.blocks.last().copied();
        self.rest.drain(..full);
    }
}
