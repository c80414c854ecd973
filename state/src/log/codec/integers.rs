//! Encoding of integers and backend references in items and KV batches.
//!
//! Integers are LEB128: seven bits per byte, lowest first. A set high bit means that more follow.

use bincode::de::Decoder;
use bincode::de::read::Reader;
use bincode::enc::Encoder;
use bincode::enc::write::Writer;
use bincode::error::{DecodeError, EncodeError};

use crate::ids::{BackendRef, Incarnation, Slot};

pub(super) fn put_byte<E: Encoder>(encoder: &mut E, byte: u8) -> Result<(), EncodeError> {
    encoder.writer().write(&[byte])
}

pub(super) fn get_byte<D: Decoder>(decoder: &mut D) -> Result<u8, DecodeError> {
    decoder.claim_bytes_read(1)?;
    let mut byte = [0];
    decoder.reader().read(&mut byte)?;
    Ok(byte[0])
}

/// Writes an LEB128 integer.
pub(super) fn put<E: Encoder>(encoder: &mut E, mut value: u64) -> Result<(), EncodeError> {
    let mut bytes = [0_u8; 10];
    let mut length = 0;
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        bytes[length] = if value == 0 { low } else { low | 0x80 };
        length += 1;
        if value == 0 {
            return encoder.writer().write(&bytes[..length]);
        }
    }
}

/// Reads an LEB128 integer of at most 64 bits.
pub(super) fn get<D: Decoder>(decoder: &mut D) -> Result<u64, DecodeError> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = get_byte(decoder)?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(DecodeError::Other("an integer of more than 64 bits"))
}

pub(super) fn get_u32<D: Decoder>(decoder: &mut D) -> Result<u32, DecodeError> {
    narrow(get(decoder)?)
}

pub(super) fn narrow<T: TryFrom<u64>>(value: u64) -> Result<T, DecodeError> {
    T::try_from(value).map_err(|_| DecodeError::OtherString(format!("{value} is out of range")))
}

pub(super) fn put_backend<E: Encoder>(
    encoder: &mut E,
    backend: BackendRef,
) -> Result<(), EncodeError> {
    put(encoder, u64::from(backend.slot.0))?;
    put(encoder, u64::from(backend.incarnation.0))
}

pub(super) fn get_backend<D: Decoder>(decoder: &mut D) -> Result<BackendRef, DecodeError> {
    let slot = Slot(narrow(get(decoder)?)?);
    Ok(BackendRef {
        slot,
        incarnation: Incarnation(get_u32(decoder)?),
    })
}
