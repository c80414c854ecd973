//! Reads a backup as it arrives and checks every byte of it.

use std::io::{self, Read};

use bytes::{Buf, Bytes, BytesMut};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{
    BackupError, BackupHead, CHECKSUM_BYTES, CHUNK_BYTES, END_BYTES, FORMAT, HEAD_BYTES_MAX,
    LENGTH_BYTES, MAGIC, PREFIX_BYTES,
};

/// A complete piece of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackupPiece {
    /// The head, always the first piece.
    Head(BackupHead),
    /// The next bytes of the state: [`CHUNK_BYTES`], or the rest.
    Chunk(Bytes),
    /// The end of a complete backup.
    End,
}

/// Incremental parser of a backup. It buffers whatever was pushed and not yet returned. Push the
/// available bytes, then take pieces until none is left.
#[derive(Debug, Default)]
pub struct BackupReader {
    buffer: BytesMut,
    /// Offset of the buffer in the file, in bytes.
    offset: u64,
    head: Option<BackupHead>,
    chunks: u64,
    bytes: u64,
    is_ended: bool,
}

impl BackupReader {
    /// Adds the next bytes of the file.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next piece, or `None` if it needs more bytes.
    ///
    /// # Errors
    /// Fails if the bytes are not an intact backup. All later results are then meaningless.
    pub fn piece(&mut self) -> Result<Option<BackupPiece>, BackupError> {
        if self.is_ended {
            return self.end().map(|()| None);
        }
        match self.head.as_ref().map(|head| head.bytes) {
            None => self.read_head(),
            Some(bytes) => self.read_chunk(bytes),
        }
    }

    /// Checks that the backup is complete and that nothing follows it.
    ///
    /// # Errors
    /// Fails if the end is missing or something follows it.
    pub fn end(&self) -> Result<(), BackupError> {
        match (self.is_ended, self.buffer.len()) {
            (true, 0) => Ok(()),
            (true, rest) => Err(self.damaged(0, format!("{rest} bytes follow the end"))),
            (false, there) => Err(self.damaged(there, "the file ends early")),
        }
    }

    fn read_head(&mut self) -> Result<Option<BackupPiece>, BackupError> {
        let given = &self.buffer[..self.buffer.len().min(MAGIC.len())];
        if !MAGIC.starts_with(given) {
            return Err(self.damaged(0, "not a Quorate backup"));
        }
        let Some(prefix) = self.buffer.first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let mut fields = &prefix[MAGIC.len()..];
        let (format, length) = (fields.get_u16_le(), fields.get_u32_le() as usize);
        if format != FORMAT {
            let what = format!("format {format}, this build reads {FORMAT}");
            return Err(self.damaged(MAGIC.len(), what));
        }
        if length > HEAD_BYTES_MAX {
            let what = format!("a head of {length} bytes, {HEAD_BYTES_MAX} at most");
            return Err(self.damaged(MAGIC.len() + 2, what));
        }
        let whole = PREFIX_BYTES + length;
        if self.buffer.len() < whole + CHECKSUM_BYTES {
            return Ok(None);
        }
        if (&self.buffer[whole..]).get_u64_le() != xxh3_64(&self.buffer[..whole]) {
            return Err(self.damaged(0, "the head's checksum does not match"));
        }
        let head: BackupHead = serde_json::from_slice(&self.buffer[PREFIX_BYTES..whole])
            .map_err(|fault| self.damaged(PREFIX_BYTES, format!("head: {fault}")))?;
        self.take(whole + CHECKSUM_BYTES);
        self.head = Some(head.clone());
        Ok(Some(BackupPiece::Head(head)))
    }

