//! Three replicas and four small engines as real processes: a greedy user at one replica against a
//! modest one at another, by VTC and by first come, first served. The leader is killed in the
//! middle; a gateway pins both users to pickers; and a limit of requests holds over all replicas
//! and over all pickers.
//!
//! Shares are asserted, times are printed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use chaos_tests::gateway::{GatewayAnswer, GatewayOptions, GatewayRequest, StandInGateway};
use chaos_tests::processes::{ClusterOptions, ProcessCluster, until};
use http::{HeaderValue, StatusCode};
use lab::replay::client::{ReplayAnswer, ReplayClient, ReplayError, ReplayRequest};
use lab::replay::targets::Targets;

/// Concurrent requests of the greedy user: far more than the engines take.
const GREEDY: usize = 64;
/// Concurrent requests of the modest user: its fair share of the engines.
const MODEST: usize = 12;
/// Requests answered before a share is measured, so that both users wait by then.
const WARM_UP: u64 = 60;
/// Number of requests over which a share is measured.
const MEASURED: u64 = 300;

const ENGINES: &[&str] = &["--max-num-seqs", "2", "--decode-ms", "10"];

/// Config with which both users always wait, even on a busy machine, and neither is rejected.
const VTC: &str = r#"
[admission]
concurrency = 2
order = "vtc"
max_wait = "10m"
codel_target = "10m"
"#;
const FCFS: &str = r#"
[admission]
concurrency = 2
order = "fcfs"
max_wait = "10m"
codel_target = "10m"
"#;

/// Service that a user got.
#[derive(Debug, Default)]
struct Got {
    answered: AtomicU64,
    tokens: AtomicU64,
    first_token_us: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Got {
    fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    fn first_token_ms(&self) -> u64 {
        let answered = self.answered.load(Ordering::Relaxed).max(1);
        self.first_token_us.load(Ordering::Relaxed) / answered / 1000
    }
}

/// One user's load on one replica, with `under_way` concurrent requests until `is_over`.
struct Load {
    targets: Arc<Targets>,
    /// Gateway that asks the replica's picker for engines; `None` to send requests to the replica.
    gateway: Option<Arc<StandInGateway>>,
    replica: usize,
    user: &'static str,
    under_way: usize,
    got: Arc<Got>,
    is_over: Arc<AtomicBool>,
    /// Minimum pause of a sender between two requests.
    pause: Duration,
}

impl Load {
    async fn run(self) {
        let load = Arc::new(self);
        let senders = (0..load.under_way).map(|sender| tokio::spawn(load.clone().send(sender)));
        for sender in senders.collect::<Vec<_>>() {
            sender.await.expect("a sender does not panic");
        }
    }

    async fn send(self: Arc<Self>, sender: usize) {
        let client = ReplayClient::of(&self.targets, Duration::from_secs(60));
        let mut ticks = tokio::time::interval(self.pause.max(Duration::from_millis(1)));
        let mut number = 0_u64;
        while !self.is_over.load(Ordering::Relaxed) {
            ticks.tick().await;
            number += 1;
            let prompt = format!("{} {sender} {number} tell me more. ", self.user).repeat(4);
            let body = format!(
                r#"{{"model":"emulated","stream":true,"max_tokens":16,"stream_options":{{"include_usage":true}},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
            );
            if let Some(gateway) = &self.gateway {
                self.count_picked(gateway, &body).await;
                continue;
            }
            let ask = ReplayRequest {
                uri: self.targets.uri(self.replica, PATH),
                session: [None, None],
                user: HeaderValue::from_static(self.user),
                body: body.into(),
            };
            self.count(client.stream(ask).await);
        }
    }

    /// Sends a request through a gateway, and counts its total time as time to first token.
    async fn count_picked(&self, gateway: &StandInGateway, body: &str) {
        let body = serde_json::from_str(body).expect("a request is JSON");
        let request = GatewayRequest::post(PATH, self.user, &body);
        let sent = Instant::now();
        let answer = gateway.send(&request.pinned(self.replica)).await;
        self.count(match answer {
            Ok(GatewayAnswer {
                status,
                headers,
                body,
                ..
            }) => ReplayAnswer::of_whole(status, &headers, &body, sent.elapsed()),
            Err(error) => Err(ReplayError::Broken(format!("{error:#}"))),
        });
    }

