//! Injects faults into a cluster of real processes under load, one after another, and measures what
//! a failover costs. See docs/internals/testing.md.
//!
//! A seed decides the order of faults and their targets; the timing of the processes depends on the
//! machine. A violation prints the command that repeats the same fault on a fresh cluster.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use chaos_tests::processes::failover::{self, Failover, QuorumLoss};
use chaos_tests::processes::faults::{FaultContext, FaultKind, cluster_options};
use chaos_tests::processes::load::{LoadOptions, RunningLoad};
use chaos_tests::processes::{ClusterOptions, ProcessCluster};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;
use comfy_table::CellAlignment;
use indicatif::{ProgressBar, ProgressStyle};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

/// Number of requests answered before the first fault, so that there is state to lose.
const WARM_UP: u64 = 300;

/// Inject faults into a cluster of real processes, and check the invariants
#[derive(Debug, Parser)]
struct FaultsArgs {
    /// Number of faults
    #[arg(long, value_name = "N", default_value_t = 0)]
    faults: u64,
    /// Kinds of faults, separated by commas; default: all that this machine allows
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = FaultKind::named)]
    kinds: Vec<FaultKind>,
    /// Seed of the faults' order and targets
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Number of the seed's first fault to inject, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u64,
    /// Kill the leader this many times, and measure the failover
    #[arg(long, value_name = "N", default_value_t = 0)]
    failover: u32,
    /// Kill two of three replicas for this many seconds, and measure the service of the third
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    quorum_loss: u32,
    /// Use TLS everywhere, an operator's token and API keys
    #[arg(long)]
    secure: bool,
    /// Let a gateway send every second request, as the replicas' pickers decide
    #[arg(long)]
    pickers: bool,
    /// List the kinds of faults, and whether this machine allows them
    #[arg(long)]
    list: bool,
    /// Print each fault as it happens, with its duration
    #[arg(long)]
    verbose: bool,
    /// Keep the logs and stores of a cluster with a violation
    #[arg(long)]
    keep: bool,
}

/// Results of all faults of one kind.
#[derive(Debug, Default)]
struct FaultRow {
    faults: u64,
    answered: u64,
    lost: u64,
    failed: u64,
    violations: u64,
    took: Duration,
    longest: Duration,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = FaultsArgs::parse();
    if args.list {
        list()?;
        return Ok(ExitCode::SUCCESS);
    }
    terminal::run(run(&args))
}

async fn run(args: &FaultsArgs) -> anyhow::Result<ExitCode> {
    let seed = args.seed.unwrap_or_else(rand::random);
    let mut is_clean = true;
    if args.faults > 0 {
        is_clean &= faults(args, seed).await?;
    }
    if args.failover > 0 {
        let outcomes = failovers(args, seed).await?;
        print_failovers(&outcomes)?;
    }
    if args.quorum_loss > 0 {
        let length = Duration::from_secs(u64::from(args.quorum_loss));
        let mut stage = stage(seed, args).await?;
        let outcome = failover::lose_quorum(&mut stage, length).await?;
        stage.cluster.stop();
        print_quorum_loss(length, &outcome)?;
    }
    Ok(terminal::exit_code(is_clean))
}

/// Starts a cluster under load and waits until it has some state.
async fn stage(seed: u64, args: &FaultsArgs) -> anyhow::Result<FaultContext> {
    let options = ClusterOptions {
        is_secure: args.secure,
        has_pickers: args.pickers,
        ..cluster_options()
    };
    let cluster = ProcessCluster::start(options).await?;
    let options = LoadOptions {
        asks_pickers: args.pickers,
        ..LoadOptions::default()
    };
    let load = RunningLoad::start(&cluster, options);
    load.wait_for_requests(WARM_UP).await?;
    Ok(FaultContext {
        cluster,
        load,
        random: SmallRng::seed_from_u64(seed),
    })
}

