//! Restoring a backup: replacing the current state with that of another cluster, or with an earlier
//! state of this cluster.
//!
//! The log carries the backup in parts, which are staged until all have arrived. One command then
//! reads them and, if they are intact, switches over. Every replica does this at the same log index
//! and with the same result, because nothing else is consulted. The current state applies until
//! then, and a restore that ends early changes nothing. Snapshots include staged parts, so that a
//! replica can join during a restore.
//!
//! # What is restored
//! The backup replaces everything except:
//! - *Sessions* remain those of the current replicas, whose next commands are still recognised as
//!   new or repeated. Everything open at the time of the backup is closed as if its replicas were
//!   lost: leases are released, requests end and waiting requests leave. What current replicas have
//!   open belonged to the replaced state. When it ends, it is not found and nothing happens, except
//!   that the tokens are charged to their users.
//! - *Backends* start new incarnations, different from all that were assigned here or before the
//!   backup, with the blocks they had then. Leases, measurements and KV events of earlier
//!   incarnations are dropped. As after any absence, the cluster learns whether the engine still
//!   holds the blocks: from a later start time of the engine, from KV events (in doubt until their
//!   reader has caught up), or from its responses.
//! - *Readers* of KV events are unassigned until the leader assigns them.
//! - *Time* is the later one of the two states; the calendar remains that of the current state.
//!
//! The hash seed and the secret are the backup's, because users and blocks are keyed by them.
//!
//! API keys are the backup's, but keys that ended in the current state stay ended: a revoked key is
//! not restored, and a rotated key keeps its current secrets.
//!
//! # Bounds
//! All parts together have at most [`RESTORE_BYTES_MAX`] bytes. A switch needs that much memory in
//! addition to both states. Only one restore runs at a time. A restore that is idle for
//! [`RESTORE_IDLE_MS_MAX`] is abandoned.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{AuditAction, AuditEntry, RouterState};
use crate::bounds::{NAME_BYTES_MAX, RESTORE_BYTES_MAX, RESTORE_PART_BYTES};
use crate::command::{Command, Origin};
use crate::encoding;
use crate::error::SnapshotError;
use crate::ids::{LogIndex, ReplicaId, RestoreId};
use crate::reader_assignment::Readers;
use crate::reject::Rejection;
use crate::validate::ensure;

/// Idle time after which a restore is abandoned, in milliseconds of replicated time.
pub const RESTORE_IDLE_MS_MAX: u64 = 60_000;

/// Maximum number of parts of a backup.
const PARTS_MAX: u32 = RESTORE_BYTES_MAX.div_ceil(RESTORE_PART_BYTES as u64) as u32;

/// A restore in progress, with the parts that have arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StagedRestore {
    restore: RestoreId,
    /// Replicated time of the restore's last command, in milliseconds.
    touched_ms: u64,
    parts: BTreeMap<u32, Arc<[u8]>>,
    /// Wrapping sum of the hashes of `parts`.
    sum: u64,
}

/// Progress of a restore, for the admin API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct RestoreView {
    /// Id of the restore.
    pub restore: RestoreId,
    /// Number of bytes received so far.
    pub bytes: u64,
}

/// A complete staged backup, ready to be read.
#[derive(Debug, Clone)]
pub struct StagedBackup {
    restore: RestoreId,
    sum: u64,
    parts: Vec<Arc<[u8]>>,
}

/// Result of [`StagedBackup::read`].
pub struct ReadBackup {
    restore: RestoreId,
    sum: u64,
    found: Result<Box<RouterState>, SnapshotError>,
}

impl StagedBackup {
    /// Reads the backed-up state. Takes seconds for millions of blocks. The result depends only on
    /// the parts, so another thread than that of `apply` can read them.
    #[must_use]
    pub fn read(&self) -> ReadBackup {
        let mut state = Box::new(RouterState::new());
        let mut parts = PartsReader {
            rest: &self.parts,
            given: 0,
        };
        let read = state.restore(&mut parts);
        ReadBackup {
            restore: self.restore,
            sum: self.sum,
            found: read.map(|()| state),
        }
    }
}

