//! Encoding of KV events as msgpack, in both formats of vLLM.

use bytes::Bytes;
use rmp::encode as pack;

use super::{EventSource, StepEvents};
use crate::engine::cache::BlockEvent;
use crate::engine::offload::{OffloadEvent, OffloadTier, OffloadedBlock};
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

/// Names of the tiers below the GPU in KV events, and the fields that describe their blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum OffloadMedia {
    /// `CPU` and `STORAGE`. As in vLLM, blocks have no extra keys, so that salts are missing.
    Vllm,
    /// `CPU_PINNED` and `DISK`. The first block of a prompt has its salt.
    Sglang,
}

impl OffloadMedia {
    fn name(self, tier: OffloadTier) -> &'static str {
        match (self, tier) {
            (Self::Vllm, OffloadTier::Cpu) => "CPU",
            (Self::Vllm, OffloadTier::Disk) => "STORAGE",
            (Self::Sglang, OffloadTier::Cpu) => "CPU_PINNED",
            (Self::Sglang, OffloadTier::Disk) => "DISK",
        }
    }
}

/// Encodes a message: the array `[at_s, events, rank]`.
pub(super) fn payload(
    form: EventEncoding,
    source: EventSource,
    at_s: f64,
    events: StepEvents,
) -> Bytes {
    let mut out = EventWriter(Vec::with_capacity(256));
    let mut contents = events.contents.into_iter();
    out.array(3);
    pack::write_f64(&mut out.0, at_s).expect(WRITES);
    let offloaded: usize = events.offloaded.iter().map(count).sum();
    out.array(events.blocks.len() + offloaded);
    for event in &events.blocks {
        match event {
            BlockEvent::Stored { hashes, parent } => {
                let content = contents.next().unwrap_or(BlockContent {
                    tokens: Vec::new(),
                    salt: String::new(),
                    adapter: String::new(),
                });
                out.stored(form, hashes, *parent, &content, source.block_tokens);
            }
            BlockEvent::Removed { hash } => out.removed(form, &[*hash], GPU),
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
    for event in &events.offloaded {
        out.offloaded(form, source, event);
    }
    out.number(source.rank.into());
    Bytes::from(out.0)
}

/// Returns the number of encoded events for a change of a tier below the GPU: one per described
/// block, one for all blocks without a description.
fn count(event: &OffloadEvent) -> usize {
    match event {
        OffloadEvent::Stored(_, blocks) if is_described(blocks) => blocks.len(),
        OffloadEvent::Stored(..) | OffloadEvent::Removed(..) => 1,
    }
}

fn is_described(blocks: &[OffloadedBlock]) -> bool {
    blocks.iter().all(|block| block.content.is_some())
}

const GPU: &str = "GPU";

const WRITES: &str = "writing to memory does not fail";

/// Fields that every `BlockStored` has.
#[derive(Clone, Copy)]
struct StoredBlocks<'a> {
    hashes: &'a [u64],
    parent: Option<u64>,
    tokens: &'a [u32],
    block_tokens: u32,
    medium: &'a str,
}

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

    /// Begins an event of `fields` fields besides its name.
    fn event(&mut self, form: EventEncoding, name: &str, fields: u32) {
        match form {
            EventEncoding::Array => self.array(1 + fields as usize),
            EventEncoding::Map => {
                self.map(1 + fields);
                self.text("type");
            }
        }
        self.text(name);
    }

    /// Names the next field, if the form has names.
    fn field(&mut self, form: EventEncoding, name: &str) {
        if form == EventEncoding::Map {
            self.text(name);
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
        let blocks = StoredBlocks {
            hashes,
            parent,
            tokens: &content.tokens,
            block_tokens,
            medium: GPU,
        };
        match form {
            EventEncoding::Array => self.stored_array(blocks, &content.adapter),
            EventEncoding::Map => {
                self.stored_head(form, blocks, 4);
                self.lora_name(&content.adapter);
                self.text("extra_keys");
                self.extra_keys(hashes.len(), parent.is_none(), content);
                self.group();
            }
        }
    }

    /// Encodes `BlockStored` as an array, which ends with the adapter's name, if any.
    fn stored_array(&mut self, blocks: StoredBlocks<'_>, adapter: &str) {
        let has_adapter = !adapter.is_empty();
        self.stored_head(EventEncoding::Array, blocks, has_adapter.into());
        if has_adapter {
            self.text(adapter);
        }
    }

    /// Encodes the fields that every `BlockStored` has. Other `more` fields follow.
    fn stored_head(&mut self, form: EventEncoding, blocks: StoredBlocks<'_>, more: u32) {
        self.event(form, "BlockStored", 6 + more);
        self.field(form, "block_hashes");
        self.numbers(blocks.hashes.iter().copied());
        self.field(form, "parent_block_hash");
        match blocks.parent {
            Some(parent) => self.number(parent),
            None => self.nil(),
        }
        self.field(form, "token_ids");
        self.numbers(blocks.tokens.iter().map(|token| u64::from(*token)));
        self.field(form, "block_size");
        self.number(blocks.block_tokens.into());
        self.field(form, "lora_id");
        self.nil();
        self.field(form, "medium");
        self.text(blocks.medium);
    }

    fn lora_name(&mut self, adapter: &str) {
        self.text("lora_name");
        match adapter {
            "" => self.nil(),
            adapter => self.text(adapter),
        }
    }

    fn group(&mut self) {
        self.text("group_idx");
        self.number(0);
        self.text("kv_cache_spec_kind");
        self.text("full_attention");
    }

    /// Encodes a change of a tier below the GPU. Described blocks have events of their own.
    fn offloaded(&mut self, form: EventEncoding, source: EventSource, event: &OffloadEvent) {
        match event {
            OffloadEvent::Removed(tier, hashes) => {
                self.removed(form, hashes, source.media.name(*tier));
            }
            OffloadEvent::Stored(tier, blocks) if is_described(blocks) => {
                for block in blocks {
                    if let Some(content) = &block.content {
                        self.described(form, source, (*tier, block), content);
                    }
                }
            }
            OffloadEvent::Stored(tier, blocks) => {
                let hashes: Vec<u64> = blocks.iter().map(|block| block.hash).collect();
                self.placeholder(form, &hashes, source.media.name(*tier));
            }
        }
    }

    fn described(
        &mut self,
        form: EventEncoding,
        source: EventSource,
        (tier, block): (OffloadTier, &OffloadedBlock),
        content: &BlockContent,
    ) {
        let blocks = StoredBlocks {
            hashes: &[block.hash],
            parent: block.parent,
            tokens: &content.tokens,
            block_tokens: source.block_tokens,
            medium: source.media.name(tier),
        };
        let is_first = block.parent.is_none() && !content.salt.is_empty();
        let has_salt = is_first && source.media == OffloadMedia::Sglang;
        match form {
            EventEncoding::Array => self.stored_array(blocks, &content.adapter),
            EventEncoding::Map => {
                self.stored_head(form, blocks, 3 + u32::from(has_salt));
                self.lora_name(&content.adapter);
                if has_salt {
                    self.text("cache_salt");
                    self.text(&content.salt);
                }
                self.group();
            }
        }
    }

    /// Encodes blocks without a description, as vLLM does by default: only their hashes are true.
    fn placeholder(&mut self, form: EventEncoding, hashes: &[u64], medium: &str) {
        let blocks = StoredBlocks {
            hashes,
            parent: None,
            tokens: &[],
            block_tokens: 0,
            medium,
        };
        match form {
            EventEncoding::Array => self.stored_array(blocks, ""),
            EventEncoding::Map => {
                self.stored_head(form, blocks, 2);
                self.lora_name("");
                self.text("group_idx");
                self.number(0);
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

    fn removed(&mut self, form: EventEncoding, hashes: &[u64], medium: &str) {
        self.event(
            form,
            "BlockRemoved",
            2 + u32::from(form == EventEncoding::Map),
        );
        self.field(form, "block_hashes");
        self.numbers(hashes.iter().copied());
        self.field(form, "medium");
        self.text(medium);
        if form == EventEncoding::Map {
            self.text("group_idx");
            self.number(0);
        }
    }
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;
