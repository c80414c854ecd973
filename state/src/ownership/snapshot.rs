//! Snapshots of the ownership: frozen by cloning pointers, written elsewhere, and fully verified
//! when read.
//!
//! Format 1, all integers little-endian. A *section* is `length: u32`, `payload`, `checksum: u64`.
//! The checksum is the payload's xxh3-64 seeded with the section's number, from 0, so that sections
//! cannot be swapped. Sections:
//!
//! 1. head: `"QUOROWNS"`, format `u32`, backends `u32`;
//! 2. per backend, by slot: `slot u16`, `has_capacity u8`, `capacity u32`, `epoch u64`,
//!    `records u32` (including free ones), `owned u32`; then one section per chunk of 1,024
//!    records: a bitmap of the records in use (128 bytes), and 19 bytes for each of these, column
//!    by column: `hash u64`, `parent u32` (record number, all ones for none), `epoch u40`,
//!    `leases u16`;
//! 3. end: the digest, `u128`.
//!
//! Everything else (children, indexes, eviction order, view) is rebuilt from that. The input is
//! untrusted: memory grows only with sections whose checksum is right, and the digest at the end
//! must match.

use std::io::{self, Read, Write};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::bounds::BACKENDS_MAX;
use crate::error::SnapshotError;
use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::ownership::arena::{
    BlockRecord, CHUNK_RECORDS, Chunk, EPOCH_MAX, NO_RECORD, RECORDS_MAX,
};
use crate::ownership::backend::{BackendBlocks, GROUP_BLOCKS, SharedIndex};
use crate::ownership::index::RecordIndex;

const MAGIC: &[u8; 8] = b"QUOROWNS";
const FORMAT: u32 = 1;
const BITMAP_BYTES: usize = CHUNK_RECORDS / 8;
const RECORD_BYTES: usize = 8 + 4 + 5 + 2;
/// Maximum length of a section's payload, in bytes: that of a full chunk.
const SECTION_BYTES_MAX: usize = BITMAP_BYTES + CHUNK_RECORDS * RECORD_BYTES;

/// An image of an [`Ownership`], unaffected by later changes.
pub struct FrozenOwnership {
    backends: Vec<FrozenBackend>,
    digest: u128,
}

struct FrozenBackend {
    slot: Slot,
    capacity: Option<u32>,
    epoch: u64,
    records: u32,
    owned: u32,
    chunks: Vec<Arc<Chunk>>,
}

impl Ownership {
    /// Freezes the current content by cloning one pointer per 1,024 blocks. While the image exists,
    /// the writer copies each chunk (about 22 KB) on its first change.
    #[must_use]
    pub fn freeze(&self) -> FrozenOwnership {
        let backends = self.backends.iter().flatten().map(|backend| FrozenBackend {
            slot: backend.slot,
            capacity: backend.capacity,
            epoch: backend.epoch,
            records: backend.arena.len(),
            owned: backend.owned,
            chunks: backend.arena.chunks().to_vec(),
        });
        FrozenOwnership {
            backends: backends.collect(),
            digest: self.digest(),
        }
    }

    /// Replaces the content with an image written by [`FrozenOwnership::write_to`], and reads
    /// exactly that image from `input`. Readers keep their handles; until this returns, they may
    /// see parts of both.
    ///
    /// # Errors
    /// Describes the first fault, with the offset of its section from the start of `input`. Nothing
    /// has changed then.
    pub fn restore(&mut self, input: &mut dyn Read) -> Result<(), SnapshotError> {
        self.restore_reported(input, &|_| Vec::new())
    }

    /// Restores an image like [`Self::restore`]. `reports` returns the blocks that the engine in a
    /// slot reports: one entry per rank and block.
    pub(crate) fn restore_reported(
        &mut self,
        input: &mut dyn Read,
        reports: &dyn Fn(Slot) -> Vec<BlockHash>,
    ) -> Result<(), SnapshotError> {
        let mut sections = Sections {
            input,
            section: 0,
            start: 0,
            offset: 0,
            payload: Vec::new(),
        };
        let backends = sections.next(16)?;
        if backends.bytes(8) != MAGIC || backends.u32() != FORMAT {
            return sections.corrupt("an ownership image of format 1 expected");
        }
        let backends = backends.u32();
        let mut fresh = Self {
            backends: Vec::new(),
            common: SharedIndex {
                view: self.common.view.unpublished(),
                owned: 0,
                owned_max: self.common.owned_max,
            },
        };
        for _ in 0..backends {
            fresh.read_backend(&mut sections, reports)?;
        }
        let digest = sections.next(16)?.u128();
        if digest != fresh.digest() {
            let what = format!(
                "digest {digest:032x}, but of the content {:032x}",
                fresh.digest()
            );
            return sections.corrupt(what);
        }
        self.adopt(fresh);
        Ok(())
    }

