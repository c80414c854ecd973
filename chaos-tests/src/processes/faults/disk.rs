//! Faults of full and slow disks.
//!
//! The blkio controller of cgroup v1 slows a disk. It throttles the writes of the replica's process
//! to the device of its folder, and thus every sync of its log.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::linux::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::{FaultContext, last, members, system, until};
use crate::processes::until_within;

/// Number of bytes in a write that fills a disk.
const FILL_BYTES: usize = 64 * 1024;
/// Duration for which a disk is slow.
const LENGTH: Duration = Duration::from_secs(4);
/// Maximum time until a full disk stops the log, which first uses the space that purged entries left
/// in its files: nearly the whole disk after a fault with a large state.
const FILLED_WITHIN: Duration = Duration::from_secs(300);
/// Maximum number of writes per second to a slow disk.
const WRITES_PER_S: u32 = 10;
const BLKIO: &str = "/sys/fs/cgroup/blkio";
const WRITE_LIMIT: &str = "blkio.throttle.write_iops_device";

/// Returns the number of the replica with the small disk.
fn small(stage: &FaultContext) -> anyhow::Result<usize> {
    let small = stage.cluster.small_disk();
    small.context("no replica has a disk of its own")
}

/// Fills a replica's disk. The replica must report this and keep serving, while the others continue
/// without it. Once there is room, it must recover by itself, and its outbox must reach the log.
pub(super) async fn full(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = small(stage)?;
    if !stage.cluster.up().contains(&victim) {
        // An earlier fault removed the replica. Its place is the only free one, so it joins again.
        members::join_and_remove(stage).await?;
    }
    let ballast = stage.cluster.data_dir(victim).join("ballast");
    // Space that the log frees in the meantime is filled too.
    until_within(
        FILLED_WITHIN,
        "the replica finds its disk full",
        async || {
            fill(&ballast)?;
            let status = stage.status(victim).await?;
            ensure!(status["fault"].is_null(), "storage fault: {status}");
            Ok(!status["waiting"].is_null())
        },
    )
    .await?;
    let others = stage.others(victim);
    stage.leader_among(&others).await?;
    let all = stage.cluster.up();
    stage.served_by(&all).await?;
    fs::remove_file(&ballast).context("free the disk")?;
    until("the replica goes on by itself", async || {
        let status = stage.status(victim).await?;
        ensure!(status["fault"].is_null(), "storage fault: {status}");
        Ok(status["waiting"].is_null() && status["has_quorum"] == true)
    })
    .await
}

fn fill(ballast: &Path) -> anyhow::Result<()> {
    let mut file = File::options().create(true).append(true).open(ballast)?;
    let mut piece = vec![0_u8; FILL_BYTES];
    while !piece.is_empty() {
        if file.write_all(&piece).is_err() {
            piece.truncate(piece.len() / 2);
        }
    }
    Ok(())
}

/// Returns the reason why disks cannot be slowed here, or `None` if they can.
pub(super) fn why_not_slow() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("limits of a disk need root".to_owned());
    }
    let limit = Path::new(BLKIO).join("blkio.throttle.write_iops_device");
    (!limit.exists()).then(|| format!("no {}: cgroup v1 with blkio is used", limit.display()))
}

/// A group of processes whose writes are throttled until this is dropped.
struct SlowGroup(PathBuf);

impl SlowGroup {
    fn new(process: u32, folder: &Path) -> anyhow::Result<Self> {
        let group = Self(Path::new(BLKIO).join(format!("quorate-{}", std::process::id())));
        fs::create_dir_all(&group.0).context("make a cgroup")?;
        let device = whole_device(folder)?;
        fs::write(
            group.0.join(WRITE_LIMIT),
            format!("{device} {WRITES_PER_S}"),
        )
        .with_context(|| format!("limit the writes to {device}"))?;
        fs::write(group.0.join("cgroup.procs"), process.to_string()).context("slow it down")?;
        Ok(group)
    }
}

impl Drop for SlowGroup {
    fn drop(&mut self) {
        let processes = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        for process in processes.lines() {
            let _ = fs::write(Path::new(BLKIO).join("cgroup.procs"), process);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// Returns the device of a folder as `major:minor`. For a partition, that is its disk's device.
fn whole_device(folder: &Path) -> anyhow::Result<String> {
    let number = fs::metadata(folder)?.st_dev();
    let (major, minor) = (number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xfff00);
    ensure!(major > 0, "{} is on no block device", folder.display());
    let block = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let block = fs::canonicalize(&block).with_context(|| block.display().to_string())?;
    let disk = if block.join("partition").exists() {
        block.parent().unwrap_or(&block)
    } else {
        &block
    };
    let text = fs::read_to_string(disk.join("dev")).context("read the disk's number")?;
    Ok(text.trim().to_owned())
}

/// Slows the disk of a replica, if possible the leader's. All replicas must keep serving. A leader
/// with a slow disk may lose or keep its leadership.
pub(super) async fn slow(stage: &mut FaultContext) -> anyhow::Result<()> {
    let small = stage.cluster.small_disk();
    let mut candidates = stage.cluster.up();
    candidates.retain(|number| Some(*number) != small);
    let leader = stage.cluster.leader().await?;
    let victim = if candidates.contains(&leader) {
        leader
    } else {
        candidates[0]
    };
    let process = stage.cluster.process_id(victim);
    let process = process.context("it is up")?;
    // Flushes what the others wrote first.
    system(&["sync"])?;
    let group = SlowGroup::new(process, &stage.cluster.data_dir(victim))?;
    let all = stage.cluster.up();
    stage.served_by(&all).await?;
    last(LENGTH).await;
    stage.served_by(&all).await?;
    drop(group);
    stage.cluster.leader().await?;
    Ok(())
}
