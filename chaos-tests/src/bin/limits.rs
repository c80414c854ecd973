//! How often real replicas exceed a backend's limit: `cargo run --release -p chaos-tests --bin
//! limits`.
//!
//! Three processes, one emulated engine with a limit, more clients than places at each replica. The
//! engine is asked every few milliseconds how many requests it has.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use chaos_tests::processes::load::{LoadOptions, RunningLoad};
use chaos_tests::processes::{ClusterOptions, ProcessCluster};
use clap::Parser;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// From one look at the engine to the next.
const LOOK_EVERY: Duration = Duration::from_millis(3);
/// How long the load runs before the first look.
const WARM_UP: Duration = Duration::from_secs(2);
/// Shortest time from one request of a client to its next.
const PAUSE: Duration = Duration::from_millis(1);
/// The engine's limit, as the tables of [`CASES`] say.
const LIMIT: u64 = 6;

/// What decides who goes next, and the config that says so.
const CASES: [(&str, &str); 3] = [
    ("vtc, gate", "[admission]\nconcurrency = 6\n"),
    ("fcfs", "[admission]\nconcurrency = 6\norder = \"fcfs\"\n"),
    (
        "vtc, grants = log",
        "[admission]\nconcurrency = 6\ngrants = \"log\"\n",
    ),
];

/// Measures for how much of the time three replicas exceed a backend's limit of 6.
#[derive(Debug, Clone, Parser)]
struct LimitsArgs {
    /// Seconds that each case is looked at.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Clients of each replica.
    #[arg(long, default_value_t = 8)]
    clients: usize,
}

/// What was seen of the engine.
#[derive(Debug, Default)]
struct Seen {
    looks: u64,
    above: u64,
    full: u64,
    most: u64,
    answered: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = LimitsArgs::parse();
    let mut is_held = true;
    for (name, config) in CASES {
        let seen = measure(&args, config).await.context(name)?;
        let percent = |part: u64| 100.0 * part as f64 / seen.looks.max(1) as f64;
        println!(
            "{name:18} above {LIMIT}: {:5.1} % of {} looks, most {}; at {LIMIT}: {:5.1} %; {} answers",
            percent(seen.above),
            seen.looks,
            seen.most,
            percent(seen.full),
            seen.answered,
        );
        // An engine that nothing reached proves nothing.
        is_held &= seen.above == 0 && seen.answered > 0 && seen.full > 0;
    }
    Ok(if is_held {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn measure(args: &LimitsArgs, config: &'static str) -> anyhow::Result<Seen> {
    let options = ClusterOptions {
        engines: 1,
        engine_speed: 10.0,
        config,
        ..ClusterOptions::default()
    };
    let cluster = ProcessCluster::start(options).await?;
    let load = RunningLoad::start(
        &cluster,
        LoadOptions {
            senders: args.clients * usize::from(options.replicas),
            pause: PAUSE,
            ..LoadOptions::default()
        },
    );
    tokio::time::sleep(WARM_UP).await;
    let before = load.book().answered;
    let mut seen = Seen::default();
    let end = Instant::now() + Duration::from_secs(args.seconds);
    while Instant::now() < end {
        let requests = requests_at(cluster.engine_addr(0)).await?;
        seen.looks += 1;
        seen.above += u64::from(requests > LIMIT);
        seen.full += u64::from(requests == LIMIT);
        seen.most = seen.most.max(requests);
        tokio::time::sleep(LOOK_EVERY).await;
    }
    seen.answered = load.book().answered - before;
    drop(load);
    cluster.stop();
    Ok(seen)
}

/// Requests that an engine runs or has waiting.
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
