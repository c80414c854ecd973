//! Bringing in a backup: the state of another cluster, or of this one at another time, in place of the
//! present one.
//!
//! The state in a backup comes in parts through the log and is kept aside until all of it is there.
//! Then one command reads it and, if it is whole, switches: on every replica at the same log index,
//! and with the same result, as nothing else is looked at. Until then the present state is what
//! counts, and a restore that ends early leaves nothing but that. The parts are in snapshots, so that
//! a replica may come in between.
//!
//! # What is taken over
//! Everything but these:
//! - *Sessions* stay those of the present replicas, whose next commands thus go on being told from
//!   repeats. What replicas of the backup's time had open is closed, as when a replica is gone: its
//!   leases are released, its requests end, nobody waits any more. What replicas of now have open was
//!   part of the state that goes; when it ends, nothing is found of it and nothing happens, except
//!   that tokens are charged to whoever used them.
//! - *Backends* begin new lives, other ones than any given out before or at the backup's time, with
//!   the blocks they had then. Leases, measurements and KV events of the lives before find nobody.
//!   Whether the engine still holds the blocks is learnt as after any absence: from a later start of it,
//!   from KV events (which are in doubt until their reader has caught up), from its answers.
//! - *Readers* of KV events: none, until the leader names some.
//! - *Time* is the later one of both.
//!
//! The hash seed is the backup's, as users and blocks go by it, and so is the secret. A backup without a
//! secret leaves the present cluster's: its blocks are then forgotten, as nobody hashes that way any more.
//!
//! # Bounds
//! [`RESTORE_BYTES_MAX`] for all parts together: so much memory it takes beside both states at the
//! switch. One restore at a time; one that is not heard of for [`RESTORE_IDLE_MS_MAX`] is over.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::time::ReplicatedTime;
use super::{AuditAction, AuditEntry, RouterState};
use crate::bounds::{NAME_BYTES_MAX, RESTORE_BYTES_MAX, RESTORE_PART_BYTES};
use crate::command::{Command, Origin};
use crate::encoding;
use crate::error::SnapshotError;
use crate::grants::WaitingList;
use crate::ids::{LogIndex, ReplicaId, RestoreId};
use crate::readers::Readers;
use crate::reject::Rejection;
use crate::validate::ensure;

/// A restore of which nothing was heard for so long, in replicated milliseconds, is over.
pub const RESTORE_IDLE_MS_MAX: u64 = 60_000;

/// Most parts there are.
const PARTS_MAX: u32 = RESTORE_BYTES_MAX.div_ceil(RESTORE_PART_BYTES as u64) as u32;

/// A restore that is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StagedRestore {
    restore: RestoreId,
    /// Replicated time of its last command.
    touched_ms: u64,
    parts: BTreeMap<u32, Arc<[u8]>>,
    /// Wrapping sum over the parts' hashes.
    sum: u64,
}

/// A restore that is under way, as the admin API shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct RestoreView {
    /// Which one.
    pub restore: RestoreId,
    /// Bytes of it that are there.
    pub bytes: u64,
}

/// All parts of a backup's state.
#[derive(Debug, Clone)]
pub struct StagedBackup {
    restore: RestoreId,
    sum: u64,
    parts: Vec<Arc<[u8]>>,
}

/// What [`StagedBackup::read`] found.
pub struct ReadBackup {
    restore: RestoreId,
    sum: u64,
    found: Result<Box<RouterState>, SnapshotError>,
}

impl StagedBackup {
    /// Reads the state. Takes seconds for millions of blocks and depends on the parts alone, so that it
    /// can be done beside the state that they are staged in.
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

/// Parts as one stream.
struct PartsReader<'a> {
    rest: &'a [Arc<[u8]>],
    /// Bytes given of the first.
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

    /// Takes a part; one that is there already has to be the same.
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

    /// All parts, which have to be `bytes` long together.
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

    /// What stands for it in the digest.
    pub(super) fn append_digest(&self, bytes: &mut Vec<u8>) {
        let parts = self.parts.len() as u64;
        let all = (self.restore, self.touched_ms, parts, self.bytes(), self.sum);
        encoding::append_bytes(&all, bytes);
    }

    /// Everything in it, encoded, in pieces of a bounded size.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        let head = encoding::to_bytes(&RestoreSection::Begun(self.restore, self.touched_ms));
        let parts = self.parts.iter();
        let parts = parts.map(|(number, part)| {
            encoding::to_bytes(&RestoreSection::Part(*number, part.to_vec()))
        });
        std::iter::once(head).chain(parts)
    }

    /// Takes one piece into `staged`; answers what is wrong with it.
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

