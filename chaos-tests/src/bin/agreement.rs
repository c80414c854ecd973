//! Program that checks whether explanations, decisions and their records agree in a real cluster:
//! `cargo run --release -p chaos-tests --bin agreement`.

use chaos_tests::processes::agreement::{self, AgreementTally};
use clap::Parser;
use comfy_table::{Table, presets};

/// Explains, sends and looks up random requests over all policies, users and replicas.
#[derive(Debug, Clone, Parser)]
struct AgreementArgs {
    /// Number of requests.
    #[arg(long, default_value_t = 10_000)]
    requests: u64,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use TLS everywhere, an operator's token and API keys.
    #[arg(long)]
    secure: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = AgreementArgs::parse();
    let tallies = agreement::run(args.requests, args.seed, args.secure).await?;
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(["policy", "agreed", "decided upon other numbers"]);
    let mut sum = AgreementTally::default();
    for (policy, tally) in &tallies {
        sum.agreed += tally.agreed;
        sum.moved += tally.moved;
        let row = [
            (*policy).to_owned(),
            tally.agreed.to_string(),
            tally.moved.to_string(),
        ];
        table.add_row(row);
    }
    println!(
        "{} requests, {} agreed, {} decided upon other numbers, 0 contradicted\n{table}",
        args.requests, sum.agreed, sum.moved
    );
    Ok(())
}