/// Reader of the parts as one stream.
struct PartsReader<'a> {
    rest: &'a [Arc<[u8]>],
    /// Number of bytes already read from the first part in `rest`.
    given: usize,
}

impl Read for PartsReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        while let Some((first, rest)) = self.rest.split_first() {
            let left = &first[self.given..];
            if left.is_empty() {
                (self.rest, self.given) = (rest, 0);
                continue;
            }
            let taken = left.len().min(out.len());
            out[..taken].copy_from_slice(&left[..taken]);
            self.given += taken;
            return Ok(taken);
        }
        Ok(0)
    }
}

impl StagedRestore {
    fn begun(restore: RestoreId, now_ms: u64) -> Self {
        Self {
            restore,
            touched_ms: now_ms,
            parts: BTreeMap::new(),
            sum: 0,
        }
    }

    fn bytes(&self) -> u64 {
        self.parts.values().map(|part| part.len() as u64).sum()
    }

    /// Adds a part. Rejects one that is out of bounds or differs from an earlier one of its number.
    fn take(&mut self, number: u32, bytes: Vec<u8>) -> Result<(), Rejection> {
        ensure(
            number < PARTS_MAX,
            "number",
            &format!("below {PARTS_MAX}, which are {RESTORE_BYTES_MAX} bytes"),
        )?;
        ensure(
            (1..=RESTORE_PART_BYTES).contains(&bytes.len()),
            "bytes",
            &format!("1 to {RESTORE_PART_BYTES} of them"),
        )?;
        if let Some(known) = self.parts.get(&number) {
            let expected = format!("what came as part {number} before");
            return ensure(**known == bytes, "bytes", &expected);
        }
        self.sum = self.sum.wrapping_add(hash(number, &bytes));
        self.parts.insert(number, bytes.into());
        Ok(())
    }

    /// Returns the backup if its parts are complete and add up to `bytes`.
    fn whole(&self, bytes: u64) -> Result<StagedBackup, Rejection> {
        let part_bytes = RESTORE_PART_BYTES as u64;
        for number in 0..bytes.div_ceil(part_bytes) {
            let expected = part_bytes.min(bytes - number * part_bytes);
            let part = u32::try_from(number).ok();
            let part = part.and_then(|number| self.parts.get(&number));
            let found = part.map_or(0, |part| part.len() as u64);
            let told = format!("part {number} of {expected} bytes, {found} are there");
            ensure(found == expected, "parts", &told)?;
        }
        let there = self.bytes();
        let told = format!("{there}, which are there");
        ensure(bytes > 0 && there == bytes, "bytes", &told)?;
        Ok(StagedBackup {
            restore: self.restore,
            sum: self.sum,
            parts: self.parts.values().cloned().collect(),
        })
    }

    /// Appends the restore to the digest input.
    pub(super) fn append_digest(&self, bytes: &mut Vec<u8>) {
        let parts = self.parts.len() as u64;
        let all = (self.restore, self.touched_ms, parts, self.bytes(), self.sum);
        encoding::append_bytes(&all, bytes);
    }

    /// Encodes the restore in sections of bounded size.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        let (restore, touched_ms) = (self.restore, self.touched_ms);
        let head = encoding::to_bytes(&RestoreSection::Begun(restore, touched_ms));
        let parts = self.parts.iter();
        let parts = parts.map(|(number, part)| {
            encoding::to_bytes(&RestoreSection::Part(*number, part.to_vec()))
        });
        std::iter::once(head).chain(parts)
    }

    /// Adds one section of a snapshot to `staged`. An error describes the fault.
    pub(super) fn restore_piece(staged: &mut Option<Self>, bytes: &[u8]) -> Result<(), String> {
        match (
            encoding::from_bytes::<RestoreSection, { encoding::SECTION_BYTES_MAX }>(bytes)?,
            staged,
        ) {
            (RestoreSection::Begun(restore, touched_ms), staged @ None) => {
                *staged = Some(Self::begun(restore, touched_ms));
                Ok(())
            }
            (RestoreSection::Part(number, part), Some(staged)) => {
                let taken = staged.take(number, part);
                taken.map_err(|reject| reject.to_string())
            }
            (RestoreSection::Begun(..), Some(_)) => Err("two restores are under way".to_owned()),
            (RestoreSection::Part(..), None) => Err("a part of no restore".to_owned()),
        }
    }
}

