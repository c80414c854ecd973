//! `quorate dev`: a whole cluster on loopback in one process, a load test through all its replicas,
//! and a table of the results.
//!
//! The replicas are the same as in `quorate serve`, each with its own sockets, log and snapshots.
//! Only the engines are emulated, unless real ones are given.

pub(crate) mod fleet;
mod hints;
mod outcome;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use api::base::printable::escaped_lines;
use api::engines::backends::EngineUrl;
use lab::engine::events::PublisherFaults;
use lab::engine::fleet::{Engines, EnginesPlan};
use lab::engine::offload::OffloadArgs;
use lab::replay::chats::{Chats, ChatsOptions};
use lab::replay::load::{LoadPlan, LoadSource, run as run_load};
use lab::replay::progress::show;
use lab::replay::report::LoadReport;
use lab::replay::speed;
use lab::replay::targets::Targets;
use lab::terminal::{self, INTERRUPTED};
use tokio::signal::unix::{Signal, SignalKind, signal};

use fleet::{Fleet, FleetKey, FleetPlan};
use hints::DevHints;
use outcome::DevOutcome;

/// Number of concurrent requests in the load test; each one belongs to a chat.
const CHATS: u32 = 48;
/// Number of requests of the load test with emulated engines.
const REQUESTS: u64 = 2400;
/// Number of requests of the load test with real engines, which may cost money.
const REQUESTS_OF_REAL: u64 = 20;
/// Options of the load test's chats with real engines: short prompts and outputs, little
/// concurrency.
const SMALL_CHATS: ChatsOptions = ChatsOptions {
    users: 2,
    chats: 4,
    systems: 1,
    system_bytes: 512,
    message_bytes: 64,
    reply_tokens: 16,
    turns: 5,
    seed: 0,
};
/// Timeout of a request of the load test.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Run a demo cluster on loopback: three replicas, emulated engines and a load test.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    /// Use this engine instead of emulated ones; may be repeated. It gets 20 small requests, unless
    /// --requests is given
    #[arg(long, value_name = "URL", value_delimiter = ',', value_parser = engine_url)]
    backend: Vec<String>,
    /// Number of emulated engines
    #[arg(long, value_name = "N", default_value_t = 4, conflicts_with = "backend", value_parser = clap::value_parser!(u8).range(1..=64))]
    engines: u8,
    /// Speed of the emulated engines, relative to a small GPU
    #[arg(long, value_name = "X", default_value_t = 4.0, value_parser = speed)]
    speed: f64,
    /// Number of requests of the load test; 0 sends none [default: 2400, or 20 small ones for your
    /// own engines]
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// KV cache blocks of each emulated engine; a small cache evicts a lot [default: as in `quorate
    /// engine`]
    #[arg(long, value_name = "N", conflicts_with = "backend", value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    blocks: Option<u32>,
    #[command(flatten)]
    offload: OffloadArgs,
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
    /// its peers two above; 0 takes free ports [default: 8080, or free ports if one is taken]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(..=65_000))]
    port: Option<u16>,
    /// Keep the replicas' state in this directory, and start from it next time [default: a
    /// temporary directory]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Exit after the load test, with 0 only if no request failed and all replicas agree
    #[arg(long)]
    once: bool,
    /// Print the result of the load test as JSON
    #[arg(long)]
    json: bool,
}

/// The load that a dev cluster is tested with.
struct DevLoad {
    requests: u64,
    /// Whether the load is small, to spare real engines.
    is_small: bool,
    chats: ChatsOptions,
}

impl DevLoad {
    fn of(args: &DevArgs) -> Self {
        // An explicit number of requests is never reduced.
        let is_small = !args.backend.is_empty() && args.requests.is_none();
        let all = ChatsOptions {
            chats: CHATS,
            ..ChatsOptions::default()
        };
        Self {
            requests: match (args.requests, is_small) {
                (Some(requests), _) => requests,
                (None, true) => REQUESTS_OF_REAL,
                (None, false) => REQUESTS,
            },
            is_small,
            chats: if is_small { SMALL_CHATS } else { all },
        }
    }
}

