//! Hand-written encoding of batch items. Items make up most of the log, and a request should cost
//! few bytes beyond its hashes.
//!
//! An item starts with one tag byte: the kind in its low three bits, and five bits whose meaning
//! depends on the kind above them. Integers are LEB128 (seven bits per byte, lowest first), which
//! keeps attempts (offsets in a batch), slots and incarnations at one or two bytes.
//!
//! | kind | bit 3 | bits 4-7 | followed by |
//! | --- | --- | --- | --- |
//! | 0 acquire | has a tip | number of new blocks, or 15, see below | attempt, slot, incarnation, \[tip\], \[number\], blocks |
//! | 1 materialize | 0 | as above | attempt, \[number\], blocks |
//! | 2 release | discarded | 1: kept untouched, else 0 | attempt |
//! | 3 define user | 0 | 0 | key (8 bytes), name |
//! | 4 charge | bits 3-7: which of the first five counts are not 0 | | user (8 bytes), these counts |
//! | 5 observe engine | 0 | 0 | slot, incarnation, facts |
//! | 6 KV events | bits 3-7: see `kv` | | see `kv` |
//! | 7 rare | bits 3-7: 0 service, 1 outputs, 2 charge with more counts, 3 text, 4 block size, 5 belief, 6 session begins, 7 session moves, 8 turn ends, 9 session ends, 10 charge of a stream, 11 define source, 12 demand | | its fields |
//!
//! A number of 15 blocks or more follows as an integer. Unused bits are 0, and a decoder rejects
//! any other value, so that a later version can give them a meaning.

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};

use super::integers::{get, get_backend, get_byte, get_u32, narrow, put, put_backend, put_byte};
use super::kv;
use crate::command::{Charge, Item, LeaseOutcome};
use crate::ids::{
    AgentSessionKey, BackendRef, BlockHash, ModelKey, SourceKey, StreamCarrier, StreamId, UserKey,
};
use crate::ratios::TextSample;
use crate::service::BeliefSample;
use crate::streams::{CarriedStream, StreamCharge};
use crate::trees::{NewSession, SessionPlace, SessionRef, SessionTurn, TurnUsage};

const ACQUIRE: u8 = 0;
const MATERIALIZE: u8 = 1;
const RELEASE: u8 = 2;
const DEFINE_USER: u8 = 3;
const CHARGE: u8 = 4;
const OBSERVE_ENGINE: u8 = 5;
const KV_EVENTS: u8 = 6;
const RARE: u8 = 7;

/// Kinds of rare items, in the upper five bits of the tag.
mod rare {
    pub(super) const SERVICE: u8 = 0;
    pub(super) const OUTPUTS: u8 = 1;
    pub(super) const CHARGE: u8 = 2;
    pub(super) const TEXT: u8 = 3;
    pub(super) const BLOCK_SIZE: u8 = 4;
    pub(super) const BELIEF: u8 = 5;
    pub(super) const BEGIN_SESSION: u8 = 6;
    pub(super) const MOVE_SESSION: u8 = 7;
    pub(super) const END_TURN: u8 = 8;
    pub(super) const END_SESSION: u8 = 9;
    pub(super) const CHARGE_STREAM: u8 = 10;
    pub(super) const DEFINE_SOURCE: u8 = 11;
    pub(super) const DEMAND: u8 = 12;
}

const KIND_BITS: u32 = 3;
const FLAG: u8 = 1 << KIND_BITS;
const COUNT_SHIFT: u32 = 4;
/// Tag bit of a release with the outcome `KeptUntouched`. It is free because releases have no block
/// count.
const UNTOUCHED: u8 = 1 << COUNT_SHIFT;
/// Value of the tag's count if the number of blocks does not fit and follows as an integer.
const COUNT_FOLLOWS: u8 = 15;

