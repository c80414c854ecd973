//! `quorate record`: records the requests of replicas, and merges their files. Also fetches the
//! last decisions of replicas, for `quorate simulate --from-decisions URL`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use api::files::recording::{self, Recording, RecordingWriter};
use http::Method;
use lab::terminal;
use serde_json::{Value, json};

use super::client::AdminTarget;
use super::table::cell;

/// Interval at which the end of the recordings is polled.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of decisions to fetch from each replica.
const DECISIONS_MAX: u32 = 10_000;

/// Arguments of `quorate record`.
#[derive(Debug, clap::Args)]
pub(super) struct RecordArgs {
    /// Length of the recording in seconds; Ctrl-C ends it earlier
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Requests after which a replica ends its recording
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Bytes of memory after which a replica ends its recording
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1024..=96 << 20))]
    bytes: u64,
    /// File to write, as JSON lines
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Record only at the replicas of `--admin`, not at all members
    #[arg(long)]
    only: bool,
    #[command(flatten)]
    target: AdminTarget,
    /// Print what was recorded as JSON
    #[arg(long)]
    json: bool,
}

/// A replica that records.
struct RecordingReplica {
    at: AdminTarget,
    replica: u64,
    /// Path of the replica's recording.
    path: String,
}

/// Runs `quorate record`. If some members cannot record, it reports them, records the others, and
/// fails.
pub(super) async fn run(args: RecordArgs) -> anyhow::Result<ExitCode> {
    let (replicas, mut missed) = begin(&args).await?;
    let ids: Vec<String> = replicas.iter().map(|it| it.replica.to_string()).collect();
    let (ids, seconds) = (ids.join(", "), args.seconds);
    eprintln!("replicas {ids} record for at most {seconds} s; Ctrl-C ends it");
    tokio::select! {
        biased;
        stopped = tokio::signal::ctrl_c() => {
            stopped.context("wait for Ctrl-C")?;
            for replica in &replicas {
                let path = format!("{}/stop", replica.path);
                replica.try_send(Method::POST, &path).await;
            }
        }
        () = ended(&replicas) => {}
    }
    let mut recordings = Vec::new();
    for replica in &replicas {
        match replica.fetch().await {
            Ok(recording) => recordings.push(recording),
            Err(error) => missed.push(format!("replica {}: {error:#}", replica.replica)),
        }
    }
    if recordings.is_empty() {
        bail!("nothing was recorded\n{}", missed.join("\n"));
    }
    let merged = recording::merge(recordings);
    let text = RecordingWriter::default().whole(&merged);
    let out = args.out.display();
    std::fs::write(&args.out, &text).with_context(|| format!("write {out}"))?;
    for replica in &replicas {
        replica.try_send(Method::DELETE, &replica.path).await;
    }
    let (requests, bytes) = (merged.requests.len(), text.len());
    terminal::print(match args.json {
        true => json!({
            "file": out.to_string(), "replicas": merged.head.replicas, "requests": requests,
            "bytes": bytes, "ended_by": merged.head.ended_by, "missed": missed,
        })
        .to_string(),
        false => format!("{requests} requests of replicas {ids} in {out}, {bytes} bytes"),
    })?;
    for why in &missed {
        eprintln!("not recorded: {why}");
    }
    Ok(match missed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Returns a target for the admin listener of each member but the first that responds.
async fn others(target: &AdminTarget) -> anyhow::Result<Vec<AdminTarget>> {
    let cluster = target.get("/admin/v1/cluster").await?;
    let own = cell(&cluster["id"]);
    let members = cluster["members"].as_object().into_iter().flatten();
    let others = members.filter(|(id, _)| **id != own);
    let urls = others.filter_map(|(_, member)| member["labels"]["admin"].as_str());
    Ok(urls.filter_map(|url| target.at(url).ok()).collect())
}

/// Starts a recording at each replica. Also returns the errors of the replicas that could not start
/// one.
async fn begin(args: &RecordArgs) -> anyhow::Result<(Vec<RecordingReplica>, Vec<String>)> {
    let spec = json!({
        "seconds": args.seconds, "requests": args.requests, "bytes": args.bytes, "salt": salt(),
    });
    let (mut begun, mut missed): (Vec<RecordingReplica>, _) = (Vec::new(), Vec::new());
    let members = match args.only {
        true => Vec::new(),
        // The first replica that responds knows the others.
        false => others(&args.target).await?,
    };
    for at in args.target.each().chain(members) {
        let replica = match at.get("/admin/v1/whoami").await {
            Ok(answer) => answer["replica"].as_u64().unwrap_or_default(),
            Err(error) => {
                missed.push(format!("{error:#}"));
                continue;
            }
        };
        if begun.iter().any(|known| known.replica == replica) {
            continue;
        }
        let started = at
            .send(Method::POST, "/admin/v1/recordings", Some(&spec))
            .await;
        match started {
            Ok(started) => begun.push(RecordingReplica {
                at,
                replica,
                path: format!("/admin/v1/recordings/{}", cell(&started["id"])),
            }),
            Err(error) => missed.push(format!("replica {replica}: {error:#}")),
        }
    }
    if begun.is_empty() {
        bail!("no replica records\n{}", missed.join("\n"));
    }
    Ok((begun, missed))
}

/// Returns once no replica that responds is still recording.
async fn ended(replicas: &[RecordingReplica]) {
    for replica in replicas {
        while replica.is_running().await {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}

impl RecordingReplica {
    async fn is_running(&self) -> bool {
        let list = self.at.get("/admin/v1/recordings").await;
        let list = list.unwrap_or_default();
        let all = list["recordings"].as_array();
        let is_own = |it: &&Value| it["path"] == *self.path && it["is_running"] == true;
        all.is_some_and(|all| all.iter().any(|it| is_own(&it)))
    }

    async fn fetch(&self) -> anyhow::Result<Recording> {
        read(&self.at.download(&self.path).await?)
    }

    /// Sends a request that may fail without affecting the recording. Only reports a failure.
    async fn try_send(&self, method: Method, path: &str) {
        if let Err(error) = self.at.send(method, path, None).await {
            eprintln!("replica {}: {error:#}", self.replica);
        }
    }
}

/// Fetches the last decisions of the replicas at `urls`, at most [`DECISIONS_MAX`] each, as one
/// recording. `urls` are separated by commas.
///
/// # Errors
/// Fails if any replica cannot be read.
pub(super) async fn last(target: &AdminTarget, urls: &str) -> anyhow::Result<Recording> {
    let path = format!(
        "/admin/v1/recordings/last?limit={DECISIONS_MAX}&salt={}",
        salt()
    );
    let mut all: Vec<Recording> = Vec::new();
    for url in urls.split(',') {
        let at = target
            .at(url)
            .map_err(|expected| anyhow!("{url}: {expected}"))?;
        let fetched = read(&at.download(&path).await?)?;
        // Two URLs may lead to the same replica.
        if !all
            .iter()
            .any(|it| it.head.replicas == fetched.head.replicas)
        {
            all.push(fetched);
        }
    }
    Ok(recording::merge(all))
}

fn read(text: &str) -> anyhow::Result<Recording> {
    recording::read(text).context("read the recording that came")
}

/// Returns a random salt for all replicas, so that their files can be merged.
fn salt() -> String {
    format!("{:032x}", rand::random::<u128>())
}
