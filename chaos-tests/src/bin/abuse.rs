//! Runs attacks on a cluster of real processes, one at a time, with an honest client beside most of
//! them. See docs/internals/testing.md.

use std::process::ExitCode;

use chaos_tests::hostile::abuse::{self, AbuseOptions, AttackKind, AttackReport};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;

/// Attack a cluster, and check that honest clients are served and nothing is left behind
#[derive(Debug, Parser)]
struct AbuseArgs {
    /// Use TLS everywhere, an operator's token and API keys
    #[arg(long)]
    secure: bool,
    /// Attacks, separated by commas; default: all
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = AttackKind::named)]
    only: Vec<AttackKind>,
    /// Size of floods, as a multiple of that in `cargo test`; 1000 means a million user names
    #[arg(long, value_name = "N", default_value_t = 10)]
    scale: usize,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// List the attacks
    #[arg(long)]
    list: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = AbuseArgs::parse();
    if args.list {
        let mut table = table(&["attack", "what"]);
        for kind in AttackKind::ALL {
            table.add_row([kind.name(), kind.what()]);
        }
        say(table)?;
        return Ok(ExitCode::SUCCESS);
    }
    terminal::run(run(&args))
}

async fn run(args: &AbuseArgs) -> anyhow::Result<ExitCode> {
    let options = AbuseOptions {
        is_secure: args.secure,
        only: args.only.clone(),
        scale: args.scale,
    };
    let told = |report: &AttackReport| eprintln!("{}: {:?}", report.kind.name(), report.took);
    let reports = abuse::run(&options, told).await?;
    if args.json {
        say(serde_json::to_string_pretty(&reports)?)?;
    } else {
        print(&reports)?;
    }
    let is_clean = reports.iter().all(|report| report.violation.is_none());
    Ok(terminal::exit_code(is_clean))
}

fn print(reports: &[AttackReport]) -> anyhow::Result<()> {
    let mut rows = table(&[
        "attack",
        "",
        "took s",
        "ends",
        "honest",
        "longest ms",
        "grown MiB",
    ]);
    for report in reports {
        let ends = report
            .ends
            .iter()
            .map(|(how, times)| format!("{how} {times}"));
        rows.add_row([
            report.kind.name().to_owned(),
            report
                .violation
                .as_ref()
                .map_or("held", |_| "VIOLATED")
                .to_owned(),
            format!("{:.1}", report.took.as_secs_f64()),
            ends.collect::<Vec<_>>().join(", "),
            report.honest.to_string(),
            report.honest_longest.as_millis().to_string(),
            (report.grown_bytes >> 20).to_string(),
        ]);
    }
    say(rows)?;
    for report in reports {
        if let Some(violation) = &report.violation {
            say(format_args!("{}: {violation}", report.kind.name()))?;
        }
    }
    Ok(())
}
