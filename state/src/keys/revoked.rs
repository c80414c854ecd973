//! Ids of revoked keys, kept so that restoring an earlier backup does not bring the keys back. If
//! there are too many, the table forgets the one revoked first.

use xxhash_rust::xxh3::xxh3_128;

use crate::cow::CowMap;
use crate::encoding;
use crate::ids::ApiKeyId;

/// Maximum number of ids in one section of a snapshot.
const IDS_PER_PIECE: usize = 65_536;

/// Table of revoked keys, with the Unix time of each revocation in milliseconds.
#[derive(Clone)]
pub(crate) struct RevokedKeys {
    since: CowMap<ApiKeyId, u64>,
    /// Wrapping sum of the entries' hashes.
    digest: u128,
    ids_max: usize,
}

impl RevokedKeys {
    pub(super) fn with_max(ids_max: usize) -> Self {
        Self {
            since: CowMap::new(),
            digest: 0,
            ids_max,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.since.len()
    }

    pub(super) fn contains(&self, id: ApiKeyId) -> bool {
        self.since.get(&id).is_some()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ApiKeyId, u64)> {
        self.since.iter().map(|(id, at_ms)| (*id, *at_ms))
    }

    /// Adds a key revoked at `at_ms`, unless it is known. Forgets the first one beyond the maximum.
    pub(super) fn insert(&mut self, id: ApiKeyId, at_ms: u64) {
        if !self.since.insert_new(id, at_ms) {
            return;
        }
        self.digest = self.digest.wrapping_add(hash(id, at_ms));
        if self.since.len() > self.ids_max {
            let first = self.iter().min_by_key(|(id, at_ms)| (*at_ms, *id));
            if let Some((id, at_ms)) = first {
                self.since.remove(&id);
                self.digest = self.digest.wrapping_sub(hash(id, at_ms));
            }
        }
    }

    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    /// Encodes all ids in sections of bounded size. Yields none if the table is empty.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.iter(), IDS_PER_PIECE)
    }

    /// Adds the ids of one section of a snapshot. An error describes the fault.
    pub(super) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(ApiKeyId, u64)>;
        for (id, at_ms) in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            if self.contains(id) || self.since.len() >= self.ids_max {
                return Err(format!("revoked key {id} stands twice, or is one too many"));
            }
            self.insert(id, at_ms);
        }
        Ok(())
    }

    /// Whether the digest matches the ids and their number is within its bound.
    pub(super) fn is_sound(&self) -> bool {
        let sum = |sum: u128, (id, at_ms)| sum.wrapping_add(hash(id, at_ms));
        self.iter().fold(0, sum) == self.digest && self.since.len() <= self.ids_max
    }
}

fn hash(id: ApiKeyId, at_ms: u64) -> u128 {
    xxh3_128(&encoding::to_bytes(&(id, at_ms)))
}
