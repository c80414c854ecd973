//! `quorate config check|print|schema|import|diff|apply|reload`: commands about the config.

use std::path::PathBuf;
use std::process::ExitCode;

use api::base::printable::escaped;
use clap::Subcommand;
use lab::terminal;
use serde_json::json;

use super::config_diff;
use super::config_reload;
use super::read::print_json;
use super::source::ConfigSource;
use crate::config::{
    ConfigErrors, ImportKind, foreign_variables, import, print, print_basic, schema,
};

/// Operations on a config.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Check a config and report every mistake
    Check {
        #[command(flatten)]
        source: ConfigSource,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the effective config and where each value comes from
    Print {
        #[command(flatten)]
        source: ConfigSource,
        /// Print the keys that a first production cluster needs, with their descriptions
        #[arg(long)]
        basic: bool,
        /// Print the values as JSON
        #[arg(long, conflicts_with = "basic")]
        json: bool,
    },
    /// Print the JSON Schema of config files
    Schema,
    /// Make a config from that of another router, with a report of what has no counterpart
    Import {
        /// Whose config it is
        kind: ImportKind,
        /// Its files; YAML if their names end in `.yaml` or `.yml`; `-` is standard input
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Compare a config with a running cluster: exits 0 without differences, 1 with some
    Diff(config_diff::DiffArgs),
    /// Apply a config to a running cluster, after showing the differences
    Apply(config_diff::ApplyArgs),
    /// Make all replicas that --admin names reload their own configs, as SIGHUP does
    Reload(config_reload::ReloadArgs),
}

/// Runs `quorate config ...`.
pub(super) fn run(command: ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Check {
            source,
            json: false,
        } => {
            let loaded = source.load()?;
            terminal::print(format_args!("{}: ok", loaded.file))?;
            for (name, ours) in foreign_variables() {
                eprintln!("warning: {name} is not read; here it is {ours}");
            }
        }
        ConfigCommand::Check { source, json: true } => return check(source),
        ConfigCommand::Print {
            mut source,
            basic: true,
            ..
        } => {
            source.set_placeholder_id();
            terminal::print(print_basic(&source.load()?).trim_end())?;
        }
        ConfigCommand::Print { source, json, .. } => {
            let loaded = source.load()?;
            if json {
                return print_json(&json!({ "file": loaded.file, "values": loaded.values }));
            }
            terminal::print(print(&loaded).trim_end())?;
        }
        ConfigCommand::Schema => terminal::print(serde_json::to_string_pretty(&schema())?)?,
        ConfigCommand::Import { kind, files } => {
            let imported = import(kind, &files)?;
            terminal::print(imported.config.trim_end())?;
            let told = [&imported.incomplete, &imported.refused, &imported.unknown];
            for told in told.into_iter().flatten() {
                eprintln!("warning: {}", escaped(told));
            }
            let (carried, left) = (imported.carried, imported.left);
            eprintln!("{carried} values carried over, {left} not: the config ends with their list");
        }
        ConfigCommand::Diff(args) => {
            return super::block_on(async { Ok(config_diff::diff(args).await) });
        }
        ConfigCommand::Reload(args) => return super::block_on(config_reload::reload(args)),
        ConfigCommand::Apply(args) => return super::block_on(config_diff::apply(args)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks a config and prints the result as JSON. Faults of the config are a result, not an error.
fn check(source: ConfigSource) -> anyhow::Result<ExitCode> {
    let error = match source.load() {
        Ok(loaded) => return print_json(&json!({ "file": loaded.file, "faults": [] })),
        Err(error) => error,
    };
    let Some(errors) = error.downcast_ref::<ConfigErrors>() else {
        return Err(error);
    };
    print_json(&json!({ "file": errors.file, "faults": super::faults(errors) }))?;
    Ok(ExitCode::from(2))
}