    /// Replaces the content with that of `fresh`. Readers keep their handles; until this returns,
    /// they may see parts of both.
    pub(crate) fn adopt(&mut self, fresh: Self) {
        self.common.view.adopt(fresh.common.view);
        self.common.owned = fresh.common.owned;
        self.backends = fresh.backends;
    }

    fn read_backend(
        &mut self,
        sections: &mut Sections<'_>,
        reports: &dyn Fn(Slot) -> Vec<BlockHash>,
    ) -> Result<(), SnapshotError> {
        let head = sections.next(23)?;
        let slot = Slot(head.u16());
        let capacity = (head.u8() == 1, head.u32());
        let (epoch, records, owned) = (head.u64(), head.u32(), head.u32());
        let at = usize::from(slot.0);
        if at >= BACKENDS_MAX || at < self.backends.len() {
            return sections.corrupt(format!("slot {slot} is out of order"));
        }
        if epoch > EPOCH_MAX || records > RECORDS_MAX || owned > records {
            return sections.corrupt(format!("{records} records, {owned} owned, epoch {epoch}"));
        }
        self.add_backend(slot, capacity.0.then_some(capacity.1));
        let Some((backend, common)) = self.backend_mut(slot) else {
            return sections.corrupt(format!("slot {slot} cannot be used"));
        };
        backend.epoch = epoch;
        let mut rest = records as usize;
        while rest > 0 {
            let count = rest.min(CHUNK_RECORDS);
            let records = sections.next_chunk(count, backend)?;
            backend.arena.push_chunk(&records);
            rest -= count;
        }
        let read = backend
            .rebuild(common, &reports(slot))
            .map_err(|what| sections.fault(what))?;
        if read != owned {
            return sections.corrupt(format!("slot {slot} has {read} blocks, not {owned}"));
        }
        Ok(())
    }
}

impl BackendBlocks {
    /// Rebuilds everything that an image omits, using only the records and `reports`. Returns the
    /// number of owned blocks, or a description of the fault.
    fn rebuild(&mut self, common: &mut SharedIndex, reports: &[BlockHash]) -> Result<u32, String> {
        let live: Vec<u32> = self.arena.live().map(|(index, _)| index).collect();
        if common.owned + live.len() as u64 > common.owned_max {
            return Err(format!("more than {} blocks", common.owned_max));
        }
        self.index = RecordIndex::with_room(live.len());
        for group in live.chunks(GROUP_BLOCKS) {
            let blocks: Vec<_> = group.iter().map(|&index| self.arena.hash(index)).collect();
            self.prefetch(&blocks);
            self.link(group)?;
        }
        self.show_paths(common, &live)?;
        for &block in reports {
            let record = self.find(block);
            let counted = record.is_some_and(|record| self.count_report(record));
            if !counted {
                return Err(format!("block {block} is reported and not owned"));
            }
        }
        for &index in &live {
            let record = self.arena.get(index);
            if record.is_free_leaf() && record.epoch == 0 {
                return Err(format!("nothing holds block {}", record.hash));
            }
            self.link_leaf(index);
        }
        self.owned = live.len() as u32;
        common.owned += live.len() as u64;
        match self.capacity {
            Some(most) if self.unreported() > most && !self.evictable.is_empty() => Err(format!(
                "{} blocks beside reported ones of at most {most}, some of them evictable",
                self.unreported()
            )),
            _ => Ok(self.owned),
        }
    }

    /// Adds the records at the indexes `records` to the lookup index, the digest and their parents'
    /// counts. Returns a description of the fault if they contradict each other.
    fn link(&mut self, records: &[u32]) -> Result<(), String> {
        for &index in records {
            let record = self.arena.get(index);
            if record.parent != NO_RECORD {
                let Some(mut parent) = self.arena.try_get(record.parent) else {
                    return Err(format!("record {index} follows one that is not there"));
                };
                parent.children += 1;
                self.arena.set(record.parent, parent);
            }
            if self.find(record.hash).is_some() {
                return Err(format!("block {} is there twice", record.hash));
            }
            self.index.insert(record.hash, index, &self.arena);
            self.sum = self.sum.wrapping_add(self.digest_of(&record));
        }
        Ok(())
    }

