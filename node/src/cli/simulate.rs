//! `quorate simulate`: runs simulations, also of decisions fetched from replicas.

use std::process::ExitCode;

use lab::simulate::{self, SimulateArgs};

use super::client::AdminTarget;
use super::record;

/// Arguments of `quorate simulate`.
#[derive(Debug, clap::Args)]
pub(super) struct SimulateCommand {
    #[command(flatten)]
    args: SimulateArgs,
    #[command(
        flatten,
        next_help_heading = "Replicas to ask for their last decisions"
    )]
    target: AdminTarget,
}

/// Runs `quorate simulate`.
pub(super) fn run(command: &SimulateCommand) -> anyhow::Result<ExitCode> {
    let fetched = match command.args.urls() {
        Some(urls) => {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()?;
            Some(runtime.block_on(record::last(&command.target, urls))?)
        }
        None => None,
    };
    simulate::run(&command.args, fetched)
}