impl Encode for Item {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        match self {
            Self::Acquire {
                attempt,
                backend,
                tip,
                new,
            } => put_acquire(encoder, *attempt, *backend, *tip, new),
            Self::Materialize { attempt, new } => {
                put_byte(encoder, MATERIALIZE | count_bits(new))?;
                put(encoder, u64::from(*attempt))?;
                put_blocks(encoder, new)
            }
            Self::Release { attempt, outcome } => put_release(encoder, *attempt, *outcome),
            Self::DefineUser { key, name } => {
                put_byte(encoder, DEFINE_USER)?;
                key.0.to_le_bytes().encode(encoder)?;
                name.encode(encoder)
            }
            Self::Charge(charge) => put_charge(encoder, charge),
            Self::ObserveEngine { backend, facts } => {
                put_byte(encoder, OBSERVE_ENGINE)?;
                put_backend(encoder, *backend)?;
                facts.encode(encoder)
            }
            Self::KvEvents(batch) => {
                put_byte(encoder, KV_EVENTS | kv::flags(batch) << KIND_BITS)?;
                kv::put_batch(encoder, batch)
            }
            Self::ObserveService(sample) => {
                put_rare(encoder, rare::SERVICE)?;
                sample.encode(encoder)
            }
            Self::ObserveOutputs {
                user,
                model,
                tokens,
            } => {
                put_rare(encoder, rare::OUTPUTS)?;
                user.0.to_le_bytes().encode(encoder)?;
                model.0.to_le_bytes().encode(encoder)?;
                tokens.encode(encoder)
            }
            Self::ObserveText(sample) => {
                put_rare(encoder, rare::TEXT)?;
                sample.model.0.to_le_bytes().encode(encoder)?;
                put(encoder, sample.bytes)?;
                put(encoder, sample.tokens)
            }
            Self::ObserveBlockSize { backend, tokens } => {
                put_rare(encoder, rare::BLOCK_SIZE)?;
                put_backend(encoder, *backend)?;
                put(encoder, u64::from(*tokens))
            }
            Self::ObserveBelief(sample) => put_belief(encoder, sample),
            Self::BeginSession(new) => put_new_session(encoder, new),
            Self::MoveSession { session, home } => {
                put_rare(encoder, rare::MOVE_SESSION)?;
                put_session(encoder, *session)?;
                put_backend(encoder, *home)
            }
            Self::EndTurn(turn) => put_turn(encoder, turn),
            Self::EndSession(session) => {
                put_rare(encoder, rare::END_SESSION)?;
                put_session(encoder, *session)
            }
            Self::ChargeStream(charge) => put_stream_charge(encoder, charge),
            Self::DefineSource(it) => put_rare_value(encoder, rare::DEFINE_SOURCE, it),
            Self::ObserveDemand(it) => put_rare_value(encoder, rare::DEMAND, it),
        }
    }
}

impl<C> Decode<C> for Item {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let tag = get_byte(decoder)?;
        let has_flag = tag & FLAG != 0;
        let count = tag >> COUNT_SHIFT;
        match tag & (FLAG - 1) {
            ACQUIRE => {
                let attempt = get_u32(decoder)?;
                let backend = get_backend(decoder)?;
                let tip = if has_flag {
                    Some(BlockHash::decode(decoder)?)
                } else {
                    None
                };
                let new = get_blocks(decoder, count)?;
                Ok(Self::Acquire {
                    attempt,
                    backend,
                    tip,
                    new,
                })
            }
            MATERIALIZE if !has_flag => {
                let attempt = get_u32(decoder)?;
                Ok(Self::Materialize {
                    attempt,
                    new: get_blocks(decoder, count)?,
                })
            }
            RELEASE if count == 0 => {
                let outcome = if has_flag {
                    LeaseOutcome::Discarded
                } else {
                    LeaseOutcome::Kept
                };
                Ok(Self::Release {
                    attempt: get_u32(decoder)?,
                    outcome,
                })
            }
            RELEASE if tag == RELEASE | UNTOUCHED => Ok(Self::Release {
                attempt: get_u32(decoder)?,
                outcome: LeaseOutcome::KeptUntouched,
            }),
            DEFINE_USER if tag == DEFINE_USER => {
                let key = get_user(decoder)?;
                Ok(Self::DefineUser {
                    key,
                    name: String::decode(decoder)?,
                })
            }
            CHARGE => get_charge(decoder, u64::from(tag >> KIND_BITS)).map(Self::Charge),
            OBSERVE_ENGINE if tag == OBSERVE_ENGINE => {
                let backend = get_backend(decoder)?;
                Ok(Self::ObserveEngine {
                    backend,
                    facts: Decode::decode(decoder)?,
                })
            }
            KV_EVENTS => kv::get_batch(decoder, tag >> KIND_BITS).map(Self::KvEvents),
            RARE => get_rare(decoder, tag),
            _ => Err(no_item(tag)),
        }
    }
}
bincode::impl_borrow_decode!(Item);

fn no_item(tag: u8) -> DecodeError {
    DecodeError::OtherString(format!("no item has the tag {tag:#04x}"))
}

fn put_rare<E: Encoder>(encoder: &mut E, kind: u8) -> Result<(), EncodeError> {
    put_byte(encoder, RARE | (kind << KIND_BITS))
}

