//! Program that runs simulated clusters, one per seed, and reports violated invariants.
//!
//! `cargo run --profile sim -p chaos-tests --bin seeds -- --seeds 10000`

mod tally;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use chaos_tests::planted::PlantedBug;
use chaos_tests::sim::faults::Fault;
use chaos_tests::sim::{self, SeedOptions, SeedReport, SeedResult};
use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use tally::SeedCounts;

/// Faster allocator, because a simulated cluster spends as much time allocating as computing.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Maximum number of runs that the reduction of a failing one takes.
const SHRINK_RUNS_MAX: usize = 120;

/// Runs simulated clusters, each from one seed, and reports broken invariants.
#[derive(Debug, Clone, Parser)]
struct SeedsArgs {
    /// Number of seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Run only this seed.
    #[arg(long, conflicts_with_all = ["seeds", "from"])]
    seed: Option<u64>,
    /// Number of seeds run in parallel.
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// Length of the faulty phase, in seconds of simulated time.
    #[arg(long, default_value = "20", value_parser = seconds)]
    seconds_simulated: f64,
    /// Plants this bug; see `--bugs`.
    #[arg(long)]
    bug: Option<String>,
    /// Lists the bugs that can be planted.
    #[arg(long)]
    bugs: bool,
    /// Kinds of faults, separated by commas; default: all.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Injects no faults.
    #[arg(long)]
    calm: bool,
    /// Draws values of the config too, inside their documented ranges.
    #[arg(long)]
    vary: bool,
    /// Number of clients per replica that send requests; default: as the seed decides.
    #[arg(long)]
    clients: Option<u8>,
    /// Number of replicas that found the cluster, 3 or 5; default: as the seed decides.
    #[arg(long, value_parser = clap::value_parser!(u8).range(3..=5))]
    voters: Option<u8>,
    /// Reduces a failing run to a shorter one that breaks the same rule, and tells it; for one seed.
    #[arg(long)]
    shrink: bool,
    /// Prints all events; for one seed.
    #[arg(long)]
    trace: bool,
    /// Prints the replicas' logs, filtered like `info,openraft=debug`; for one seed.
    #[arg(long)]
    log: Option<String>,
    /// Runs each seed twice and compares the runs.
    #[arg(long)]
    twice: bool,
    /// Stops at the first failing seed.
    #[arg(long)]
    fail_fast: bool,
    /// Prints the result as JSON.
    #[arg(long)]
    json: bool,
}

impl SeedsArgs {
    fn run_of(&self, seed: u64) -> anyhow::Result<SeedOptions> {
        let bug = match &self.bug {
            Some(name) => {
                Some(PlantedBug::named(name).with_context(|| format!("no bug {name:?}"))?)
            }
            None => None,
        };
        let only = self
            .only
            .iter()
            .map(|name| Fault::named(name).with_context(|| format!("no fault {name:?}")));
        Ok(SeedOptions {
            seed,
            faulty: Duration::from_secs_f64(self.seconds_simulated),
            only: only.collect::<anyhow::Result<_>>()?,
            is_calm: self.calm,
            varies: self.vary,
            clients: self.clients,
            voters: self.voters,
            is_traced: self.trace,
            bug,
        })
    }
}

/// Returns the command that repeats a run.
fn command(of: &SeedOptions) -> String {
    let mut line = format!(
        "cargo run --profile sim -p chaos-tests --bin seeds -- --seed {} --seconds-simulated {}",
        of.seed,
        of.faulty.as_secs_f64()
    );
    if !of.only.is_empty() {
        let only: Vec<String> = of.only.iter().map(ToString::to_string).collect();
        line += &format!(" --only {}", only.join(","));
    }
    if let Some(bug) = &of.bug {
        line += &format!(" --bug {bug}");
    }
    for (flag, number) in [("clients", of.clients), ("voters", of.voters)] {
        if let Some(number) = number {
            line += &format!(" --{flag} {number}");
        }
    }
    for (flag, is_set) in [("calm", of.is_calm), ("vary", of.varies)] {
        if is_set {
            line += &format!(" --{flag}");
        }
    }
    line
}

/// Parses a length in seconds, at most a day.
fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|it| (0.0..=86_400.0).contains(it));
    number.ok_or_else(|| "expected seconds, at most 86400".to_owned())
}

