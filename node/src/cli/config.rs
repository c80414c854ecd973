//! `quorate config check|print|schema`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use lab::terminal;

use crate::config::{Loaded, Origin, load, print, schema};

/// What to do with a config.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Check a config and report every mistake
    Check(ConfigSource),
    /// Print the effective config and where each value comes from
    Print(ConfigSource),
    /// Print the JSON Schema of config files
    Schema,
}

/// Where the config comes from; the same for all commands that need one.
#[derive(Debug, clap::Args)]
pub(super) struct ConfigSource {
    /// Config file in TOML
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Override a value of file and environment: `--set drain.deadline=10s`
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub(super) set: Vec<String>,
}

impl ConfigSource {
    /// Reads and checks the config.
    pub(super) fn load(self) -> anyhow::Result<Loaded> {
        Ok(load(&Origin::of_process(self.config, self.set))?)
    }
}

/// Runs the command.
pub(super) fn run(command: ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Check(args) => {
            let loaded = args.load()?;
            terminal::print(format_args!("{}: ok", loaded.file))?;
        }
        ConfigCommand::Print(args) => terminal::print(print(&args.load()?).trim_end())?,
        ConfigCommand::Schema => terminal::print(serde_json::to_string_pretty(&schema())?)?,
    }
    Ok(ExitCode::SUCCESS)
}