/// Content of one section of a snapshot that holds part of a restore.
#[derive(Encode, Decode)]
enum RestoreSection {
    Begun(RestoreId, u64),
    Part(u32, Vec<u8>),
}

impl RouterState {
    /// Returns the backup that `command` must read before it switches; `None` if the command would
    /// not switch. Read the backup on another thread and pass the result to [`Self::prepare`].
    #[must_use]
    pub fn staged_backup(&self, command: &Command) -> Option<StagedBackup> {
        let Command::FinishRestore { restore, bytes } = command else {
            return None;
        };
        let staged = self.staged.as_ref().filter(|it| it.restore == *restore)?;
        staged.whole(*bytes).ok()
    }

    /// Provides the result of reading a backup, so that the next [`Command::FinishRestore`] need
    /// not read it. Has no visible effect: the result follows from the parts, and that of other
    /// parts is ignored.
    pub fn prepare(&mut self, backup: ReadBackup) {
        self.prepared = Some(backup);
    }

    /// Returns the progress of the restore, if any.
    #[must_use]
    pub fn restoring(&self) -> Option<RestoreView> {
        let staged = self.staged.as_ref()?;
        let (restore, bytes) = (staged.restore, staged.bytes());
        Some(RestoreView { restore, bytes })
    }

    /// Returns the log index at which `restore` took effect, if the audit still has its entry.
    #[must_use]
    pub fn restored_at(&self, restore: RestoreId) -> Option<LogIndex> {
        let name = format!("restore {restore}: ");
        let is_it = |entry: &&AuditEntry| {
            entry.action == AuditAction::Restore && entry.subject.starts_with(&name)
        };
        self.audit().find(is_it).map(|entry| entry.index)
    }

