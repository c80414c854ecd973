//! Sends and receives a snapshot file as a stream of parts, each with a checksum.

use std::io::{self, Write};
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::links::{CallError, LinkLane, Peer};
use crate::determinism::blocking::BlockingMode;
use crate::locks::lock;
use crate::snapshot::{CHUNK_BYTES_MAX, SnapshotFile, SnapshotReader, SnapshotWriter};
use crate::types::SnapshotMeta;
use crate::wire::{MalformedMessageError, proto};

/// Maximum number of parts read ahead of the network.
const PARTS_MAX: usize = 4;
/// Maximum size of a received snapshot or state, in bytes.
const SNAPSHOT_BYTES_MAX: u64 = 16 << 30;
/// Timeout of a transfer. HTTP/2 pings end one without progress far earlier.
pub(super) const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(3600);

/// Fetches the current state of `peer`'s machine into `file`.
pub(crate) async fn fetch_state(
    peer: &Peer,
    file: &SnapshotFile,
    blocking: BlockingMode,
) -> Result<(), CallError> {
    let request = proto::FetchStateRequest {
        header: Some(peer.header()),
    };
    let call = peer.call(LinkLane::Bulk, SNAPSHOT_TIMEOUT, |mut client| async move {
        client.fetch_state(request).await
    });
    let mut parts = call.await?;
    let received = async {
        let start = first_part(&mut parts).await?;
        let meta = start
            .meta
            .ok_or(MalformedMessageError("a snapshot without meta"))?;
        write_parts(file, meta, parts, blocking).await
    };
    match timeout(SNAPSHOT_TIMEOUT, received).await {
        Ok(received) => received.map_err(CallError::Failed),
        Err(_) => Err(CallError::TimedOut(SNAPSHOT_TIMEOUT)),
    }
}

/// Reader that splits a snapshot file into parts.
pub(crate) struct PartReader {
    reader: SnapshotReader,
    /// Metadata of the snapshot.
    pub(crate) meta: SnapshotMeta,
    /// First part; `None` after it was returned.
    start: Option<proto::SnapshotStart>,
    is_ended: bool,
}

impl PartReader {
    /// Opens a file whose first part is `start`. Blocks.
    pub(crate) fn open(file: &SnapshotFile, mut start: proto::SnapshotStart) -> io::Result<Self> {
        let (reader, head) = SnapshotReader::open(file).map_err(io::Error::other)?;
        let meta: SnapshotMeta = head.clone().try_into().map_err(io::Error::other)?;
        start.meta = Some(head);
        Ok(Self {
            reader,
            meta,
            start: Some(start),
            is_ended: false,
        })
    }

    /// Returns the next part, or `None` after the last. Blocks.
    fn next(&mut self) -> io::Result<Option<proto::SnapshotPart>> {
        let some = |part| Ok(Some(proto::SnapshotPart { part: Some(part) }));
        if let Some(start) = self.start.take() {
            return some(proto::snapshot_part::Part::Start(start));
        }
        if self.is_ended {
            return Ok(None);
        }
        let chunk = self.reader.next_chunk()?;
        if chunk.is_empty() {
            self.is_ended = true;
            let (chunks, bytes) = self.reader.read_so_far();
            let end = proto::SnapshotEnd { chunks, bytes };
            return some(proto::snapshot_part::Part::End(end));
        }
        let crc = crc32fast::hash(chunk);
        let bytes = chunk.to_vec().into();
        some(proto::snapshot_part::Part::Chunk(proto::SnapshotChunk {
            bytes,
            crc,
        }))
    }

    /// Sends all parts to `parts`, reading slightly ahead of the receiver. Ends early if the
    /// receiver is gone.
    pub(crate) async fn send<T>(
        mut self,
        parts: &mpsc::Sender<T>,
        wrap: impl Fn(proto::SnapshotPart) -> T,
        blocking: BlockingMode,
    ) -> io::Result<()> {
        loop {
            let next = blocking.run(move || {
                let part = self.next();
                (self, part)
            });
            let (reader, part) = next.await?;
            let Some(part) = part? else { return Ok(()) };
            if parts.send(wrap(part)).await.is_err() {
                return Ok(());
            }
            self = reader;
        }
    }
}

/// Creates a channel for parts; its capacity limits the read-ahead.
pub(crate) fn channel<T>() -> (mpsc::Sender<T>, mpsc::Receiver<T>) {
    mpsc::channel(PARTS_MAX)
}

