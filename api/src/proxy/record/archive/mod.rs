//! The archive: records of ended requests on disk, those of this replica and of its peers.
//!
//! A request hands its record to a bounded queue and is done. One task takes records from there,
//! waits for [`GATHER`] so that late reports are in them and several share a write, and appends
//! them to a ring of files ([`crate::files::ring`]). The same ring is the queue for peers: each peer
//! gets this replica's records in order, from where its own ring ends ([`sender`]). So every ring
//! holds the records of all replicas, and a dead replica's are found at the others (I162).
//!
//! Lost are the last [`GATHER`] of a replica that is killed, and what its peers did not yet have if
//! its disk is gone too. A full queue or an unwritable disk loses records, which is counted, and
//! never delays a request.

mod sender;
mod stored;

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use state::ids::ReplicaId;
use tokio::sync::{mpsc, watch};
use xxhash_rust::xxh3::xxh3_64;

use self::stored::PayloadHead;
use super::request_record::RequestRecord;
use crate::base::clock::Clock;
use crate::files::ring::{FrameRing, Frames, RingPosition, RingReader, RingSettings, push_frame};

/// Time from the first record of a batch to its write.
const GATHER: Duration = Duration::from_millis(100);
/// Maximum number of records that wait for the write.
const QUEUE_RECORDS_MAX: usize = 8192;
/// Maximum number of records in a batch.
const BATCH_RECORDS_MAX: usize = 1024;
/// Size from which on frames are written, or sent, without waiting for more, in bytes.
const BATCH_BYTES: usize = 512 << 10;

/// Reason of a loss: more requests end than are written.
const QUEUE_FULL: &str = "queue-full";
/// Reason of a loss: the disk fails, or the record is too long.
const DISK: &str = "disk";
/// All reasons, whose series exist from the start.
const LOSSES: [&str; 2] = [QUEUE_FULL, DISK];

/// Numbers of records that the archive has lost, by reason.
pub type LostRecords = Family<[(&'static str, &'static str); 1], Counter>;

/// Records of ended requests on disk. Except for [`DecisionArchive::offer`], its methods block.
pub(in crate::proxy) struct DecisionArchive {
    replica: ReplicaId,
    clock: Clock,
    settings: RingSettings,
    queue: mpsc::Sender<Arc<RequestRecord>>,
    /// The other end of the queue, until the archive runs.
    inbox: Mutex<Option<mpsc::Receiver<Arc<RequestRecord>>>>,
    open: Mutex<Option<OpenArchive>>,
    /// Place after the newest frame.
    end: watch::Sender<RingPosition>,
    /// Why the last access to the disk failed; `None` if it did not.
    fault: Mutex<Option<String>>,
    lost: LostRecords,
}

struct OpenArchive {
    ring: FrameRing,
    /// Places of the peers' archives up to which their records are here.
    heard: BTreeMap<ReplicaId, RingPosition>,
}

/// Size of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveSize {
    /// Size of its files, in bytes.
    pub bytes: u64,
    /// Maximum size of its files, in bytes.
    pub bytes_max: u64,
    /// Why the last access to the disk failed; `None` if it did not.
    pub fault: Option<String>,
}

impl DecisionArchive {
    pub(super) fn new(
        replica: ReplicaId,
        clock: Clock,
        settings: RingSettings,
        lost: LostRecords,
    ) -> Self {
        let (queue, inbox) = mpsc::channel(QUEUE_RECORDS_MAX);
        for reason in LOSSES {
            drop(lost.get_or_create(&[("reason", reason)]));
        }
        Self {
            replica,
            clock,
            settings,
            queue,
            inbox: Mutex::new(Some(inbox)),
            open: Mutex::default(),
            end: watch::Sender::default(),
            fault: Mutex::default(),
            lost,
        }
    }

    /// Queues the record of an ended request. Never waits.
    pub(super) fn offer(&self, record: &Arc<RequestRecord>) {
        if self.queue.try_send(Arc::clone(record)).is_err() {
            self.count_lost(QUEUE_FULL, 1);
        }
    }

    fn count_lost(&self, reason: &'static str, records: usize) {
        let lost = self.lost.get_or_create(&[("reason", reason)]);
        lost.inc_by(records as u64);
    }

    /// Writes records of this replica.
    fn store(&self, records: &[Arc<RequestRecord>]) {
        let (mut frames, mut payload) = (Vec::new(), Vec::new());
        let mut batch = Vec::new();
        for (at, record) in records.iter().enumerate() {
            payload.clear();
            stored::write(record, &mut payload);
            match push_frame(&mut frames, &payload) {
                true => batch.push(record),
                false => self.count_lost(DISK, 1),
            }
            let is_last = at + 1 == records.len();
            if frames.len() >= BATCH_BYTES || is_last {
                let appended = self.on_disk(|open| open.ring.append(&frames, self.now_s()));
                match appended {
                    Some(()) => batch
                        .iter()
                        .for_each(|it| it.is_archived.store(true, Relaxed)),
                    None => self.count_lost(DISK, batch.len()),
                }
                frames.clear();
                batch.clear();
            }
        }
    }

    /// Stores `frames` of the peer `from`, which follow the place `start` of its archive and end at
    /// `end`. Returns the place up to which the peer's records are here; `None` if the frames are
    /// not the peer's, or cannot be stored.
    pub(super) fn receive(
        &self,
        from: ReplicaId,
        (start, end): (RingPosition, RingPosition),
        frames: &[u8],
    ) -> Option<RingPosition> {
        let mut read = Frames::new(frames);
        let is_of_peer = read.by_ref().all(|payload| is_of(from, payload));
        if !is_of_peer || read.offset() < frames.len() || frames.len() > 2 * BATCH_BYTES {
            return None;
        }
        self.on_disk(|open| {
            let heard = open.heard.get(&from).copied().unwrap_or_default();
            // What lies between two places that do not meet is not here: the peer goes back.
            if frames.is_empty() || start != heard {
                return Ok(heard);
            }
            let mut mark = Vec::new();
            PayloadHead::Mark {
                peer: from,
                at: end,
            }
            .write(&mut mark);
            let mut batch = frames.to_vec();
            push_frame(&mut batch, &mark);
            open.ring.append(&batch, self.now_s())?;
            open.heard.insert(from, end);
            Ok(end)
        })
    }