    fn count(&self, answer: Result<ReplayAnswer, ReplayError>) {
        let got = &self.got;
        let add = |counter: &AtomicU64, more: u64| {
            counter.fetch_add(more, Ordering::Relaxed);
        };
        match answer {
            Ok(answer) => {
                let tokens =
                    answer.prompt_tokens.unwrap_or(0) + 2 * answer.completion_tokens.unwrap_or(0);
                add(&got.answered, 1);
                add(&got.tokens, tokens);
                let ttft = u64::try_from(answer.ttft.as_micros()).unwrap_or(u64::MAX);
                add(&got.first_token_us, ttft);
            }
            Err(ReplayError::Status { status, .. }) if status == StatusCode::TOO_MANY_REQUESTS => {
                add(&got.refused, 1);
            }
            Err(_) => add(&got.failed, 1),
        }
    }
}

/// Path of the requests.
const PATH: &str = "/v1/chat/completions";

/// Running loads of the greedy and the modest user.
struct Contest {
    greedy: Arc<Got>,
    modest: Arc<Got>,
    is_over: Arc<AtomicBool>,
    loads: Vec<tokio::task::JoinHandle<()>>,
}

impl Contest {
    fn start(cluster: &ProcessCluster, at: [usize; 2]) -> Self {
        Self::start_through(None, cluster, at)
    }

    /// Starts a contest through a gateway.
    fn start_through(
        gateway: Option<StandInGateway>,
        cluster: &ProcessCluster,
        at: [usize; 2],
    ) -> Self {
        let gateway = gateway.map(Arc::new);
        let (greedy, modest) = (Arc::new(Got::default()), Arc::new(Got::default()));
        let is_over = Arc::new(AtomicBool::new(false));
        let load = |replica: usize, user, under_way, got: &Arc<Got>| Load {
            targets: cluster.targets(),
            gateway: gateway.clone(),
            replica,
            user,
            under_way,
            got: Arc::clone(got),
            is_over: Arc::clone(&is_over),
            pause: Duration::ZERO,
        };
        let loads = vec![
            tokio::spawn(load(at[0], "greedy", GREEDY, &greedy).run()),
            tokio::spawn(load(at[1], "modest", MODEST, &modest).run()),
        ];
        Self {
            greedy,
            modest,
            is_over,
            loads,
        }
    }

    /// Waits until this many more requests are answered.
    async fn after(&self, more: u64) -> anyhow::Result<()> {
        let answered = || {
            let of = |got: &Got| got.answered.load(Ordering::Relaxed);
            of(&self.greedy) + of(&self.modest)
        };
        let goal = answered() + more;
        until("requests are answered", async || Ok(answered() >= goal)).await
    }

    /// Returns the modest user's share of all tokens of the next requests.
    async fn share(&self) -> anyhow::Result<f64> {
        let before = (self.greedy.tokens(), self.modest.tokens());
        self.after(MEASURED).await?;
        let greedy = self.greedy.tokens() - before.0;
        let modest = self.modest.tokens() - before.1;
        Ok(modest as f64 / (greedy + modest).max(1) as f64)
    }

