//! Reads a snapshot file and verifies every byte.

use std::io::{self, BufReader, Read};
use std::path::PathBuf;

use prost::Message;

use super::{CHUNK_BYTES_MAX, END_BYTES, FRAME_HEAD_BYTES, HEAD_BYTES_MAX, MAGIC, SnapshotFile};
use crate::error::StartError;
use crate::files::{damaged, io_error};
use crate::wire::proto;

/// Error for damage in a snapshot file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("snapshot damaged at byte {offset}: {what}")]
pub(crate) struct SnapshotDamageError {
    pub(crate) offset: u64,
    pub(crate) what: String,
}

/// Reader of a snapshot that verifies it chunk by chunk.
pub(crate) struct SnapshotReader {
    path: PathBuf,
    file: BufReader<Box<dyn Read + Send>>,
    offset: u64,
    chunk: Vec<u8>,
    given: usize,
    chunks: u64,
    bytes: u64,
    is_ended: bool,
    damage: Option<SnapshotDamageError>,
}

impl SnapshotReader {
    /// Opens the snapshot `file` and reads its head.
    pub(crate) fn open(file: &SnapshotFile) -> Result<(Self, proto::SnapshotMeta), StartError> {
        let path = &file.path;
        let opened = file.files.open(path);
        let mut reader = Self {
            path: path.clone(),
            file: BufReader::new(opened.map_err(|error| io_error(path, error))?),
            offset: 0,
            chunk: Vec::new(),
            given: 0,
            chunks: 0,
            bytes: 0,
            is_ended: false,
            damage: None,
        };
        match reader.read_head() {
            Ok(meta) => Ok((reader, meta)),
            Err(error) => Err(reader.start_error(&error)),
        }
    }

    /// Reads the next chunk. Returns an empty one at the end of the file.
    ///
    /// # Errors
    /// I/O errors of the file, or [`SnapshotDamageError`].
    pub(crate) fn next_chunk(&mut self) -> io::Result<&[u8]> {
        self.chunk.clear();
        self.given = 0;
        if !self.is_ended {
            self.read_chunk()?;
        }
        Ok(&self.chunk)
    }

    /// Returns the number of chunks and bytes read so far.
    pub(crate) fn read_so_far(&self) -> (u64, u64) {
        (self.chunks, self.bytes)
    }

    /// Reads the rest of the file in order to verify all of it.
    pub(crate) fn check_rest(&mut self) -> io::Result<()> {
        while !self.next_chunk()?.is_empty() {}
        Ok(())
    }

    /// Returns the damage that was found; `None` if there was none so far.
    pub(crate) fn damage(&self) -> Option<&SnapshotDamageError> {
        self.damage.as_ref()
    }

    /// Adds the file's name to `error`, and the offset if the file is damaged.
    pub(crate) fn start_error(&self, error: &io::Error) -> StartError {
        match self.damage() {
            Some(damage) => damaged(&self.path, damage.offset, damage.what.clone()),
            None => io_error(&self.path, io::Error::new(error.kind(), error.to_string())),
        }
    }

    fn read_head(&mut self) -> io::Result<proto::SnapshotMeta> {
        let mut magic = [0; MAGIC.len()];
        self.fill(&mut magic)?;
        if &magic != MAGIC {
            return Err(self.damaged(0, "unknown magic number"));
        }
        let at = self.offset;
        let (length, crc) = self.frame_head()?;
        let head = self.frame(at, length, crc, HEAD_BYTES_MAX)?;
        proto::SnapshotMeta::decode(&head[..]).map_err(|error| self.damaged(at, error.to_string()))
    }

    fn read_chunk(&mut self) -> io::Result<()> {
        let at = self.offset;
        let (length, crc) = self.frame_head()?;
        if length == 0 {
            return self.read_end(at, crc);
        }
        self.chunk = self.frame(at, length, crc, CHUNK_BYTES_MAX)?;
        self.chunks += 1;
        self.bytes += self.chunk.len() as u64;
        Ok(())
    }

    fn read_end(&mut self, at: u64, crc: u32) -> io::Result<()> {
        let end = self.frame(at, END_BYTES, crc, END_BYTES)?;
        let (chunks, bytes) = end.split_at(8);
        if chunks != self.chunks.to_le_bytes() || bytes != self.bytes.to_le_bytes() {
            return Err(self.damaged(at, "chunks are missing"));
        }
        if self.file.read(&mut [0])? != 0 {
            return Err(self.damaged(self.offset, "bytes after the end"));
        }
        self.is_ended = true;
        Ok(())
    }

    fn frame_head(&mut self) -> io::Result<(usize, u32)> {
        let mut head = [0; FRAME_HEAD_BYTES];
        self.fill(&mut head)?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        Ok((word(0) as usize, word(4)))
    }

    fn frame(&mut self, at: u64, length: usize, crc: u32, max: usize) -> io::Result<Vec<u8>> {
        if length > max {
            return Err(self.damaged(at, format!("length {length}, at most {max}")));
        }
        let mut bytes = vec![0; length];
        self.fill(&mut bytes)?;
        if crc32fast::hash(&bytes) != crc {
            return Err(self.damaged(at, "checksum differs"));
        }
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        match self.file.read_exact(bytes) {
            Ok(()) => {
                self.offset += bytes.len() as u64;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.damaged(self.offset, "the file ends early"))
            }
            Err(error) => Err(error),
        }
    }

    fn damaged(&mut self, offset: u64, what: impl Into<String>) -> io::Error {
        let damage = SnapshotDamageError {
            offset,
            what: what.into(),
        };
        self.damage = Some(damage.clone());
        io::Error::new(io::ErrorKind::InvalidData, damage)
    }
}

impl Read for SnapshotReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if let Some(damage) = &self.damage {
            return Err(io::Error::new(io::ErrorKind::InvalidData, damage.clone()));
        }
        if self.given == self.chunk.len() {
            self.next_chunk()?;
        }
        let taken = out.len().min(self.chunk.len() - self.given);
        out[..taken].copy_from_slice(&self.chunk[self.given..self.given + taken]);
        self.given += taken;
        Ok(taken)
    }
}
