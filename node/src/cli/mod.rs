//! The command line: names of the commands, and exit codes (0 success, 1 failure, 2 bad usage or
//! config, unless a command documents others). Results go to stdout, logs and errors to stderr.

mod audit;
mod backends;
mod backup;
mod cert;
mod client;
mod cluster;
mod config;
mod config_diff;
mod config_reload;
mod decisions;
mod edit;
mod engine_check;
mod events;
mod everywhere;
mod explain;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod groups;
mod inspect;
mod keys;
mod log_level;
mod man;
mod members;
mod read;
mod record;
mod recover;
mod reload;
mod serve;
mod sessions;
mod settings;
mod simulate;
mod source;
mod status;
mod table;
mod token;
mod top;
mod usage;
mod users;
mod watch;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::{Value, json};

use api::base::printable::escaped_lines;
use lab::terminal::{columns_of, is_coloured, print, show_all_columns};

use crate::config::{ConfigErrors, Place};
use crate::json_client::AnswerError;
use crate::{descriptors, telemetry};

/// A replicated router for LLM inference fleets.
#[derive(Debug, Parser)]
#[command(
    name = "quorate",
    version = crate::VERSION,
    propagate_version = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Show all columns of tables, even if the terminal is too narrow
    #[arg(long, global = true, help_heading = "Output")]
    wide: bool,
    #[command(subcommand)]
    command: CliCommand,
}

/// The commands, in the order of [`groups::GROUPS`], which shows them.
#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run one replica
    Serve(serve::ServeArgs),
    /// Run a demo cluster on loopback, with engines and a load test
    Dev(crate::dev::DevArgs),
    /// Show the cluster as a replica sees it
    Status(status::StatusArgs),
    /// Show replicas, backends and users, live
    Top(top::TopArgs),
    /// List backends; show, add, change, drain or remove one
    Backend(backends::BackendArgs),
    /// List users; show, change or delete one
    User(users::UserArgs),
    /// Show tokens and money by user, API key, model, day or tree
    Usage(usage::UsageArgs),
    /// List sessions of agents; show or end a tree of them
    Session(sessions::SessionArgs),
    /// Show where a request would go or went, and why
    Explain(explain::ExplainArgs),
    /// List the last decisions of a replica
    Decisions(decisions::DecisionsArgs),
    /// Follow what changes in the cluster
    Events(events::EventsArgs),
    /// Show or change the cluster's policy, routing and admission
    #[command(subcommand)]
    Settings(settings::SettingsCommand),
    /// List API keys of clients; create, rotate or revoke one
    Key(keys::KeyArgs),
    /// Check, print or apply a config, or compare it with a cluster
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Show or set the log level of running replicas
    LogLevel(log_level::LogLevelArgs),
    /// Add, promote or remove cluster members
    #[command(subcommand)]
    Member(cluster::MemberCommand),
    /// Transfer leadership to another replica
    TransferLeader(cluster::TransferLeaderArgs),
    /// Take a snapshot now
    Snapshot(cluster::SnapshotArgs),
    /// Back up the cluster's state to a file
    Backup(backup::BackupArgs),
    /// Replace the cluster's state with a backup
    Restore(backup::RestoreArgs),
    /// Set a damaged store aside so that the replica can rejoin
    Recover(recover::RecoverArgs),
    /// Show the state in a data directory or a backup, offline
    Inspect(inspect::InspectArgs),
    /// Show the last writes to the cluster and who made them
    Audit(audit::AuditArgs),
    /// Run an emulated vLLM engine
    Engine(lab::engine::EngineArgs),
    /// Show what an engine can do, and how Quorate will use it
    EngineCheck(engine_check::EngineCheckArgs),
    /// Replay a trace against replicas; report hit rate and latency
    Replay(lab::replay::ReplayArgs),
    /// Record requests, without texts and names, for `simulate`
    Record(record::RecordArgs),
    /// Compare policies, queue orders and cluster sizes, simulated
    Simulate(Box<simulate::SimulateCommand>),
    /// Make certificates for a cluster
    #[command(subcommand)]
    Cert(cert::CertCommand),
    /// Make tokens for the admin API
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// Print a shell completion script
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
    /// Print a manual page in roff, or write those of all commands
    Man(man::ManArgs),
}

/// Log filter of `quorate dev`: warnings of this program, but not of libraries. While all replicas
/// start, it is normal that one is in no cluster yet.
const DEV_LOG: &str = "warn,raft=error,openraft=off,sled=off,h2=off,hyper=off,tonic=off";

/// Runs the command in this process's arguments, and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let matches = command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if cli.wide {
        show_all_columns();
    }
    match run(cli) {
        Ok(code) => code,
        Err(error) if is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error, is_json(&matches));
            if is_refused_config(&error) || error.is::<lab::simulate::SimulateArgsError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Returns the command line, whose help lists the commands by group.
