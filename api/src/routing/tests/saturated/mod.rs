//! Tests replicas with more requests than places: their queues, outboxes and reports to each other
//! run as in production, on a paused clock.

mod cluster;

use std::time::Duration;

use state::admission::{AdmissionSettings, Concurrency, Order};
use state::command::Command;

use self::cluster::{Filled, LIMIT, SaturatedCluster};

/// Settings that determine the order of requests.
#[derive(Debug, Clone, Copy)]
struct Rules(Order);

impl Rules {
    fn limited(self, limit: u32) -> AdmissionSettings {
        AdmissionSettings {
            concurrency: Concurrency::Fixed(limit),
            order: self.0,
            ..AdmissionSettings::default()
        }
    }
}

const VTC: Rules = Rules(Order::Vtc);
const FCFS: Rules = Rules(Order::Fcfs);
/// Minimum share of the limit's places in use under overload, in percent.
const FULL_PERCENT: u64 = 90;

/// A cluster with a number of clients at each replica.
#[derive(Debug, Clone, Copy)]
struct Case {
    rules: Rules,
    clients: [usize; 3],
    has_shares: bool,
}

const fn case(rules: Rules, clients: [usize; 3]) -> Case {
    Case {
        rules,
        clients,
        has_shares: true,
    }
}

impl Case {
    /// Runs the case and returns the observed use.
    async fn run(self) -> Filled {
        let settings = self.rules.limited(LIMIT);
        let cluster = SaturatedCluster::start(settings, self.has_shares).await;
        for (id, clients) in (1..).zip(self.clients) {
            cluster.come(id, clients);
        }
        let warm_up = cluster.watch(500).await;
        let seen = cluster.watch(1500).await;
        Filled {
            most: warm_up.most.max(seen.most),
            ..seen
        }
    }

    async fn is_held_and_full(self, percent: u64) {
        let seen = self.run().await;
        println!("{self:?}: {seen:?}");
        assert!(seen.most <= LIMIT, "{self:?}: {seen:?}");
        assert!(seen.percent >= percent, "{self:?}: {seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_is_never_exceeded_and_nearly_always_used() {
    let dlpm = Rules(Order::Dlpm);
    for case in [
        case(VTC, [8, 8, 8]),
        case(VTC, [1, 2, 20]),
        case(VTC, [0, 24, 0]),
        case(FCFS, [8, 8, 8]),
        case(FCFS, [24, 0, 0]),
        case(dlpm, [2, 2, 4]),
        case(dlpm, [1, 8, 8]),
    ] {
        case.is_held_and_full(FULL_PERCENT).await;
    }
}

/// Longest wait for a place that a peer holds, with reports that take a millisecond.
const PEER_PLACE_WAIT: Duration = Duration::from_millis(10);

#[tokio::test(start_paused = true)]
async fn requests_follow_their_prefix_through_any_replica_at_any_limit() {
    for limit in [1_u32, 2, 3, 6, 24] {
        for together in [1, limit.div_ceil(2), limit] {
            let settings = VTC.limited(limit);
            let cluster = SaturatedCluster::start_with(2, settings, true).await;
            let holder = cluster.burst(1, 1).await[0].0;
            for turn in 0..12 {
                // The last request's blocks are known to all by then.
                cluster.watch(50).await;
                let requests = usize::try_from(together).unwrap();
                for (slot, waited) in cluster.burst(1 + turn % 3, requests).await {
                    let case = format!("limit {limit}, {together} at once, turn {turn}");
                    assert_eq!(slot, holder, "{case}");
                    assert!(waited <= PEER_PLACE_WAIT, "{case}: {waited:?}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_place_that_no_peer_hands_over_is_not_awaited_for_long() {
    let cluster = SaturatedCluster::start_with(2, VTC.limited(1), true).await;
    let holder = cluster.burst(1, 1).await[0].0;
    cluster.watch(50).await;
    // The place stays with the replica that used it last, which hears of no demand.
    cluster.cut_off(1);
    let (slot, waited) = cluster.burst(2, 1).await[0];
    assert_ne!(slot, holder);
    assert!(waited <= Duration::from_millis(60), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn replicas_without_shares_exceed_the_limit() {
    for rules in [VTC, FCFS] {
        let apart = Case {
            has_shares: false,
            ..case(rules, [8, 8, 8])
        };
        let seen = apart.run().await;
        assert!(seen.most > LIMIT, "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_replicas_places_are_used_and_later_returned() {
    for rules in [VTC, FCFS] {
        let cluster = SaturatedCluster::start(rules.limited(LIMIT), true).await;
        (1..=3).for_each(|id| cluster.come(id, 8));
        cluster.watch(500).await;
        cluster.kill(3);
        let after = cluster.watch(1000).await;
        let without = cluster.watch(1000).await;
        cluster.start_again(3);
        cluster.come(3, 8);
        let back = cluster.watch(1000).await;
        let with = cluster.watch(1000).await;
        let most = [after, without, back, with].map(|it| it.most);
        assert_eq!(most, [LIMIT; 4], "{rules:?}");
        for seen in [without, with] {
            assert!(seen.percent >= FULL_PERCENT, "{rules:?}: {seen:?}");
        }
        // This is a third of the requests that six places serve in two seconds.
        let served = cluster.ended_at(3);
        assert!(served >= 12, "{rules:?}: {served}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_side_of_a_partition_has_the_whole_limit() {
    let cluster = SaturatedCluster::start(VTC.limited(LIMIT), true).await;
    (1..=3).for_each(|id| cluster.come(id, 8));
    cluster.watch(500).await;
    cluster.cut_off(3);
    let parted = cluster.watch(1500).await;
    assert_eq!(parted.most, 2 * LIMIT, "each side has all places");
    cluster.reunite();
    // The requests that each side had started end in the meantime.
    cluster.watch(1000).await;
    let whole = cluster.watch(1000).await;
    assert_eq!(whole.most, LIMIT);
    assert!(whole.percent >= FULL_PERCENT, "{whole:?}");
}

#[tokio::test(start_paused = true)]
async fn a_changed_limit_is_followed_at_once() {
    for rules in [VTC, FCFS] {
        let cluster = SaturatedCluster::start(rules.limited(LIMIT), true).await;
        (1..=3).for_each(|id| cluster.come(id, 8));
        cluster.watch(500).await;
        cluster.admin(Command::PutAdmission(rules.limited(2)));
        // Running requests finish.
        cluster.watch(300).await;
        let lower = cluster.watch(1000).await;
        assert_eq!(lower.most, 2, "{rules:?}");
        assert!(3 * lower.percent >= FULL_PERCENT, "{rules:?}: {lower:?}");
        cluster.admin(Command::PutAdmission(rules.limited(2 * LIMIT)));
        cluster.watch(300).await;
        let higher = cluster.watch(1000).await;
        assert_eq!(higher.most, 2 * LIMIT, "{rules:?}");
        assert!(higher.percent >= 2 * FULL_PERCENT, "{rules:?}: {higher:?}");
    }
}
