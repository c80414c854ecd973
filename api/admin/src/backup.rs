//! `GET /admin/v1/cluster/backup`: the state as a file.
//!
//! The state is frozen after a read barrier, or without one for `?read=local`, and written while
//! the replica continues. At most a few chunks wait for the client. Meanwhile, each part of the
//! state that changes is kept twice. So a client that accepts nothing for [`SEND_TIMEOUT`] is
//! disconnected, and only one backup runs at a time.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::Deserialize;
use state::{FrozenState, RestoreView};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::answer::{QueryParams, ReadLevel, at_level};
use super::{Admin, AdminState};
use api::cluster::divergence::hex;
use api::error::Problem;
use api::files::backup::{BackupHead, BackupWriter, LengthCounter, file_bytes};

/// Maximum time for which a client may accept nothing.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of chunks waiting for the client.
const WAITING_MAX: usize = 2;

#[derive(Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct BackupQuery {
    /// State to answer from: `linearizable`, with everything that was committed before, or `local`,
    /// as applied here, for a cluster without a quorum. Default: `linearizable`.
    read: ReadLevel,
}

impl Default for BackupQuery {
    /// Returns [`ReadLevel::Linearizable`], because a backup must contain everything committed
    /// before the request. `local` is for a cluster that has lost its quorum.
    fn default() -> Self {
        let read = ReadLevel::Linearizable;
        Self { read }
    }
}

pub(super) async fn backup(
    State(shared): State<AdminState>,
    QueryParams(query): QueryParams<BackupQuery>,
) -> Result<BackupFile, Problem> {
    let Ok(turn) = Arc::clone(&shared.backups).try_acquire_owned() else {
        let (status, title) = (
            StatusCode::SERVICE_UNAVAILABLE,
            "another backup is in progress",
        );
        return Err(Problem::new(status, "limit", title).retry_after(5));
    };
    at_level(&shared, query.read).await?;
    let (frozen, mut head) = freeze(&shared)?;
    // The state is read once to determine its length, which takes a tenth of a second for ten
    // million blocks.
    let measuring = tokio::task::spawn_blocking(move || {
        let mut length = LengthCounter::default();
        frozen.write_to(&mut length).map(|()| (frozen, length.0))
    });
    let measured = measuring.await.map_err(io::Error::other);
    let (frozen, bytes) = measured.and_then(|it| it).map_err(|error| broken(&error))?;
    head.bytes = bytes;
    let length = file_bytes(&head).map_err(|error| broken(&error))?;
    tracing::info!(log_index = head.index, bytes = length, "backup started");
    Ok(BackupFile {
        length,
        index: head.index,
        body: send(frozen, head, turn),
    })
}

/// Response that contains a backup.
pub(super) struct BackupFile {
    /// Length of the file, in bytes.
    length: u64,
    /// Applied index of the state.
    index: u64,
    body: Body,
}

impl IntoResponse for BackupFile {
    fn into_response(self) -> Response {
        let name = format!("attachment; filename=\"quorate-{}.backup\"", self.index);
        let headers = [
            (
                CONTENT_TYPE,
                HeaderValue::from_static("application/octet-stream"),
            ),
            (CONTENT_LENGTH, HeaderValue::from(self.length)),
            (
                CONTENT_DISPOSITION,
                HeaderValue::from_str(&name).expect("a number within plain text"),
            ),
        ];
        (headers, self.body).into_response()
    }
}

/// Freezes the state between two applies. Fails during a restore, when the state is about to be
/// replaced.
fn freeze(admin: &Admin) -> Result<(FrozenState, BackupHead), Problem> {
    let status = admin.cluster.status();
    let mut found: Option<Result<(FrozenState, BackupHead), RestoreView>> = None;
    admin.cluster.with_state(&mut |state| {
        if let Some(restore) = state.restoring() {
            found = Some(Err(restore));
            return;
        }
        let frozen = state.freeze();
        let head = BackupHead {
            made_at_ms: admin.clock.unix_ms(),
            cluster: status.cluster_id.clone(),
            replica: status.id.0,
            version: status.version.to_owned(),
            index: frozen.applied().0,
            digest: hex(frozen.digest()),
            bytes: 0,
            backends: state.backends().count() as u64,
            users: state.users_len() as u64,
            blocks: state.owned_blocks_all(),
        };
        found = Some(Ok((frozen, head)));
    });
    let found = found.expect("the state was read");
    found.map_err(|restore| {
        Problem::new(
            StatusCode::CONFLICT,
            "restore-under-way",
            "a restore is in progress",
        )
        .detail(format!("it has received {} bytes so far", restore.bytes))
    })
}

fn broken(error: &io::Error) -> Problem {
    let status = StatusCode::INTERNAL_SERVER_ERROR;
    Problem::new(status, "backup", "the backup cannot be made").detail(error.to_string())
}

/// Returns a body to which another thread writes the backup at the client's pace.
fn send(frozen: FrozenState, head: BackupHead, turn: OwnedSemaphorePermit) -> Body {
    let (chunks, taken) = mpsc::channel::<io::Result<Bytes>>(WAITING_MAX);
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let out = BackupStream {
            chunks: chunks.clone(),
            runtime: runtime.clone(),
        };
        let written = BackupWriter::new(out, &head).and_then(|mut writer| {
            frozen.write_to(&mut writer)?;
            writer.finish()
        });
        if let Err(error) = written {
            tracing::warn!(log_index = head.index, %error, "could not send backup");
            // The client, if still there, must see that the file is incomplete.
            let told = tokio::time::timeout(SEND_TIMEOUT, chunks.send(Err(error)));
            drop(runtime.block_on(told));
        }
        drop(turn);
    });
    let stream = stream::unfold(taken, |mut taken| async move {
        let chunk = taken.recv().await?;
        Some((chunk, taken))
    });
    Body::from_stream(stream)
}

/// Writer that passes a backup to the client in chunks.
struct BackupStream {
    chunks: mpsc::Sender<io::Result<Bytes>>,
    runtime: Handle,
}

impl Write for BackupStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let chunk = Bytes::copy_from_slice(bytes);
        let sent = async { tokio::time::timeout(SEND_TIMEOUT, self.chunks.send(Ok(chunk))).await };
        match self.runtime.block_on(sent) {
            Ok(Ok(())) => Ok(bytes.len()),
            Ok(Err(_)) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
