//! Snapshots: frozen in microseconds, written while `apply` runs, and fully verified when read.
//!
//! # Format, version 1 (integers little-endian)
//! Header: magic `QUORATES`, version `u16`, applied index `u64`, digest `u128`, `xxh3_64` of these.
//!
//! Sections: tag `u8`, payload length `u32`, payload, `xxh3_64` of tag, length and payload. Large
//! parts (users, leases, API keys, KV-event state, a restore in progress) are split into sections
//! of bounded size. Every other part, such as config, backends or audit, has one. An end section
//! closes the list. Ownership follows in a format of its own (state/src/ownership/snapshot.rs), up
//! to the end of the stream.
//!
//! A length allocates no memory before its bytes have arrived.
//!
//! A restored state must have the digest in the header. This detects missing, duplicated and
//! swapped sections as well as faults in derived data.

mod tag;

use std::io::{Read, Write};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::RouterState;
use super::leases::LeasesImage;
use super::restoring::StagedRestore;
use crate::encoding;
use crate::error::SnapshotError;
use crate::ids::LogIndex;
use crate::keys::{KeysImage, RevokedKeys};
use crate::kv_events::FollowedImage;
use crate::kv_events::tiers::TierIndexes;
use crate::ownership::FrozenOwnership;
use crate::streams::StreamsView;
use crate::trees::TreesImage;
use crate::usage::UsageView;
use crate::users::UsersImage;

/// Version of the snapshot format.
pub const SNAPSHOT_VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"QUORATES";
const HEADER_BYTES: usize = 8 + 2 + 8 + 16;
/// Maximum length of the payload of one section, in bytes.
const SECTION_BYTES_MAX: u32 = encoding::SECTION_BYTES_MAX as u32;

/// A frozen image of a state, ready to be written.
pub struct FrozenState {
    applied: LogIndex,
    digest: u128,
    /// Tags and payloads of the small sections.
    small: Vec<(u8, Vec<u8>)>,
    leases: LeasesImage,
    users: UsersImage,
    exact: FollowedImage,
    keys: KeysImage,
    revoked: RevokedKeys,
    trees: TreesImage,
    streams: StreamsView,
    usage: UsageView,
    staged: Option<StagedRestore>,
    ownership: FrozenOwnership,
}

impl FrozenState {
    /// Returns the index of the last log entry that the image includes.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        self.applied
    }

    /// Returns the digest of the frozen state.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.digest
    }

    /// Writes the snapshot in the format that the module documentation describes.
    ///
    /// # Errors
    /// If writing to `out` fails.
    pub fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        out.write_all(&self.header())?;
        for (tag, payload) in &self.small {
            write_section(out, *tag, payload)?;
        }
        for piece in self.leases.pieces() {
            write_section(out, tag::LEASES, &piece)?;
        }
        write_section(out, tag::USERS_TOTALS, &self.users.totals())?;
        for piece in self.users.pieces() {
            write_section(out, tag::USERS, &piece)?;
        }
        for piece in self.exact.pieces() {
            write_section(out, tag::EXACT, &piece)?;
        }
        for piece in self.staged.iter().flat_map(StagedRestore::pieces) {
            write_section(out, tag::RESTORE, &piece)?;
        }
        for piece in self.keys.pieces() {
            write_section(out, tag::KEYS, &piece)?;
        }
        for piece in self.revoked.pieces() {
            write_section(out, tag::REVOKED_KEYS, &piece)?;
        }
        for piece in self.trees.trees() {
            write_section(out, tag::TREES, &piece)?;
        }
        for piece in self.trees.sessions() {
            write_section(out, tag::TREE_SESSIONS, &piece)?;
        }
        if let Some(endings) = self.trees.endings() {
            write_section(out, tag::TREE_ENDINGS, &endings)?;
        }
        for piece in self.streams.pieces() {
            write_section(out, tag::STREAMS, &piece)?;
        }
        write_section(out, tag::USAGE_TOTALS, &self.usage.totals())?;
        for piece in self.usage.source_pieces() {
            write_section(out, tag::USAGE_SOURCES, &piece)?;
        }
        for piece in self.usage.row_pieces() {
            write_section(out, tag::USAGE, &piece)?;
        }
        write_section(out, tag::END, &[])?;
        self.ownership.write_to(out)
    }

    fn header(&self) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(SNAPSHOT_VERSION.to_le_bytes());
        header.extend(self.applied.0.to_le_bytes());
        header.extend(self.digest.to_le_bytes());
        header.extend(xxh3_64(&header).to_le_bytes());
        header
    }
}