    /// Shows the `live` records to readers, parents before children. Returns a description of the
    /// fault if a record does not lead to a first block.
    fn show_paths(&mut self, common: &mut SharedIndex, live: &[u32]) -> Result<(), String> {
        let mut is_shown = vec![false; self.arena.len() as usize];
        let (mut path, mut blocks) = (Vec::new(), Vec::new());
        for &index in live {
            let mut at = index;
            while at != NO_RECORD && !is_shown[at as usize] {
                // A path contains each record at most once.
                if path.len() == live.len() {
                    return Err(format!("record {index} follows itself"));
                }
                path.push(at);
                at = self.arena.get(at).parent;
            }
            path.reverse();
            blocks.extend(path.iter().map(|&record| self.arena.hash(record)));
            self.show(common, at, &path, &blocks);
            path.drain(..)
                .for_each(|record| is_shown[record as usize] = true);
            blocks.clear();
        }
        Ok(())
    }
}

impl FrozenOwnership {
    /// Writes the image in the format of the module documentation, about 19.2 bytes per block.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut out = SectionWriter { out, section: 0 };
        let mut payload = Vec::with_capacity(SECTION_BYTES_MAX);
        payload.extend_from_slice(MAGIC);
        payload.extend_from_slice(&FORMAT.to_le_bytes());
        payload.extend_from_slice(&(self.backends.len() as u32).to_le_bytes());
        out.write(&mut payload)?;
        for backend in &self.backends {
            payload.extend_from_slice(&backend.slot.0.to_le_bytes());
            payload.push(u8::from(backend.capacity.is_some()));
            payload.extend_from_slice(&backend.capacity.unwrap_or(0).to_le_bytes());
            payload.extend_from_slice(&backend.epoch.to_le_bytes());
            payload.extend_from_slice(&backend.records.to_le_bytes());
            payload.extend_from_slice(&backend.owned.to_le_bytes());
            out.write(&mut payload)?;
            let mut rest = backend.records as usize;
            for chunk in &backend.chunks {
                let count = rest.min(CHUNK_RECORDS);
                encode_chunk(chunk, count, &mut payload);
                out.write(&mut payload)?;
                rest -= count;
            }
        }
        payload.extend_from_slice(&self.digest.to_le_bytes());
        out.write(&mut payload)
    }

    /// Returns the digest of the image: the value of [`Ownership::digest`] when it was frozen.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.digest
    }
}

impl std::fmt::Debug for FrozenOwnership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrozenOwnership")
            .field("backends", &self.backends.len())
            .finish()
    }
}

fn encode_chunk(chunk: &Chunk, count: usize, payload: &mut Vec<u8>) {
    let mut bitmap = [0_u8; BITMAP_BYTES];
    let mut records = Vec::with_capacity(count);
    for at in 0..count {
        if let Some(record) = chunk.get(at) {
            bitmap[at / 8] |= 1 << (at % 8);
            records.push(record);
        }
    }
    payload.extend_from_slice(&bitmap);
    records
        .iter()
        .for_each(|record| payload.extend_from_slice(&record.hash.0.to_le_bytes()));
    records
        .iter()
        .for_each(|record| payload.extend_from_slice(&record.parent.to_le_bytes()));
    records
        .iter()
        .for_each(|record| payload.extend_from_slice(&record.epoch.to_le_bytes()[..5]));
    records
        .iter()
        .for_each(|record| payload.extend_from_slice(&record.leases.to_le_bytes()));
}

struct SectionWriter<'a> {
    out: &'a mut dyn Write,
    section: u64,
}

impl SectionWriter<'_> {
    /// Writes `payload` as a section and clears it.
    fn write(&mut self, payload: &mut Vec<u8>) -> io::Result<()> {
        self.out.write_all(&(payload.len() as u32).to_le_bytes())?;
        self.out.write_all(payload)?;
        self.out
            .write_all(&xxh3_64_with_seed(payload, self.section).to_le_bytes())?;
        self.section += 1;
        payload.clear();
        Ok(())
    }
}

