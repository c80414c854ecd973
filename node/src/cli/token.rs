//! `quorate token`: makes tokens for the admin API.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use api::admin::{AdminRole, NewToken};
use lab::terminal;

/// `quorate token`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum TokenCommand {
    /// Make a token: prints its secret, which is kept nowhere, and its line for admin.tokens_file
    Create(CreateArgs),
}

/// `quorate token create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateArgs {
    /// Who will hold it: letters, digits, `.`, `_`, `-` and `@`
    name: String,
    /// What its holder may do: `viewer` reads, `operator` changes routing, `admin` changes the
    /// cluster
    #[arg(long, value_name = "ROLE")]
    role: AdminRole,
    /// Write the secret to this new file instead, so that only the line is printed
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(super) fn run(command: TokenCommand) -> anyhow::Result<ExitCode> {
    let TokenCommand::Create(args) = command;
    let made = NewToken::draw(&args.name, args.role).map_err(|why| anyhow!("{why}"))?;
    let Some(out) = args.out else {
        terminal::print(format_args!("token  {}\nline   {}", made.secret, made.line))?;
        return Ok(ExitCode::SUCCESS);
    };
    write_secret(&out, &made.secret)?;
    terminal::print(made.line)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a secret to a new file that only its owner can read.
pub(super) fn write_secret(out: &Path, secret: &str) -> anyhow::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(out);
    let written = file.and_then(|mut file| writeln!(file, "{secret}"));
    written.with_context(|| format!("write {}", out.display()))
}