/// What a section of a snapshot says of a restore.
#[derive(Encode, Decode)]
enum RestoreSection {
    Begun(RestoreId, u64),
    Part(u32, Vec<u8>),
}

impl RouterState {
    /// What `command` has to read before it can switch, if it can: to be read elsewhere while this state
    /// serves, and given to [`Self::prepare`].
    #[must_use]
    pub fn staged_backup(&self, command: &Command) -> Option<StagedBackup> {
        let Command::FinishRestore { restore, bytes } = command else {
            return None;
        };
        let staged = self.staged.as_ref().filter(|it| it.restore == *restore)?;
        staged.whole(*bytes).ok()
    }

    /// Spares the next command the reading. Changes nothing that can be seen: what was read follows from
    /// the parts alone, and that of other parts is not used.
    pub fn prepare(&mut self, backup: ReadBackup) {
        self.prepared = Some(backup);
    }

    /// The restore that is under way.
    #[must_use]
    pub fn restoring(&self) -> Option<RestoreView> {
        let staged = self.staged.as_ref()?;
        let (restore, bytes) = (staged.restore, staged.bytes());
        Some(RestoreView { restore, bytes })
    }

    /// Where in the log a restore took place, as far as the audit reaches back.
    #[must_use]
    pub fn restored_at(&self, restore: RestoreId) -> Option<LogIndex> {
        let name = format!("restore {restore}: ");
        let is_it = |entry: &&AuditEntry| {
            entry.action == AuditAction::Restore && entry.subject.starts_with(&name)
        };
        self.audit().find(is_it).map(|entry| entry.index)
    }

    /// Whether a backup may take this state's place unasked: there is nothing that traffic taught it.
    /// Backends and settings may be there, as the config of a new cluster puts them.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.len() == 0 && self.ownership.owned_total() == 0 && self.leases.len() == 0
    }

    /// Ends a restore that is not heard of.
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
        let backup = self.staged_as(restore)?.whole(bytes)?;
        let is_of = |read: &ReadBackup| (read.restore, read.sum) == (backup.restore, backup.sum);
        let read = prepared
            .filter(is_of)
            .unwrap_or_else(|| backup.read())
            .found;
        // Good or bad, the parts have served.
        self.staged = None;
        let fresh = read.map_err(|fault| unusable(fault.to_string()))?;
        if !fresh.config.initialised {
            return Err(unusable("it is of no cluster".to_owned()));
        }
        self.switch(origin, restore, *fresh);
        Ok(())
    }

    pub(super) fn abort_restore(&mut self, restore: RestoreId) {
        self.staged.take_if(|staged| staged.restore == restore);
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

    /// Takes over what a backup holds; see the module.
    fn switch(&mut self, origin: &Origin, restore: RestoreId, mut fresh: Self) {
        let (index, digest) = (fresh.applied, fresh.digest());
        let subject = format!("restore {restore}: index {index}, digest {digest:032x}");
        fresh.staged = None;
        // Before replicas are closed, as that hands grants on to who waits.
        fresh.waiting = WaitingList::default();
        let gone: Vec<ReplicaId> = fresh.sessions.iter().map(|(it, ..)| it).collect();
        for replica in gone {
            fresh.close_replica(replica);
        }
        fresh.sessions = std::mem::take(&mut self.sessions);
        fresh.backends.outlive(&self.backends);
        let backends = &fresh.backends;
        let handle = |slot| backends.in_slot(slot).map(|backend| backend.handle);
        fresh.exact.rename(handle);
        fresh.readers = Readers::default();
        let now_ms = fresh.time.now_ms.max(self.time.now_ms);
        fresh.time = ReplicatedTime {
            now_ms,
            ..self.time
        };
        fresh.follow_format();
        fresh.applied = self.applied;
        // Readers on other threads keep their handles.
        if fresh.hash_secret.is_none()
            && let Some(secret) = self.hash_secret.take()
        {
            fresh.hash_secret = Some(secret);
            fresh.forget_blocks();
        }
        let shown = std::mem::take(&mut self.ownership);
        let blocks = std::mem::replace(&mut fresh.ownership, shown);
        fresh.ownership.adopt(blocks);
        fresh.view = Arc::clone(&self.view);
        *self = fresh;
        self.note(origin, AuditAction::Restore, subject);
        self.is_outputs_changed = true;
        self.is_waiting_changed = true;
    }
}

impl RouterState {
    /// Forgets every block, and what was told of blocks by KV events.
    fn forget_blocks(&mut self) {
        let slots: Vec<_> = self.backends.iter().map(|it| it.handle.slot).collect();
        for slot in slots {
            self.exact.forget(slot);
            self.ownership.clear(slot, &mut Vec::new());
        }
    }
}

/// Refuses a backup; `why` is kept in a reply.
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
