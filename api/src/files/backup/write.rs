//! Writes a backup.

use std::io::{self, Write};

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{
    BackupHead, CHECKSUM_BYTES, CHUNK_BYTES, END_BYTES, FORMAT, HEAD_BYTES_MAX, LENGTH_BYTES, MAGIC,
};

/// Writer of a backup. Splits the state written to it into chunks.
pub struct BackupWriter<W: Write> {
    out: W,
    chunk: Vec<u8>,
    chunks: u64,
    bytes: u64,
}

impl<W: Write> BackupWriter<W> {
    /// Starts a backup by writing its head.
    ///
    /// # Errors
    /// Fails if the head is too long, or if writing to `out` fails.
    pub fn new(mut out: W, head: &BackupHead) -> io::Result<Self> {
        out.write_all(&encode(head)?)?;
        Ok(Self {
            out,
            chunk: Vec::with_capacity(CHUNK_BYTES),
            chunks: 0,
            bytes: 0,
        })
    }

    /// Completes the backup and returns the underlying writer.
    ///
    /// # Errors
    /// Fails if writing to `out` fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.write_chunk()?;
        let mut end = [0; END_BYTES];
        end[..8].copy_from_slice(&self.chunks.to_le_bytes());
        end[8..].copy_from_slice(&self.bytes.to_le_bytes());
        self.out.write_all(&0_u32.to_le_bytes())?;
        self.out.write_all(&end)?;
        self.out.write_all(&xxh3_64(&end).to_le_bytes())?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn write_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let length = u32::try_from(self.chunk.len()).map_err(io::Error::other)?;
        let checksum = xxh3_64_with_seed(&self.chunk, self.chunks);
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(&self.chunk)?;
        self.out.write_all(&checksum.to_le_bytes())?;
        self.chunks += 1;
        self.bytes += u64::from(length);
        self.chunk.clear();
        Ok(())
    }
}

impl<W: Write> Write for BackupWriter<W> {
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

/// A writer that only counts bytes.
#[derive(Debug, Default)]
pub struct LengthCounter(pub u64);

impl Write for LengthCounter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the length of the whole file that begins with `head`, in bytes.
///
/// # Errors
/// Fails if the head is too long.
pub fn file_bytes(head: &BackupHead) -> io::Result<u64> {
    let chunks = head.bytes.div_ceil(CHUNK_BYTES as u64);
    let around = (LENGTH_BYTES + CHECKSUM_BYTES) as u64;
    let end = (LENGTH_BYTES + END_BYTES + CHECKSUM_BYTES) as u64;
    Ok(encode(head)?.len() as u64 + chunks * around + head.bytes + end)
}

/// Encodes everything before the first chunk.
fn encode(head: &BackupHead) -> io::Result<Vec<u8>> {
    let head = serde_json::to_vec(head).map_err(io::Error::other)?;
    if head.len() > HEAD_BYTES_MAX {
        let length = head.len();
        return Err(io::Error::other(format!("a head of {length} bytes")));
    }
    let length = u32::try_from(head.len()).map_err(io::Error::other)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FORMAT.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(head);
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    Ok(bytes)
}