/// Encodes a rare item by the encoding of its value.
fn put_rare_value<E: Encoder>(
    encoder: &mut E,
    kind: u8,
    value: &impl Encode,
) -> Result<(), EncodeError> {
    put_rare(encoder, kind)?;
    value.encode(encoder)
}

fn put_belief<E: Encoder>(encoder: &mut E, sample: &BeliefSample) -> Result<(), EncodeError> {
    put_rare(encoder, rare::BELIEF)?;
    put_backend(encoder, sample.backend)?;
    for count in [sample.held, sample.lost, sample.found] {
        put(encoder, u64::from(count))?;
    }
    put(encoder, sample.computed_blocks)
}

fn get_rare<D: Decoder>(decoder: &mut D, tag: u8) -> Result<Item, DecodeError> {
    match tag >> KIND_BITS {
        rare::SERVICE => Decode::decode(decoder).map(Item::ObserveService),
        rare::OUTPUTS => Ok(Item::ObserveOutputs {
            user: get_user(decoder)?,
            model: get_model(decoder)?,
            tokens: Decode::decode(decoder)?,
        }),
        rare::CHARGE => get_long_charge(decoder).map(Item::Charge),
        rare::TEXT => Ok(Item::ObserveText(TextSample {
            model: get_model(decoder)?,
            bytes: get(decoder)?,
            tokens: get(decoder)?,
        })),
        rare::BLOCK_SIZE => Ok(Item::ObserveBlockSize {
            backend: get_backend(decoder)?,
            tokens: get_u32(decoder)?,
        }),
        rare::BELIEF => Ok(Item::ObserveBelief(BeliefSample {
            backend: get_backend(decoder)?,
            held: get_u32(decoder)?,
            lost: get_u32(decoder)?,
            found: get_u32(decoder)?,
            computed_blocks: get(decoder)?,
        })),
        rare::BEGIN_SESSION => get_new_session(decoder).map(Item::BeginSession),
        rare::MOVE_SESSION => Ok(Item::MoveSession {
            session: get_session(decoder)?,
            home: get_backend(decoder)?,
        }),
        rare::END_TURN => get_turn(decoder).map(Item::EndTurn),
        rare::END_SESSION => get_session(decoder).map(Item::EndSession),
        rare::CHARGE_STREAM => {
            let charge = get_stream_charge(decoder)?;
            Ok(Item::ChargeStream(Box::new(charge)))
        }
        rare::DEFINE_SOURCE => Decode::decode(decoder).map(Item::DefineSource),
        rare::DEMAND => Decode::decode(decoder).map(Item::ObserveDemand),
        _ => Err(no_item(tag)),
    }
}

fn put_new_session<E: Encoder>(encoder: &mut E, new: &NewSession) -> Result<(), EncodeError> {
    put_rare(encoder, rare::BEGIN_SESSION)?;
    new.key.encode(encoder)?;
    new.parent.encode(encoder)?;
    new.user.0.to_le_bytes().encode(encoder)?;
    new.model.0.to_le_bytes().encode(encoder)?;
    put_backend(encoder, new.home)
}

fn get_new_session<D: Decoder>(decoder: &mut D) -> Result<NewSession, DecodeError> {
    Ok(NewSession {
        key: AgentSessionKey::decode(decoder)?,
        parent: Decode::decode(decoder)?,
        user: get_user(decoder)?,
        model: get_model(decoder)?,
        home: get_backend(decoder)?,
    })
}

/// Encodes the name of a session: the number of its place plus 1, or 0 and its key.
fn put_session<E: Encoder>(encoder: &mut E, session: SessionRef) -> Result<(), EncodeError> {
    match session {
        SessionRef::Place(place) => put(encoder, u64::from(place.0) + 1),
        SessionRef::Key(key) => {
            put(encoder, 0)?;
            key.encode(encoder)
        }
    }
}

fn get_session<D: Decoder>(decoder: &mut D) -> Result<SessionRef, DecodeError> {
    match get(decoder)?.checked_sub(1) {
        Some(place) => Ok(SessionRef::Place(SessionPlace(narrow(place)?))),
        None => AgentSessionKey::decode(decoder).map(SessionRef::Key),
    }
}

fn put_turn<E: Encoder>(encoder: &mut E, turn: &SessionTurn) -> Result<(), EncodeError> {
    put_rare(encoder, rare::END_TURN)?;
    put_turn_fields(encoder, turn)
}

fn put_turn_fields<E: Encoder>(encoder: &mut E, turn: &SessionTurn) -> Result<(), EncodeError> {
    put_session(encoder, turn.session)?;
    let usage = &turn.usage;
    for count in [usage.input_uncached, usage.input_cached, usage.output] {
        put(encoder, count)?;
    }
    Ok(())
}