fn command() -> clap::Command {
    groups::grouped(Cli::command())
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        CliCommand::Config(command) => config::run(command),
        CliCommand::Cert(command) => cert::run(command),
        CliCommand::Recover(args) => recover::run(args),
        CliCommand::Token(command) => token::run(command),
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "quorate", &mut script);
            print(String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Man(args) => man::run(args, command()),
        CliCommand::Serve(args) => serve::run(args),
        CliCommand::Replay(args) => {
            // The temporary clusters of a comparison log little of interest.
            let quiet = "warn,raft::replica=error,raft::replica::peers=warn,openraft=off";
            telemetry::init_for_command(quiet)?;
            descriptors::raise();
            block_on(lab::replay::run::<crate::dev::fleet::Fleet>(args))
        }
        CliCommand::Simulate(args) => simulate::run(&args),
        CliCommand::Dev(args) => {
            telemetry::init_for_command(DEV_LOG)?;
            descriptors::raise();
            block_on(crate::dev::run(args))
        }
        CliCommand::Engine(args) => {
            telemetry::init_for_command("info")?;
            descriptors::raise();
            block_on(lab::engine::run(args))
        }
        CliCommand::EngineCheck(args) => block_on(engine_check::run(args)),
        CliCommand::Status(args) => block_on(status::watch_status(args)),
        CliCommand::Top(args) => block_on(top::run(args)),
        CliCommand::Backend(args) => block_on(backends::run(args)),
        CliCommand::User(args) => block_on(users::run(args)),
        CliCommand::Usage(args) => block_on(usage::run(args)),
        CliCommand::Session(args) => block_on(sessions::run(args)),
        CliCommand::Key(args) => block_on(keys::run(args)),
        CliCommand::Settings(command) => block_on(settings::run(command)),
        CliCommand::Record(args) => block_on(record::run(args)),
        CliCommand::Events(args) => block_on(events::run(args)),
        CliCommand::Audit(args) => block_on(audit::run(args)),
        CliCommand::Explain(args) => block_on(explain::run(args)),
        CliCommand::Decisions(args) => block_on(decisions::list(args)),
        CliCommand::LogLevel(args) => block_on(log_level::run(args)),
        CliCommand::Inspect(args) => block_on(inspect::run(args)),
        CliCommand::Member(command) => block_on(cluster::member(command)),
        CliCommand::TransferLeader(args) => block_on(cluster::transfer_leader(args)),
        CliCommand::Snapshot(args) => block_on(cluster::snapshot(args)),
        CliCommand::Backup(args) => block_on(backup::backup(args)),
        CliCommand::Restore(args) => block_on(backup::restore(args)),
    }
}

/// Runs an asynchronous command on a new runtime.
fn block_on(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(command)
}

/// Whether a command failed because its output is no longer read, as in a pipe to `head`.
fn is_reader_gone(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Whether the config has faults or does not match the store that it names, which no restart fixes.
fn is_refused_config(error: &anyhow::Error) -> bool {
    let start = error.downcast_ref::<raft::StartError>();
    error.is::<ConfigErrors>() || matches!(start, Some(raft::StartError::WrongStore(_)))
}

/// Whether the command was asked to print JSON.
fn is_json(matches: &ArgMatches) -> bool {
    match matches.subcommand() {
        Some((_, of_command)) => is_json(of_command),
        None => matches!(matches.try_get_one::<bool>("json"), Ok(Some(true))),
    }
}

/// Reports why a command failed: as text, or as JSON on one line.
fn report(error: &anyhow::Error, is_json: bool) {
    match error.downcast_ref::<ConfigErrors>() {
        _ if is_json => eprintln!("{}", read::shown(&error_json(error).to_string())),
        Some(errors) => {
            let stderr = std::io::stderr();
            eprint!(
                "{}",
                errors.render(is_coloured(&stderr), columns_of(&stderr))
            );
        }
        None => eprintln!("{}", escaped_lines(&format!("error: {}", told(error)))),
    }
}

fn error_json(error: &anyhow::Error) -> Value {
    if let Some(errors) = error.downcast_ref::<ConfigErrors>() {
        let file = &errors.file;
        return json!({ "error": format!("{file} has faults"), "faults": faults(errors) });
    }
    let mut out = json!({ "error": told(error) });
    if let Some(answer) = error.downcast_ref::<AnswerError>() {
        out["status"] = json!(answer.status.as_u16());
        out["problem"] = answer.problem.clone();
    }
    out
}

/// Returns the faults of a config as JSON.
fn faults(errors: &ConfigErrors) -> Value {
    let fault = |error: &crate::config::ConfigError| {
        let place = match &error.place {
            Place::File(span) => json!(errors.line(span.start)),
            Place::Variable(name) => json!(name),
            Place::Flag(flag) => json!(format!("--set {flag}")),
            Place::Backend(url) => json!(format!("--backend {url}")),
            Place::Nowhere => Value::Null,
        };
        json!({ "message": error.message, "expected": error.expected, "place": place })
    };
    errors.errors.iter().map(fault).collect()
}

/// Formats an error with its causes. Skips causes that the message already contains.
fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn an_error_cause_is_printed_once() {
        let full = || std::io::Error::other("no space left");
        let error = anyhow::Error::from(full()).context("open store: no space left");
        assert_eq!(told(&error), "open store: no space left");
        let error = anyhow::Error::from(full()).context("open store");
        assert_eq!(told(&error), "open store: no space left");
    }
}