    fn read_chunk(&mut self, bytes_all: u64) -> Result<Option<BackupPiece>, BackupError> {
        let Some(length) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length);
        if length == 0 {
            return self.read_end(bytes_all);
        }
        let expected = (bytes_all - self.bytes).min(CHUNK_BYTES as u64);
        if u64::from(length) != expected {
            let what = format!("a chunk of {length} bytes, {expected} expected");
            return Err(self.damaged(0, what));
        }
        let whole = LENGTH_BYTES + length as usize;
        if self.buffer.len() < whole + CHECKSUM_BYTES {
            return Ok(None);
        }
        let checksum = (&self.buffer[whole..]).get_u64_le();
        if checksum != xxh3_64_with_seed(&self.buffer[LENGTH_BYTES..whole], self.chunks) {
            return Err(self.damaged(0, "the chunk's checksum does not match"));
        }
        self.take(LENGTH_BYTES);
        let chunk = self.take(length as usize);
        self.take(CHECKSUM_BYTES);
        self.chunks += 1;
        self.bytes += u64::from(length);
        Ok(Some(BackupPiece::Chunk(chunk)))
    }

    fn read_end(&mut self, bytes_all: u64) -> Result<Option<BackupPiece>, BackupError> {
        let whole = LENGTH_BYTES + END_BYTES + CHECKSUM_BYTES;
        if self.buffer.len() < whole {
            return Ok(None);
        }
        let end = &self.buffer[LENGTH_BYTES..LENGTH_BYTES + END_BYTES];
        let checksum = (&self.buffer[LENGTH_BYTES + END_BYTES..]).get_u64_le();
        if checksum != xxh3_64(end) {
            return Err(self.damaged(0, "the end's checksum does not match"));
        }
        let mut end = end;
        let (chunks, bytes) = (end.get_u64_le(), end.get_u64_le());
        if (chunks, bytes) != (self.chunks, self.bytes) || bytes != bytes_all {
            let found = format!("{} chunks of {} bytes", self.chunks, self.bytes);
            let what = format!("{found}, {chunks} of {bytes} expected, {bytes_all} announced");
            return Err(self.damaged(0, what));
        }
        self.take(whole);
        self.is_ended = true;
        Ok(Some(BackupPiece::End))
    }

    fn take(&mut self, bytes: usize) -> Bytes {
        self.offset += bytes as u64;
        self.buffer.split_to(bytes).freeze()
    }

    fn damaged(&self, at: usize, what: impl Into<String>) -> BackupError {
        BackupError {
            offset: self.offset + at as u64,
            what: what.into(),
        }
    }
}

/// Reader of the state in a backup file as one stream. Reports damage as an [`io::Error`] that
/// contains a [`BackupError`].
#[derive(Debug)]
pub struct FileReader<R> {
    file: R,
    reader: BackupReader,
    chunk: Bytes,
    is_ended: bool,
    scratch: Vec<u8>,
}

impl<R: Read> FileReader<R> {
    /// Opens a backup and reads its head.
    ///
    /// # Errors
    /// Fails if reading the file fails, or if it is not a backup.
    pub fn open(file: R) -> io::Result<(Self, BackupHead)> {
        let mut opened = Self {
            file,
            reader: BackupReader::default(),
            chunk: Bytes::new(),
            is_ended: false,
            scratch: vec![0; 64 << 10],
        };
        match opened.next()? {
            Some(BackupPiece::Head(head)) => Ok((opened, head)),
            Some(BackupPiece::Chunk(_) | BackupPiece::End) | None => {
                unreachable!("a head comes first, or a fault")
            }
        }
    }

    /// Returns the next piece, or `None` after the end.
    fn next(&mut self) -> io::Result<Option<BackupPiece>> {
        let damaged = |fault: BackupError| io::Error::new(io::ErrorKind::InvalidData, fault);
        loop {
            if let Some(piece) = self.reader.piece().map_err(damaged)? {
                return Ok(Some(piece));
            }
            match self.file.read(&mut self.scratch) {
                Ok(0) => {
                    self.reader.end().map_err(damaged)?;
                    return Ok(None);
                }
                Ok(read) => self.reader.push(&self.scratch[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl<R: Read> Read for FileReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() && !self.is_ended {
            match self.next()? {
                Some(BackupPiece::Chunk(chunk)) => self.chunk = chunk,
                // Read past the end to check that nothing follows.
                Some(BackupPiece::Head(_) | BackupPiece::End) => {}
                None => self.is_ended = true,
            }
        }
        let taken = self.chunk.len().min(out.len());
        out[..taken].copy_from_slice(&self.chunk[..taken]);
        self.chunk.advance(taken);
        Ok(taken)
    }
}