fn main() -> ExitCode {
    match run(&SeedsArgs::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("seeds: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Runs the requested seeds and prints the totals. Returns whether all invariants held.
fn run(args: &SeedsArgs) -> anyhow::Result<bool> {
    if args.bugs {
        for bug in PlantedBug::all() {
            println!("{bug}");
        }
        return Ok(true);
    }
    // Reports invalid arguments before the first seed.
    args.run_of(0)?;
    let (from, seeds) = args.seed.map_or((args.from, args.seeds), |seed| (seed, 1));
    if seeds > 1 && (args.trace || args.shrink || args.log.is_some()) {
        bail!("--trace, --shrink and --log are for one seed: say --seed");
    }
    if let Some(filter) = &args.log {
        sim::log::print(filter)?;
    }
    if args.shrink {
        return shrink(args, from);
    }
    let began = Instant::now();
    let tally = all(args, from, seeds)?;
    if args.json {
        println!("{}", tally.json());
    } else {
        println!("{}", tally.table(began.elapsed()));
    }
    Ok(tally.failures.is_empty())
}

fn all(args: &SeedsArgs, from: u64, seeds: u64) -> anyhow::Result<SeedCounts> {
    let bar = progress(seeds);
    let (next, tally) = (AtomicU64::new(from), Mutex::new(SeedCounts::default()));
    let is_enough = AtomicBool::new(false);
    let work = || -> anyhow::Result<()> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= from + seeds || is_enough.load(Ordering::Relaxed) {
                return Ok(());
            }
            let report = once(args, seed)?;
            if let SeedResult::Broke(what) = &report.outcome {
                let command = command(&args.run_of(seed)?);
                let line = format!("seed {seed}: {what}\n  reproduce: {command} --trace");
                bar.suspend(|| eprintln!("{line}"));
                is_enough.fetch_or(args.fail_fast, Ordering::Relaxed);
            }
            if args.trace {
                print!("{}", report.text);
            }
            let mut tally = tally.lock().expect("adding up does not panic");
            tally.add(&report);
            bar.set_message(tally.failures.len().to_string());
            bar.inc(1);
        }
    };
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..args.jobs.clamp(1, seeds))
            .map(|_| scope.spawn(work))
            .collect();
        for job in jobs {
            job.join().expect("a worker does not panic")?;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    bar.finish_and_clear();
    Ok(tally.into_inner().expect("adding up does not panic"))
}

fn progress(seeds: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(seeds), target);
    let style = "{bar:40} {pos}/{len} seeds, {msg} failed, {per_sec}, {eta} to go";
    bar.set_style(ProgressStyle::with_template(style).expect("the template is well formed"));
    bar.set_message("0");
    bar
}

/// Reduces the failing run of `seed` and tells the smallest one. Returns whether all invariants held.
fn shrink(args: &SeedsArgs, seed: u64) -> anyhow::Result<bool> {
    let options = args.run_of(seed)?;
    let first = on_a_thread(&options)?;
    if first.outcome == SeedResult::Held {
        println!("seed {seed}: all invariants hold");
        return Ok(true);
    }
    let before = first.events;
    let mut runs = 0;
    let (least, _) = sim::shrink::shrink((options, first), SHRINK_RUNS_MAX, |of| {
        runs += 1;
        on_a_thread(of).ok()
    });
    let told = on_a_thread(&SeedOptions {
        is_traced: true,
        ..least.clone()
    })?;
    let SeedResult::Broke(what) = &told.outcome else {
        bail!(
            "seed {seed} held when it was run again: {}",
            command(&least)
        );
    };
    println!("{}", sim::shrink::story(&told.text));
    let (events, command) = (told.events, command(&least));
    println!(
        "seed {seed}: {what}\n{events} of {before} events, after {runs} runs\n  reproduce: {command}"
    );
    Ok(false)
}

/// Runs a seed on a thread of its own, so that no thread-local state is left for the next seed.
fn on_a_thread(run: &SeedOptions) -> anyhow::Result<SeedReport> {
    std::thread::scope(|scope| {
        let ran = scope.spawn(|| sim::run(run)).join();
        ran.unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
            bail!("the world panicked: {}", said.unwrap_or("no words"))
        })
    })
    .with_context(|| format!("seed {}", run.seed))
}

fn once(args: &SeedsArgs, seed: u64) -> anyhow::Result<SeedReport> {
    let run = args.run_of(seed)?;
    let mut report = on_a_thread(&run)?;
    if args.twice {
        let again = on_a_thread(&run)?;
        if (again.hash, again.events) != (report.hash, report.events) {
            let lines = report.text.lines().zip(again.text.lines());
            for (first, second) in lines.filter(|(first, second)| first != second).take(3) {
                eprintln!("first:  {first}\nsecond: {second}");
            }
            report.outcome = SeedResult::Broke(format!(
                "the second run differs: {:016x} after {} events, then {:016x} after {}",
                report.hash, report.events, again.hash, again.events
            ));
        }
    }
    Ok(report)
}
