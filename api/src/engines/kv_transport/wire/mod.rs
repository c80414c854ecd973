//! Decodes the KV events of vLLM and SGLang: positional and named forms, hashes as integers or
//! bytes.
//!
//! Field names and their order follow vLLM's `distributed/kv_events.py` and streams recorded from
//! released engines (`api/src/kv_events/fixtures`). Unknown kinds of events and unknown fields of
//! later versions are ignored. Memory is bounded by a small multiple of the payload, which the
//! transport bounds.

use state::ids::EngineHash;
use state::kv_events::LowerTier;

use super::msgpack::{MsgpackError, MsgpackReader, MsgpackValue};

/// A decoded message of a publisher.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EventPayload {
    /// Events of the message, in order.
    pub events: Vec<EngineEvent>,
    /// Data-parallel rank of the publisher, if given.
    pub rank: Option<u32>,
}

/// One event of an engine's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineEvent {
    /// Blocks were added to the cache.
    Stored(BlockStored),
    /// Physical copies of blocks were removed.
    Removed(BlockRemoved),
    /// The cache was cleared.
    Cleared,
    /// One or more consecutive events of unknown kinds.
    Unknown,
}

/// An event `BlockStored`: blocks were added to the cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockStored {
    /// The engine's hashes of the blocks, in prompt order.
    pub hashes: Vec<EngineHash>,
    /// Parent of the first block; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// Tokens of all the blocks, in order.
    pub tokens: Vec<u32>,
    /// Number of tokens per block.
    pub block_size: u32,
    /// Location of the blocks.
    pub place: CacheLocation,
    /// Inputs of the blocks' hashes besides the tokens.
    pub keys: BlockKeys,
}

/// An event `BlockRemoved`: copies of blocks were removed from the cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockRemoved {
    /// Hashes of the removed blocks, one per physical copy.
    pub hashes: Vec<EngineHash>,
    /// Location of the blocks.
    pub place: CacheLocation,
}

/// Location of blocks among an engine's caches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CacheLocation {
    /// Memory that holds the blocks.
    pub medium: CacheMedium,
    /// Group of layers, in hybrid models; `None` if not given.
    pub group: Option<u32>,
    /// Whether the group has full attention; `None` if not given.
    pub is_full_attention: Option<bool>,
}

/// Memory that holds cached blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheMedium {
    /// The GPU's.
    #[default]
    Gpu,
    /// A tier below the GPU.
    Lower(LowerTier),
    /// A medium of an unknown name.
    Unknown,
}

impl CacheMedium {
    /// Returns the medium of a name that vLLM (`CPU`, `STORAGE`) or SGLang uses (the others).
    ///
    /// LMCache's `cpu` is not among them: it never reports that a block was removed.
    fn of(name: &[u8]) -> Self {
        match name {
            b"GPU" => Self::Gpu,
            b"CPU" | b"CPU_PINNED" => Self::Lower(LowerTier::Cpu),
            b"STORAGE" | b"DISK" => Self::Lower(LowerTier::Disk),
            b"EXTERNAL" => Self::Lower(LowerTier::Store),
            _ => Self::Unknown,
        }
    }
}

/// Attributes that distinguish blocks with equal tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockKeys {
    /// Whether the blocks use a LoRA adapter, given by number or by name.
    pub has_adapter: bool,
    /// Name of the LoRA adapter; `None` without one, or if only its number is given.
    pub adapter: Option<String>,
    /// Cache salt, which belongs to the prompt's first block; `None` without one.
    pub salt: Option<String>,
    /// Index of the first block with further keys: media, embeddings, or anything unknown. No hash
    /// of a prompt matches this block or those after it.
    pub foreign_from: Option<usize>,
    /// Whether the event leaves open which keys the blocks have. vLLM's offloading connector does
    /// (vllm/distributed/kv_transfer/kv_connector/v1/offloading/events.py).
    pub are_unknown: bool,
}

impl BlockKeys {
    fn foreign(&mut self, block: u32) {
        let block = usize::try_from(block).unwrap_or(usize::MAX);
        self.foreign_from = Some(self.foreign_from.map_or(block, |from| from.min(block)));
    }
}

