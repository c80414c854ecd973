//! Faults that damage files. A replica must detect the damage at startup and never serve from such
//! files.
//!
//! The replica must refuse to start, and name the file and the position. The fault then follows the
//! advice in the replica's message: it sets the store aside, removes the member, and lets a replica
//! with another id join.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use http::Method;
use rand::Rng;
use rand::rngs::SmallRng;

use super::{FaultContext, members};

/// Number of damaged bytes in a log. Some may be in unused parts of the file.
const PLACES: usize = 32;
/// Text of the refusal before the position, which is in bytes.
const REFUSAL: &str = "is damaged at byte";

pub(super) async fn corrupt_log(stage: &mut FaultContext) -> anyhow::Result<()> {
    damage(stage, |folder, random| {
        let path = log_file(folder);
        let used = last_used(&path)?;
        for _ in 0..PLACES {
            change_byte(&path, random.random_range(0..used))?;
        }
        Ok(path)
    })
    .await
}

pub(super) async fn truncate_log(stage: &mut FaultContext) -> anyhow::Result<()> {
    damage(stage, |folder, random| {
        let path = log_file(folder);
        let used = last_used(&path)?;
        let kept = used * random.random_range(1..90) / 100;
        let file = OpenOptions::new().write(true).open(&path)?;
        file.set_len(kept)?;
        Ok(path)
    })
    .await
}

pub(super) async fn corrupt_snapshot(stage: &mut FaultContext) -> anyhow::Result<()> {
    damage(stage, |folder, random| {
        let path = snapshot_file(folder)?;
        let length = fs::metadata(&path)?.len();
        change_byte(&path, random.random_range(0..length))?;
        Ok(path)
    })
    .await
}

pub(super) async fn truncate_snapshot(stage: &mut FaultContext) -> anyhow::Result<()> {
    damage(stage, |folder, random| {
        let path = snapshot_file(folder)?;
        let length = fs::metadata(&path)?.len();
        let file = OpenOptions::new().write(true).open(&path)?;
        file.set_len(random.random_range(0..length))?;
        Ok(path)
    })
    .await
}

async fn damage(
    stage: &mut FaultContext,
    harm: impl FnOnce(&Path, &mut SmallRng) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<()> {
    let victim = stage.any();
    let path = "/admin/v1/cluster/snapshot";
    stage.cluster.send(victim, Method::POST, path, None).await?;
    stage.leave(victim).await?;
    let path = harm(&stage.cluster.data_dir(victim), &mut stage.random)?;
    let log_before = stage.cluster.log(victim)?.len();
    stage.cluster.start_replica(victim)?;
    let status = stage.cluster.ended(victim).await?;
    let said = stage.cluster.log(victim)?;
    let said = &said[log_before..];
    ensure!(
        !status.success() && said.contains(REFUSAL),
        "{} was damaged, and replica {} ended with {status}: {said}",
        path.display(),
        victim + 1
    );
    let others = stage.cluster.up();
    stage.served_by(&others).await?;
    stage.cluster.run_on(victim, "recover").await?;
    members::replace(stage, victim).await
}

fn log_file(folder: &Path) -> PathBuf {
    folder.join("raft").join("log").join("db")
}

fn snapshot_file(folder: &Path) -> anyhow::Result<PathBuf> {
    let folder = folder.join("raft").join("snapshots");
    let files = fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))?;
    let paths = files.flatten().map(|entry| entry.path());
    let snapshot = paths.max();
    snapshot.with_context(|| format!("no snapshot in {}", folder.display()))
}

fn change_byte(path: &Path, at: u64) -> anyhow::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    byte[0] ^= 0x55;
    file.write_all_at(&byte, at)?;
    Ok(())
}

/// Returns the position of the last byte of a file that is not zero.
fn last_used(path: &Path) -> anyhow::Result<u64> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let last = bytes.iter().rposition(|byte| *byte != 0);
    Ok(last.context("the log is empty")? as u64)
}