    /// Returns frames with this replica's records after `position`, and the place after them.
    fn own_after(&self, position: RingPosition) -> Option<(Vec<u8>, RingPosition)> {
        let read = self.on_disk(|open| open.ring.after(position, BATCH_BYTES));
        let (frames, end) = read?;
        let mut own = Vec::with_capacity(frames.len());
        for payload in Frames::new(&frames).filter(|payload| is_of(self.replica, payload)) {
            push_frame(&mut own, payload);
        }
        Some((own, end))
    }

    /// Returns the newest record with this id, whichever replica made it.
    pub(super) fn find(&self, id: &[u8]) -> Option<RequestRecord> {
        let wanted = xxh3_64(id);
        let mut found = None;
        self.reading(|ring| {
            ring.newest(RingPosition::MAX, |_, payload| {
                let is_wanted = matches!(
                    PayloadHead::read(payload),
                    Some((PayloadHead::Record { id_hash, .. }, _)) if id_hash == wanted
                );
                if is_wanted {
                    let record = stored::read(payload);
                    found = record.filter(|record| record.id.as_bytes() == id);
                }
                match found {
                    Some(_) => ControlFlow::Break(()),
                    None => ControlFlow::Continue(()),
                }
            })
        });
        found
    }

    /// Returns at most `limit` of the newest `wanted` records before `before`, the newest first,
    /// with their places.
    pub(super) fn newest(
        &self,
        before: RingPosition,
        limit: usize,
        wanted: impl Fn(&RequestRecord) -> bool,
    ) -> Vec<(RingPosition, RequestRecord)> {
        let mut found = Vec::new();
        self.reading(|ring| {
            ring.newest(before, |at, payload| {
                if found.len() == limit {
                    return ControlFlow::Break(());
                }
                let record = stored::read(payload).filter(|record| wanted(record));
                found.extend(record.map(|record| (at, record)));
                ControlFlow::Continue(())
            })
        });
        found
    }

    pub(super) fn size(&self) -> ArchiveSize {
        let bytes = self.on_disk(|open| Ok(open.ring.bytes()));
        ArchiveSize {
            bytes: bytes.unwrap_or_default(),
            bytes_max: self.settings.bytes_max,
            fault: lock(&self.fault).clone(),
        }
    }

    /// Calls `read` with what the ring holds now. Writers do not wait for it.
    fn reading(&self, read: impl FnOnce(&RingReader) -> io::Result<()>) {
        let reader = self.on_disk(|open| Ok(open.ring.reader()));
        if let Some(reader) = reader
            && let Err(error) = read(&reader)
        {
            let folder = self.settings.folder.display();
            tracing::warn!(%folder, %error, "could not read past decisions");
        }
    }

    /// Calls `access`, and opens the archive first if necessary. Returns `None` if the disk fails,
    /// after logging that once.
    fn on_disk<T>(&self, access: impl FnOnce(&mut OpenArchive) -> io::Result<T>) -> Option<T> {
        let mut open = lock(&self.open);
        let result = match &mut *open {
            Some(open) => access(open),
            closed => self.opened().and_then(|it| access(closed.insert(it))),
        };
        if let Some(open) = &*open {
            let end = open.ring.end();
            self.end
                .send_if_modified(|known| std::mem::replace(known, end) != end);
        }
        let mut fault = lock(&self.fault);
        let folder = self.settings.folder.display();
        match (result, &*fault) {
            (Ok(value), None) => Some(value),
            (Ok(value), Some(_)) => {
                tracing::info!(%folder, "decisions are written again");
                *fault = None;
                Some(value)
            }
            (Err(error), was) => {
                if was.is_none() {
                    tracing::warn!(%folder, %error, "could not read or write past decisions");
                }
                *fault = Some(error.to_string());
                None
            }
        }
    }

    fn opened(&self) -> io::Result<OpenArchive> {
        let mut heard = BTreeMap::new();
        let (folder, bytes_max) = (&self.settings.folder, self.settings.bytes_max);
        let ring = FrameRing::open(folder, bytes_max, |payload| {
            if let Some((PayloadHead::Mark { peer, at }, _)) = PayloadHead::read(payload) {
                heard.insert(peer, at);
            }
        })?;
        Ok(OpenArchive { ring, heard })
    }

    fn now_s(&self) -> u32 {
        u32::try_from(self.clock.unix_ms() / 1000).unwrap_or(u32::MAX)
    }
}

/// Whether `payload` is the record of a request that `replica` received.
fn is_of(replica: ReplicaId, payload: &[u8]) -> bool {
    match PayloadHead::read(payload) {
        Some((PayloadHead::Record { replica: of, .. }, _)) => of == replica,
        Some((PayloadHead::Mark { .. }, _)) | None => false,
    }
}

/// Encodes the record for a peer that asks for it.
pub(super) fn to_bytes(record: &RequestRecord) -> Vec<u8> {
    let mut payload = Vec::new();
    stored::write(record, &mut payload);
    payload
}

/// Decodes what [`to_bytes`] returned; `None` if it is malformed.
pub(super) fn from_bytes(payload: &[u8]) -> Option<RequestRecord> {
    stored::read(payload)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
