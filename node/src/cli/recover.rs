//! `quorate recover`: moves a store aside, usually a damaged one, so that the replica can be
//! rebuilt. Deletes nothing.

use std::process::ExitCode;

use anyhow::Context;
use lab::terminal;
use serde_json::json;

use super::read::print_json;
use super::source::ConfigSource;

/// Arguments of `quorate recover`.
#[derive(Debug, clap::Args)]
pub(super) struct RecoverArgs {
    #[command(flatten)]
    config: ConfigSource,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `quorate recover`: moves the store aside and prints the next steps.
pub(super) fn run(args: RecoverArgs) -> anyhow::Result<ExitCode> {
    let config = args.config.load()?.config;
    let data_dir = &config.node.data_dir;
    let aside = raft::set_store_aside(data_dir)
        .with_context(|| format!("set the store below {} aside", data_dir.display()))?;
    if args.json {
        return print_json(&json!({ "id": config.id.0, "store": data_dir, "aside": aside }));
    }
    let Some(aside) = aside else {
        terminal::print(format_args!(
            "no store below {}, nothing to do",
            data_dir.display()
        ))?;
        return Ok(ExitCode::SUCCESS);
    };
    let id = config.id;
    if config.cluster.replace_lost {
        terminal::print(format_args!(
            "The store of replica {id} is now at {}. Start the replica: it rejoins under its id \
             (cluster.replace_lost)",
            aside.display()
        ))?;
        return Ok(ExitCode::SUCCESS);
    }
    terminal::print(format_args!(
        "The store of replica {id} is now at {}. To rebuild the replica from its peers:\n\
         \n\
         1. set node.id to a number that no replica ever had, NEW\n\
         2. quorate serve\n\
         3. quorate member replace {id} --as NEW --admin URL-OF-ANOTHER-REPLICA",
        aside.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