    /// Whether a backup may replace this state without `force`: the state has no users, blocks,
    /// leases or API keys. It may have backends and settings, as in a new cluster.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.len() == 0
            && self.ownership.owned_total() == 0
            && self.leases.len() == 0
            && self.keys.is_empty()
    }

    /// Abandons the restore in progress if it has been idle for too long.
    pub(super) fn forget_idle_restore(&mut self) {
        let now_ms = self.time.now_ms;
        let is_idle = |it: &mut StagedRestore| now_ms - it.touched_ms > RESTORE_IDLE_MS_MAX;
        self.staged.take_if(is_idle);
    }

    pub(super) fn begin_restore(
        &mut self,
        restore: RestoreId,
        force: bool,
    ) -> Result<(), Rejection> {
        match &self.staged {
            Some(staged) if staged.restore == restore => return Ok(()),
            Some(staged) => {
                let (other, bytes) = (staged.restore, staged.bytes());
                let expected =
                    format!("no other one: {other} is under way, {bytes} bytes are there");
                return ensure(false, "restore", &expected);
            }
            None => {}
        }
        let (users, blocks) = (self.users.len(), self.ownership.owned_total());
        let expected = format!(
            "set: the cluster is not empty, {users} users and {blocks} blocks would be gone"
        );
        ensure(force || self.is_empty(), "force", &expected)?;
        self.staged = Some(StagedRestore::begun(restore, self.time.now_ms));
        Ok(())
    }

    pub(super) fn restore_part(
        &mut self,
        restore: RestoreId,
        number: u32,
        bytes: Vec<u8>,
    ) -> Result<(), Rejection> {
        let now_ms = self.time.now_ms;
        let staged = self.staged_as(restore)?;
        staged.take(number, bytes)?;
        staged.touched_ms = now_ms;
        Ok(())
    }

    pub(super) fn finish_restore(
        &mut self,
        origin: &Origin,
        restore: RestoreId,
        bytes: u64,
    ) -> Result<(), Rejection> {
        let prepared = self.prepared.take();
        let staged = self.staged_as(restore)?;
        let backup = staged.whole(bytes)?;
        let is_of = |read: &ReadBackup| (read.restore, read.sum) == (backup.restore, backup.sum);
        let read = prepared
            .filter(is_of)
            .unwrap_or_else(|| backup.read())
            .found;
        // The parts are discarded now, whether or not the backup is usable.
        self.staged = None;
        let fresh = read.map_err(|fault| unusable(fault.to_string()))?;
        if !fresh.config.initialised {
            return Err(unusable("it is of no cluster".to_owned()));
        }
        let mut fresh = *fresh;
        fresh.keys.keep_revocations(&self.keys);
        self.switch(origin, restore, fresh);
        Ok(())
    }

    pub(super) fn abort_restore(&mut self, restore: RestoreId) -> Result<(), Rejection> {
        self.staged.take_if(|staged| staged.restore == restore);
        Ok(())
    }

    fn staged_as(&mut self, restore: RestoreId) -> Result<&mut StagedRestore, Rejection> {
        let staged = self.staged.as_mut();
        staged
            .filter(|it| it.restore == restore)
            .ok_or_else(|| Rejection::Invalid {
                field: "restore".to_owned(),
                expected: "one that is under way: it was given up, or not heard of for a minute"
                    .to_owned(),
            })
    }

    /// Switches to the backed-up state `fresh`; see the module documentation.
    fn switch(&mut self, origin: &Origin, restore: RestoreId, mut fresh: Self) {
        let (index, digest) = (fresh.applied, fresh.digest());
        let subject = format!("restore {restore}: index {index}, digest {digest:032x}");
        fresh.staged = None;
        let gone: Vec<ReplicaId> = fresh.sessions.iter().map(|(it, ..)| it).collect();
        for replica in gone {
            fresh.close_replica(replica);
        }
        fresh.sessions = std::mem::take(&mut self.sessions);
        fresh.backends.advance_incarnations_past(&self.backends);
        let backends = &fresh.backends;
        let handle = |slot| backends.in_slot(slot).map(|backend| backend.handle);
        fresh.exact.rename(handle);
        fresh.readers = Readers::default();
        fresh.time = self.time.at_least(fresh.time.now_ms);
        fresh.stamped_ms = self.stamped_ms;
        fresh.applied = self.applied;
        // Readers on other threads keep their handles to the view.
        let shown = std::mem::take(&mut self.ownership);
        let blocks = std::mem::replace(&mut fresh.ownership, shown);
        fresh.ownership.adopt(blocks);
        fresh.show_tiers(std::mem::take(&mut self.tiers));
        fresh.view = Arc::clone(&self.view);
        *self = fresh;
        self.resize_unknown_capacities();
        self.note(origin, AuditAction::Restore, subject);
        self.is_outputs_changed = true;
        self.is_ratios_changed = true;
        self.is_capacity_changed = true;
        self.keys.replaced();
        self.users.replaced();
    }
}

/// Returns the rejection of an unusable backup. Truncates `why`, which the reply keeps.
fn unusable(mut why: String) -> Rejection {
    why.truncate(why.floor_char_boundary(2 * NAME_BYTES_MAX));
    Rejection::Invalid {
        field: "backup".to_owned(),
        expected: format!("a whole one: {why}"),
    }
}

fn hash(number: u32, bytes: &[u8]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(&xxh3_64(bytes).to_le_bytes());
    hasher.digest()
}
