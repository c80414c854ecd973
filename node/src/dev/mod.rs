//! `quorate dev`: a whole cluster on loopback in one process, a load through all its replicas, and
//! a table of the results.
//!
//! Nothing is simplified. The replicas are the ones that `quorate serve` runs, each with its own
//! sockets, log and snapshots. Only the engines are emulated, unless real ones are given.

pub(crate) mod fleet;
mod outcome;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use lab::engine::events::PublisherFaults;
use lab::engine::fleet::{Engines, EnginesPlan};
use lab::replay::chats::{Chats, ChatsOptions};
use lab::replay::load::{LoadPlan, LoadSource, run as run_load};
use lab::replay::progress::show;
use lab::replay::report::LoadReport;
use lab::replay::speed;
use lab::replay::targets::Targets;
use lab::terminal::{self, INTERRUPTED};
use tokio::signal::unix::{SignalKind, signal};

use fleet::{Fleet, FleetPlan};
use outcome::DevOutcome;

/// Number of concurrent requests in the load; each is one chat.
const CHATS: u32 = 48;
/// Longest duration of one request of the load.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Run a demo cluster on loopback: three replicas, emulated engines and a load test.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    /// Use this engine instead of emulated ones (repeatable). The load test sends it real requests:
    /// see --requests
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    backend: Vec<String>,
    /// Number of emulated engines
    #[arg(long, value_name = "N", default_value_t = 4, conflicts_with = "backend", value_parser = clap::value_parser!(u8).range(1..=64))]
    engines: u8,
    /// Speed of the emulated engines, relative to a small GPU
    #[arg(long, value_name = "X", default_value_t = 4.0, value_parser = speed)]
    speed: f64,
    /// Number of requests of the load test; 0 sends none
    #[arg(long, value_name = "N", default_value_t = 2400)]
    requests: u64,
    /// KV cache blocks of each emulated engine; a small cache evicts a lot
    #[arg(long, value_name = "N", conflicts_with = "backend", value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    blocks: Option<u32>,
    /// Identify prompts by the engines' own tokens instead of characters
    #[arg(long)]
    tokens: bool,
    /// Track the engines' caches exactly, by their KV events; implies --tokens
    #[arg(long)]
    exact: bool,
    /// Faults of the emulated engines' KV events, as in `quorate engine --fault`
    #[arg(
        long,
        value_name = "FAULTS",
        requires = "exact",
        conflicts_with = "backend"
    )]
    fault: Option<PublisherFaults>,
    /// Override a config value of every replica
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
    /// Model that the load test uses [default: the first one the cluster lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// First port: replica k serves clients at PORT + 10*(k-1), its admin API one port above and
    /// its peers two above [default: 8080, or free ports if one of these is taken]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..=65_000))]
    port: Option<u16>,
    /// Keep the replicas' state in this directory, and start from it next time
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Exit after the load test, with 0 only if no request failed and all replicas agree
    #[arg(long)]
    once: bool,
}

/// Starts the cluster, runs the load, prints the table and, without `--once`, keeps the cluster
/// running until a signal.
///
/// # Errors
/// If the cluster does not start or the first replica serves no model.
pub async fn run(args: DevArgs) -> anyhow::Result<ExitCode> {
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut terminations = signal(SignalKind::terminate())?;
    let mut told_to_leave = false;
    let engines = Engines::start(EnginesPlan {
        urls: &args.backend,
        count: args.engines,
        speed: args.speed,
        blocks: args.blocks,
        has_events: args.exact,
        faults: args.fault.as_ref(),
    });
    let engines = engines.await?;
    let plan = FleetPlan {
        data_dir: args.data_dir.as_deref(),
        port: args.port,
        settings: &args.set,
        has_tokens: args.exact || args.tokens,
    };
    let fleet = tokio::select! {
        fleet = Fleet::start(plan, &engines.specs) => fleet?,
        _ = interrupts.recv() => return Ok(ExitCode::from(INTERRUPTED)),
        _ = terminations.recv() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let mut code = ExitCode::SUCCESS;
    if args.requests > 0 {
        tokio::select! {
            report = drive(&args, &fleet) => {
                let outcome = DevOutcome::of(report?, &fleet).await;
                terminal::print(outcome.tables())?;
                if !outcome.is_good() {
                    code = ExitCode::FAILURE;
                }
            }
            _ = interrupts.recv() => told_to_leave = true,
            _ = terminations.recv() => told_to_leave = true,
        }
    }
    if told_to_leave {
        code = ExitCode::from(INTERRUPTED);
    }
    if !args.once && !told_to_leave {
        terminal::print(fleet.urls())?;
        tokio::select! {
            _ = interrupts.recv() => {}
            _ = terminations.recv() => {}
        }
    }
    fleet.leave().await;
    engines.stop().await;
    Ok(code)
}

async fn drive(args: &DevArgs, fleet: &Fleet) -> anyhow::Result<LoadReport> {
    let model = match &args.model {
        Some(model) => model.clone(),
        None => fleet.first_model().await?,
    };
    let targets = Targets::new(&fleet.data_urls())?;
    let mut chats = Chats::new(ChatsOptions {
        chats: CHATS,
        ..ChatsOptions::default()
    });
    let bar = terminal::progress_bar(args.requests, terminal::COUNT).context("draw progress")?;
    let plan = LoadPlan {
        work: LoadSource::Chats {
            chats: &mut chats,
            requests: args.requests,
        },
        model,
        speed: 1.0,
        in_flight_max: CHATS as usize,
        timeout: REQUEST_TIMEOUT,
    };
    let report = run_load(plan, &targets, |progress| show(&bar, progress)).await;
    bar.finish_and_clear();
    Ok(report)
}
