//! A msgpack reader for untrusted input. It does not allocate or recurse, and checks every length
//! against the remaining bytes.

use rmp::Marker;

/// Maximum depth of nested values that can be skipped.
const DEPTH_MAX: u32 = 32;

/// Error for input that is not the expected msgpack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} {left} bytes before the end")]
pub struct MsgpackError {
    /// What was expected.
    pub expected: &'static str,
    /// Number of bytes from the fault to the end of the input.
    pub left: usize,
}

/// Reader of msgpack values from a byte slice, of which it holds the unread part.
#[derive(Debug, Clone, Copy)]
pub(super) struct MsgpackReader<'a> {
    rest: &'a [u8],
}

/// A value without parts, or the head of an array or map with the number of its parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum MsgpackValue<'a> {
    /// `nil`.
    Nil,
    /// A boolean.
    Flag,
    /// An integer; negative ones in two's complement.
    Integer(u64),
    /// A floating-point number.
    Float,
    /// Text; not checked to be UTF-8.
    Text(&'a [u8]),
    /// Binary data.
    Bytes(&'a [u8]),
    /// Head of an array with the number of values that follow.
    Array(u32),
    /// Head of a map with the number of keys that follow, each with its value.
    Map(u32),
    /// An extension type; its data is skipped.
    Extension,
}

impl<'a> MsgpackReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn bad(&self, expected: &'static str) -> MsgpackError {
        MsgpackError {
            expected,
            left: self.rest.len(),
        }
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], MsgpackError> {
        match self.rest.split_at_checked(bytes) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(self.bad("more bytes")),
        }
    }

    /// Reads a big-endian number of `bytes` bytes, at most eight.
    fn number(&mut self, bytes: usize) -> Result<u64, MsgpackError> {
        let digits = self.take(bytes)?;
        Ok(digits
            .iter()
            .fold(0, |sum, digit| sum << 8 | u64::from(*digit)))
    }

    fn signed(&mut self, bytes: usize) -> Result<u64, MsgpackError> {
        let shift = 64 - 8 * u32::try_from(bytes).unwrap_or(8);
        let number = self.number(bytes)? << shift;
        Ok((number.cast_signed() >> shift).cast_unsigned())
    }

    fn length(&mut self, bytes: usize) -> Result<u32, MsgpackError> {
        Ok(u32::try_from(self.number(bytes)?).unwrap_or(u32::MAX))
    }

    fn run(&mut self, length: u32) -> Result<&'a [u8], MsgpackError> {
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    /// Reads the next value, or the head of an array or map.
    pub(super) fn value(&mut self) -> Result<MsgpackValue<'a>, MsgpackError> {
        let marker = Marker::from_u8(self.take(1)?[0]);
        Ok(match marker {
            Marker::Null => MsgpackValue::Nil,
            Marker::True | Marker::False => MsgpackValue::Flag,
            Marker::FixPos(number) => MsgpackValue::Integer(number.into()),
            Marker::FixNeg(number) => MsgpackValue::Integer(i64::from(number).cast_unsigned()),
            Marker::U8 => MsgpackValue::Integer(self.number(1)?),
            Marker::U16 => MsgpackValue::Integer(self.number(2)?),
            Marker::U32 => MsgpackValue::Integer(self.number(4)?),
            Marker::U64 => MsgpackValue::Integer(self.number(8)?),
            Marker::I8 => MsgpackValue::Integer(self.signed(1)?),
            Marker::I16 => MsgpackValue::Integer(self.signed(2)?),
            Marker::I32 => MsgpackValue::Integer(self.signed(4)?),
            Marker::I64 => MsgpackValue::Integer(self.signed(8)?),
            Marker::F32 => self.take(4).map(|_| MsgpackValue::Float)?,
            Marker::F64 => self.take(8).map(|_| MsgpackValue::Float)?,
            Marker::FixStr(length) => MsgpackValue::Text(self.run(length.into())?),
            Marker::Str8 => self
                .length(1)
                .and_then(|it| self.run(it))
                .map(MsgpackValue::Text)?,
            Marker::Str16 => self
                .length(2)
                .and_then(|it| self.run(it))
                .map(MsgpackValue::Text)?,
            Marker::Str32 => self
                .length(4)
                .and_then(|it| self.run(it))
                .map(MsgpackValue::Text)?,
            Marker::Bin8 => self
                .length(1)
                .and_then(|it| self.run(it))
                .map(MsgpackValue::Bytes)?,
            Marker::Bin16 => self
                .length(2)
                .and_then(|it| self.run(it))
                .map(MsgpackValue::Bytes)?,
            Marker::Bin32 => self
                .length(4)
                .and_then(|it| self.run(it))
                .map(MsgpackValue::Bytes)?,
            Marker::FixArray(length) => MsgpackValue::Array(length.into()),
            Marker::Array16 => MsgpackValue::Array(self.length(2)?),
            Marker::Array32 => MsgpackValue::Array(self.length(4)?),
            Marker::FixMap(length) => MsgpackValue::Map(length.into()),
            Marker::Map16 => MsgpackValue::Map(self.length(2)?),
            Marker::Map32 => MsgpackValue::Map(self.length(4)?),
            Marker::FixExt1 => self.take(2).map(|_| MsgpackValue::Extension)?,
            Marker::FixExt2 => self.take(3).map(|_| MsgpackValue::Extension)?,
            Marker::FixExt4 => self.take(5).map(|_| MsgpackValue::Extension)?,
            Marker::FixExt8 => self.take(9).map(|_| MsgpackValue::Extension)?,
            Marker::FixExt16 => self.take(17).map(|_| MsgpackValue::Extension)?,
            Marker::Ext8 => self.extension(1)?,
            Marker::Ext16 => self.extension(2)?,
            Marker::Ext32 => self.extension(4)?,
            Marker::Reserved => return Err(self.bad("a value")),
        })
    }

    fn extension(&mut self, length_bytes: usize) -> Result<MsgpackValue<'a>, MsgpackError> {
        let length = self.length(length_bytes)?;
        self.take(1)?;
        self.run(length).map(|_| MsgpackValue::Extension)
    }

    /// Skips the next value with all its parts.
    pub(super) fn skip(&mut self) -> Result<(), MsgpackError> {
        // Number of values still to come at each level; a level ends when there are none left.
        let mut levels = [0_u64; DEPTH_MAX as usize];
        let mut depth = 0;
        levels[0] = 1;
        loop {
            while levels[depth] == 0 {
                match depth.checked_sub(1) {
                    Some(above) => depth = above,
                    None => return Ok(()),
                }
            }
            levels[depth] -= 1;
            let parts = match self.value()? {
                MsgpackValue::Array(parts) => u64::from(parts),
                MsgpackValue::Map(pairs) => 2 * u64::from(pairs),
                _ => 0,
            };
            if parts > 0 {
                depth += 1;
                *levels.get_mut(depth).ok_or(self.bad("fewer levels"))? = parts;
            }
        }
    }

    /// Reads the head of an array and returns its length.
    pub(super) fn array(&mut self) -> Result<u32, MsgpackError> {
        let before = *self;
        match self.value()? {
            MsgpackValue::Array(length) => Ok(length),
            _ => Err(before.bad("an array")),
        }
    }

    /// Reads an integer that fits into a `u32`.
    pub(super) fn small(&mut self) -> Result<u32, MsgpackError> {
        let before = *self;
        match self.value()? {
            MsgpackValue::Integer(number) => {
                u32::try_from(number).map_err(|_| before.bad("a number of 32 bits"))
            }
            _ => Err(before.bad("a number of 32 bits")),
        }
    }

    /// Reads an integer that fits into a `u32`, or two of them in an array, of which it returns the
    /// first.
    pub(super) fn small_or_first_of_pair(&mut self) -> Result<u32, MsgpackError> {
        let before = *self;
        match self.small() {
            Err(bad) => {
                *self = before;
                let MsgpackValue::Array(2) = self.value()? else {
                    return Err(bad);
                };
                let first = self.small()?;
                self.small().map(|_| first)
            }
            number => number,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_of_every_width_are_read() {
        let mut bytes = Vec::new();
        let numbers = [
            0_i64,
            1,
            127,
            128,
            300,
            70_000,
            1 << 40,
            -1,
            -33,
            -200,
            -40_000,
            -(1 << 40),
        ];
        for number in numbers {
            rmp::encode::write_sint(&mut bytes, number).unwrap();
        }
        let mut pack = MsgpackReader::new(&bytes);
        for number in numbers {
            assert_eq!(
                pack.value(),
                Ok(MsgpackValue::Integer(number.cast_unsigned()))
            );
        }
        assert!(pack.is_empty());
    }

    #[test]
    fn nested_values_are_skipped_as_one() {
        // [{"a": [1, [2]]}, "b"], then 5.
        let bytes = b"\x92\x81\xa1a\x92\x01\x91\x02\xa1b\x05";
        let mut pack = MsgpackReader::new(bytes);
        pack.skip().unwrap();
        assert_eq!(pack.value(), Ok(MsgpackValue::Integer(5)));
        let deep = [0x91_u8; 100];
        assert!(MsgpackReader::new(&deep).skip().is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_msgpack_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut pack = MsgpackReader::new(&bytes);
            while !pack.is_empty() && pack.value().is_ok() {}
            let mut pack = MsgpackReader::new(&bytes);
            while !pack.is_empty() && pack.skip().is_ok() {}
        }
    }
}
