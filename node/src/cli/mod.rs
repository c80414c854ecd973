//! The command line: names of the commands, and exit codes (0 done, 1 failed, 2 bad usage or
//! config). Results go to stdout, logs and errors to stderr.

mod backup;
mod client;
mod cluster;
mod config;
mod decisions;
mod explain;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod log;
mod read;
mod recover;
mod reload;
mod serve;
mod settings;
mod source;
mod table;

use std::io::{ErrorKind, IsTerminal};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use api::shown::escaped_lines;
use lab::terminal::print;

use crate::config::ConfigErrors;
use crate::{descriptors, telemetry};

/// A replicated router for LLM inference fleets.
#[derive(Debug, Parser)]
#[command(
    name = "quorate",
    version,
    propagate_version = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run a demo cluster on loopback: three replicas, emulated engines and a load test
    Dev(crate::dev::DevArgs),
    /// Run one replica
    Serve(serve::ServeArgs),
    /// Run an emulated vLLM engine
    Engine(lab::engine::EngineArgs),
    /// Replay a recorded trace against running replicas and report hit rates and latencies
    Replay(lab::replay::ReplayArgs),
    /// Compare policies, queue orders and cluster sizes in a simulation
    Simulate(Box<lab::simulate::SimulateArgs>),
    /// Check or print a config, or compare it with a running cluster
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Show the cluster as a replica sees it
    Status(read::ReadArgs),
    /// List backends
    Backends(read::ReadArgs),
    /// List users
    Users(read::ReadArgs),
    /// Show where a request would go or went, and why
    Explain(explain::ExplainArgs),
    /// List the last decisions of a replica
    Decisions(decisions::DecisionsArgs),
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
    /// Look at the log of a stopped replica
    #[command(subcommand)]
    Log(log::LogCommand),
    /// Set a damaged store aside so that the replica can rejoin under a new id
    Recover(recover::RecoverArgs),
    /// Print a shell completion script
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
    /// Print the manual page in roff
    Man,
}

/// Runs the command with which this process was started.
#[must_use]
pub fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) if is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            if error.is::<ConfigErrors>() || error.is::<lab::simulate::SimulateArgsError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        CliCommand::Config(command) => config::run(command),
        CliCommand::Recover(args) => recover::run(args),
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "quorate", &mut script);
            print(String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Man => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page)?;
            print(String::from_utf8_lossy(&page))?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Serve(args) => serve::run(args),
        CliCommand::Replay(args) => {
            // The temporary clusters of a comparison have little to log about it.
            let quiet = "warn,raft::replica=error,raft::replica::peers=warn,openraft=off";
            telemetry::init_for_command(quiet)?;
            descriptors::raise();
            block_on(lab::replay::run::<crate::dev::fleet::Fleet>(args))
        }
        CliCommand::Simulate(args) => lab::simulate::run(&args),
        CliCommand::Dev(args) => {
            telemetry::init_for_command("warn,raft::replica::change=error")?;
            descriptors::raise();
            block_on(crate::dev::run(args))
        }
        CliCommand::Engine(args) => {
            telemetry::init_for_command("info")?;
            descriptors::raise();
            block_on(lab::engine::run(args))
        }
        CliCommand::Status(args) => block_on(read::status(args)),
        CliCommand::Backends(args) => block_on(read::backends(args)),
        CliCommand::Users(args) => block_on(read::users(args)),
        CliCommand::Explain(args) => block_on(explain::run(args)),
        CliCommand::Decisions(args) => block_on(decisions::list(args)),
        CliCommand::Log(command) => block_on(log::run(command)),
        CliCommand::Member(command) => block_on(cluster::member(command)),
        CliCommand::TransferLeader(args) => block_on(cluster::transfer_leader(args)),
        CliCommand::Snapshot(args) => block_on(cluster::snapshot(args)),
        CliCommand::Backup(args) => block_on(backup::backup(args)),
        CliCommand::Restore(args) => block_on(backup::restore(args)),
    }
}

/// Runs an asynchronous command on a runtime of its own.
fn block_on(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(command)
}

/// Whether a command ended because its output is no longer read, as in a pipe to `head`.
fn is_reader_gone(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

fn report(error: &anyhow::Error) {
    match error.downcast_ref::<ConfigErrors>() {
        Some(errors) => eprint!("{}", errors.render(std::io::stderr().is_terminal())),
        None => eprintln!("{}", escaped_lines(&format!("error: {error:#}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
