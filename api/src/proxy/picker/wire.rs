//! Protobuf on the wire, as far as the picker needs it: the fields of a gateway's message, read in
//! place, and a message to a gateway, written at once. `ext_proc.proto` has the numbers. A request
//! takes ten messages; decoding them to types with a string per header, and back, took a sixth of its
//! instructions.

use bytes::Bytes;
use tonic::Status;

/// Wire types of fields.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED_32: u64 = 5;
/// Maximum length of a number, in bytes.
const VARINT_BYTES_MAX: usize = 10;
/// Length of what precedes a message in gRPC: a compression flag and the message's length.
pub(super) const PREFIX_BYTES: usize = 5;
/// Initial capacity of a message without its body, in bytes.
const START_BYTES: usize = 256;
/// Maximum length of a body that is copied to be sent with its message, in bytes.
const COPIED_BYTES_MAX: usize = 8 << 10;

/// Error of bytes that are no plain message: they are malformed, or have what no gateway sends (groups,
/// or a value in several parts) and what only the protocol's own types read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotPlain;

/// Reader of a message's fields, by number.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(&'a [u8]);

/// Value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A value of a kind that no message of a gateway uses.
    Other,
}

impl<'a> Fields<'a> {
    pub(super) fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Returns the bytes of the field with this number; `None` if there is none.
    ///
    /// # Errors
    /// If the message is not plain.
    pub(super) fn bytes(self, number: u64) -> Result<Option<&'a [u8]>, NotPlain> {
        let mut only = None;
        for field in self {
            match field? {
                (found, Field::Bytes(bytes)) if found == number => once(&mut only, bytes)?,
                (found, _) if found == number => return Err(NotPlain),
                _ => {}
            }
        }
        Ok(only)
    }

    fn number(&mut self) -> Result<u64, NotPlain> {
        let mut number = 0;
        for (nth, byte) in self.0.iter().take(VARINT_BYTES_MAX).enumerate() {
            number |= u64::from(byte & 0x7f) << (7 * nth);
            if byte & 0x80 == 0 {
                if nth + 1 == VARINT_BYTES_MAX && *byte > 1 {
                    break;
                }
                self.0 = &self.0[nth + 1..];
                return Ok(number);
            }
        }
        Err(NotPlain)
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], NotPlain> {
        let length = usize::try_from(length).map_err(|_| NotPlain)?;
        let (taken, rest) = self.0.split_at_checked(length).ok_or(NotPlain)?;
        self.0 = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<(u64, Field<'a>), NotPlain> {
        let key = self.number()?;
        let number = key >> 3;
        if number == 0 || key > u64::from(u32::MAX) {
            return Err(NotPlain);
        }
        let value = match key & 7 {
            VARINT => Field::Number(self.number()?),
            LENGTH => {
                let length = self.number()?;
                Field::Bytes(self.take(length)?)
            }
            FIXED_64 => self.take(8).map(|_| Field::Other)?,
            FIXED_32 => self.take(4).map(|_| Field::Other)?,
            _ => return Err(NotPlain),
        };
        Ok((number, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), NotPlain>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// Notes a value that may occur once.
///
/// # Errors
/// If it occurs again.
pub(super) fn once<T>(slot: &mut Option<T>, value: T) -> Result<(), NotPlain> {
    slot.replace(value).map_or(Ok(()), |_| Err(NotPlain))
}

/// A message to a gateway: its fields, and the body at its end, which is not copied until it is sent.
#[derive(Debug)]
pub struct PickerMessage {
    /// The prefix, which is written last, and the fields.
    start: Vec<u8>,
    body: Bytes,
    /// Whether the stream ends with it.
    pub(super) is_last: bool,
}

impl PickerMessage {
    pub(super) fn new() -> Self {
        let mut start = Vec::with_capacity(START_BYTES);
        start.resize(PREFIX_BYTES, 0);
        Self {
            start,
            body: Bytes::new(),
            is_last: false,
        }
    }

    /// Ends the stream with this message.
    pub(super) fn last(self) -> Self {
        self.last_if(true)
    }

    /// Ends the stream with this message if `is_last`.
    pub(super) fn last_if(self, is_last: bool) -> Self {
        Self { is_last, ..self }
    }

    pub(super) fn number(&mut self, field: u64, value: u64) {
        put_number(&mut self.start, field << 3 | VARINT);
        put_number(&mut self.start, value);
    }

    pub(super) fn bytes(&mut self, field: u64, value: &[u8]) {
        self.length(field, value.len());
        self.start.extend_from_slice(value);
    }

    /// Writes a field that is the last one of the whole message.
    pub(super) fn ends_with(&mut self, field: u64, body: Bytes) {
        self.length(field, body.len());
        self.body = body;
    }

    /// Writes a field whose value is a message.
    pub(super) fn within(&mut self, field: u64, write: impl FnOnce(&mut Self)) {
        let begin = self.start.len();
        write(self);
        let end = self.start.len();
        self.length(field, end - begin + self.body.len());
        // The length, known only now, moves to the front. These are few bytes: the body is not here.
        let mut length = [0; 2 * VARINT_BYTES_MAX];
        let length = &mut length[..self.start.len() - end];
        length.copy_from_slice(&self.start[end..]);
        self.start.copy_within(begin..end, begin + length.len());
        self.start[begin..][..length.len()].copy_from_slice(length);
    }

    fn length(&mut self, field: u64, length: usize) {
        put_number(&mut self.start, field << 3 | LENGTH);
        put_number(&mut self.start, length as u64);
    }

    /// Returns the message without its prefix.
    #[must_use]
    pub fn encoded(&self) -> Bytes {
        Bytes::from([&self.start[PREFIX_BYTES..], &self.body[..]].concat())
    }

    /// Appends the message to `data` as gRPC sends it. Returns its body if that is too long to be
    /// copied; the body then follows `data`.
    ///
    /// # Errors
    /// Returns the status that ends the stream if the message is too long for gRPC.
    pub(super) fn sent_after(mut self, data: &mut Vec<u8>) -> Result<Bytes, Status> {
        let length = self.start.len() - PREFIX_BYTES + self.body.len();
        let why = "a body of 4 GiB does not fit into a message";
        let length = u32::try_from(length).map_err(|_| Status::resource_exhausted(why))?;
        self.start[1..PREFIX_BYTES].copy_from_slice(&length.to_be_bytes());
        match data.is_empty() {
            true => *data = self.start,
            false => data.extend_from_slice(&self.start),
        }
        if self.body.len() > COPIED_BYTES_MAX {
            return Ok(self.body);
        }
        data.extend_from_slice(&self.body);
        Ok(Bytes::new())
    }
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}