fn get_turn<D: Decoder>(decoder: &mut D) -> Result<SessionTurn, DecodeError> {
    Ok(SessionTurn {
        session: get_session(decoder)?,
        usage: TurnUsage {
            input_uncached: get(decoder)?,
            input_cached: get(decoder)?,
            output: get(decoder)?,
        },
    })
}

/// Flags of a stream's charge.
mod stream_flags {
    pub(super) const TAKES_OVER: u8 = 1;
    pub(super) const IS_CLOSED: u8 = 2;
    pub(super) const HAS_TURN: u8 = 4;
}

/// Encodes the charge of a stream: flags, stream and carrier, the epoch of a take-over, the set of
/// counts, the charge, and the turn, if any.
fn put_stream_charge<E: Encoder>(encoder: &mut E, item: &StreamCharge) -> Result<(), EncodeError> {
    put_rare(encoder, rare::CHARGE_STREAM)?;
    let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
    let flags = flag(item.takes_over.is_some(), stream_flags::TAKES_OVER)
        | flag(item.is_closed, stream_flags::IS_CLOSED)
        | flag(item.turn.is_some(), stream_flags::HAS_TURN);
    put_byte(encoder, flags)?;
    item.carried.stream.encode(encoder)?;
    item.carried.carrier.encode(encoder)?;
    if let Some(epoch) = item.takes_over {
        put(encoder, u64::from(epoch))?;
    }
    put(encoder, u64::from(present_counts(&item.charge)))?;
    put_counts(encoder, &item.charge)?;
    match &item.turn {
        Some(turn) => put_turn_fields(encoder, turn),
        None => Ok(()),
    }
}

fn get_stream_charge<D: Decoder>(decoder: &mut D) -> Result<StreamCharge, DecodeError> {
    let flags = get_byte(decoder)?;
    if flags > stream_flags::TAKES_OVER | stream_flags::IS_CLOSED | stream_flags::HAS_TURN {
        return Err(no_item(flags));
    }
    let carried = CarriedStream {
        stream: StreamId::decode(decoder)?,
        carrier: StreamCarrier::decode(decoder)?,
    };
    let takes_over = match flags & stream_flags::TAKES_OVER {
        0 => None,
        _ => Some(get_u32(decoder)?),
    };
    let present = get(decoder)?;
    Ok(StreamCharge {
        carried,
        takes_over,
        is_closed: flags & stream_flags::IS_CLOSED != 0,
        charge: get_charge(decoder, present)?,
        turn: match flags & stream_flags::HAS_TURN {
            0 => None,
            _ => Some(get_turn(decoder)?),
        },
    })
}

fn get_model<D: Decoder>(decoder: &mut D) -> Result<ModelKey, DecodeError> {
    Ok(ModelKey(u64::from_le_bytes(<[u8; 8]>::decode(decoder)?)))
}

fn put_acquire<E: Encoder>(
    encoder: &mut E,
    attempt: u32,
    backend: BackendRef,
    tip: Option<BlockHash>,
    new: &[BlockHash],
) -> Result<(), EncodeError> {
    let flag = if tip.is_some() { FLAG } else { 0 };
    put_byte(encoder, ACQUIRE | flag | count_bits(new))?;
    put(encoder, u64::from(attempt))?;
    put_backend(encoder, backend)?;
    if let Some(tip) = tip {
        tip.encode(encoder)?;
    }
    put_blocks(encoder, new)
}

fn put_release<E: Encoder>(
    encoder: &mut E,
    attempt: u32,
    outcome: LeaseOutcome,
) -> Result<(), EncodeError> {
    let flag = match outcome {
        LeaseOutcome::Kept => 0,
        LeaseOutcome::Discarded => FLAG,
        LeaseOutcome::KeptUntouched => UNTOUCHED,
    };
    put_byte(encoder, RELEASE | flag)?;
    put(encoder, u64::from(attempt))
}

/// Bit that says, behind those of the counts, whether a charge has a source.
const SOURCE_PLACE: u32 = 9;
/// Number of counts of a charge for which the tag has bits.
const COUNTS_SHORT: usize = 5;

