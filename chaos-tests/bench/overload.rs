//! Loads a cluster with ten times its capacity for two minutes and measures goodput, time to first
//! token, memory and recovery. See docs/internals/testing.md.

use std::process::ExitCode;
use std::time::Duration;

use chaos_tests::hostile::soak::SoakCheck;
use chaos_tests::hostile::soak::overload::{self, OverloadOptions, OverloadReport};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;

/// Overload a cluster, and check that it serves as much as it can and recovers
#[derive(Debug, Parser)]
struct OverloadArgs {
    /// Length of the overload, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    seconds: u64,
    /// Load, as a multiple of the capacity
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    factor: f64,
    /// Maximum growth of a replica's memory, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 96)]
    memory: u64,
    /// Seed of all random choices
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Use TLS everywhere, an operator's token and API keys
    #[arg(long)]
    secure: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    terminal::run(run(&OverloadArgs::parse()))
}

async fn run(args: &OverloadArgs) -> anyhow::Result<ExitCode> {
    let options = OverloadOptions {
        storm: Duration::from_secs(args.seconds),
        factor: args.factor,
        seed: args.seed.unwrap_or_else(rand::random),
        is_secure: args.secure,
        grown_bytes_max: args.memory << 20,
    };
    let report = overload::run(&options, |what| eprintln!("{what}")).await?;
    if args.json {
        say(serde_json::to_string_pretty(&report)?)?;
    } else {
        print(&options, &report)?;
    }
    Ok(terminal::exit_code(SoakCheck::all_hold(&report.checks)))
}

fn print(options: &OverloadOptions, report: &OverloadReport) -> anyhow::Result<()> {
    say(format_args!(
        "seed {}, {} times the capacity of {:.1} answers a second for {} s\n",
        options.seed,
        options.factor,
        report.capacity,
        options.storm.as_secs(),
    ))?;
    let mut rows = table(&[
        "",
        "asked/s",
        "answers/s",
        "refused/s",
        "first p50 ms",
        "p99 ms",
        "MiB",
    ]);
    for row in &report.rows {
        rows.add_row([
            row.name.to_owned(),
            format!("{:.1}", row.asked_per_s),
            format!("{:.2}", row.goodput),
            format!("{:.2}", row.refused_per_s),
            row.first_p50.as_millis().to_string(),
            row.first_p99.as_millis().to_string(),
            (row.rss_bytes >> 20).to_string(),
        ]);
    }
    say(format_args!("{rows}\n"))?;
    say(SoakCheck::table(&report.checks))
}
