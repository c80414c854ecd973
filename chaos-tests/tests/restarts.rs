//! Three replicas and four engines as real processes: the leader is killed under load and
//! restarted, then all replicas are.
//!
//! No request may fail on a running replica, the replicas must end with one digest, and nothing may
//! stay in flight. Knowledge of the engines' caches must survive, so that the hit rate after the
//! full restart equals the one before. A last restart, with empty folders, shows that the hit rate
//! would reveal a loss.

use std::cell::Cell;
use std::time::Duration;

use chaos_tests::processes::{ClusterOptions, ProcessCluster, until};
use lab::replay::chats::{Chats, ChatsOptions};
use lab::replay::load::{LoadPlan, LoadProgress, LoadSource, run};
use lab::replay::report::LoadReport;
use lab::replay::targets::Targets;

/// Number of chats.
const CHATS: u32 = 120;
/// Turns of a chat. After as many rounds of all chats the load is stationary.
const TURNS: u32 = 4;
/// One turn of every chat: the requests over which a hit rate is measured after a restart. If the
/// index were lost, most of them would be misrouted; later ones profit from what was learned since.
const ROUND: u64 = CHATS as u64;
/// Rounds of the hit rate before the restart: each chat goes through all its turns twice.
const ROUNDS_BEFORE: u64 = 2 * TURNS as u64;
/// Number of concurrent requests: so few that affinity seldom yields to load.
const IN_FLIGHT: usize = 4;
/// Maximum loss of hit rate in a full restart. Rounds differ by a few points; without any knowledge
/// it falls by about thirty.
const HIT_RATE_LOSS_MAX: f64 = 0.15;

fn chats() -> Chats {
    Chats::new(ChatsOptions {
        users: 6,
        chats: CHATS,
        systems: 3,
        system_bytes: 512,
        message_bytes: 768,
        reply_tokens: 32,
        turns: TURNS,
        seed: 1,
    })
}

async fn load(
    targets: &Targets,
    chats: &mut Chats,
    requests: u64,
    on_progress: impl Fn(LoadProgress),
) -> LoadReport {
    let plan = LoadPlan {
        work: LoadSource::Chats { chats, requests },
        model: "emulated".to_owned(),
        speed: 1.0,
        in_flight_max: IN_FLIGHT,
        timeout: Duration::from_secs(60),
    };
    run(plan, targets, on_progress).await
}

/// Runs rounds of load until `is_over`. Returns how many requests were lost.
async fn load_until(
    targets: &Targets,
    chats: &mut Chats,
    ended: &Cell<u64>,
    is_over: &Cell<bool>,
) -> u64 {
    let mut lost = 0;
    while !is_over.get() {
        let before = ended.get();
        let report = load(targets, chats, 60, |progress| {
            ended.set(before + progress.ended);
        })
        .await;
        assert_eq!(report.total.failed, 0, "{:?}", report.errors);
        lost += report.total.lost;
    }
    lost
}

/// Waits until this many more requests have ended.
async fn after(ended: &Cell<u64>, more: u64) -> anyhow::Result<()> {
    let goal = ended.get() + more;
    until(&format!("{more} more requests end"), async || {
        Ok(ended.get() >= goal)
    })
    .await
}

/// Kills and restarts the leader under load, which the other two replicas serve meanwhile.
async fn kill_the_leader_under_load(
    cluster: &mut ProcessCluster,
    chats: &mut Chats,
) -> anyhow::Result<()> {
    let targets = cluster.targets();
    let (ended, is_over) = (Cell::new(0), Cell::new(false));
    let faults = async {
        after(&ended, 30).await?;
        let leader = cluster.leader().await?;
        cluster.kill(leader)?;
        after(&ended, 60).await?;
        assert_ne!(cluster.leader().await?, leader, "the dead lead");
        cluster.restart(&[leader]).await?;
        after(&ended, 60).await
    };
    let faults = async {
        let outcome = faults.await;
        is_over.set(true);
        outcome
    };
    let (outcome, lost) = tokio::join!(faults, load_until(&targets, chats, &ended, &is_over));
    outcome?;
    assert!(
        lost <= IN_FLIGHT as u64,
        "{lost} requests lost with one replica"
    );
    Ok(())
}

/// Whether the replicas keep their disks across the restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    Kept,
    Wiped,
}

/// Kills every replica during a load and restarts them. Returns the hit rate of the next `requests`
/// requests.
async fn restart_all_under_load(
    cluster: &mut ProcessCluster,
    chats: &mut Chats,
    disk: Disk,
    requests: u64,
) -> anyhow::Result<f64> {
    const BEFORE_THE_KILL: u64 = 60;
    let targets = cluster.targets();
    let latest = Cell::new(None::<LoadProgress>);
    let at_restart = Cell::new(None::<LoadProgress>);
    let faults = async {
        until("the load runs", async || {
            Ok(latest
                .get()
                .is_some_and(|progress| progress.ended >= BEFORE_THE_KILL))
        })
        .await?;
        let all: Vec<usize> = (0..cluster.replicas()).collect();
        for number in &all {
            cluster.kill(*number)?;
            if disk == Disk::Wiped {
                cluster.wipe(*number)?;
            }
        }
        at_restart.set(latest.get());
        cluster.restart(&all).await
    };
    let load = load(&targets, chats, BEFORE_THE_KILL + requests, |progress| {
        latest.set(Some(progress));
    });
    let (outcome, report) = tokio::join!(faults, load);
    outcome?;
    assert_eq!(report.total.failed, 0, "{:?}", report.errors);
    let from = at_restart.get().expect("the faults are through");
    let to = latest.get().expect("the load is through");
    let prompt_tokens = to.prompt_tokens - from.prompt_tokens;
    Ok((to.cached_tokens - from.cached_tokens) as f64 / prompt_tokens as f64)
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_replicas_fail_no_others_and_keep_their_knowledge() -> anyhow::Result<()> {
    let mut cluster = ProcessCluster::start(ClusterOptions::default()).await?;
    let mut chats = chats();
    let report = load(&cluster.targets(), &mut chats, TURNS as u64 * ROUND, |_| {}).await;
    assert_eq!(
        (report.total.failed, report.total.lost),
        (0, 0),
        "{:?}",
        report.errors
    );

    kill_the_leader_under_load(&mut cluster, &mut chats).await?;
    cluster.wait_idle().await?;
    cluster.check_digests().await?;

    let before = load(
        &cluster.targets(),
        &mut chats,
        ROUNDS_BEFORE * ROUND,
        |_| {},
    )
    .await;
    assert_eq!(
        (before.total.failed, before.total.lost),
        (0, 0),
        "{:?}",
        before.errors
    );
    let before = before
        .total
        .hit_rate
        .expect("engines tell what they cached");
    let after = restart_all_under_load(&mut cluster, &mut chats, Disk::Kept, ROUND).await?;
    assert!(
        after >= before - HIT_RATE_LOSS_MAX,
        "hit rate {before:.3}, then {after:.3}"
    );
    cluster.wait_idle().await?;
    cluster.check_digests().await?;

    let lost = restart_all_under_load(&mut cluster, &mut chats, Disk::Wiped, ROUND).await?;
    assert!(
        lost < before - HIT_RATE_LOSS_MAX,
        "nothing known, yet {before:.3}, then {lost:.3}"
    );
    cluster.stop();
    println!("hit rate {before:.4}; after a full restart {after:.4}; with empty folders {lost:.4}");
    Ok(())
}
