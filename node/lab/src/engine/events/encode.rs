//! Encoding of KV events as msgpack, in both formats of vLLM.

use bytes::Bytes;
use rmp::encode as pack;

use crate::engine::cache::BlockEvent;
use crate::engine::text::BlockContent;

/// Msgpack type that represents an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum EventEncoding {
    /// Arrays, as in vLLM up to 0.27.
    Array,
    /// Maps, as in later versions of vLLM.
    #[default]
    Map,
}

/// Encodes a message: the array `[at_s, events, rank]`.
pub(super) fn payload(
    form: EventEncoding,
    (block_tokens, rank): (u32, u16),
    at_s: f64,
    events: &[BlockEvent],
    contents: Vec<BlockContent>,
) -> Bytes {
    let mut out = EventWriter(Vec::with_capacity(256));
    let mut contents = contents.into_iter();
    out.array(3);
    pack::write_f64(&mut out.0, at_s).expect(WRITES);
    out.array(events.len());
    for event in events {
        match event {
            BlockEvent::Stored { hashes, parent } => {
                let content = contents.next().unwrap_or(BlockContent {
                    tokens: Vec::new(),
                    salt: String::new(),
                    adapter: String::new(),
                });
                out.stored(form, hashes, *parent, &content, block_tokens);
            }
            BlockEvent::Removed { hash } => out.removed(form, *hash),
            BlockEvent::Cleared => match form {
                EventEncoding::Array => {
                    out.array(1);
                    out.text("AllBlocksCleared");
                }
                EventEncoding::Map => {
                    out.map(1);
                    out.text("type");
                    out.text("AllBlocksCleared");
                }
            },
        }
    }
    out.number(rank.into());
    Bytes::from(out.0)
}

const WRITES: &str = "writing to memory does not fail";

struct EventWriter(Vec<u8>);

impl EventWriter {
    fn array(&mut self, length: usize) {
        let length = u32::try_from(length).expect("a step has few events");
        pack::write_array_len(&mut self.0, length).expect(WRITES);
    }

    fn map(&mut self, length: u32) {
        pack::write_map_len(&mut self.0, length).expect(WRITES);
    }

    fn text(&mut self, text: &str) {
        pack::write_str(&mut self.0, text).expect(WRITES);
    }

    fn number(&mut self, number: u64) {
        pack::write_uint(&mut self.0, number).expect(WRITES);
    }

    fn nil(&mut self) {
        pack::write_nil(&mut self.0).expect(WRITES);
    }

    fn numbers(&mut self, numbers: impl ExactSizeIterator<Item = u64>) {
        self.array(numbers.len());
        for number in numbers {
            self.number(number);
        }
    }

    fn parent(&mut self, parent: Option<u64>) {
        match parent {
            Some(parent) => self.number(parent),
            None => self.nil(),
        }
    }

    fn stored(
        &mut self,
        form: EventEncoding,
        hashes: &[u64],
        parent: Option<u64>,
        content: &BlockContent,
        block_tokens: u32,
    ) {
        let tokens = content.tokens.iter().map(|token| u64::from(*token));
        match form {
            EventEncoding::Array => {
                let has_adapter = !content.adapter.is_empty();
                self.array(7 + usize::from(has_adapter));
                self.text("BlockStored");
                self.numbers(hashes.iter().copied());
                self.parent(parent);
                self.numbers(tokens);
                self.number(block_tokens.into());
                self.nil();
                self.text("GPU");
                if has_adapter {
                    self.text(&content.adapter);
                }
            }
            EventEncoding::Map => {
                self.map(11);
                self.text("type");
                self.text("BlockStored");
                self.text("block_hashes");
                self.numbers(hashes.iter().copied());
                self.text("parent_block_hash");
                self.parent(parent);
                self.text("token_ids");
                self.numbers(tokens);
                self.text("block_size");
                self.number(block_tokens.into());
                self.text("lora_id");
                self.nil();
                self.text("medium");
                self.text("GPU");
                self.text("lora_name");
                match &*content.adapter {
                    "" => self.nil(),
                    adapter => self.text(adapter),
                }
                self.text("extra_keys");
                self.extra_keys(hashes.len(), parent.is_none(), content);
                self.text("group_idx");
                self.number(0);
                self.text("kv_cache_spec_kind");
                self.text("full_attention");
            }
        }
    }

    /// Encodes extra keys per block: the adapter in each, and the salt in a prompt's first block.
    fn extra_keys(&mut self, blocks: usize, is_first: bool, content: &BlockContent) {
        self.array(blocks);
        for block in 0..blocks {
            let salt = if block == 0 && is_first {
                &*content.salt
            } else {
                ""
            };
            let keys = [&*content.adapter, salt];
            let keys = keys.iter().filter(|key| !key.is_empty());
            match keys.clone().count() {
                0 => self.nil(),
                count => {
                    self.array(count);
                    keys.for_each(|key| self.text(key));
                }
            }
        }
    }

    fn removed(&mut self, form: EventEncoding, hash: u64) {
        match form {
            EventEncoding::Array => {
                self.array(3);
                self.text("BlockRemoved");
                self.numbers([hash].into_iter());
                self.text("GPU");
            }
            EventEncoding::Map => {
                self.map(4);
                self.text("type");
                self.text("BlockRemoved");
                self.text("block_hashes");
                self.numbers([hash].into_iter());
                self.text("medium");
                self.text("GPU");
                self.text("group_idx");
                self.number(0);
            }
        }
    }
}
