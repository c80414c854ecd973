//! Measures how long a cluster of three replicas has no leader after the leader dies. The replicas
//! run on loopback and sled, with heartbeats every 50 ms and election timeouts of 150 to 300 ms.
//! Run `cargo bench -p raft --bench failover`.

mod common;

use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

/// Number of leaders to kill.
const ROUNDS: usize = 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// Kills the leader and restarts it. Returns the times until a survivor followed a new leader with
/// a quorum, and until the survivor had a command committed.
async fn round(seats: &mut [common::Seat]) -> (Duration, Duration) {
    let old = common::leader(seats).await;
    let survivor = &seats[(old + 1) % seats.len()];
    let dying = seats[old].replica.clone();
    let old_id = seats[old].options.id;
    let began = Instant::now();
    let dead = tokio::spawn(async move { dying.crash().await });
    let led = async {
        survivor
            .wait(|status| status.leader.is_some_and(|id| id != old_id) && status.has_quorum)
            .await;
        began.elapsed()
    };
    let committed = async {
        // A command that the dying leader accepted may be lost with it.
        while survivor
            .replica
            .propose(vec![7; 64], PATIENCE)
            .await
            .is_err()
        {}
        began.elapsed()
    };
    let (led, committed) = tokio::join!(led, committed);
    dead.await.expect("a crash does not panic");
    seats[old].start_again().await;
    for seat in &*seats {
        seat.wait(|status| {
            let mut members = status.members.values();
            status.has_quorum && status.caught_up && members.all(|member| member.is_connected)
        })
        .await;
    }
    (led, committed)
}

fn main() {
    // `cargo bench` passes `--bench`. Without it this is a test run, where one round suffices.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let runtime = Runtime::new().expect("a runtime");
    let (mut led, mut committed): (Vec<_>, Vec<_>) = runtime.block_on(async {
        let timeout = Duration::from_millis(150)..Duration::from_millis(300);
        let mut seats = common::cluster(3, timeout).await;
        let mut times = Vec::new();
        for _ in 0..if is_bench { ROUNDS } else { 1 } {
            times.push(round(&mut seats).await);
        }
        for seat in seats {
            seat.replica.shutdown().await;
        }
        times.into_iter().unzip()
    });
    for (what, times) in [
        ("a new leader", &mut led),
        ("a command committed", &mut committed),
    ] {
        times.sort_unstable();
        println!(
            "{what} after: least {:?}, median {:?}, worst {:?} of {}",
            times[0],
            times[times.len() / 2],
            times[times.len() - 1],
            times.len()
        );
    }
}
