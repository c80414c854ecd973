//! Hand-written encoding of KV batches. With precise ownership they make up most of the log: 16
//! bytes for each stored block, 8 for each removed one, and little else.
//!
//! The item's tag has five bits to spare: three for the kind of news, and two flags.
//!
//! | news | flag 0 | flag 1 | after backend, rank, publisher |
//! | --- | --- | --- | --- |
//! | 0 begin | 0 | 0 | |
//! | 1 message | is the last part | follows a loss | seq, mark (8 bytes), part, number of events, events |
//! | 2 current | there is a message | 0 | \[seq\] |
//! | 3 doubt | 0 | 0 | kind of doubt |
//! | 4 refuse | 0 | 0 | reason, \[engine's and router's block size\] |
//!
//! An event starts with one byte: the kind in two bits (0 stored, 1 removed, 2 cleared, 3 left out),
//! then one bit for whether it has a parent, and the number of blocks in the upper five bits (31 if
//! the number follows). Then come \[the number\], \[the parent\] and the blocks. Integers are LEB128,
//! hashes take eight bytes.
//!
//! An event of a tier below the GPU has one byte before that: kind 3 without a parent, and the tier
//! in the upper five bits. Its own kinds are 0 stored, 1 removed and 2 copied.

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

use super::integers::{get, get_backend, get_byte, get_u32, narrow, put, put_backend, put_byte};
use crate::ids::{BlockHash, EngineHash};
use crate::kv_events::{
    KvBatch, KvEvent, KvMessage, KvRejection, KvUncertainty, KvUpdate, LowerTier,
};

const BEGIN: u8 = 0;
const MESSAGE: u8 = 1;
const CURRENT: u8 = 2;
const DOUBT: u8 = 3;
const REFUSE: u8 = 4;
const NEWS_BITS: u32 = 3;
const FLAG_0: u8 = 1 << NEWS_BITS;
const FLAG_1: u8 = 2 << NEWS_BITS;

const STORED: u8 = 0;
const REMOVED: u8 = 1;
const CLEARED: u8 = 2;
const LEFT_OUT: u8 = 3;
/// Kind of the byte before an event of a lower tier: [`LEFT_OUT`] without a parent.
const TIER: u8 = 3;
/// Kind of an event that copies blocks to a lower tier.
const COPIED: u8 = 2;
const KIND: u8 = 3;
const HAS_PARENT: u8 = 4;
const COUNT_SHIFT: u32 = 3;
/// Value of the upper five bits if the number of blocks does not fit and follows as an integer.
const COUNT_FOLLOWS: usize = 31;

/// Returns the five tag bits of a batch: the kind of news, and the flags.
pub(super) fn flags(batch: &KvBatch) -> u8 {
    match &batch.news {
        KvUpdate::Begin => BEGIN,
        KvUpdate::Message(message) => {
            let last = if message.is_last { FLAG_0 } else { 0 };
            let loss = if message.is_after_loss { FLAG_1 } else { 0 };
            MESSAGE | last | loss
        }
        KvUpdate::Current { seq } => CURRENT | if seq.is_some() { FLAG_0 } else { 0 },
        KvUpdate::Doubt(_) => DOUBT,
        KvUpdate::Refuse(_) => REFUSE,
    }
}

pub(super) fn put_batch<E: Encoder>(encoder: &mut E, batch: &KvBatch) -> Result<(), EncodeError> {
    put_backend(encoder, batch.backend)?;
    put(encoder, u64::from(batch.rank))?;
    put(encoder, batch.publisher)?;
    match &batch.news {
        KvUpdate::Begin => Ok(()),
        KvUpdate::Message(message) => put_message(encoder, message),
        KvUpdate::Current { seq } => seq.map_or(Ok(()), |seq| put(encoder, seq)),
        KvUpdate::Doubt(doubt) => put_byte(
            encoder,
            match doubt {
                KvUncertainty::Gap => 0,
                KvUncertainty::Unreachable => 1,
                KvUncertainty::Behind => 2,
                KvUncertainty::Handover => 3,
            },
        ),
        KvUpdate::Refuse(refusal) => put_refusal(encoder, *refusal),
    }
}