/// Injects the faults one after another. Returns whether all checks held.
async fn faults(args: &FaultsArgs, seed: u64) -> anyhow::Result<bool> {
    let (kinds, left_out) = allowed(&args.kinds);
    for (kind, why) in &left_out {
        say(format_args!("left out: {}: {why}", kind.name()))?;
    }
    anyhow::ensure!(!kinds.is_empty(), "no kind of fault is left");
    let bar = ProgressBar::new(args.faults).with_style(ProgressStyle::with_template(
        "{bar:30} {pos}/{len} {elapsed} (left {eta}) {msg}",
    )?);
    let mut rows: BTreeMap<FaultKind, FaultRow> = BTreeMap::new();
    let mut current: Option<FaultContext> = None;
    for number in args.from..args.from + args.faults {
        let kind = kind_of(&kinds, seed, number);
        bar.set_message(kind.name());
        let mut on = match current.take() {
            Some(stage) => stage,
            None => stage(seed, args).await.context("start a cluster")?,
        };
        on.random = SmallRng::seed_from_u64(seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let row = rows.entry(kind).or_default();
        if one(&mut on, kind, row, (&bar, args.verbose)).await {
            current = Some(on);
        } else {
            let chosen = if args.kinds.is_empty() {
                String::new()
            } else {
                let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
                format!(" --kinds {}", names.join(","))
            };
            let secure = if args.secure { " --secure" } else { "" };
            let pickers = if args.pickers { " --pickers" } else { "" };
            let line = format!("--seed {seed} --from {number} --faults 1{chosen}{secure}{pickers}");
            bar.suspend(|| {
                eprintln!("reproduce: cargo run --release -p chaos-tests --bin faults -- {line}");
            });
            if args.keep {
                let folder = on.cluster.keep_folder();
                bar.suspend(|| eprintln!("kept: {}", folder.display()));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(stage) = current {
        stage.cluster.stop();
    }
    print_rows(seed, &rows)
}

/// Injects one fault of the given kind and counts its results. Returns whether all checks held.
async fn one(
    stage: &mut FaultContext,
    kind: FaultKind,
    row: &mut FaultRow,
    (bar, is_verbose): (&ProgressBar, bool),
) -> bool {
    let counts = |stage: &FaultContext| {
        let book = stage.load.ledger();
        (book.answered, book.lost, book.failed)
    };
    let (before, started) = (counts(stage), Instant::now());
    let outcome = stage.run(kind).await;
    let (after, took) = (counts(stage), started.elapsed());
    row.faults += 1;
    row.answered += after.0 - before.0;
    row.lost += after.1 - before.1;
    row.failed += after.2 - before.2;
    row.took += took;
    row.longest = row.longest.max(took);
    if is_verbose {
        bar.suspend(|| eprintln!("{} in {:.1} s", kind.name(), took.as_secs_f64()));
    }
    if let Err(error) = &outcome {
        row.violations += 1;
        bar.suspend(|| eprintln!("violation by {}: {error:#}", kind.name()));
    }
    outcome.is_ok()
}

/// Splits the requested kinds into those that are possible on this machine, and the others with the
/// reason why not.
fn allowed(asked: &[FaultKind]) -> (Vec<FaultKind>, Vec<(FaultKind, String)>) {
    let asked = if asked.is_empty() {
        FaultKind::ALL
    } else {
        asked
    };
    let (mut kinds, mut left_out) = (Vec::new(), Vec::new());
    for kind in asked {
        match kind.need().why_not() {
            None => kinds.push(*kind),
            Some(why) => left_out.push((*kind, why)),
        }
    }
    (kinds, left_out)
}

/// Returns the kind of the fault with this number. Each kind comes equally often, in an order that
/// changes every round.
fn kind_of(kinds: &[FaultKind], seed: u64, number: u64) -> FaultKind {
    let count = kinds.len() as u64;
    let mut round = SmallRng::seed_from_u64(seed.wrapping_add(number / count));
    let _: u64 = round.random();
    let mut order = kinds.to_vec();
    order.shuffle(&mut round);
    order[usize::try_from(number % count).expect("a place in a short list")]
}

async fn failovers(args: &FaultsArgs, seed: u64) -> anyhow::Result<Vec<Failover>> {
    let count = args.failover;
    let mut stage = stage(seed, args).await?;
    let bar = ProgressBar::new(u64::from(count));
    let mut outcomes = Vec::new();
    for _ in 0..count {
        outcomes.push(failover::kill_leader(&mut stage).await?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    stage.cluster.stop();
    Ok(outcomes)
}

fn list() -> anyhow::Result<()> {
    let mut table = table(&["kind", "what", "here"]);
    for kind in FaultKind::ALL {
        let here = kind.need().why_not().unwrap_or_else(|| "yes".to_owned());
        table.add_row([kind.name(), kind.what(), &here]);
    }
    say(table)
}

fn print_rows(seed: u64, rows: &BTreeMap<FaultKind, FaultRow>) -> anyhow::Result<bool> {
    let heads = [
        "fault",
        "faults",
        "answered",
        "lost with their replica",
        "failed on replicas that were up",
        "violations",
        "mean s",
        "longest s",
    ];
    let mut table = table(&heads);
    let mut sum = FaultRow::default();
    for (kind, row) in rows {
        table.add_row(cells(kind.name(), row));
        sum.faults += row.faults;
        sum.answered += row.answered;
        sum.lost += row.lost;
        sum.failed += row.failed;
        sum.violations += row.violations;
        sum.took += row.took;
        sum.longest = sum.longest.max(row.longest);
    }
    table.add_row(cells("all", &sum));
    for column in 1..heads.len() {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    say(format_args!(
        "seed {seed}, {:.0} s\n{table}",
        sum.took.as_secs_f64()
    ))?;
    Ok(sum.violations == 0)
}

fn cells(name: &str, row: &FaultRow) -> [String; 8] {
    let mean = row.took.as_secs_f64() / row.faults.max(1) as f64;
    [
        name.to_owned(),
        row.faults.to_string(),
        row.answered.to_string(),
        row.lost.to_string(),
        row.failed.to_string(),
        row.violations.to_string(),
        format!("{mean:.1}"),
        format!("{:.1}", row.longest.as_secs_f64()),
    ]
}

fn print_failovers(outcomes: &[Failover]) -> anyhow::Result<()> {
    let mut table = table(&["of each leader killed", "median ms", "p95 ms", "worst ms"]);
    let mut row = |name: &str, of: fn(&Failover) -> Duration| {
        let mut times: Vec<Duration> = outcomes.iter().map(of).collect();
        times.sort_unstable();
        let at = |permille: usize| {
            let rank = (times.len() - 1) * permille / 1000;
            format!("{:.0}", times[rank].as_secs_f64() * 1e3)
        };
        table.add_row([name.to_owned(), at(500), at(950), at(1000)]);
    };
    row("time to a new leader with its quorum", |it| it.new_leader);
    row("longest time without an answer", |it| it.stall.gap);
    row("the same in the second before", |it| it.quiet.gap);
    row("longest time to a first token", |it| it.stall.ttft);
    row("the same in the second before", |it| it.quiet.ttft);
    let answered: u64 = outcomes.iter().map(|outcome| outcome.answered).sum();
    say(format_args!(
        "{} leaders killed; {answered} requests answered by the others meanwhile, none failed\n{table}",
        outcomes.len()
    ))
}

fn print_quorum_loss(length: Duration, outcome: &QuorumLoss) -> anyhow::Result<()> {
    say(format_args!(
        "quorum lost for {} s: {} requests answered by the one that was left, none failed, at least {} \
         in every second; longest time without an answer {} ms, to a first token {} ms; {:.1} s after \
         the others' start all were ready and idle, digests one, every counter what the engines told",
        length.as_secs(),
        outcome.answered,
        outcome.answered_per_s_min,
        outcome.stall.gap.as_millis(),
        outcome.stall.ttft.as_millis(),
        outcome.healed.as_secs_f64(),
    ))
}