impl RouterState {
    /// Freezes the current state in microseconds. Another thread can write the image while `apply`
    /// continues.
    #[must_use]
    pub fn freeze(&self) -> FrozenState {
        FrozenState {
            applied: self.applied,
            digest: self.digest(),
            small: self.small_sections(),
            leases: self.leases.freeze(),
            users: self.users.freeze(),
            exact: self.exact.freeze(),
            keys: self.keys.freeze(),
            revoked: self.keys.revoked().clone(),
            trees: self.trees.freeze(),
            streams: self.streams.published(),
            usage: self.usage.published(),
            staged: self.staged.clone(),
            ownership: self.ownership.freeze(),
        }
    }

    /// Encodes the parts that have one section each.
    fn small_sections(&self) -> Vec<(u8, Vec<u8>)> {
        vec![
            (tag::CONFIG, encoding::to_bytes(&self.config)),
            (tag::SETTINGS, encoding::to_bytes(&self.settings)),
            (tag::TIME, encoding::to_bytes(&self.time)),
            (tag::SESSIONS, encoding::to_bytes(&self.sessions)),
            (tag::AUDIT, encoding::to_bytes(&self.audit)),
            (tag::BACKENDS, encoding::to_bytes(&self.backends)),
            (tag::DISCOVERED, encoding::to_bytes(&self.discovered)),
            (tag::BLOCK_SIZES, encoding::to_bytes(&self.block_sizes)),
            (tag::READERS, encoding::to_bytes(&self.readers)),
            (tag::SERVICE, encoding::to_bytes(&self.service)),
            (tag::ASSUMED, encoding::to_bytes(&self.assumed)),
            (tag::BELIEFS, encoding::to_bytes(&self.beliefs)),
            (tag::OUTPUTS, encoding::to_bytes(&self.outputs)),
            (tag::RATIOS, encoding::to_bytes(&self.ratios)),
            (tag::CAPACITY, encoding::to_bytes(&self.capacity)),
        ]
    }

    /// Replaces the whole state with that of a snapshot that [`FrozenState::write_to`] wrote.
    ///
    /// # Errors
    /// Describes the fault and its offset. The state is then unchanged.
    pub fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError> {
        let mut input = CountingReader {
            inner: snapshot,
            offset: 0,
        };
        let (applied, digest) = input.header()?;
        let mut fresh = Self::new();
        fresh.applied = applied;
        input.sections(&mut fresh)?;
        fresh
            .finish_exact()
            .and_then(|()| fresh.trees.check_trees())
            .map_err(|what| input.fault(input.offset, what))?;
        fresh.cold_digest = fresh.hash_cold();

        let before = self.ownership.freeze();
        let base = input.offset;
        let read = self
            .ownership
            .restore_reported(&mut input, &|slot| fresh.exact.reports(0, slot))
            .map_err(|fault| SnapshotError {
                offset: base + fault.offset,
                what: fault.what,
            });
        read?;
        std::mem::swap(&mut fresh.ownership, &mut self.ownership);
        let outcome = input
            .end()
            .and_then(|()| fresh.confirm(digest, input.offset));
        if let Err(fault) = outcome {
            // The previous ownership is restored behind the same view.
            std::mem::swap(&mut fresh.ownership, &mut self.ownership);
            let mut bytes = Vec::new();
            before
                .write_to(&mut bytes)
                .expect("writing into memory cannot fail");
            self.ownership
                .restore_reported(&mut &*bytes, &|slot| self.exact.reports(0, slot))
                .expect("what was written can be read");
            return Err(fault);
        }
        fresh.show_tiers(std::mem::take(&mut self.tiers));
        fresh.view = std::sync::Arc::clone(&self.view);
        *self = fresh;
        self.cold_changed();
        self.is_service_changed = false;
        self.view.publish_service(self.service_view());
        self.view.publish_outputs(self.outputs.view());
        self.view.publish_keys(self.keys.view());
        self.users.replaced();
        self.publish_for_policies();
        let nothing = crate::kv_events::EvictionsView::default();
        self.view.publish_evictions(nothing);
        self.publish_evictions();
        self.publish_users();
        self.view.publish_ratios(self.ratios.view());
        self.view.publish_capacity(self.capacity.view());
        self.trees.replaced();
        self.publish_trees();
        self.streams.replaced();
        self.publish_streams();
        self.usage.replaced();
        self.publish_usage();
        self.view.publish_time(self.time.now_ms);
        self.view.publish_applied(applied);
        Ok(())
    }