/// Receives the first part of a stream. Fails if another part comes first.
pub(crate) async fn first_part(
    parts: &mut Streaming<proto::SnapshotPart>,
) -> Result<proto::SnapshotStart, Status> {
    match parts.message().await?.and_then(|part| part.part) {
        Some(proto::snapshot_part::Part::Start(start)) => Ok(start),
        _ => Err(MalformedMessageError("a snapshot without start").into()),
    }
}

/// Writes all parts after the first to `file`. Removes the file if a part is damaged or missing.
pub(crate) async fn write_parts(
    file: &SnapshotFile,
    meta: proto::SnapshotMeta,
    parts: Streaming<proto::SnapshotPart>,
    blocking: BlockingMode,
) -> Result<(), Status> {
    let written = write_all(file, meta, parts, blocking).await;
    if written.is_err() {
        remove(file, blocking).await;
    }
    written
}

/// File that is being received. Dropping it removes the file, so that a cancelled call leaves none.
pub(crate) struct PartialFile(Option<SnapshotFile>);

impl PartialFile {
    pub(crate) fn new(file: SnapshotFile) -> Self {
        Self(Some(file))
    }

    /// Hands the complete file over to its user, so that dropping this does not remove it.
    pub(crate) fn hand_over(mut self) {
        self.0 = None;
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            file.remove();
        }
    }
}

/// Tracker of incoming snapshots. Only the newest one matters: the sender of an earlier one no
/// longer leads, or has given it up.
#[derive(Debug, Default)]
pub(crate) struct SnapshotInstalls(Mutex<CancellationToken>);

/// Transfer tracked by [`SnapshotInstalls`], until a newer one cancels it.
pub(crate) struct InstallTurn(CancellationToken);

impl SnapshotInstalls {
    /// Begins a transfer and cancels the previous one.
    pub(crate) fn begin(&self) -> InstallTurn {
        let turn = CancellationToken::new();
        let mut newest = lock(&self.0);
        std::mem::replace(&mut *newest, turn.clone()).cancel();
        InstallTurn(turn)
    }
}

impl InstallTurn {
    /// Waits until a newer transfer begins.
    pub(crate) async fn overtaken(&self) {
        self.0.cancelled().await;
    }
}

/// Removes `file`, if it exists.
pub(crate) async fn remove(file: &SnapshotFile, blocking: BlockingMode) {
    let file = file.clone();
    // If this fails, the next start removes the file.
    blocking.run(move || file.remove()).await.ok();
}

async fn write_all(
    file: &SnapshotFile,
    meta: proto::SnapshotMeta,
    mut parts: Streaming<proto::SnapshotPart>,
    blocking: BlockingMode,
) -> Result<(), Status> {
    let disk = |error: io::Error| Status::resource_exhausted(error.to_string());
    let refused = || Status::data_loss("snapshot parts are damaged or missing");
    let panicked = |error: io::Error| Status::aborted(error.to_string());
    let file = file.clone();
    let created = blocking.run(move || SnapshotWriter::create(&file, &meta));
    let mut writer = created.await.map_err(panicked)?.map_err(disk)?;
    let (mut chunks, mut bytes) = (0, 0);
    while let Some(part) = parts.message().await? {
        match part.part.ok_or_else(refused)? {
            proto::snapshot_part::Part::Chunk(chunk) => {
                let is_whole = crc32fast::hash(&chunk.bytes) == chunk.crc;
                if !is_whole || !(1..=CHUNK_BYTES_MAX).contains(&chunk.bytes.len()) {
                    return Err(refused());
                }
                chunks += 1;
                bytes += chunk.bytes.len() as u64;
                if bytes > SNAPSHOT_BYTES_MAX {
                    return Err(Status::out_of_range("a snapshot above the limit"));
                }
                let written = blocking.run(move || writer.write_all(&chunk.bytes).map(|()| writer));
                writer = written.await.map_err(panicked)?.map_err(disk)?;
            }
            proto::snapshot_part::Part::End(end) => {
                if (end.chunks, end.bytes) != (chunks, bytes) {
                    return Err(refused());
                }
                let finished = blocking.run(move || writer.finish());
                return finished.await.map_err(panicked)?.map_err(disk);
            }
            proto::snapshot_part::Part::Start(_) => return Err(refused()),
        }
    }
    Err(refused())
}
