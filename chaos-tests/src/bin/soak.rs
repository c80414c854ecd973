//! Loads a cluster of real processes far beyond its capacity with hostile and careless clients at
//! once. Afterwards everything must be as before. See docs/internals/testing.md.

use std::process::ExitCode;
use std::time::Duration;

use chaos_tests::hostile::soak::{self, ClientKind, SoakCheck, SoakOptions, SoakReport};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;

/// Load a cluster with honest and hostile clients at once, and check the invariants
#[derive(Debug, Parser)]
struct SoakArgs {
    /// Length of the soak, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Load, as a multiple of the capacity
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    factor: f64,
    /// Seed of all random choices
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Kinds of clients besides honest users, separated by commas; default: all
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = ClientKind::named)]
    only: Vec<ClientKind>,
    /// Use TLS everywhere, an operator's token and API keys
    #[arg(long)]
    secure: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// List the kinds of clients
    #[arg(long)]
    list: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = SoakArgs::parse();
    if args.list {
        let mut table = table(&["kind", "what"]);
        for kind in ClientKind::ALL {
            table.add_row([kind.name(), kind.what()]);
        }
        say(table)?;
        return Ok(ExitCode::SUCCESS);
    }
    terminal::run(run(&args))
}

async fn run(args: &SoakArgs) -> anyhow::Result<ExitCode> {
    let options = SoakOptions {
        storm: Duration::from_secs(args.seconds),
        factor: args.factor,
        seed: args.seed.unwrap_or_else(rand::random),
        only: args.only.clone(),
        is_secure: args.secure,
    };
    let report = soak::run(&options, |what| eprintln!("{what}")).await?;
    if args.json {
        say(serde_json::to_string_pretty(&report)?)?;
    } else {
        print(&options, &report)?;
    }
    Ok(terminal::exit_code(SoakCheck::all_hold(&report.checks)))
}

fn print(options: &SoakOptions, report: &SoakReport) -> anyhow::Result<()> {
    let [alone, storm] = report.honest;
    say(format_args!(
        "seed {}, {} s, {} times the capacity of {:.1} answers a second; honest users got {alone:.2} a \
         second alone and {storm:.2} in the storm\n",
        options.seed,
        options.storm.as_secs(),
        options.factor,
        report.capacity,
    ))?;
    let mut kinds = table(&[
        "kind",
        "asked",
        "whole",
        "first p50 ms",
        "p99 ms",
        "else",
        "harm",
    ]);
    for (kind, tally) in &report.kinds {
        let ms = |permille| {
            let first = tally.first(permille);
            first.map_or_else(String::new, |it| it.as_millis().to_string())
        };
        let joined = |counts: &std::collections::BTreeMap<String, u64>| {
            let each = counts.iter().map(|(what, times)| format!("{what} {times}"));
            each.collect::<Vec<_>>().join(", ")
        };
        kinds.add_row([
            kind.name().to_owned(),
            tally.asked.to_string(),
            tally.whole.to_string(),
            ms(500),
            ms(990),
            joined(&tally.ends),
            joined(&tally.harm),
        ]);
    }
    say(format_args!("{kinds}\n"))?;
    say(SoakCheck::table(&report.checks))?;
    for (kind, tally) in &report.kinds {
        for words in &tally.words {
            eprintln!("{}: {words}", kind.name());
        }
    }
    Ok(())
}
