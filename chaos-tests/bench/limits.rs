//! Checks whether real replicas hold a backend's limit, and measures the cost: `cargo run --release
//! -p chaos-tests --bin limits`.
//!
//! One emulated engine has a limit. The load comes from clients for 60 % of its places, or from
//! three times as many clients as places. It goes to one replica, which owns all places, or to
//! three, which share them. The difference is the cost of sharing. The engine reports its number of
//! requests every few milliseconds.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use chaos_tests::processes::client_ledger::AnswerFigures;
use chaos_tests::processes::load::{LoadOptions, RunningLoad};
use chaos_tests::processes::{ClusterOptions, ProcessCluster};
use chaos_tests::terminal;
use clap::Parser;
use comfy_table::{Table, presets};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Interval at which the engine is polled.
const LOOK_EVERY: Duration = Duration::from_millis(3);
/// Duration of the load before the first poll.
const WARM_UP: Duration = Duration::from_secs(2);
/// Minimum pause of a client between two requests.
const PAUSE: Duration = Duration::from_millis(1);
/// The engine's limit, as in the configs of the cases.
const LIMIT: u64 = 10;
/// Number of clients that use 60 % of the places, so that none waits.
const CLIENTS_BELOW: usize = 6;
/// Number of clients that use all places, so that two wait for each one that is served.
const CLIENTS_BEYOND: usize = 30;

const GATE: &str = "[admission]\nconcurrency = 10\n";
const FCFS: &str = "[admission]\nconcurrency = 10\norder = \"fcfs\"\n";

/// A case to measure: admission config, number of replicas and total number of clients.
#[derive(Debug, Clone, Copy)]
struct LimitCase {
    name: &'static str,
    config: &'static str,
    replicas: u8,
    clients: usize,
}

const CASES: [LimitCase; 5] = [
    case("vtc, gate", GATE, 1, CLIENTS_BELOW),
    case("vtc, gate", GATE, 3, CLIENTS_BELOW),
    case("vtc, gate", GATE, 1, CLIENTS_BEYOND),
    case("vtc, gate", GATE, 3, CLIENTS_BEYOND),
    case("fcfs", FCFS, 3, CLIENTS_BEYOND),
];

const fn case(name: &'static str, config: &'static str, replicas: u8, clients: usize) -> LimitCase {
    LimitCase {
        name,
        config,
        replicas,
        clients,
    }
}

/// Measures whether replicas keep within a backend's limit of 10, and at what cost.
#[derive(Debug, Clone, Parser)]
struct LimitsArgs {
    /// Length of each of the six cases, in seconds.
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// Runs only cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
}

/// Measurements at the engine and at the clients in one case.
#[derive(Debug, Default)]
struct Seen {
    looks: u64,
    above: u64,
    full: u64,
    most: u64,
    /// Number of failed or refused requests.
    failed: u64,
    /// Reason for the first failed request.
    failure: Option<String>,
    answers: AnswerFigures,
    took: Duration,
}

impl Seen {
    fn percent(&self, part: u64) -> f64 {
        100.0 * part as f64 / self.looks.max(1) as f64
    }

    fn answers_per_s(&self) -> f64 {
        self.answers.ttfts.len() as f64 / self.took.as_secs_f64().max(f64::EPSILON)
    }

    fn row(&self, case: &LimitCase) -> [String; 11] {
        let ms = |permille| 1000.0 * self.answers.ttft(permille).as_secs_f64();
        [
            case.name.to_owned(),
            case.replicas.to_string(),
            case.clients.to_string(),
            format!("{:.2} %", self.percent(self.above)),
            self.most.to_string(),
            format!("{:.1} %", self.percent(self.full)),
            format!("{:.1}", self.answers_per_s()),
            format!("{:.0} ms", ms(500)),
            format!("{:.0} ms", ms(990)),
            format!("{:.1} %", self.answers.hit_percent()),
            self.failed.to_string(),
        ]
    }
}

const COLUMNS: [&str; 11] = [
    "order",
    "replicas",
    "clients",
    "above the limit",
    "most",
    "at the limit",
    "answers/s",
    "TTFT p50",
    "p99",
    "prefix hits",
    "failed",
];

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = LimitsArgs::parse();
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(COLUMNS);
    let mut is_held = true;
    let is_wanted = |case: &&LimitCase| args.only.as_ref().is_none_or(|it| case.name.contains(it));
    for case in CASES.iter().filter(is_wanted) {
        let seen = measure(&args, case).await.context(case.name)?;
        table.add_row(seen.row(case));
        if let Some(failure) = &seen.failure {
            println!("{}, {} replicas: {failure}", case.name, case.replicas);
        }
        // An engine that received no request proves nothing.
        let is_reached = !seen.answers.ttfts.is_empty();
        let is_filled = seen.full > 0 || case.clients < CLIENTS_BEYOND;
        is_held &= seen.above == 0 && is_reached && is_filled;
    }
    println!("a limit of {LIMIT}\n{table}");
    Ok(terminal::exit_code(is_held))
}

async fn measure(args: &LimitsArgs, case: &LimitCase) -> anyhow::Result<Seen> {
    let options = ClusterOptions {
        replicas: case.replicas,
        engines: 1,
        engine_speed: 5.0,
        config: case.config,
        ..ClusterOptions::default()
    };
    let cluster = ProcessCluster::start(options).await?;
    let load = RunningLoad::start(
        &cluster,
        LoadOptions {
            senders: case.clients,
            pause: PAUSE,
            ..LoadOptions::default()
        },
    );
    tokio::time::sleep(WARM_UP).await;
    let failed = load.ledger().failed;
    load.ledger().take_figures();
    let mut seen = Seen::default();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(args.seconds) {
        let requests = requests_at(cluster.engine_addr(0)).await?;
        seen.looks += 1;
        seen.above += u64::from(requests > LIMIT);
        seen.full += u64::from(requests == LIMIT);
        seen.most = seen.most.max(requests);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    seen.took = begin.elapsed();
    seen.answers = load.ledger().take_figures();
    seen.failed = load.ledger().failed - failed;
    seen.failure = load.ledger().failures.first().cloned();
    drop(load);
    cluster.stop();
    Ok(seen)
}

/// Returns the number of requests that an engine runs and queues, from its metrics.
async fn requests_at(engine: SocketAddr) -> anyhow::Result<u64> {
    let mut stream = TcpStream::connect(engine).await?;
    let ask = format!("GET /metrics HTTP/1.1\r\nhost: {engine}\r\nconnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let gauge = |name: &str| -> anyhow::Result<u64> {
        let line = answer.lines().find(|line| line.starts_with(name));
        let line = line.with_context(|| format!("the engine shows no {name}"))?;
        let number = line.rsplit(' ').next().unwrap_or_default();
        let number: f64 = number.parse().with_context(|| line.to_owned())?;
        Ok(number as u64)
    };
    Ok(gauge("vllm:num_requests_running{")? + gauge("vllm:num_requests_waiting{")?)
}