    /// Derives the indexes of lower tiers and shows them to the readers of `shown`.
    pub(super) fn show_tiers(&mut self, shown: TierIndexes) {
        self.tiers = shown;
        self.tiers.adopt(self.exact.tier_indexes());
    }

    /// Derives the KV-event state that an image omits. An error describes the first fault.
    fn finish_exact(&mut self) -> Result<(), String> {
        self.exact.finish_restore()?;
        let mut followed = self.exact.conditions();
        match followed.find(|(backend, _)| !self.backends.is_live(*backend)) {
            Some((backend, _)) => Err(format!("{backend:?} is followed and not there")),
            None => Ok(()),
        }
    }

    /// Checks that the digest of the restored state is `digest`, that of the frozen state.
    fn confirm(&self, digest: u128, offset: u64) -> Result<(), SnapshotError> {
        let own = self.digest();
        if own == digest {
            return Ok(());
        }
        let what = format!("its state has the digest {own:032x}, {digest:032x} expected");
        Err(SnapshotError { offset, what })
    }

    fn restore_section(&mut self, tag: u8, payload: &[u8]) -> Result<(), String> {
        match tag {
            tag::CONFIG => {
                self.config = section(payload)?;
                self.config.validate()?;
            }
            tag::BACKENDS => {
                self.backends = section(payload)?;
                self.backends.check()?;
                self.backends.check_ranks()?;
            }
            tag::SESSIONS => self.sessions = section(payload)?,
            tag::AUDIT => self.audit = section(payload)?,
            tag::LEASES => self.leases.restore_piece(payload)?,
            tag::USERS_TOTALS => self.users.restore_totals(payload)?,
            tag::USERS => self.users.restore_piece(payload)?,
            tag::SETTINGS => {
                self.settings = section(payload)?;
                self.settings.validate()?;
            }
            tag::READERS => self.readers = section(payload)?,
            tag::SERVICE => self.service = section(payload)?,
            tag::OUTPUTS => self.outputs = section(payload)?,
            tag::EXACT => self.exact.restore_piece(payload)?,
            tag::TIME => self.time = section(payload)?,
            tag::ASSUMED => self.assumed = section(payload)?,
            tag::BELIEFS => self.beliefs = section(payload)?,
            tag::BLOCK_SIZES => {
                self.block_sizes = section(payload)?;
                self.block_sizes.check(&self.backends)?;
            }
            tag::RATIOS => {
                self.ratios = section(payload)?;
                self.ratios.check()?;
            }
            tag::CAPACITY => {
                self.capacity = section(payload)?;
                self.capacity.check()?;
            }
            tag::KEYS => self.keys.restore_piece(payload)?,
            tag::REVOKED_KEYS => self.keys.restore_revoked(payload)?,
            tag::DISCOVERED => {
                self.discovered = section(payload)?;
                let is_taken = |slot| self.backends.in_slot(slot).is_some();
                self.discovered.check(is_taken)?;
            }
            tag::TREES => self.trees.restore_trees(payload)?,
            tag::TREE_SESSIONS => self.trees.restore_sessions(payload)?,
            tag::TREE_ENDINGS => self.trees.restore_endings(payload)?,
            tag::STREAMS => self.streams.restore_piece(payload)?,
            tag::USAGE_TOTALS => self.usage.restore_totals(payload)?,
            tag::USAGE_SOURCES => self.usage.restore_sources(payload)?,
            tag::USAGE => self.usage.restore_piece(payload)?,
            tag::RESTORE => StagedRestore::restore_piece(&mut self.staged, payload)?,
            _ => return Err(format!("no section has the tag {tag}")),
        }
        Ok(())
    }
}

/// Decodes the payload of a section.
fn section<T: bincode::Decode<()>>(payload: &[u8]) -> Result<T, String> {
    encoding::from_bytes::<T, { encoding::SECTION_BYTES_MAX }>(payload)
}

