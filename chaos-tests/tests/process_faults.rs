//! A few faults that need no root, one after the other on three replicas under load, each followed by
//! every check. The others, and many of each, are done by the program `faults`.

use chaos_tests::processes::faults::{Kind, Stage, cluster_options_for};
use chaos_tests::processes::load::{Load, LoadOptions};
use chaos_tests::processes::{Cluster, Site};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

/// In this order: those that renumber replicas come last.
const KINDS: &[Kind] = &[
    Kind::PauseLeader,
    Kind::TransferLeader,
    Kind::AwayForSnapshot,
    Kind::RollingRestart,
    Kind::CorruptLog,
    Kind::TruncateSnapshot,
    Kind::JoinAndRemove,
];

/// Requests answered before the first fault.
const WARM_UP: u64 = 100;

#[tokio::test(flavor = "multi_thread")]
async fn faults_fail_nobody_else_and_leave_nothing_wrong() -> anyhow::Result<()> {
    let cluster = Cluster::start(cluster_options_for(Site::Loopback)).await?;
    let load = Load::start(&cluster, LoadOptions::default());
    load.after(WARM_UP).await?;
    let mut stage = Stage {
        cluster,
        load,
        random: SmallRng::seed_from_u64(6),
    };
    for kind in KINDS {
        let started = std::time::Instant::now();
        let outcome = stage.run(*kind).await;
        outcome.map_err(|error| error.context(kind.name()))?;
        println!("{}: {:?}", kind.name(), started.elapsed());
    }
    let book = stage.load.stop().await?;
    println!("{} requests answered, {} lost", book.answered, book.lost);
    stage.cluster.stop();
    Ok(())
}