/// Parses the URL of an engine.
fn engine_url(text: &str) -> Result<String, String> {
    let url = EngineUrl::parse(text).map_err(|error| error.to_string())?;
    Ok(url.as_str().to_owned())
}

/// Starts the cluster, runs the load, prints the table and, without `--once`, keeps the cluster
/// running until a signal.
///
/// # Errors
/// Fails if the cluster does not start or the first replica serves no model.
pub async fn run(args: DevArgs) -> anyhow::Result<ExitCode> {
    let mut signals = EndSignals::new()?;
    let mut told_to_leave = false;
    let engines = Engines::start(EnginesPlan {
        urls: &args.backend,
        count: args.engines,
        speed: args.speed,
        blocks: args.blocks,
        offload: args.offload.into(),
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
    let mut fleet = tokio::select! {
        fleet = Fleet::start(plan, &engines.specs) => fleet?,
        () = signals.recv() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let hints = DevHints {
        fleet: &fleet,
        engines: &engines.specs,
        model: match &args.model {
            Some(model) => model.clone(),
            None => fleet.first_model().await?,
        },
    };
    let load = DevLoad::of(&args);
    eprintln!(
        "{}",
        escaped_lines(&hints.started(&load, !args.backend.is_empty()))
    );
    let mut code = ExitCode::SUCCESS;
    if load.requests > 0 {
        tokio::select! {
            report = drive(load, &hints.model, &fleet) => {
                let outcome = DevOutcome::of(report?, &fleet).await;
                match args.json {
                    true => terminal::print(serde_json::to_string_pretty(&outcome.json())?)?,
                    false => terminal::print(outcome.tables())?,
                }
                if !outcome.is_good() {
                    code = ExitCode::FAILURE;
                }
            }
            () = signals.recv() => told_to_leave = true,
        }
    }
    if told_to_leave {
        code = ExitCode::from(INTERRUPTED);
    }
    if !args.once && !told_to_leave {
        match args.json {
            // With `--json`, stdout contains only the result.
            true => eprintln!("{}", escaped_lines(&hints.look_around())),
            false => terminal::print(hints.look_around())?,
        }
        operate(&mut fleet, &mut signals).await;
    }
    fleet.leave().await;
    engines.stop().await;
    Ok(code)
}

/// Kills and starts replicas as the lines on the standard input say, until a signal.
async fn operate(fleet: &mut Fleet, signals: &mut EndSignals) {
    let (sender, mut lines) = tokio::sync::mpsc::channel(1);
    // A thread, because the runtime would wait for a read of the standard input at its end.
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    loop {
        let line = tokio::select! {
            biased;
            () = signals.recv() => return,
            Some(line) = lines.recv() => line,
        };
        let done = match FleetKey::read(&line) {
            Some(key) => fleet.press(key).await,
            None => Ok(
                "k ID kills a replica, s ID starts it again, ctrl-c ends the cluster".to_owned(),
            ),
        };
        match done {
            Ok(done) => eprintln!("{done}"),
            Err(error) => eprintln!("error: {}", escaped_lines(&format!("{error:#}"))),
        }
    }
}

/// Signals that end the cluster gracefully, so that no files are left behind.
struct EndSignals([Signal; 3]);

impl EndSignals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    /// Waits until one of the signals arrives.
    async fn recv(&mut self) {
        let [interrupts, terminations, hangups] = &mut self.0;
        tokio::select! {
            _ = interrupts.recv() => {}
            _ = terminations.recv() => {}
            _ = hangups.recv() => {}
        }
    }
}

async fn drive(load: DevLoad, model: &str, fleet: &Fleet) -> anyhow::Result<LoadReport> {
    let targets = Targets::new(&fleet.data_urls())?;
    let mut chats = Chats::new(load.chats);
    let bar = terminal::progress_bar(load.requests, terminal::COUNT).context("draw progress")?;
    let plan = LoadPlan {
        work: LoadSource::Chats {
            chats: &mut chats,
            requests: load.requests,
        },
        model: model.to_owned(),
        speed: 1.0,
        in_flight_max: load.chats.chats as usize,
        timeout: REQUEST_TIMEOUT,
    };
    let report = run_load(plan, &targets, |progress| show(&bar, progress)).await;
    bar.finish_and_clear();
    Ok(report)
}