/// Encodes a charge. If it has a source, or a count beyond the first five is not 0, the charge becomes
/// a rare item: a bit set of the counts that are not 0 and the source as an integer, the user, the
/// source, then these counts.
fn put_charge<E: Encoder>(encoder: &mut E, charge: &Charge) -> Result<(), EncodeError> {
    let present = present_counts(charge);
    match u8::try_from(present)
        .ok()
        .filter(|it| it >> COUNTS_SHORT == 0)
    {
        Some(present) => put_byte(encoder, CHARGE | (present << KIND_BITS))?,
        None => {
            put_rare(encoder, rare::CHARGE)?;
            put(encoder, u64::from(present))?;
        }
    }
    put_counts(encoder, charge)
}

fn counts(charge: &Charge) -> [u64; 9] {
    [
        charge.input_uncached,
        charge.input_cached,
        charge.output,
        u64::from(charge.started),
        u64::from(charge.ended),
        u64::from(charge.queued),
        u64::from(charge.dequeued),
        charge.advance,
        charge.settled,
    ]
}

/// Returns the set of the counts that are not 0, as bits.
fn present_counts(charge: &Charge) -> u16 {
    let counts = counts(charge).into_iter().enumerate();
    let source = u16::from(charge.source != SourceKey::OTHER) << SOURCE_PLACE;
    counts.fold(source, |bits, (place, count)| {
        bits | (u16::from(count != 0) << place)
    })
}

/// Encodes the user of a charge, its source if it has one, then the counts that are not 0.
fn put_counts<E: Encoder>(encoder: &mut E, charge: &Charge) -> Result<(), EncodeError> {
    charge.user.0.to_le_bytes().encode(encoder)?;
    if charge.source != SourceKey::OTHER {
        charge.source.encode(encoder)?;
    }
    let mut counts = counts(charge).into_iter().filter(|count| *count != 0);
    counts.try_for_each(|count| put(encoder, count))
}

fn no_charge(present: u64) -> DecodeError {
    DecodeError::OtherString(format!("no charge has the counts {present:#b}"))
}

fn get_long_charge<D: Decoder>(decoder: &mut D) -> Result<Charge, DecodeError> {
    match get(decoder)? {
        present if present >> COUNTS_SHORT == 0 => Err(no_charge(present)),
        present => get_charge(decoder, present),
    }
}

/// Decodes a charge with these counts.
fn get_charge<D: Decoder>(decoder: &mut D, present: u64) -> Result<Charge, DecodeError> {
    if present >> (SOURCE_PLACE + 1) != 0 {
        return Err(no_charge(present));
    }
    let user = get_user(decoder)?;
    let source = match present & (1 << SOURCE_PLACE) {
        0 => SourceKey::OTHER,
        _ => SourceKey::decode(decoder)?,
    };
    let mut counts = [0_u64; 9];
    for (place, count) in counts.iter_mut().enumerate() {
        if present & (1 << place) != 0 {
            *count = get(decoder)?;
        }
    }
    let [input_uncached, input_cached, output, rest @ ..] = counts;
    let [started, ended, queued, dequeued, advance, settled] = rest;
    Ok(Charge {
        user,
        source,
        input_uncached,
        input_cached,
        output,
        started: narrow(started)?,
        ended: narrow(ended)?,
        queued: narrow(queued)?,
        dequeued: narrow(dequeued)?,
        advance,
        settled,
    })
}

fn get_user<D: Decoder>(decoder: &mut D) -> Result<UserKey, DecodeError> {
    Ok(UserKey(u64::from_le_bytes(<[u8; 8]>::decode(decoder)?)))
}

/// Returns the tag bits for the number of `blocks`.
fn count_bits(blocks: &[BlockHash]) -> u8 {
    u8::try_from(blocks.len())
        .unwrap_or(COUNT_FOLLOWS)
        .min(COUNT_FOLLOWS)
        << COUNT_SHIFT
}

fn put_blocks<E: Encoder>(encoder: &mut E, blocks: &[BlockHash]) -> Result<(), EncodeError> {
    if blocks.len() >= usize::from(COUNT_FOLLOWS) {
        put(encoder, blocks.len() as u64)?;
    }
    blocks.iter().try_for_each(|block| block.encode(encoder))
}

fn get_blocks<D: Decoder>(decoder: &mut D, count: u8) -> Result<Vec<BlockHash>, DecodeError> {
    let count = if count == COUNT_FOLLOWS {
        usize::try_from(get(decoder)?).map_err(|_| DecodeError::LimitExceeded)?
    } else {
        usize::from(count)
    };
    decoder.claim_container_read::<BlockHash>(count)?;
    let mut blocks = Vec::with_capacity(count);
    for _ in 0..count {
        decoder.unclaim_bytes_read(size_of::<BlockHash>());
        blocks.push(BlockHash::decode(decoder)?);
    }
    Ok(blocks)
}
