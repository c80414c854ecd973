//! Digest, snapshot and invariant of the followed backends.
//!
//! Taking an image clones one pointer per 1,024 blocks. The image is written in pieces: first
//! everything but the blocks, then the entries of each rank in storage order, one chunk per piece,
//! about 23 bytes per block. Derived data is rebuilt on restore.

use bincode::{Decode, Encode};

use crate::encoding;
use crate::ids::{BackendRef, BlockHash, EngineHash, Slot};
use crate::kv_events::entries::{CHUNK_ENTRIES, CachedBlock, CachedBlocks, NONE};
use crate::kv_events::followed::{FADING_STEPS_MAX, FollowedBackend, FollowedBackends};
use crate::kv_events::stream::{RankStream, StreamProgress};
use crate::kv_events::tiers::{LEVELS, LOWER_TIERS, TierIndexes};
use crate::kv_events::{KV_ENTRIES_MAX, KV_RANKS_MAX};

/// Content of one piece of an image.
#[derive(Encode, Decode)]
enum ImageSection {
    Heads(Vec<FollowedHeader>),
    Entries(Slot, u16, Vec<Option<SavedBlock>>),
}

/// A followed backend without its blocks.
#[derive(Clone, Encode, Decode)]
struct FollowedHeader {
    backend: BackendRef,
    is_reporting: bool,
    pending_releases: Vec<(u64, u64)>,
    ranks: Vec<(u16, StreamProgress)>,
}

/// An entry without the fields that [`FollowedBackends::finish_restore`] rebuilds.
#[derive(Encode, Decode)]
struct SavedBlock {
    engine: EngineHash,
    router: BlockHash,
    parent: Option<u32>,
    copies: u32,
    lower: [u8; LOWER_TIERS],
    flags: u8,
}

/// Frozen copy of the followed backends, unaffected by later changes.
pub(crate) struct FollowedImage {
    heads: Vec<FollowedHeader>,
    entries: Vec<(Slot, u16, CachedBlocks)>,
}

impl FollowedBackends {
    /// Appends the followed backends to the digest input.
    pub(crate) fn append_digest(&self, bytes: &mut Vec<u8>) {
        encoding::append_bytes(&self.followed.len(), bytes);
        for followed in self.followed.values() {
            encoding::append_bytes(&followed.head(), bytes);
            for stream in followed.ranks.values() {
                bytes.extend(stream.tree.sum().to_le_bytes());
            }
        }
    }

    pub(crate) fn freeze(&self) -> FollowedImage {
        let trees = self.followed.iter().flat_map(|(slot, followed)| {
            let ranks = followed.ranks.iter();
            ranks.map(|(rank, stream)| (*slot, *rank, stream.tree.entries.clone()))
        });
        FollowedImage {
            heads: self.followed.values().map(FollowedBackend::head).collect(),
            entries: trees.collect(),
        }
    }

