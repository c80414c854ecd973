//! `POST /admin/v1/cluster/restore`: replaces the state with a backup.
//!
//! The file is read as it arrives, checked chunk by chunk and put into the log. Nothing changes
//! before the last part has arrived and the whole state has been read. Any replica can handle the
//! request. A client that leaves or sends damaged bytes aborts the restore. If the replica dies,
//! its parts are dropped a minute later.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request, State};
use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::command::{Command, Committed, RESTORE_BYTES_MAX, Rejection, Reply};
use state::ids::{LogIndex, RestoreId};
use tokio::time::Instant;

use super::answer::{QueryParams, WrittenWith, unsettled};
use super::origin::typed;
use super::problem::invalid;
use super::{Admin, AdminState};
use api::cluster::divergence::hex;
use api::error::Problem;
use api::files::backup::{BackupError, BackupHead, BackupPiece, BackupReader};
use api::ports::ProposeError;

/// Maximum time for which an uploading client may send nothing.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for which an unwanted body is read, so that its sender can read the response.
const UNWANTED_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for which a command of a restore is submitted again while the log is unavailable or the
/// outcome is unknown. All commands but the first are repeatable, and starting over would cost
/// more.
const AGAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two attempts at a command.
const AGAIN_PAUSE: Duration = Duration::from_millis(200);

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RestoreQuery {
    /// Whether to replace a state that is not empty.
    force: bool,
}

/// Content type of a backup.
pub(super) const BACKUP: &str = "application/octet-stream";

/// Extractor of an uploaded backup.
pub(super) struct BackupUpload(Body);

impl<S: Sync> FromRequest<S> for BackupUpload {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed(request.headers(), BACKUP)?;
        Ok(Self(request.into_body()))
    }
}

/// A completed restore.
#[derive(Serialize, JsonSchema)]
pub(super) struct RestoreResponse {
    /// Log index of the restore.
    index: LogIndex,
    outcome: &'static str,
    /// Header of the backup file.
    backup: BackupHead,
    /// Applied index of the following figures, at this replica.
    applied_index: u64,
    digest: String,
    backends: usize,
    users: usize,
    blocks: u64,
    /// Number of API keys after the restore, including expired ones.
    api_keys: usize,
    /// Number of API keys that are known to be revoked, and so were not restored.
    revoked_api_keys: usize,
}

pub(super) async fn restore(
    State(shared): State<AdminState>,
    QueryParams(query): QueryParams<RestoreQuery>,
    BackupUpload(body): BackupUpload,
) -> Result<WrittenWith<RestoreResponse>, Problem> {
    // A separate task handles the restore, and aborts it if the client leaves and this future is
    // dropped.
    let running = tokio::spawn(async move {
        let mut body = RestoreUpload {
            body,
            reader: BackupReader::default(),
        };
        let restored = run(&shared, query.force, &mut body).await;
        if restored.is_err() {
            body.drain().await;
        }
        restored
    });
    running.await.map_err(|_| {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Problem::new(status, "restore", "the restore failed")
    })?
}

async fn run(
    admin: &Admin,
    force: bool,
    body: &mut RestoreUpload,
) -> Result<WrittenWith<RestoreResponse>, Problem> {
    let head = match body.next().await? {
        BackupPiece::Head(head) => head,
        BackupPiece::Chunk(_) | BackupPiece::End => {
            return Err(invalid("body", "a backup begins with a head"));
        }
    };
    if !(1..=RESTORE_BYTES_MAX).contains(&head.bytes) {
        let found = format!("a state of {} bytes", head.bytes);
        return Err(invalid(
            "body",
            format!("{found}, expected 1 to {RESTORE_BYTES_MAX}"),
        ));
    }
    let restore = RestoreId(rand::random());
    let begin = Command::BeginRestore { restore, force };
    committed(admin, admin.cluster.submit(begin).await)?;
    tracing::info!(bytes = head.bytes, "restore started");
    let finished = match send(admin, restore, body).await {
        Ok(()) => finish(admin, restore, head).await,
        Err(problem) => Err(problem),
    };
    if finished.is_err() {
        // If this fails, the parts are dropped after a timeout.
        drop(
            admin
                .cluster
                .submit(Command::AbortRestore { restore })
                .await,
        );
    }
    finished
}

/// Puts all chunks of the upload into the log.
async fn send(admin: &Admin, restore: RestoreId, body: &mut RestoreUpload) -> Result<(), Problem> {
    let mut number = 0;
    loop {
        match body.next().await? {
            BackupPiece::Chunk(chunk) => {
                let part = Command::RestorePart {
                    restore,
                    number,
                    bytes: chunk.to_vec(),
                };
                committed(admin, again(admin, part).await)?;
                number += 1;
            }
            BackupPiece::End => return body.end().await,
            BackupPiece::Head(_) => return Err(invalid("body", "a second head")),
        }
    }
}

