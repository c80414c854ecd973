//! `quorate audit`: shows who made which administrative writes.

use std::process::ExitCode;

use lab::terminal::{self, FittedTable, column};
use serde_json::Value;

use super::decisions::time;
use super::read::{ReadArgs, print_json};
use super::table::cell;

/// Arguments of `quorate audit`.
#[derive(Debug, clap::Args)]
pub(super) struct AuditArgs {
    /// Show the calls to this replica instead, including refused ones
    #[arg(long)]
    calls: bool,
    /// Maximum number of entries
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    #[command(flatten)]
    read: ReadArgs,
}

/// Runs `quorate audit`.
pub(super) async fn run(args: AuditArgs) -> anyhow::Result<ExitCode> {
    let path = format!("/admin/v1/audit?limit={}", args.limit);
    let answer = args.read.target.get(&path).await?;
    if args.read.json {
        return print_json(&answer);
    }
    let table = match args.calls {
        true => calls(&answer),
        false => writes(&answer),
    };
    terminal::print(table)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns a table of the committed writes, newest first. Only the called replica knows the
/// operators.
fn writes(answer: &Value) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("time"),
        column("index").number(),
        column("action"),
        column("subject"),
        column("replica").number().rank(2),
        column("who").rank(1),
        column("from").rank(1),
    ]);
    for write in answer["writes"].as_array().map_or(&[][..], Vec::as_slice) {
        let fields = ["index", "action", "subject", "replica", "who", "from"];
        let cells = fields.map(|field| match write[field].as_str() {
            Some("") => "-".to_owned(),
            _ => cell(&write[field]),
        });
        table.add_row([time(&write["at_ms"])].into_iter().chain(cells));
    }
    table
}

/// Returns a table of this replica's calls that require more than read access, newest first.
fn calls(answer: &Value) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("time").rank(2),
        column("method"),
        column("path"),
        column("status").number(),
        column("index").number().rank(3),
        column("who").rank(1),
        column("role").rank(3),
        column("from").rank(2),
    ]);
    for call in answer["calls"].as_array().map_or(&[][..], Vec::as_slice) {
        let fields = ["method", "path", "status", "index", "who", "role", "from"];
        let cells = fields.map(|field| cell(&call[field]));
        table.add_row([time(&call["at_ms"])].into_iter().chain(cells));
    }
    table
}