    async fn end(self) -> (Arc<Got>, Arc<Got>) {
        self.is_over.store(true, Ordering::Relaxed);
        for load in self.loads {
            load.await.expect("a load does not panic");
        }
        (self.greedy, self.modest)
    }
}

fn options(config: &'static str) -> ClusterOptions {
    ClusterOptions {
        engine_speed: 1.0,
        engine_args: ENGINES,
        config,
        ..ClusterOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_modest_user_keeps_its_share_when_the_leader_dies() -> anyhow::Result<()> {
    let mut cluster = ProcessCluster::start(options(VTC)).await?;
    // The leader serves neither user, so killing it affects only agreement.
    let leader = cluster.leader().await?;
    let others: Vec<usize> = (0..3).filter(|replica| *replica != leader).collect();
    let contest = Contest::start(&cluster, [others[0], others[1]]);
    contest.after(WARM_UP).await?;
    let before = contest.share().await?;
    cluster.kill(leader)?;
    let after = contest.share().await?;
    let (greedy, modest) = contest.end().await;
    println!(
        "vtc: the modest user's share {before:.3}, with the leader killed {after:.3}; time to first \
         token {} ms against {} ms",
        modest.first_token_ms(),
        greedy.first_token_ms()
    );
    assert_eq!(greedy.failed.load(Ordering::Relaxed), 0, "{greedy:?}");
    assert_eq!(modest.failed.load(Ordering::Relaxed), 0, "{modest:?}");
    assert!(before > 0.40, "share {before}");
    assert!(
        (after - before).abs() < 0.05,
        "share {before}, then {after}"
    );
    cluster.restart(&[leader]).await?;
    cluster.wait_idle().await?;
    cluster.check_digests().await?;
    cluster.stop();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn users_pinned_to_one_picker_get_their_shares() -> anyhow::Result<()> {
    let options = ClusterOptions {
        has_pickers: true,
        is_secure: false,
        ..options(VTC)
    };
    let mut cluster = ProcessCluster::start(options).await?;
    let leader = cluster.leader().await?;
    let others: Vec<usize> = (0..3).filter(|replica| *replica != leader).collect();
    let gateway = StandInGateway::new(&cluster.picker_addrs(), GatewayOptions::default());
    let contest = Contest::start_through(Some(gateway), &cluster, [others[0], others[1]]);
    contest.after(WARM_UP).await?;
    let before = contest.share().await?;
    cluster.kill(leader)?;
    let after = contest.share().await?;
    let (greedy, modest) = contest.end().await;
    println!("pickers: the modest user's share {before:.3}, with the leader killed {after:.3}");
    assert_eq!(greedy.failed.load(Ordering::Relaxed), 0, "{greedy:?}");
    assert_eq!(modest.failed.load(Ordering::Relaxed), 0, "{modest:?}");
    assert!(before > 0.40, "share {before}");
    assert!(
        (after - before).abs() < 0.05,
        "share {before}, then {after}"
    );
    cluster.stop();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn fcfs_gives_the_greedy_user_most() -> anyhow::Result<()> {
    let cluster = ProcessCluster::start(options(FCFS)).await?;
    // Both at one replica: several replicas would each serve their user at their own rate.
    let contest = Contest::start(&cluster, [0, 0]);
    contest.after(WARM_UP).await?;
    let share = contest.share().await?;
    let (greedy, modest) = contest.end().await;
    println!(
        "fcfs: the modest user's share {share:.3}; time to first token {} ms against {} ms",
        modest.first_token_ms(),
        greedy.first_token_ms()
    );
    assert!(share < 0.30, "share {share}");
    cluster.stop();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_limit_holds_over_all_replicas() -> anyhow::Result<()> {
    holds_a_rate(ClusterOptions::default(), |_| None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_limit_holds_over_all_pickers() -> anyhow::Result<()> {
    let options = ClusterOptions {
        has_pickers: true,
        is_secure: false,
        ..ClusterOptions::default()
    };
    let gateway = |cluster: &ProcessCluster| {
        let pickers = cluster.picker_addrs();
        let gateway = StandInGateway::new(&pickers, GatewayOptions::default());
        Some(Arc::new(gateway))
    };
    holds_a_rate(options, gateway).await
}

/// Exceeds a user's rate through every replica, or through the pickers, and checks that no more is
/// admitted than the rate allows, and that the user goes on being served.
async fn holds_a_rate(
    options: ClusterOptions,
    gateway: impl Fn(&ProcessCluster) -> Option<Arc<StandInGateway>>,
) -> anyhow::Result<()> {
    const RATE: u64 = 20;
    /// Senders at each replica.
    const SENDERS: usize = 4;
    /// Requests admitted before the test ends: those of the first window, and many more.
    const ADMITTED: u64 = 10 * RATE;
    let options = ClusterOptions {
        engine_speed: 50.0,
        config: "[users.defaults.limits]\nrequests = 20\nwindow = \"1s\"\n",
        ..options
    };
    let cluster = ProcessCluster::start(options).await?;
    let gateway = gateway(&cluster);
    let (got, is_over) = (Arc::new(Got::default()), Arc::new(AtomicBool::new(false)));
    let from = Instant::now();
    let loads: Vec<_> = (0..3)
        .map(|replica| {
            let load = Load {
                targets: cluster.targets(),
                gateway: gateway.clone(),
                replica,
                user: "eager",
                under_way: SENDERS,
                got: Arc::clone(&got),
                is_over: Arc::clone(&is_over),
                pause: Duration::from_millis(40),
            };
            tokio::spawn(load.run())
        })
        .collect();
    let answered = || got.answered.load(Ordering::Relaxed);
    until("the user is served", async || Ok(answered() >= ADMITTED)).await?;
    is_over.store(true, Ordering::Relaxed);
    for load in loads {
        load.await?;
    }
    // The first window's requests may come at once. Replicas that check at one moment do not see
    // each other's requests yet, but count them afterwards.
    let unseen = 2 * SENDERS as u64;
    let allowed = RATE + (RATE as f64 * from.elapsed().as_secs_f64()).ceil() as u64 + unseen;
    println!("{allowed} requests allowed, {got:?}");
    assert_eq!(got.failed.load(Ordering::Relaxed), 0, "{got:?}");
    assert!(got.refused.load(Ordering::Relaxed) > 0, "{got:?}");
    assert!(answered() <= allowed, "{allowed} requests allowed, {got:?}");
    cluster.stop();
    Ok(())
}
