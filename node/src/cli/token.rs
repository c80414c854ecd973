//! `quorate token`: makes tokens for the admin API.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use admin::{AdminRole, NewToken};
use anyhow::{Context, anyhow};
use lab::terminal;

/// Subcommands of `quorate token`.
#[derive(Debug, clap::Subcommand)]
pub(super) enum TokenCommand {
    /// Make a token, and print its secret, which is not stored anywhere, and its line for
    /// admin.tokens_file
    Create(CreateArgs),
}

/// Arguments of `quorate token create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateArgs {
    /// Name of its holder: letters, digits, `.`, `_`, `-` and `@`
    name: String,
    /// What its holder may do: `viewer` reads, `operator` changes routing, `admin` changes the
    /// cluster
    #[arg(long, value_name = "ROLE")]
    role: AdminRole,
    /// Write the secret to this new file, and print only the line
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs `quorate token ...`.
pub(super) fn run(command: TokenCommand) -> anyhow::Result<ExitCode> {
    let TokenCommand::Create(args) = command;
    let made = NewToken::draw(&args.name, args.role).map_err(|why| anyhow!("{why}"))?;
    let Some(out) = args.out else {
        terminal::print(format_args!("token  {}\nline   {}", made.secret, made.line))?;
        return Ok(ExitCode::SUCCESS);
    };
    SecretFile::create(&out)?.write(&made.secret)?;
    terminal::print(made.line)?;
    Ok(ExitCode::SUCCESS)
}

/// A new file for a secret, which only its owner can read. It is created before the secret, so that
/// every secret can be stored.
pub(super) struct SecretFile {
    path: PathBuf,
    file: File,
}

impl SecretFile {
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path);
        let file = file.with_context(|| format!("write {}", path.display()))?;
        let path = path.to_owned();
        Ok(Self { path, file })
    }

    pub(super) fn write(mut self, secret: &str) -> anyhow::Result<()> {
        let written = writeln!(self.file, "{secret}");
        written.with_context(|| format!("write {}", self.path.display()))
    }

    /// Removes the file because no secret was created.
    pub(super) fn discard(self) -> anyhow::Result<()> {
        let removed = std::fs::remove_file(&self.path);
        removed.with_context(|| format!("remove {}", self.path.display()))
    }
}
