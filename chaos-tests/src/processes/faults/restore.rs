//! Fault in which all disks are lost and a backup is restored.

use anyhow::Context as _;

use super::{FaultContext, until};
use crate::processes::load::charged;

/// Takes a backup, wipes all replicas and restores it. Every replica must then report the charges
/// in the backup.
pub(super) async fn from_backup(stage: &mut FaultContext) -> anyhow::Result<()> {
    // Charges after the backup are lost with the disks, so the account ends at the backup.
    stage.load.rest().await?;
    stage.cluster.wait_idle().await?;
    let file = stage.cluster.folder().join("backup");
    let file = file.display().to_string();
    let first = *stage.cluster.up().first().context("nobody is up")?;
    let admin = stage.cluster.admin_url(first, "");
    stage
        .cluster
        .run(&["backup", &file, "--force", "--admin", &admin])
        .await?;
    let before = charged(&stage.cluster, first).await?;

    let all = stage.cluster.up();
    for number in &all {
        stage.cluster.kill(*number)?;
        stage.cluster.wipe(*number)?;
    }
    stage.cluster.refound(&all)?;
    stage.cluster.restart(&all).await?;
    let admin = stage.cluster.admin_url(all[0], "");
    stage
        .cluster
        .run(&["restore", &file, "--force", "--admin", &admin])
        .await?;
    // The other replicas apply the restore a moment later.
    for number in &all {
        let what = format!("replica {} counts as at the backup", number + 1);
        until(&what, async || {
            Ok(charged(&stage.cluster, *number).await? == before)
        })
        .await?;
    }
    Ok(())
}
