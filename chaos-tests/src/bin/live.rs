//! Checks predictions against real engines: `cargo run --release -p chaos-tests --bin live --
//! --engine http://127.0.0.1:8100`. See docs/guide/engines.md.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use chaos_tests::live::{self, LiveOptions, RowReport};
use chaos_tests::terminal::{self, say, table};
use clap::Parser;

/// Compare the predictions of three replicas with what real engines find cached
#[derive(Debug, Parser)]
struct LiveArgs {
    /// Engine to use, whose cache may be reset; may be repeated
    #[arg(long = "engine", value_name = "URL", required = true, value_parser = engine)]
    engines: Vec<SocketAddr>,
    /// Shell command that starts engine $N (0, 1, ...) if it does not respond, and again after it
    /// was killed
    #[arg(long, value_name = "COMMAND")]
    start: Option<String>,
    /// Directory for the output of started engines
    #[arg(long, value_name = "DIR", default_value = ".")]
    logs: PathBuf,
    /// Endpoint at which engine $N publishes KV events, if it does not report one (vLLM 0.12)
    #[arg(long, value_name = "ENDPOINT", requires = "kv_replay")]
    kv_events: Option<String>,
    /// Endpoint at which engine $N replays KV events
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_replay: Option<String>,
    /// tokenizer.json of the model, with its chat template beside it
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Number of responses in each row
    #[arg(long, value_name = "N", default_value_t = 500)]
    requests: u64,
    /// Minimum time from a response to the next turn of its chat, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 200)]
    pause: u64,
    /// Only rows whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// File to append each response to: times, prompt, and predicted and cached tokens
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

fn engine(text: &str) -> Result<SocketAddr, String> {
    let address = text.strip_prefix("http://").unwrap_or(text);
    let address = address.trim_end_matches('/').parse();
    address.map_err(|_| "expected http://ADDRESS:PORT".to_owned())
}

fn main() -> anyhow::Result<ExitCode> {
    let args = LiveArgs::parse();
    terminal::run(run(args))
}

async fn run(args: LiveArgs) -> anyhow::Result<ExitCode> {
    let options = LiveOptions {
        engines: args.engines,
        start: args.start,
        logs: args.logs,
        kv_events: args
            .kv_events
            .zip(args.kv_replay)
            .map(|(events, replay)| [events, replay]),
        tokenizer: args.tokenizer,
        requests: args.requests,
        pause: Duration::from_millis(args.pause),
        record: args.record,
        only: args.only,
    };
    let told = |row: &RowReport| {
        eprintln!("{}: {} of {} equal", row.name, row.equal, row.requests);
        row.faults.iter().for_each(|fault| eprintln!("  {fault}"));
    };
    let reports = live::run(&options, told).await?;
    if args.json {
        say(serde_json::to_string_pretty(&reports)?)?;
    } else {
        print(&reports)?;
    }
    let is_met = !reports.is_empty() && reports.iter().all(|row| row.is_met);
    Ok(terminal::exit_code(is_met))
}

fn print(reports: &[RowReport]) -> anyhow::Result<()> {
    let mut rows = table(&[
        "",
        "engines",
        "requests",
        "failed",
        "cached",
        "equal",
        "above",
        "below",
        "within 10 %",
        "mean error",
        "goal",
        "",
    ]);
    let percent =
        |part: u64, whole: u64| format!("{:.2} %", 100.0 * part as f64 / whole.max(1) as f64);
    for row in reports {
        rows.add_row([
            row.name.to_owned(),
            row.engines.to_string(),
            row.requests.to_string(),
            row.failed.to_string(),
            percent(row.cached_tokens, row.prompt_tokens),
            percent(row.equal, row.requests),
            row.off[0].to_string(),
            row.off[1].to_string(),
            percent(row.near, row.requests),
            percent(row.wrong_tokens, row.prompt_tokens),
            percent(row.goal, 10_000),
            if row.is_met { "met" } else { "MISSED" }.to_owned(),
        ]);
    }
    say(rows)
}
