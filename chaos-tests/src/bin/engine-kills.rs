//! Kills engines of a cluster of real processes while they stream, and compares every stream with
//! the undisturbed one. See docs/internals/testing.md.

use std::process::ExitCode;
use std::time::Instant;

use chaos_tests::processes::engine_kills::{self, EngineKillsOptions, EngineKillsReport, Victims};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

/// Kill engines while they stream, and compare what clients receive with undisturbed streams
#[derive(Debug, Parser)]
struct EngineKillsArgs {
    /// Number of kills
    #[arg(long, value_name = "N", default_value_t = 200)]
    kills: u32,
    /// Number of clients, each with one stream at a time
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// Number of engines
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..))]
    engines: u8,
    /// Seed of the requests and of the times of the kills
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Kill replicas instead of engines; their clients go on at other replicas
    #[arg(long)]
    replicas: bool,
    /// Use TLS everywhere, an operator's token and API keys
    #[arg(long)]
    secure: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    terminal::run(run(EngineKillsArgs::parse()))
}

async fn run(args: EngineKillsArgs) -> anyhow::Result<ExitCode> {
    let options = EngineKillsOptions {
        victims: match args.replicas {
            true => Victims::Replicas,
            false => Victims::Engines,
        },
        kills: args.kills,
        clients: args.clients,
        engines: args.engines,
        seed: args.seed.unwrap_or_else(rand::random),
        is_secure: args.secure,
    };
    let bar = ProgressBar::new(u64::from(args.kills)).with_style(ProgressStyle::with_template(
        "{bar:30} {pos}/{len} {elapsed} (left {eta})",
    )?);
    let started = Instant::now();
    let report = engine_kills::run(options, |kills| bar.set_position(kills.into())).await;
    bar.finish_and_clear();
    let report = report?;
    say(format_args!(
        "seed {}, {:.0} s",
        options.seed,
        started.elapsed().as_secs_f64()
    ))?;
    print(&report)?;
    Ok(terminal::exit_code(report.is_clean()))
}

fn print(report: &EngineKillsReport) -> anyhow::Result<()> {
    let differing: u64 = report.differences.values().map(|tally| tally.count).sum();
    say(format_args!(
        "{} killed, {} chats and {} text completions streamed, {} of them cut off in the middle, {} \
         went on elsewhere, {} begun again, longest pause of a cut stream {} ms; {differing} \
         differences of streams, {} at rest",
        report.kills,
        report.chats,
        report.texts,
        report.hit,
        report.moved,
        report.begun_again,
        report.longest_pause.as_millis(),
        report.at_rest.len(),
    ))?;
    if !report.differences.is_empty() {
        let mut rows = table(&["difference", "what", "streams"]);
        for (kind, tally) in &report.differences {
            let count = tally.count.to_string();
            rows.add_row([kind.name(), kind.what(), &count]);
        }
        say(rows)?;
    }
    for (kind, tally) in &report.differences {
        for how in &tally.first {
            say(format_args!("{}: {how}", kind.name()))?;
        }
    }
    for how in &report.at_rest {
        say(format_args!("at rest: {how}"))?;
    }
    Ok(())
}
