//! Streams go on when their engines are killed: a bounded run of the `engine-kills` program.

use anyhow::ensure;
use chaos_tests::processes::access::is_secure_by_default;
use chaos_tests::processes::engine_kills::{self, EngineKillsOptions};

#[tokio::test(flavor = "multi_thread")]
async fn clients_do_not_notice_killed_engines() -> anyhow::Result<()> {
    let options = EngineKillsOptions {
        kills: 6,
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
