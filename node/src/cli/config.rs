//! `quorate config check|print|schema|diff|apply`.

use std::process::ExitCode;

use clap::Subcommand;
use lab::terminal;

use super::settings;
use super::source::ConfigSource;
use crate::config::{print, schema};

/// What to do with a config.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Check a config and report every mistake
    Check(ConfigSource),
    /// Print the effective config and where each value comes from
    Print(ConfigSource),
    /// Print the JSON Schema of config files
    Schema,
    /// Compare a config with a running cluster: exits 0 without differences, 1 with some
    Diff(settings::DiffArgs),
    /// Put the values of a config into a running cluster, after showing the differences
    Apply(settings::ApplyArgs),
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
        ConfigCommand::Diff(args) => {
            return super::block_on(async { Ok(settings::diff(args).await) });
        }
        ConfigCommand::Apply(args) => return super::block_on(settings::apply(args)),
    }
    Ok(ExitCode::SUCCESS)
}