async fn finish(
    admin: &Admin,
    restore: RestoreId,
    backup: BackupHead,
) -> Result<WrittenWith<RestoreResponse>, Problem> {
    let bytes = backup.bytes;
    let finish = Command::FinishRestore { restore, bytes };
    let fate = committed(admin, again(admin, finish).await);
    // The restore is in the log. If it cannot be confirmed right now, the response shows what is
    // applied here.
    drop(admin.cluster.read_barrier().await);
    let index = match fate {
        Ok(index) => index,
        // An earlier attempt with an unknown outcome may have succeeded.
        Err(problem) => restored_at(admin, restore).ok_or(problem)?,
    };
    tracing::info!(
        log_index = index.0,
        from_index = backup.index,
        "state restored"
    );
    let mut restored = RestoreResponse {
        index,
        outcome: "committed",
        backup,
        applied_index: 0,
        digest: String::new(),
        backends: 0,
        users: 0,
        blocks: 0,
        api_keys: 0,
        revoked_api_keys: 0,
    };
    admin.cluster.with_state(&mut |state| {
        restored.applied_index = state.applied().0;
        restored.digest = hex(state.digest());
        restored.backends = state.backends().count();
        restored.users = state.users_len();
        restored.blocks = state.owned_blocks_all();
        restored.api_keys = state.api_keys_len();
        restored.revoked_api_keys = state.revoked_api_keys_len();
    });
    Ok(WrittenWith {
        index,
        body: restored,
    })
}

/// Submits a repeatable command until its outcome is known, for at most [`AGAIN_TIMEOUT`].
async fn again(admin: &Admin, command: Command) -> Result<Committed, ProposeError> {
    let end = Instant::now() + AGAIN_TIMEOUT;
    loop {
        match admin.cluster.submit(command.clone()).await {
            Err(ProposeError::Unknown(_) | ProposeError::Unavailable(_))
                if Instant::now() < end =>
            {
                tokio::time::sleep(AGAIN_PAUSE).await;
            }
            settled => return settled,
        }
    }
}

/// Returns the log index at which `restore` took effect, if the state still has its audit entry.
fn restored_at(admin: &Admin, restore: RestoreId) -> Option<LogIndex> {
    let mut index = None;
    admin
        .cluster
        .with_state(&mut |state| index = state.restored_at(restore));
    index
}

/// Returns the index at which a command of a restore took effect, or why it had no effect.
fn committed(admin: &Admin, fate: Result<Committed, ProposeError>) -> Result<LogIndex, Problem> {
    let Committed { index, reply } = fate.map_err(|failure| unsettled(admin, failure))?;
    let mut reply = reply;
    while let Reply::Repeated(first) = reply {
        reply = *first;
    }
    match reply {
        Reply::Rejected(Rejection::Invalid { field, expected }) => {
            Err(refused(&field, &expected).member("index", index.0))
        }
        Reply::Rejected(reject) => Err(super::answer::rejected(&reject)),
        Reply::Applied | Reply::Batch(_) | Reply::Repeated(_) => Ok(index),
    }
}

/// Returns the problem for a rejected command; `field` determines its status and title.
fn refused(field: &str, expected: &str) -> Problem {
    let (status, name, title) = match field {
        "force" => (
            StatusCode::CONFLICT,
            "not-empty",
            "the cluster is not empty",
        ),
        "restore" => (
            StatusCode::CONFLICT,
            "restore-under-way",
            "the restore cannot go on",
        ),
        _ => (
            StatusCode::BAD_REQUEST,
            "invalid",
            "the backup cannot be restored",
        ),
    };
    let detail = match (field, expected.split_once(", ")) {
        // The title states the condition; the detail adds the contents.
        ("force", Some((_, held))) => format!("{held}; with force the backup replaces them"),
        _ => format!("{field}: {expected}"),
    };
    let problem = Problem::new(status, name, title).detail(detail);
    problem.member("outcome", "rejected").member("field", field)
}

/// Reads and checks an uploaded backup.
struct RestoreUpload {
    body: Body,
    reader: BackupReader,
}

impl RestoreUpload {
    async fn next(&mut self) -> Result<BackupPiece, Problem> {
        loop {
            if let Some(piece) = self.reader.piece().map_err(|fault| damaged(&fault))? {
                return Ok(piece);
            }
            match self.receive().await? {
                Some(bytes) => self.reader.push(&bytes),
                None => {
                    let fault = self.reader.end().expect_err("no end was read");
                    return Err(damaged(&fault));
                }
            }
        }
    }

    /// Checks that no bytes follow the backup.
    async fn end(&mut self) -> Result<(), Problem> {
        while let Some(bytes) = self.receive().await? {
            self.reader.push(&bytes);
            self.reader.piece().map_err(|fault| damaged(&fault))?;
        }
        self.reader.end().map_err(|fault| damaged(&fault))
    }

    async fn receive(&mut self) -> Result<Option<Bytes>, Problem> {
        loop {
            match tokio::time::timeout(RECEIVE_TIMEOUT, self.body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => return Ok(Some(bytes)),
                    // Trailers carry no information here.
                    Err(_) => continue,
                },
                Ok(Some(Err(fault))) => return Err(invalid("body", fault.to_string())),
                Err(_) => {
                    return Err(Problem::new(
                        StatusCode::REQUEST_TIMEOUT,
                        "body-timeout",
                        "the backup did not arrive in time",
                    ));
                }
            }
        }
    }

    /// Reads and drops the rest of an unwanted body: a response before the end of the request would
    /// be lost with the connection.
    async fn drain(&mut self) {
        let all = async {
            while !self.body.is_end_stream() {
                if !matches!(self.body.frame().await, Some(Ok(_))) {
                    return;
                }
            }
        };
        // A client that sends for longer does not get the response.
        drop(tokio::time::timeout(UNWANTED_TIMEOUT, all).await);
    }
}

fn damaged(fault: &BackupError) -> Problem {
    invalid("body", fault.to_string()).member("offset", fault.offset)
}
