//! Streams go on when their engines or replicas are killed: bounded runs of the `engine-kills` program.

use anyhow::ensure;
use chaos_tests::processes::access::is_secure_by_default;
use chaos_tests::processes::engine_kills::{self, EngineKillsOptions, Victims};

#[tokio::test(flavor = "multi_thread")]
async fn clients_do_not_notice_killed_engines() -> anyhow::Result<()> {
    kill(Victims::Engines, 6).await
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_go_on_with_their_streams_when_replicas_are_killed() -> anyhow::Result<()> {
    kill(Victims::Replicas, 3).await
}

async fn kill(victims: Victims, kills: u32) -> anyhow::Result<()> {
    let options = EngineKillsOptions {
        victims,
        kills,
        clients: 6,
        engines: 3,
        seed: 3,
        is_secure: is_secure_by_default(),
    };
    let report = engine_kills::run(options, |_| {}).await?;
    ensure!(report.is_clean(), "{report:#?}");
    ensure!(report.hit > 0, "no stream was cut off: {report:#?}");
    Ok(())
}