fn write_section(out: &mut dyn Write, tag: u8, payload: &[u8]) -> std::io::Result<()> {
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|length| *length <= SECTION_BYTES_MAX)
        .ok_or_else(|| std::io::Error::other(format!("section {tag} is {} long", payload.len())))?;
    out.write_all(&[tag])?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(payload)?;
    out.write_all(&checksum(tag, length, payload).to_le_bytes())
}

fn checksum(tag: u8, length: u32, payload: &[u8]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&[tag]);
    hasher.update(&length.to_le_bytes());
    hasher.update(payload);
    hasher.digest()
}

/// A reader that counts the bytes read.
struct CountingReader<'a> {
    inner: &'a mut dyn Read,
    offset: u64,
}

impl Read for CountingReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.offset += read as u64;
        Ok(read)
    }
}

impl CountingReader<'_> {
    fn header(&mut self) -> Result<(LogIndex, u128), SnapshotError> {
        let header: [u8; HEADER_BYTES] = self.array("header")?;
        let checksum = u64::from_le_bytes(self.array("header's checksum")?);
        let (magic, rest) = header.split_at(MAGIC.len());
        let (version, rest) = rest.split_at(2);
        let (applied, digest) = rest.split_at(8);
        if magic != MAGIC {
            return Err(self.fault(0, "this is not a snapshot of a router's state"));
        }
        let version = u16::from_le_bytes(version.try_into().expect("two bytes were split off"));
        if version != SNAPSHOT_VERSION {
            let expected = format!("format version {version}, {SNAPSHOT_VERSION} expected");
            return Err(self.fault(MAGIC.len() as u64, expected));
        }
        if xxh3_64(&header) != checksum {
            return Err(self.fault(HEADER_BYTES as u64, "the header's checksum does not match"));
        }
        let applied = u64::from_le_bytes(applied.try_into().expect("eight bytes were split off"));
        let digest = u128::from_le_bytes(digest.try_into().expect("sixteen bytes are left"));
        Ok((LogIndex(applied), digest))
    }

    /// Reads all sections up to the end section into `state`.
    fn sections(&mut self, state: &mut RouterState) -> Result<(), SnapshotError> {
        loop {
            let start = self.offset;
            let [tag] = self.array("section's tag")?;
            let length = u32::from_le_bytes(self.array("section's length")?);
            if length > SECTION_BYTES_MAX {
                let expected = format!("section of {length} bytes, {SECTION_BYTES_MAX} at most");
                return Err(self.fault(start, expected));
            }
            let mut payload = Vec::new();
            let read = self
                .by_ref()
                .take(u64::from(length))
                .read_to_end(&mut payload);
            if read.map_err(|error| self.fault(start, error))? < length as usize {
                return Err(self.fault(self.offset, "the snapshot ends within a section"));
            }
            let expected = u64::from_le_bytes(self.array("section's checksum")?);
            if checksum(tag, length, &payload) != expected {
                return Err(self.fault(start, "the section's checksum does not match"));
            }
            if tag == tag::END && payload.is_empty() {
                return Ok(());
            }
            state
                .restore_section(tag, &payload)
                .map_err(|what| self.fault(start, what))?;
        }
    }

    /// Checks that the stream ends at the current offset.
    fn end(&mut self) -> Result<(), SnapshotError> {
        let offset = self.offset;
        match self.inner.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(self.fault(offset, "bytes follow the end of the snapshot")),
            Err(error) => Err(self.fault(offset, error)),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], SnapshotError> {
        let mut bytes = [0; N];
        self.read_exact(&mut bytes)
            .map_err(|error| self.fault(self.offset, format!("{what}: {error}")))?;
        Ok(bytes)
    }

    fn fault(&self, offset: u64, what: impl std::fmt::Display) -> SnapshotError {
        SnapshotError {
            offset,
            what: what.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::ClusterConfig;
    use crate::pricing::FairnessSettings;

    #[test]
    fn settings_out_of_bounds_are_refused() {
        // Charging multiplies by prices without checking for overflow.
        let fairness = FairnessSettings {
            input_price: u32::MAX,
            output_price: u32::MAX,
        };
        let config = ClusterConfig {
            fairness,
            ..ClusterConfig::default()
        };
        let payload = encoding::to_bytes(&config);
        let refused = RouterState::new().restore_section(tag::CONFIG, &payload);
        assert_eq!(
            refused,
            Err("fairness.input_price: at most 1000".to_owned())
        );
    }
}
