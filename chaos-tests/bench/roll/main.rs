//! Checks that clients do not notice a rolling update of engines found by DNS: `cargo run --release
//! -p chaos-tests --bin roll`. See docs/guide/discovery.md. Needs dnsmasq.

mod fleet;

use std::process::ExitCode;

use chaos_tests::terminal::{self, say, table};
use clap::Parser;
use fleet::{RollOptions, RollRecords};

/// Replace a fleet of engines behind a DNS name, some at a time, under load
#[derive(Debug, Parser)]
struct RollArgs {
    /// Number of engines, 1 to 200
    #[arg(long, value_name = "N", default_value_t = 64)]
    engines: u8,
    /// Engines replaced at a time
    #[arg(long, value_name = "N", default_value_t = 8)]
    at_once: u8,
    /// How many times all of them are replaced
    #[arg(long, value_name = "N", default_value_t = 2)]
    rolls: u8,
    /// Number of requests served between two steps
    #[arg(long, value_name = "N", default_value_t = 300)]
    requests: u64,
    /// Do not kill the leader in the middle of the last roll
    #[arg(long)]
    keep_leader: bool,
    /// DNS records of the engines: `srv` has service records, with addresses of both families
    #[arg(long, value_enum, default_value_t = RollRecords::A)]
    records: RollRecords,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = RollArgs::parse();
    terminal::run(run(args))
}

async fn run(args: RollArgs) -> anyhow::Result<ExitCode> {
    let reports = fleet::run(RollOptions {
        engines: args.engines,
        at_once: args.at_once,
        rolls: args.rolls,
        requests: args.requests,
        is_leader_killed: !args.keep_leader,
        records: args.records,
    })
    .await?;
    if args.json {
        say(serde_json::to_string_pretty(&reports)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = table(&[
        "roll",
        "answered",
        "failed",
        "lost with a replica",
        "cached",
        "recalled",
        "took",
    ]);
    for report in &reports {
        rows.add_row([
            report.roll.to_string(),
            report.answered.to_string(),
            report.failed.to_string(),
            report.lost.to_string(),
            format!("{:.1} %", report.hit_percent),
            report.recalled.to_string(),
            format!("{:.0} s", report.took_s),
        ]);
    }
    say(rows)?;
    say("recalled: prompts whose engine stayed through a step, known to every replica afterwards")?;
    Ok(ExitCode::SUCCESS)
}