pub(super) fn get_batch<D: Decoder>(decoder: &mut D, flags: u8) -> Result<KvBatch, DecodeError> {
    let backend = get_backend(decoder)?;
    let rank = narrow(get(decoder)?)?;
    let publisher = get(decoder)?;
    let has = |flag: u8| flags & flag != 0;
    let news = match (flags & (FLAG_0 - 1), has(FLAG_0), has(FLAG_1)) {
        (BEGIN, false, false) => KvUpdate::Begin,
        (MESSAGE, is_last, is_after_loss) => KvUpdate::Message(KvMessage {
            seq: get(decoder)?,
            mark: u64::from_le_bytes(Decode::decode(decoder)?),
            part: narrow(get(decoder)?)?,
            is_last,
            is_after_loss,
            events: get_events(decoder)?,
        }),
        (CURRENT, has_seq, false) => KvUpdate::Current {
            seq: if has_seq { Some(get(decoder)?) } else { None },
        },
        (DOUBT, false, false) => KvUpdate::Doubt(match get_byte(decoder)? {
            0 => KvUncertainty::Gap,
            1 => KvUncertainty::Unreachable,
            2 => KvUncertainty::Behind,
            3 => KvUncertainty::Handover,
            other => return Err(unknown("doubt", other)),
        }),
        (REFUSE, false, false) => KvUpdate::Refuse(get_refusal(decoder)?),
        _ => return Err(unknown("news of KV events", flags)),
    };
    Ok(KvBatch {
        backend,
        rank,
        publisher,
        news,
    })
}

fn unknown(what: &str, byte: u8) -> DecodeError {
    DecodeError::OtherString(format!("no {what} has the number {byte}"))
}

fn put_refusal<E: Encoder>(encoder: &mut E, refusal: KvRejection) -> Result<(), EncodeError> {
    match refusal {
        KvRejection::BlockSize { engine, router } => {
            put_byte(encoder, 0)?;
            put(encoder, u64::from(engine))?;
            put(encoder, u64::from(router))
        }
        KvRejection::Tokenizer => put_byte(encoder, 1),
        KvRejection::Models => put_byte(encoder, 2),
        KvRejection::Unreadable => put_byte(encoder, 3),
    }
}

fn get_refusal<D: Decoder>(decoder: &mut D) -> Result<KvRejection, DecodeError> {
    Ok(match get_byte(decoder)? {
        0 => KvRejection::BlockSize {
            engine: get_u32(decoder)?,
            router: get_u32(decoder)?,
        },
        1 => KvRejection::Tokenizer,
        2 => KvRejection::Models,
        3 => KvRejection::Unreadable,
        other => return Err(unknown("refusal", other)),
    })
}

fn put_message<E: Encoder>(encoder: &mut E, message: &KvMessage) -> Result<(), EncodeError> {
    put(encoder, message.seq)?;
    message.mark.to_le_bytes().encode(encoder)?;
    put(encoder, u64::from(message.part))?;
    put(encoder, message.events.len() as u64)?;
    for event in &message.events {
        match event {
            KvEvent::Stored { parent, blocks } => put_stored(encoder, *parent, blocks)?,
            KvEvent::Removed { blocks } => put_names(encoder, REMOVED, blocks)?,
            KvEvent::TierStored {
                tier,
                parent,
                blocks,
            } => {
                put_tier(encoder, *tier)?;
                put_stored(encoder, *parent, blocks)?;
            }
            KvEvent::TierCopied { tier, blocks } => {
                put_tier(encoder, *tier)?;
                put_names(encoder, COPIED, blocks)?;
            }
            KvEvent::TierRemoved { tier, blocks } => {
                put_tier(encoder, *tier)?;
                put_names(encoder, REMOVED, blocks)?;
            }
            KvEvent::Cleared => put_byte(encoder, CLEARED)?,
            KvEvent::LeftOut { parent } => {
                put_byte(encoder, LEFT_OUT | HAS_PARENT)?;
                parent.encode(encoder)?;
            }
        }
    }
    Ok(())
}

fn put_tier<E: Encoder>(encoder: &mut E, tier: LowerTier) -> Result<(), EncodeError> {
    put_byte(encoder, TIER | (tier.at() as u8) << COUNT_SHIFT)
}

fn put_stored<E: Encoder>(
    encoder: &mut E,
    parent: Option<EngineHash>,
    blocks: &[(EngineHash, BlockHash)],
) -> Result<(), EncodeError> {
    let flag = if parent.is_some() { HAS_PARENT } else { 0 };
    put_head(encoder, STORED | flag, blocks.len())?;
    parent.map_or(Ok(()), |parent| parent.encode(encoder))?;
    blocks.iter().try_for_each(|block| block.encode(encoder))
}

