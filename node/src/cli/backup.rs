//! `quorate backup` and `quorate restore`: saves a cluster's state to a file, and restores it.
//!
//! A backup gets its final name only once all of it is on disk and decodes to a state with the
//! digest that the replica reported. A file to restore is verified in the same way before the first
//! byte is sent. This takes as much memory as a replica's state.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, bail};
use api::files::backup::{BackupHead, FileReader};
use bytes::Bytes;
use futures_util::stream;
use http::{Method, Request};
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::{Frame, Incoming};
use indicatif::ProgressBar;
use lab::terminal;
use serde_json::Value;
use state::RouterState;
use tokio::io::AsyncReadExt;

use super::client::AdminTarget;
use crate::json_client::{JsonAnswer, no_answer};

/// Time without progress after which a transfer fails.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Size of the reads from the file, in bytes.
const READ_BYTES: usize = 256 << 10;

/// Arguments of `quorate backup`.
#[derive(Debug, clap::Args)]
pub(super) struct BackupArgs {
    /// File to write
    file: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    /// Back up this replica's own state, without a read barrier: for when the quorum is lost
    #[arg(long)]
    local: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: AdminTarget,
}

/// Arguments of `quorate restore`.
#[derive(Debug, clap::Args)]
pub(super) struct RestoreArgs {
    /// Backup to restore
    file: PathBuf,
    /// Replace the users and blocks that the cluster has
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: AdminTarget,
}