/// Reader of an image's sections that counts the bytes read.
struct Sections<'a> {
    input: &'a mut dyn Read,
    /// Number of the next section.
    section: u64,
    /// Offset of the last section that was read.
    start: u64,
    offset: u64,
    payload: Vec<u8>,
}

impl Sections<'_> {
    /// Reads the next section, which must have `length` bytes.
    fn next(&mut self, length: usize) -> Result<Fields<'_>, SnapshotError> {
        self.read()?;
        if self.payload.len() != length {
            let found = self.payload.len();
            return self.corrupt(format!("section of {found} bytes, {length} expected"));
        }
        Ok(Fields::new(&self.payload))
    }

    /// Reads the next section as a chunk of `count` records of `backend`, with `None` for free
    /// ones.
    fn next_chunk(
        &mut self,
        count: usize,
        backend: &BackendBlocks,
    ) -> Result<Vec<Option<BlockRecord>>, SnapshotError> {
        self.read()?;
        let bitmap = self.payload.get(..BITMAP_BYTES).unwrap_or(&[]);
        let is_live = |at: usize| {
            bitmap
                .get(at / 8)
                .is_some_and(|byte| byte >> (at % 8) & 1 == 1)
        };
        let live = (0..CHUNK_RECORDS).filter(|&at| is_live(at)).count();
        let is_beyond = (count..CHUNK_RECORDS).any(is_live);
        if self.payload.len() != BITMAP_BYTES + live * RECORD_BYTES || is_beyond {
            return self.corrupt(format!("chunk of {count} records does not fit its bitmap"));
        }
        let columns = &self.payload[BITMAP_BYTES..];
        let (hashes, columns) = columns.split_at(8 * live);
        let (parents, columns) = columns.split_at(4 * live);
        let (epochs, leases) = columns.split_at(5 * live);
        let columns = [hashes, parents, epochs, leases].map(Fields::new);
        let [hashes, parents, epochs, leases] = &columns;
        let records = (0..count).map(|at| {
            is_live(at).then(|| BlockRecord {
                hash: BlockHash(hashes.u64()),
                parent: parents.u32(),
                behind: 0,
                children: 0,
                leases: leases.u16(),
                reports: 0,
                epoch: epochs.u40(),
            })
        });
        let records: Vec<_> = records.collect();
        let is_sound = |record: &BlockRecord| {
            record.epoch <= backend.epoch
                && (record.parent == NO_RECORD || record.parent < RECORDS_MAX)
        };
        if !records.iter().flatten().all(is_sound) {
            return self.corrupt("a record's parent or epoch is out of range");
        }
        Ok(records)
    }

    fn read(&mut self) -> Result<(), SnapshotError> {
        self.start = self.offset;
        let mut length = [0; 4];
        self.fill(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > SECTION_BYTES_MAX {
            return self.corrupt(format!("section of {length} bytes"));
        }
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(length, 0);
        self.fill(&mut payload)?;
        self.payload = payload;
        let mut checksum = [0; 8];
        self.fill(&mut checksum)?;
        if u64::from_le_bytes(checksum) != xxh3_64_with_seed(&self.payload, self.section) {
            return self.corrupt("checksum does not match");
        }
        self.section += 1;
        Ok(())
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), SnapshotError> {
        let read = self.input.read_exact(bytes);
        read.map_err(|error| self.fault(format!("read ownership: {error}")))?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn fault(&self, what: impl Into<String>) -> SnapshotError {
        SnapshotError {
            offset: self.start,
            what: what.into(),
        }
    }

    fn corrupt<T>(&self, what: impl Into<String>) -> Result<T, SnapshotError> {
        Err(self.fault(what))
    }
}

/// Reads fields one by one from a payload whose length has been checked.
struct Fields<'a>(std::cell::Cell<&'a [u8]>);

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self(std::cell::Cell::new(bytes))
    }

    fn bytes(&self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.get().split_at(count);
        self.0.set(rest);
        bytes
    }

    fn array<const N: usize>(&self) -> [u8; N] {
        self.bytes(N)
            .try_into()
            .expect("as many bytes as were asked for")
    }

    fn u8(&self) -> u8 {
        self.array::<1>()[0]
    }

    fn u16(&self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u40(&self) -> u64 {
        let mut bytes = [0; 8];
        bytes[..5].copy_from_slice(self.bytes(5));
        u64::from_le_bytes(bytes)
    }

    fn u64(&self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    fn u128(&self) -> u128 {
        u128::from_le_bytes(self.array())
    }
}