fn put_names<E: Encoder>(
    encoder: &mut E,
    kind: u8,
    blocks: &[EngineHash],
) -> Result<(), EncodeError> {
    put_head(encoder, kind, blocks.len())?;
    blocks.iter().try_for_each(|block| block.encode(encoder))
}

fn put_head<E: Encoder>(encoder: &mut E, kind: u8, count: usize) -> Result<(), EncodeError> {
    put_byte(
        encoder,
        kind | (count.min(COUNT_FOLLOWS) as u8) << COUNT_SHIFT,
    )?;
    if count >= COUNT_FOLLOWS {
        put(encoder, count as u64)?;
    }
    Ok(())
}

fn get_events<D: Decoder>(decoder: &mut D) -> Result<Vec<KvEvent>, DecodeError> {
    let count = get_count(decoder)?;
    decoder.claim_container_read::<KvEvent>(count)?;
    let mut events = Vec::new();
    for _ in 0..count {
        events.push(get_event(decoder)?);
    }
    Ok(events)
}

fn get_event<D: Decoder>(decoder: &mut D) -> Result<KvEvent, DecodeError> {
    let head = get_byte(decoder)?;
    if head == CLEARED {
        return Ok(KvEvent::Cleared);
    }
    if head == LEFT_OUT | HAS_PARENT {
        let parent = EngineHash::decode(decoder)?;
        return Ok(KvEvent::LeftOut { parent });
    }
    if head & (KIND | HAS_PARENT) == TIER {
        let tier = LowerTier::ALL.get(usize::from(head >> COUNT_SHIFT));
        let tier = *tier.ok_or_else(|| unknown("tier", head >> COUNT_SHIFT))?;
        return get_tier_event(decoder, tier);
    }
    match get_kind(decoder, head)? {
        (STORED, has_parent, count) => Ok(KvEvent::Stored {
            parent: get_parent(decoder, has_parent)?,
            blocks: get_hashes::<(EngineHash, BlockHash), D>(decoder, count)?,
        }),
        (REMOVED, false, count) => Ok(KvEvent::Removed {
            blocks: get_hashes::<EngineHash, D>(decoder, count)?,
        }),
        _ => Err(unknown("KV event", head)),
    }
}

fn get_tier_event<D: Decoder>(decoder: &mut D, tier: LowerTier) -> Result<KvEvent, DecodeError> {
    let head = get_byte(decoder)?;
    match get_kind(decoder, head)? {
        (STORED, has_parent, count) => Ok(KvEvent::TierStored {
            tier,
            parent: get_parent(decoder, has_parent)?,
            blocks: get_hashes::<(EngineHash, BlockHash), D>(decoder, count)?,
        }),
        (COPIED, false, count) => Ok(KvEvent::TierCopied {
            tier,
            blocks: get_hashes::<EngineHash, D>(decoder, count)?,
        }),
        (REMOVED, false, count) => Ok(KvEvent::TierRemoved {
            tier,
            blocks: get_hashes::<EngineHash, D>(decoder, count)?,
        }),
        _ => Err(unknown("KV event of a tier", head)),
    }
}

/// Returns the kind of an event, whether it has a parent, and the number of its blocks.
fn get_kind<D: Decoder>(decoder: &mut D, head: u8) -> Result<(u8, bool, usize), DecodeError> {
    let count = match usize::from(head >> COUNT_SHIFT) {
        COUNT_FOLLOWS => get_count(decoder)?,
        count => count,
    };
    Ok((head & KIND, head & HAS_PARENT != 0, count))
}

fn get_parent<D: Decoder>(
    decoder: &mut D,
    has_parent: bool,
) -> Result<Option<EngineHash>, DecodeError> {
    has_parent.then(|| EngineHash::decode(decoder)).transpose()
}

fn get_hashes<T: Decode<D::Context>, D: Decoder>(
    decoder: &mut D,
    count: usize,
) -> Result<Vec<T>, DecodeError> {
    decoder.claim_container_read::<T>(count)?;
    let mut blocks = Vec::new();
    for _ in 0..count {
        decoder.unclaim_bytes_read(size_of::<T>());
        blocks.push(T::decode(decoder)?);
    }
    Ok(blocks)
}

fn get_count<D: Decoder>(decoder: &mut D) -> Result<usize, DecodeError> {
    usize::try_from(get(decoder)?).map_err(|_| DecodeError::LimitExceeded)
}
