//! Writes a snapshot file.

use std::io::{self, BufWriter, Write};

use prost::Message;

use super::{CHUNK_BYTES, END_BYTES, MAGIC, SnapshotFile};
use crate::files::NewFile;
use crate::planted::{self, Bug};
use crate::wire::proto;

/// Writer of a snapshot in chunks, each with a checksum.
pub(crate) struct SnapshotWriter {
    out: BufWriter<Box<dyn NewFile>>,
    chunk: Vec<u8>,
    chunks: u64,
    bytes: u64,
}

impl SnapshotWriter {
    /// Creates the snapshot `file` and writes its head.
    pub(crate) fn create(file: &SnapshotFile, meta: &proto::SnapshotMeta) -> io::Result<Self> {
        let mut out = BufWriter::new(file.files.create(&file.path)?);
        out.write_all(MAGIC)?;
        frame(&mut out, &meta.encode_to_vec())?;
        Ok(Self {
            out,
            chunk: Vec::with_capacity(CHUNK_BYTES),
            chunks: 0,
            bytes: 0,
        })
    }

    /// Completes the file and syncs it.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.write_chunk()?;
        let mut end = [0; END_BYTES];
        end[..8].copy_from_slice(&self.chunks.to_le_bytes());
        end[8..].copy_from_slice(&self.bytes.to_le_bytes());
        self.out.write_all(&0_u32.to_le_bytes())?;
        self.out.write_all(&crc32fast::hash(&end).to_le_bytes())?;
        self.out.write_all(&end)?;
        let file = self.out.into_inner();
        let mut file = file.map_err(io::IntoInnerError::into_error)?;
        if planted::is(Bug::SnapshotNotSynced) {
            return Ok(());
        }
        file.sync()
    }

    fn write_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        frame(&mut self.out, &self.chunk)?;
        self.chunks += 1;
        self.bytes += self.chunk.len() as u64;
        self.chunk.clear();
        Ok(())
    }
}

fn frame(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&crc32fast::hash(bytes).to_le_bytes())?;
    out.write_all(bytes)
}

impl Write for SnapshotWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..taken]);
        if self.chunk.len() == CHUNK_BYTES {
            self.write_chunk()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