/// Decodes a payload.
///
/// # Errors
/// Returns a [`MsgpackError`] if the payload does not have the form that engines publish.
pub fn decode(bytes: &[u8]) -> Result<EventPayload, MsgpackError> {
    let mut pack = MsgpackReader::new(bytes);
    let parts = pack.array()?;
    if parts < 2 {
        return Err(MsgpackError {
            expected: "a time and events",
            left: bytes.len(),
        });
    }
    pack.skip()?;
    let mut payload = EventPayload::default();
    for _ in 0..pack.array()? {
        let event = event(&mut pack)?;
        // An event takes far more memory here than the one byte that an unknown one may take in the
        // payload.
        if event != EngineEvent::Unknown || payload.events.last() != Some(&event) {
            payload.events.push(event);
        }
    }
    if parts > 2
        && let MsgpackValue::Integer(rank) = head(&mut pack)?
    {
        payload.rank = u32::try_from(rank).ok();
    }
    Ok(payload)
}

/// Reads the next value. Of an array or map, returns only the head and skips the parts.
fn head<'a>(pack: &mut MsgpackReader<'a>) -> Result<MsgpackValue<'a>, MsgpackError> {
    let before = *pack;
    let value = pack.value()?;
    if matches!(value, MsgpackValue::Array(_) | MsgpackValue::Map(_)) {
        *pack = before;
        pack.skip()?;
    }
    Ok(value)
}

/// Names of the fields of `BlockStored` after the tag, in positional order.
const STORED: [&[u8]; 10] = [
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
    b"group_idx",
    b"kv_cache_spec_kind",
];
const REMOVED: [&[u8]; 3] = [b"block_hashes", b"medium", b"group_idx"];

fn event(pack: &mut MsgpackReader<'_>) -> Result<EngineEvent, MsgpackError> {
    let before = *pack;
    let (fields, by_name) = match pack.value()? {
        MsgpackValue::Array(fields) => (fields, false),
        MsgpackValue::Map(fields) => (fields, true),
        _ => return Ok(EngineEvent::Unknown),
    };
    let tag = if by_name {
        tag_by_name(*pack, fields)?
    } else if fields > 0 {
        match head(pack)? {
            MsgpackValue::Text(tag) => Some(tag),
            _ => None,
        }
    } else {
        None
    };
    let names: &[&[u8]] = match tag {
        Some(b"BlockStored") => &STORED,
        Some(b"BlockRemoved") => &REMOVED,
        Some(b"AllBlocksCleared") => {
            *pack = before;
            pack.skip()?;
            return Ok(EngineEvent::Cleared);
        }
        _ => {
            *pack = before;
            pack.skip()?;
            return Ok(EngineEvent::Unknown);
        }
    };
    let mut told = EventFields::default();
    let values = if by_name { fields } else { fields - 1 };
    for place in 0..values as usize {
        let name = if by_name {
            match head(pack)? {
                MsgpackValue::Text(name) => name,
                _ => b"",
            }
        } else {
            names.get(place).copied().unwrap_or_default()
        };
        told.field(name, pack)?;
    }
    Ok(told.into_event(tag == Some(b"BlockStored")))
}

/// Returns the value of `type` in a map of `fields` fields.
fn tag_by_name<'a>(
    mut pack: MsgpackReader<'a>,
    fields: u32,
) -> Result<Option<&'a [u8]>, MsgpackError> {
    for _ in 0..fields {
        let name = head(&mut pack)?;
        if name == MsgpackValue::Text(b"type") {
            return Ok(match head(&mut pack)? {
                MsgpackValue::Text(tag) => Some(tag),
                _ => None,
            });
        }
        pack.skip()?;
    }
    Ok(None)
}

/// Fields of an event, collected as they are read.
#[derive(Default)]
struct EventFields {
    stored: BlockStored,
    first_keys: Vec<String>,
    /// Whether the event names further keys of the blocks' hashes, if only that there are none.
    has_extra_keys: bool,
    /// Whether the blocks are outside the engine's host.
    is_remote: bool,
}

impl EventFields {
    fn field(&mut self, name: &[u8], pack: &mut MsgpackReader<'_>) -> Result<(), MsgpackError> {
        let BlockStored {
            hashes,
            parent,
            tokens,
            block_size,
            place,
            keys,
        } = &mut self.stored;
        match name {
            b"block_hashes" => read_hashes(pack, hashes)?,
            b"parent_block_hash" => match head(pack)? {
                MsgpackValue::Nil => *parent = None,
                value => {
                    *parent = hash(value);
                    if parent.is_none() {
                        // The parent exists but has no usable name, so the block does not start a
                        // prompt.
                        keys.foreign(0);
                    }
                }
            },
            b"token_ids" => read_tokens(pack, tokens)?,
            b"block_size" => *block_size = pack.small()?,
            b"lora_id" => keys.has_adapter |= head(pack)? != MsgpackValue::Nil,
            b"lora_name" => {
                keys.adapter = text(head(pack)?);
                keys.has_adapter |= keys.adapter.is_some();
            }
            b"cache_salt" => keys.salt = text(head(pack)?).filter(|salt| !salt.is_empty()),
            b"extra_keys" => self.read_extra_keys(pack)?,
            b"locality" => self.is_remote = head(pack)? == MsgpackValue::Text(b"REMOTE"),
            b"medium" => {
                place.medium = match head(pack)? {
                    MsgpackValue::Nil => CacheMedium::Gpu,
                    MsgpackValue::Text(name) => CacheMedium::of(name),
                    _ => CacheMedium::Unknown,
                };
            }
            b"group_idx" => {
                if let MsgpackValue::Integer(group) = head(pack)? {
                    place.group = u32::try_from(group).ok();
                }
            }
            b"kv_cache_spec_kind" => {
                if let MsgpackValue::Text(kind) = head(pack)? {
                    let is_full = kind.starts_with(b"full_attention") || kind.starts_with(b"mla");
                    place.is_full_attention = Some(is_full);
                }
            }
            _ => pack.skip()?,
        }
        Ok(())
    }