    /// Adds the content of one piece.
    ///
    /// # Errors
    /// Describes the fault of the piece.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        match encoding::from_bytes::<ImageSection, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            ImageSection::Heads(heads) => heads
                .into_iter()
                .try_for_each(|head| self.restore_head(head)),
            ImageSection::Entries(slot, rank, saved) => {
                let followed = self.followed.get_mut(&slot);
                let stream = followed.and_then(|it| it.ranks.get_mut(&rank));
                let tree = &mut stream
                    .ok_or_else(|| format!("rank {rank} of slot {slot} is unknown"))?
                    .tree;
                self.entries += saved.len() as u64;
                if self.entries > 2 * KV_ENTRIES_MAX {
                    return Err(format!("more than {KV_ENTRIES_MAX} blocks"));
                }
                let mut saved = saved.into_iter();
                if saved.all(|it| tree.entries.push(it.map(SavedBlock::entry))) {
                    return Ok(());
                }
                Err(format!("rank {rank} of slot {slot} has too many blocks"))
            }
        }
    }

    fn restore_head(&mut self, head: FollowedHeader) -> Result<(), String> {
        let slot = head.backend.slot;
        let mut followed = FollowedBackend::new(head.backend);
        followed.is_reporting = head.is_reporting;
        followed.pending_releases = head.pending_releases.into();
        for (rank, progress) in head.ranks {
            followed
                .ranks
                .insert(rank, RankStream::of(slot, rank, progress));
        }
        if self.followed.insert(slot, followed).is_some() {
            return Err(format!("slot {slot} stands twice"));
        }
        Ok(())
    }

    /// Rebuilds derived data once all pieces are restored, and checks I22.
    ///
    /// # Errors
    /// Describes the first fault.
    pub(crate) fn finish_restore(&mut self) -> Result<(), String> {
        for followed in self.followed.values_mut() {
            let mut ranks = followed.ranks.values_mut();
            ranks.try_for_each(|stream| stream.tree.rebuild())?;
        }
        self.entries = self.followed.values().map(FollowedBackend::entries).sum();
        self.check()
    }

    /// Builds the indexes of the levels below the GPU, which follow from the blocks.
    pub(crate) fn tier_indexes(&self) -> TierIndexes {
        let mut tiers = TierIndexes::default();
        for (slot, followed) in &self.followed {
            for stream in followed.ranks.values() {
                let levels = stream.levels();
                for level in (1..LEVELS).filter(|level| levels[*level]) {
                    stream.tree.report_to(&mut tiers, *slot, level);
                }
            }
        }
        tiers
    }

    /// Checks I22: for each followed backend, the reported blocks are exactly those that a rank
    /// holds along with every block before them, and none while a rank is unknown. Counts, sums and
    /// bounds agree. An error describes the first violation.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut entries = 0;
        for (slot, followed) in &self.followed {
            entries += followed.entries();
            let is_known = followed.ranks.values().all(RankStream::is_known);
            let is_bounded = (1..=KV_RANKS_MAX).contains(&followed.ranks.len())
                && followed.pending_releases.len() <= FADING_STEPS_MAX
                && followed.pending_releases.iter().is_sorted();
            if *slot != followed.backend.slot || is_known != followed.is_reporting || !is_bounded {
                return Err(format!("slot {slot}: known {is_known}, or out of bounds"));
            }
            for (rank, stream) in &followed.ranks {
                let levels = stream.levels().map(|is_on| is_on && followed.is_reporting);
                let is_sound = stream.tree.check(levels);
                is_sound.map_err(|what| format!("rank {rank} of slot {slot}: {what}"))?;
                if !stream.is_known() && stream.tree.len() > 0 {
                    return Err(format!("rank {rank} of slot {slot} is unknown, not empty"));
                }
            }
        }
        if entries != self.entries || entries > KV_ENTRIES_MAX {
            return Err(format!("{entries} entries, counted {}", self.entries));
        }
        Ok(())
    }
}

impl FollowedBackend {
    fn head(&self) -> FollowedHeader {
        let ranks = self.ranks.iter();
        FollowedHeader {
            backend: self.backend,
            is_reporting: self.is_reporting,
            pending_releases: self.pending_releases.iter().copied().collect(),
            ranks: ranks
                .map(|(rank, stream)| (*rank, stream.progress.clone()))
                .collect(),
        }
    }
}

impl SavedBlock {
    fn of(entry: &CachedBlock) -> Self {
        Self {
            engine: entry.engine,
            router: entry.router,
            parent: (entry.parent != NONE).then_some(entry.parent),
            copies: entry.copies,
            lower: entry.lower,
            flags: entry.flags,
        }
    }

    fn entry(self) -> CachedBlock {
        CachedBlock {
            copies: self.copies,
            lower: self.lower,
            flags: self.flags,
            ..CachedBlock::new(self.engine, self.router, self.parent.unwrap_or(NONE))
        }
    }
}

impl FollowedImage {
    /// Encodes the image in pieces of bounded size. Yields none if no backend is followed.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        let heads = (!self.heads.is_empty())
            .then(|| encoding::to_bytes(&ImageSection::Heads(self.heads.clone())));
        let entries = self.entries.iter().flat_map(|(slot, rank, entries)| {
            let starts = (0..entries.len()).step_by(CHUNK_ENTRIES);
            starts.map(move |start| {
                let end = entries.len().min(start + CHUNK_ENTRIES as u32);
                let saved = (start..end).map(|index| entries.present(index).map(SavedBlock::of));
                encoding::to_bytes(&ImageSection::Entries(*slot, *rank, saved.collect()))
            })
        });
        heads.into_iter().chain(entries)
    }
}