/// Runs `quorate backup`.
pub(super) async fn backup(args: BackupArgs) -> anyhow::Result<ExitCode> {
    let file = &args.file;
    if !args.force && file.exists() {
        bail!("{} already exists (--force replaces it)", file.display());
    }
    let unfinished = beside(file)?;
    args.target.select_replica(!args.local).await?;
    let made = fetch(&args, &unfinished).await;
    let made = match made {
        Ok(bytes) => verified(&unfinished).await.map(|head| (head, bytes)),
        Err(error) => Err(error),
    };
    let kept = made.and_then(|made| {
        std::fs::rename(&unfinished, file)
            .and_then(|()| sync_folder_of(file))
            .with_context(|| format!("name it {}", file.display()))?;
        Ok(made)
    });
    if kept.is_err() {
        // The file may not exist.
        std::fs::remove_file(&unfinished).ok();
    }
    let (head, bytes) = kept?;
    if args.json {
        terminal::print(serde_json::to_string(&head)?)?;
    } else {
        terminal::print(format_args!(
            "{}: {bytes} bytes, checked\n{}",
            file.display(),
            told(&head)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `quorate restore`.
pub(super) async fn restore(args: RestoreArgs) -> anyhow::Result<ExitCode> {
    let head = verified(&args.file).await?;
    args.target.select_replica(true).await?;
    let answer = send(&args).await?;
    if args.json {
        terminal::print(serde_json::to_string(&answer)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = |field: &str| match &answer[field] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    terminal::print(format_args!(
        "restored at log index {}\n{}\nthe cluster has {} backends, {} users, {} blocks\n\
         digest {} at index {}",
        text("index"),
        told(&head),
        text("backends"),
        text("users"),
        text("blocks"),
        text("digest"),
        text("applied_index"),
    ))?;
    if answer["api_keys"].as_u64().is_some_and(|keys| keys > 0) {
        terminal::print(format_args!(
            "{} API keys were restored, without those that this cluster knows to be revoked ({} keys); \
             `quorate key` shows them",
            text("api_keys"),
            text("revoked_api_keys"),
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Describes a backup as text.
fn told(head: &BackupHead) -> String {
    let made_at = UNIX_EPOCH.checked_add(Duration::from_millis(head.made_at_ms));
    let made_at = made_at.map_or_else(
        || format!("{} ms", head.made_at_ms),
        |at| humantime::format_rfc3339_seconds(at).to_string(),
    );
    let cluster = head.cluster.as_deref().unwrap_or("none");
    format!(
        "state of index {} of cluster {cluster}, made at {made_at} by replica {} ({})\n\
         {} backends, {} users, {} blocks, digest {}",
        head.index, head.replica, head.version, head.backends, head.users, head.blocks, head.digest
    )
}

/// Returns a temporary path in the folder of `file`, so that it can be renamed to `file`.
fn beside(file: &Path) -> anyhow::Result<PathBuf> {
    let name = file.file_name();
    let mut name = name
        .with_context(|| format!("{} names no file", file.display()))?
        .to_owned();
    name.push(format!(".{}.unfinished", std::process::id()));
    Ok(file.with_file_name(name))
}

/// Writes the replica's response to `path`, syncs it and returns its length.
async fn fetch(args: &BackupArgs, path: &Path) -> anyhow::Result<u64> {
    let level = if args.local { "local" } else { "linearizable" };
    let url = args
        .target
        .url(&format!("/admin/v1/cluster/backup?read={level}"));
    let client = args.target.connector()?.client();
    let mut request = Request::get(&url).body(Empty::<Bytes>::new())?;
    authorize(&args.target, &mut request)?;
    let response = tokio::time::timeout(IDLE_TIMEOUT, client.request(request)).await;
    let response = response
        .with_context(|| format!("GET {url}: no response in time"))?
        .map_err(|error| no_answer(&error))
        .with_context(|| format!("GET {url}"))?;
    let length = response.headers().get(http::header::CONTENT_LENGTH);
    let length: Option<u64> = length.and_then(|it| it.to_str().ok()?.parse().ok());
    if !response.status().is_success() {
        let problem = JsonAnswer::read(response).await;
        let problem = problem.and_then(|answer| answer.success());
        bail!(
            "GET {url}: {:#}",
            problem.expect_err("the status is not a success")
        );
    }
    let bar = bar("fetching", length.unwrap_or(0))?;
    // The file contains user names and the hash secret.
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("create {}", path.display()))?;
    let mut body = response.into_body();
    while let Some(bytes) = next_bytes(&mut body)
        .await
        .with_context(|| format!("GET {url}: the response broke off"))?
    {
        let written = tokio::task::spawn_blocking(move || {
            file.write_all(&bytes).map(|()| (file, bytes.len()))
        });
        let written = written
            .await?
            .with_context(|| format!("write {}", path.display()));
        let (back, taken) = written?;
        file = back;
        bar.inc(taken as u64);
    }
    let synced = tokio::task::spawn_blocking(move || file.sync_all()).await?;
    synced.with_context(|| format!("write {}", path.display()))?;
    bar.finish_and_clear();
    Ok(bar.position())
}

/// Adds the credentials for the replica to a request.
fn authorize<B>(target: &AdminTarget, request: &mut Request<B>) -> anyhow::Result<()> {
    if let Some(authorization) = target.authorization()? {
        let headers = request.headers_mut();
        headers.insert(http::header::AUTHORIZATION, authorization);
    }
    Ok(())
}

async fn next_bytes(body: &mut Incoming) -> anyhow::Result<Option<Bytes>> {
    loop {
        let frame = tokio::time::timeout(IDLE_TIMEOUT, body.frame()).await;
        match frame.context("no further data arrived in time")? {
            None => return Ok(None),
            Some(frame) => {
                if let Ok(bytes) = frame?.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

/// Reads a complete backup, verifies its state's digest, and returns its head.
async fn verified(path: &Path) -> anyhow::Result<BackupHead> {
    let opened = path.to_owned();
    let read = tokio::task::spawn_blocking(move || read_whole(&opened));
    read.await?.with_context(|| path.display().to_string())
}

fn read_whole(path: &Path) -> anyhow::Result<BackupHead> {
    let file = File::open(path)?;
    let bar = bar("checking", file.metadata()?.len())?;
    let file = bar.wrap_read(BufReader::with_capacity(READ_BYTES, file));
    let (mut reader, head) = FileReader::open(file)?;
    let mut state = RouterState::new();
    state.restore(&mut reader)?;
    let (index, digest) = (state.applied().0, format!("{:032x}", state.digest()));
    if (index, &digest) != (head.index, &head.digest) {
        let said = format!("index {} and digest {}", head.index, head.digest);
        bail!("its state has index {index} and digest {digest}, its header says {said}");
    }
    bar.finish_and_clear();
    Ok(head)
}

/// Sends the file and returns the replica's response.
async fn send(args: &RestoreArgs) -> anyhow::Result<Value> {
    let force = if args.force { "?force=true" } else { "" };
    let url = args
        .target
        .url(&format!("/admin/v1/cluster/restore{force}"));
    let file = tokio::fs::File::open(&args.file).await?;
    let bar = bar("sending", file.metadata().await?.len())?;
    let sent = bar.clone();
    let frames = stream::try_unfold(file, move |mut file| {
        let sent = sent.clone();
        async move {
            let mut bytes = vec![0; READ_BYTES];
            let read = file.read(&mut bytes).await?;
            bytes.truncate(read);
            sent.inc(read as u64);
            let frame = (read > 0).then(|| (Frame::data(Bytes::from(bytes)), file));
            Ok::<_, io::Error>(frame)
        }
    });
    let client = args.target.connector()?.client();
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(&url)
        .header(http::header::CONTENT_TYPE, "application/octet-stream")
        .body(StreamBody::new(Box::pin(frames)))?;
    authorize(&args.target, &mut request)?;
    let answer = async {
        let response = client
            .request(request)
            .await
            .map_err(|error| no_answer(&error))?;
        JsonAnswer::read(response).await?.success()
    };
    let answer = tokio::select! {
        answer = answer => answer,
        () = stalled(&bar) => Err(anyhow::anyhow!("no response in time")),
    };
    bar.finish_and_clear();
    answer.with_context(|| format!("POST {url}"))
}

/// Returns once nothing has been sent for [`IDLE_TIMEOUT`]. After the end of the file, this limits
/// the wait for the response.
async fn stalled(bar: &ProgressBar) {
    let mut position = None;
    while position != Some(bar.position()) {
        position = Some(bar.position());
        tokio::time::sleep(IDLE_TIMEOUT).await;
    }
}

/// Syncs the folder of a file, so that the file's name is on disk.
fn sync_folder_of(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Returns a progress bar over `bytes` bytes.
fn bar(what: &'static str, bytes: u64) -> anyhow::Result<ProgressBar> {
    let bar = terminal::progress_bar(bytes, terminal::BYTES)?;
    Ok(bar.with_prefix(format!("{what} ")))
}