    /// Reads one entry per block: `nil`, or the inputs of its hash besides the tokens. Every entry
    /// has the adapter's name. Only that of a prompt's first block has the salt. Keys of media are
    /// in the entries of the blocks that contain the media.
    fn read_extra_keys(&mut self, pack: &mut MsgpackReader<'_>) -> Result<(), MsgpackError> {
        let before = *pack;
        self.has_extra_keys = head(pack)? != MsgpackValue::Nil;
        *pack = before;
        let MsgpackValue::Array(blocks) = pack.value()? else {
            *pack = before;
            return pack.skip();
        };
        for block in 0..blocks {
            let before = *pack;
            match pack.value()? {
                MsgpackValue::Nil => {}
                MsgpackValue::Array(keys) => {
                    for _ in 0..keys {
                        match text(head(pack)?) {
                            Some(key) if block == 0 => self.first_keys.push(key),
                            Some(key) if self.stored.keys.adapter.as_ref() == Some(&key) => {}
                            Some(_) | None => self.stored.keys.foreign(block),
                        }
                    }
                }
                _ => {
                    *pack = before;
                    pack.skip()?;
                    self.stored.keys.foreign(block);
                }
            }
        }
        Ok(())
    }

    fn into_event(self, is_stored: bool) -> EngineEvent {
        let Self {
            mut stored,
            mut first_keys,
            has_extra_keys,
            is_remote,
        } = self;
        let place = &mut stored.place;
        if is_remote && place.medium == CacheMedium::Lower(LowerTier::Disk) {
            place.medium = CacheMedium::Lower(LowerTier::Store);
        }
        stored.keys.are_unknown =
            place.medium != CacheMedium::Gpu && place.group.is_some() && !has_extra_keys;
        if !is_stored {
            return EngineEvent::Removed(BlockRemoved {
                hashes: stored.hashes,
                place: stored.place,
            });
        }
        let keys = &mut stored.keys;
        if let Some(adapter) = &keys.adapter {
            first_keys.retain(|key| key != adapter);
        }
        let is_salt = stored.parent.is_none() && first_keys.len() == 1;
        if is_salt {
            // The key of a medium in the first block looks like a salt. It then starts a chain that
            // no prompt matches.
            keys.salt = keys.salt.take().or(first_keys.pop());
        } else if !first_keys.is_empty() {
            keys.foreign(0);
        }
        EngineEvent::Stored(stored)
    }
}

fn read_hashes(
    pack: &mut MsgpackReader<'_>,
    hashes: &mut Vec<EngineHash>,
) -> Result<(), MsgpackError> {
    for _ in 0..pack.array()? {
        // Any value but a hash names no block.
        hashes.extend(hash(head(pack)?));
    }
    Ok(())
}

/// Reads token ids, or the first of each pair of ids: with EAGLE, SGLang's blocks consist of pairs of
/// a token and the next.
fn read_tokens(pack: &mut MsgpackReader<'_>, tokens: &mut Vec<u32>) -> Result<(), MsgpackError> {
    for _ in 0..pack.array()? {
        tokens.push(pack.small_or_first_of_pair()?);
    }
    Ok(())
}

/// Returns a block's hash. Of a hash given as bytes, it returns the last eight, which equal the
/// hash given as an integer.
fn hash(value: MsgpackValue<'_>) -> Option<EngineHash> {
    match value {
        MsgpackValue::Integer(hash) => Some(EngineHash(hash)),
        MsgpackValue::Bytes(bytes) => Some(EngineHash(u64::from_be_bytes(*bytes.last_chunk()?))),
        _ => None,
    }
}

fn text(value: MsgpackValue<'_>) -> Option<String> {
    match value {
        MsgpackValue::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
